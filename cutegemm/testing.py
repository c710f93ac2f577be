"""What tests and bench share: inputs, guards around memory, error measures, and timing to trust."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

# Inputs


def make_operand(
    rows: int,
    cols: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    exact: bool = False,
) -> Tensor:
    """A GEMM operand: normal values, one in 500 of them 100 times as large, a row of zeros, one of denormals.

    Those two rows are the second and the third, where there are more than three. exact: integers in [-4, 4]
    instead; products of such operands are exact in float32 in any order of summation while k <= 2**20.
    Of an integer dtype, values are uniform over all of it, but for the row of zeros.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if exact:
        return torch.randint(-4, 5, (rows, cols), generator=generator, device=device).to(dtype)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        whole = torch.randint(limits.min, limits.max + 1, (rows, cols), generator=generator, device=device)
        if rows > 3:
            whole[1] = 0
        return whole.to(dtype)
    x = torch.randn(rows, cols, generator=generator, device=device)
    outliers = torch.rand(rows, cols, generator=generator, device=device) < 1 / 500
    outliers[:1, :1] = True
    x = torch.where(outliers, 100 * x, x)
    if rows > 3:
        info = torch.finfo(dtype)
        x[1] = 0
        # A few times the smallest positive number.
        x[2] = x[2].clamp(-4, 4).trunc() * (info.smallest_normal * info.eps)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def padded(x: Tensor, pitch: int, fill: float = 1e4) -> Tensor:
    """x (..., k) with its rows `pitch` elements apart, and `fill`, or the largest number, in the gaps.

    Integers, which know no NaN, have the largest number in place of one.
    """
    if pitch < x.shape[-1]:
        raise ValueError(f"padded: pitch is {pitch}; it must be at least {x.shape[-1]}, a row of x")
    if x.dtype.is_floating_point:
        fill = min(fill, torch.finfo(x.dtype).max)
    else:
        fill = min(torch.iinfo(x.dtype).max, fill)  # the first, if fill is NaN
    wide = torch.full((*x.shape[:-1], pitch), fill, device=x.device).to(x.dtype)
    view = wide[..., : x.shape[-1]]
    view.copy_(x)
    return view


def misaligned(x: Tensor, offset: int = 1) -> Tensor:
    """A contiguous x that starts `offset` elements after an address with 256-byte alignment."""
    view = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)[offset:].view(x.shape)
    return view.copy_(x)


# Memory

_GUARD = 0xA5
_MARGIN = 4096  # keeps the allocator's alignment


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: torch.device | str = "cpu",
    pitch: int | None = None,
) -> tuple[Tensor, Callable[[], None]]:
    """A tensor of NaNs (integers: of -1) with guard bytes around it and, with a pitch, between its rows.

    The second result raises AssertionError if a byte outside of the tensor has changed.
    """
    strides = [1]
    for size in reversed((*shape[1:-1], pitch or shape[-1]) if len(shape) > 1 else ()):
        strides.insert(0, strides[0] * size)
    strides = strides[: len(shape)]
    span = dtype.itemsize * (shape[0] * strides[0] if shape else 1)
    buffer = torch.full((span + 2 * _MARGIN,), _GUARD, dtype=torch.uint8, device=device)

    def inside(of: Tensor) -> Tensor:
        return of.view(dtype).as_strided(tuple(shape), strides, _MARGIN // dtype.itemsize)

    tensor = inside(buffer).fill_(math.nan if dtype.is_floating_point else -1)
    untouched = torch.full_like(buffer, _GUARD)
    inside(untouched).zero_()

    def check() -> None:
        now = buffer.clone()
        inside(now).zero_()
        written = (now != untouched).nonzero().flatten().tolist()
        if written:
            offsets = [i - _MARGIN for i in written[:5]]
            raise AssertionError(f"{len(written)} guard bytes were written, {offsets} bytes after the start")

    return tensor, check


class _Memory:
    """Bytes of device memory that no tensor owns, for torch.as_tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def poison(nbytes: int = 256 << 20) -> None:
    """Fill the CUDA memory that torch will hand out next with 0xFF, a NaN in every dtype that has one."""
    torch.cuda.empty_cache()
    # torch serves requests up to 1 MiB and larger ones from different pools.
    held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in [1 << 20] * 32 + [nbytes]]
    del held
    # All that is free, also between tensors that live.
    current = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    for segment in torch.cuda.memory_snapshot():
        if (segment["device"], segment["stream"]) == current and segment["segment_pool_id"] == (0, 0):
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    torch.as_tensor(_Memory(block["address"], block["size"]), device="cuda").fill_(0xFF)


# Errors


def relative_error(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference| (Frobenius) in float64; a NaN in either gives NaN."""
    size = torch.linalg.vector_norm(reference.double()).clamp_min(torch.finfo(torch.float64).tiny)
    return float(torch.linalg.vector_norm(out.double() - reference.double()) / size)


def gemm_reference(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias in float64, of the operands as they are: pass dequantized ones."""
    product = a.double() @ b.double()
    return product if bias is None else product + bias.double()


def gemm_bound(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None, c: float = 1.0) -> Tensor:
    """Elementwise bound of the error of a GEMM with float32 accumulation and output in dtype.

    Half a unit in the last place of dtype, 2**-8 |reference| for BF16, plus c k 2**-24 times the sum of
    |a||b| (and |bias|), the worst case of k roundings for c = 1.
    """
    info = torch.finfo(dtype)
    total = gemm_reference(a.abs(), b.abs(), None if bias is None else bias.abs())
    rounding = gemm_reference(a, b, bias).abs() * (info.eps / 2) + info.smallest_normal * info.eps / 2
    return rounding + c * max(a.shape[-1], 1) * 2.0**-24 * total


def first_mismatches(out: Tensor, reference: Tensor, bound: Tensor | float = 0.0) -> str:
    """How many elements are off by more than bound, and the first five; "" if none is. NaN equals NaN."""
    if out.shape != reference.shape:
        return f"shape is {list(out.shape)} and must be {list(reference.shape)}"
    x, y = out.double(), reference.double()
    bound = torch.as_tensor(bound, dtype=torch.float64, device=x.device).broadcast_to(x.shape)
    same = (x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= bound)
    wrong = (~same).nonzero()
    if not len(wrong):
        return ""
    lines = [f"{len(wrong)} of {out.numel()} elements are wrong"]
    for index in wrong[:5].tolist():
        i = tuple(index)
        lines.append(f"  {index}: {float(x[i]):.9g} must be {float(y[i]):.9g} within {float(bound[i]):.3g}")
    return "\n".join(lines)


def assert_same(out: Tensor, reference: Tensor) -> None:
    """Equal dtype, shape and values (NaN equals NaN, -0 equals 0)."""
    if out.dtype != reference.dtype:
        raise AssertionError(f"dtype is {out.dtype} and must be {reference.dtype}")
    if wrong := first_mismatches(out, reference):
        raise AssertionError(wrong)


def assert_gemm(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, c: float = 1.0) -> None:
    """out is a @ b + bias within gemm_bound, element by element."""
    bound = gemm_bound(a, b, out.dtype, bias, c)
    if wrong := first_mismatches(out, gemm_reference(a, b, bias), bound):
        raise AssertionError(wrong)


# Time


def input_sets(nbytes: int, device: torch.device | str = "cuda", most: int = 256) -> int:
    """How many input sets of nbytes each to rotate over, to exceed three times the L2 cache together.

    Sets smaller than 3 L2 / most stay partly in the cache whatever one does.
    """
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(most, 3 * cache // max(nbytes, 1) + 1)


def interleaved_samples(
    candidates: Mapping[str, Sequence[Callable[[], object]]], *, rounds: int = 20, replay_ms: float = 4.0
) -> dict[str, list[float]]:
    """Time of one call in µs, for each candidate and round; the samples of one round belong together.

    A candidate is a list of calls, one for each of its input sets. They are captured, repeated until they
    take about replay_ms, in one CUDA graph, and the candidates' graphs are replayed in turn, A B A B, so that
    all see the same clock: a chip warms up and slows down while it is measured. Only the device's time is
    seen, with launches back to back as in a decoder's graph.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    stream = torch.cuda.Stream()
    for name, calls in candidates.items():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # builds, loads and allocates what the first call needs
                call()
            start, end = _events()
            start.record(stream)
            for call in calls:
                call()
            end.record(stream)
            stream.synchronize()
        passes = math.ceil(replay_ms / max(start.elapsed_time(end), 1e-3))
        passes = min(passes, math.ceil(2000 / len(calls)))  # a graph of more nodes takes long to launch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(passes):
                for call in calls:
                    call()
        graphs[name] = graph, passes * len(calls)

    with torch.cuda.stream(stream):
        for graph, _ in graphs.values():  # the first replay uploads the graph
            graph.replay()
        stream.synchronize()
        events = {name: [_events() for _ in range(rounds)] for name in graphs}
        for i in range(rounds):
            for name, (graph, _) in graphs.items():
                start, end = events[name][i]
                start.record(stream)
                graph.replay()
                end.record(stream)
        stream.synchronize()
    return {
        name: [start.elapsed_time(end) * 1e3 / graphs[name][1] for start, end in pairs]
        for name, pairs in events.items()
    }


def time_interleaved(
    candidates: Mapping[str, Sequence[Callable[[], object]]], *, rounds: int = 20, replay_ms: float = 4.0
) -> dict[str, float]:
    """Median time of one call in µs for each candidate; see interleaved_samples."""
    samples = interleaved_samples(candidates, rounds=rounds, replay_ms=replay_ms)
    return {name: statistics.median(values) for name, values in samples.items()}


def host_time(fn: Callable[[], object], calls: int = 10_000) -> float:
    """Time of one call on the host in µs, without waiting for the device: the median of batches of 100 calls.

    The device is idle before each batch, and a batch fits into its queue of launches, so that a call never
    blocks.
    """
    batch = 100
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(batch):
        fn()
    samples = []
    for _ in range(max(1, calls // batch)):
        wait()
        start = time.perf_counter_ns()
        for _ in range(batch):
            fn()
        samples.append((time.perf_counter_ns() - start) / batch / 1e3)
    wait()
    return statistics.median(samples)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
