"""w4a16_mm, its gated form and w8a16_mm against float64, of codes and scales as the tests made them.

As in test_gemm.py, with `device` the same expectations hold on CUDA; then every declared kernel by its name, on a GPU.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_gemm import (
    Product,
    Spec,
    check_bits,
    check_in_every_place,
    outs,
    replayed,
    views_of,
    views_of_vector,
)
from test_gemm_blockwise import saturate, saturated
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import cutegemm
from cutegemm import W4Weight, activation, gemm, pack_w4, plan, quantize_fp8, w4a16_mm, w4a16_mm_silu_and_mul, w8a16_mm
from cutegemm.testing import (
    assert_same,
    first_mismatches,
    gemm_reference,
    guarded,
    make_operand,
    misaligned,
    padded,
    relative_error,
)
from cutegemm.variants import FAMILIES, KERNELS, SEPARATE, STEPS, Kernel, MixedInput, Sm80

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
HALF, OUTPUT = (BF16, FP16), (BF16, FP16, FP32)
FORMS = ("symmetric", "zeros", "minimum")
GROUP_SIZES = (32, 64, 128, 256, -1)
NAN = math.nan

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class WeightProduct(Product):
    """The operands of a call of w4a16_mm, whose w is a W4Weight, or of w8a16_mm, whose w is a tensor.

    b: w in float64, transposed. magnitude: |b|, or where a value is a sum, those of its parts. rounded: values of
    a W4Weight are rounded to the dtype of a, which is that of its scales.
    """

    w: Any
    magnitude: Tensor
    rounded: bool = False

    def __call__(self, **options: Any) -> Tensor:
        if isinstance(self.w, W4Weight):
            return w4a16_mm(self.a, self.w, **self.rest, **options)
        return w8a16_mm(self.a, self.w, **self.rest, **options)

    def gated(self, **options: Any) -> Tensor:
        return w4a16_mm_silu_and_mul(self.a, self.w, **self.rest, **options)

    def added(self) -> list[Tensor]:
        return [self.rest[name].double() for name in ("bias", "residual") if name in self.rest]

    def float64(self) -> tuple[Tensor, Tensor, Tensor | None]:
        b = self.b
        if self.rounded:
            b = b.to(self.a.dtype).double()
        return self.a.double(), b, sum(self.added()) if self.added() else None

    def tensors(self) -> list[Tensor]:
        of_w = [self.w.packed, self.w.scales, self.w.zeros] if isinstance(self.w, W4Weight) else [self.w]
        return [x for x in (self.a, *of_w, *self.rest.values()) if x is not None]

    def as_planned(self, dtype: torch.dtype, gated: bool = False) -> WeightProduct:
        """With rounded values if the kernel that the plan has for it rounds them."""
        if not (self.a.is_cuda and isinstance(self.w, W4Weight)):
            return self
        (m, k), types = self.a.shape, plan.DTYPES
        problem = plan.Problem(
            "w4a16_mm", types[self.a.dtype], "int4", types[dtype], self.w.n, k,
            scales=gemm.group_of(k, self.w.group_size, self.w.minimum), gated=gated,
            same_type=self.w.scales.dtype == self.a.dtype,
        )  # fmt: skip
        choice = plan.choose(problem, m, torch.cuda.get_device_name())
        if choice.kernel == SEPARATE:  # sums, and another launch
            return self.as_planned(FP32)
        return replace(self, rounded=getattr(KERNELS[choice.kernel].tile, "rounded", False))

    def bound(self, dtype: torch.dtype) -> Tensor:
        """Of the error: half a unit of dtype's last place, and k + 4 roundings to float32 on the way.

        Of rounded values also what a product of 2^-73 is, which is where sums in BF16 may end.
        """
        info, k = torch.finfo(dtype), self.a.shape[1]
        total = self.a.double().abs() @ self.magnitude
        for x in self.added():
            total = total + x.abs()
        last = gemm_reference(*self.float64()).abs() * (info.eps / 2) + info.smallest_normal * info.eps / 2
        return last + (k + 4) * 2.0**-24 * total + (k * 2.0**-73 if self.rounded and self.a.dtype == BF16 else 0.0)


def made_x(m: int, k: int, dtype: torch.dtype, exact: bool, seed: int, device: str) -> Tensor:
    x = make_operand(m, k, dtype, seed=3 * seed + 1, exact=exact, device=device)
    return x if exact or dtype != FP16 else x.clamp_(-120, 120)  # so that no d of FP16 is infinite


def made_rest(
    m: int, n: int, bias: torch.dtype | None, residual: torch.dtype | None, generator: torch.Generator
) -> dict[str, Tensor]:
    rest, device = {}, generator.device
    if bias:
        rest["bias"] = torch.randint(-8, 9, (n,), generator=generator, device=device).to(bias)
    if residual:
        rest["residual"] = torch.randint(-8, 9, (m, n), generator=generator, device=device).to(residual)
    return rest


def make_w4(
    m: int,
    n: int,
    k: int,
    group_size: int = 128,
    form: str = "symmetric",
    dtype: torch.dtype = BF16,
    scale_dtype: torch.dtype | None = None,
    *,
    exact: bool = True,
    bias: torch.dtype | None = FP32,
    residual: torch.dtype | None = None,
    act_order: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> WeightProduct:
    """exact: integers and powers of two, so that every order of summation gives the same bits."""
    generator = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device=device)

    size = max(k, 1) if group_size == -1 else group_size
    groups = -(-k // size)
    q = integers(0, 15, n, k)
    if exact:
        scales = integers(-2, 2, n, groups).double().exp2()
        minima = integers(-8, 8, n, groups).double()
    else:
        scales = torch.rand(n, groups, generator=generator, device=device).double() / 8 + 0.01
        scales[::3] *= -1
        minima = torch.randn(n, groups, generator=generator, device=device).double()
    scales = scales.to(scale_dtype or dtype)
    zeros = {"symmetric": None, "zeros": integers(0, 16, n, groups), "minimum": minima.to(scales.dtype)}[form]
    group = torch.arange(k, device=device) // size
    if act_order:
        group = group[torch.randperm(k, generator=torch.Generator().manual_seed(seed)).to(device)]
    w = pack_w4(q, scales, zeros, group_size, g_idx=group.int() if act_order else None, minimum=form == "minimum")
    s, z = scales.double()[:, group], 8.0 if zeros is None else zeros.double()[:, group]
    values, magnitude = (
        (q * s + z, q * s.abs() + abs(z)) if form == "minimum" else ((q - z) * s, (q - z).abs() * s.abs())
    )
    x = made_x(m, k, dtype, exact, seed, device)
    return WeightProduct(x, values.t(), made_rest(m, n, bias, residual, generator), w, magnitude.t())


def make_w8(
    m: int,
    n: int,
    k: int,
    kind: str = "rows",
    dtype: torch.dtype = BF16,
    weight: torch.dtype = E4M3,
    *,
    exact: bool = True,
    nans: bool = False,
    bias: torch.dtype | None = FP32,
    residual: torch.dtype | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> WeightProduct:
    """kind: what has a scale of its own, "one", "rows" or "block". nans: of both signs, beside the largest numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    w = make_operand(n, k, weight, seed=3 * seed + 2, exact=exact, device=device)
    if nans:
        codes = w.view(torch.uint8)
        codes[::3, ::5], codes[1::3, ::4] = 0x7E, 0xFE
        codes[::7, k // 2], codes[3::7, -1] = 0x7F, 0xFF
    shape = {"one": (1,), "rows": (n, 1), "block": (-(-n // 128), -(-k // 128))}[kind]
    if exact:
        scale = torch.randint(-2, 3, shape, generator=generator, device=device).float().exp2()
    else:
        scale = (torch.rand(shape, generator=generator, device=device) + 0.5) / 64
    each = scale.double()
    if kind == "block":
        each = each.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    values = (w.double() * each).t()
    rest = {"scale": scale, **made_rest(m, n, bias, residual, generator)}
    return WeightProduct(made_x(m, k, dtype, exact, seed, device), values, rest, w, values.abs())


_M, _N, _K = (1, 3, 16, 33, 64, 83, 130), (8, 16, 41, 66, 129, 200), (16, 33, 64, 100, 128, 200, 257, 520, 1040)
SIZES = [(_M[i % 7], _N[5 * i % 6], _K[2 * i % 9]) for i in range(18)]

MAKERS: dict[str, Callable[..., WeightProduct]] = {
    **{form: lambda m, n, k, form=form, **how: make_w4(m, n, k, 64, form, **how) for form in FORMS},
    **{kind: lambda m, n, k, kind=kind, **how: make_w8(m, n, k, kind, **how) for kind in ("one", "rows", "block")},
    "int8": lambda m, n, k, **how: make_w8(m, n, k, "rows", weight=INT8, **how),
}


# Values


def test_w4_by_hand(device: str) -> None:
    q = torch.tensor([[8, 9, 15, 0], [0, 1, 2, 3]], device=device)
    scales = torch.tensor([[0.5], [2.0]], dtype=BF16, device=device)
    x = torch.tensor([[1, 1, 1, 1], [1, 2, 3, 4]], dtype=BF16, device=device)
    w = pack_w4(q, scales, group_size=-1)
    assert w4a16_mm(x, w).tolist() == [[0, -52], [-4.5, -120]]
    zeros = torch.tensor([[15], [1]], device=device)
    assert w4a16_mm(x, pack_w4(q, scales, zeros, -1)).tolist() == [[-14, 4], [-39.5, 20]]
    minima = torch.tensor([[0.25], [-1.0]], dtype=BF16, device=device)
    assert w4a16_mm(x, pack_w4(q, scales, minima, -1, minimum=True)).tolist() == [[17, 8], [38, 30]]
    bias, residual = torch.tensor([1.0, 2.0], device=device), torch.tensor([[0.0, 1.0], [2.0, 3.0]], device=device)
    assert w4a16_mm(x, w, bias, residual=residual).tolist() == [[1, -49], [-1.5, -115]]


def test_w8_by_hand(device: str) -> None:
    w = torch.tensor([[1, 2, -3], [4, 0, 5]], dtype=FP32, device=device)
    x = torch.tensor([[1, 2, 3]], dtype=FP16, device=device)
    for dtype in (E4M3, INT8):
        for scale in (torch.tensor([0.5, 2.0], device=device), torch.tensor([[0.5], [2.0]], device=device)):
            got = w8a16_mm(x, w.to(dtype), scale, torch.tensor([1.0, -1.0], device=device))
            assert (got.dtype, got.tolist()) == (FP16, [[-1, 37]])
        for shape in ((), (1,), (1, 1)):
            one = torch.full(shape, 0.25, device=device)
            assert w8a16_mm(x, w.to(dtype), one, out_dtype=FP32).tolist() == [[-1, 4.75]]


@pytest.mark.parametrize("name", ["symmetric", "rows"])
def test_rounds_once_after_bias_and_residual(device: str, name: str) -> None:
    # 257 is half-way between two BF16 numbers: rounded before the bias or the residual, the sum would be 256.
    product = MAKERS[name](1, 2, 64, device=device)
    product.a.zero_()
    bias, residual = torch.tensor([256.0, 257.0], device=device), torch.tensor([[1.0, 1.0]], device=device)
    product.rest |= {"bias": bias, "residual": residual}
    assert product().tolist() == [[256, 258]]
    product.rest["residual"] = residual.to(BF16) + 1
    assert product().tolist() == [[258, 260]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("i", range(len(SIZES)))
def test_w4_exact_sums_are_exact(device: str, i: int, form: str) -> None:
    """With groups of every size, scales, a bias and a residual of every dtype, and act-order."""
    for j, dtype in enumerate(OUTPUT):
        group_size, of_x, of_scales = GROUP_SIZES[(i + j) % 5], HALF[(i + j) % 2], OUTPUT[(i // 2 + j) % 3]
        bias, residual = (None, *OUTPUT)[(i + j) % 4], (None, *OUTPUT)[(i + j) // 2 % 4]
        how: dict[str, Any] = {"bias": bias, "residual": residual, "act_order": (i + j) % 3 == 0, "seed": j}
        product = make_w4(*SIZES[i], group_size, form, of_x, of_scales, **how, device=device)
        with product.unchanged():
            assert_same(product(out_dtype=dtype), product.exact(dtype))


@pytest.mark.parametrize("kind", ["one", "rows", "block"])
@pytest.mark.parametrize("i", range(len(SIZES)))
def test_w8_exact_sums_are_exact(device: str, i: int, kind: str) -> None:
    for j, dtype in enumerate(OUTPUT):
        bias, residual = (None, *OUTPUT)[(i + j) % 4], (None, *OUTPUT)[(i + j) // 2 % 4]
        weight, of_x = (E4M3, INT8)[(i + j) % 2], HALF[(i // 2 + j) % 2]
        product = make_w8(*SIZES[i], kind, of_x, weight, bias=bias, residual=residual, seed=j, device=device)
        with product.unchanged():
            assert_same(product(out_dtype=dtype), product.exact(dtype))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("i", range(0, len(SIZES), 2))
def test_is_within_the_bound_of_float64(device: str, i: int, name: str) -> None:
    """With outliers, zeros and denormals."""
    product = MAKERS[name](*SIZES[i], dtype=HALF[i // 2 % 2], exact=False, residual=FP32, device=device)
    for dtype in OUTPUT:
        with product.unchanged():
            got = product(out_dtype=dtype)
        limit, planned = torch.finfo(dtype).max, product.as_planned(dtype)
        reference = gemm_reference(*planned.float64()).clamp(-limit, limit)
        assert first_mismatches(got.double().clamp(-limit, limit), reference, planned.bound(dtype)) == "", dtype


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale_dtype", OUTPUT)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_an_identity_reads_the_weight_back(device: str, group_size: int, scale_dtype: torch.dtype, form: str) -> None:
    product = make_w4(1, 41, 200, group_size, form, FP16, scale_dtype, exact=False, bias=None, device=device)
    product.a = torch.eye(200, dtype=FP16, device=device)
    got, planned = w4a16_mm(product.a, product.w, out_dtype=FP32), product.as_planned(FP32)
    want = planned.float64()[1].float()
    # Two products of which one is rounded, and a sum; all but FP32's are exact until the end.
    off = 0.0 if form != "minimum" and scale_dtype != FP32 else 2.0**-22
    assert first_mismatches(got, want, off * product.magnitude) == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_size", [32, 128, 256])
def test_each_scale_and_zero_counts_in_its_group_and_nowhere_else(device: str, group_size: int, form: str) -> None:
    """A one for each group of 28672 columns: more groups than columns in one."""
    n, k = 24, 28672
    product = make_w4(1, n, k, group_size, form, bias=None, seed=group_size, device=device)
    groups = k // group_size
    x = torch.zeros(groups, k, dtype=BF16, device=device)
    at = torch.arange(groups, device=device)
    x[at, at * group_size + (7 * at + 3) % group_size] = 1.0
    product.a = x
    assert_same(product(out_dtype=FP32), product.exact(FP32))


@pytest.mark.parametrize("kind", ["rows", "block"])
def test_each_scale_of_a_weight_of_eight_bits_counts_where_it_should(device: str, kind: str) -> None:
    product = make_w8(3, 300, 400, kind, bias=None, device=device)
    before = product(out_dtype=FP32)
    scale = product.rest["scale"]
    product.a.fill_(1.0), product.w.copy_(torch.ones(300, 400, device=device))
    scale.fill_(1.0)
    for i, g in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        scale[i, g] = 2.0
        got = product(out_dtype=FP32)
        scale[i, g] = 1.0
        want = torch.full_like(before, 400.0)
        rows = slice(128 * i, 128 * i + 128) if kind == "block" else i
        want[:, rows] += min(128, 400 - 128 * g) if kind == "block" else 400
        assert torch.equal(got, want), (i, g)


@pytest.mark.parametrize("name", MAKERS)
def test_error_over_a_long_k(device: str, name: str) -> None:
    product = MAKERS[name](5, 24, 28672, exact=False, bias=None, device=device)
    product.a.copy_(torch.randn(5, 28672, generator=torch.Generator().manual_seed(1)))
    reference = gemm_reference(*product.float64())
    assert relative_error(product(), reference) <= 2e-3  # rounding to BF16 alone is 1.7e-3
    # A tensor core cuts off what a sum of all k has no bits for; groups are summed by themselves.
    in_groups = device == "cpu" or name in (*FORMS, "block")
    assert relative_error(product(out_dtype=FP32), reference) <= (1e-5 if in_groups else 1e-4)


def test_quantized_weights_multiply_as_their_dequantized_ones(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 272, generator=generator).to(device, BF16) for rows in (136, 7))
    for symmetric in (True, False):
        w = cutegemm.quantize_w4(weight, 64, symmetric=symmetric)
        want = x.double() @ cutegemm.dequantize_w4(w, torch.float64).t()
        assert relative_error(w4a16_mm(x, w), want) <= 2e-3
        assert relative_error(w4a16_mm(x, w), x.double() @ weight.double().t()) <= 0.2
    for granularity in ("tensor", "channel", "block"):
        q, scale = quantize_fp8(weight, granularity=granularity)
        assert relative_error(w8a16_mm(x, q, scale), x.double() @ weight.double().t()) <= 0.04


def test_act_order_is_a_product_with_permuted_columns(device: str) -> None:
    product = make_w4(7, 41, 200, 32, "zeros", act_order=True, device=device)
    want = product()
    assert_same(want, product.exact(BF16))
    order = product.w.permutation
    assert order is not None
    product.a, product.w = cutegemm.gather_columns(product.a, order), replace(product.w, permutation=None)
    assert_same(product(), want)


def test_default_dtypes(device: str) -> None:
    for name, dtype in itertools.product(MAKERS, HALF):
        product = MAKERS[name](5, 16, 32, dtype=dtype, device=device)
        assert product().dtype == dtype
        for other in OUTPUT:
            out = torch.empty(5, 16, dtype=other, device=device)
            assert product(out_dtype=other).dtype == product(out=out).dtype == other


def test_a_nan_stays_in_its_row(device: str) -> None:
    for name in MAKERS:
        product = MAKERS[name](12, 40, 96, device=device)
        want = product(out_dtype=FP32)
        product.a[3, 5], product.a[4, 6] = NAN, math.inf
        got = product(out_dtype=FP32)
        assert bool(got[3].isnan().all())
        rows = [i for i in range(12) if i not in (3, 4)]
        assert_same(got[rows], want[rows])


def check_nans(product: WeightProduct, kernel: str | None = None) -> None:
    got = product(out_dtype=FP32, kernel=kernel)
    assert torch.equal(got.isnan(), product.w.float().isnan().any(1).expand(got.shape)), kernel
    assert first_mismatches(got, product.exact(FP32)) == "", kernel


@pytest.mark.parametrize("kind", ["one", "rows", "block"])
@pytest.mark.parametrize("i", range(0, len(SIZES), 3))
def test_a_nan_of_the_weight_is_in_every_sum_of_its_row(device: str, i: int, kind: str) -> None:
    check_nans(make_w8(*SIZES[i], kind, HALF[i % 2], nans=True, device=device))


# Layouts


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_x_of_every_stride(device: str, dtype: torch.dtype, act_order: bool) -> None:
    for m, n, k in ((20, 48, 200), (1, 16, 33), (130, 24, 64)):
        product = make_w4(m, n, k, 64, dtype=dtype, residual=BF16, act_order=act_order, device=device)
        x, want = product.a, product.exact(dtype)
        for name, view in {**views_of(x), "one row": x[:1].expand(m, k)}.items():
            product.a = view
            with product.unchanged():
                got = product()
            if name == "one row":
                want = product.exact(dtype)
            assert first_mismatches(got, want) == "", name


@pytest.mark.parametrize("weight", [E4M3, INT8])
def test_a_weight_of_eight_bits_of_every_pitch(device: str, weight: torch.dtype) -> None:
    for kind in ("rows", "block"):
        product = make_w8(7, 41, 200, kind, weight=weight, device=device)
        want, w = product.exact(BF16), product.w
        for name, view in views_of(w).items():
            if view.stride(1) != 1:
                continue
            product.w = view
            with product.unchanged():
                assert first_mismatches(product(), want) == "", name
    product = make_w8(7, 41, 200, "one", weight=weight, device=device)
    product.w = product.w[:1].expand(41, 200)
    want = (product.a.double() @ product.w.double().t() * product.rest["scale"].double() + product.rest["bias"]).to(
        BF16
    )
    assert_same(product(), want)


def test_parts_of_a_packed_weight_at_odd_addresses(device: str) -> None:
    product = make_w4(7, 41, 200, 64, "zeros", act_order=True, device=device)
    want = product.exact(BF16)
    for name in ("packed", "scales", "zeros", "permutation"):
        product.w = replace(product.w, **{name: misaligned(getattr(product.w, name))})
        assert_same(product(), want)


@pytest.mark.parametrize("name", MAKERS)
def test_scales_bias_and_residual_of_every_type_and_stride(device: str, name: str) -> None:
    m, n = 9, 136
    product = MAKERS[name](m, n, 200, bias=None, device=device)
    product.a.zero_()
    generator = torch.Generator(device).manual_seed(0)
    for dtype, added in itertools.product(OUTPUT, repeat=2):
        bias = torch.randn(n, generator=generator, device=device).to(added)
        for view in views_of_vector(bias).values():
            product.rest["bias"] = view
            assert_same(product(out_dtype=dtype), bias.to(dtype).expand(m, n))
        del product.rest["bias"]
        residual = torch.randn(m, n, generator=generator, device=device).to(added)
        for which, view in {**views_of(residual), "one column": residual[:, :1].expand(m, n)}.items():
            product.rest["residual"] = view
            assert first_mismatches(product(out_dtype=dtype), view.to(dtype)) == "", which
        del product.rest["residual"]


@pytest.mark.parametrize("kind", ["rows", "block"])
def test_scales_of_a_weight_of_eight_bits_of_every_stride(device: str, kind: str) -> None:
    product = make_w8(5, 300, 400, kind, device=device)
    want, scale = product.exact(BF16), product.rest["scale"]
    wide = torch.full((2 * scale.shape[0], 3 * scale.shape[1]), NAN, device=device)
    views = [
        scale,
        scale.t().contiguous().t(),
        padded(scale, scale.shape[1] + 3, fill=NAN),
        wide[::2, ::3].copy_(scale),
    ]
    for view in views:
        product.rest["scale"] = view
        assert_same(product(), want)
        if kind == "rows":
            product.rest["scale"] = view[:, 0]
            assert_same(product(), want)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("size", [(1, 24, 64), (7, 40, 128), (66, 136, 200), (6, 1, 64)])
def test_out(device: str, size: tuple[int, int, int], name: str) -> None:
    for dtype in OUTPUT:
        product = MAKERS[name](*size, residual=dtype, device=device)
        want = product.exact(dtype)
        for place, (out, check) in outs(*size[:2], dtype, device).items():
            assert product(out=out) is out
            assert first_mismatches(out, want) == "", place
            check()
            residual = product.rest["residual"]
            product.rest["residual"] = out.copy_(residual)  # in place
            assert_same(product(out=out), want)
            check()
            product.rest["residual"] = residual


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("size", [(1, 24, 64), (6, 1, 64), (6, 24, 1), (1, 1, 64), (1, 24, 1), (1, 1, 1)])
def test_the_stride_of_a_dimension_of_size_one_means_nothing(device: str, size: Any, name: str) -> None:
    product = MAKERS[name](*size, residual=BF16, device=device)
    want, out = product.exact(BF16), torch.empty(size[:2], dtype=BF16, device=device)

    def odd(x: Tensor, stride: int) -> Tensor:
        strides = [stride if length == 1 else old for length, old in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)

    a, w, residual = product.a, product.w, product.rest["residual"]
    for stride in (0, 1, 3, 8, 2**31, 2**40):
        product.a, product.rest["residual"] = odd(a, stride), odd(residual, stride)
        if isinstance(w, Tensor):
            product.w = odd(w, stride)
        assert_same(product(), want)
        assert_same(product(out=odd(out, stride)), want)


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_behind_the_ends_matters(device: str, name: str) -> None:
    """x, and a weight of eight bits, lie in the corner of a larger one, which is NaN, or the largest number."""
    for m, n, k in ((3, 40, 16), (33, 129, 200), (5, 8, 1)):
        product = MAKERS[name](m, n, k, device=device)
        want = product.exact(FP32)

        def corner(x: Tensor) -> Tensor:
            rows, columns = x.shape
            fill = NAN if x.is_floating_point() else 127
            wide = torch.full((rows + 130, (columns // 16 + 9) * 16), fill, device=x.device).to(x.dtype)
            return wide[:rows, :columns].copy_(x)

        product.a = corner(product.a)
        if isinstance(product.w, Tensor):
            product.w = corner(product.w)
        product.rest["bias"] = torch.cat([product.rest["bias"], torch.full((130,), NAN, device=device)])[:n]
        out, check = guarded((m, n), FP32, device=device, pitch=n + 4 - n % 4)
        assert_same(product(out=out), want)
        check()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("size", [(0, 24, 64), (5, 0, 64), (5, 24, 0), (0, 24, 0), (5, 0, 0), (0, 0, 64), (0, 0, 0)])
def test_empty(device: str, size: tuple[int, int, int], name: str) -> None:
    m, n, _ = size
    for bias, residual in itertools.product((None, FP32), repeat=2):
        product = MAKERS[name](*size, bias=bias, residual=residual, device=device)
        want = torch.zeros(m, n, device=device)
        for x in product.added():
            want = want + x.float()
        assert_same(product(out_dtype=FP32), want)
        out, check = guarded((m, n), BF16, device=device, pitch=n + 3)
        assert_same(product(out=out), want.to(BF16))
        check()
        if residual is None and name in FORMS:
            assert_same(product.gated(), activation(want).to(BF16))
    after = MAKERS[name](5, 24, 64, device=device)
    assert_same(after(), after.exact(BF16))


# Gated


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(1, 2, 16), (3, 40, 200), (33, 258, 129), (64, 128, 64), (130, 576, 400)])
def test_silu_and_mul_is_exact_where_silu_is(device: str, size: tuple[int, int, int], form: str) -> None:
    """Row j of the weight is the gate of row j + n / 2."""
    product = make_w4(*size, 64, form, act_order=size[0] == 33, device=device)
    saturate(product)
    want = saturated(product)
    for dtype in OUTPUT:
        assert_same(product.gated(out_dtype=dtype), want.to(dtype))
        for name, (out, check) in outs(size[0], size[1] // 2, dtype, device).items():
            assert product.gated(out=out) is out
            assert first_mismatches(out, want.to(dtype)) == "", name
            check()
    assert product.gated().dtype == BF16


def silu_and_mul(product: WeightProduct, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(g) * u in float64, and the bound of its error: see test_gemm_blockwise.py's gated."""
    values, error = gemm_reference(*product.float64()), product.bound(FP32)
    (g, u), (g_error, u_error) = (x.chunk(2, 1) for x in (values, error))
    silu = g / (1 + (-g).exp())
    result, info = silu * u, torch.finfo(dtype)
    bound = 1.1 * g_error * (u.abs() + u_error) + silu.abs() * u_error
    bound = bound + 2.0**-21 * (1 + g.clamp_max(0).abs()) * result.abs() + 2.0**-118 * u.abs()
    return result, bound + info.eps / 2 * (result.abs() + bound) + info.smallest_normal * info.eps / 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("i", range(0, len(SIZES), 3))
def test_silu_and_mul_is_within_the_bound_of_float64(device: str, i: int, form: str) -> None:
    m, n, k = SIZES[i]
    product = make_w4(m, n + n % 2, k, GROUP_SIZES[i % 5], form, exact=False, device=device)
    for dtype in (BF16, FP32):
        reference, bound = silu_and_mul(product.as_planned(dtype, gated=True), dtype)
        assert first_mismatches(product.gated(out_dtype=dtype), reference, bound) == "", dtype


# Errors


def right(op: str) -> dict[str, Any]:
    if op == "w8a16_mm":
        return {"x": Spec((5, 200)), "w": Spec((300, 200), E4M3), "scale": Spec((300,), FP32)}
    return {
        "x": Spec((5, 200)),
        "packed": Spec((20, 4, 32, 4), torch.int32),
        "scales": Spec((20, 4, 16)),
        "zeros": None,
        "permutation": None,
        "n": 300,
        "k": 200,
        "group_size": 64,
        "minimum": False,
    }


FLOATS = "torch.bfloat16, torch.float16 or torch.float32"
LIST = "`python tools/emit.py --list` prints them"
HUGE = 2**31 - 1
W4_OPS = ("w4a16_mm", "w4a16_mm_silu_and_mul")
EVERY = (*W4_OPS, "w8a16_mm")

# The ops, what is passed in place of the right arguments, and the sentence that comes back.
WRONG: list[tuple[tuple[str, ...], dict[str, Any], type[Exception], str]] = [
    (EVERY, {"x": Spec((5, 200), FP32)}, TypeError, "x is torch.float32; it must be torch.bfloat16 or torch.float16"),
    (EVERY, {"x": Spec((200,))}, ValueError, "x is [200]; it must have two dimensions"),
    (EVERY, {"x": Spec((5, 2, 100))}, ValueError, "x is [5, 2, 100]; it must have two dimensions"),
    (
        EVERY,
        {"x": Spec((5, 192))},
        ValueError,
        "x is [5, 192] and w is [300, 200]; the k of x, 192, must be the k of w, 200",
    ),
    (EVERY, {"x": Spec((HUGE, 200), BF16, (0, 1))}, ValueError, "m is 2147483647; it must be under 2**31 - 1"),
    (EVERY, {"out_dtype": torch.int32}, TypeError, f"out_dtype is torch.int32; it must be {FLOATS}"),
    (EVERY, {"bias": Spec((300,), E4M3)}, TypeError, f"bias is torch.float8_e4m3fn; it must be {FLOATS}"),
    *(
        (
            EVERY,
            {"bias": Spec(shape)},
            ValueError,
            f"bias is {list(shape)}; it must be [300], one element for each row of w",
        )
        for shape in ((5,), (1,), (1, 300), (150,))
    ),
    *(
        (
            ("w4a16_mm", "w8a16_mm"),
            {"residual": Spec(shape)},
            ValueError,
            f"residual is {list(shape)}; it must be [5, 300], as the result",
        )
        for shape in ((5, 299), (300, 5), (300,), (1, 300))
    ),
    (
        ("w4a16_mm", "w8a16_mm"),
        {"residual": Spec((5, 300), INT8)},
        TypeError,
        f"residual is torch.int8; it must be {FLOATS}",
    ),
    (("w4a16_mm", "w8a16_mm"), {"out": Spec((300, 5))}, ValueError, "out is [300, 5]; it must be [5, 300]"),
    (("w4a16_mm_silu_and_mul",), {"out": Spec((5, 300))}, ValueError, "out is [5, 300]; it must be [5, 150]"),
    (
        EVERY,
        {"out": Spec((5, 300), FP16), "out_dtype": BF16},
        TypeError,
        "out is torch.float16; it must be out_dtype, torch.bfloat16",
    ),
    (
        ("w4a16_mm", "w8a16_mm"),
        {"out": Spec((5, 300), BF16, (0, 1))},
        ValueError,
        "out has the strides [0, 1]; its elements must not share memory",
    ),
    *(
        (EVERY, {"kernel_name": name}, ValueError, f"kernel is '{name}', which is not a kernel of ")
        for name in ("fast", "mm_bf16_bf16_any")
    ),
    (
        ("w4a16_mm",),
        {"kernel_name": "separate"},
        ValueError,
        f"kernel is 'separate', which is not a kernel of w4a16_mm; {LIST}",
    ),
    (("w4a16_mm_silu_and_mul",), {"n": 301}, ValueError, "w is [301, 200]; its n must be even, a gate for each value"),
    (W4_OPS, {"packed": Spec((20, 4, 32, 4), torch.uint8)}, TypeError, "packed is torch.uint8; it must be torch.int32"),
    *(
        (
            W4_OPS,
            {"packed": Spec(shape, torch.int32)},
            ValueError,
            f"packed is {list(shape)}; it must be [20, 4, 32, 4]",
        )
        for shape in ((19, 4, 32, 4), (20, 3, 32, 4), (20, 4, 128), (20, 4, 4, 32))
    ),
    (
        W4_OPS,
        {"packed": Spec((20, 4, 32, 4), torch.int32, (1024, 128, 4, 1))},
        ValueError,
        "packed has the strides [1024, 128, 4, 1]; it must be contiguous",
    ),
    (W4_OPS, {"scales": Spec((20, 4, 16), E4M3)}, TypeError, f"scales is torch.float8_e4m3fn; it must be {FLOATS}"),
    (W4_OPS, {"scales": Spec((20, 2, 16))}, ValueError, "scales is [20, 2, 16]; it must be [20, 4, 16]"),
    (W4_OPS, {"zeros": Spec((20, 4, 16), FP32)}, TypeError, "zeros is torch.float32; it must be torch.bfloat16"),
    (W4_OPS, {"zeros": Spec((20, 3, 16))}, ValueError, "zeros is [20, 3, 16]; it must be [20, 4, 16]"),
    (W4_OPS, {"minimum": True}, ValueError, "zeros is None; it must be given"),
    (
        W4_OPS,
        {"permutation": Spec((200,), torch.int64)},
        TypeError,
        "permutation is torch.int64; it must be torch.int32",
    ),
    (W4_OPS, {"permutation": Spec((199,), torch.int32)}, ValueError, "permutation is [199]; it must be [200]"),
    (W4_OPS, {"n": -1}, ValueError, "n is -1; it must be 0 or more"),
    (W4_OPS, {"n": 384}, ValueError, "packed is [20, 4, 32, 4]; it must be [24, 4, 32, 4]"),
    *(
        (
            W4_OPS,
            {"group_size": size},
            ValueError,
            f"group_size is {size}; it must be 32, 64, 128, 256 or -1, all of k, which is 200",
        )
        for size in (0, 16, 344, -2)
    ),
    (W4_OPS, {"group_size": 128}, ValueError, "scales is [20, 4, 16]; it must be [20, 2, 16]"),
    (
        ("w8a16_mm",),
        {"w": Spec((300, 200))},
        TypeError,
        "w is torch.bfloat16; it must be torch.float8_e4m3fn or torch.int8",
    ),
    (("w8a16_mm",), {"w": Spec((300, 200, 1), INT8)}, ValueError, "w is [300, 200, 1]; it must have two dimensions"),
    (
        ("w8a16_mm",),
        {"w": Spec((300, 200), INT8, (1, 300))},
        ValueError,
        "w has the strides [1, 300]; its last dimension must have stride one",
    ),
    (("w8a16_mm",), {"scale": Spec((300,))}, TypeError, "scale is torch.bfloat16; it must be torch.float32"),
    *(
        (
            ("w8a16_mm",),
            {"scale": Spec(shape, FP32)},
            ValueError,
            f"scale is {list(shape)}; it must have one element, or be [300] or [300, 1], one for each row of "
            "w, or [3, 2], one for each 128 x 128",
        )
        for shape in ((299,), (1, 300), (2, 3), (2,), (0,), (300, 2), (1, 1, 1))
    ),
]


def call(op: str, arguments: dict[str, Any], device: str) -> Any:
    made = {name: x.on(device) if isinstance(x, Spec) else x for name, x in (right(op) | arguments).items()}
    return getattr(torch.ops.cutegemm, f"{op}_out" if "out" in made else op)(**made)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("ops", "arguments", "kind", "sentence"), WRONG, ids=[f"{i}-{'-'.join(row[1])}" for i, row in enumerate(WRONG)]
)
def test_errors(
    where: str, ops: tuple[str, ...], arguments: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    for op in ops:
        with (
            FakeTensorMode() if where == "fake" else nullcontext(),
            pytest.raises(RuntimeError if where == "cuda" else kind, match=f"^{re.escape(f'{op}: {sentence}')}"),
        ):
            call(op, arguments, "cuda" if where == "fake" else where)


@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", EVERY)
def test_devices_are_not_mixed(where: str, op: str) -> None:
    here = "cuda:0" if where == "cuda" else where
    other = "cpu" if where != "cpu" else "meta"
    weight = "w" if op == "w8a16_mm" else "packed"
    others: dict[str, Any] = {"bias": Spec((300,)), "out": Spec((5, 150 if op == "w4a16_mm_silu_and_mul" else 300))}
    others |= {"scale": right(op)["scale"]} if op == "w8a16_mm" else {}
    others |= {} if op == "w4a16_mm_silu_and_mul" else {"residual": Spec((5, 300))}
    kind = RuntimeError if where == "cuda" else ValueError
    for name, spec in {weight: right(op)[weight], **others}.items():
        text = f"{op}: {name} is on {other}; it must be on the device of x, {here}"
        if name == "packed":  # whose parts are looked at first
            text = f"{op}: scales is on {here}; it must be on the device of packed, {other}"
        with pytest.raises(kind, match=f"^{re.escape(text)}$"):
            call(op, others | {name: spec.on(other)}, where)
    if op != "w8a16_mm":
        parts = {name: right(op)[name].on(other) for name in ("packed", "scales")}
        with pytest.raises(kind, match=f"^{op}: packed is on {other}; it must be on the device of x, {here}$"):
            call(op, parts, where)


def test_out_must_lie_apart_from_what_is_read(device: str) -> None:
    product = make_w4(128, 128, 128, 128, "zeros", residual=BF16, act_order=True, device=device)
    kind = RuntimeError if device == "cuda" else ValueError
    buffer = torch.zeros(129, 128, dtype=BF16, device=device)
    out = buffer[:128]
    w, flat = product.w, out.flatten()
    inside = {
        "packed": flat[: 2 * w.packed.numel()].view(torch.int32).view(w.packed.shape),
        "scales": flat[: w.scales.numel()].view(w.scales.shape),
        "zeros": flat[: w.scales.numel()].view(w.scales.shape),
    }
    for name, part in inside.items():
        with pytest.raises(
            kind, match=f"^w4a16_mm: out lies in the memory of {name}; it must not, since {name} is read"
        ):
            w4a16_mm(product.a, replace(w, **{name: part}), out=out)
        with pytest.raises(kind, match=f"^w4a16_mm_silu_and_mul: out lies in the memory of {name}; it must not"):
            w4a16_mm_silu_and_mul(product.a, replace(w, **{name: part}), out=flat[: 64 * 128].view(128, 64))
    with pytest.raises(kind, match=r"^w4a16_mm: out lies in the memory of x; it must not, since x is read"):
        w4a16_mm(out, w, out=out)
    with pytest.raises(kind, match=r"^w4a16_mm: out lies in the memory of residual; it must be residual itself, or"):
        w4a16_mm(product.a, w, residual=buffer[1:], out=out)
    eight = flat.view(INT8)[: 128 * 128].view(128, 128)
    with pytest.raises(kind, match=r"^w8a16_mm: out lies in the memory of w; it must not, since w is read"):
        w8a16_mm(product.a, eight, torch.ones(1, device=device), out=out)
    with pytest.raises(kind, match=r"^w8a16_mm: out lies in the memory of scale; it must not"):
        w8a16_mm(product.a, torch.zeros(128, 128, dtype=INT8, device=device), out.view(FP32)[:1, 0], out=out)
    assert not buffer.any()


# Fakes and torch.compile


@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize("name", MAKERS)
def test_fakes_have_the_shape_dtype_and_strides_of_results(where: str, name: str) -> None:
    mode = FakeTensorMode()
    move = (lambda x: x.to("meta")) if where == "meta" else mode.from_tensor
    for size, dtype in itertools.product([(5, 24, 64), (1, 2, 3), (0, 4, 8), (3, 0, 8), (3, 4, 0)], (None, *OUTPUT)):
        product = MAKERS[name](*size)
        w = product.w
        if isinstance(w, W4Weight):
            parts = {part: move(x) for part in ("packed", "scales", "zeros") if (x := getattr(w, part)) is not None}
            moved: Any = replace(w, **parts)
        else:
            moved = move(w)
        fake = replace(product, a=move(product.a), w=moved, rest={key: move(x) for key, x in product.rest.items()})
        calls: list[Callable[[WeightProduct], Tensor]] = [lambda p, dtype=dtype: p(out_dtype=dtype)]
        if name in FORMS:
            calls.append(lambda p, dtype=dtype: p.gated(out_dtype=dtype))
        for each in calls:
            want, got = each(product), each(fake)
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
            assert got.device.type == ("meta" if where == "meta" else "cpu")


@pytest.mark.parametrize("name", ["zeros", "block"])
@pytest.mark.parametrize("with_out", [False, True])
def test_compiles_once_for_every_m(device: str, name: str, with_out: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    weight = MAKERS[name](1, 136, 272, device=device)

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def f(x: Tensor, out: Tensor | None) -> Tensor:
        return replaced(x)(out=out) + 1

    def replaced(x: Tensor) -> Callable[..., Tensor]:
        op = w4a16_mm if isinstance(weight.w, W4Weight) else w8a16_mm
        return lambda **options: op(x, weight.w, **weight.rest, **options)

    for m in (7, 40, 24, 64, 1, 0):  # 5 is also how many times 64 columns the weight has
        product = replace(weight, a=made_x(m, 272, BF16, True, m, device))
        out = torch.empty(m, 136, dtype=BF16, device=device) if with_out else None
        assert_same(f(product.a, out), product.exact(BF16) + 1)
        if out is not None:
            assert_same(out, product.exact(BF16))
        if m > 1:
            assert counter.frame_count == 1, f"compiled again for m = {m}"


def test_public_names() -> None:
    for name in (*EVERY, "gather_columns"):
        assert name in cutegemm.__all__


# Every kernel by its name


NAMES = [name for name, kernel in KERNELS.items() if isinstance(kernel.tile, (MixedInput, Sm80))]
GATED = [name for name in NAMES if getattr(KERNELS[name].tile, "gated", False)]
PLAIN = [name for name in NAMES if name not in GATED]
TYPES = {name: dtype for dtype, name in plan.DTYPES.items()}


def make_for(kernel: Kernel, m: int, n: int, k: int, i: int = 0, **how: Any) -> WeightProduct:
    """What the kernel takes, of a kind of its own for each i: groups and forms, dtypes of scales, act-order."""
    gemm, dtype = kernel.gemm, TYPES[kernel.gemm.a]
    how = {"seed": i, "device": "cuda", **how}
    if gemm.op == "w8a16_mm":
        kind = "block" if gemm.scales else ("rows", "one")[i % 2]
        if kind == "block" and n <= 128 and k <= 128:
            n += 128  # or else its one scale is that of all
        product = make_w8(m, n, k, kind, dtype, TYPES[gemm.b], **how)
        if isinstance(kernel.tile, MixedInput):  # TMA reads the weight
            product.w = padded(product.w, -(-k // 16) * 16, fill=NAN)
        return product
    sizes = [size for size in GROUP_SIZES if gemm.minimum or size in (-1, 256) or size % STEPS[gemm.scales] == 0]
    form = "minimum" if gemm.minimum else ("symmetric", "zeros")[i // 2 % 2]
    rounded, act_order = getattr(kernel.tile, "rounded", False), i % 7 == 5
    scale_dtype = dtype if rounded else OUTPUT[i % 3]
    product = make_w4(m, n, k, sizes[i % len(sizes)], form, dtype, scale_dtype, act_order=act_order, **how)
    return replace(product, rounded=rounded)


def sizes_of(kernel: Kernel) -> list[tuple[int, int, int, str]]:
    """m, n, k and options: tails everywhere, more tiles than multiprocessors, every way to launch."""
    tile = kernel.tile
    assert isinstance(tile, (MixedInput, Sm80))
    t, r = tile.tokens, tile.rows
    sizes = [
        (1, 1, 1, ""),
        (1, 24, 16, ""),
        (t - 1, r + 9, 133, "no_chain=1"),
        (2 * t + 5, r - 8, 509, ""),
        (t + 1, 3 * r - 5, 320, ""),
        (t, 132 * r + 17, 200, ""),
        (5 * t - 1, 61 * r + 8, 19, ""),
        (37 * t + 2, 9 * r - 24, 33, "no_chain=1"),
        (t, r, 2055, ""),
        (3 * t + 4, 2 * r + 8, 5248, ""),
        (t // 2 + 1, 40, 28672 + 40, ""),
    ]
    if isinstance(tile, Sm80):
        sizes += [
            (t + 1, 3 * r - 5, 320, "swizzle=1"),
            (9 * t + 1, 20 * r + 3, 131, "split=1,swizzle=2,prefetch=16"),
            (t // 2 + 1, 3 * r + 5, 1030, "split=3"),
            (t, r, 5248, "split=8,prefetch=32"),
            (2, 2, 1, "split=4,no_chain=1"),
        ]
        return sizes + [(t, 5 * r + 5, 900, f"split=2,rows={rows}") for rows in (16, 48)]
    sizes += [
        (t + 1, 3 * r - 5, 320, "swizzle=1"),
        (9 * t + 1, 20 * r + 3, 131, "swizzle=2"),
        (17 * t - 1, 3 * r, 64, "swizzle=8"),
        (t, 2 * r + 4, 700, "prefetch=64"),
    ]
    sizes += [
        (t - 3, 2 * r + 4, 700, "split=2"),
        (t, 3 * r + 1, 1296, "split=4"),
        (t - 1, r - 5, 400, "split=8,no_chain=1"),
        (1, 2, 1, "split=4"),
        (t, r, 5248, "split=8,prefetch=32"),
    ]
    if not tile.in_clusters:  # parts of two tiles, beside whole ones or without
        sizes += [
            (t + 1, 71 * r - 3, 1030, "split=2"),
            (2 * t + 7, 50 * r + 9, 900, "split=16,swizzle=2"),
            (3 * t, 61 * r, 652, "split=4,no_chain=1"),
            (t - 1, 2 * r + 8, 5120, "split=2"),  # all cut alike, the second part longer
        ]
    if kernel.gemm.op == "w4a16_mm" and not (tile.gated or tile.rounded):
        sizes += [(t, 3 * r + 5, 300, "rows=16"), (t + 3, 5 * r + 5, 300, "rows=48,prefetch=16")]
        sizes += [(t // 2 + 1, 3 * r + 5, 1030, "split=2,rows=48"), (t, 5 * r + 5, 900, "split=4,rows=16,prefetch=64")]
    return sizes


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_kernel_is_exact(name: str) -> None:
    for i, (m, n, k, options) in enumerate(sizes_of(KERNELS[name])):
        bias, residual, dtype = (FP32, None, BF16)[i % 3], (None, BF16, FP32, FP16)[i % 4], OUTPUT[i % 3]
        product = make_for(KERNELS[name], m, n, k, i, bias=bias, residual=residual)
        m, n = len(product.a), product.b.shape[1]
        want, x = product.exact(dtype), product.a
        for pitched in (x, padded(x, (k // 8 + 2) * 8, fill=NAN)):
            product.a = pitched
            check_in_every_place(product, product, want, f"{name}:{options}", f"m={m} n={n} k={k}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_kernel_keeps_its_bound_and_its_bits(name: str) -> None:
    """With outliers, zeros and denormals."""
    kernel, tile = KERNELS[name], KERNELS[name].tile
    for i in range(3):
        product = make_for(kernel, min(141, 2 * tile.tokens + 5), 208, 417, i, exact=False, residual=BF16)
        options = f"{name}:split=2" if tile.splits else name
        for dtype in OUTPUT:
            out = outs(len(product.a), 208, dtype, "cuda")["padded"][0]
            product(out=out, kernel=options)
            limit = torch.finfo(dtype).max
            reference = gemm_reference(*product.float64()).clamp(-limit, limit)
            assert first_mismatches(out.double().clamp(-limit, limit), reference, product.bound(dtype)) == "", dtype
            check_bits(product, out, options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PLAIN if KERNELS[name].gemm.b == "e4m3"])
def test_kernel_keeps_nans_of_the_weight(name: str) -> None:
    for i, (m, n, k, options) in enumerate(sizes_of(KERNELS[name])):
        check_nans(make_for(KERNELS[name], m, n, k, i, nans=True), f"{name}:{options}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PLAIN if KERNELS[name].gemm.op == "w4a16_mm"])
def test_kernel_reads_every_scale_and_zero(name: str) -> None:
    """A one for each 32 of 28672 columns."""
    kernel, k = KERNELS[name], 28672
    x = torch.zeros(k // 32, k, dtype=TYPES[kernel.gemm.a], device="cuda")
    at = torch.arange(k // 32, device="cuda")
    x[at, at * 32 + (7 * at + 3) % 32] = 1.0
    for i in range(4):
        product = replace(make_for(kernel, 1, 200, k, i, bias=None), a=x)
        options = f"{name}:split={2**i}" if kernel.tile.splits else name
        assert_same(product(kernel=options, out_dtype=FP32), product.exact(FP32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PLAIN if KERNELS[name].gemm.op == "w4a16_mm"])
def test_kernel_takes_great_and_small_scales(name: str) -> None:
    of_fp16 = KERNELS[name].gemm.a == "fp16" and getattr(KERNELS[name].tile, "rounded", False)
    for i, power in ((0, 44), (3, -60)) if not of_fp16 else ((0, 8), (3, -10)):  # or else scales are in BF16
        product = make_for(KERNELS[name], 9, 200, 390, i, bias=None)
        product.w.scales.mul_(2.0**power)
        if product.w.minimum:
            product.w.zeros.mul_(2.0**power)
        product = replace(product, b=product.b * 2.0**power)
        assert_same(product(kernel=name, out_dtype=FP32), product.exact(FP32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_kernel_error_over_a_long_k(name: str) -> None:
    kernel = KERNELS[name]
    product = make_for(kernel, kernel.tile.tokens, 256, 28672, exact=False, bias=None)
    product.a.copy_(torch.randn(product.a.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"))
    error = relative_error(product(kernel=name, out_dtype=FP32), gemm_reference(*product.float64()))
    # Without promotion all of k is one sum of the MMA's, which truncates.
    assert error <= (1e-5 if kernel.gemm.scales and not product.rounded else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_operands_written_just_before(name: str) -> None:
    kernel, tile = KERNELS[name], KERNELS[name].tile
    choice = f"{name}:prefetch=64" + ",split=4" * tile.splits
    sources = [make_for(kernel, 7, 264, 1024, seed=seed, residual=BF16) for seed in range(3)]
    product = make_for(kernel, 7, 264, 1024, residual=BF16)

    def steps() -> list[Tensor]:
        results = []
        for i in range(24):
            for to, source in zip(product.tensors(), sources[i % 3].tensors(), strict=True):
                to.copy_(source)
            results.append(product(kernel=choice, out_dtype=FP32))
        return results

    for i, result in enumerate(replayed(steps)):
        assert first_mismatches(result, sources[i % 3].exact(FP32)) == "", f"step {i}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zeros", "act-order", "misaligned", "rows"])
def test_a_chain_of_planned_kernels_and_copies(name: str) -> None:
    """A weight that moves every column by one: after so many layers, each has moved by as many."""
    size, layers = 320, 60
    x = make_operand(7, size, device="cuda", exact=True)
    moving = torch.eye(size, device="cuda").roll(1, 0)
    if name == "rows":
        weight: Any = moving.to(INT8)
    else:
        order = torch.arange(size) // 32
        shuffled = order[torch.randperm(size, generator=torch.Generator().manual_seed(0))].int().cuda()
        scales = torch.ones(size, 10, dtype=BF16, device="cuda")
        weight = pack_w4(moving.int() + 8, scales, group_size=32, g_idx=shuffled if name == "act-order" else None)
    buffers = [x.clone(), torch.empty_like(x)]
    if name == "misaligned":
        buffers = [misaligned(buffer) for buffer in buffers]

    def steps() -> list[Tensor]:
        for i in range(layers):
            out = buffers[(i + 1) % 2]
            if name == "rows":
                w8a16_mm(buffers[i % 2], weight, torch.ones(1, device="cuda"), out=out)
            else:
                w4a16_mm(buffers[i % 2], weight, out=out)
        return [buffers[layers % 2]]

    for run in (steps, lambda: replayed(steps)):
        buffers[0].copy_(x)
        (result,) = run()
        assert_same(result, x.roll(layers, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*(name for name in FAMILIES.values() if name in PLAIN), None])
def test_stream_of_the_caller(name: str | None) -> None:
    kernel = KERNELS[name or FAMILIES["mixed_input"]]
    source, product = (make_for(kernel, 7, 264, 512, 5, seed=seed) for seed in range(2))
    product.w = replace(product.w, permutation=source.w.permutation) if isinstance(product.w, W4Weight) else product.w
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the slow producer: some 10 ms
        for to, now in zip(product.tensors(), source.tensors(), strict=True):
            to.copy_(now)
        got = product(kernel=name)
    stream.synchronize()
    assert_same(got, source.exact(product.a.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in PLAIN if not getattr(KERNELS[name].tile, "in_clusters", True)])
def test_shared_tiles_on_two_streams(name: str) -> None:
    """CTAs of one launch wait for each other while those of another one take multiprocessors."""
    tile = KERNELS[name].tile
    streams = [torch.cuda.Stream() for _ in range(2)]
    products = [make_for(KERNELS[name], 2 * tile.tokens + 3, 50 * tile.rows, 1024, seed=seed) for seed in range(2)]
    wants = [product.exact(FP32) for product in products]
    torch.cuda.synchronize()
    results: list[tuple[Tensor, Tensor]] = []
    for _ in range(30):
        for stream, product, want in zip(streams, products, wants, strict=True):
            with torch.cuda.stream(stream):
                results.append((product(kernel=f"{name}:split=16", out_dtype=FP32), want))
    torch.cuda.synchronize()
    for result, want in results:
        assert_same(result, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATED)
def test_gated_kernel_is_exact_where_silu_is(name: str) -> None:
    for i, (m, n, k, options) in enumerate(sizes_of(KERNELS[name])):
        n, dtype = -(-n // 16) * 32, OUTPUT[i % 3]
        product = make_for(KERNELS[name], m, n, k, i, bias=FP32)
        saturate(product)
        want = saturated(product)
        check_in_every_place(product.gated, product, want.to(dtype), f"{name}:{options}", f"m={m} n={n} k={k}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATED)
def test_gated_kernel_keeps_its_bound_and_its_bits(name: str) -> None:
    product = make_for(KERNELS[name], 141, 640, 417, exact=False)
    reference, bound = silu_and_mul(product, FP32)
    for options in (name, f"{name}:split=4"):
        out = product.gated(out_dtype=FP32, kernel=options)
        assert first_mismatches(out, reference, bound) == ""
        for _ in range(20):
            assert torch.equal(product.gated(out_dtype=FP32, kernel=options), out)


@pytest.mark.gpu
def test_gated_form_in_two_launches() -> None:
    product = make_w4(33, 96, 417, exact=False, device="cuda")
    want = activation(product(out_dtype=FP32))
    for dtype in OUTPUT:
        assert torch.equal(product.gated(out_dtype=dtype, kernel="separate"), want.to(dtype))
    name = next(name for name in GATED if "bf16_int4_group128_" in name)
    odd = make_w4(33, 50, 417, device="cuda")
    with pytest.raises(RuntimeError, match=rf"^w4a16_mm_silu_and_mul: kernel {name} does not take m = 33, n = 50, "):
        odd.gated(kernel=name)
    saturate(odd)
    assert_same(odd.gated(), saturated(odd).to(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("n", "k"), [(272, 528), (1160, 176)])
def test_where_the_plan_changes_kernels(name: str, n: int, k: int) -> None:
    if name in FORMS:
        scales = "group32_minimum" if name == "minimum" else "group64"
        problem = plan.Problem("w4a16_mm", "bf16", "int4", "bf16", n, k, scales=scales)
    else:
        b, scales = "int8" if name == "int8" else "e4m3", "block" if name == "block" else ""
        problem = plan.Problem("w8a16_mm", "bf16", b, "bf16", n, k, scales=scales)
    limits = [row.m_limit for row in plan.plan(problem) if row.m_limit < plan.NO_LIMIT]
    for m in sorted({1, *limits, *(limit + 1 for limit in limits)}):
        product = MAKERS[name](m, n, k, device="cuda")
        assert first_mismatches(product(), product.exact(BF16)) == "", f"m = {m}"
