"""RMSNorm against float64, and its fused forms against the ops they fuse, bit for bit."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized import QUANTIZED, case_for, check_device_sentence, check_sentence, codes_of, refused
from torch import Tensor

import cutegemm
from cutegemm.norm import rms_norm
from cutegemm.quantize import quantize_fp8
from cutegemm.testing import guarded, make_operand, misaligned, padded

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
SHAPES = [
    (1, 1), (7,), (5, 8), (3, 129), (9, 64), (2, 3, 96), (33, 576), (3, 1000), (2, 2048), (4, 3420), (5, 3584),
    (2, 4096), (3, 4097), (2, 11007), (2, 11008), (2, 16384), (2, 20480), (1, 33001), (1, 70000),
]  # fmt: skip


def make(shape: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0, device: str = "cpu") -> Tensor:
    return make_operand(math.prod(shape[:-1]), shape[-1], dtype, seed=seed).view(shape).to(device)


def make_weight(hidden: int, dtype: torch.dtype, seed: int = 9) -> Tensor:
    return torch.randn(hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    values = x.cpu().double()
    normed = values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * (weight.cpu().double() + offset)


def assert_rounded(out: Tensor, want: Tensor) -> None:
    """out is want, rounded once, of a float32 computation of a few roundings."""
    info = torch.finfo(out.dtype)
    bound = want.abs() * (info.eps / 2 + 8 * 2.0**-24) + 4 * info.smallest_normal * info.eps  # of denormals
    over = ((out.cpu().double() - want).abs() > bound) & ~(want.abs() > info.max)
    assert not bool(over.any()), f"{int(over.sum())} of {over.numel()}, the first at {over.nonzero()[0].tolist()}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = make(shape, dtype)
    for weight, offset in ((None, 1.0), (make_weight(shape[-1], dtype), 0.0), (make_weight(shape[-1], FP32), 1.0)):
        moved = x.to(device)
        out = rms_norm(moved, None if weight is None else weight.to(device), 1e-5, offset)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert_rounded(out, exact(x, weight, 1e-5, offset))
        assert torch.equal(moved.cpu(), x)


def test_eps_keeps_rows_of_zeros_and_denormals_finite(device: str) -> None:
    x = torch.zeros(3, 100)
    x[1] = 1e-30
    out = rms_norm(x.to(device), None, 1e-6)
    assert out[0].tolist() == [0] * 100
    assert_rounded(out, exact(x, None, 1e-6, 0))


def test_nan_stays_in_its_row(device: str) -> None:
    x = make((5, 200))
    bad = x.clone()
    bad[1, 7], bad[3, 0] = math.nan, math.inf
    out, want = rms_norm(bad.to(device)), rms_norm(x.to(device))
    assert bool(out[1].isnan().all())
    assert bool(out[3, 0].isnan())
    assert out[3, 1:].abs().max() == 0
    assert torch.equal(out[[0, 2, 4]], want[[0, 2, 4]])


def test_a_rows_bits_do_not_depend_on_how_many_there_are(device: str) -> None:
    for hidden in (64, 576, 4096, 33001):
        x, weight = make((9, hidden), device=device), make_weight(hidden, BF16).to(device)
        out = rms_norm(x, weight)
        assert torch.equal(out, torch.cat([rms_norm(row[None], weight) for row in x]))
        q, scale = cutegemm.rms_norm_quant(x, weight)
        parts = [cutegemm.rms_norm_quant(row[None], weight) for row in x]
        assert torch.equal(q.view(torch.uint8), torch.cat([part[0] for part in parts]).view(torch.uint8))
        assert torch.equal(scale, torch.cat([part[1] for part in parts]))


# With a residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_add(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = make(shape, dtype, device=device), make(shape, dtype, 1, device)
    weight = make_weight(shape[-1], dtype).to(device)
    before, total = (x.clone(), residual.clone()), x + residual
    normed, out = cutegemm.fused_add_rms_norm(x, residual, weight)
    assert torch.equal(out, total)
    assert torch.equal(normed, rms_norm(total, weight))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    cutegemm.fused_add_rms_norm_(x, residual, weight)
    assert torch.equal(residual, total)
    assert torch.equal(x, normed)


def test_the_norm_is_of_the_rounded_sum(device: str) -> None:
    x, residual = torch.full((1, 8), 256.0, dtype=BF16), torch.full((1, 8), 1.0, dtype=BF16)
    residual[0, 0] = 3.0  # 259 rounds to 260, and 257 to 256
    normed, total = cutegemm.fused_add_rms_norm(x.to(device), residual.to(device))
    assert total.tolist() == [[260.0] + [256.0] * 7]
    assert_rounded(normed, exact(total, None, 1e-6, 0))


# Quantized


@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (5, 8),
        (3, 129),
        (2, 3, 96),
        (33, 576),
        (2, 2048),
        (4, 3420),
        (5, 3584),
        (2, 4096),
        (2, 20480),
        (1, 33001),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_has_the_bits_of_the_ops_apart(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, case: dict[str, Any]
) -> None:
    x, residual = make(shape, dtype, device=device), make(shape, dtype, 1, device)
    weight = make_weight(shape[-1], FP32 if shape[-1] % 2 else dtype).to(device)
    case = case_for(case, x)
    before = {
        name: value.clone()
        for name, value in {**case, "x": x, "r": residual, "w": weight}.items()
        if isinstance(value, Tensor)
    }
    normed = rms_norm(x, weight, 1e-5, 1.0)
    for also in (None, torch.empty_like(x)):
        q, scale = cutegemm.rms_norm_quant(x, weight, 1e-5, 1.0, **case, normed=also)
        want, want_scale = codes_of(normed, case)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, want_scale)
        assert scale.stride() == want_scale.stride()
        assert "scale" not in case or torch.equal(scale.flatten(), case["scale"].flatten())
        assert also is None or torch.equal(also, normed)

    normed, total = cutegemm.fused_add_rms_norm(x, residual, weight, 1e-5, 1.0)
    also = torch.empty_like(x)
    q, scale, out = cutegemm.fused_add_rms_norm_quant(x, residual, weight, 1e-5, 1.0, **case, normed=also)
    want, want_scale = codes_of(normed, case)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, want_scale)
    assert torch.equal(out, total)
    assert torch.equal(also, normed)
    now = {**case, "x": x, "r": residual, "w": weight}
    assert all(torch.equal(now[name], value) for name, value in before.items())
    again, its_scale = cutegemm.fused_add_rms_norm_quant_(x, residual, weight, 1e-5, 1.0, **case)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(its_scale, scale)
    assert torch.equal(residual, total)
    before["r"] = total
    assert all(torch.equal(now[name], value) for name, value in before.items())


@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
def test_case_023_rows_of_zeros_and_nan(device: str, case: dict[str, Any]) -> None:
    x = make((6, 256), device=device)
    x[1], x[4] = 0, math.nan
    q, scale = cutegemm.rms_norm_quant(x, **case_for(case, x))
    assert int(q[1].view(torch.uint8).max()) == 0
    assert bool((scale > 0).all() and scale.isfinite().all())
    assert q[4].view(torch.uint8).unique().tolist() == [0 if q.dtype == torch.int8 else 0x7F]


# Layouts


def views(dtype: torch.dtype = BF16) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to store a (12, 96)."""
    return {
        "gaps": lambda x: padded(x, 104),
        "odd pitch": lambda x: padded(x, 97),
        "misaligned": lambda x: misaligned(x, 3),
        "transposed": lambda x: x.t().contiguous().t(),
        "3-D": lambda x: padded(x.view(3, 4, 96), 128),
        "slice of 3-D": lambda x: torch.cat([x.view(3, 4, 96)] * 2, 1)[:, 2:6],
        "every second": lambda x: x.repeat_interleave(2, -1)[:, ::2],
    }


@pytest.mark.parametrize("name", views())
def test_case_029_and_030_layouts_give_what_their_copies_give(device: str, name: str) -> None:
    x = views()[name](make((12, 96), device=device))
    residual = views()[name](make((12, 96), seed=1, device=device))
    weight = misaligned(make_weight(96, BF16).to(device), 1)
    assert torch.equal(rms_norm(x, weight), rms_norm(x.contiguous(), weight.clone()))
    want = cutegemm.fused_add_rms_norm(x.contiguous(), residual.contiguous(), weight)
    normed, total = cutegemm.fused_add_rms_norm(x, residual, weight)
    assert torch.equal(normed, want[0])
    assert torch.equal(total, want[1])
    q, scale = cutegemm.rms_norm_quant(x, weight, granularity="group")
    other, its_scale = cutegemm.rms_norm_quant(x.contiguous(), weight, granularity="group")
    assert torch.equal(q.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(scale, its_scale)


def test_strides_of_dimensions_of_size_1_mean_nothing(device: str) -> None:
    def free(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        return x.clone().as_strided(shape, strides)

    for shape, strides in (((1, 128), (2**31, 1)), ((1, 1, 128), (7, 2**40, 1)), ((12, 1, 128), (128, 7, 1))):
        x, residual = (make((math.prod(shape[:-1]), 128), seed=seed, device=device).view(shape) for seed in (0, 1))
        weight = make_weight(128, BF16).to(device)
        normed, total = cutegemm.fused_add_rms_norm(x, residual, weight)
        views = [free(each, shape, strides) for each in (x, residual, x, x)]
        assert views[0].stride() == strides
        for one, other in zip(cutegemm.fused_add_rms_norm(*views[:2], weight), (normed, total), strict=True):
            assert torch.equal(one, other)
            assert one.is_contiguous()
        q, scale = cutegemm.rms_norm_quant(views[0], weight, granularity="group", normed=views[2])
        want, its_scale = cutegemm.rms_norm_quant(x, weight, granularity="group")
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, its_scale)
        assert torch.equal(views[2], rms_norm(x, weight))
        assert torch.equal(rms_norm(views[0], weight, out=views[3]), views[2])
        cutegemm.fused_add_rms_norm_(*views[:2], weight)
        assert torch.equal(views[0], normed)
        assert torch.equal(views[1], total)


@pytest.mark.parametrize("width", [1000, 2048, 3584, 4096, 20480, 40960])
def test_alignment_and_the_weights_dtype_change_no_bit(device: str, width: int) -> None:
    # On a GPU they decide whether a row stays in registers.
    x, residual = make((5, width), device=device), make((5, width), seed=1, device=device)
    weight = make_weight(width, BF16).to(device)
    normed, total = cutegemm.fused_add_rms_norm(x, residual, weight)
    want = [normed, total, *cutegemm.rms_norm_quant(total, weight)]
    for other_x, by in ((misaligned(x, 1), weight), (x, misaligned(weight, 3)), (x, weight.float())):
        normed, total = cutegemm.fused_add_rms_norm(other_x, residual, by)
        got = [normed, total, *cutegemm.rms_norm_quant(total, by)]
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("pitch", [96, 97, 128])
def test_outputs_with_gaps_are_written_where_they_are(device: str, pitch: int) -> None:
    x, residual = make((7, 96), device=device), make((7, 96), seed=1, device=device)
    want, total = cutegemm.fused_add_rms_norm(x, residual)
    places = {name: guarded((7, 96), device=device, pitch=pitch) for name in ("out", "x", "residual", "normed")}
    out = places["out"][0]
    assert rms_norm(x, out=out) is out
    assert torch.equal(out, rms_norm(x))
    in_x, in_residual, normed = (places[name][0] for name in ("x", "residual", "normed"))
    in_x.copy_(x)
    in_residual.copy_(residual)
    cutegemm.fused_add_rms_norm_(in_x, in_residual)
    assert torch.equal(in_x, want)
    assert torch.equal(in_residual, total)
    cutegemm.rms_norm_quant(total, normed=normed)
    assert torch.equal(normed, want)
    in_x.copy_(x)
    assert torch.equal(rms_norm(in_x, out=in_x), rms_norm(x))
    for _, check in places.values():
        check()


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=BF16, device=device)
    assert rms_norm(x).shape == shape
    q, scale, total = cutegemm.fused_add_rms_norm_quant(x, x)
    assert q.shape == total.shape == shape
    assert scale.shape == (*shape[:-1], 1)
    assert bool((scale > 0).all())
    rms_norm(make((3, 5), device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65535, 65536, 262141])
@pytest.mark.parametrize("hidden", [16, 576])
def test_case_025_many_rows(rows: int, hidden: int) -> None:
    x = make_operand(rows, hidden, device="cuda")
    q, _ = cutegemm.rms_norm_quant(x)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        assert torch.equal(q[part].view(torch.uint8), cutegemm.rms_norm_quant(x[part])[0].view(torch.uint8))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    rows = 524289
    x = torch.zeros(rows, 4096, dtype=BF16, device="cuda")
    last = [0, 1, rows // 2, rows - 2, rows - 1]
    x[last] = make((5, 4096), device="cuda")
    want = rms_norm(x[last])
    assert torch.equal(rms_norm(x)[last], want)
    q, scale = cutegemm.rms_norm_quant(x, normed=x)
    assert torch.equal(x[last], want)
    other, its_scale = quantize_fp8(want, granularity="token")
    assert torch.equal(q[last].view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(scale[last], its_scale)


@pytest.mark.gpu
def test_rows_2_31_elements_apart() -> None:
    buffer = torch.empty(2**31 + 4 * 576, dtype=BF16, device="cuda")
    x, residual, out = (buffer.as_strided((2, 576), (2**31, 1), i * 576) for i in range(3))
    dense, other = make((2, 576), device="cuda"), make((2, 576), seed=1, device="cuda")
    x.copy_(dense)
    residual.copy_(other)
    want, total = cutegemm.fused_add_rms_norm(dense, other)
    assert torch.equal(rms_norm(x, out=out), rms_norm(dense))
    q, scale, its_total = cutegemm.fused_add_rms_norm_quant(x, residual, granularity="group", normed=out)
    codes, its_scale = quantize_fp8(want, granularity="group")
    assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale, its_scale)
    assert torch.equal(its_total, total)
    assert torch.equal(out, want)
    cutegemm.fused_add_rms_norm_(x, residual)
    assert torch.equal(x, want)
    assert torch.equal(residual, total)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_than_the_current_device() -> None:
    for one, other in zip(every_op("cuda:1"), every_op("cuda:0"), strict=True):
        assert one.device.index == 1
        assert torch.equal(one.cpu().float(), other.cpu().float())
    assert torch.cuda.current_device() == 0


def every_op(device: str) -> list[Tensor]:
    """What each op makes of the same 9 rows."""
    x, residual, weight = make((9, 96)).to(device), make((9, 96), seed=1).to(device), make_weight(96, BF16).to(device)
    made = [rms_norm(x, weight), rms_norm(x, weight, out=torch.empty_like(x))]
    made += [*cutegemm.rms_norm_quant(x, weight), *cutegemm.fused_add_rms_norm(x, residual, weight)]
    made += cutegemm.fused_add_rms_norm_quant(x, residual, weight, granularity="group")
    cutegemm.fused_add_rms_norm_(in_x := x.clone(), in_residual := residual.clone(), weight)
    return [*made, in_x, in_residual, *cutegemm.fused_add_rms_norm_quant_(x, residual, weight), residual]


# Errors

X, W = torch.ones(4, 8), torch.ones(8)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("rms_norm", {"x": X.double()}, "x is torch.float64; it must be torch.bfloat16, torch.float16 or torch.float32"),
    ("rms_norm", {"x": X.to(torch.float8_e8m0fnu)}, "x is torch.float8_e8m0fnu; it must be torch.bfloat16"),
    ("rms_norm", {"x": torch.tensor(1.0)}, "x has no dimension; it must have at least one"),
    ("rms_norm", {"x": X, "weight": W[:7]}, "weight is [7]; it must be [8], as a row of x"),
    (
        "rms_norm",
        {"x": X, "weight": W.half()},
        "weight is torch.float16; it must be torch.float32 or the dtype of x, torch.float32",
    ),
    ("rms_norm", {"x": X, "out": X[:3].clone()}, "out is [3, 8]; it must be the shape of x, [4, 8]"),
    ("rms_norm", {"x": X, "out": X.half()}, "out is torch.float16; it must be the dtype of x, torch.float32"),
    ("fused_add_rms_norm", {"x": X, "residual": X[:, :4]}, "residual is [4, 4]; it must be the shape of x, [4, 8]"),
    ("fused_add_rms_norm_", {"x": X, "residual": X.half()}, "residual is torch.float16; it must be the dtype"),
    ("rms_norm_quant", {"x": X, "dtype": torch.uint8}, "dtype is torch.uint8; it must be torch.float8_e4m3fn or"),
    ("rms_norm_quant", {"x": X, "dtype": torch.float8_e8m0fnu}, "dtype is torch.float8_e8m0fnu; it must be"),
    ("rms_norm_quant", {"x": X, "granularity": "tensor"}, "scale is None; for granularity 'tensor' it must be given"),
    (
        "rms_norm_quant",
        {"x": X, "granularity": "group", "dtype": torch.int8},
        "granularity is 'group'; it must be 'tensor' or 'token'",
    ),
    ("rms_norm_quant", {"x": X, "granularity": "group", "group_size": 32}, "group_size is 32; it must be 64 or 128"),
    ("rms_norm_quant", {"x": X, "normed": X[:2].clone()}, "normed is [2, 8]; it must be the shape of x, [4, 8]"),
    ("rms_norm_quant", {"x": X, "scale": W[:4].double()}, "scale is torch.float64; it must be torch.float32"),
    ("rms_norm_quant", {"x": X, "scale": W}, "scale is [8]; for granularity 'token' it must have one element for each"),
    (
        "fused_add_rms_norm_quant_",
        {"x": X, "residual": X.clone(), "scale_ub": W[:1].half()},
        "scale_ub is torch.float16 of [1]; it must be one element of torch.float32",
    ),
    (
        "fused_add_rms_norm_quant",
        {"x": X, "residual": X, "scale_ub": W},
        "scale_ub is torch.float32 of [8]; it must be one element of torch.float32",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "sentence"), WRONG)
def test_errors(device: str, op: str, arguments: dict[str, Any], sentence: str) -> None:
    check_sentence(device, op, arguments, sentence)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("rms_norm", "weight"),
        ("rms_norm", "out"),
        ("fused_add_rms_norm", "residual"),
        ("fused_add_rms_norm_", "residual"),
        ("fused_add_rms_norm_", "weight"),
        ("rms_norm_quant", "scale"),
        ("rms_norm_quant", "scale_ub"),
        ("rms_norm_quant", "normed"),
        ("fused_add_rms_norm_quant", "normed"),
        ("fused_add_rms_norm_quant_", "residual"),
    ],
)
def test_arguments_on_another_device(device: str, op: str, name: str) -> None:
    shapes = {"weight": (8,), "scale": (4, 1), "scale_ub": (1,)}
    arguments = {"x": X.to(device), **({"residual": X.to(device).clone()} if op.startswith("fused") else {})}
    check_device_sentence(device, op, arguments, name, shapes.get(name, (4, 8)))


def refused_by(device: str, op: str, sentence: str, memory: Tensor, **arguments: Any) -> None:
    refused(device, f"{op}: {sentence}", memory, getattr(cutegemm, op), **arguments)


def test_outputs_in_a_layout_that_can_not_be_written(device: str) -> None:
    x, residual = make((8, 4), FP32, device=device), make((8, 4), FP32, 1, device)
    both = {"x": x, "residual": residual}
    of_t, of_row = torch.ones(4, 8, device=device).t(), torch.ones(1, 4, device=device).expand(8, 4)
    of_3 = torch.ones(2, 8, 4, device=device)[:, :4]
    layout = "has the strides {}; its last dimension must have stride one, and its rows lie at equal distances"
    refused_by(device, "rms_norm", "out " + layout.format("[1, 8]"), of_t, x=x, out=of_t)
    refused_by(device, "rms_norm", "out " + layout.format("[0, 1]"), of_row, x=x, out=of_row)
    refused_by(device, "rms_norm", "out " + layout.format("[32, 4, 1]"), of_3, x=x.view(2, 4, 4), out=of_3)
    refused_by(device, "rms_norm_quant", "normed " + layout.format("[1, 8]"), of_t, x=x, normed=of_t)
    for op in ("fused_add_rms_norm_quant", "fused_add_rms_norm_quant_"):
        refused_by(device, op, "normed " + layout.format("[0, 1]"), residual, **both, normed=of_row)
    for op in ("fused_add_rms_norm_", "fused_add_rms_norm_quant_"):
        refused_by(device, op, "residual " + layout.format("[1, 8]"), x, x=x, residual=of_t)
    refused_by(device, "fused_add_rms_norm_", "x " + layout.format("[0, 1]"), residual, x=of_row, residual=residual)
    assert bool((of_row == 1).all())


def test_outputs_in_the_memory_of_inputs(device: str) -> None:
    memory = make((32, 64), FP32, device=device)
    x, residual = memory[:8], memory[8:16]
    itself, apart = "it must be x itself, or lie apart from it", "it must lie apart from it"

    def refuses(op: str, sentence: str, **arguments: Any) -> None:
        refused_by(device, op, sentence, memory, **arguments)

    for out in (
        memory[1:9],
        memory.view(16, 128)[:8, :64],  # rows of x's memory, at other distances
        memory.view(16, 128)[1:9, :64],  # in the middle of a dense x
        memory.flatten()[1:513].view(8, 64),
    ):
        refuses("rms_norm", f"out lies in the memory of x; {itself}", x=x, out=out)
        refuses("rms_norm_quant", f"normed lies in the memory of x; {itself}", x=x, normed=out)
    wide = memory.view(16, 128)[:8, :64]
    refuses("rms_norm", f"out lies in the memory of x; {itself}", x=wide, out=x)  # strided, and out is dense
    refuses("rms_norm", f"out lies in the memory of x; {itself}", x=memory[:1].expand(8, 64), out=x)

    weight = memory[3]
    refuses("rms_norm", f"out lies in the memory of weight; {apart}", x=residual, weight=weight, out=x)
    refuses("rms_norm", f"out lies in the memory of weight; {apart}", x=weight[None], weight=weight, out=memory[3:4])
    refuses("rms_norm_quant", f"normed lies in the memory of weight; {apart}", x=residual, weight=weight, normed=x)
    refuses(
        "rms_norm_quant",
        f"normed lies in the memory of scale; {apart}",
        x=x,
        scale=memory[16:24, 7],
        normed=memory[16:24],
    )
    one = memory[20, :1]
    token, tensor = {"normed": memory[16:24]}, {"granularity": "tensor", "scale": one}
    refuses("rms_norm_quant", f"normed lies in the memory of scale_ub; {apart}", x=x, scale_ub=one, **token)
    for op in ("fused_add_rms_norm_quant", "fused_add_rms_norm_quant_"):
        both = {"x": x, "residual": residual}
        refuses(op, f"normed lies in the memory of scale; {apart}", **both, **tensor, **token)
        refuses(op, f"normed lies in the memory of scale_ub; {apart}", **both, scale_ub=one[0], **token)
        refuses(op, f"normed lies in the memory of weight; {apart}", **both, weight=memory[16], **token)
        refuses(op, f"normed lies in the memory of residual; {apart}", **both, normed=residual)
        refuses(op, f"normed lies in the memory of residual; {apart}", **both, normed=memory[9:17])
        refuses(op, f"normed lies in the memory of x; {itself}", x=memory[17:25], residual=residual, **token)

    refuses("fused_add_rms_norm_", f"x lies in the memory of residual; {apart}", x=x, residual=x)
    refuses("fused_add_rms_norm_", f"x lies in the memory of residual; {apart}", x=x, residual=memory[1:9])
    refuses("fused_add_rms_norm_", f"x lies in the memory of weight; {apart}", x=x, residual=residual, weight=weight)
    of_residual = {"x": x, "residual": residual, "weight": memory[9]}
    refuses("fused_add_rms_norm_", f"residual lies in the memory of weight; {apart}", **of_residual)
    op = "fused_add_rms_norm_quant_"
    refuses(op, f"residual lies in the memory of weight; {apart}", **of_residual)
    refuses(op, f"residual lies in the memory of x; {apart}", x=x, residual=x)
    refuses(op, f"residual lies in the memory of scale; {apart}", x=x, residual=memory[16:24], **tensor)
    refuses(op, f"residual lies in the memory of scale_ub; {apart}", x=x, residual=memory[16:24], scale_ub=one)


def test_outputs_that_are_inputs_or_lie_between_their_rows(device: str) -> None:
    x, residual = make((8, 64), device=device), make((8, 64), seed=1, device=device)
    want, (of_sum, total) = rms_norm(x), cutegemm.fused_add_rms_norm(x, residual)
    interleaved = torch.cat([x, residual, x], 1)
    in_x, in_residual, out = interleaved.split(64, 1)
    assert torch.equal(rms_norm(in_x, out=out), want)
    cutegemm.fused_add_rms_norm_(in_x, in_residual)
    assert torch.equal(interleaved, torch.cat([of_sum, total, want], 1))
    # Of one row the distance to the next means nothing.
    row = x[:1].clone()
    assert torch.equal(rms_norm(row, out=row.as_strided((1, 64), (2**31, 1))), want[:1])
    q, scale, its_total = cutegemm.fused_add_rms_norm_quant(x, residual, normed=x)
    assert torch.equal(x, of_sum)
    assert torch.equal(its_total, total)
    codes, its_scale = quantize_fp8(of_sum, granularity="token")
    assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale, its_scale)
    # Nothing lies in no memory.
    nothing = x[:0]
    cutegemm.fused_add_rms_norm_(nothing, nothing)


# Graphs, streams, compilation


@pytest.mark.gpu
def test_graph_replay_and_side_streams() -> None:
    x, residual = make((40, 1000), device="cuda"), make((40, 1000), seed=1, device="cuda")
    weight = make_weight(1000, BF16).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            q, scale, total = cutegemm.fused_add_rms_norm_quant(x, residual, weight)
            normed = rms_norm(total, weight)
        for seed in (2, 3):
            torch.cuda._sleep(20_000_000)
            x.copy_(make((40, 1000), seed=seed, device="cuda"))
            graph.replay()
            want = cutegemm.fused_add_rms_norm_quant(x, residual, weight)
            assert torch.equal(q.view(torch.uint8), want[0].view(torch.uint8))
            assert torch.equal(scale, want[1])
            assert torch.equal(total, want[2])
            assert torch.equal(normed, rms_norm(want[2], weight))


def test_compiles_with_dynamic_shapes(device: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="inductor" if device == "cuda" else "aot_eager", dynamic=True, fullgraph=True)
    def f(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = cutegemm.fused_add_rms_norm_quant_(x * 2, residual, weight)
        return q, scale

    weight = make_weight(72, FP32).to(device)
    for rows in (3, 8, 1):
        x, residual = make((rows, 72), device=device), make((rows, 72), seed=1, device=device)
        want, its_scale, total = cutegemm.fused_add_rms_norm_quant(x * 2, residual, weight)
        q, scale = f(x, residual, weight)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, its_scale)
        assert torch.equal(residual, total)


@pytest.mark.gpu
def test_a_chain_has_the_bits_of_launches_that_wait() -> None:
    """Each kernel reads what the one ahead of it writes, of a producer that takes its time."""
    tokens, hidden, ff = 16, 1024, 3072
    x, residual = make((tokens, hidden), device="cuda"), make((tokens, hidden), seed=1, device="cuda")
    weight = make_weight(hidden, BF16).cuda()
    up, up_scale = quantize_fp8(make((2 * ff, hidden), seed=2, device="cuda"), granularity="channel")
    down, down_scale = quantize_fp8(make((hidden, ff), seed=3, device="cuda"), granularity="channel")

    def layer(x: Tensor, residual: Tensor) -> Tensor:
        for _ in range(20):
            q, scale = cutegemm.fused_add_rms_norm_quant_(x, residual, weight)
            gate_up = cutegemm.scaled_mm(q, up.t(), scale, up_scale)
            q, scale = cutegemm.activation_quant(gate_up)
            x = cutegemm.scaled_mm(q, down.t(), scale, down_scale)
        return x

    outs = []
    for chained in (False, True, True):
        cutegemm.chain_launches(chained)
        try:
            outs.append(layer(x, residual.clone()))
            graph = torch.cuda.CUDAGraph()
            total = residual.clone()
            with torch.cuda.graph(graph):
                out = layer(x, total)
            total.copy_(residual)
            graph.replay()
            outs.append(out)
        finally:
            cutegemm.chain_launches(True)
    assert all(torch.equal(out, outs[0]) for out in outs)
