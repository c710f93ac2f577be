"""Activations against float64, and their quantized forms against the ops apart, bit for bit."""

import math
from typing import Any

import pytest
import torch
from quantized import QUANTIZED, case_for, check_device_sentence, check_sentence, codes_of, refused
from torch import Tensor

import cutegemm
from cutegemm.quantize import quantize_fp8
from cutegemm.testing import guarded, make_operand, misaligned, padded

pytestmark = pytest.mark.usefixtures("one_thread")

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
    moved = x.to(device, copy=True)
    out = getattr(cutegemm, name)(moved)
    assert torch.equal(moved.cpu(), x)
    assert out.shape == (5, width)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_rounded(out, GATED[name](x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLAIN)
def test_plain(device: str, name: str, width: int, dtype: torch.dtype) -> None:
    x = make(5, width, dtype)
    moved = x.to(device, copy=True)
    assert_rounded(getattr(cutegemm, name)(moved), PLAIN[name](x.double()))
    assert torch.equal(moved.cpu(), x)


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


def test_activation_takes_out(device: str) -> None:
    x = make(6, 64, device=device)
    for arguments in (("silu", "first", None, 1.5, 0.5), ("gelu", "interleaved", 1.0), ("relu2", "none", 1.0)):
        want = cutegemm.activation(x, *arguments)
        out = torch.empty_like(want)
        assert cutegemm.activation(x, *arguments, out=out) is out
        assert torch.equal(out, want)
    itself = x.clone()
    assert cutegemm.activation(itself, "relu2", "none", 1.0, out=itself) is itself
    assert torch.equal(itself, want)


# Quantized


@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("width", [1, 65, 2048, 3420, 14336, 20480, 33001])
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
    activated = cutegemm.activation(x, *arguments)
    case = case_for(case, activated)
    before = {name: value.clone() for name, value in {**case, "x": x}.items() if isinstance(value, Tensor)}
    for also in (None, torch.empty_like(activated)):
        q, scale = cutegemm.activation_quant(x, *arguments, **case, activated=also)
        want, its_scale = codes_of(activated, case)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, its_scale)
        assert scale.stride() == its_scale.stride()
        assert "scale" not in case or torch.equal(scale.flatten(), case["scale"].flatten())
        assert also is None or torch.equal(also, activated)
    assert all(torch.equal({**case, "x": x}[name], value) for name, value in before.items())


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
        x.clone().as_strided((12, 1, width), (width, 7, 1)),
        padded(x.view(3, 4, width), width + 8),
        torch.cat([x.view(3, 4, width)] * 2, 1)[:, :4],
    ):
        assert torch.equal(cutegemm.activation(view, "silu", gate).view_as(want), want)
    one, row = x[:1].clone(), want[:1]
    assert torch.equal(cutegemm.activation(one.as_strided((1, width), (2**31, 1)), "silu", gate), row)
    out = torch.empty_like(row).as_strided(row.shape, (2**31, 1))
    assert torch.equal(cutegemm.activation(one, "silu", gate, out=out), row)


def test_output_with_gaps(device: str) -> None:
    x = make(7, 192, device=device)
    for pitch in (96, 97, 128):
        out, check = guarded((7, 96), device=device, pitch=pitch)
        assert cutegemm.silu_and_mul(x, out=out) is out
        assert torch.equal(out, cutegemm.silu_and_mul(x))
        check()


@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
def test_activated_with_gaps_and_at_any_alignment(device: str, case: dict[str, Any]) -> None:
    x = make(7, 192, device=device)
    want = cutegemm.silu_and_mul(x)
    case = case_for(case, want)
    q, scale = cutegemm.activation_quant(x, **case)
    for pitch in (96, 97, 128):
        activated, check = guarded((7, 96), device=device, pitch=pitch)
        codes, its_scale = cutegemm.activation_quant(x, **case, activated=activated)
        assert torch.equal(activated, want)
        assert torch.equal(codes.view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(its_scale, scale)
        check()
    for offset in range(1, 8):
        activated = misaligned(torch.full_like(want, math.nan), offset)
        cutegemm.activation_quant(x, **case, activated=activated)
        assert torch.equal(activated, want)


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


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["first", "interleaved", "none"])
def test_rows_2_31_elements_apart(gate: str) -> None:
    buffer = torch.empty(2**31 + 4 * 576, dtype=BF16, device="cuda")
    dense = make(2, 576, device="cuda")
    x = buffer.as_strided((2, 576), (2**31, 1)).copy_(dense)
    want = cutegemm.activation(dense, "silu", gate)
    out, activated = (buffer.as_strided(want.shape, (2**31, 1), i * 576) for i in (1, 2))
    assert torch.equal(cutegemm.activation(x, "silu", gate, out=out), want)
    q, scale = cutegemm.activation_quant(x, "silu", gate, granularity="group", activated=activated)
    other, its_scale = quantize_fp8(want, granularity="group")
    assert torch.equal(q.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(scale, its_scale)
    assert torch.equal(activated, want)


@pytest.mark.gpu
def test_one_row_of_more_than_2_31_elements() -> None:
    n = 2**31 + 8192
    x = torch.zeros(n, dtype=BF16, device="cuda")
    # The second has an offset of 2**31 in its middle.
    parts = [slice(0, 8192), slice(2**31 - 8192, n)]
    for seed, part in enumerate(parts):
        x[part] = make(1, part.stop - part.start, seed=seed, device="cuda")[0]
    out = cutegemm.activation(x, "silu", "interleaved")
    assert out.shape == (n // 2,)
    for part in parts:
        want = cutegemm.activation(x[part], "silu", "interleaved")
        assert torch.equal(out[part.start // 2 : part.stop // 2], want)
    assert not bool(out[4096 : 2**30 - 4096].any())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_than_the_current_device() -> None:
    for gate in ("first", "interleaved", "none"):
        x = make(9, 96)
        want = cutegemm.activation(x.to("cuda:0"), "silu", gate)
        q, scale = cutegemm.activation_quant(x.to("cuda:0"), "silu", gate)
        x = x.to("cuda:1")
        out = torch.empty(want.shape, dtype=BF16, device="cuda:1")
        for one in (cutegemm.activation(x, "silu", gate), cutegemm.activation(x, "silu", gate, out=out)):
            assert one.device.index == 1
            assert torch.equal(one.cpu(), want.cpu())
        other, its_scale = cutegemm.activation_quant(x, "silu", gate)
        assert torch.equal(other.cpu().view(torch.uint8), q.cpu().view(torch.uint8))
        assert torch.equal(its_scale.cpu(), scale.cpu())
    assert torch.cuda.current_device() == 0


# Errors

X = torch.ones(4, 8)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("activation", {"x": X.int()}, "x is torch.int32; it must be torch.bfloat16, torch.float16 or torch.float32"),
    ("activation", {"x": torch.ones(4, 7)}, "x is [4, 7]; its last dimension must be even, a gate for each value"),
    ("activation", {"x": X, "function": "swish"}, "function is 'swish'; it must be 'silu', 'gelu', 'gelu_tanh' or"),
    ("activation", {"x": X, "gate": "left"}, "gate is 'left'; it must be 'none', 'first', 'second' or 'interleaved'"),
    ("activation", {"x": X, "limit": -1.0}, "limit is -1; it must be zero or more"),
    *(
        (op, {"x": X, "function": function, "alpha": 1.5}, "alpha is 1.5; it must be 1, since only 'silu' has one")
        for op in ("activation", "activation_quant")
        for function in ("gelu", "gelu_tanh", "relu2")
    ),
    *(
        (op, {"x": X, "function": function, "gate": "none", "beta": 0.5}, "beta is 0.5; it must be 0, since ")
        for op in ("activation", "activation_quant")
        for function in ("silu", "relu2")
    ),
    ("activation", {"x": X, "out": X.clone()}, "out is [4, 8]; it must be [4, 4]"),
    ("activation", {"x": X, "function": "gelu", "alpha": 1.5, "out": X[:, :4].clone()}, "alpha is 1.5; it must be 1"),
    ("activation", {"x": X, "out": X[:, :4].half()}, "out is torch.float16; it must be the dtype of x, torch.float32"),
    (
        "activation_quant",
        {"x": X, "scale_ub": torch.ones(1).double()},
        "scale_ub is torch.float64 of [1]; it must be one element of torch.float32",
    ),
    (
        "activation_quant",
        {"x": X, "scale_ub": torch.ones(2)},
        "scale_ub is torch.float32 of [2]; it must be one element of torch.float32",
    ),
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
    check_sentence(device, op, arguments, sentence)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("activation", "out"),
        ("activation_quant", "activated"),
        ("activation_quant", "scale"),
        ("activation_quant", "scale_ub"),
    ],
)
def test_arguments_on_another_device(device: str, op: str, name: str) -> None:
    shapes = {"scale": (4, 1), "scale_ub": (1,)}
    check_device_sentence(device, op, {"x": X.to(device)}, name, shapes.get(name, (4, 4)))


@pytest.mark.parametrize("width", [2, 8, 64])
def test_outputs_in_the_memory_of_x(device: str, width: int) -> None:
    x = make(4, 2 * width, device=device)
    apart = "lies in the memory of x; it must lie apart from it"
    for out in (
        x[:, :width],
        x[:, width // 2 : width // 2 + width],
        x[:, width:],
        x.flatten()[: 4 * width].view(4, width),
        x.flatten()[4 * width :].view(4, width),
    ):
        refused(device, f"activation: out {apart}", x, cutegemm.silu_and_mul, x, out=out)
        refused(device, f"activation: out {apart}", x, cutegemm.activation, x, "gelu", "interleaved", out=out)
        refused(device, f"activation_quant: activated {apart}", x, cutegemm.activation_quant, x, activated=out)
    itself = "lies in the memory of x; it must be x itself, or lie apart from it"
    memory = make(8, width, device=device)
    for x, out in (
        (memory[:4], memory[1:5]),
        (memory[1:5], memory[:4]),
        (memory[:4], memory.view(4, 2 * width)[:, :width]),
        (memory.view(4, 2 * width)[:, :width], memory[:4]),
    ):
        refused(device, f"activation: out {itself}", memory, cutegemm.gelu_new, x, out=out)
        arguments = {"gate": "none", "activated": out}
        refused(device, f"activation_quant: activated {itself}", memory, cutegemm.activation_quant, x, **arguments)


def test_activated_in_the_memory_of_a_scale(device: str) -> None:
    x, activated = make(4, 64, FP32, device=device), torch.ones(4, 32, device=device)
    one = {"granularity": "tensor", "scale": activated[2, 5]}
    for name, arguments in (
        ("scale", one),
        ("scale", {"scale": activated[:, 3]}),
        ("scale", {"scale": activated[:, 31:]}),
        ("scale", {"scale": activated[:, 31:], "granularity": "group"}),
        ("scale_ub", {"scale_ub": activated[3, 31:]}),
    ):
        sentence = f"activation_quant: activated lies in the memory of {name}; it must lie apart from it"
        refused(device, sentence, activated, cutegemm.activation_quant, x, **arguments, activated=activated)


def test_outputs_in_a_layout_that_can_not_be_written(device: str) -> None:
    x = make(8, 8, FP32, device=device)
    layout = "has the strides {}; its last dimension must have stride one, and its rows lie at equal distances"
    for memory, out, strides in (
        (of_t := torch.ones(4, 8, device=device), of_t.t(), "[1, 8]"),
        (of_row := torch.ones(1, 4, device=device), of_row.expand(8, 4), "[0, 1]"),
        (wide := torch.ones(8, 8, device=device), wide[:, ::2], "[8, 2]"),
    ):
        sentence = f"out {layout.format(strides)}"
        refused(device, f"activation: {sentence}", memory, cutegemm.silu_and_mul, x, out=out)
        sentence = f"activated {layout.format(strides)}"
        refused(device, f"activation_quant: {sentence}", memory, cutegemm.activation_quant, x, activated=out)


def test_outputs_that_are_x_or_lie_between_its_rows(device: str) -> None:
    x = make(8, 128, device=device)
    want = cutegemm.gelu_new(x)
    wide = torch.cat([x, x], 1)
    assert torch.equal(cutegemm.gelu_new(wide[:, :128], out=wide[:, 128:]), want)
    assert torch.equal(wide[:, :128], x)
    q, scale = cutegemm.activation_quant(x, "gelu_tanh", "none", activated=x)
    assert torch.equal(x, want)
    codes, its_scale = quantize_fp8(want, granularity="token")
    assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale, its_scale)


# Graphs, streams and compilation


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


@pytest.mark.gpu
def test_current_stream() -> None:
    source, x = make(64, 8192, device="cuda"), torch.zeros(64, 8192, dtype=BF16, device="cuda")
    want, (q, scale) = cutegemm.silu_and_mul(source), cutegemm.activation_quant(source, granularity="group")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        out = cutegemm.silu_and_mul(x)
        codes, its_scale = cutegemm.activation_quant(x, granularity="group")
    stream.synchronize()
    assert torch.equal(out, want)
    assert torch.equal(codes.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(its_scale, scale)


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
