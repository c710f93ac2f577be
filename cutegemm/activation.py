"""Activation functions of a feed-forward layer, plain or gated, with their result quantized in the same pass.

    activation(x) = f(min(g, limit)) * (clamp(u, -limit, limit) + beta)

in float32, rounded once, to the dtype of x. g and u are the two parts of x that `gate` names; without a gate it is
f(min(x, limit)). Without a limit nothing is clamped. f is one of FUNCTIONS, and alpha is silu's alone. What is wrong
with a call is a TypeError or ValueError on a CPU and a RuntimeError with the same sentence on CUDA, before anything is
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .checks import check_floats, check_like, check_output
from .quantize import BLOCK, CODES, quantize_fused
from .registry import Input, nbytes, op

FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, alpha: 0.5 * x * torch.special.erfc(-math.sqrt(0.5) * x),
    # (1 + tanh(y)) / 2 is sigmoid(2 y), without the cancellation.
    "gelu_tanh": lambda x, alpha: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "relu2": lambda x, alpha: x.relu().square(),
}
GATES = ("none", "first", "second", "interleaved")


def _check(
    op: str,
    x: Tensor,
    function: str,
    gate: str,
    limit: float | None,
    alpha: float,
    beta: float,
    **results: Tensor | None,
) -> None:
    check_floats(op, "x", x)
    if function not in FUNCTIONS:
        raise ValueError(f"{op}: function is '{function}'; it must be 'silu', 'gelu', 'gelu_tanh' or 'relu2'")
    if gate not in GATES:
        raise ValueError(f"{op}: gate is '{gate}'; it must be 'none', 'first', 'second' or 'interleaved'")
    if limit is not None and not limit >= 0:
        raise ValueError(f"{op}: limit is {limit:g}; it must be zero or more")
    if alpha != 1 and function != "silu":
        raise ValueError(f"{op}: alpha is {alpha:g}; it must be 1, since only 'silu' has one")
    if beta != 0 and gate == "none":
        raise ValueError(f"{op}: beta is {beta:g}; it must be 0, since with gate 'none' there is nothing to add it to")
    if gate != "none" and x.shape[-1] % 2:
        raise ValueError(f"{op}: x is {list(x.shape)}; its last dimension must be even, a gate for each value")
    for name, result in results.items():
        if result is not None:
            check_like(op, name, result, x, (*x.shape[:-1], x.shape[-1] // (1 if gate == "none" else 2)))


def _activated(x: Tensor, function: str, gate: str, limit: float | None, alpha: float, beta: float) -> Tensor:
    values = up = x.float()
    if gate == "interleaved":
        values, up = values[..., ::2], values[..., 1::2]
    elif gate != "none":
        first, second = values.chunk(2, -1) if values.shape[-1] else (values, values)
        values, up = (first, second) if gate == "first" else (second, first)
    if limit is not None:
        values, up = values.clamp_max(limit), up.clamp(-limit, limit)
    result = FUNCTIONS[function](values, alpha)
    if gate != "none":
        result = result * (up + beta)
    return result.to(x.dtype).contiguous()


_ARGUMENTS = 'Tensor x, str function="silu", str gate="first", float? limit=None, float alpha=1.0, float beta=0.0'

_CASES: list[dict[str, object]] = [
    {"x": Input((5, 192))},
    {"x": Input((2, 3, 66), torch.float16), "function": "gelu", "gate": "second"},
    {"x": Input((5, 192)), "gate": "interleaved", "limit": 1.5, "alpha": 1.702, "beta": 1.0},
    {"x": Input((7, 33), torch.float32), "function": "gelu_tanh", "gate": "none"},
    {"x": Input((0, 64)), "function": "relu2"},
]


@op(f"activation({_ARGUMENTS}) -> Tensor", cases=_CASES)
def _activation(
    x: Tensor,
    function: str = "silu",
    gate: str = "first",
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """`activation` as a torch op."""
    _check("activation", x, function, gate, limit, alpha, beta)
    return _activated(x, function, gate, limit, alpha, beta)


@op(
    f"activation_out(Tensor(a!) out, {_ARGUMENTS}) -> ()",
    cases=[{"out": Input((5, 96)), "x": Input((5, 192))}],
    bytes=lambda **arguments: nbytes(arguments),
)
def _activation_out(
    out: Tensor,
    x: Tensor,
    function: str = "silu",
    gate: str = "first",
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """`activation` into out, as a torch op."""
    _check("activation", x, function, gate, limit, alpha, beta, out=out)
    check_output("activation", "out", out, "x" if gate == "none" else "", x=x)
    out.copy_(_activated(x, function, gate, limit, alpha, beta))


def activation(
    x: Tensor,
    function: str = "silu",
    gate: str = "first",
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The activation of x (..., d) or, with a gate, (..., 2 d), of BF16, FP16 or FP32: (..., d) in the dtype of x.

    function: "silu", x / (1 + exp(-alpha x)); "gelu", x / 2 * erfc(-x / sqrt(2)), and "gelu_tanh", its approximation by
    tanh (Hendrycks and Gimpel, 2016); "relu2", max(x, 0)**2. gate: where the values that are activated lie; they are
    multiplied with the others: "none" all of x, "first" or "second" half, "interleaved" the even elements. limit,
    alpha, beta: as in the formula at the head of this module.

    Rows with a stride are read in place, other layouts are copied first. out: of the shape and dtype of the result, its
    rows at equal distances; with gate "none" it may be x itself.
    """
    if out is None:
        return _activation(x, function, gate, limit, alpha, beta)
    _activation_out(out, x, function, gate, limit, alpha, beta)
    return out


@op(
    f"activation_quant({_ARGUMENTS}, {CODES}, Tensor(n!)? activated=None) -> (Tensor, Tensor)",
    cases=[
        {"x": Input((5, 192))},
        {"x": Input((5, 192)), "dtype": torch.int8, "function": "relu2"},
        {"x": Input((6, 66)), "scale": Input((1,), torch.float32, positive=True), "granularity": "tensor"},
        {"x": Input((5, 300)), "granularity": "group", "gate": "interleaved", "activated": Input((5, 150))},
        {"x": Input((5, 200), torch.float16), "granularity": "group", "group_size": 64, "gate": "none"},
    ],
)
def activation_quant(
    x: Tensor,
    function: str = "silu",
    gate: str = "first",
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    granularity: str = "token",
    group_size: int = BLOCK,
    scale_ub: Tensor | None = None,
    column_major_scale: bool = True,
    power_of_two_scale: bool = False,
    activated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`activation`, quantized in the same pass: returns codes and scale, bit for bit those of the two ops apart.

    The arguments of the codes are those of rms_norm_quant. activated: (..., d) in the dtype of x, takes the activation
    itself as well; what is said of out in `activation` holds for it.
    """
    _check("activation_quant", x, function, gate, limit, alpha, beta, activated=activated)
    itself = "x" if gate == "none" else ""
    check_output("activation_quant", "activated", activated, itself, x=x, scale=scale, scale_ub=scale_ub)
    values = _activated(x, function, gate, limit, alpha, beta)
    codes = quantize_fused(
        "activation_quant", values, dtype, scale, granularity, group_size, scale_ub, column_major_scale,
        power_of_two_scale,
    )  # fmt: skip
    if activated is not None:
        activated.copy_(values)
    return codes


def silu_and_mul(
    x: Tensor, limit: float | None = None, alpha: float = 1.0, beta: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """silu of the first half of x times its second half: SwiGLU (Shazeer, 2020). See `activation`."""
    return activation(x, "silu", "first", limit, alpha, beta, out)


def mul_and_silu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """silu of the second half of x times its first half. See `activation`."""
    return activation(x, "silu", "second", out=out)


def gelu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu of the first half of x times its second half: GEGLU. See `activation`."""
    return activation(x, "gelu", "first", out=out)


def gelu_tanh_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu by tanh of the first half of x times its second half. See `activation`."""
    return activation(x, "gelu_tanh", "first", out=out)


def swigluoai_and_mul(
    x: Tensor, alpha: float = 1.702, limit: float = 7.0, beta: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """The gated unit of gpt-oss: even elements are gates, odd ones what they are multiplied with. See `activation`."""
    return activation(x, "silu", "interleaved", limit, alpha, beta, out)


def gelu_new(x: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu by tanh, as in GPT-2. See `activation`."""
    return activation(x, "gelu_tanh", "none", out=out)


# The same function: the two are written in different ways where they come from.
gelu_fast = gelu_new


def gelu_quick(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x / (1 + exp(-1.702 x)), as in CLIP. See `activation`."""
    return activation(x, "silu", "none", None, 1.702, out=out)


def relu2(x: Tensor, out: Tensor | None = None) -> Tensor:
    """max(x, 0)**2 (So et al., 2021). See `activation`."""
    return activation(x, "relu2", "none", out=out)
