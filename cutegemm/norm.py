"""RMSNorm, with a residual added before it, and with its result quantized in the same pass.

    rms_norm(x) = x * rsqrt(mean(x * x) + eps) * (weight + weight_offset)

over the last dimension, in float32, rounded once, to the dtype of x. What is wrong with a call is a TypeError or
ValueError on a CPU and a RuntimeError with the same sentence on CUDA, before anything is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_device, check_floats, check_like, check_output
from .quantize import BLOCK, CODES, quantize_fused
from .registry import OPS, Input, nbytes, op


def _check_norm(op: str, x: Tensor, weight: Tensor | None, **others: Tensor | None) -> None:
    check_floats(op, "x", x)
    if weight is not None:
        if weight.dtype not in (torch.float32, x.dtype):
            raise TypeError(f"{op}: weight is {weight.dtype}; it must be torch.float32 or the dtype of x, {x.dtype}")
        if tuple(weight.shape) != (x.shape[-1],):
            raise ValueError(f"{op}: weight is {list(weight.shape)}; it must be [{x.shape[-1]}], as a row of x")
        check_device(op, "weight", weight, x)
    for name, other in others.items():
        if other is not None:
            check_like(op, name, other, x, tuple(x.shape))


def _norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    values = x.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * (weight.float() + weight_offset)
    return normed.to(x.dtype)


def _add(x: Tensor, residual: Tensor) -> Tensor:
    return (x.float() + residual.float()).to(x.dtype)


_WEIGHT = Input((96,))


@op(
    "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6, float weight_offset=0.0) -> Tensor",
    cases=[
        {"x": Input((5, 96)), "weight": _WEIGHT},
        {"x": Input((2, 3, 96), torch.float16), "weight": Input((96,), torch.float32), "weight_offset": 1.0},
        {"x": Input((7, 33), torch.float32), "eps": 1e-5},
        {"x": Input((0, 96)), "weight": _WEIGHT},
    ],
)
def _rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
    """`rms_norm` as a torch op."""
    _check_norm("rms_norm", x, weight)
    return _norm(x, weight, eps, weight_offset).contiguous()


@op(
    "rms_norm_out(Tensor(a!) out, Tensor x, Tensor? weight=None, float eps=1e-6, float weight_offset=0.0) -> ()",
    cases=[{"out": Input((5, 96)), "x": Input((5, 96)), "weight": _WEIGHT}],
    bytes=lambda **arguments: nbytes(arguments),
)
def _rms_norm_out(
    out: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0
) -> None:
    """`rms_norm` into out, as a torch op."""
    _check_norm("rms_norm", x, weight, out=out)
    check_output("rms_norm", "out", out, "x", x=x, weight=weight)
    out.copy_(_norm(x, weight, eps, weight_offset))


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """x * rsqrt(mean(x * x) + eps) * (weight + weight_offset), over the last dimension (Zhang and Sennrich, 2019).

    x: (..., hidden) of BF16, FP16 or FP32. weight: (hidden,) in float32 or the dtype of x; None is a weight of one, to
    which weight_offset is not added. weight_offset: 1 for Gemma, whose weights are stored less one.

    All is computed in float32 and rounded once. Rows with a stride are read in place, other layouts are copied first.
    out: of the shape and dtype of x, with a last dimension of stride one; it may be x itself.
    """
    if out is None:
        return _rms_norm(x, weight, eps, weight_offset)
    _rms_norm_out(out, x, weight, eps, weight_offset)
    return out


@op(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, float weight_offset=0.0) "
    "-> (Tensor, Tensor)",
    cases=[
        {"x": Input((5, 96)), "residual": Input((5, 96)), "weight": _WEIGHT},
        {"x": Input((2, 3, 33), torch.float32), "residual": Input((2, 3, 33), torch.float32)},
    ],
)
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual: returns (normed, residual).

    The sum is rounded to the dtype of x, which residual must have too, and the norm is that of the rounded sum. The
    rest is as in rms_norm.
    """
    _check_norm("fused_add_rms_norm", x, weight, residual=residual)
    total = _add(x, residual).contiguous()
    return _norm(total, weight, eps, weight_offset), total


@op(
    "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight=None, float eps=1e-6, "
    "float weight_offset=0.0) -> ()",
    cases=[{"x": Input((5, 96)), "residual": Input((5, 96)), "weight": _WEIGHT}],
    bytes=lambda x, residual, weight, **others: 2 * nbytes(x, residual) + nbytes(weight),
)
def fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0
) -> None:
    """fused_add_rms_norm in place: residual becomes x + residual and x its norm, as in vLLM.

    The rows of both must lie at equal distances, and their last dimension have stride one.
    """
    _check_norm("fused_add_rms_norm_", x, weight, residual=residual)
    check_output("fused_add_rms_norm_", "x", x, residual=residual, weight=weight)
    check_output("fused_add_rms_norm_", "residual", residual, weight=weight)
    total = _add(x, residual)
    residual.copy_(total)
    x.copy_(_norm(total, weight, eps, weight_offset))


_QUANT_SCHEMA = f"float eps=1e-6, float weight_offset=0.0, {CODES}, Tensor(n!)? normed=None"
_QUANT_CASES: list[dict[str, object]] = [
    {},
    {"dtype": torch.int8},
    {"scale": Input((1,), torch.float32, positive=True), "granularity": "tensor"},
    {"scale_ub": Input((), torch.float32, positive=True)},
    {"granularity": "group", "group_size": 64, "power_of_two_scale": True},
    {"granularity": "group", "column_major_scale": False, "normed": Input((5, 96))},
]


def _quantized(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    normed: Tensor | None,
    scale: Tensor | None,
    scale_ub: Tensor | None,
    in_place: bool = False,
    **codes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of the norm of x, or of x + residual, their scale, and what was normed."""
    _check_norm(name, x, weight, residual=residual, normed=normed)
    reads = {"weight": weight, "scale": scale, "scale_ub": scale_ub}
    check_output(name, "normed", normed, itself="x", x=x, residual=residual, **reads)
    if in_place:
        check_output(name, "residual", residual, itself="", x=x, **reads)
    total = x if residual is None else _add(x, residual).contiguous()
    values = _norm(total, weight, eps, weight_offset)
    q, of_q = quantize_fused(name, values, scale=scale, scale_ub=scale_ub, **codes)
    if in_place and residual is not None:
        residual.copy_(total)
    if normed is not None:
        normed.copy_(values)
    return q, of_q, total


@op(
    f"rms_norm_quant(Tensor x, Tensor? weight=None, {_QUANT_SCHEMA}) -> (Tensor, Tensor)",
    cases=[{"x": Input((5, 96)), "weight": _WEIGHT, **case} for case in _QUANT_CASES],
)
def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    granularity: str = "token",
    group_size: int = BLOCK,
    scale_ub: Tensor | None = None,
    column_major_scale: bool = True,
    power_of_two_scale: bool = False,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """rms_norm, quantized in the same pass: returns codes and scale, bit for bit those of the two ops apart.

    dtype: torch.float8_e4m3fn (None) or torch.int8. granularity: "token"; "tensor", with a given scale; for FP8 also
    "group". The others are as in quantize_fp8. normed: of the shape and dtype of x, takes the norm itself as well; its
    rows lie at equal distances, and it may be x itself, but not residual.
    """
    q, of_q, _ = _quantized(
        "rms_norm_quant", x, None, weight, eps, weight_offset, normed, scale, scale_ub,
        dtype=dtype, granularity=granularity, group_size=group_size, column_major_scale=column_major_scale,
        power_of_two_scale=power_of_two_scale,
    )  # fmt: skip
    return q, of_q


@op(
    f"fused_add_rms_norm_quant(Tensor x, Tensor residual, Tensor? weight=None, {_QUANT_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
    cases=[{"x": Input((5, 96)), "residual": Input((5, 96)), "weight": _WEIGHT, **case} for case in _QUANT_CASES],
)
def fused_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    granularity: str = "token",
    group_size: int = BLOCK,
    scale_ub: Tensor | None = None,
    column_major_scale: bool = True,
    power_of_two_scale: bool = False,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """fused_add_rms_norm with its norm quantized as by rms_norm_quant: returns codes, scale and x + residual."""
    return _quantized(
        "fused_add_rms_norm_quant", x, residual, weight, eps, weight_offset, normed, scale, scale_ub,
        dtype=dtype, granularity=granularity, group_size=group_size, column_major_scale=column_major_scale,
        power_of_two_scale=power_of_two_scale,
    )  # fmt: skip


@op(
    f"fused_add_rms_norm_quant_(Tensor x, Tensor(a!) residual, Tensor? weight=None, {_QUANT_SCHEMA}) "
    "-> (Tensor, Tensor)",
    cases=[{"x": Input((5, 96)), "residual": Input((5, 96)), "weight": _WEIGHT, **case} for case in _QUANT_CASES],
    bytes=lambda residual, **others: 2 * nbytes(residual) + OPS["rms_norm_quant"].bytes(**others),
)
def fused_add_rms_norm_quant_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    granularity: str = "token",
    group_size: int = BLOCK,
    scale_ub: Tensor | None = None,
    column_major_scale: bool = True,
    power_of_two_scale: bool = False,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fused_add_rms_norm_quant with x + residual written to residual: returns codes and scale."""
    q, of_q, _ = _quantized(
        "fused_add_rms_norm_quant_", x, residual, weight, eps, weight_offset, normed, scale, scale_ub, True,
        dtype=dtype, granularity=granularity, group_size=group_size, column_major_scale=column_major_scale,
        power_of_two_scale=power_of_two_scale,
    )  # fmt: skip
    return q, of_q
