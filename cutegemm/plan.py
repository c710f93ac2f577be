"""Which kernel computes a product: plans, and the answers to the dispatcher's requests.

A plan is a list of (largest m, kernel, launch options) for one problem, which is everything but m. Where the shape was
measured on this GPU (`tuned/<device name>.json`, made by tools/tune.py) the plan is the fastest kernels at the measured
m; elsewhere a cost model ranks the kernels that may run. Either way it is data: `explain()` prints it, on any machine.

csrc/dispatch.cpp keeps the plans it was given and calls `_resolve` for what it lacks.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import ceil, gcd, log2, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import gemm
from .packing import grouping
from .variants import (
    DECLARED,
    KERNELS,
    SEPARATE,
    STEPS,
    AnyShape,
    Blockwise,
    Choice,
    Decode,
    Kernel,
    MixedInput,
    Options,
    Sm80,
    Tile,
    Tiles,
)

# Where the plan of a shape that was not measured may change kernels.
# fmt: off
LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
# fmt: on
NO_LIMIT = 2**31 - 1
H200 = "NVIDIA H200"
MULTIPROCESSORS = 132
# How many clusters of so many CTAs, one on a multiprocessor, run at once: multiprocessors come in groups of up to 18
# that a cluster may not leave. cudaOccupancyMaxActiveClusters says so on an H200; decode.cuh asks it too.
CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 30, 8: 15}
SM_STREAM = 6.7e4  # bytes of a weight a µs that one multiprocessor was seen to read

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}
# In the order of csrc/dispatch.cpp's Product and Scales.
PRODUCTS = ("mm", "scaled_mm", "w4a16_mm", "w8a16_mm")
SCALES = ("", "block", "group", *STEPS)
# What the table tells problems apart by, with m.
TUNED_BY = ("op", "a", "b", "d", "fast_accum", "scales", "gated", "n", "k")
# Of each op that explain() takes, the dtypes: of both operands, or of the weight that it is named for.
OPS: dict[str, tuple[torch.dtype, ...]] = {
    "mm": gemm.HALF,
    "scaled_mm": gemm.QUANTIZED,
    "scaled_mm_silu_and_mul": gemm.FP8,
    "scaled_mm_quant": gemm.FP8,
    "w4a16_mm": gemm.HALF,
    "w4a16_mm_silu_and_mul": gemm.HALF,
    "w8a16_mm": gemm.WEIGHT_8,
}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1, "int8": 1, "int32": 4, "int4": 0.5}


class Row(NamedTuple):
    m_limit: int
    choice: Choice


@dataclass(frozen=True)
class Problem:
    """What a plan is for: a product without its m."""

    op: str
    a: str
    b: str
    d: str
    n: int
    k: int
    layout: str = "tn"  # of a and b, see variants.Gemm; "" where neither dimension of an operand is contiguous
    fast_accum: bool = False  # never of INT8, whose sums are exact, nor with scales for blocks of k
    # For blocks of 128 k: "block" of 128 columns of b, or "group", of each column; "": for all of k. Of an INT4 b those
    # of STEPS that are as wide as its groups.
    scales: str = ""
    gated: bool = False  # d is silu of the first half of the columns times the second
    # The operands' addresses and leading strides are multiples of 16 bytes, as TMA asks; those of a weight that is not
    # packed, where x has 16 bits and the weight fewer: what else isn't is copied.
    aligned: bool = True
    aligned_out: bool = True  # so are the output's, and the length of its rows: TMA stores whole pieces of 16 bytes
    hopper: bool = True  # or the GPU is of compute capability 8
    same_type: bool = True  # scales of an INT4 b have the type of a

    @property
    def fused(self) -> bool:
        """Whether d is made of sums, gated or quantized, which may also be a launch of their own."""
        return self.gated or self.d == "e4m3"

    def kernels(self, m: int) -> Iterator[Kernel]:
        return (kernel for kernel in KERNELS.values() if self.takes(kernel, m))

    def allows(self, choice: Choice, m: int) -> bool:
        return self.fused if choice.kernel == SEPARATE else self.takes(KERNELS[choice.kernel], m)

    def takes(self, kernel: Kernel, m: int) -> bool:
        """Whether the kernel may be launched for the problem with m rows."""
        gemm, tile = kernel.gemm, kernel.tile
        if self.op != gemm.op or not (self.hopper or isinstance(tile, Sm80)):
            return False
        if isinstance(tile, (MixedInput, Sm80)):
            gated = isinstance(tile, MixedInput) and tile.gated
            if (self.a, self.b, self.gated) != (gemm.a, gemm.b, gated) or not self._has_scales(gemm.scales):
                return False
            if (isinstance(tile, MixedInput) and not self.aligned) or (tile.rounded and not self.same_type):
                return False
            return not gated or self.n % 32 == 0  # its halves start at whole strips of 16 rows
        if bool(self.scales) != bool(gemm.scales):
            return False
        if self.fused and not isinstance(tile, Blockwise):
            return False
        if isinstance(tile, AnyShape):
            return (self.a, self.b) == (gemm.a, gemm.b) or (gemm.a == "fp8" and {self.a, self.b} <= {"e4m3", "e5m2"})
        if (self.a, self.b, self.layout) != (gemm.a, gemm.b, gemm.layout) or not self.aligned or self.k == 0:
            return False
        if isinstance(tile, Decode):
            return m <= tile.tokens
        if isinstance(tile, Blockwise):
            return (tile.columns, tile.gated) == (self.scales == "group", self.gated) and self._fits_output(tile)
        # A kernel that promotes its partial sums is right, only slower, where fast accumulation is allowed.
        if gemm.fast_accum and not self.fast_accum:
            return False
        return self.n % 4 == 0 if tile.split else self.d == gemm.d and self.aligned_out

    def _has_scales(self, of_kernel: str) -> bool:
        """Of an INT4 weight: a kernel for narrower groups takes them too."""
        if self.scales == of_kernel:
            return True
        wider, narrower = ("" if scales.endswith("_minimum") else scales for scales in (self.scales, of_kernel))
        return wider in STEPS and narrower in STEPS and STEPS[wider] % STEPS[narrower] == 0

    def _fits_output(self, tile: Blockwise) -> bool:
        """Gates and what is gated start at whole chunks of 64."""
        return (self.d != "e4m3" or tile.quantizes) and (not self.gated or self.n % 128 == 0)


def candidates(problem: Problem, m: int) -> list[Choice]:
    """Every kernel that may compute the problem and is worth trying, with the options worth trying."""
    kernels = list(problem.kernels(m))
    separate = [Choice(SEPARATE)] if problem.fused else []
    # Of those of one kind that fit, or else of all of them; the next kind is slower.
    for kinds in ((Tile, Decode, Blockwise, MixedInput, Sm80), (AnyShape,)):
        of_kind = [kernel for kernel in kernels if isinstance(kernel.tile, kinds)]
        for group in ([kernel for kernel in of_kind if _fits(problem, kernel, m)], of_kind):
            if choices := [Choice(kernel.name, o) for kernel in group for o in _options(problem, kernel.tile, m)]:
                return choices + separate
    return separate


def _fits(problem: Problem, kernel: Kernel, m: int) -> bool:
    """Whether a tile is neither mostly padding nor one of very many along m, and scales are for as many k as may be."""
    tile = kernel.tile
    if isinstance(tile, Tile):
        tile_m = tile.n if tile.swap else tile.m
        return tile_m <= max(64, 4 * m) and (m <= 8 * tile_m or tile_m >= 128)
    if isinstance(tile, Blockwise):
        return m > 16 and (tile.m == 64 or tile.m < 2 * m)
    if isinstance(tile, (MixedInput, Sm80)):
        most = 64 if isinstance(tile, Sm80) and tile.rounded else 128  # tokens of the largest tiles
        fits = tile.tokens <= max(64 if problem.gated else 16, 2 * m) and (m <= 4 * tile.tokens or tile.tokens >= most)
        if (
            isinstance(tile, Sm80)
            and problem.hopper
            and (problem.b == "int4" or (problem.aligned and not problem.scales))
        ):
            fits = fits and m <= 32 and not tile.rounded  # from there on wgmma's rate counts
        if tile.tokens >= (128 if isinstance(tile, MixedInput) else 64) and problem.b == "int4" and problem.same_type:
            fits = fits and tile.rounded  # with exact values it was never faster
        return fits and kernel.gemm.scales == problem.scales
    # A folded tile is for an n that gives each multiprocessor no more. With two or more it was never the fastest.
    if isinstance(tile, Decode) and tile.folded and problem.n > tile.rows * MULTIPROCESSORS:
        return False
    return isinstance(tile, Decode) and (m > tile.tokens // 2 or tile.tokens <= 8)


def _options(problem: Problem, tile: Tiles, m: int) -> list[Options]:
    k_bytes = problem.k * BYTES[problem.a]
    if isinstance(tile, Decode):
        options = []
        for split, clusters in CLUSTERS.items():
            if split == 1 or (k_bytes >= split * 512 and tile.splits):
                for rows in (0,) if tile.folded else sorted({64, _even_rows(problem.n, clusters)}):
                    options += [Options(split, rows=rows), Options(split, rows=rows, prefetch=64)]
                    options.append(Options(split, rows=rows, no_chain=1))
        return options
    if isinstance(tile, Blockwise):
        rows, columns = _blocks(problem, tile, m)
        if rows * columns <= CLUSTERS[prod(tile.cluster)]:
            splits = [s for s, clusters in CLUSTERS.items() if rows * columns <= clusters and problem.k >= s * 512]
            return [Options(split=s) for s in splits if s == 1 or (tile.splits and problem.d != "e4m3")] or [Options()]
        return [Options(swizzle=s) for s in (1, 2, 4, 8, 16) if s <= rows]
    if isinstance(tile, MixedInput):
        token_tiles = ceil(m / tile.tokens)
        if not tile.in_clusters:
            last_wave = ceil(problem.n / tile.rows) * token_tiles % MULTIPROCESSORS
            # More CTAs than there are for each of its tiles are no option.
            most = 2 * MULTIPROCESSORS / last_wave if last_wave else 1
            splits = [1, *(s for s in (2, 4, 8, 16) if s < most and problem.k >= s * 512)]
            return [Options(split, swizzle=s) for split in splits for s in (0, 1, 2, 4, 8) if s < token_tiles]
        if token_tiles > 2:
            return [Options(swizzle=s) for s in (0, 1, 2, 4, 8) if s < token_tiles]
        return [
            Options(split, rows=rows)
            for split, clusters in CLUSTERS.items()
            if split == 1 or (problem.k >= split * 256 and ceil(problem.n / tile.rows) * token_tiles <= clusters)
            for rows in sorted({0, _even_rows(problem.n * token_tiles, clusters, tile.rows, 16) % tile.rows})
        ]
    if isinstance(tile, Sm80) and problem.hopper:
        token_tiles = ceil(m / tile.tokens)
        even = {  # for one CTA on each multiprocessor, and for two
            Options(
                split,
                rows=_even_rows(problem.n, max(1, each * MULTIPROCESSORS // (split * token_tiles)), tile.rows, 16),
            )
            for split in (1, 2, 4)
            for each in (1, 2)
            if split == 1 or problem.k >= split * 1024
        }
        return sorted(even, key=str)
    if isinstance(tile, Tile):
        if tile.split:
            splits = [s for s in (2, 3, 4, 6, 8) if k_bytes % (16 * s) == 0 and k_bytes >= s * 512]
            return [Options(split=s) for s in splits or (1,)]
        rows, columns = _grid(problem, tile, m)
        if tile.schedule == "warpspecialized":  # each further wave starts anew
            return [Options()] if rows * columns <= 3 * MULTIPROCESSORS else []
        if rows * columns <= MULTIPROCESSORS:
            return [Options()]
        return [
            Options(swizzle=s, raster=r) for s in (1, 2, 4, 8) for r in (1, 2) if s <= (columns if r == 1 else rows)
        ]
    return [Options()]


def _even_rows(n: int, clusters: int, most: int = 64, step: int = 8) -> int:
    """The rows of a weight's tile, a multiple of step up to most, that give every cluster as many."""
    rounds = ceil(n / (most * clusters))
    return ceil(n / (clusters * rounds) / step) * step


def _blocks(problem: Problem, tile: Blockwise, m: int) -> tuple[int, int]:
    """Of clusters' tiles, along m and along n."""
    return ceil(m / (tile.m * tile.cluster[0])), ceil(problem.n / (tile.n * tile.cluster[1]))


def _grid(problem: Problem, tile: Tile, m: int) -> tuple[int, int]:
    tile_m, tile_n = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
    return ceil(m / tile_m), ceil(problem.n / tile_n)


def cost(problem: Problem, choice: Choice, m: int) -> float:
    """Modelled µs on an H200: launch, and the slowest of memory, L2 and the tensor cores.

    The constants are fits to what tools/tune.py measured. They are there to rank kernels: on the 300 problems in BF16
    and FP8 of tuned/NVIDIA_H200.json the first of the ranking is 1.5 % slower than the fastest kernel in geometric
    mean, on 88 with scales for blocks 0.9 %. On 240 more, to which nothing was fitted, it was 1.2 % slower, and 15 %
    at most but where k is no multiple of 128: four of 36 such were 22 to 38 %, before what that costs was in here.
    """
    n, k, width = problem.n, problem.k, BYTES[problem.a]
    if choice.kernel == SEPARATE:
        sums = replace(problem, d="fp32", gated=False, aligned_out=n % 4 == 0)
        # The second launch finds its sums in L2 where they fit. A gated result in 16 bits takes a third one.
        again = m * n * (4 + (2 if problem.gated else 1)) / 4.35e6
        return min(cost(sums, c, m) for c in candidates(sums, m)) + again + (1.5 if problem.d == "e4m3" else 3.0)
    tile = KERNELS[choice.kernel].tile
    memory = (n * k * width + m * k * width + m * n * BYTES[problem.d]) / 4.35e6
    if isinstance(tile, AnyShape):
        waves = ceil(ceil(m / 64) * ceil(n / 64) / (3 * MULTIPROCESSORS))
        return 4 + max(memory, waves * 3 * 2 * 64 * 64 * k / (0.3 * 5.9e6), k * 0.02)

    split = max(1, choice.options.split)
    if isinstance(tile, (MixedInput, Sm80)):
        # Rates of a multiprocessor, a µs: what kernels were seen to reach on 288 problems. On those the first of the
        # ranking is 2 to 3 % slower than the fastest, where it was measured, and 30 % by assumption where it was not.
        rows = choice.options.rows or tile.rows
        tiles = ceil(n / rows) * ceil(m / tile.tokens)
        memory = (n * k * BYTES[problem.b] + m * k * 2 + m * n * BYTES[problem.d]) / 4.0e6
        memory += n * ceil(k / STEPS.get(problem.scales, 128)) * 2 / 4.0e6
        if isinstance(tile, MixedInput):  # all of a tile's MMAs are done, also where it has fewer rows
            efficiency = {32: 0.64 if tile.rows == 64 else 0.72, 64: 0.71, 128: 0.85}.get(tile.tokens, 0.99)
            if tile.rounded:
                efficiency = {32: 0.75, 64: 0.72, 128: 0.90, 256: 0.99}[tile.tokens]
            if problem.b != "int4":
                efficiency = {64: 0.45, 128: 0.72, 256: 0.89}[tile.tokens]
            of_tile = 2 * tile.rows * max(tile.tokens, 48) * k / (5.9e6 * efficiency)
            if tile.in_clusters:
                work = ceil(tiles / CLUSTERS[split]) * of_tile / split
                return 3.5 + (2.4 if split > 1 else 0.0) + max(memory, work)
            waves, last_wave = divmod(tiles, MULTIPROCESSORS)
            share = max(last_wave / MULTIPROCESSORS, 1 / split) if last_wave else 0.0
            adding = (3.0 + 1.3 / share) * tile.rows * tile.tokens / 2**15 if 0 < share < 1 else 0.0
            return 3.5 + adding + max(memory, (waves + share) * of_tile)
        # Two CTAs share a multiprocessor, and one alone cannot use it. Some of the work for k is for all rows.
        sm80_rate = 1750 * {8: 40, 16: 30, 32: 14}.get(tile.tokens, 500 / tile.tokens)
        if tile.rounded:
            sm80_rate = 1750 * {32: 21, 64: 12.6}[tile.tokens]
        alone, of_all = (1.6, 4) if tile.tokens == 8 else (1.1, 8)
        turns = 2 * ceil(tiles * split / (2 * MULTIPROCESSORS)) if tiles * split > MULTIPROCESSORS else alone
        adding = 1.5 if split > 1 else 0.0
        if problem.b != "int4" and tile.tokens <= 16:  # a multiprocessor's CTAs share what values take
            turns, sm80_rate, adding = ceil(tiles * split / MULTIPROCESSORS), 3.0e4, adding * (1 + 1.3 * split)
        return 2.9 + adding + max(memory, turns * (rows + of_all) * k / split / sm80_rate)

    if isinstance(tile, Decode):
        rows = choice.options.rows or tile.rows
        tiles = ceil(n / rows)
        clusters = min(tiles, CLUSTERS[split])
        columns = tile.tokens * 64 // tile.rows  # of the MMA
        bytes_of_stage = 128 * max(2, 64 // tile.rows)
        stages = ceil(ceil(k * width / bytes_of_stage) / split)
        streams = memory * (0.914 + 0.00313 * tile.tokens) * (1.48 if tile.rows == 8 else 0.953)
        # The next launch fits beside this one, not at all, or in part: then both get in each other's way. On
        # multiprocessors that are all taken it fits where shared memory has room for two, see decode.cuh's launch().
        beside = clusters * split == MULTIPROCESSORS and tile.tokens <= 16 and columns <= 32
        start = 2.11 if beside else 1.38 if 2 * clusters * split <= MULTIPROCESSORS else 1.87
        if choice.options.no_chain:
            start, streams = start + 1.24, streams * 1.08
        elif MULTIPROCESSORS // 2 < clusters * split <= 100:
            streams *= 1.08
        if choice.options.prefetch:
            start += 0.346 - 0.0265 * min(streams, 15.3)
        rounds = ceil(tiles / clusters)
        exchange = rounds * (1.33 + 0.0349 * tile.tokens) if split > 1 else rounds * 0.133 if tile.folded else 0.0
        of_mmas = 0.233 + 0.000331 * columns if tile.folded else 0.248 + 0.00188 * tile.tokens
        if k * width % 128:  # TMA brings each span of a stage, and there are more in a folded one's, by itself
            of_mmas *= 2.0 if tile.folded else 1.2
        own = max(rows * bytes_of_stage / SM_STREAM, of_mmas)
        return start + exchange + max(streams, rounds * stages * own)

    if isinstance(tile, Blockwise):
        rows, columns = _blocks(problem, tile, m)
        waves = ceil(rows * columns / CLUSTERS[prod(tile.cluster) * split])
        # A stage takes what its operands need to come, its MMAs and sums, or at least the way of an MMA and a barrier,
        # and some more for each scale of b.
        elements = tile.m * tile.n / 128**2
        of_mmas = elements * {64: 0.54, 128: 0.378, 256: 0.39}[tile.m] * (0.96 if tile.n > 128 else 1.0)
        of_operands = (tile.m + tile.n) * 128 / 9.72e4 * (1.15 if k % 128 else 1.0)  # rows lie across lines of L2
        stage = max(0.092, of_operands, of_mmas)
        stage += 0.00446 * tile.n / gcd(tile.n, 128)
        work = waves * (ceil(ceil(k / 128) / split) * stage + (0.649 if tile.m == 256 else 0.991) * elements)
        if rows * columns * prod(tile.cluster) * split <= 100:  # too few multiprocessors for all of HBM's bandwidth
            memory *= 1.11
        adding = 0.0447 + 6.39 * elements if split > 1 else 0.0
        meeting = 0.521 if prod(tile.cluster) > 1 else 0.0
        # Bands of some 1520 rows find most of what they read in L2.
        band = max(1, choice.options.swizzle) * tile.m * tile.cluster[0]
        apart = 1 + 0.0225 * abs(log2(band / 1520)) if waves > 1 else 1.0
        return 1.22 + adding + meeting + (max(memory, work) + 0.139 * min(memory, work)) * apart

    # In the MMA's terms: tiles along its sides, and what of its operands a cluster's CTAs read from L2 for each other.
    along_m, along_n = _grid(problem, tile, m)[:: -1 if tile.swap else 1]
    cluster_m, cluster_n = tile.cluster
    tiles = ceil(along_m / cluster_m) * cluster_m * ceil(along_n / cluster_n) * cluster_n * split
    waves, share = ceil(tiles / MULTIPROCESSORS), k / split
    efficiency = 0.868 * min(1.0, tile.n / 128) ** 0.164 * (0.914 if tile.m == 64 else 1.0)
    compute = 2 * tile.m * tile.n * share / (5.9e6 * 2 / width * efficiency)
    from_l2 = tiles * (tile.m / cluster_n + tile.n / cluster_m) * share * width
    start = 3.13 + 2.34 * (waves - 1) if tile.schedule == "warpspecialized" else 3.2
    of_tokens, of_weight = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
    if m <= of_tokens:  # or else several CTAs bring the same rows of the weight into L2
        memory = max(memory, waves * of_weight * share * width / SM_STREAM)
    reduction = 1.13 + m * n * 4 * (split + 1) / 2.18e6 if tile.split else 0.0
    return start + max(memory, waves * compute, from_l2 / 1.2e7) + reduction


def tuned_by(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields TUNED_BY of a row of the table, which may be older than one of them."""
    return tuple(row[name] if name in row else getattr(Problem, name) for name in TUNED_BY)


@cache
def _table(device: str) -> dict[tuple[Any, ...], dict[int, list[Choice]]]:
    """Measured rankings: the fields TUNED_BY -> m -> choices, the fastest first."""
    path = Path(__file__).parent / "tuned" / f"{device.replace(' ', '_')}.json"
    if not path.exists():
        return {}
    table: dict[tuple[Any, ...], dict[int, list[Choice]]] = {}
    names = {f.name for f in fields(Options)}
    for row in json.loads(path.read_text())["rows"]:
        table.setdefault(tuned_by(row), {})[row["m"]] = [
            Choice(best["kernel"], Options(**{name: best[name] for name in names if name in best}))
            for best in row["best"]
            if best["kernel"] in DECLARED
        ]
    return table


def _tuned(problem: Problem, device: str) -> dict[int, list[Choice]]:
    return _table(device).get(tuple(getattr(problem, name) for name in TUNED_BY), {})


def _best(problem: Problem, m: int, measured: list[Choice]) -> Choice:
    for choice in measured:
        if problem.allows(choice, m):
            return choice
    return min(candidates(problem, m), key=lambda choice: cost(problem, choice, m))


def plan(problem: Problem, device: str = H200) -> tuple[Row, ...]:
    """The rows in ascending order of m_limit; the last has no limit, so that every m has a kernel."""
    tuned = _tuned(problem, device) or _tuned(problem, H200)
    rows: list[Row] = []
    for m in sorted({*LADDER, *tuned}):
        at = min((measured for measured in tuned if measured >= m), default=max(tuned, default=0))
        rows.append(Row(m, _best(problem, m, tuned.get(at, []))))
    rows.append(Row(NO_LIMIT, _best(problem, 4 * LADDER[-1], tuned.get(max(tuned, default=0), []))))
    return tuple(
        row for row, after in zip(rows, [*rows[1:], None], strict=True) if after is None or row.choice != after.choice
    )


def choose(problem: Problem, m: int, device: str = H200) -> Choice:
    return next(row.choice for row in plan(problem, device) if m <= row.m_limit)


def explain(
    op: str,
    n: int,
    k: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = True,
    scales: str = "",
    silu_and_mul: bool = False,
    group_size: int = 128,
    minimum: bool = False,
    device: str = H200,
) -> str:
    """The plan of a product's op for a weight of n rows and k columns, as text; with m, the row it takes.

    op: "mm", "scaled_mm", "scaled_mm_silu_and_mul" or, with or without silu_and_mul, "scaled_mm_quant". Where it says
    "separate", the sums are a launch of scaled_mm in float32, and what the op makes of them is another.
    dtype: of a and b, or of w8a16_mm's weight, whose x is BF16; by default BF16 for mm and w4a16_mm, and e4m3 for the
    others, of which scaled_mm and w8a16_mm also take int8. out_dtype: of d, which for scaled_mm_quant is e4m3. scales:
    "block" if each 1 x 128 of a and 128 x 128 of the weight have a scale, "group" if each 1 x 128 of both has; of FP8,
    and "block" also of w8a16_mm. group_size, minimum: of the W4Weight; zero points change nothing.
    """
    if op not in OPS:
        raise ValueError(f"explain: op is {op!r}; it must be {', '.join(OPS)}")
    if silu_and_mul and op != "scaled_mm_quant":
        raise ValueError(f"explain: silu_and_mul is True; for {op} it must be False")
    gated = silu_and_mul or op.endswith("_silu_and_mul")
    if gated and n % 2:
        raise ValueError(f"explain: n is {n}; for gates and what is gated it must be even")
    for name, size in (("n", n), ("k", k), ("m", 1 if m is None else m)):
        if size < 1:
            raise ValueError(f"explain: {name} is {size}; it must be 1 or more")
    product = next(each for each in PRODUCTS if op.startswith(each))
    dtype = dtype or (torch.bfloat16 if product in ("mm", "w4a16_mm") else torch.float8_e4m3fn)
    for name, given, known in (
        ("dtype", dtype, OPS[op]),
        ("out_dtype", out_dtype, gemm.OUTPUT),
    ):
        if given not in known:
            raise ValueError(f"explain: {name} is {given}; it must be {', '.join(map(str, known))}")
    allowed = SCALES[:2] if product == "w8a16_mm" else SCALES[: 3 if dtype in gemm.FP8 else 1]
    if scales not in allowed:
        must = ", ".join(map(repr, allowed))
        raise ValueError(f"explain: scales is {scales!r}; for {op} of {dtype} it must be {must}")
    a = b = DTYPES[dtype]
    if product == "w4a16_mm":
        group_size, _, _ = grouping("explain", group_size, k)
        b, scales = "int4", gemm.group_of(k, group_size, minimum)
    elif product == "w8a16_mm":
        a = "bf16"
    d = "e4m3" if op == "scaled_mm_quant" else DTYPES[out_dtype]
    problem = Problem(
        product, a, b, d, n, k,
        fast_accum=product == "scaled_mm" and use_fast_accum and dtype in gemm.FP8 and not scales,
        scales=scales, gated=gated, aligned=product == "w4a16_mm" or k * BYTES[b] % 16 == 0,
        aligned_out=n // (1 + gated) * BYTES[d] % 16 == 0,
    )  # fmt: skip
    measured = sorted(_tuned(problem, device))
    lines = [
        f"{op} of {a if a == b else f'{a} and {b}'} to {d}{f' with scales for each {scales}' * bool(scales)}, "
        f"n = {n}, k = {k} on {device}: "
        + (f"measured at m = {', '.join(map(str, measured))}" if measured else "by the cost model")
    ]
    lower = 1
    for row in plan(problem, device):
        if m is None or lower <= m <= row.m_limit:
            span = f"m = {lower}" if row.m_limit == lower else f"m = {lower} to {row.m_limit}"
            lines.append(f"  {span if row.m_limit < NO_LIMIT else f'm from {lower}':<20} {row.choice}")
        lower = row.m_limit + 1
    return "\n".join(lines)


# --- the dispatcher's side; the structures mirror csrc/dispatch.cpp and csrc/kernel_abi.h ---


class _Tensor(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("present", "dtype", "cuda_index", "dim")),
        ("size", ctypes.c_int64 * 8),
        ("stride", ctypes.c_int64 * 8),
        ("data", ctypes.c_uint64),
    ]


_TENSORS = (
    "a", "b", "scale_a", "scale_b", "bias", "zero_point_a", "sum_b", "residual", "zeros", "permutation", "out",
)  # fmt: skip
# What ops that are named for a weight call them.
_NAMES = {
    "w4a16_mm": {"a": "x", "b": "packed", "scale_b": "scales"},
    "w8a16_mm": {"a": "x", "b": "w", "scale_b": "scale"},
}


class _Request(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in ("product", "out_dtype", "fast_accum", "gated", "quantized")),
        *((name, ctypes.c_int32) for name in ("aligned_operands", "aligned_out", "device", "minimum")),
        *((name, ctypes.c_int64) for name in ("n", "k", "group_size")),
        *((name, _Tensor) for name in _TENSORS),
        ("kernel", ctypes.c_char_p),
    ]


class _Options(ctypes.Structure):
    _fields_ = [(f.name, ctypes.c_int32) for f in fields(Options)]


class _Row(ctypes.Structure):
    _fields_ = [("m_limit", ctypes.c_int32), ("kernel", ctypes.c_char_p), ("options", _Options)]


# Torch's ScalarType numbers: they are part of its serialization format and do not change.
_SCALAR_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
    23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 25: torch.float8_e5m2fnuz, 26: torch.float8_e4m3fnuz,
    27: torch.uint16, 28: torch.uint32, 29: torch.uint64, 44: torch.float8_e8m0fnu, 45: torch.float4_e2m1fn_x2,
}  # fmt: skip
_KERNEL_TYPES = {
    "": 0, "fp32": 1, "bf16": 2, "fp16": 3, "e4m3": 4, "e5m2": 5, "int8": 6, "int32": 7, "e8m0": 8, "int4": 9,
}  # fmt: skip


class _Described:
    """As much of a tensor as the checks look at."""

    def __init__(self, tensor: _Tensor) -> None:
        self.dtype = _SCALAR_TYPES.get(tensor.dtype, f"a torch dtype (ScalarType {tensor.dtype})")
        self.shape = tuple(tensor.size[: tensor.dim])
        self.device = f"cuda:{tensor.cuda_index}" if tensor.cuda_index >= 0 else "cpu"
        self._stride = tuple(tensor.stride[: tensor.dim])
        self._data = tensor.data

    def data_ptr(self) -> int:
        return self._data

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dimension: int | None = None) -> Any:
        return self._stride if dimension is None else self._stride[dimension]

    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self._stride, device="meta").is_contiguous()


def _letter(unit_k: bool, unit_row: bool, if_k: str, if_row: str) -> str:
    return if_k if unit_k else if_row if unit_row else ""


def _problem(request: _Request, a: Any, b: Any, dtype: Any, scales: str = "") -> tuple[Problem, int]:
    """The request as a Problem, and the layout's number in the dispatcher's key."""
    product, layout, number = PRODUCTS[request.product], "tn", 0
    if product == "w4a16_mm":
        n, k, of_b = request.n, request.k, "int4"
    elif product == "w8a16_mm":
        (n, k), of_b = b.shape, DTYPES[b.dtype]
    else:
        (m, k), n, of_b = a.shape, b.shape[1], DTYPES[b.dtype]
        a_letter = _letter(a.stride(1) == 1 or k == 1, a.stride(0) == 1 or m == 1, "t", "n")
        b_letter = _letter(b.stride(0) == 1 or k == 1, b.stride(1) == 1 or n == 1, "n", "t")
        layout = a_letter + b_letter if a_letter and b_letter else ""
        number = {"t": 0, "n": 1, "": 9}[a_letter] * 16 + {"n": 0, "t": 1, "": 9}[b_letter]
    problem = Problem(
        product,
        DTYPES[a.dtype],
        of_b,
        "e4m3" if request.quantized else DTYPES[dtype],
        n,
        k,
        layout,
        bool(request.fast_accum),
        scales,
        bool(request.gated),
        bool(request.aligned_operands),
        bool(request.aligned_out),
    )
    return problem, number


def _scales(request: _Request, tensors: dict[str, Any]) -> str:
    product, a, b, scale_b = PRODUCTS[request.product], tensors["a"], tensors["b"], tensors["scale_b"]
    if product == "w4a16_mm":
        return gemm.group_of(request.k, request.group_size, bool(request.minimum))
    if product == "w8a16_mm":
        n, k = b.shape
        return gemm.blocks_of(n, k, scale_b)
    if product == "mm" or a.dtype == torch.int8:
        return ""
    return gemm.scales_of(
        a.shape[0], b.shape[1], b.shape[0], tensors["scale_a"], scale_b, tensors["residual"] is not None
    )


_lock = threading.Lock()
_opened: set[str] = set()
_dispatcher: ctypes.CDLL | None = None


def _answer(request: _Request) -> None:
    tensors = {
        name: _Described(getattr(request, name)) if getattr(request, name).present else None for name in _TENSORS
    }
    op, product = request.op.decode(), PRODUCTS[request.product]
    kernel = None if request.kernel is None else request.kernel.decode()
    asked: Any = (
        None if request.out_dtype < 0 else _SCALAR_TYPES.get(request.out_dtype, f"ScalarType {request.out_dtype}")
    )
    arguments: dict[str, Any] = {
        "out_dtype": asked,
        "use_fast_accum": bool(request.fast_accum),
        "silu_and_mul": bool(request.gated),
        "kernel_name": kernel,
        "minimum": bool(request.minimum),
        **{name: getattr(request, name) for name in ("n", "k", "group_size")},
    }
    described = {_NAMES.get(product, {}).get(name, name): tensor for name, tensor in tensors.items()}
    check = getattr(gemm, f"check_{op}")
    taken = inspect.signature(check).parameters
    checked = check(**{name: value for name, value in {**arguments, **described}.items() if name in taken})
    dtype = torch.float32 if op == "scaled_mm_quant" else checked  # of its sums, where they are separate
    gemm.check_memory(op, **described)
    a, b = tensors["a"], tensors["b"]
    assert a is not None and b is not None and _dispatcher is not None
    m, scales = a.shape[0], _scales(request, tensors)
    problem, layout = _problem(request, a, b, dtype, scales)
    capability = torch.cuda.get_device_capability(request.device)
    of_b = tensors["scale_b"]
    same_type = problem.b != "int4" or of_b is None or of_b.dtype == a.dtype
    problem = replace(problem, hopper=capability == (9, 0), same_type=same_type)
    if not problem.hopper and (capability[0] != 8 or not any(problem.kernels(m))):
        raise RuntimeError(
            f"{op}: the GPU is {torch.cuda.get_device_name(request.device)}, compute capability "
            f"{'.'.join(map(str, capability))}; it must be 9.0 (H100, H200)"
        )
    if m == 0 or problem.n == 0:
        return
    if kernel is None:
        rows = plan(problem, torch.cuda.get_device_name(request.device))
    else:
        choice = Choice.parse(kernel)
        if not problem.allows(choice, m):
            raise ValueError(
                f"{op}: kernel {choice.kernel} does not take m = {m}, n = {problem.n}, k = {problem.k} of {problem.a} "
                f"and {problem.b} to {problem.d} in layout {problem.layout or 'other'}"
                + ("" if problem.aligned and problem.aligned_out else ", not aligned to 16 bytes")
            )
        rows = (Row(NO_LIMIT, choice),)
    c_rows = (_Row * len(rows))()
    for to, row in zip(c_rows, rows, strict=True):
        options = [getattr(row.choice.options, f.name) for f in fields(Options)]
        to.m_limit, to.kernel, to.options = row.m_limit, row.choice.kernel.encode(), _Options(*options)
    codes = (_KERNEL_TYPES[name] for name in (problem.a, problem.b, problem.d))
    key = problem.n, problem.k, layout, SCALES.index(scales) + len(STEPS) * (not same_type), *codes
    _dispatcher.cutegemm_add_plan(ctypes.byref(request), c_rows, len(rows), *key)
    chosen = next(row.choice.kernel for row in rows if m <= row.m_limit)
    if chosen != SEPARATE:
        _open(chosen)


def _open(name: str) -> None:
    from . import library

    assert _dispatcher is not None
    if name in _opened:
        return
    text = ctypes.create_string_buffer(4096)
    path = library.kernel(name)
    if _dispatcher.cutegemm_open(name.encode(), str(path).encode(), text, len(text)):
        raise RuntimeError(text.value.decode())
    _opened.add(name)


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_Request), ctypes.c_void_p, ctypes.c_int32)
def _resolve(request: Any, text: int, size: int) -> int:
    # Nothing may be raised into C: whatever goes wrong becomes the text of the op's RuntimeError.
    try:
        with _lock:
            _answer(request.contents)
        return 0
    except BaseException as error:
        message = (str(error) or type(error).__name__).encode()[: size - 1].decode(errors="ignore").encode()
        ctypes.memmove(text, message + b"\0", len(message) + 1)
        return 1


def connect(dispatcher: ctypes.CDLL) -> None:
    """Called by library.py when the GEMM op library is loaded."""
    global _dispatcher
    _dispatcher = dispatcher
    dispatcher.cutegemm_set_resolver(_resolve)


__all__ = ["Choice", "Options", "Problem", "Row", "candidates", "choose", "cost", "explain", "plan"]
