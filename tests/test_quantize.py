"""Quantization against codes built by hand; with `device`, the same expectations hold on CUDA."""

import bisect
import math
import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cutegemm.quantize import (
    AMAX_FLOOR,
    dequantize_fp8,
    dequantize_int8,
    quantize_fp8,
    quantize_int8,
    quantize_int8_asymmetric,
)
from cutegemm.testing import make_operand, misaligned, padded

E4M3 = torch.float8_e4m3fn
GRANULARITIES = ["tensor", "token", "channel", "group", "block"]

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


def codes(q: Tensor) -> Tensor:
    assert q.dtype == E4M3
    assert q.is_contiguous()
    return q.view(torch.uint8).cpu()


def amax_of_row(row: Tensor) -> float:
    return max([v for v in row.abs().tolist() if math.isfinite(v)], default=0.0)


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


def expected(x: Tensor, granularity: str, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Codes and scales, from double arithmetic and `nearest_code`.

    A quotient of two float32 that was rounded to float64 first rounds to the same float32.
    """
    values = x.cpu().double().contiguous()
    q, scales = torch.zeros(x.shape, dtype=torch.uint8), []
    for unit, to in zip(units(values, granularity, group_size), units(q, granularity, group_size), strict=True):
        amax = torch.tensor(max(amax_of_row(unit.flatten()), AMAX_FLOOR), dtype=torch.float64)
        scales.append((amax / 448).float())
        quotient = (unit / scales[-1].double()).float()
        to.copy_(torch.tensor([nearest_code(y) for y in quotient.flatten().tolist()]).view(unit.shape))
    shape = scale_shape(x, granularity, group_size)
    return q, torch.stack(scales).view(shape) if scales else torch.empty(shape)


def check(x: Tensor, granularity: str, group_size: int = 128) -> None:
    if granularity == "block" and x.dim() < 2:
        return
    before = x.clone()
    q, scale = quantize_fp8(x, granularity=granularity, group_size=group_size)
    want_q, want_scale = expected(x, granularity, group_size)
    assert scale.shape == want_scale.shape
    assert scale.dtype == torch.float32
    if granularity != "group":
        assert scale.is_contiguous()
    elif scale.numel():
        rows = math.prod(x.shape[:-1])
        assert scale.stride(-1) == math.ceil(rows / 4) * 4
        assert rows == 1 or scale.flatten(0, -2).stride(0) == 1
    assert torch.equal(codes(q), want_q)
    assert torch.equal(scale.cpu(), want_scale)
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


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(1,), (7,), (1, 1), (5, 8), (3, 129), (2, 3, 64), (6, 255), (4, 3420), (1, 8192), (2, 8200), (3, 11007)],
)
def test_dynamic(device: str, shape: tuple[int, ...], dtype: torch.dtype, granularity: str) -> None:
    x = make_operand(math.prod(shape[:-1]), shape[-1], dtype, seed=sum(shape)).view(shape)
    check(x.to(device), granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_error_is_at_most_half_a_step(device: str, granularity: str) -> None:
    x = make_operand(33, 500, torch.float32, device=device)
    q, scale = quantize_fp8(x, granularity=granularity)
    back = dequantize_fp8(q, scale)
    smallest = dequantize_fp8(torch.ones_like(q), scale)  # of every value, its scale
    step = torch.maximum(x.abs().double() * 2**-4, 2**-10 * smallest.double())
    assert bool(((back.double() - x).abs() <= step * (1 + 1e-6)).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_static_with_the_dynamic_scale_gives_the_same(device: str, granularity: str) -> None:
    x = make_operand(19, 200, device=device)
    q, scale = quantize_fp8(x, granularity=granularity)
    again, returned = quantize_fp8(x, scale, granularity)
    assert torch.equal(codes(again), codes(q))
    assert torch.equal(returned, scale)
    assert returned.data_ptr() != scale.data_ptr()
    repeat, _ = quantize_fp8(x, granularity=granularity)
    assert torch.equal(codes(repeat), codes(q))


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


@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_case_005_each_row_has_its_own_static_scale(device: str, granularity: str) -> None:
    x = make_operand(4, 64, device=device)
    values = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)
    want = torch.stack([codes(quantize_fp8(row, value)[0]) for row, value in zip(x, values, strict=True)])
    wide = torch.full((4, 3), 9.0, device=device)
    wide[:, 1] = values
    for scale in (values, values[:, None], values[None], wide[:, 1], wide[:, 1:2]):
        q, returned = quantize_fp8(x, scale, granularity)
        assert torch.equal(codes(q), want)
        assert torch.equal(returned.flatten(), values)


def test_leading_dimensions_have_the_scales_of_their_rows(device: str) -> None:
    x = make_operand(6, 32, device=device).view(2, 3, 32)
    scale = torch.rand(2, 3, 1, device=device) + 0.5
    want = codes(quantize_fp8(x.view(6, 32), scale.view(6), "token")[0])
    for given in (scale, scale[..., 0], scale.view(6), scale.view(1, 6)):
        assert torch.equal(codes(quantize_fp8(x, given, "token")[0]).view(6, 32), want)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_case_023_zeros_and_denormals(device: str, granularity: str) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3, ::2], x[3, 1::2] = 0, 1e-40, 0.0, -0.0
    check(x.to(device), granularity)
    check(x.to(device, torch.bfloat16), granularity)
    q, scale = quantize_fp8(torch.zeros(3, 128, device=device), granularity=granularity)
    assert int(codes(q).max()) == 0
    assert bool((scale > 0).all() and scale.isfinite().all())


def test_case_023_the_floor_leaves_small_rows_alone(device: str) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-4], [1e-9]])
    _, scale = quantize_fp8(x.to(device), granularity="token")
    torch.testing.assert_close(scale.cpu(), x.abs().amax(1, keepdim=True) / 448, rtol=1e-6, atol=0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_and_inf_touch_only_themselves(device: str, dtype: torch.dtype, granularity: str) -> None:
    healthy = make_operand(6, 100, dtype)
    x = healthy.clone()
    x[0, 3], x[0, 4], x[0, 5], x[5] = math.nan, math.inf, -math.inf, math.nan
    check(x.to(device), granularity)
    q, scale = quantize_fp8(x.to(device), granularity=granularity)
    assert codes(q)[0, 3:6].tolist() == [0x7F, 0x7E, 0xFE]
    assert codes(q)[5].tolist() == [0x7F] * 100
    assert bool(scale.isfinite().all())
    if granularity not in ("tensor", "block"):
        alone, _ = quantize_fp8(healthy.to(device), granularity=granularity)
        assert torch.equal(codes(q)[1:5], codes(alone)[1:5])


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_has_one_code(device: str, sign: int) -> None:
    x = torch.tensor([[math.copysign(math.nan, sign), 0.0]], device=device)
    assert codes(quantize_fp8(x)[0]).tolist() == [[0x7F, 0]]
    # 0 / 0, whose sign depends on the machine.
    assert codes(quantize_fp8(x, torch.zeros(1, device=device))[0]).tolist() == [[0x7F, 0x7F]]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_largest_numbers_of_float32(device: str, granularity: str) -> None:
    big = torch.finfo(torch.float32).max
    check(torch.tensor([[big, -big, 1.0, big / 2], [big, 0.0, 1e30, -1e-30]], device=device), granularity)


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


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", views())
def test_case_026_and_027_views_give_what_their_copies_give(device: str, name: str, granularity: str) -> None:
    x = views()[name]
    moved = torch.empty(x.untyped_storage().nbytes() // 2, dtype=x.dtype, device=device)
    moved.untyped_storage().copy_(x.untyped_storage())
    view = moved.as_strided(x.shape, x.stride(), x.storage_offset())
    assert torch.equal(view.cpu(), x)
    check(view, granularity)
    q, scale = quantize_fp8(view, granularity=granularity)
    copied, its_scale = quantize_fp8(view.contiguous(), granularity=granularity)
    assert torch.equal(codes(q), codes(copied))
    assert torch.equal(scale, its_scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("offset", range(1, 8))
def test_any_alignment(device: str, offset: int, granularity: str) -> None:
    x = make_operand(5, 64, seed=offset).to(device)
    q, scale = quantize_fp8(misaligned(x, offset), granularity=granularity)
    aligned, its_scale = quantize_fp8(x, granularity=granularity)
    assert torch.equal(codes(q), codes(aligned))
    assert torch.equal(scale, its_scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...], granularity: str) -> None:
    if granularity == "block" and len(shape) < 2:
        return
    q, scale = quantize_fp8(torch.empty(shape, device=device), granularity=granularity)
    assert q.shape == shape
    assert scale.shape == scale_shape(q, granularity)
    assert bool((scale == torch.tensor(AMAX_FLOOR / 448)).all())
    check(make_operand(3, 5).to(device), granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [65535, 65536, 262141])
def test_case_025_many_rows(device: str, rows: int, granularity: str) -> None:
    x = make_operand(rows, 16, device=device)
    q, scale = quantize_fp8(x, granularity=granularity)
    for part in (slice(0, 5), slice((rows - 1) // 128 * 128, rows)):
        if granularity == "tensor":
            want = codes(quantize_fp8(x[part], scale)[0])
        elif granularity == "block":
            row = part.start // 128
            want = codes(quantize_fp8(x[part], scale[row : row + 1], "block")[0])
        else:
            want = expected(x[part], granularity)[0]
        assert torch.equal(codes(q[part]), want)


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
    wrong_type = " is torch." in sentence and "scale_ub" not in sentence
    kind = RuntimeError if device == "cuda" else TypeError if wrong_type else ValueError
    with pytest.raises(kind, match=re.escape(f"quantize_fp8: {sentence}")):
        quantize_fp8(*moved)


def test_scale_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"scale is on meta; it must be on the device of x, cpu"):
        quantize_fp8(torch.ones(4, 8), torch.ones(1, device="meta"))


@pytest.mark.gpu
def test_scale_on_another_device_than_the_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"scale is on cpu; it must be on the device of x, cuda:0"):
        quantize_fp8(torch.ones(4, 8, device="cuda"), ONE)
    with pytest.raises(RuntimeError, match=r"scale is on cuda:0; it must be on the device of x, cpu"):
        quantize_fp8(torch.ones(4, 8), ONE.cuda())


# dequantize_fp8


def test_dequantize() -> None:
    q = torch.tensor([[1.0, -2.0, 448.0], [0.5, 0.0, 3.0]]).to(E4M3)
    assert dequantize_fp8(q, torch.tensor(2.0)).tolist() == [[2, -4, 896], [1, 0, 6]]
    for scale in (torch.tensor([2.0, 4.0]), torch.tensor([[2.0], [4.0]])):
        assert dequantize_fp8(q, scale).tolist() == [[2, -4, 896], [2, 0, 12]]
    with pytest.raises(ValueError, match=r"scale is \[3\]; it must have one element, one for each row of q, which"):
        dequantize_fp8(q, torch.ones(3))


# Groups, bounds and powers of two


@pytest.mark.parametrize("shape", [(5, 64), (3, 65), (7, 200), (2, 3, 576), (4, 11007)])
def test_groups_of_64(device: str, shape: tuple[int, ...]) -> None:
    check(make_operand(math.prod(shape[:-1]), shape[-1], seed=1).view(shape).to(device), "group", 64)


@pytest.mark.parametrize("shape", [(128, 128), (129, 1), (300, 260), (2, 130, 576), (1, 7168)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make_operand(math.prod(shape[:-1]), shape[-1], dtype, seed=1).view(shape).to(device), "block")


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


def nearest_int8(y: float) -> int:
    if math.isnan(y):
        return 0
    return max(-128, min(127, round(y))) if math.isfinite(y) else 127 if y > 0 else -128


@pytest.mark.parametrize("granularity", ["tensor", "token", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(7,), (5, 8), (2, 3, 64), (4, 3420), (3, 11007), (0, 8), (2, 0)])
def test_int8(device: str, shape: tuple[int, ...], dtype: torch.dtype, granularity: str) -> None:
    x = make_operand(math.prod(shape[:-1]), shape[-1], dtype, seed=2).view(shape)
    if x.numel() > 10:
        x.view(-1)[3:6] = torch.tensor([math.nan, math.inf, -math.inf])
    q, scale = quantize_int8(x.to(device), granularity=granularity)
    values, want = x.double(), torch.zeros(shape, dtype=torch.int8)
    assert q.dtype == torch.int8
    assert q.is_contiguous()
    assert scale.shape == scale_shape(x, granularity)
    scales = scale.cpu().flatten().tolist()
    for unit, to, given in zip(units(values, granularity), units(want, granularity), scales, strict=True):
        amax = torch.tensor(max(amax_of_row(unit.flatten()), AMAX_FLOOR), dtype=torch.float64)
        assert given == (amax / 127).float().item()
        quotient = (unit / given).float().flatten().tolist()
        to.copy_(torch.tensor([nearest_int8(y) for y in quotient], dtype=torch.int8).view(unit.shape))
    assert torch.equal(q.cpu(), want)
    static, returned = quantize_int8(x.to(device), scale, granularity)
    assert torch.equal(static, q)
    assert torch.equal(returned, scale)


def test_int8_ties_go_to_even_and_it_saturates(device: str) -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -127.5, -128.5, -1e9]], device=device)
    q, _ = quantize_int8(x, torch.ones(1, device=device))
    assert q.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128, -128]]


@pytest.mark.parametrize("granularity", ["tensor", "token"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (5, 8), (2, 3, 64), (4, 3420), (3, 11007), (0, 8), (2, 0)])
def test_int8_with_a_zero_point(device: str, shape: tuple[int, ...], dtype: torch.dtype, granularity: str) -> None:
    x = make_operand(math.prod(shape[:-1]), shape[-1], dtype, seed=3).view(shape) + 2
    if x.numel() > 10:
        x.view(-1)[3:6] = torch.tensor([math.nan, math.inf, -math.inf])
    q, scale, zero = quantize_int8_asymmetric(x.to(device), granularity=granularity)
    assert (q.dtype, scale.dtype, zero.dtype) == (torch.int8, torch.float32, torch.int32)
    assert zero.shape == scale.shape == scale_shape(x, granularity)
    want = torch.zeros(shape, dtype=torch.int8)
    pairs = zip(scale.cpu().flatten().tolist(), zero.cpu().flatten().tolist(), strict=True)
    for unit, to, (s, z) in zip(units(x.double(), granularity), units(want, granularity), pairs, strict=True):
        finite = [v for v in unit.flatten().tolist() if math.isfinite(v)]
        low, high = min([0.0, *finite]), max([0.0, *finite])
        assert s == pytest.approx(max((high - low) / 255, AMAX_FLOOR), rel=2**-22)
        assert z == round(float(torch.tensor(-128.0) - torch.tensor(low, dtype=torch.float32) / torch.tensor(s)))
        quotient = (unit / s).float().flatten().tolist()
        rounded = [0 if math.isnan(y) else y if math.isinf(y) else round(y) for y in quotient]
        to.copy_(torch.tensor([max(-128, min(127, y + z)) for y in rounded], dtype=torch.int8).view(unit.shape))
    assert torch.equal(q.cpu(), want)
    again = quantize_int8_asymmetric(x.to(device), scale, zero, granularity)
    assert all(torch.equal(one, other) for one, other in zip(again, (q, scale, zero), strict=True))


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


# torch.compile, CUDA graphs, streams and memory


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_compiles_with_dynamic_shapes(device: str, granularity: str) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_fp8(x * 2, granularity=granularity)

    for rows in (3, 8, 1):
        x = make_operand(rows, 72, device=device)
        q, scale = f(x)
        want, its_scale = quantize_fp8(x * 2, granularity=granularity)
        assert torch.equal(codes(q), codes(want))
        assert torch.equal(scale, its_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_graph_replay_follows_the_input(granularity: str) -> None:
    x = make_operand(40, 1000, device="cuda")
    quantize_fp8(x, granularity=granularity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = quantize_fp8(x, granularity=granularity)
    for seed in (1, 2):
        # The second input is the smaller one: an amax that is not reset would show.
        x.copy_(make_operand(40, 1000, seed=seed) / seed**9)
        graph.replay()
        want, its_scale = quantize_fp8(x, granularity=granularity)
        assert torch.equal(codes(q), codes(want))
        assert torch.equal(scale, its_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_current_stream(granularity: str) -> None:
    source, x = (
        make_operand(64, 4096, device="cuda"),
        torch.zeros(64, 4096, device="cuda", dtype=torch.bfloat16),
    )
    want, _ = quantize_fp8(source, granularity=granularity)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        q, _ = quantize_fp8(x, granularity=granularity)
    stream.synchronize()
    assert torch.equal(codes(q), codes(want))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [1, 127, 8193])
@pytest.mark.parametrize("k", [1, 8, 4096, 4100, 28672])
def test_cuda_has_the_bits_of_the_reference(rows: int, k: int, granularity: str) -> None:
    x = make_operand(rows, k, device="cuda")
    q, scale = quantize_fp8(x, granularity=granularity)
    want, its_scale = quantize_fp8(x.cpu(), granularity=granularity)
    assert torch.equal(codes(q), codes(want))
    assert torch.equal(scale.cpu(), its_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_offsets_beyond_32_bits(granularity: str) -> None:
    buffer = torch.empty(2**31 + 2**12, dtype=torch.bfloat16, device="cuda").fill_(1e4)
    x = buffer.as_strided((3, 64), (2**30, 1))
    x.copy_(make_operand(3, 64))
    check(x, granularity)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_another_than_the_current_device(granularity: str) -> None:
    check(make_operand(9, 96).to("cuda:1"), granularity)
    assert torch.cuda.current_device() == 0
