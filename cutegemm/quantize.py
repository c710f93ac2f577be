"""Quantization to FP8 (e4m3) and INT8, and back. What is wrong with a call is a TypeError or ValueError on a CPU and a
RuntimeError with the same sentence on CUDA, before anything is written.

`quantize_rows` is the specification of every quantized output, also of the ops of norm.py and activation.py that
quantize what they compute.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .checks import check_device, check_floats
from .registry import Input, op

E4M3_MAX, INT8_MAX = 448.0, 127.0
BLOCK = 128  # rows and columns of a weight that have one scale with granularity "block"

# A smaller amax counts as this, so that the scale of zeros is an ordinary positive number. No nonzero FP16
# value is smaller, and the product of two such scales is still a normal float32.
AMAX_FLOOR = 2.0**-40

LARGEST = {torch.float8_e4m3fn: E4M3_MAX, torch.int8: INT8_MAX}

_COMPUTED_SCALE = (
    "int group_size=128, Tensor? scale_ub=None, bool column_major_scale=True, bool power_of_two_scale=False"
)
# How an op is asked for codes of what it computes: quantize_fused takes these.
CODES = f'ScalarType? dtype=None, Tensor? scale=None, str granularity="token", {_COMPUTED_SCALE}'


def check_quantization(
    op: str,
    x: Tensor,
    k: int,
    scale: Tensor | None,
    granularity: str,
    granularities: tuple[str, ...],
    group_size: int,
    scale_ub: Tensor | None,
    power_of_two_scale: bool,
) -> None:
    """What is wrong with how x, whose rows become k values each, is to be quantized."""
    if granularity not in granularities:
        names = [f"'{name}'" for name in granularities]
        raise ValueError(f"{op}: granularity is '{granularity}'; it must be {', '.join(names[:-1])} or {names[-1]}")
    if group_size not in (64, 128):
        raise ValueError(f"{op}: group_size is {group_size}; it must be 64 or 128")
    if scale_ub is not None:
        fault = TypeError if scale_ub.dtype != torch.float32 else ValueError if scale_ub.numel() != 1 else None
        if fault:
            raise fault(
                f"{op}: scale_ub is {scale_ub.dtype} of {list(scale_ub.shape)}; it must be one element of torch.float32"
            )
        check_device(op, "scale_ub", scale_ub, x)
    if scale is None:
        return
    for name, given in (("scale_ub", scale_ub is not None), ("power_of_two_scale", power_of_two_scale)):
        if given:
            raise ValueError(f"{op}: {name} is given with scale; it must be left out, since it is for a computed scale")
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: scale is {scale.dtype}; it must be torch.float32")
    check_device(op, "scale", scale, x)
    shape, leading = list(scale.shape), tuple(x.shape[:-1])
    if granularity == "tensor":
        if scale.numel() != 1:
            raise ValueError(f"{op}: scale is {shape}; for granularity 'tensor' it must have one element")
    elif granularity in ("token", "channel"):
        if not _is_one_a_row(scale, leading):
            raise ValueError(
                f"{op}: scale is {shape}; for granularity '{granularity}' "
                f"it must have one element for each row of x, which is {list(x.shape)}"
            )
    elif tuple(shape) != (want := _scale_shape(leading, k, granularity, group_size)):
        raise ValueError(f"{op}: scale is {shape}; for granularity '{granularity}' it must be {list(want)}")


def _is_one_a_row(scale: Tensor, leading: tuple[int, ...]) -> bool:
    rows = math.prod(leading)
    return tuple(scale.shape) in (leading, (*leading, 1), (rows,), (rows, 1), (1, rows))


def _scale_shape(leading: tuple[int, ...], k: int, granularity: str, group_size: int) -> tuple[int, ...]:
    if granularity == "tensor":
        return ()
    if granularity == "channel":
        return leading
    if granularity == "token":
        return (*leading, 1)
    if granularity == "group":
        return (*leading, -(-k // group_size))
    return (*leading[:-1], -(-leading[-1] // BLOCK), -(-k // BLOCK))


def columns_of_scales(leading: tuple[int, ...], groups: int, device: torch.device) -> Tensor:
    """(*leading, groups), a group's scales side by side, and as many in memory as 16 bytes hold whole."""
    rows = math.prod(leading)
    if not rows:
        return torch.empty(*leading, groups, dtype=torch.float32, device=device)
    pitch = -(-rows // 4) * 4
    strides = torch.empty(leading, device="meta").stride()
    columns = torch.empty(groups, pitch, dtype=torch.float32, device=device)
    return columns.as_strided((*leading, groups), (*strides, pitch))


def _spread(scale: Tensor, granularity: str, group_size: int, shape: torch.Size) -> Tensor:
    """A scale (or zero point) for every value."""
    if granularity == "tensor":
        return scale.reshape(())
    if granularity in ("token", "channel"):
        return scale.reshape(*shape[:-1], 1)
    columns = scale.repeat_interleave(group_size if granularity == "group" else BLOCK, -1)[..., : shape[-1]]
    return columns if granularity == "group" else columns.repeat_interleave(BLOCK, -2)[..., : shape[-2], :]


def _units(values: Tensor, granularity: str, group_size: int) -> Tensor:
    """The values that share a scale along the last dimension, with a zero or more after them."""
    if granularity == "tensor":
        return functional.pad(values.flatten(), (0, 1))
    if granularity in ("token", "channel"):
        return functional.pad(values, (0, 1))
    size = group_size if granularity == "group" else BLOCK
    groups = functional.pad(values, (0, -values.shape[-1] % size)).unflatten(-1, (-1, size))
    if granularity == "group":
        return groups
    groups = functional.pad(groups, (0, 0, 0, 0, 0, -values.shape[-2] % BLOCK))
    return groups.unflatten(-3, (-1, BLOCK)).transpose(-3, -2).flatten(-2)


def _divide(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once. By a number, torch multiplies by its reciprocal on CUDA."""
    return x / torch.full_like(x, by)


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    granularity: str,
    group_size: int = BLOCK,
    scale_ub: Tensor | None = None,
    column_major_scale: bool = True,
    power_of_two_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """The codes of x (..., k) and their scale, as quantize_fp8 and quantize_int8 say; x is checked."""
    values, leading = x.float(), tuple(x.shape[:-1])
    shape = _scale_shape(leading, x.shape[-1], granularity, group_size)
    if scale is None:
        finite = values.abs().nan_to_num(nan=0.0, posinf=0.0)
        amax = _units(finite, granularity, group_size).amax(-1)
        if scale_ub is not None:
            amax = amax.minimum(scale_ub.reshape(()))
        scale = _divide(amax.clamp_min(AMAX_FLOOR), LARGEST[dtype])
        if power_of_two_scale:
            scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = scale.reshape(shape)
    scaled = values / _spread(scale, granularity, group_size, x.shape)
    if dtype == torch.int8:
        q = scaled.nan_to_num(nan=0.0).round().clamp(-128, 127).to(torch.int8)
    else:
        # The cast keeps the sign of a NaN, which is not the same everywhere.
        q = torch.where(scaled.isnan(), torch.nan, scaled.clamp(-E4M3_MAX, E4M3_MAX)).to(dtype)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    if granularity == "group" and column_major_scale:
        out = columns_of_scales(leading, shape[-1], x.device)
    return q.contiguous(), out.copy_(scale)


def quantize_fused(
    op: str,
    values: Tensor,
    dtype: torch.dtype | None,
    scale: Tensor | None,
    granularity: str,
    group_size: int,
    scale_ub: Tensor | None,
    column_major_scale: bool,
    power_of_two_scale: bool,
) -> tuple[Tensor, Tensor]:
    """The codes of what another op computed, and their scale."""
    dtype = dtype or torch.float8_e4m3fn
    if dtype not in (torch.float8_e4m3fn, torch.int8):
        raise TypeError(f"{op}: dtype is {dtype}; it must be torch.float8_e4m3fn or torch.int8")
    names = ("tensor", "token", "group") if dtype == torch.float8_e4m3fn else ("tensor", "token")
    check_quantization(
        op, values, values.shape[-1], scale, granularity, names, group_size, scale_ub, power_of_two_scale
    )
    if granularity == "tensor" and scale is None:
        raise ValueError(f"{op}: scale is None; for granularity 'tensor' it must be given")
    return quantize_rows(
        values, dtype, scale, granularity, group_size, scale_ub, column_major_scale, power_of_two_scale
    )


@op(
    f'quantize_fp8(Tensor x, Tensor? scale=None, str granularity="tensor", {_COMPUTED_SCALE}) -> (Tensor, Tensor)',
    cases=[
        {"x": Input((5, 200))},
        {"x": Input((3, 7, 64), torch.float16), "granularity": "token"},
        {"x": Input((24, 130), torch.float32, transposed=True), "granularity": "channel"},
        {"x": Input((6, 33)), "scale": Input((1,), torch.float32, positive=True)},
        {"x": Input((6, 96)), "scale": Input((6, 1), torch.float32, positive=True), "granularity": "token"},
        {"x": Input((9, 96)), "scale_ub": Input((1,), torch.float32, positive=True), "granularity": "token"},
        {"x": Input((0, 64)), "granularity": "token"},
        {"x": Input((7, 300)), "granularity": "group"},
        {"x": Input((2, 5, 96)), "granularity": "group", "group_size": 64, "column_major_scale": False},
        {"x": Input((3, 129)), "granularity": "group", "power_of_two_scale": True},
        {"x": Input((150, 260)), "granularity": "block"},
    ],
)
def quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    granularity: str = "tensor",
    group_size: int = 128,
    scale_ub: Tensor | None = None,
    column_major_scale: bool = True,
    power_of_two_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize x (..., k) of BF16, FP16 or FP32 to e4m3: returns the codes q and their scale, x ≈ q * scale.

    granularity says what has a scale of its own, and so the shape of the scale that is returned:
      "tensor"   all of x: ()
      "token"    each row of activations (..., k): (..., 1)
      "channel"  each row of a weight (..., n, k): (..., n)
      "group"    each group_size (64 or 128) of a row's values: (..., ceil(k / group_size))
      "block"    each 128 x 128 of a weight (..., n, k): (..., ceil(n / 128), ceil(k / 128))

    scale: float32, on the device of x. With one scale a row it may also be (rows,), (rows, 1) or (1, rows);
    otherwise one element, or the shape above. Without it the scale is max(amax, 2**-40) / 448, where amax is
    the largest finite |x|; so zeros become zeros with a finite scale. Given what such a call returned, the op
    returns the same codes. A given scale must be positive and finite; this is not checked, since the host
    would have to wait for the device.

    scale_ub: one float32 on the device, an upper bound of amax, as in vLLM: what is larger saturates.
    power_of_two_scale: the computed scale is rounded up to a power of two (UE8M0), still as float32.
    column_major_scale: for granularity "group", the scales of a group lie side by side, and the distance
    between groups is the number of rows rounded up to 4 (16 bytes, as TMA asks): the layout that the
    block-scaled GEMM reads. Otherwise, and for all other granularities, the scale is contiguous.

    q is x / scale in float32, clamped to ±448 and rounded to nearest even. ±Inf becomes ±448 and NaN stays
    NaN. CPU and CUDA give the same bits.

    Slices of a wider tensor, whose last dimension has stride one and whose rows lie at equal distances, are
    read in place. An x of any other layout is copied first.
    """
    name, known = "quantize_fp8", ("tensor", "token", "channel", "group", "block")
    check_floats(name, "x", x)
    if granularity == "block" and x.dim() < 2:
        raise ValueError(f"{name}: x is {list(x.shape)}; for granularity 'block' it must have two dimensions or more")
    check_quantization(name, x, x.shape[-1], scale, granularity, known, group_size, scale_ub, power_of_two_scale)
    return quantize_rows(
        x, torch.float8_e4m3fn, scale, granularity, group_size, scale_ub, column_major_scale, power_of_two_scale
    )


@op(
    'quantize_int8(Tensor x, Tensor? scale=None, str granularity="tensor") -> (Tensor, Tensor)',
    cases=[
        {"x": Input((5, 200))},
        {"x": Input((3, 7, 64), torch.float16), "granularity": "token"},
        {"x": Input((24, 130), torch.float32, transposed=True), "granularity": "channel"},
        {"x": Input((6, 96)), "scale": Input((6, 1), torch.float32, positive=True), "granularity": "token"},
    ],
)
def quantize_int8(x: Tensor, scale: Tensor | None = None, granularity: str = "tensor") -> tuple[Tensor, Tensor]:
    """Quantize x (..., k) of BF16, FP16 or FP32 to int8: returns the codes q and their scale, x ≈ q * scale.

    As quantize_fp8 with granularity "tensor", "token" or "channel". The scale is max(amax, 2**-40) / 127; q is
    x / scale in float32, rounded to nearest even and clamped to -128..127. NaN becomes 0.
    """
    name, known = "quantize_int8", ("tensor", "token", "channel")
    check_floats(name, "x", x)
    check_quantization(name, x, x.shape[-1], scale, granularity, known, BLOCK, None, False)
    return quantize_rows(x, torch.int8, scale, granularity)


@op(
    "quantize_int8_asymmetric(Tensor x, Tensor? scale=None, Tensor? zero_point=None, "
    'str granularity="token") -> (Tensor, Tensor, Tensor)',
    cases=[
        {"x": Input((5, 200))},
        {"x": Input((3, 7, 64), torch.float16), "granularity": "tensor"},
        {
            "x": Input((6, 96)),
            "scale": Input((6, 1), torch.float32, positive=True),
            "zero_point": Input((6, 1), torch.int32, high=9),
        },
    ],
)
def quantize_int8_asymmetric(
    x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, granularity: str = "token"
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x (..., k) to int8 with a zero point: returns q, scale and zero_point, x ≈ (q - zero_point) * scale.

    granularity: "token", with scale and zero_point (..., 1), or "tensor", with both ().

    The scale is max(high / 255 - low / 255, 2**-40) and the zero point round(-128 - low / scale), an int32, where
    low and high are the smallest and the largest of 0 and the finite x: so zero has a code of its own. q is
    round(x / scale) + zero_point, clamped to -128..127; roundings are to nearest even; NaN counts as 0.
    scale and zero_point are given both or neither.
    """
    name = "quantize_int8_asymmetric"
    check_floats(name, "x", x)
    check_quantization(name, x, x.shape[-1], scale, granularity, ("tensor", "token"), BLOCK, None, False)
    if (scale is None) != (zero_point is None):
        raise ValueError(f"{name}: one of scale and zero_point is given; both must be, or neither")
    values = x.float()
    shape = _scale_shape(tuple(x.shape[:-1]), x.shape[-1], granularity, BLOCK)
    if zero_point is not None and scale is not None:
        if zero_point.dtype != torch.int32:
            raise TypeError(f"{name}: zero_point is {zero_point.dtype}; it must be torch.int32")
        check_device(name, "zero_point", zero_point, x)
        if zero_point.shape != scale.shape:
            raise ValueError(
                f"{name}: zero_point is {list(zero_point.shape)}; it must be the shape of scale, {list(scale.shape)}"
            )
        scale, zero_point = (t.reshape(shape).clone(memory_format=torch.contiguous_format) for t in (scale, zero_point))
    else:
        units = _units(values.where(values.isfinite(), 0.0), granularity, BLOCK)  # which have a zero at the end
        low, high = units.amin(-1).reshape(shape), units.amax(-1).reshape(shape)
        scale = (_divide(high, 255.0) - _divide(low, 255.0)).clamp_min(AMAX_FLOOR)
        zero_point = (-128 - low / scale).round().to(torch.int32)
    scaled = values / _spread(scale, granularity, BLOCK, x.shape)
    q = scaled.nan_to_num(nan=0.0).round() + _spread(zero_point, granularity, BLOCK, x.shape)
    return q.clamp(-128, 127).to(torch.int8).contiguous(), scale, zero_point


def _dequantize(name: str, q: Tensor, scale: Tensor, group_size: int, zero_point: Any = None) -> Tensor:
    values, leading = q.float(), tuple(q.shape[:-1])
    granularity = ""
    if scale.numel() == 1 and q.numel() != 0:
        granularity = "tensor"
    else:  # the shapes that are returned first: a block's (1, n) is one of a row's too
        for candidate in ("token", "channel", "group", "block") if q.dim() > 1 else ("token", "channel", "group"):
            if tuple(scale.shape) == _scale_shape(leading, q.shape[-1], candidate, group_size):
                granularity = candidate
                break
        if not granularity and _is_one_a_row(scale, leading):
            granularity = "token"
    if not granularity:
        raise ValueError(
            f"{name}: scale is {list(scale.shape)}; it must have one element, one for each row of q, which is "
            f"{list(q.shape)}, or one for each group of {group_size} or each block of 128 x 128"
        )
    if zero_point is not None:
        values = values - _spread(zero_point, granularity, group_size, q.shape)
    return values * _spread(scale, granularity, group_size, q.shape)


def dequantize_fp8(q: Tensor, scale: Tensor, group_size: int = 128) -> Tensor:
    """q * scale in float32, in plain torch, for q (..., k) and a scale as quantize_fp8 returns it.

    group_size is for a scale (..., ceil(k / group_size)). A shape of granularity "token", "channel", "group" or "block"
    is taken as that, in this order; another that has one scale a row, as one a row.
    """
    return _dequantize("dequantize_fp8", q, scale, group_size)


def dequantize_int8(q: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """(q - zero_point) * scale in float32, in plain torch, for what quantize_int8 and its asymmetric form return."""
    return _dequantize("dequantize_int8", q, scale, BLOCK, zero_point)
