"""Every GEMM kernel that this library declares.

A `Gemm` says what is computed: the operation, the types, the layout, the epilogue. A kernel is a `Gemm` with one of its
tiles, and its name is derived from the two. That name is the file, the profiler's symbol, the `kernel=` argument, the
test id and the row in a benchmark. `tools/emit.py` turns a `Kernel` into its source, `plan.py` chooses among them.

To add a kernel, add a tile to a declaration below, or a declaration with its tiles. Nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Tile:
    """A CUTLASS 3.x kernel: TMA, wgmma, and an epilogue that stores through TMA.

    `m`, `n`, `k` and `cluster` are the MMA's sides; with `swap` the weight's n runs along the MMA's m side. A pingpong
    kernel is persistent and gives each of its two consumer warpgroups a tile of its own, a cooperative one halves the
    tile's m between them. A warpspecialized one has one consumer and one tile a CTA, and so starts and ends sooner:
    for tiles that all run at once. With `split` the parts of k are computed side by side and added by a second launch,
    in order.
    """

    m: int
    n: int
    k: int
    cluster: tuple[int, int] = (1, 1)
    schedule: str = "pingpong"
    swap: bool = False
    split: bool = False

    @property
    def splits(self) -> bool:
        """Whether parts of k may be computed side by side, see Options.split."""
        return self.split

    def __str__(self) -> str:
        name = f"{self.m}x{self.n}x{self.k}_{self.cluster[0]}x{self.cluster[1]}_{self.schedule}"
        return name + "_swap" * self.swap + "_split" * self.split


@dataclass(frozen=True)
class Decode:
    """csrc/decode.cuh: up to `tokens` rows of a, a cluster for a tile of the weight.

    A tile is up to `rows` of the weight. Where they are fewer than the MMA's 64 it is folded: as many parts of k as fit
    stand in one MMA.
    """

    tokens: int
    rows: int = 64

    @property
    def folded(self) -> bool:
        return self.rows < 64

    @property
    def splits(self) -> bool:
        return not self.folded

    def __str__(self) -> str:
        return f"decode{self.tokens}" + f"x{self.rows}" * (self.rows != 64)


@dataclass(frozen=True)
class Blockwise:
    """csrc/gemm_blockwise.cuh, for scales of 128 k each: tiles of m rows of a and n rows of the weight.

    cluster: so many tiles along m and n, which share the operands' loads. columns: b has a scale for each column, in
    place of one for 128. gated: d is silu of the first half of its columns times the second, and a tile has n / 2
    columns of each.
    """

    m: int
    n: int
    cluster: tuple[int, int] = (1, 1)
    columns: bool = False
    gated: bool = False

    @property
    def splits(self) -> bool:
        """The largest have no registers left for it."""
        return self.cluster == (1, 1) and not self.gated and self.m * self.n <= 128 * 144

    @property
    def width(self) -> int:
        """Of d."""
        return self.n // 2 if self.gated else self.n

    @property
    def quantizes(self) -> bool:
        """Whether d may be codes: a tile has the 128 columns of a fresh scale, and registers left."""
        return self.width == 128 and self.m <= 128

    def __str__(self) -> str:
        name = f"{self.m}x{self.n}x128_{self.cluster[0]}x{self.cluster[1]}"
        return name + "_columns" * self.columns + "_gated" * self.gated


@dataclass(frozen=True)
class MixedInput:
    """csrc/gemm_mixed.cuh, for a weight of four or eight bits: tiles of `rows` of it and `tokens` of x.

    gated: as in Blockwise, and a tile has rows / 2 of gates and as many of what they gate. rounded: a value of the
    weight is rounded to x's type before it is multiplied, where otherwise it is exact.

    With a split, up to so many CTAs make a tile together, each of its own k: for 32 tokens and exact values those of a
    cluster, else all that the last wave of tiles would leave without work.
    """

    rows: int
    tokens: int
    gated: bool = False
    rounded: bool = False

    @property
    def splits(self) -> bool:
        return True

    @property
    def in_clusters(self) -> bool:
        return self.tokens == 32 and not self.rounded

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}" + "_rounded" * self.rounded + "_gated" * self.gated


@dataclass(frozen=True)
class Sm80:
    """csrc/gemm_sm80.cuh, for a weight of four or eight bits: mma.sync and cp.async, which GPUs have from Ampere on.

    A tile is up to `rows` of the weight and `tokens` of x. Where options don't say it, the launcher decides how many
    rows, and how many parts of k, which a second launch adds. rounded: as in MixedInput.
    """

    rows: int
    tokens: int
    rounded: bool = False

    @property
    def splits(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"sm80_{self.rows}x{self.tokens}" + "_rounded" * self.rounded


@dataclass(frozen=True)
class AnyShape:
    """csrc/gemm_any.cuh: every size, stride and alignment, at mma.sync's speed."""

    @property
    def splits(self) -> bool:
        return False

    def __str__(self) -> str:
        return "any"


Tiles = Tile | Decode | Blockwise | MixedInput | Sm80 | AnyShape

# The scales of an INT4 weight, with how many k are summed before they are applied. Those of "group64" are for groups of
# 64, 128 or any multiple of it, and for one of all k. "_minimum": zeros are minima, of groups of every size.
STEPS = {"group32": 32, "group64": 64, "group128": 128, "group32_minimum": 32}


@dataclass(frozen=True)
class Gemm:
    """What a family of kernels computes: d = epilogue(a @ b).

    `a`, `b`, `d` are types by name; a kernel with `d` empty takes every type of d at launch. `layout` is BLAS's: a
    letter for a and one for b, t for row-major and n for column-major. "tn", the default, is a row-major a and the
    transposed view `w.t()` of a row-major weight. scales: "block" if each 128 k have scales of their own, which are
    then no operands of the epilogue; of an INT4 b one of STEPS.
    """

    op: str
    a: str
    b: str
    d: str
    epilogue: str
    tiles: tuple[Tiles, ...]
    layout: str = "tn"
    fast_accum: bool = False
    scales: str = ""

    def __post_init__(self) -> None:
        if len(set(self.tiles)) != len(self.tiles):
            raise ValueError(f"{self.op} {self.a} {self.b} {self.d}: a tile is declared twice")
        if self.layout not in ("tn", "tt", "nt", "nn"):
            raise ValueError(f"{self.op}: layout is {self.layout!r} and must be tn, tt, nt or nn")

    @property
    def accumulator(self) -> str:
        """The type of the tensor core's sums."""
        return "int32" if self.a == "int8" else "fp32"

    @property
    def minimum(self) -> bool:
        return self.scales.endswith("_minimum")


@dataclass(frozen=True)
class Kernel:
    """One kernel file."""

    gemm: Gemm
    tile: Tiles

    @cached_property
    def name(self) -> str:
        gemm = self.gemm
        parts = [gemm.op, gemm.a, gemm.b, gemm.d, gemm.layout.replace("tn", ""), "fast" * gemm.fast_accum, gemm.scales]
        return "_".join([part for part in parts if part] + [str(self.tile)])


ANY = (AnyShape(),)
DECODE = (Decode(8), Decode(16), Decode(32))
DECODE_FOLDED = (Decode(8, 16), Decode(16, 16), Decode(8, 8), Decode(16, 8), Decode(2, 16), Decode(1, 8))
BLOCKWISE = (
    Blockwise(256, 128, (1, 2)),
    Blockwise(128, 192, (2, 1)),
    Blockwise(128, 192),
    Blockwise(128, 160),
    Blockwise(128, 144),
    Blockwise(128, 128, (2, 1)),
    Blockwise(128, 128),
    Blockwise(128, 112),
    Blockwise(128, 96, (1, 2)),
    Blockwise(128, 96),
    Blockwise(128, 64, (1, 2)),
    Blockwise(128, 64),
    Blockwise(128, 48, (1, 2)),
    Blockwise(64, 192),
    Blockwise(64, 144),
    Blockwise(64, 128),
    Blockwise(64, 112),
    Blockwise(64, 96),
    Blockwise(64, 64, (1, 2)),
    Blockwise(64, 64),
    Blockwise(64, 48, (1, 2)),
    Blockwise(64, 32, (1, 2)),
    Blockwise(64, 32),
    Blockwise(128, 64, columns=True),
    Blockwise(128, 256, (2, 1), gated=True),
    Blockwise(64, 256, gated=True),
)

# Up to 256 tokens what counts is that the tiles fill the 132 multiprocessors once, and no second wave starts for a few
# of them: hence widths like 96, 112 and 144, which divide the usual n into just under 132 parts. A pair of CTAs along
# one side shares the tile of the other, which L2 would have to deliver twice.
FP8_NARROW = (
    Tile(64, 32, 256, swap=True),
    Tile(64, 64, 256, swap=True),
    Tile(64, 64, 256, (2, 1), swap=True),
    Tile(64, 64, 256, (1, 1), "warpspecialized", swap=True),
    Tile(64, 64, 256, (1, 2), "warpspecialized", swap=True),
    Tile(64, 128, 128, (1, 2), swap=True),
    Tile(64, 256, 128, (2, 1), swap=True),
    Tile(128, 64, 128, (1, 2), swap=True),
    Tile(64, 64, 256, swap=True, split=True),
)
FP8_WIDE = (
    Tile(64, 128, 128),
    Tile(64, 144, 128, (1, 2)),
    Tile(64, 192, 128, (2, 1), "warpspecialized"),
    Tile(128, 96, 128, (1, 2)),
    Tile(128, 96, 128, (1, 2), "warpspecialized"),
    Tile(128, 112, 128, (1, 2)),
    Tile(128, 112, 128, (1, 2), "warpspecialized"),
    Tile(128, 128, 128, (2, 1)),
    Tile(128, 128, 128, (1, 2)),
    Tile(128, 144, 128, (2, 1)),
    Tile(128, 176, 128, (2, 1)),
    Tile(128, 192, 128, (2, 1), "cooperative"),
    Tile(256, 128, 128, (2, 1), "cooperative"),
    Tile(128, 128, 128, (2, 1), split=True),
)
BF16_NARROW = (
    Tile(64, 32, 128, swap=True),
    Tile(64, 32, 128, (1, 2), swap=True),
    Tile(64, 64, 128, swap=True),
    Tile(64, 64, 128, (2, 1), swap=True),
    Tile(64, 64, 128, (1, 1), "warpspecialized", swap=True),
    Tile(64, 64, 128, (1, 2), "warpspecialized", swap=True),
    Tile(64, 128, 64, (1, 2), "warpspecialized", swap=True),
    Tile(64, 256, 64, (2, 1), swap=True),
    Tile(128, 64, 64, (1, 2), swap=True),
    Tile(64, 128, 64, swap=True, split=True),
)
BF16_WIDE = (
    Tile(64, 96, 64, (2, 1), "warpspecialized"),
    Tile(64, 112, 64, (2, 1), "warpspecialized"),
    Tile(64, 128, 64),
    Tile(64, 144, 64, (1, 2), "warpspecialized"),
    Tile(64, 192, 64),
    Tile(64, 192, 64, (2, 1), "warpspecialized"),
    Tile(64, 224, 64),
    Tile(128, 96, 64, (1, 2)),
    Tile(128, 112, 64, (1, 2)),
    Tile(128, 128, 64, (2, 1)),
    Tile(128, 144, 64, (2, 1)),
    Tile(128, 176, 64, (2, 1)),
    Tile(128, 256, 64, (2, 1), "cooperative"),
    Tile(128, 256, 64, (1, 2), "cooperative"),
    Tile(256, 128, 64, (2, 1), "cooperative"),
    Tile(128, 128, 64, (2, 1), split=True),
)
# INT8 has FP8's rates and bytes; these are a selection of the tiles above, which were not measured for it.
INT8_WHOLE = (
    Tile(64, 32, 256, swap=True),
    Tile(64, 64, 256, swap=True),
    Tile(64, 64, 256, (1, 2), "warpspecialized", swap=True),
    Tile(64, 128, 128, (1, 2), swap=True),
    Tile(64, 256, 128, (2, 1), swap=True),
    Tile(128, 64, 128, (1, 2), swap=True),
    Tile(64, 128, 128),
    Tile(128, 96, 128, (1, 2)),
    Tile(128, 128, 128, (2, 1)),
    Tile(128, 128, 128, (1, 2)),
    Tile(128, 192, 128, (2, 1), "cooperative"),
    Tile(256, 128, 128, (2, 1), "cooperative"),
)
MIXED_INPUT = (
    MixedInput(64, 32),
    MixedInput(128, 32),
    MixedInput(128, 64),
    MixedInput(128, 128),
    MixedInput(128, 32, rounded=True),
    MixedInput(128, 64, rounded=True),
    MixedInput(128, 128, rounded=True),
    MixedInput(128, 256, rounded=True),
    MixedInput(128, 64, gated=True),
    MixedInput(128, 64, gated=True, rounded=True),
    MixedInput(128, 128, gated=True, rounded=True),
    MixedInput(128, 256, gated=True, rounded=True),
)
MIXED_INPUT_W8 = (MixedInput(128, 64), MixedInput(128, 128), MixedInput(128, 256))
SM80_W4 = (
    *(Sm80(rows, tokens) for rows in (64, 128) for tokens in (8, 16, 32, 64)),
    Sm80(256, 64),
    Sm80(128, 128),
    Sm80(64, 32, rounded=True),
    Sm80(128, 64, rounded=True),
)
SM80_W8 = (Sm80(64, 16), Sm80(64, 64), Sm80(128, 64), Sm80(128, 128))
# Promotion keeps a second accumulator, so a warpgroup can hold 64 x 128 of it: 128 x 128 only in cooperation.
FULL_WIDE = Tile(128, 128, 128, (2, 1), "cooperative")


def _scaled_mm() -> list[Gemm]:
    def gemm(a: str, b: str, d: str, tiles: tuple[Tiles, ...], fast_accum: bool = False) -> Gemm:
        return Gemm("scaled_mm", a, b, d, "scaled", tiles, fast_accum=fast_accum)

    whole = tuple(tile for tile in FP8_NARROW + FP8_WIDE if not tile.split)
    parts = tuple(tile for tile in FP8_NARROW + FP8_WIDE if tile.split)
    few = (Tile(64, 64, 256, swap=True), Tile(64, 128, 128), Tile(128, 128, 128, (2, 1)))
    return [
        gemm("e4m3", "e4m3", "bf16", whole, fast_accum=True),
        gemm("e4m3", "e4m3", "", parts, fast_accum=True),
        gemm("e4m3", "e4m3", "", DECODE + DECODE_FOLDED),
        gemm("e4m3", "e4m3", "bf16", (Tile(64, 64, 128, swap=True), FULL_WIDE)),
        gemm("e4m3", "e4m3", "fp16", few, fast_accum=True),
        gemm("e4m3", "e4m3", "fp16", (FULL_WIDE,)),
        gemm("e4m3", "e4m3", "fp32", few[::2], fast_accum=True),
        gemm("e4m3", "e4m3", "fp32", (FULL_WIDE,)),
        gemm("e5m2", "e4m3", "", DECODE[:2]),
        gemm("e4m3", "e5m2", "", DECODE[:2]),
        gemm("e5m2", "e4m3", "bf16", few[2:], fast_accum=True),
        gemm("e4m3", "e5m2", "bf16", few[2:], fast_accum=True),
        gemm("fp8", "fp8", "", ANY),
    ]


def _scaled_mm_int8() -> list[Gemm]:
    def gemm(d: str, tiles: tuple[Tiles, ...]) -> Gemm:
        return Gemm("scaled_mm", "int8", "int8", d, "asymmetric", tiles)

    few = (Tile(64, 64, 256, swap=True), Tile(128, 128, 128, (2, 1)))
    parts = tuple(tile for tile in FP8_NARROW + FP8_WIDE if tile.split)
    return [
        gemm("bf16", INT8_WHOLE),
        gemm("fp16", few),
        gemm("fp32", few),
        gemm("", parts),
        gemm("", DECODE + DECODE_FOLDED),
        gemm("", ANY),
    ]


def _mm() -> list[Gemm]:
    def gemm(a: str, d: str, tiles: tuple[Tiles, ...], layout: str = "tn") -> Gemm:
        return Gemm("mm", a, a, d, "linear", tiles, layout=layout)

    whole = tuple(tile for tile in BF16_NARROW + BF16_WIDE if not tile.split)
    parts = tuple(tile for tile in BF16_NARROW + BF16_WIDE if tile.split)
    main = Tile(128, 128, 64, (2, 1))
    few = (Tile(64, 64, 128, swap=True), Tile(64, 128, 64), main, Tile(128, 256, 64, (2, 1), "cooperative"))
    gemms = [gemm("bf16", "bf16", whole), gemm("bf16", "", parts), gemm("fp16", "fp16", few)]
    for a in ("bf16", "fp16"):
        gemms += [gemm(a, "", DECODE + DECODE_FOLDED), gemm(a, "fp32", (few[0], main)), gemm(a, "", ANY)]
        gemms += [gemm(a, a, (main,), layout) for layout in ("tt", "nt", "nn")]
    return gemms


def _scaled_mm_block() -> list[Gemm]:
    def gemm(operand: str, *tiles: Tiles) -> Gemm:
        return Gemm("scaled_mm", operand, operand, "", "residual", tiles, scales="block")

    return [gemm("e4m3", *BLOCKWISE), gemm("e4m3", *DECODE, *DECODE_FOLDED), gemm("fp8", *ANY)]


def _w4a16_mm() -> list[Gemm]:
    def tiles(scales: str) -> tuple[Tiles, ...]:
        """Those whose registers hold what a step takes: beside a minimum also the sums of x."""
        widest = 64 if scales.endswith("_minimum") else 128
        return (*(tile for tile in MIXED_INPUT if tile.rounded or tile.tokens <= widest), *SM80_W4)

    return [
        Gemm("w4a16_mm", a, "int4", "", "residual", tiles(scales), scales=scales)
        for a in ("bf16", "fp16")
        for scales in STEPS
    ]


def _w8a16_mm() -> list[Gemm]:
    return [
        Gemm("w8a16_mm", a, b, "", epilogue, tiles, scales=scales)
        for a in ("bf16", "fp16")
        for b in ("e4m3", "int8")
        for scales, epilogue, tiles in (
            ("", "weight_scaled", (*MIXED_INPUT_W8, *SM80_W8)),
            ("block", "residual", SM80_W8),
        )
    ]


GEMMS: tuple[Gemm, ...] = (*_scaled_mm(), *_scaled_mm_block(), *_scaled_mm_int8(), *_mm(), *_w4a16_mm(), *_w8a16_mm())
KERNELS: dict[str, Kernel] = {}
for _gemm in GEMMS:
    for _tile in _gemm.tiles:
        _kernel = Kernel(_gemm, _tile)
        if _kernel.name in KERNELS:
            raise ValueError(f"{_kernel.name} is declared twice")
        KERNELS[_kernel.name] = _kernel

# One kernel of each kind of source: those whose text is kept in tests/golden, and that a quick check builds.
FAMILIES: dict[str, str] = {
    "universal": "scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong",
    "universal_swap": "mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap",
    "universal_once": "mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized",
    "universal_split": "scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split",
    "decode": "scaled_mm_e4m3_e4m3_decode8",
    "any": "mm_bf16_bf16_any",
    "blockwise": "scaled_mm_e4m3_e4m3_block_128x128x128_2x1",
    "decode_block": "scaled_mm_e4m3_e4m3_block_decode16",
    "any_block": "scaled_mm_fp8_fp8_block_any",
    "universal_int8": "scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap",
    "universal_split_int8": "scaled_mm_int8_int8_128x128x128_2x1_pingpong_split",
    "decode_int8": "scaled_mm_int8_int8_decode16",
    "any_int8": "scaled_mm_int8_int8_any",
    "mixed_input_w8": "w8a16_mm_fp16_e4m3_128x256",
    "mixed_input": "w4a16_mm_bf16_int4_group128_128x32",
    "sm80_w4": "w4a16_mm_fp16_int4_group32_minimum_sm80_64x16",
    "sm80_w8": "w8a16_mm_bf16_e4m3_sm80_128x64",
}


@dataclass(frozen=True)
class Options:
    """Launch options of a kernel, as in csrc/kernel_abi.h; 0 is the kernel's default."""

    split: int = 0
    swizzle: int = 0
    raster: int = 0
    prefetch: int = 0
    rows: int = 0
    no_chain: int = 0

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name))


# In a kernel's place, of an op with a fused form: the sums are a launch of their own, in float32, and another follows.
# csrc/dispatch.cpp knows it by this text.
SEPARATE = "separate"
DECLARED = frozenset({*KERNELS, SEPARATE})  # what a plan may name


class Choice(NamedTuple):
    kernel: str
    options: Options = Options()

    def __str__(self) -> str:
        """The form that `kernel=` takes: name:option=value,..."""
        return ":".join(part for part in (self.kernel, str(self.options)) if part)

    @classmethod
    def parse(cls, text: str) -> Choice:
        name, _, rest = text.partition(":")
        known = {f.name for f in fields(Options)}
        values = {}
        for item in filter(None, rest.split(",")):
            key, _, value = item.partition("=")
            if key not in known or not (value.isascii() and value.isdigit() and int(value) < 2**31):
                raise ValueError(
                    f"kernel: {item!r} is not an option; it must be {', '.join(sorted(known))} with a number"
                )
            values[key] = int(value)
        return cls(name, Options(**values))
