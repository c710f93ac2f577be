"""Which kernel computes a product: plans, and the answers to the dispatcher's requests.

A plan is a list of (largest m, kernel, launch options) for one problem, which is everything but m. Where the shape was
measured on this GPU (`tuned/<device name>.json`, made by tools/tune.py) the plan is the fastest kernels at the measured
m; elsewhere a cost model ranks the kernels that may run. Either way it is data: `explain()` prints it, on any machine.

csrc/dispatch.cpp keeps the plans it was given and calls `_resolve` for what it lacks.
"""

from __future__ import annotations

import ctypes
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
from .variants import DECLARED, KERNELS, SEPARATE, AnyShape, Blockwise, Choice, Decode, Kernel, Options, Tile, Tiles

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
SCALES = ("", "block", "group")  # in the order of csrc/dispatch.cpp's Scales
# What the table tells problems apart by, with m.
TUNED_BY = ("op", "a", "b", "d", "fast_accum", "scales", "gated", "n", "k")
OPS = {"mm": gemm.HALF, "scaled_mm": gemm.QUANTIZED, "scaled_mm_silu_and_mul": gemm.FP8, "scaled_mm_quant": gemm.FP8}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1, "int8": 1, "int32": 4}


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
    scales: str = ""  # for blocks of 128 k: "block" of 128 columns of b, or "group", of each column; "": for all of k
    gated: bool = False  # d is silu of the first half of the columns times the second
    aligned: bool = True  # the operands' addresses and leading strides are multiples of 16 bytes, as TMA asks
    aligned_out: bool = True  # so are the output's, and the length of its rows: TMA stores whole pieces of 16 bytes

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
        if self.op != gemm.op or bool(self.scales) != bool(gemm.scales):
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

    def _fits_output(self, tile: Blockwise) -> bool:
        """Gates and what is gated start at whole chunks of 64."""
        return (self.d != "e4m3" or tile.quantizes) and (not self.gated or self.n % 128 == 0)


def candidates(problem: Problem, m: int) -> list[Choice]:
    """Every kernel that may compute the problem and is worth trying, with the options worth trying."""
    kernels = list(problem.kernels(m))
    separate = [Choice(SEPARATE)] if problem.fused else []
    fast = [kernel for kernel in kernels if not isinstance(kernel.tile, AnyShape)]
    fit = [kernel for kernel in fast if _fits(kernel.tile, m, problem.n)]
    for group in (fit, fast, kernels):
        if choices := [Choice(kernel.name, o) for kernel in group for o in _options(problem, kernel.tile, m)]:
            return choices + separate
    return separate


def _fits(tile: Tiles, m: int, n: int) -> bool:
    """Whether a tile is neither mostly padding nor one of very many along m."""
    if isinstance(tile, Tile):
        tile_m = tile.n if tile.swap else tile.m
        return tile_m <= max(64, 4 * m) and (m <= 8 * tile_m or tile_m >= 128)
    if isinstance(tile, Blockwise):
        return m > 16 and (tile.m == 64 or tile.m < 2 * m)
    # A folded tile is for an n that gives each multiprocessor no more. With two or more it was never the fastest.
    if isinstance(tile, Decode) and tile.folded and n > tile.rows * MULTIPROCESSORS:
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


def _even_rows(n: int, clusters: int) -> int:
    """The rows of a decode tile, 64 or fewer, that give every cluster as many."""
    rounds = ceil(n / (64 * clusters))
    return ceil(n / (clusters * rounds) / 8) * 8


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
    mean, on 600 with scales for blocks 0.7 %. On 120 more, to which nothing was fitted, it was 1.0 % slower, and 6 % at
    most but for two folded tiles at a k that is no multiple of 128, which were 38 % and are now counted.
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
        of_mmas = elements * {64: 0.54, 128: 0.378, 256: 0.401}[tile.m]
        stage = max(0.092, (tile.m + tile.n) * 128 / 9.72e4, of_mmas)
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
    device: str = H200,
) -> str:
    """The plan of a product's op for a weight of n rows and k columns, as text; with m, the row it takes.

    op: "mm", "scaled_mm", "scaled_mm_silu_and_mul" or, with or without silu_and_mul, "scaled_mm_quant". Where it says
    "separate", the sums are a launch of scaled_mm in float32, and what the op makes of them is another.
    dtype: of a and b; by default BF16 for mm and e4m3 for the others, of which scaled_mm also takes int8. out_dtype: of
    d, which for scaled_mm_quant is e4m3. scales: "block" if each 1 x 128 of a and 128 x 128 of the weight have a scale,
    "group" if each 1 x 128 of both has; of FP8.
    """
    if op not in OPS:
        raise ValueError(f"explain: op is {op!r}; it must be {', '.join(OPS)}")
    if silu_and_mul and op != "scaled_mm_quant":
        raise ValueError(f"explain: silu_and_mul is True; for {op} it must be False")
    gated = silu_and_mul or op == "scaled_mm_silu_and_mul"
    if gated and n % 2:
        raise ValueError(f"explain: n is {n}; for gates and what is gated it must be even")
    for name, size in (("n", n), ("k", k), ("m", 1 if m is None else m)):
        if size < 1:
            raise ValueError(f"explain: {name} is {size}; it must be 1 or more")
    dtype = dtype or (torch.bfloat16 if op == "mm" else torch.float8_e4m3fn)
    for name, given, known in (
        ("dtype", dtype, OPS[op]),
        ("out_dtype", out_dtype, gemm.OUTPUT),
    ):
        if given not in known:
            raise ValueError(f"explain: {name} is {given}; it must be {', '.join(map(str, known))}")
    if scales not in SCALES or (scales and dtype not in gemm.FP8):
        allowed = ", ".join(map(repr, SCALES if dtype in gemm.FP8 else SCALES[:1]))
        raise ValueError(f"explain: scales is {scales!r}; for {op} of {dtype} it must be {allowed}")
    operand, d = DTYPES[dtype], "e4m3" if op == "scaled_mm_quant" else DTYPES[out_dtype]
    problem = Problem(
        "mm" if op == "mm" else "scaled_mm", operand, operand, d, n, k,
        fast_accum=use_fast_accum and dtype in gemm.FP8 and not scales, scales=scales, gated=gated,
        aligned=k * BYTES[operand] % 16 == 0, aligned_out=n // (1 + gated) * BYTES[d] % 16 == 0,
    )  # fmt: skip
    measured = sorted(_tuned(problem, device))
    lines = [
        f"{op} of {operand} to {problem.d}{f' with scales for each {scales}' * bool(scales)}, "
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


_TENSORS = ("a", "b", "scale_a", "scale_b", "bias", "zero_point_a", "sum_b", "residual", "out")


class _Request(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in ("scaled", "out_dtype", "fast_accum", "gated", "quantized")),
        *((name, ctypes.c_int32) for name in ("aligned_operands", "aligned_out", "device")),
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
    "": 0, "fp32": 1, "bf16": 2, "fp16": 3, "e4m3": 4, "e5m2": 5, "int8": 6, "int32": 7, "e8m0": 8,
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


def _letter(unit_k: bool, unit_row: bool, if_k: str, if_row: str) -> str:
    return if_k if unit_k else if_row if unit_row else ""


def _problem(request: _Request, a: Any, b: Any, dtype: torch.dtype, scales: str = "") -> tuple[Problem, int]:
    """The request as a Problem, and the layout's number in the dispatcher's key."""
    (m, k), n = a.shape, b.shape[1]
    a_letter = _letter(a.stride(1) == 1 or k == 1, a.stride(0) == 1 or m == 1, "t", "n")
    b_letter = _letter(b.stride(0) == 1 or k == 1, b.stride(1) == 1 or n == 1, "n", "t")
    number = {"t": 0, "n": 1, "": 9}[a_letter] * 16 + {"n": 0, "t": 1, "": 9}[b_letter]
    problem = Problem(
        "scaled_mm" if request.scaled else "mm",
        DTYPES[a.dtype],
        DTYPES[b.dtype],
        "e4m3" if request.quantized else DTYPES[dtype],
        n,
        k,
        a_letter + b_letter if a_letter and b_letter else "",
        bool(request.fast_accum),
        scales,
        bool(request.gated),
        bool(request.aligned_operands),
        bool(request.aligned_out),
    )
    return problem, number


_lock = threading.Lock()
_opened: set[str] = set()
_dispatcher: ctypes.CDLL | None = None


def _answer(request: _Request) -> None:
    described = {
        name: _Described(getattr(request, name)) if getattr(request, name).present else None for name in _TENSORS
    }
    a, b, scale_a, scale_b, bias, zero_point_a, sum_b, residual, out = described.values()
    asked: Any = (
        None if request.out_dtype < 0 else _SCALAR_TYPES.get(request.out_dtype, f"ScalarType {request.out_dtype}")
    )
    kernel = None if request.kernel is None else request.kernel.decode()
    op = request.op.decode()
    if op == "scaled_mm_quant":
        dtype = torch.float32
        gemm.check_scaled_mm_quant(a, b, scale_a, scale_b, bias, bool(request.gated), False, kernel)
    elif op == "scaled_mm_silu_and_mul":
        dtype = gemm.check_scaled_mm_silu_and_mul(a, b, scale_a, scale_b, bias, asked, kernel, out=out)
    elif op == "scaled_mm":
        dtype = gemm.check_scaled_mm(
            a, b, scale_a, scale_b, bias, asked, bool(request.fast_accum), zero_point_a, sum_b, residual, kernel,
            out=out,
        )  # fmt: skip
    else:
        dtype = gemm.check_mm(a, b, bias, asked, kernel, out=out)
    gemm.check_memory(op, **described)
    assert a is not None and b is not None and _dispatcher is not None
    if torch.cuda.get_device_capability(request.device) != (9, 0):
        raise RuntimeError(
            f"{op}: the GPU is {torch.cuda.get_device_name(request.device)}, compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(request.device)))}; it must be 9.0 (H100, H200)"
        )
    m = a.shape[0]
    if m == 0 or b.shape[1] == 0:
        return
    scales = ""
    if request.scaled and a.dtype != torch.int8:
        scales = gemm.scales_of(m, b.shape[1], b.shape[0], scale_a, scale_b, residual is not None)
    problem, layout = _problem(request, a, b, dtype, scales)
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
    _dispatcher.cutegemm_add_plan(ctypes.byref(request), c_rows, len(rows), layout, SCALES.index(scales), *codes)
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
