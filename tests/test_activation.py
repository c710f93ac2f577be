"""Activations against float64, and their quantized forms against the ops apart, bit for bit."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import cutegemm
from cutegemm.quantize import quantize_fp8, quantize_int8
from cutegemm.testing import guarded, make_operand, misaligned, padded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x * sigmoid(alpha * x)


def gelu(x: Tensor) -> Tensor:
    return x / 2 * torch.special.erfc(-x / math.sqrt(2))


def gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh(y)) / 2 is sigmoid(2 y), without the cancellation.
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def swigluoai(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp_max(7), x[..., 1::2].clamp(-7, 7)
    return silu(gate, 1.702) * (up + 1)


# Each in float64 of the values of x.
GATED = {
    "silu_and_mul": lambda x: silu(halves(x)[0]) * halves(x)[1],
    "mul_and_silu": lambda x: halves(x)[0] * silu(halves(x)[1]),
    "gelu_and_mul": lambda x: gelu(halves(x)[0]) * halves(x)[1],
    "gelu_tanh_and_mul": lambda x: gelu_tanh(halves(x)[0]) * halves(x)[1],
    "swigluoai_and_mul": swigluoai,
}
PLAIN = {
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_quick": lambda x: silu(x, 1.702),
    "relu2": lambda x: x.clamp_min(0).square(),
}
WIDTHS = [1, 3, 8, 65, 128, 1234, 1710, 3420, 4096, 14336]


def make(rows: int, width: int, dtype: torch.dtype = BF16, seed: int = 0, device: str = "cpu") -> Tensor:
    return make_operand(rows, width, dtype, seed=seed).to(device)


def assert_rounded(out: Tensor, want: Tensor) -> None:
    """out is want, rounded once, of a float32 computation of a few roundings.

    An error of y becomes one of |y| in exp(y), and what is small here is so by an exponential. Below 1e-34 there may
    be nothing left: in float32 exp(89) is infinite.
    """
    info = torch.finfo(out.dtype)
    roundings = 16 + 8 * want.abs().clamp_min(1e-45).log().abs()
    bound = want.abs() * (info.eps / 2 + roundings * 2.0**-24) + 4 * info.smallest_normal * info.eps + 1e-34
    over = ((out.cpu().double() - want).abs() > bound) & ~(want.abs() > info.max)
    assert not bool(over.any()), (
        f"{int(over.sum())} of {over.numel()}, the first: {out.cpu()[over][0].item()} for {want[over][0].item()}"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", GATED)
def test_case_031_gated(device: str, name: str, width: int, dtype: torch.dtype) -> None:
    x = make(5, 2 * width, dtype)
    out = getattr(cutegemm, name)(x.to(device))
    assert out.shape == (5, width)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_rounded(out, GATED[name](x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLAIN)
def test_plain(device: str, name: str, width: int, dtype: torch.dtype) -> None:
    x = make(5, width, dtype)
    assert_rounded(getattr(cutegemm, name)(x.to(device)), PLAIN[name](x.double()))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_value_of_16_bits(device: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = x.isfinite()
    for name in PLAIN:
        out = getattr(cutegemm, name)(x.to(device)).cpu()
        assert_rounded(out[finite], PLAIN[name](x.double())[finite])
        assert bool(out[x.isnan()].isnan().all())
    ones = torch.stack([x, torch.ones_like(x)], 1).to(device)
    assert_rounded(cutegemm.silu_and_mul(ones)[finite.to(device)], silu(x.double())[finite, None])


def test_limit_clamps_both_and_lets_nan_pass(device: str) -> None:
    x = torch.tensor([[9.0, -9.0, math.nan, 1.0, 9.0, -9.0, 1.0, math.nan]], device=device)
    out = cutegemm.silu_and_mul(x, limit=2.0)
    gate, up = torch.tensor([[2.0, -9.0]]).double(), torch.tensor([[2.0, -2.0]]).double()
    assert_rounded(out[:, :2], silu(gate) * up)
    assert bool(out[:, 2:].isnan().all())
    free = cutegemm.silu_and_mul(x)
    assert_rounded(free[:, :2], silu(torch.tensor([[9.0, -9.0]]).double()) * torch.tensor([[9.0, -9.0]]))


@pytest.mark.parametrize(("argument", "value"), [("limit", 0.5), ("alpha", 2.0), ("beta", 1.0)])
def test_every_constant_counts(device: str, argument: str, value: float) -> None:
    x = make(4, 64, FP32, device=device)
    constants: dict[str, Any] = {"limit": None, "alpha": 1.0, "beta": 0.0, argument: value}
    gate, up = halves(x.cpu().double())
    if constants["limit"] is not None:
        gate, up = gate.clamp_max(value), up.clamp(-value, value)
    want = silu(gate, constants["alpha"]) * (up + constants["beta"])
    out = cutegemm.silu_and_mul(x, **constants)
    assert_rounded(out, want)
    assert not torch.equal(out, cutegemm.silu_and_mul(x))


# Quantized

QUANTIZED: dict[str, dict[str, Any]] = {
    "token": {},
    "token, bound": {"scale_ub": torch.tensor([2.0])},
    "token, int8": {"dtype": torch.int8},
    "tensor": {"granularity": "tensor", "scale": torch.tensor(0.03)},
    "group": {"granularity": "group"},
    "group of 64, rows, powers of two": {
        "granularity": "group",
        "group_size": 64,
        "column_major_scale": False,
        "power_of_two_scale": True,
    },
}


@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("width", [1, 65, 128, 2048, 3420, 4096, 14336, 20480, 33001])
@pytest.mark.parametrize(
    "arguments",
    [
        ("silu", "first", None, 1.0, 0.0),
        ("silu", "first", 5.0, 1.5, 0.5),
        ("gelu", "interleaved", 5.0, 1.0, 0.5),
        ("relu2", "none", 5.0, 1.0, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_quantized_has_the_bits_of_the_ops_apart(
    device: str, width: int, arguments: tuple[Any, ...], dtype: torch.dtype, case: dict[str, Any]
) -> None:
    x = make(3, width if arguments[1] == "none" else 2 * width, dtype, device=device)
    case = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in case.items()}
    activated = cutegemm.activation(x, *arguments)
    for also in (None, torch.empty_like(activated)):
        q, scale = cutegemm.activation_quant(x, *arguments, **case, activated=also)
        given = dict(case)
        if given.pop("dtype", None) == torch.int8:
            want, its_scale = quantize_int8(activated, granularity="token")
        else:
            want, its_scale = quantize_fp8(activated, **{"granularity": "token", **given})
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, its_scale)
        assert scale.stride() == its_scale.stride()
        assert also is None or torch.equal(also, activated)


@pytest.mark.parametrize("arguments", [("silu", "first", None, 1.0, 0.0), ("gelu_tanh", "second", 5.0, 1.0, 0.0)])
def test_many_rows_give_what_few_give(device: str, arguments: tuple[Any, ...]) -> None:
    x = make(300, 2 * 14336, device=device)  # more than 2^22 values are cut in another way
    few = slice(0, 300, 37)
    assert torch.equal(cutegemm.activation(x, *arguments)[few], cutegemm.activation(x[few], *arguments))
    for case in ({"granularity": "tensor", "scale": torch.tensor(0.03, device=device)}, {"granularity": "group"}):
        q, scale = cutegemm.activation_quant(x, *arguments, **case)
        want, its_scale = cutegemm.activation_quant(x[few], *arguments, **case)
        assert torch.equal(q[few].view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale[few] if scale.dim() else scale, its_scale)


# Layouts


@pytest.mark.parametrize("gate", ["first", "second", "interleaved", "none"])
@pytest.mark.parametrize("width", [2, 66, 128])
def test_layouts_give_what_their_copies_give(device: str, gate: str, width: int) -> None:
    x = make(12, width, device=device)
    want = cutegemm.activation(x, "silu", gate)
    for view in (
        padded(x, width + 8),
        padded(x, width + 1, fill=math.nan),
        misaligned(x, 1),
        misaligned(x, 4),
        x.t().contiguous().t(),
        x.repeat_interleave(2, -1)[:, ::2],
        padded(x.view(3, 4, width), width + 8),
        torch.cat([x.view(3, 4, width)] * 2, 1)[:, :4],
    ):
        assert torch.equal(cutegemm.activation(view, "silu", gate).view_as(want), want)


def test_output_with_gaps(device: str) -> None:
    x = make(7, 192, device=device)
    for pitch in (96, 97, 128):
        out, check = guarded((7, 96), device=device, pitch=pitch)
        assert cutegemm.silu_and_mul(x, out=out) is out
        assert torch.equal(out, cutegemm.silu_and_mul(x))
        check()


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=BF16, device=device)
    assert cutegemm.silu_and_mul(x).shape == (*shape[:-1], shape[-1] // 2)
    q, scale = cutegemm.activation_quant(x)
    assert q.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.shape == (*shape[:-1], 1)
    assert bool((scale > 0).all())
    cutegemm.silu_and_mul(make(3, 10, device=device))


def test_case_023_nan_and_zeros_touch_only_themselves(device: str) -> None:
    x = make(6, 512, device=device)
    bad = x.clone()
    bad[1], bad[3, 5] = 0, math.nan
    q, scale = cutegemm.activation_quant(bad)
    want, its_scale = cutegemm.activation_quant(x)
    assert int(q[1].view(torch.uint8).max()) == 0
    assert int(q[3, 5].view(torch.uint8)) == 0x7F
    assert bool(scale.isfinite().all() and (scale > 0).all())
    assert torch.equal(q.view(torch.uint8)[[0, 2, 4, 5]], want.view(torch.uint8)[[0, 2, 4, 5]])
    assert torch.equal(scale[[0, 2, 4, 5]], its_scale[[0, 2, 4, 5]])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65535, 65536, 262141])
def test_case_025_many_rows(rows: int) -> None:
    x = make_operand(rows, 192, device="cuda")
    for part in (slice(0, 5), slice(rows - 5, rows)):
        assert torch.equal(cutegemm.silu_and_mul(x)[part], cutegemm.silu_and_mul(x[part]))
        q, want = cutegemm.activation_quant(x)[0][part], cutegemm.activation_quant(x[part])[0]
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    rows = 524289
    x = torch.zeros(rows, 8192, dtype=BF16, device="cuda")
    last = [0, 1, rows // 2, rows - 2, rows - 1]
    x[last] = make(5, 8192, device="cuda")
    want = cutegemm.silu_and_mul(x[last])
    assert torch.equal(cutegemm.silu_and_mul(x)[last], want)
    q, scale = cutegemm.activation_quant(x)
    other, its_scale = quantize_fp8(want, granularity="token")
    assert torch.equal(q[last].view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(scale[last], its_scale)


# Errors

X = torch.ones(4, 8)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("activation", {"x": X.int()}, "x is torch.int32; it must be torch.bfloat16, torch.float16 or torch.float32"),
    ("activation", {"x": torch.ones(4, 7)}, "x is [4, 7]; its last dimension must be even, a gate for each value"),
    ("activation", {"x": X, "function": "swish"}, "function is 'swish'; it must be 'silu', 'gelu', 'gelu_tanh' or"),
    ("activation", {"x": X, "gate": "left"}, "gate is 'left'; it must be 'none', 'first', 'second' or 'interleaved'"),
    ("activation", {"x": X, "limit": -1.0}, "limit is -1; it must be zero or more"),
    (
        "activation_quant",
        {"x": X, "granularity": "row"},
        "granularity is 'row'; it must be 'tensor', 'token' or 'group'",
    ),
    ("activation_quant", {"x": X, "granularity": "tensor"}, "scale is None; for granularity 'tensor' it must be given"),
    ("activation_quant", {"x": X, "activated": X.clone()}, "activated is [4, 8]; it must be [4, 4]"),
]


@pytest.mark.parametrize(("op", "arguments", "sentence"), WRONG)
def test_errors(device: str, op: str, arguments: dict[str, Any], sentence: str) -> None:
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    kinds = (RuntimeError,) if device == "cuda" else (TypeError, ValueError)
    with pytest.raises(kinds, match="^" + re.escape(f"{op}: {sentence}")):
        getattr(cutegemm, op)(**moved)
    if op == "activation":
        with pytest.raises(kinds, match="activation: out is "):
            cutegemm.silu_and_mul(X.to(device), out=X.to(device).clone())


@pytest.mark.gpu
def test_output_in_the_memory_of_x() -> None:
    x = make(8, 128, device="cuda")
    with pytest.raises(RuntimeError, match="activation: out lies in the memory of x; it must lie apart from it"):
        cutegemm.silu_and_mul(x, out=x[:, :64])
    want = cutegemm.gelu_new(x)
    assert torch.equal(cutegemm.gelu_new(x, out=x), want)


# Graphs and compilation


@pytest.mark.gpu
def test_graph_replay_follows_the_input() -> None:
    x = make(40, 1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cutegemm.silu_and_mul(x)
        q, scale = cutegemm.activation_quant(x)
    for seed in (1, 2):
        x.copy_(make(40, 1000, seed=seed, device="cuda"))
        graph.replay()
        want, its_scale = cutegemm.activation_quant(x)
        assert torch.equal(out, cutegemm.silu_and_mul(x))
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, its_scale)


def test_compiles_with_dynamic_shapes(device: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="inductor" if device == "cuda" else "aot_eager", dynamic=True, fullgraph=True)
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, scale = cutegemm.activation_quant(x * 2)
        return cutegemm.silu_and_mul(x * 2), q, scale

    for rows in (3, 8, 1):
        x = make(rows, 72, device=device)
        out, q, scale = f(x)
        want, its_scale = cutegemm.activation_quant(x * 2)
        assert torch.equal(out, cutegemm.silu_and_mul(x * 2))
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, its_scale)
