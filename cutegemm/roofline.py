"""How fast an op could be: bytes, FLOPs and the floor under its time.

The floor is the longer of two times: reading the bytes in one launch, and doing the FLOPs at the best rate
that a library reached. Both were measured on one H200 (141 GB, driver 580.159.04, torch 2.11.0+cu130,
2026-11-29), by CUDA-graph replay over buffers larger than L2: rates that were seen, not a data sheet's. With
programmatic dependent launch a kernel can go under: it reads its weight while the one ahead of it drains.
"""

from bisect import bisect_left

import torch

# (MB, us) of one plain kernel that reads that many 10**6 bytes once: 16-byte loads, best of several grids.
# The first point is an empty kernel.
READ_FLOOR = (
    (0.0, 0.73),
    (1.0, 2.0),
    (2.0, 2.4),
    (4.3, 2.9),
    (8.7, 3.95),
    (16.8, 5.86),
    (30.3, 9.0),
    (60.6, 16.4),
    (117.0, 29.6),
    (235.0, 56.4),
)
STREAM_TBS = 4.3  # past the table: the best of kernels that only stream

PEAK_TFLOPS = {  # by operand dtype; float16 has bfloat16's rate, e5m2 and int8 (of which none was measured) e4m3's
    torch.float8_e4m3fn: 1514.0,
    torch.float8_e5m2: 1514.0,
    torch.int8: 1514.0,
    torch.bfloat16: 778.0,
    torch.float16: 778.0,
}


def gemm_flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def gemm_bytes(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype = torch.bfloat16,
    scales: int = 0,
    weight: int | None = None,
) -> int:
    """Bytes that d = a @ b must move: each operand, result and float32 scale once. weight: of b, if not in dtype."""
    of_b = n * k * dtype.itemsize if weight is None else weight
    return m * k * dtype.itemsize + of_b + m * n * out_dtype.itemsize + 4 * scales


def read_floor_us(nbytes: float) -> float:
    """Least time in us for one launch to read nbytes from memory: the table, linear between its points."""
    mb = nbytes / 1e6
    last_mb, last_us = READ_FLOOR[-1]
    if mb >= last_mb:
        return last_us + (mb - last_mb) / STREAM_TBS
    i = max(1, bisect_left(READ_FLOOR, (mb, 0.0)))
    (x0, y0), (x1, y1) = READ_FLOOR[i - 1], READ_FLOOR[i]
    return y0 + (y1 - y0) * (mb - x0) / (x1 - x0)


def floor_us(nbytes: float, flops: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> float:
    """Least time in us for one launch that moves nbytes and does flops on operands of that dtype."""
    return max(read_floor_us(nbytes), flops / PEAK_TFLOPS[dtype] / 1e6)
