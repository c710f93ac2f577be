"""Quantization to FP8 (e4m3), with one scale for a tensor or one for each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from .registry import Input, op

E4M3_MAX = 448.0

# A smaller amax counts as this, so that the scale of zeros is an ordinary positive number. No nonzero FP16
# value is smaller, and the product of two such scales is still a normal float32.
AMAX_FLOOR = 2.0**-40


def check_quantize_fp8(x: Tensor, scale: Tensor | None, granularity: str) -> None:
    if granularity not in ("tensor", "token", "channel"):
        raise ValueError(f"quantize_fp8: granularity is '{granularity}'; it must be 'tensor', 'token' or 'channel'")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"quantize_fp8: x is {x.dtype}; it must be torch.bfloat16, torch.float16 or torch.float32")
    if x.dim() == 0:
        raise ValueError("quantize_fp8: x has no dimension; it must have at least one")
    if scale is None:
        return
    if scale.dtype != torch.float32:
        raise TypeError(f"quantize_fp8: scale is {scale.dtype}; it must be torch.float32")
    if scale.device != x.device:
        raise ValueError(f"quantize_fp8: scale is on {scale.device}; it must be on the device of x, {x.device}")
    if granularity == "tensor":
        if scale.numel() != 1:
            raise ValueError(
                f"quantize_fp8: scale is {list(scale.shape)}; for granularity 'tensor' it must have one element"
            )
    elif not _is_one_a_row(scale, x):
        raise ValueError(
            f"quantize_fp8: scale is {list(scale.shape)}; for granularity '{granularity}' "
            f"it must have one element for each row of x, which is {list(x.shape)}"
        )


def _is_one_a_row(scale: Tensor, x: Tensor) -> bool:
    leading = tuple(x.shape[:-1])
    rows = math.prod(leading)
    return tuple(scale.shape) in (leading, (*leading, 1), (rows,), (rows, 1), (1, rows))


@op(
    'quantize_fp8(Tensor x, Tensor? scale=None, str granularity="tensor") -> (Tensor, Tensor)',
    cases=[
        {"x": Input((5, 200))},
        {"x": Input((3, 7, 64), torch.float16), "granularity": "token"},
        {"x": Input((24, 130), torch.float32, transposed=True), "granularity": "channel"},
        {"x": Input((6, 33)), "scale": Input((1,), torch.float32, positive=True)},
        {"x": Input((6, 96)), "scale": Input((6, 1), torch.float32, positive=True), "granularity": "token"},
        {"x": Input((0, 64)), "granularity": "token"},
    ],
)
def quantize_fp8(x: Tensor, scale: Tensor | None = None, granularity: str = "tensor") -> tuple[Tensor, Tensor]:
    """Quantize x (..., k) of BF16, FP16 or FP32 to e4m3: returns the codes q and their scale, x ≈ q * scale.

    granularity says what has a scale of its own, and so the shape of the scale that is returned:
      "tensor"   all of x: ()
      "token"    each row of activations (..., k): (..., 1)
      "channel"  each row of a weight (..., n, k): (..., n)

    scale: float32, on the device of x, with one element or one for each row, then also as (rows,), (rows, 1)
    or (1, rows). Without it the scale is max(amax, 2**-40) / 448, where amax is the largest finite |x|; so
    zeros become zeros with a finite scale. Given what such a call returned, the op returns the same codes. A
    given scale must be positive and finite; this is not checked, since the host would have to wait for the
    device.

    q is x / scale in float32, clamped to ±448 and rounded to nearest even. ±Inf becomes ±448 and NaN stays
    NaN. CPU and CUDA give the same bits.

    Slices of a wider tensor, whose last dimension has stride one and whose rows lie at equal distances, are
    read in place. An x of any other layout is copied first.
    """
    check_quantize_fp8(x, scale, granularity)
    values = x.float().contiguous()
    if scale is None:
        finite = values.abs().nan_to_num(nan=0.0, posinf=0.0)
        if granularity == "tensor":
            finite = finite.flatten()
        # The pad is for k = 0, where torch has no maximum.
        amax = functional.pad(finite, (0, 1)).amax(-1).clamp_min(AMAX_FLOOR)
        # Not by a number: on CUDA torch multiplies by its reciprocal.
        scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = scale.reshape(() if granularity == "tensor" else x.shape[:-1]).clone()
    for_rows = scale if granularity == "tensor" else scale.unsqueeze(-1)
    scaled = (values / for_rows).clamp(-E4M3_MAX, E4M3_MAX)
    # The cast keeps the sign of a NaN, which is not the same everywhere.
    q = torch.where(scaled.isnan(), torch.nan, scaled).to(torch.float8_e4m3fn)
    return q, for_rows if granularity == "token" else scale


def dequantize_fp8(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale in float32, in plain torch, for q (..., k) and a scale of one element or one for each row."""
    if scale.numel() == 1:
        return q.float() * scale.reshape(())
    if not _is_one_a_row(scale, q):
        raise ValueError(
            f"dequantize_fp8: scale is {list(scale.shape)}; "
            f"it must have one element or one for each row of q, which is {list(q.shape)}"
        )
    return q.float() * scale.reshape(*q.shape[:-1], 1)
