"""The declared kernels: names, and tiles that the hardware can hold."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from cutegemm.plan import BYTES, Problem
from cutegemm.variants import (
    FAMILIES,
    GEMMS,
    KERNELS,
    STEPS,
    AnyShape,
    Blockwise,
    Decode,
    Gemm,
    Kernel,
    MixedInput,
    Sm80,
    Tile,
)

SHARED_MEMORY = 227 * 1024  # of one CTA on Hopper
TILES = {name: kernel for name, kernel in KERNELS.items() if isinstance(kernel.tile, Tile)}


def operand_bytes(kernel: Kernel) -> int:
    return BYTES[kernel.gemm.a]


# Names


def test_names_are_derived_unique_and_good_for_files_and_symbols() -> None:
    assert len(KERNELS) == sum(len(gemm.tiles) for gemm in GEMMS)
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert len(name) <= 100
        assert name.startswith(f"{kernel.gemm.op}_{kernel.gemm.a}_{kernel.gemm.b}_")


def test_every_field_is_in_the_name() -> None:
    tile = Tile(64, 128, 64)
    other_tiles = [
        Tile(128, 128, 64),
        Tile(64, 64, 64),
        Tile(64, 128, 128),
        Tile(64, 128, 64, (2, 1)),
        Tile(64, 128, 64, (1, 2)),
        Tile(64, 128, 64, schedule="cooperative"),
        Tile(64, 128, 64, swap=True),
        Tile(64, 128, 64, split=True),
        Decode(8),
        Decode(16),
        Blockwise(128, 128),
        Blockwise(64, 128),
        Blockwise(128, 64),
        Blockwise(128, 128, (2, 1)),
        Blockwise(128, 128, (1, 2)),
        Blockwise(128, 128, columns=True),
        Blockwise(128, 128, gated=True),
        MixedInput(128, 32),
        MixedInput(64, 32),
        MixedInput(128, 64),
        MixedInput(128, 64, gated=True),
        MixedInput(128, 64, rounded=True),
        Sm80(128, 16),
        Sm80(64, 16),
        Sm80(128, 64),
        Sm80(128, 64, rounded=True),
        AnyShape(),
    ]
    gemm = Gemm("mm", "bf16", "bf16", "bf16", "linear", (tile,))
    others = [
        {"op": "scaled_mm"},
        {"a": "fp16"},
        {"b": "fp16"},
        {"d": "fp32"},
        {"d": ""},
        {"layout": "nt"},
        {"fast_accum": True},
        {"scales": "block"},
    ]
    names = [Kernel(gemm, each).name for each in (tile, *other_tiles)]
    names += [Kernel(dataclasses.replace(gemm, **other), tile).name for other in others]
    assert len(set(names)) == len(names)
    assert names[0] == "mm_bf16_bf16_bf16_64x128x64_1x1_pingpong"
    # The epilogue is no part of the name, so an op has one for each pair of types, and of scales.
    kinds = {(gemm.op, gemm.a, gemm.b, gemm.scales) for gemm in GEMMS}
    assert len({(gemm.op, gemm.a, gemm.b, gemm.scales, gemm.epilogue) for gemm in GEMMS}) == len(kinds)


def test_declarations_are_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GEMMS[0].op = "mm"  # type: ignore[misc]
    assert len(set(GEMMS)) == len(GEMMS)
    assert Tile(64, 128, 64) == Tile(64, 128, 64)


def test_declarations_that_are_refused() -> None:
    tile = Tile(64, 128, 64)
    with pytest.raises(ValueError, match="mm bf16 bf16 bf16: a tile is declared twice"):
        Gemm("mm", "bf16", "bf16", "bf16", "linear", (tile, tile))
    with pytest.raises(ValueError, match="mm: layout is 'tm' and must be tn, tt, nt or nn"):
        Gemm("mm", "bf16", "bf16", "bf16", "linear", (tile,), layout="tm")


def test_one_kernel_of_each_kind_is_in_families() -> None:
    assert all(FAMILIES[kind] in KERNELS for kind in FAMILIES)

    def kind(kernel: Kernel) -> tuple[type, bool, bool, bool]:
        tile = kernel.tile
        if not isinstance(tile, Tile):
            return type(tile), False, False, False
        return Tile, tile.swap, tile.split, tile.schedule == "warpspecialized"

    kinds = {kind(KERNELS[name]) for name in FAMILIES.values()}
    assert {each[0] for each in kinds} == {Tile, Decode, Blockwise, MixedInput, Sm80, AnyShape}
    assert {each[1:3] for each in kinds} >= {(False, False), (True, False), (True, True)}
    assert {each[3] for each in kinds} == {False, True}


# Tiles


@pytest.mark.parametrize("name", TILES)
def test_tile_is_one_that_wgmma_and_tma_have(name: str) -> None:
    kernel = TILES[name]
    tile = kernel.tile
    assert isinstance(tile, Tile)
    assert tile.schedule in ("pingpong", "cooperative", "warpspecialized")
    assert tile.m % (128 if tile.schedule == "cooperative" else 64) == 0
    assert tile.n % 8 == 0 and 8 <= tile.n <= 256
    assert kernel.gemm.accumulator == "fp32" or tile.n in (8, 24) or tile.n % 16 == 0  # integer wgmma has no others
    # Lines of a tile are 128 bytes, the widest that TMA swizzles and wgmma reads; FP8 must have k innermost.
    assert tile.k * operand_bytes(kernel) % 128 == 0
    assert operand_bytes(kernel) > 1 or kernel.gemm.layout == "tn"
    # Eight CTAs are what every GPU can keep in a cluster.
    assert all(side in (1, 2, 4, 8) for side in tile.cluster) and tile.cluster[0] * tile.cluster[1] <= 8
    assert not tile.split or kernel.gemm.d == ""


@pytest.mark.parametrize("name", TILES)
def test_tile_fits_registers_and_shared_memory(name: str) -> None:
    kernel = TILES[name]
    tile = kernel.tile
    assert isinstance(tile, Tile)
    # A thread of a warpgroup has 240 registers, of which some 60 are for all but its sums. Promoted FP8 sums are there
    # twice.
    sums = tile.m * tile.n // (2 if tile.schedule == "cooperative" else 1)
    promoted = kernel.gemm.op == "scaled_mm" and kernel.gemm.a != "int8" and not kernel.gemm.fast_accum
    assert sums * (2 if promoted else 1) <= 180 * 128
    stage = (tile.m + tile.n) * tile.k * operand_bytes(kernel)
    rows = min(tile.m, 128 if tile.schedule == "cooperative" else 64)
    epilogue = 4 * rows * min(tile.n, 32) * BYTES[kernel.gemm.d or "fp32"] + 3 * 4 * tile.n + 1024
    assert 2 * stage + epilogue <= SHARED_MEMORY


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if isinstance(kernel.tile, Decode)])
def test_decode_tokens_are_an_n_of_wgmma(name: str) -> None:
    tile = KERNELS[name].tile
    assert isinstance(tile, Decode)
    assert tile.tokens in (1, 2, 8, 16, 32) and tile.rows in (8, 16, 64)
    assert 8 <= tile.tokens * 64 // tile.rows <= 256
    assert KERNELS[name].gemm.layout == "tn"
    assert KERNELS[name].gemm.d == ""


@pytest.mark.parametrize("op", ["mm", "scaled_mm"])
def test_every_pair_of_types_has_a_kernel_for_every_shape(op: str) -> None:
    shapeless = [kernel for kernel in KERNELS.values() if isinstance(kernel.tile, AnyShape) and kernel.gemm.op == op]
    for gemm in GEMMS:
        if gemm.op == op:
            assert (
                sum(
                    Problem(op, gemm.a, gemm.b, "bf16", 1, 0, "", False, gemm.scales, False, False, False).takes(
                        kernel, 1
                    )
                    or (kernel.gemm.a, kernel.gemm.b, kernel.gemm.scales) == (gemm.a, gemm.b, gemm.scales)
                    for kernel in shapeless
                )
                == 1
            )


# What a kernel takes


def takes(name: str, **other: object) -> bool:
    gemm, tile = KERNELS[name].gemm, KERNELS[name].tile
    problem = {
        "op": gemm.op,
        "a": gemm.a,
        "b": gemm.b,
        "d": gemm.d or "bf16",
        "layout": gemm.layout,
        "fast_accum": gemm.fast_accum,
        "scales": "group" if gemm.scales and getattr(tile, "columns", False) else gemm.scales,
        "gated": getattr(tile, "gated", False),
        "aligned": True,
        "aligned_out": True,
        "m": 1,
        "n": 128,
        "k": 64,
    } | other
    m = problem.pop("m")
    return Problem(**problem).takes(KERNELS[name], m)  # type: ignore[arg-type]


OF_WEIGHTS = [name for name, kernel in KERNELS.items() if isinstance(kernel.tile, (MixedInput, Sm80))]


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_tiles_of_weights_are_those_of_their_kernels(name: str) -> None:
    gemm, tile = KERNELS[name].gemm, KERNELS[name].tile
    assert isinstance(tile, (MixedInput, Sm80))
    assert (gemm.layout, gemm.d, gemm.b == "int4") == ("tn", "", gemm.scales in STEPS)
    assert tile.rows in (64, 128, 256)
    assert tile.tokens % 8 == 0 and tile.tokens <= (256 if isinstance(tile, MixedInput) else 128)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_a_kernel_of_a_weight_takes_its_own_problem_and_no_other(name: str) -> None:
    gemm, tile = KERNELS[name].gemm, KERNELS[name].tile
    gated, hopper = getattr(tile, "gated", False), isinstance(tile, MixedInput)
    assert takes(name) and takes(name, m=2**20) and takes(name, aligned_out=False)
    assert not any(takes(name, op=op) for op in ("mm", "scaled_mm", "w8a16_mm", "w4a16_mm") if op != gemm.op)
    assert not takes(name, a="fp16" if gemm.a == "bf16" else "bf16")
    assert not takes(name, b="e4m3" if gemm.b == "int8" else "int8")
    assert not takes(name, gated=not gated)
    assert takes(name, hopper=False) == takes(name, aligned=False) == (not hopper)
    assert takes(name, k=0)
    assert takes(name, n=112) == takes(name, n=50) == (not gated)
    for d in ("bf16", "fp16", "fp32"):
        assert takes(name, d=d)
    narrower = {"group32": ("group64", "group128"), "group64": ("group128",)}.get(gemm.scales, ())
    for scales in ("", "block", "group", *STEPS):
        assert takes(name, scales=scales) == (scales in (gemm.scales, *narrower))


@pytest.mark.parametrize(
    "name", [name for name, kernel in KERNELS.items() if kernel.gemm.a != "fp8" and name not in OF_WEIGHTS]
)
def test_takes_its_own_problem_and_no_other(name: str) -> None:
    kernel, gemm, tile = KERNELS[name], KERNELS[name].gemm, KERNELS[name].tile
    shapeless = isinstance(tile, AnyShape)
    through_tma = isinstance(tile, Tile) and not tile.split
    assert takes(name)
    assert takes(name, m=2**20) == (not isinstance(tile, Decode))
    assert not takes(name, op="scaled_mm" if gemm.op == "mm" else "mm")
    assert not takes(name, a="fp16" if gemm.a == "bf16" else "bf16")
    assert takes(name, k=0) == shapeless
    assert takes(name, aligned=False) == shapeless
    assert takes(name, aligned_out=False) == (not through_tma)
    assert takes(name, n=63) == (not ((isinstance(tile, Tile) and tile.split) or getattr(tile, "gated", False)))
    for layout in ("tn", "tt", "nt", "nn", ""):
        assert takes(name, layout=layout) == (shapeless or layout == gemm.layout)
    for d in ("bf16", "fp16", "fp32"):
        assert takes(name, d=d) == (gemm.d in ("", d))
    # Sums that are promoted are right, only slower, where fast ones are allowed.
    for fast in (False, True):
        assert takes(name, fast_accum=fast) == (fast or not gemm.fast_accum)
    assert kernel.tile == tile


def test_any_takes_every_pair_of_fp8() -> None:
    name = "scaled_mm_fp8_fp8_any"
    for a, b in itertools.product(("e4m3", "e5m2"), repeat=2):
        assert takes(name, a=a, b=b, layout="", aligned=False, aligned_out=False, k=0)
    assert not takes(name, a="bf16", b="bf16")
    assert not takes(name, a="e4m3", b="bf16")


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if isinstance(kernel.tile, Decode)])
def test_decode_takes_as_many_rows_as_its_name_says(name: str) -> None:
    tokens, _, rows = name.rpartition("decode")[2].partition("x")
    tile = KERNELS[name].tile
    assert isinstance(tile, Decode) and (tile.tokens, tile.rows) == (int(tokens), int(rows or 64))
    assert [m for m in range(1, 200) if takes(name, m=m)] == list(range(1, tile.tokens + 1))
