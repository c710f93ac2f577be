"""Quantization against codes built by hand; with `device`, the same expectations hold on CUDA."""

import bisect
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import cutegemm
from cutegemm.quantize import (
    AMAX_FLOOR,
    dequantize_fp8,
    dequantize_int8,
    quantize_fp8,
    quantize_int8,
    quantize_int8_asymmetric,
)
from cutegemm.testing import make_operand, misaligned, padded

pytestmark = pytest.mark.usefixtures("one_thread")

E4M3 = torch.float8_e4m3fn
GRANULARITIES = ["tensor", "token", "channel", "group", "block"]
FORMS = [
    *(f"fp8 {granularity}" for granularity in GRANULARITIES),
    *("int8 tensor", "int8 token", "int8 channel", "asymmetric tensor", "asymmetric token"),
]
OPS = {"fp8": quantize_fp8, "int8": quantize_int8, "asymmetric": quantize_int8_asymmetric}
LARGEST = {"fp8": 448.0, "int8": 127.0}


def quantize(form: str, x: Tensor, *given: Tensor, **more: int) -> tuple[Tensor, ...]:
    """Codes, scale and, of the asymmetric form, zero point. given: scale and zero point."""
    op, granularity = form.split()
    nothing = (None, None) if op == "asymmetric" else (None,)
    return OPS[op](x, *(given or nothing), granularity, **more)


# The 127 finite numbers >= 0 in the order of their codes: 4 bits of exponent with bias 7, 3 of mantissa.
POSITIVE = [(code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)]


def nearest_code(y: float) -> int:
    """Round to nearest, ties to the even code, saturating."""
    sign, y = (0x80 if math.copysign(1, y) < 0 else 0), abs(y)
    if math.isnan(y):
        return 0x7F
    if y >= 448:
        return sign | 126
    above = bisect.bisect_left(POSITIVE, y)
    if POSITIVE[above] == y:
        return sign | above
    below, middle = above - 1, (POSITIVE[above - 1] + POSITIVE[above]) / 2
    even = below if below % 2 == 0 else above
    return sign | (even if y == middle else below if y < middle else above)


def nearest_int8(y: float, zero: int = 0) -> int:
    """Round to nearest, ties to the even number, saturating."""
    whole = 0 if math.isnan(y) else y if math.isinf(y) else round(y)
    return int(max(-128, min(127, whole + zero)))


def codes(q: Tensor) -> Tensor:
    assert q.dtype in (E4M3, torch.int8)
    assert q.is_contiguous()
    return q.view(torch.uint8).cpu()


def assert_equal(results: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Codes, scales and zero points, bit for bit."""
    assert results[0].dtype == want[0].dtype
    assert torch.equal(codes(results[0]), codes(want[0]))
    for one, other in zip(results[1:], want[1:], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other.cpu())


def units(x: Tensor, granularity: str, group_size: int = 128) -> list[Tensor]:
    """Views of a contiguous x, each of what shares a scale, in the order of the scales."""
    if granularity == "tensor":
        return [x]
    if granularity == "block":
        n, k = x.shape[-2:]
        matrices = x.view(-1, n, k) if x.numel() else []
        return [m[i : i + 128, j : j + 128] for m in matrices for i in range(0, n, 128) for j in range(0, k, 128)]
    rows = list(x.view(math.prod(x.shape[:-1]), x.shape[-1]))
    if granularity == "group":
        return [row[i : i + group_size] for row in rows for i in range(0, x.shape[-1], group_size)]
    return rows


def scale_shape(x: Tensor, granularity: str, group_size: int = 128) -> tuple[int, ...]:
    *leading, k = x.shape
    of_group = [*leading, math.ceil(k / group_size)]
    of_block = [*leading[:-1], math.ceil(leading[-1] / 128), math.ceil(k / 128)] if leading else []
    shapes = {"tensor": [], "token": [*leading, 1], "channel": leading, "group": of_group, "block": of_block}
    return tuple(shapes[granularity])


def expected(x: Tensor, form: str, group_size: int = 128) -> tuple[Tensor, ...]:
    """The bytes of the codes, scales and zero points, from double arithmetic, `nearest_code` and `nearest_int8`.

    A quotient or a difference of two float32 that was rounded to float64 first rounds to the same float32.
    """
    op, granularity = form.split()
    values = x.cpu().double().contiguous()
    q, scales, zeros = torch.zeros(x.shape, dtype=torch.uint8), [], []
    for unit, to in zip(units(values, granularity, group_size), units(q, granularity, group_size), strict=True):
        finite = [v for v in unit.flatten().tolist() if math.isfinite(v)]
        ends = torch.tensor([max([0.0, *finite]), min([0.0, *finite])], dtype=torch.float64)
        zero = 0
        if op == "asymmetric":
            high, low = (ends / 255).float().double()
            scale = (high - low).float().clamp_min(AMAX_FLOOR)
            zero = round((-128 - (ends[1] / scale.double()).float()).item())
        else:
            scale = (ends.abs().max().clamp_min(AMAX_FLOOR) / LARGEST[op]).float()
        quotient = (unit / scale.double()).float().flatten().tolist()
        made = [nearest_code(y) for y in quotient] if op == "fp8" else [nearest_int8(y, zero) & 0xFF for y in quotient]
        to.copy_(torch.tensor(made, dtype=torch.uint8).view(unit.shape))
        scales.append(scale)
        zeros.append(zero)
    shape = scale_shape(x, granularity, group_size)
    scale = torch.stack(scales).view(shape) if scales else torch.empty(shape)
    return (q, scale, torch.tensor(zeros, dtype=torch.int32).view(shape)) if op == "asymmetric" else (q, scale)


def check(x: Tensor, form: str, group_size: int = 128) -> None:
    if form == "fp8 block" and x.dim() < 2:
        return
    before = x.clone()
    results = quantize(form, x, **({} if group_size == 128 else {"group_size": group_size}))
    want = expected(x, form, group_size)
    q, scale = results[:2]
    assert q.dtype == (E4M3 if form.startswith("fp8") else torch.int8)
    assert torch.equal(codes(q), want[0])
    for given, its, dtype in zip(results[1:], want[1:], (torch.float32, torch.int32), strict=False):
        assert given.dtype == dtype
        assert torch.equal(given.cpu(), its)  # and so the shape
    if form != "fp8 group":
        assert all(given.is_contiguous() for given in results)
    elif scale.numel():
        rows = math.prod(x.shape[:-1])
        assert scale.stride(-1) == math.ceil(rows / 4) * 4
        assert rows == 1 or scale.flatten(0, -2).stride(0) == 1
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(device: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    q, _ = quantize_fp8(x.to(device), torch.ones(1, device=device))
    want = torch.tensor([nearest_code(v) for v in x.tolist()], dtype=torch.uint8)
    assert torch.equal(codes(q), want)


def test_ties_and_their_neighbours(device: str) -> None:
    ties = torch.tensor([(low + high) / 2 for low, high in pairwise(POSITIVE)] + [464.0, 480.0, 1e30])
    x = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e38))])
    x = torch.stack([x, -x])
    q, _ = quantize_fp8(x.to(device), torch.ones((), device=device))
    want = torch.tensor([[nearest_code(v) for v in row] for row in x.tolist()], dtype=torch.uint8)
    assert torch.equal(codes(q), want)


def test_division_is_ieee(device: str) -> None:
    x = make_operand(64, 999, torch.float32, seed=3)
    scale = torch.rand(64, generator=torch.Generator().manual_seed(4)) + 1e-3
    q, _ = quantize_fp8(x.to(device), scale.to(device), "token")
    quotient = (x.double() / scale.double()[:, None]).float()
    want = torch.tensor([nearest_code(v) for v in quotient.flatten().tolist()], dtype=torch.uint8)
    assert torch.equal(codes(q), want.view(64, 999))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of", ["e4m3", "int8"])
def test_division_rounds_as_ieee(device: str, dtype: torch.dtype, of: str) -> None:
    # Every significand of x with every scale that puts it next to the middle of two codes: nowhere else can a
    # quotient that is off by its last bit change a code. The middles are odd: 17/2 .. 31/2 of a step of a normal
    # e4m3, 1/2 .. 15/2 of a subnormal one, and 1/2 .. 253/2 of int8.
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    x = torch.arange(2 ** (bits - 1), 2**bits, dtype=torch.float32)
    odd = torch.arange(1, 32 if of == "e4m3" else 254, 2, dtype=torch.float32)
    middle = odd / 2 if of == "int8" else torch.where(odd > 16, odd, odd * 2.0**-10)
    scale = ((x / middle[:, None]).view(torch.int32)[..., None] + torch.arange(-4, 5, dtype=torch.int32)).view(
        torch.float32
    )
    x = x[:, None].expand_as(scale).reshape(-1, 1).to(dtype)
    scale = scale.reshape(-1)
    quotient = (x[:, 0].double() / scale.double()).float()
    if of == "e4m3":
        q, _ = quantize_fp8(x.to(device), scale.to(device), "token")
        assert torch.equal(codes(q)[:, 0], quotient.to(E4M3).view(torch.uint8))
    else:
        q, _ = quantize_int8(x.to(device), scale.to(device), "token")
        assert torch.equal(q[:, 0].cpu(), quotient.round().to(torch.int8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(1,), (7,), (1, 1), (5, 8), (3, 129), (2, 3, 64), (6, 255), (4, 3420), (1, 8192), (2, 8200), (3, 11007)],
)
def test_dynamic(device: str, shape: tuple[int, ...], dtype: torch.dtype, form: str) -> None:
    x = make_operand(math.prod(shape[:-1]), shape[-1], dtype, seed=sum(shape)).view(shape)
    check((x + 2 if form.startswith("asymmetric") else x).to(device), form)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_error_is_at_most_half_a_step(device: str, granularity: str) -> None:
    x = make_operand(33, 500, torch.float32, device=device)
    q, scale = quantize_fp8(x, granularity=granularity)
    back = dequantize_fp8(q, scale)
    smallest = dequantize_fp8(torch.ones_like(q), scale)  # of every value, its scale
    step = torch.maximum(x.abs().double() * 2**-4, 2**-10 * smallest.double())
    assert bool(((back.double() - x).abs() <= step * (1 + 1e-6)).all())


@pytest.mark.parametrize("form", FORMS)
def test_static_with_the_dynamic_scale_gives_the_same(device: str, form: str) -> None:
    x = make_operand(19, 200, device=device)
    dynamic = quantize(form, x)
    static = quantize(form, x, *dynamic[1:])
    assert_equal(static, dynamic)
    assert all(returned.data_ptr() != given.data_ptr() for returned, given in zip(static[1:], dynamic[1:], strict=True))
    assert_equal(quantize(form, x), dynamic)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_case_006_one_element_scales_are_alike(device: str, shape: tuple[int, ...]) -> None:
    x = make_operand(1, 40, device=device)
    scale = torch.full(shape, 0.25, device=device)
    q, returned = quantize_fp8(x, scale)
    assert returned.shape == ()
    want = [nearest_code(4 * v) for v in x.flatten().tolist()]
    assert codes(q).flatten().tolist() == want
    if shape:  # with one row the same scale can be read as one a token
        assert codes(quantize_fp8(x, scale, "token")[0]).flatten().tolist() == want


@pytest.mark.parametrize("form", ["fp8 token", "fp8 channel", "int8 token", "int8 channel", "asymmetric token"])
def test_case_005_each_row_has_its_own_static_scale(device: str, form: str) -> None:
    x = make_operand(4, 64, device=device)
    # No two rows agree, and the second of these is a zero point.
    values = [torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)]
    if form.startswith("asymmetric"):
        values.append(torch.tensor([-3, 0, 7, 90], dtype=torch.int32, device=device))
    of_tensor = form.split()[0] + " tensor"
    rows = [quantize(of_tensor, x[i], *(value[i] for value in values))[0] for i in range(4)]
    shape = (4,) if "channel" in form else (4, 1)

    def in_gaps(value: Tensor) -> Tensor:
        wide = torch.full((4, 3), 9, dtype=value.dtype, device=device)
        wide[:, 1] = value
        return wide

    for shaped in (
        lambda value: value,
        lambda value: value[:, None],
        lambda value: value[None],
        lambda value: in_gaps(value)[:, 1],
        lambda value: in_gaps(value)[:, 1:2],
        lambda value: in_gaps(value)[:, 1:2].t(),
    ):
        given = [shaped(value.clone()) for value in values]
        results = quantize(form, x, *given)
        assert_equal(results, (torch.stack(rows), *(value.view(shape) for value in values)))
        assert all(result.is_contiguous() for result in results)
        assert all(torch.equal(one, shaped(value)) for one, value in zip(given, values, strict=True))


def test_scale_and_zero_point_may_have_strides_of_their_own(device: str) -> None:
    x = make_operand(6, 40, device=device).view(2, 3, 40)
    scale = torch.rand(2, 3, 1, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    zero = torch.arange(-3, 3, dtype=torch.int32, device=device).view(2, 3, 1)
    want = quantize_int8_asymmetric(x, scale, zero)

    def across(value: Tensor) -> Tensor:
        return value.transpose(0, 1).contiguous().transpose(0, 1)

    for one, other in ((padded(scale, 5), zero), (scale, padded(zero, 4)), (across(scale), across(zero))):
        results = quantize_int8_asymmetric(x, one, other)
        assert_equal(results, want)
        assert all(result.is_contiguous() for result in results)
    one = quantize_int8_asymmetric(x, scale[:1, :1], zero[:1, :1], "tensor")
    assert_equal(one, quantize_int8_asymmetric(x, scale[0, 0, 0], zero[0, 0, 0], "tensor"))
    assert one[1].shape == one[2].shape == ()


def test_leading_dimensions_have_the_scales_of_their_rows(device: str) -> None:
    x = make_operand(6, 32, device=device).view(2, 3, 32)
    scale = torch.rand(2, 3, 1, device=device) + 0.5
    want = codes(quantize_fp8(x.view(6, 32), scale.view(6), "token")[0])
    for given in (scale, scale[..., 0], scale.view(6), scale.view(1, 6)):
        assert torch.equal(codes(quantize_fp8(x, given, "token")[0]).view(6, 32), want)


@pytest.mark.parametrize("form", FORMS)
def test_case_023_zeros_and_denormals(device: str, form: str) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3, ::2], x[3, 1::2] = 0, 1e-40, 0.0, -0.0
    check(x.to(device), form)
    check(x.to(device, torch.bfloat16), form)
    q, scale, *zero = quantize(form, torch.zeros(3, 128, device=device))
    assert bool((q.float() == (zero[0].float() if zero else 0)).all())
    assert bool((scale > 0).all() and scale.isfinite().all())


def test_case_023_the_floor_leaves_small_rows_alone(device: str) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-4], [1e-9]])
    _, scale = quantize_fp8(x.to(device), granularity="token")
    torch.testing.assert_close(scale.cpu(), x.abs().amax(1, keepdim=True) / 448, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_and_inf_touch_only_themselves(device: str, dtype: torch.dtype, form: str) -> None:
    healthy = make_operand(6, 100, dtype)
    x = healthy.clone()
    x[0, 3], x[0, 4], x[0, 5], x[5] = math.nan, math.inf, -math.inf, math.nan
    x[5, :2] = torch.tensor([math.inf, -math.inf])
    check(x.to(device), form)
    q, scale, *zero = quantize(form, x.to(device))
    of_nan = int(zero[0].flatten()[0]) if zero else 0x7F if form.startswith("fp8") else 0
    most, least = (0x7E, 0xFE) if form.startswith("fp8") else (127, 0x80)
    assert codes(q)[0, 3:6].tolist() == [of_nan & 0xFF, most, least]
    assert codes(q)[5, :2].tolist() == [most, least]
    assert codes(q)[5, 2:].unique().tolist() == [int(zero[0].flatten()[-1]) & 0xFF if zero else of_nan]
    assert bool(scale.isfinite().all())
    if form.split()[1] not in ("tensor", "block"):
        alone = quantize(form, healthy.to(device))
        assert_equal((q[1:5], scale[1:5], *(z[1:5] for z in zero)), tuple(result[1:5] for result in alone))


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_has_one_code(device: str, sign: int) -> None:
    x = torch.tensor([[math.copysign(math.nan, sign), 0.0]], device=device)
    assert codes(quantize_fp8(x)[0]).tolist() == [[0x7F, 0]]
    # 0 / 0, whose sign depends on the machine.
    assert codes(quantize_fp8(x, torch.zeros(1, device=device))[0]).tolist() == [[0x7F, 0x7F]]


@pytest.mark.parametrize("form", FORMS)
def test_largest_numbers_of_float32(device: str, form: str) -> None:
    big = torch.finfo(torch.float32).max
    check(torch.tensor([[big, -big, 1.0, big / 2], [big, 0.0, 1e30, -1e-30]], device=device), form)


# Layouts


def views() -> dict[str, Tensor]:
    qkv = make_operand(12, 3 * 96)
    return {
        "split": qkv.split(96, dim=1)[1],
        "gaps": padded(make_operand(12, 96), 100),  # of 1e4
        "gaps of NaN": padded(make_operand(12, 96), 104, fill=math.nan),
        "odd pitch": padded(make_operand(12, 96), 97),
        "transposed": make_operand(96, 12).t(),
        "every second": make_operand(12, 192)[:, ::2],
        "rows of 3-D": padded(make_operand(12, 96).view(3, 4, 96), 128),
        "slice of 3-D": make_operand(30, 96).view(3, 10, 96)[:, 2:6],
        "permuted": make_operand(12, 96).view(4, 3, 96).transpose(0, 1),
        "expanded": make_operand(1, 96).expand(5, 96),
        "stride of size 1": torch.as_strided(make_operand(1, 128), (1, 128), (2**31, 1)),
        "size 1 inside": make_operand(12, 96).view(12, 1, 96).as_strided((12, 1, 96), (96, 7, 1)),
        "one column": padded(make_operand(9, 1), 5),
        "one column of stride 3": make_operand(8, 96).as_strided((8, 1), (96, 3)),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", views())
def test_case_026_and_027_views_give_what_their_copies_give(device: str, name: str, form: str) -> None:
    x = views()[name]
    moved = torch.empty(x.untyped_storage().nbytes() // 2, dtype=x.dtype, device=device)
    moved.untyped_storage().copy_(x.untyped_storage())
    view = moved.as_strided(x.shape, x.stride(), x.storage_offset())
    assert torch.equal(view.cpu(), x)
    check(view, form)
    assert_equal(quantize(form, view), quantize(form, view.contiguous()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", range(1, 8))
def test_any_alignment(device: str, offset: int, form: str) -> None:
    x = make_operand(5, 64, seed=offset).to(device)
    assert_equal(quantize(form, misaligned(x, offset)), quantize(form, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...], form: str) -> None:
    if form == "fp8 block" and len(shape) < 2:
        return
    op, granularity = form.split()
    x = torch.empty(shape, device=device)
    q, scale, *zero = quantize(form, x)
    assert q.shape == shape
    assert scale.shape == scale_shape(q, granularity)
    assert bool((scale == torch.tensor(AMAX_FLOOR / LARGEST.get(op, 1.0))).all())
    assert all(z.shape == scale.shape and bool((z == -128).all()) for z in zero)
    given = [torch.full_like(s, 3) for s in (scale, *zero)]
    assert_equal(quantize(form, x, *given), (q, *given))
    check(make_operand(3, 5).to(device), form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 8)])
def test_scales_of_nothing_have_the_strides_of_the_references(shape: tuple[int, ...], form: str) -> None:
    x = torch.empty(shape)
    for one, other in zip(quantize(form, x.cuda()), quantize(form, x), strict=True):
        assert one.stride() == other.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "k"), [(65535, 16), (65536, 16), (262141, 16), (2**19 + 1, 4096)])
def test_case_025_many_rows_and_more_than_2_31_elements(rows: int, k: int, form: str) -> None:
    # The same 128 rows over and over, and then 1 to 128 others: all is known of a few.
    whole = (rows - 1) // 128 * 128
    x = make_operand(128, k, device="cuda").repeat(rows // 128 + 1, 1)[:rows]
    x[whole:] = make_operand(rows - whole, k, seed=1, device="cuda")
    q, *scales = quantize(form, x)
    want, *its = quantize(form, torch.cat([x[:128], x[whole:]]).cpu())
    assert bool((q[:whole].view(torch.uint8).unflatten(0, (-1, 128)) == want[:128].view(torch.uint8).cuda()).all())
    assert torch.equal(codes(q[whole:]), codes(want[128:]))
    n = 1 if "block" in form else 128  # rows of scales that 128 rows have
    for scale, of_few in zip(scales, its, strict=True):
        if "tensor" in form:
            assert torch.equal(scale.cpu(), of_few)
        else:
            assert bool((scale[: whole // 128 * n].unflatten(0, (-1, n)) == of_few[:n].cuda()).all())
            assert torch.equal(scale[whole // 128 * n :].cpu(), of_few[n:])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fp8 tensor", "int8 tensor", "asymmetric tensor"])
def test_one_row_of_more_than_2_31_elements(form: str) -> None:
    n = 2**31 + 4096
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    ends = (slice(0, 4096), slice(n - 8192, n))  # the second has an offset of 2**31 in its middle
    for seed, end in enumerate(ends):
        x[end] = make_operand(1, x[end].numel(), seed=seed, device="cuda")[0]
    x[-1] = 1000.0  # is amax
    q, *scales = quantize(form, x)
    its = quantize(form, torch.cat([x[end] for end in ends]))[1:]
    static, *returned = quantize(form, x, *scales)
    for one, given, want in zip(scales, returned, its, strict=True):
        assert torch.equal(one, want)
        assert torch.equal(given, want)
    of_zero = codes(quantize(form, x[4096:4097], *scales)[0]).item()
    for result in (q, static):
        for end in ends:
            assert torch.equal(codes(result[end]), codes(quantize(form, x[end], *scales)[0]))
        assert bool((result.view(torch.uint8)[4096 : n - 8192] == of_zero).all())


# Errors

ONE = torch.ones(1)
WRONG = [
    (
        (torch.ones(4, 8, dtype=torch.int32),),
        "x is torch.int32; it must be torch.bfloat16, torch.float16 or torch.float32",
    ),
    ((torch.ones(4, 8, dtype=torch.float64),), "x is torch.float64; it must be"),
    ((torch.tensor(1.0),), "x has no dimension; it must have at least one"),
    (
        (torch.ones(4, 8), None, "row"),
        "granularity is 'row'; it must be 'tensor', 'token', 'channel', 'group' or 'block'",
    ),
    ((torch.ones(8), None, "block"), "x is [8]; for granularity 'block' it must have two dimensions or more"),
    ((torch.ones(4, 8), None, "group", 96), "group_size is 96; it must be 64 or 128"),
    ((torch.ones(4, 200), torch.ones(4, 1), "group"), "scale is [4, 1]; for granularity 'group' it must be [4, 2]"),
    ((torch.ones(4, 200), torch.ones(2), "block"), "scale is [2]; for granularity 'block' it must be [1, 2]"),
    (
        (torch.ones(4, 8), None, "token", 128, torch.ones(2)),
        "scale_ub is torch.float32 of [2]; it must be one element of torch.float32",
    ),
    (
        (torch.ones(4, 8), None, "token", 128, ONE.double()),
        "scale_ub is torch.float64 of [1]; it must be one element of torch.float32",
    ),
    (
        (torch.ones(4, 8), ONE, "tensor", 128, ONE),
        "scale_ub is given with scale; it must be left out, since it is for a computed scale",
    ),
    ((torch.ones(4, 8), ONE, "tensor", 128, None, True, True), "power_of_two_scale is given with scale; it must be"),
    ((torch.ones(4, 8), ONE.double()), "scale is torch.float64; it must be torch.float32"),
    ((torch.ones(4, 64), torch.ones(4)), "scale is [4]; for granularity 'tensor' it must have one element"),
    (
        (torch.ones(4, 64), torch.ones(4, 1)),
        "scale is [4, 1]; for granularity 'tensor' it must have one element",
    ),
    ((torch.ones(4, 8), torch.ones(0)), "scale is [0]; for granularity 'tensor' it must have one element"),
    (
        (torch.ones(4, 8), torch.ones(8), "token"),
        "scale is [8]; for granularity 'token' it must have one element for each row of x, which is [4, 8]",
    ),
    (
        (torch.ones(4, 8), ONE, "channel"),
        "scale is [1]; for granularity 'channel' it must have one element for each",
    ),
    (
        (torch.ones(2, 3, 8), torch.ones(3, 2), "token"),
        "scale is [3, 2]; for granularity 'token' it must have one",
    ),
]


@pytest.mark.parametrize(("args", "sentence"), WRONG)
def test_errors(device: str, args: tuple, sentence: str) -> None:
    moved = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
    wrong_type = " is torch." in sentence and "float32 of" not in sentence
    kind = RuntimeError if device == "cuda" else TypeError if wrong_type else ValueError
    with pytest.raises(kind, match=re.escape(f"quantize_fp8: {sentence}")):
        quantize_fp8(*moved)


def test_scale_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"scale is on meta; it must be on the device of x, cpu"):
        quantize_fp8(torch.ones(4, 8), torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"asymmetric: zero_point is on meta; it must be on the device of x, cpu"):
        quantize_int8_asymmetric(torch.ones(4, 8), ONE, torch.ones(1, dtype=torch.int32, device="meta"), "tensor")


@pytest.mark.gpu
def test_scale_on_another_device_than_the_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"scale is on cpu; it must be on the device of x, cuda:0"):
        quantize_fp8(torch.ones(4, 8, device="cuda"), ONE)
    with pytest.raises(RuntimeError, match=r"scale is on cuda:0; it must be on the device of x, cpu"):
        quantize_fp8(torch.ones(4, 8), ONE.cuda())
    with pytest.raises(RuntimeError, match=r"asymmetric: zero_point is on cpu; it must be on the device of x, cuda:0"):
        quantize_int8_asymmetric(torch.ones(4, 8, device="cuda"), ONE.cuda(), ONE.int(), "tensor")


# dequantize_fp8


def test_dequantize() -> None:
    q = torch.tensor([[1.0, -2.0, 448.0], [0.5, 0.0, 3.0]]).to(E4M3)
    assert dequantize_fp8(q, torch.tensor(2.0)).tolist() == [[2, -4, 896], [1, 0, 6]]
    for scale in (torch.tensor([2.0, 4.0]), torch.tensor([[2.0], [4.0]]), torch.tensor([[2.0, 4.0]])):
        assert dequantize_fp8(q, scale).tolist() == [[2, -4, 896], [2, 0, 12]]
    with pytest.raises(ValueError, match=r"scale is \[3\]; it must have one element, one for each row of q, which"):
        dequantize_fp8(q, torch.ones(3))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    "shape",
    # In the first three a row of blocks has as many scales as q has rows.
    [(16, 2048), (2, 256), (32, 4096), (1, 300), (3, 300), (130, 300), (2, 3, 300), (1, 3, 384), (2, 130, 129)],
)
def test_dequantize_takes_every_scale_for_what_it_is(shape: tuple[int, ...], granularity: str) -> None:
    q = make_operand(math.prod(shape[:-1]), shape[-1], seed=7).view(shape).to(E4M3)
    # All scales are different, so that another one's would show.
    scale = torch.arange(1.0, math.prod(scale_shape(q, granularity)) + 1).view(scale_shape(q, granularity))
    want = torch.empty(shape)
    of_units = units(want, granularity)
    for unit, code, by in zip(of_units, units(q.float(), granularity), scale.flatten(), strict=True):
        unit.copy_(code * by)
    torch.testing.assert_close(dequantize_fp8(q, scale), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(16, 2048), (2, 256), (32, 4096), (1, 300), (2, 5, 640)])
def test_dequantize_undoes_block_scales_of_small_weights(device: str, shape: tuple[int, ...]) -> None:
    x = make_operand(math.prod(shape[:-1]), shape[-1], device=device).view(shape)
    q, scale = quantize_fp8(x, granularity="block")
    row, column = torch.arange(shape[-2]) // 128, torch.arange(shape[-1]) // 128
    want = q.float() * scale[..., row[:, None], column]
    assert torch.equal(dequantize_fp8(q, scale), want)


# Groups, bounds and powers of two


@pytest.mark.parametrize("shape", [(5, 64), (3, 65), (7, 200), (2, 3, 576), (4, 11007)])
def test_groups_of_64(device: str, shape: tuple[int, ...]) -> None:
    check(make_operand(math.prod(shape[:-1]), shape[-1], seed=1).view(shape).to(device), "fp8 group", 64)


@pytest.mark.parametrize("shape", [(128, 128), (129, 1), (300, 260), (2, 130, 576), (1, 7168)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make_operand(math.prod(shape[:-1]), shape[-1], dtype, seed=1).view(shape).to(device), "fp8 block")


@pytest.mark.parametrize("shape", [(1, 300), (6, 300), (2, 3, 300)])
def test_layouts_of_group_scales_hold_the_same(device: str, shape: tuple[int, ...]) -> None:
    x = make_operand(math.prod(shape[:-1]), shape[-1], device=device).view(shape)
    q, scale = quantize_fp8(x, granularity="group")
    again, rows = quantize_fp8(x, granularity="group", column_major_scale=False)
    assert torch.equal(codes(q), codes(again))
    assert torch.equal(scale, rows)
    assert rows.is_contiguous()
    for given in (scale, rows, padded(rows, 7)):
        static, returned = quantize_fp8(x, given, "group")
        assert torch.equal(codes(static), codes(q))
        assert torch.equal(returned, scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scale_ub_bounds_amax(device: str, granularity: str) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[1] *= 100
    bound = torch.tensor([8.0])
    _, free = quantize_fp8(x, granularity=granularity)
    q, scale = quantize_fp8(x.to(device), granularity=granularity, scale_ub=bound.to(device))
    assert torch.equal(scale.cpu(), free.clamp_max((bound / 448).item()))
    assert float(scale.max()) == float(bound / 448)
    assert torch.equal(codes(q), codes(quantize_fp8(x, scale.cpu(), granularity)[0]))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_power_of_two_scales_are_the_next_ones_up(device: str, granularity: str) -> None:
    x = make_operand(9, 300, torch.float32, seed=5)
    x[3, 0], x[4, 0] = 448.0 * 64, 448.0 * 64 * (1 + 2**-20)
    x[3, 1:], x[4, 1:] = 1.0, 1.0
    _, free = quantize_fp8(x, granularity=granularity)
    want = [2.0 ** math.ceil(math.log2(s)) for s in free.double().flatten().tolist()]
    q, scale = quantize_fp8(x.to(device), granularity=granularity, power_of_two_scale=True)
    assert scale.cpu().contiguous().flatten().tolist() == want
    assert torch.equal(codes(q), codes(quantize_fp8(x, scale.cpu(), granularity)[0]))


# INT8


def test_int8_ties_go_to_even_and_it_saturates(device: str) -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -127.5, -128.5, -1e9]], device=device)
    q, _ = quantize_int8(x, torch.ones(1, device=device))
    assert q.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128, -128]]


def test_int8_zero_is_exact_with_a_zero_point(device: str) -> None:
    x = torch.tensor([[0.0, 3.0, 7.0], [0.0, -5.0, -1.0], [0.0, 5.0, 5.0], [0.0, 0.0, 0.0]], device=device)
    q, scale, zero = quantize_int8_asymmetric(x)
    back = dequantize_int8(q, scale, zero)
    assert back[:, 0].tolist() == [0, 0, 0, 0]
    assert bool(((back - x).abs() <= scale / 2 * (1 + 1e-6)).all())
    symmetric, its_scale = quantize_int8(x, granularity="token")
    assert bool(((dequantize_int8(symmetric, its_scale) - x).abs() <= its_scale / 2 * (1 + 1e-6)).all())


def test_int8_errors(device: str) -> None:
    x, one = torch.ones(4, 8, device=device), torch.ones(1, device=device)
    kind = RuntimeError if device == "cuda" else ValueError
    with pytest.raises(kind, match="quantize_int8: granularity is 'group'; it must be 'tensor', 'token' or 'channel'"):
        quantize_int8(x, granularity="group")
    with pytest.raises(kind, match="one of scale and zero_point is given; both must be, or neither"):
        quantize_int8_asymmetric(x, one, granularity="tensor")
    with pytest.raises(kind, match=r"zero_point is \[2\]; it must be the shape of scale, \[1\]"):
        quantize_int8_asymmetric(x, one, torch.ones(2, dtype=torch.int32, device=device), "tensor")
    with pytest.raises(RuntimeError if device == "cuda" else TypeError, match=r"zero_point is torch.int64; it must be"):
        quantize_int8_asymmetric(x, one, torch.ones(1, dtype=torch.int64, device=device), "tensor")


# The ops that quantize what they compute, where that is nothing


def fused(x: Tensor, **how: Any) -> dict[str, tuple[Tensor, ...]]:
    """Codes of the shape of x, and their scale, of each of them."""
    return {
        "rms_norm_quant": cutegemm.rms_norm_quant(x, **how),
        "fused_add_rms_norm_quant": cutegemm.fused_add_rms_norm_quant(x, x.clone(), **how)[:2],
        "fused_add_rms_norm_quant_": cutegemm.fused_add_rms_norm_quant_(x, x.clone(), **how),
        "activation_quant": cutegemm.activation_quant(torch.cat((x, x), -1), **how),
        "activation_quant, interleaved": cutegemm.activation_quant(torch.cat((x, x), -1), gate="interleaved", **how),
        "activation_quant, no gate": cutegemm.activation_quant(x, gate="none", **how),
    }


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (2, 0, 8), (0,)])
def test_fused_scale_of_nothing_is_the_given_one(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for s in (torch.tensor(0.5, device=device), torch.tensor([3.0], device=device)):
        for op, (q, scale) in fused(x, dtype=dtype, granularity="tensor", scale=s).items():
            assert (q.shape, q.dtype) == (shape, dtype), op
            assert scale.shape == (), op
            assert scale.item() == s.item(), op


@pytest.mark.gpu
@pytest.mark.parametrize("column_major_scale", [True, False])
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 8)])
def test_fused_scales_of_nothing_have_the_strides_of_the_references(
    shape: tuple[int, ...], column_major_scale: bool
) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    for how in ({}, {"granularity": "group", "column_major_scale": column_major_scale}):
        want = fused(x, **how)
        for op, results in fused(x.cuda(), **how).items():
            for one, other in zip(results, want[op], strict=True):
                assert (one.shape, one.stride()) == (other.shape, other.stride()), op


# torch.compile, CUDA graphs, streams and memory


def test_compiles_with_dynamic_shapes(device: str) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def f(x: Tensor) -> list[tuple[Tensor, ...]]:
        return [quantize(form, x * 2) for form in FORMS]

    for rows in (3, 8, 1):
        x = make_operand(rows, 72, device=device)
        for results, form in zip(f(x), FORMS, strict=True):
            assert_equal(results, quantize(form, x * 2))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_graph_replay_follows_the_input(form: str) -> None:
    x = make_operand(40, 1000, device="cuda")
    quantize(form, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = quantize(form, x)
    for seed in (1, 2):
        # The second input is the smaller one: an amax that is not reset would show.
        x.copy_(make_operand(40, 1000, seed=seed) / seed**9)
        graph.replay()
        assert_equal(results, quantize(form, x))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_current_stream(form: str) -> None:
    source, x = (
        make_operand(64, 4096, device="cuda"),
        torch.zeros(64, 4096, device="cuda", dtype=torch.bfloat16),
    )
    want = quantize(form, source)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        results = quantize(form, x)
    stream.synchronize()
    assert_equal(results, want)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 127, 8193])
@pytest.mark.parametrize("k", [1, 8, 4096, 4100, 28672])
def test_cuda_has_the_bits_of_the_reference(rows: int, k: int, form: str) -> None:
    x = make_operand(rows, k, device="cuda")
    assert_equal(quantize(form, x), quantize(form, x.cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pitch", [2**30, 2**31])
def test_offsets_beyond_32_bits(pitch: int, form: str) -> None:
    rows = 2**31 // pitch + 1
    buffer = torch.empty(2**31 + 2**12, dtype=torch.bfloat16, device="cuda").fill_(1e4)
    x = buffer.as_strided((rows, 64), (pitch, 1))
    x.copy_(make_operand(rows, 64))
    check(x, form)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("form", FORMS)
def test_another_than_the_current_device(form: str) -> None:
    check(make_operand(9, 96).to("cuda:1"), form)
    assert torch.cuda.current_device() == 0
