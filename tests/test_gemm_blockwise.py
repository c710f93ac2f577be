"""scaled_mm with a scale for every 128 k, and its fused forms, against float64 and hand-made numbers.

As in test_gemm.py, with `device` the same expectations hold on CUDA.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_gemm import (
    Product,
    Spec,
    as_taken,
    at_most,
    check_bits,
    check_in_every_place,
    fp8_bound,
    make_product,
    outs,
    replayed,
    views_of,
    views_of_vector,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import cutegemm
from cutegemm import activation, activation_quant, quantize_fp8, scaled_mm, scaled_mm_quant, scaled_mm_silu_and_mul
from cutegemm.gemm import scales_of
from cutegemm.registry import OPS as REGISTERED
from cutegemm.testing import (
    assert_same,
    first_mismatches,
    gemm_bound,
    gemm_reference,
    guarded,
    padded,
    relative_error,
)
from cutegemm.variants import FAMILIES, KERNELS, AnyShape, Blockwise, Decode, Kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8, E8M0, UINT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float8_e8m0fnu, torch.uint8
OUTPUT = (BF16, FP16, FP32)
OPERANDS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
KINDS = ("block", "group")
SCALES = (FP32, E8M0, UINT8)
OPS: dict[str, Callable[..., Any]] = {
    "scaled_mm": scaled_mm,
    "scaled_mm_silu_and_mul": scaled_mm_silu_and_mul,
    "scaled_mm_quant": scaled_mm_quant,
}

# Every one of these m, n and k, of which few are multiples of a tile; no size has two that are equal.
_M, _N, _K = (1, 3, 16, 33, 64, 83, 130, 257), (8, 16, 40, 129, 300, 576), (16, 100, 128, 129, 272, 1024, 1040)
SIZES = [(_M[i % 8], _N[5 * i % 6], _K[2 * i % 7]) for i in range(24)]

pytestmark = pytest.mark.usefixtures("one_thread")


def ceil_128(size: int) -> int:
    return -(-size // 128)


def decoded(scale: Tensor) -> Tensor:
    """A scale in float64, its bytes read as the definition of E8M0 has them."""
    if scale.dtype == FP32:
        return scale.double()
    exponent = scale.view(UINT8).double() - 127
    return torch.where(exponent == 128, math.nan, exponent.exp2())


class BlockProduct(Product):
    """With a scale for every 128 k."""

    def float64(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """a and b with their scales, and what is added to their product."""
        k, n = self.b.shape
        rows, columns = decoded(self.rest["scale_a"]), decoded(self.rest["scale_b"])
        if columns.shape[0] != n:
            columns = columns.repeat_interleave(128, 0)[:n]
        rows, columns = (x.repeat_interleave(128, 1)[:, :k] for x in (rows, columns))
        added = [self.rest[name].double() for name in ("bias", "residual") if name in self.rest]
        return self.a.double() * rows, self.b.double() * columns.t(), sum(added) if added else None


def make_scale(rows: int, groups: int, dtype: torch.dtype, exact: bool, seed: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if exact or dtype != FP32:
        scale = torch.randint(-2, 3, (rows, groups), generator=generator, device=device).float().exp2()
    else:
        scale = torch.rand(rows, groups, generator=generator, device=device) + 0.5
    return in_dtype(scale if exact else scale / 8, dtype)


def in_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.to(E8M0).view(UINT8) if dtype == UINT8 else scale.to(dtype)


def make_block_product(
    m: int,
    n: int,
    k: int,
    kind: str = "block",
    types: tuple[torch.dtype, torch.dtype] = OPERANDS[0],
    scales: tuple[torch.dtype, torch.dtype] = (FP32, FP32),
    *,
    exact: bool = True,
    bias: torch.dtype | None = FP32,
    residual: torch.dtype | None = None,
    pitch: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> BlockProduct:
    """exact: integers and powers of two, so that every order of summation gives the same bits.

    residual: of this dtype. pitch: as in make_product.
    """
    product = make_product(m, n, k, types, exact=exact, bias=bias, pitch=pitch, seed=seed, device=device)
    rest, how = product.rest, (exact, 2 * seed, device)
    rest["scale_a"] = make_scale(m, ceil_128(k), scales[0], *how)
    rest["scale_b"] = make_scale(
        ceil_128(n) if kind == "block" else n, ceil_128(k), scales[1], exact, 2 * seed + 1, device
    )
    if residual:
        generator = torch.Generator(device).manual_seed(seed)
        rest["residual"] = torch.randint(-8, 9, (m, n), generator=generator, device=device).to(residual)
    return BlockProduct(product.a, product.b, rest)


def error_bound(product: Product, dtype: torch.dtype) -> Tensor:
    """Bound of the error of a result in dtype.

    With scales for 128 k, a product of 128 k, its two scales and their product with it are rounded, then each sum with
    the next, with the bias and with the residual; otherwise each of k sums. A tensor core cuts off more.
    """
    a, b, added = product.float64()
    k, block = a.shape[1], isinstance(product, BlockProduct)
    roundings = (ceil_128(k) if block else k) + 5
    bound = gemm_bound(a, b, dtype, added, c=roundings / max(k, 1))
    if a.is_cuda:
        bound = bound.maximum(fp8_bound(product, dtype, 128 if block else k + -k % 32))
    # What is added counts by itself, since gemm_bound sees only its sum.
    return bound + roundings * 2.0**-24 * sum(product.rest[name].double().abs() for name in added_in(product))


def added_in(product: Product) -> list[str]:
    return [name for name in ("bias", "residual") if name in product.rest]


def mismatches(got: Tensor, reference: Tensor, bound: Tensor) -> str:
    """As first_mismatches, where what is infinite counts as the largest number, which a d of FP16 may exceed."""
    limit = torch.finfo(got.dtype).max
    return first_mismatches(got.double().clamp(-limit, limit), reference.clamp(-limit, limit), bound)


def codes_are_equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(UINT8), y.view(UINT8))


# Values


def test_by_hand(device: str) -> None:
    a, w = (torch.ones(rows, 130, device=device).to(E4M3) for rows in (2, 3))
    scale_a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    block, bias = torch.tensor([[0.5, 8.0]], device=device), torch.tensor([1.0, 2.0, 3.0], device=device)
    d = scaled_mm(a, w.t(), scale_a, block, bias)  # 128 * 1 * 0.5 + 2 * 2 * 8, and 128 * 3 * 0.5 + 2 * 4 * 8
    assert d.dtype == BF16
    assert d.tolist() == [[97, 98, 99], [256, 258, 260]]  # 257 and 259 lie between two of BF16
    assert scaled_mm(a, w.t(), scale_a, block, bias, FP32).tolist() == [[97, 98, 99], [257, 258, 259]]
    group = torch.tensor([[0.5, 8.0], [1.0, 0.0], [0.0, 1.0]], device=device)
    assert scaled_mm(a, w.t(), scale_a, group, out_dtype=FP32).tolist() == [[96, 128, 4], [256, 384, 8]]


def test_rounds_once_after_bias_and_residual(device: str) -> None:
    # 257 is half-way between two BF16 numbers: rounded before the bias or the residual, the sum would be 256.
    a, w = torch.ones(1, 256, device=device).to(E4M3), torch.ones(2, 256, device=device).to(E4M3)
    scales = torch.ones(1, 2, device=device), torch.ones(1, 2, device=device)
    bias, residual = torch.tensor([1.0, 0.0], device=device), torch.tensor([[1.0, 1.0]], device=device)
    assert scaled_mm(a, w.t(), *scales, bias, residual=residual).tolist() == [[258, 256]]
    a[0, 0] = 2
    assert scaled_mm(a, w.t(), *scales, bias, residual=residual.to(BF16)).tolist() == [[260, 258]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i", range(len(SIZES)))
def test_exact_sums_are_exact(device: str, i: int, kind: str) -> None:
    """With scales of every dtype, a bias and a residual."""
    for j, dtype in enumerate(OUTPUT):
        scales = SCALES[(i + j) % 3], SCALES[(i + 2 * j + 1) % 3]
        bias, residual = (None, *OUTPUT)[(i + j) % 4], (None, *OUTPUT)[(i + j) // 2 % 4]
        product = make_block_product(
            *SIZES[i], kind, OPERANDS[i % 3], scales, bias=bias, residual=residual, seed=j, device=device
        )
        with product.unchanged():
            assert_same(product(out_dtype=dtype), product.exact(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i", range(len(SIZES)))
def test_is_within_the_bound_of_float64(device: str, i: int, kind: str) -> None:
    """With outliers, zeros and denormals."""
    scales = (FP32, FP32) if i % 2 else (SCALES[i // 2 % 3], SCALES[i // 3 % 3])
    types, residual = OPERANDS[(i + 1) % 3], (None, FP32)[i // 4 % 2]
    product = make_block_product(*SIZES[i], kind, types, scales, exact=False, residual=residual, device=device)
    for dtype in OUTPUT:
        with product.unchanged():
            got = product(out_dtype=dtype)
        assert mismatches(got, gemm_reference(*product.float64()), error_bound(product, dtype)) == "", dtype
        assert torch.equal(product(out_dtype=dtype, use_fast_accum=False), got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n"), [(5, 24), (66, 136)])
def test_error_over_a_long_k(device: str, m: int, n: int, kind: str) -> None:
    """Rounding to BF16 alone is a relative error of some 1.7e-3."""
    k = 32768
    product = make_block_product(m, n, k, kind, exact=False, bias=None, device=device)
    generator = torch.Generator(device).manual_seed(1)
    for x in (product.a, product.b):
        x.copy_(torch.randn(x.shape, generator=generator, device=device))
    reference = gemm_reference(*product.float64())
    assert relative_error(product(), reference) <= 2e-3
    # A CPU rounds to float32, every 128 k; a tensor core keeps about 14 bits of each sum of 128.
    assert relative_error(product(out_dtype=FP32), reference) <= (1e-3 if device == "cuda" else 1e-6)


# Scales


@pytest.mark.parametrize(
    ("m", "n", "k", "kind"),
    [
        (3, 300, 272, "block"),
        (130, 40, 400, "block"),
        (5, 129, 128, "block"),
        (1, 257, 1040, "block"),
        (4, 1, 300, "block"),
        (3, 40, 272, "group"),
        (2, 130, 129, "group"),
        (7, 9, 1000, "group"),
    ],
)
@pytest.mark.parametrize("dtype", SCALES)
def test_each_scale_counts_where_it_should_and_nowhere_else(
    device: str, m: int, n: int, k: int, kind: str, dtype: torch.dtype
) -> None:
    a, w = torch.ones(m, k, device=device).to(E4M3), torch.ones(n, k, device=device).to(E4M3)
    one = in_dtype(torch.ones((), device=device), dtype)
    two = in_dtype(torch.full((), 2.0, device=device), dtype)
    scale_a = one.expand(m, ceil_128(k)).clone()
    scale_b = one.expand(ceil_128(n) if kind == "block" else n, ceil_128(k)).clone()
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        for i, g in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
            scale[i, g] = two
            got = scaled_mm(a, w.t(), scale_a, scale_b, out_dtype=FP32)
            scale[i, g] = one
            want = torch.full((m, n), float(k), device=device)
            if name == "scale_a":
                rows: Any = (i,)
            else:
                rows = (slice(None), slice(128 * i, 128 * i + 128) if kind == "block" else i)
            want[rows] += min(128, k - 128 * g)
            assert torch.equal(got, want), (name, i, g)


def test_every_byte_is_its_power_of_two(device: str) -> None:
    """2**-127, which is denormal, to 2**127, and NaN; and products with a scale of the other operand that overflow."""
    a, w = (torch.zeros(256, 128, device=device).to(E4M3) for _ in range(2))
    a[:, 0], w[:, 0] = 1.0, 1.0
    scale = torch.arange(256, device=device).to(UINT8)[:, None]
    power = torch.arange(-127.0, 129.0, dtype=torch.float64, device=device).exp2()
    power[255] = math.nan
    want = (power[:, None] * power).float()
    assert int(want.isnan().sum()) == 511 and bool((want == 2.0**-149).any() and want.isinf().any())
    for scale_a, scale_b in itertools.product((scale, scale.view(E8M0)), repeat=2):
        assert_same(scaled_mm(a, w.t(), scale_a, scale_b, out_dtype=FP32), want)


def test_a_nan_stays_in_its_row_or_block(device: str) -> None:
    healthy = make_block_product(6, 300, 272, device=device)
    product = make_block_product(6, 300, 272, device=device)
    product.rest["scale_a"][2, 1] = math.nan
    product.rest["scale_b"][1, 2] = math.nan
    want = healthy.exact(FP32)
    want[2], want[:, 128:256] = math.nan, math.nan
    assert_same(product(out_dtype=FP32), want)
    product = make_block_product(6, 300, 272, "group", device=device)
    healthy.rest = dict(product.rest)
    product.rest["scale_b"] = product.rest["scale_b"].clone()
    product.rest["scale_b"][7, 0], product.a[3, 271] = math.nan, math.nan
    want = healthy.exact(FP32)
    want[3], want[:, 7] = math.nan, math.nan
    assert_same(product(out_dtype=FP32), want)


def views_of_scale(scale: Tensor) -> dict[str, Tensor]:
    """The scale at other strides, with NaN in between."""
    rows, groups = scale.shape
    wide = torch.full((2 * rows, 3 * groups), math.nan, device=scale.device)
    wide = in_dtype(wide, scale.dtype) if scale.dtype != FP32 else wide
    every_second = wide.clone()
    every_second[::2, :groups] = scale
    wide[::2, ::3] = scale
    backwards = padded(scale.t().contiguous(), (rows + 3) // 4 * 4, fill=math.nan).t()
    return {
        "row-major": scale.contiguous(),
        "column-major": scale.t().contiguous().t(),
        "column-major, pitch of 16 bytes": backwards,
        "padded": padded(scale, groups + 5, fill=math.nan),
        "every second row": every_second[::2, :groups],
        "neither is contiguous": wide[::2, ::3],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("size", [(3, 300, 272), (70, 130, 1040), (2, 16, 640)])
def test_scales_of_every_stride(device: str, size: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    product = make_block_product(*size, kind, scales=(dtype, dtype), device=device)
    want = product.exact(BF16)
    views = [views_of_scale(product.rest[name]) for name in ("scale_a", "scale_b")]
    for (name_a, scale_a), (name_b, scale_b) in itertools.product(views[0].items(), views[1].items()):
        product.rest |= {"scale_a": scale_a, "scale_b": scale_b}
        with product.unchanged():
            assert first_mismatches(product(), want) == "", f"scale_a {name_a}, scale_b {name_b}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SCALES)
def test_scales_that_share_memory(device: str, dtype: torch.dtype, kind: str) -> None:
    product = make_block_product(5, 300, 400, kind, scales=(dtype, dtype), device=device)
    for name in ("scale_a", "scale_b"):
        scale = product.rest[name]
        for expanded in (scale[:1, :1], scale[:1], scale[:, :1]):
            product.rest[name] = expanded.expand(scale.shape)
            assert 0 in product.rest[name].stride()
            assert_same(product(), product.exact(BF16))
        product.rest[name] = scale


def test_what_quantize_fp8_makes_is_what_scaled_mm_takes(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 40, 129), (5, 300, 272), (83, 576, 1040)):
        x, w = (torch.randn(rows, k, generator=generator).to(device) for rows in (m, n))
        q, scale = quantize_fp8(x, granularity="group")
        assert scale.stride(0) == 1 or m == 1
        for granularity, kind in (("block", "block"), ("group", "group")):
            weight, scale_w = quantize_fp8(w, granularity=granularity)
            assert scales_of(m, n, k, scale, scale_w) == kind
            product = BlockProduct(q, weight.t(), {"scale_a": scale, "scale_b": scale_w})
            reference = gemm_reference(*product.float64())
            assert first_mismatches(product(), reference, error_bound(product, BF16)) == ""
            # Three bits of mantissa are off by 2.3 % of a value, or so; of a product by some 1.4 times as much.
            assert relative_error(product(), x.double() @ w.double().t()) < 0.06


# Which scales a call has


@pytest.mark.parametrize(
    ("m", "n", "k", "scale_a", "scale_b", "want"),
    [
        (5, 300, 272, ((5, 3), FP32), ((3, 3), FP32), "block"),
        (5, 300, 272, ((5, 3), FP32), ((300, 3), FP32), "group"),
        (1, 300, 272, ((1, 3), FP32), ((3, 3), FP32), "block"),
        (5, 1, 272, ((5, 3), FP32), ((1, 3), FP32), "block"),
        (3, 3, 272, ((3, 3), FP32), ((3, 3), FP32), "group"),
        (5, 300, 272, ((5, 3), E8M0), ((3, 3), FP32), "block"),
        (5, 300, 272, ((5, 3), FP32), ((300, 3), UINT8), "group"),
        (5, 300, 272, ((5, 1), FP32), ((300, 1), FP32), ""),
        (5, 300, 272, ((5,), FP32), ((1, 300), FP32), ""),
        (5, 300, 272, ((), FP32), ((1, 1), FP32), ""),
        (5, 300, 128, ((5, 1), FP32), ((3, 1), FP32), "block"),
        (5, 300, 128, ((5, 1), FP32), ((300, 1), FP32), ""),
        (5, 300, 128, ((5, 1), FP32), ((1, 1), FP32), ""),
        (5, 300, 128, ((5, 1), UINT8), ((300, 1), FP32), "group"),
        (5, 300, 128, ((5, 1), FP32), ((3, 1), E8M0), "block"),
        (5, 128, 128, ((5, 1), FP32), ((1, 1), FP32), ""),
        (5, 128, 128, ((5, 1), E8M0), ((1, 1), E8M0), "block"),
        (1, 1, 1, ((1, 1), FP32), ((1, 1), FP32), ""),
        (5, 300, 0, ((5, 0), FP32), ((3, 0), FP32), "block"),
        (5, 300, 0, ((5, 0), FP32), ((300, 0), FP32), "group"),
        (5, 300, 0, ((1,), FP32), ((1,), FP32), ""),
        (0, 300, 272, ((0, 3), FP32), ((3, 3), FP32), "block"),
        (5, 0, 272, ((5, 3), FP32), ((0, 3), FP32), "block"),
    ],
)
def test_which_scales_a_call_has(m: int, n: int, k: int, scale_a: Any, scale_b: Any, want: str) -> None:
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in (scale_a, scale_b)]
    assert scales_of(m, n, k, *tensors) == want
    described = [SimpleNamespace(shape=shape, dtype=dtype, dim=shape.__len__) for shape, dtype in (scale_a, scale_b)]
    assert scales_of(m, n, k, *described) == want
    scaled_mm(torch.empty(m, k, device="meta").to(E4M3), torch.empty(n, k, device="meta").to(E4M3).t(),
              *(x.to("meta") for x in tensors))  # fmt: skip


def test_where_two_kinds_of_scales_mean_the_same_they_give_the_same(device: str) -> None:
    for m, n, k in ((5, 300, 128), (33, 40, 100), (1, 1, 16), (130, 129, 1)):
        product = make_block_product(m, n, k, "group", device=device)
        want = product.exact(BF16)
        assert scales_of(m, n, k, product.rest["scale_a"], product.rest["scale_b"]) == ""
        assert_same(product(), want)
        for dtype in SCALES[1:]:
            bytes_a = in_dtype(product.rest["scale_a"], dtype)
            assert_same(BlockProduct(product.a, product.b, product.rest | {"scale_a": bytes_a})(), want)
    small = make_block_product(7, 128, 96, "block", device=device)
    assert small.rest["scale_b"].shape == (1, 1)
    assert_same(small(), small.exact(BF16))
    for name in ("scale_a", "scale_b"):
        as_bytes = BlockProduct(small.a, small.b, small.rest | {name: in_dtype(small.rest[name], UINT8)})
        assert_same(as_bytes(), small.exact(BF16))


# Bias and residual


@pytest.mark.parametrize("dtype", OUTPUT)
def test_bias_and_residual_of_every_type_and_stride(device: str, dtype: torch.dtype) -> None:
    m, n = 9, 136
    product = make_block_product(m, n, 272, exact=False, bias=None, device=device)
    product.a.zero_()
    generator = torch.Generator(device).manual_seed(0)
    for added in OUTPUT:
        bias = torch.randn(n, generator=generator, device=device).to(added)
        for view in views_of_vector(bias).values():
            product.rest["bias"] = view
            assert_same(product(out_dtype=dtype), bias.to(dtype).expand(m, n))
        del product.rest["bias"]
        residual = torch.randn(m, n, generator=generator, device=device).to(added)
        views = {**views_of(residual), "one row": residual[:1].expand(m, n), "one column": residual[:, :1].expand(m, n)}
        for name, view in views.items():
            product.rest["residual"] = view
            with product.unchanged():
                assert first_mismatches(product(out_dtype=dtype), view.to(dtype)) == "", f"{added}, {name}"
        del product.rest["residual"]


@pytest.mark.parametrize("dtype", OUTPUT)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 24, 272), (33, 136, 300), (130, 67, 128), (66, 300, 129)])
def test_residual_in_place(device: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    for seed, (name, (out, check)) in enumerate(outs(m, n, dtype, device).items()):
        scales = (E8M0, FP32) if k <= 128 else (FP32, FP32)
        product = make_block_product(m, n, k, KINDS[seed % 2], scales=scales, residual=dtype, seed=seed, device=device)
        want = product.exact(dtype)
        product.rest["residual"] = out.copy_(product.rest["residual"])
        assert product(out=out) is out
        assert first_mismatches(out, want) == "", name
        check()
        apart, check = outs(m, n, dtype, device)[name]
        product.rest["residual"] = out.clone()
        want = product.exact(dtype)
        assert first_mismatches(product(out=apart), want) == "", name
        check()


def test_out_must_lie_apart_from_what_is_read(device: str) -> None:
    product = make_block_product(128, 128, 256, "group", residual=BF16, device=device)
    product.rest["scale_b"] = torch.ones(1, 2, device=device)
    kind = RuntimeError if device == "cuda" else ValueError
    buffer = torch.zeros(129, 128, dtype=BF16, device=device)
    out = buffer[:128]
    apart = "it must be residual itself, or lie apart from it"
    for residual in (buffer[1:], out.t(), out.view(FP16), buffer.flatten()[1 : 1 + 128 * 128].view(128, 128)):
        product.rest["residual"] = residual
        with pytest.raises(kind, match=f"^scaled_mm: out lies in the memory of residual; {apart}$"):
            product(out=out)
    del product.rest["residual"]
    for name, inside in (
        ("scale_a", out.view(FP32).flatten()[:256].view(128, 2)),
        ("scale_b", out.view(UINT8).flatten()[:2].view(1, 2)),
        ("scale_b", out.view(E8M0).flatten()[:256].view(128, 2)),
    ):
        rest = product.rest | {name: inside}
        with pytest.raises(kind, match=rf"^scaled_mm: out lies in the memory of {name}; it must not, since {name} is"):
            BlockProduct(product.a, product.b, rest)(out=out)
    assert not buffer.any()


# Layouts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", views_of(torch.ones(2, 2)))
def test_layouts_of_operands(device: str, name: str, kind: str) -> None:
    product = make_block_product(20, 136, 272, kind, residual=BF16, device=device)
    a, weight = product.a, product.b.t()
    want = product.exact(BF16)
    product.a = views_of(a)[name]
    for other, view in views_of(weight).items():
        if "column-major" in other:
            continue  # a row-major b is refused
        product.b = view.t()
        with product.unchanged():
            assert first_mismatches(product(), want) == "", other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", OUTPUT)
@pytest.mark.parametrize(
    "size", [(1, 24, 272), (7, 40, 128), (66, 136, 144), (130, 67, 129), (83, 300, 1040), (6, 1, 272)]
)
def test_out(device: str, size: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    product = make_block_product(*size, kind, scales=(FP32, UINT8), device=device)
    for name, (out, check) in outs(*size[:2], dtype, device).items():
        assert product(out=out) is out
        assert first_mismatches(out, product.exact(dtype)) == "", name
        check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(3, 40, 16), (5, 136, 129), (33, 129, 272), (130, 300, 1000), (1, 8, 1)])
def test_nothing_behind_the_ends_matters(device: str, size: tuple[int, int, int], kind: str) -> None:
    """Every operand lies in the corner of a larger one, which is NaN."""
    m, n, k = size
    product = make_block_product(m, n, k, kind, scales=(E8M0, UINT8), bias=FP32, residual=BF16, device=device)
    want = product.exact(FP32)

    def corner(x: Tensor) -> Tensor:
        rows, columns = x.shape
        codes = x.dtype.itemsize == 1
        wide = torch.full((rows + 130, (columns // 16 + 9) * 16), math.nan, device=x.device)
        wide = wide.to(E8M0).view(UINT8) if x.dtype == UINT8 else wide.to(x.dtype)
        view = wide[:rows, :columns]
        (view.view(UINT8) if codes else view).copy_(x.view(UINT8) if codes else x)
        return view

    product.a, product.b = corner(product.a), corner(product.b.t()).t()
    product.rest |= {name: corner(product.rest[name]) for name in ("scale_a", "scale_b", "residual")}
    product.rest["bias"] = torch.cat([product.rest["bias"], torch.full((130,), math.nan, device=device)])[:n]
    out, check = guarded((m, n), FP32, device=device, pitch=n + 4 - n % 4)
    assert_same(product(out=out), want)
    check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 24, 272), (6, 1, 272), (6, 136, 1), (1, 1, 272), (1, 1, 1)])
def test_the_stride_of_a_dimension_of_size_one_means_nothing(device: str, size: Any, kind: str) -> None:
    product = make_block_product(*size, kind, scales=(E8M0, FP32), residual=BF16, device=device)
    want = product.exact(BF16)
    out = torch.empty(size[:2], dtype=BF16, device=device)

    def odd(x: Tensor, stride: int) -> Tensor:
        strides = [stride if length == 1 else old for length, old in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)

    a, b, rest = product.a, product.b, product.rest
    for stride in (0, 1, 3, 8, 2**31, 2**40):
        product.a, product.b = odd(a, stride), odd(b, stride)
        product.rest = rest | {name: odd(rest[name], stride) for name in ("scale_a", "scale_b", "residual")}
        assert_same(product(), want)
        assert_same(product(out=odd(out, stride)), want)
        product.rest["residual"] = out.copy_(rest["residual"])  # which has other strides, and is the same
        assert_same(product(out=odd(out, stride)), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [(0, 136, 272), (5, 0, 272), (5, 136, 0), (0, 136, 0), (5, 0, 0), (0, 0, 272), (0, 0, 0)]
)
def test_empty(device: str, size: tuple[int, int, int], kind: str) -> None:
    m, n, k = size
    for bias, residual in itertools.product((None, FP32), repeat=2):
        product = make_block_product(*size, kind, bias=bias, residual=residual, device=device)
        want = torch.zeros(m, n, device=device)
        for name in added_in(product):
            want = want + product.rest[name]
        assert_same(product(out_dtype=FP32), want)
        out, check = guarded((m, n), BF16, device=device, pitch=n + 3)
        assert_same(product(out=out), want.to(BF16))
        check()
        if residual:
            continue  # is for scales of each 128 k alone
        if k == 0:
            product.rest |= {"scale_a": torch.ones(1, device=device), "scale_b": torch.ones((), device=device)}
            assert_same(product(out_dtype=FP32), want)
        assert scaled_mm_silu_and_mul(product.a, product.b, **product.rest).shape == (m, n // 2)
        for gated in (False, True):
            q, scale = scaled_mm_quant(product.a, product.b, **product.rest, silu_and_mul=gated)
            columns = n // 2 if gated else n
            assert (q.shape, scale.shape) == ((m, columns), (m, ceil_128(columns)))
            if k == 0 and not bias:
                assert not q.float().any() and bool((scale == 2.0**-40 / 448).all())
    after = make_block_product(5, 24, 272, kind, device=device)
    assert_same(after(), after.exact(BF16))


# Public cases


@pytest.mark.parametrize("n", [16, 576, 2112])
@pytest.mark.parametrize("k", [1024, 7168])
def test_case_010_n_that_is_no_multiple_of_128_and_every_m(device: str, n: int, k: int) -> None:
    for m in (1, 3, 16, 32, 64, 83, 128, 256, 512):
        if device == "cpu" and m * n * k > 2**30:
            continue  # float64 takes long
        product = make_block_product(m, n, k, bias=None, seed=m, device=device)
        assert product.rest["scale_b"].shape == (ceil_128(n), ceil_128(k))
        product.rest["scale_a"] = views_of_scale(product.rest["scale_a"])["column-major"]  # a pitch of m, that is
        assert first_mismatches(product(), product.exact(BF16)) == "", f"m = {m}"


REFUSED = [(3, 7168, 576), (130, 7168, 1152), (2, 768, 4096)]
LARGE = [(32, 8192, 8192), (1638, 3584, 6144)]  # of which float64 takes minutes on a CPU


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("where", "m", "n", "k"),
    [("cpu", *size) for size in REFUSED]
    + [pytest.param("cuda", *size, marks=pytest.mark.gpu) for size in (*REFUSED, *LARGE)],
)
def test_case_011_shapes_that_were_refused_or_died(where: str, m: int, n: int, k: int, kind: str) -> None:
    product = make_block_product(m, n, k, kind, device=where)
    assert first_mismatches(product(), product.exact(BF16)) == ""


@pytest.mark.parametrize("k", [*range(16, 417, 16), 1, 8, 127, 129, 255, 257])
def test_case_011_every_n_and_k_between(device: str, k: int) -> None:
    """No hole along n or k; the last scale of k counts for what is left of it."""
    for n in range(8 + k % 7 * 8, 273, 56):
        for kind in KINDS:
            product = make_block_product(5, n, k, kind, seed=n, device=device)
            assert first_mismatches(product(), product.exact(BF16)) == "", f"n = {n}, {kind}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 300, 256), (7, 136, 272), (64, 576, 1024), (130, 129, 640)])
def test_case_013_dtype_and_order_of_scales_change_nothing(device: str, m: int, n: int, k: int, kind: str) -> None:
    product = make_block_product(m, n, k, kind, exact=False, device=device)
    product.rest |= {  # powers of two
        name: make_scale(*product.rest[name].shape, FP32, True, 5, device) for name in ("scale_a", "scale_b")
    }
    scale_a, scale_b = product.rest["scale_a"], product.rest["scale_b"]
    want = product()
    assert first_mismatches(want, gemm_reference(*product.float64()), error_bound(product, BF16)) == ""
    for dtype_a, dtype_b in itertools.product(SCALES, repeat=2):
        for order_a, order_b in itertools.product(("row-major", "column-major"), repeat=2):
            product.rest["scale_a"] = views_of_scale(in_dtype(scale_a, dtype_a))[order_a]
            product.rest["scale_b"] = views_of_scale(in_dtype(scale_b, dtype_b))[order_b]
            assert_same(product(), want)


# Fused: silu and mul


MODES = ("one", "vectors", "block", "group", "block of E8M0", "group of bytes")


def make_fused(m: int, n: int, k: int, mode: str, types: Any = OPERANDS[0], **how: Any) -> Product:
    if mode in ("one", "vectors"):
        return make_product(m, n, k, types, scales=mode, **how)
    scales = {"block of E8M0": (FP32, E8M0), "group of bytes": (UINT8, UINT8)}.get(mode, (FP32, FP32))
    return make_block_product(m, n, k, mode.split()[0], types, scales, **how)


def fused(op: Callable[..., Any], product: Product, **options: Any) -> Any:
    return op(product.a, product.b, **product.rest, **options)


def gated(product: Product, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(g) * u in float64, and the bound of its error in dtype.

    silu rises by 1.1 at most, so what g is off by counts 1.1 times at most, and as often as u is large. The function
    itself, with the exponential of a large number, is off by some units in the last place and what becomes denormal.
    """
    values, error = gemm_reference(*product.float64()), error_bound(product, FP32)
    half = values.shape[1] // 2
    (g, u), (g_error, u_error) = ((x[:, :half], x[:, half:]) for x in (values, error))
    silu = g / (1 + (-g).exp())
    result, info = silu * u, torch.finfo(dtype)
    bound = 1.1 * g_error * (u.abs() + u_error) + silu.abs() * u_error
    bound += 2.0**-21 * (1 + g.clamp_max(0).abs()) * result.abs() + 2.0**-118 * u.abs()
    return result, bound + info.eps / 2 * (result.abs() + bound) + info.smallest_normal * info.eps / 2


def saturate(product: Product) -> None:
    """Gates so far from zero that silu is exact: the gate itself, or zero, in turn."""
    n = product.b.shape[1]
    product.rest["bias"][: n // 2] = 32768.0
    product.rest["bias"][: n // 2 : 2] = -32768.0


def saturated(product: Product) -> Tensor:
    """What becomes of it, in float32."""
    g, u = gemm_reference(*product.float64()).float().chunk(2, 1)
    assert bool((g.abs() > 200).all())  # exp(-200) is 0 in float32
    return g.clamp_min(0) * u


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("i", range(0, len(SIZES), 2))
def test_silu_and_mul_is_within_the_bound_of_float64(device: str, i: int, mode: str) -> None:
    m, n, k = SIZES[i]
    product = make_fused(m, n + n % 2, k, mode, OPERANDS[i % 3], exact=False, device=device)
    if i % 4:
        del product.rest["bias"]
    for dtype in OUTPUT:
        with product.unchanged():
            got = fused(scaled_mm_silu_and_mul, product, out_dtype=dtype)
        reference, bound = gated(product, dtype)
        assert got.dtype == dtype
        assert mismatches(got, reference, bound) == "", dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(1, 2, 16), (3, 40, 272), (33, 258, 129), (64, 300, 128), (130, 576, 400)])
def test_silu_and_mul_is_exact_where_silu_is(device: str, size: tuple[int, int, int], mode: str) -> None:
    """Column j is the gate of column j + n / 2."""
    product = make_fused(*size, mode, bias=FP32, device=device)
    saturate(product)
    want = saturated(product)
    assert want.any() or size == (1, 2, 16)
    for dtype in OUTPUT:
        assert_same(fused(scaled_mm_silu_and_mul, product, out_dtype=dtype), want.to(dtype))
        for name, (out, check) in outs(size[0], size[1] // 2, dtype, device).items():
            assert fused(scaled_mm_silu_and_mul, product, out=out) is out
            assert first_mismatches(out, want.to(dtype)) == "", name
            check()
    assert fused(scaled_mm_silu_and_mul, product).dtype == BF16


def test_silu_and_mul_by_hand(device: str) -> None:
    a = torch.ones(1, 256, device=device).to(E4M3)
    w = torch.zeros(6, 256, device=device).to(E4M3)
    w[0, 0], w[1, 200], w[2, 7] = 1.0, -2.0, 0.0
    w[3, 1], w[4, 130], w[5, 255] = 3.0, 4.0, 5.0
    scales = torch.tensor([[1.0, 2.0]], device=device), torch.tensor([[0.5, 1.0]], device=device)
    bias = torch.tensor([0, 0, 1.0, 0, 0, 0.5], device=device)
    g, u = (0.5, -4.0, 1.0), (1.5, 8.0, 10.5)
    want = [x / (1 + math.exp(-x)) * y for x, y in zip(g, u, strict=True)]
    got = scaled_mm_silu_and_mul(a, w.t(), *scales, bias, FP32)
    assert got.tolist() == [pytest.approx(want, rel=3e-6)]
    assert_same(scaled_mm_silu_and_mul(a, w.t(), *scales, bias), got.to(BF16))


def test_silu_and_mul_refuses_an_out_in_the_memory_of_an_operand(device: str) -> None:
    product = make_block_product(128, 256, 256, device=device)
    out = product.a.view(BF16)
    kind = RuntimeError if device == "cuda" else ValueError
    with pytest.raises(kind, match=r"^scaled_mm_silu_and_mul: out lies in the memory of a; it must not, since a is"):
        fused(scaled_mm_silu_and_mul, product, out=out)


# Fused: quantized


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [(1, 2, 16), (3, 40, 272), (33, 258, 129), (64, 300, 128), (130, 576, 400)])
def test_quant_makes_the_codes_of_the_float32_values(
    device: str, size: tuple[int, int, int], power_of_two: bool, mode: str
) -> None:
    how: dict[str, Any] = {"granularity": "group", "power_of_two_scale": power_of_two}
    for with_gate in (False, True):
        product = make_fused(*size, mode, bias=FP32, device=device)
        if with_gate:
            saturate(product)
        values = saturated(product) if with_gate else product.exact(FP32)
        want, want_scale = quantize_fp8(values, **how)
        with product.unchanged():
            q, scale = fused(scaled_mm_quant, product, silu_and_mul=with_gate, power_of_two_scale=power_of_two)
        assert (q.dtype, q.shape, q.stride()) == (E4M3, want.shape, want.stride())
        assert (scale.dtype, scale.stride()) == (FP32, want_scale.stride())
        assert torch.equal(scale, want_scale)
        assert torch.equal(q.float(), want.float())  # where a zero has no sign


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_gate", [False, True])
def test_quant_is_that_of_what_the_other_ops_return_in_float32(mode: str, with_gate: bool) -> None:
    for m, n, k in ((5, 300, 272), (130, 576, 400)):
        product = make_fused(m, n, k, mode, exact=False)
        values = fused(scaled_mm_silu_and_mul if with_gate else scaled_mm, product, out_dtype=FP32)
        for power_of_two in (False, True):
            want = quantize_fp8(values, granularity="group", power_of_two_scale=power_of_two)
            q, scale = fused(scaled_mm_quant, product, silu_and_mul=with_gate, power_of_two_scale=power_of_two)
            assert torch.equal(scale, want[1]) and codes_are_equal(q, want[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_gate", [False, True])
def test_quant_against_float64_and_what_the_next_product_makes_of_it(device: str, mode: str, with_gate: bool) -> None:
    for m, n, k in ((1, 272, 300), (33, 600, 272), (83, 520, 1040)):
        product = make_fused(m, n, k, mode, exact=False, device=device)
        if with_gate:
            reference, bound = gated(product, FP32)
        else:
            reference, bound = gemm_reference(*product.float64()), error_bound(product, FP32)
        q, scale = fused(scaled_mm_quant, product, silu_and_mul=with_gate)
        columns = reference.shape[1]
        step = scale.double().repeat_interleave(128, 1)[:, :columns]
        # Codes of e4m3 are 2**-3 of a power of two apart, or 2**-9 below 2**-6.
        half = (2.0**-4 * (reference.abs() + bound)).maximum(2.0**-10 * step)
        assert first_mismatches(q.double() * step, reference, bound + half + 2.0**-22 * reference.abs()) == ""
        for group in range(ceil_128(columns)):
            inside = slice(128 * group, 128 * group + 128)
            amax = reference[:, inside].abs().amax(1).clamp_min(2.0**-40)
            off = bound[:, inside].amax(1) / 448 + 2.0**-23 * amax
            assert first_mismatches(scale[:, group], amax / 448, off) == ""
        after = make_block_product(m, 136, columns, "block", exact=False, device=device)
        following = BlockProduct(q, after.b, after.rest | {"scale_a": scale})
        bound = error_bound(following, BF16)
        assert first_mismatches(following(), gemm_reference(*following.float64()), bound) == ""


def test_quant_with_powers_of_two_has_scales_that_e8m0_holds(device: str) -> None:
    product = make_block_product(33, 600, 272, exact=False, device=device)
    q, scale = fused(scaled_mm_quant, product, silu_and_mul=True, power_of_two_scale=True)
    assert torch.equal(scale.to(E8M0).float(), scale)
    after = make_block_product(33, 40, 300, exact=False, bias=None, device=device)
    as_they_are = scaled_mm(q, after.b, scale, after.rest["scale_b"])
    assert_same(scaled_mm(q, after.b, scale.to(E8M0), after.rest["scale_b"]), as_they_are)


# Errors

RIGHT: dict[str, Any] = {
    "a": Spec((5, 200), E4M3),
    "b": Spec((200, 300), E4M3, (1, 200)),
    "scale_a": Spec((5, 2), FP32, (1, 5)),
    "scale_b": Spec((3, 2), FP32),
}
SHORT = RIGHT | {  # k is 100
    "a": Spec((5, 100), E4M3),
    "b": Spec((100, 300), E4M3, (1, 100)),
    "scale_a": Spec((5, 1), FP32),
    "scale_b": Spec((3, 1), FP32),
}
INTEGERS = {"a": Spec((5, 200), INT8), "b": Spec((200, 300), INT8, (1, 200))}
ONE = {"scale_a": Spec((), FP32), "scale_b": Spec((), FP32)}
FLOATS = "torch.bfloat16, torch.float16 or torch.float32"
SCALE_TYPES = "torch.float32, torch.float8_e8m0fnu or torch.uint8"
ROWS = "[5, 2], one for each 128 k of each row"
COLUMNS = "[3, 2], one for each 128 x 128 of the (n, k) weight, or [300, 2], one for each 128 k of each column"
LIST = "`python tools/emit.py --list` prints them"

# What is passed in place of the right arguments, and the sentence that comes back: of every op, then of some.
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        (
            {"scale_a": Spec(shape, FP32)},
            ValueError,
            f"scale_a is {list(shape)}; it must have one element, or be [5] or [5, 1], one element for each row of a, "
            f"or {ROWS}",
        )
        for shape in ((5, 3), (2, 5), (4, 2), (1, 2), (5, 2, 1), (10,), (1, 5), (5, 200), (5, 0))
    ),
    *(
        ({"scale_b": Spec(shape, FP32)}, ValueError, f"scale_b is {list(shape)}; it must be {COLUMNS} of b")
        for shape in ((2, 3), (2, 300), (1, 2), (3,), (300,), (1, 300), (300, 1), (3, 1), (1,), (), (3, 2, 1), (0, 2))
    ),
    *(
        (
            {"scale_a": Spec(shape, FP32)},
            ValueError,
            "scale_b is [3, 2]; it must have one element, or be [300] or [1, 300] or [300, 1], one element for each "
            f"column of b, or, with a scale_a of [5, 2], be {COLUMNS}",
        )
        for shape in ((5, 1), (5,), (1,), (), (1, 1))
    ),
    *(
        ({name: Spec(shape, wrong)}, TypeError, f"{name} is {wrong}; it must be {SCALE_TYPES}")
        for name, shape in (("scale_a", (5, 2)), ("scale_b", (3, 2)))
        for wrong in (BF16, torch.float64, INT8, torch.int32, E4M3, torch.float8_e4m3fnuz, torch.uint16)
    ),
    *(
        ({"scale_a": Spec(shape, dtype)}, ValueError, f"scale_a is {list(shape)}; it must be {ROWS} of a")
        for dtype in (E8M0, UINT8)
        for shape in ((5, 1), (5,), (1,), (), (2, 5))
    ),
    *(
        ({"scale_b": Spec(shape, dtype)}, ValueError, f"scale_b is {list(shape)}; it must be {COLUMNS} of b")
        for dtype in (E8M0, UINT8)
        for shape in ((300,), (1, 300), (1,), (), (2, 3))
    ),
    (
        {"scale_a": Spec((5, 1), FP32), "scale_b": Spec((3, 2), UINT8)},
        ValueError,
        f"scale_a is [5, 1]; it must be {ROWS} of a",
    ),
    *(
        (
            SHORT | {"scale_a": Spec(shape, FP32)},
            ValueError,
            f"scale_a is {list(shape)}; it must be [5, 1], one for each 128 k of each row of a",
        )
        for shape in ((5,), (1,), (), (1, 5))
    ),
    (
        SHORT | {"scale_b": Spec((2, 1), FP32)},
        ValueError,
        "scale_b is [2, 1]; it must have one element, or be [300] or [1, 300] or [300, 1], one element for each column "
        "of b, or, with a scale_a of [5, 1], be [3, 1], one for each 128 x 128 of the (n, k) weight, or [300, 1], one "
        "for each 128 k of each column",
    ),
    (
        {"a": Spec((5, 200), E5M2), "b": Spec((200, 300), E5M2, (1, 200))},
        TypeError,
        "a and b are both torch.float8_e5m2; at least one must be torch.float8_e4m3fn",
    ),
    (
        {"b": Spec((200, 300), E4M3)},
        ValueError,
        "b is [200, 300] with the strides [300, 1], so its rows are contiguous; its columns must be: pass w.t() of a "
        "contiguous (n, k) weight w",
    ),
    ({"bias": Spec((3,))}, ValueError, "bias is [3]; it must be [300], one element for each column of b"),
    ({"bias": Spec((300,), E4M3)}, TypeError, f"bias is torch.float8_e4m3fn; it must be {FLOATS}"),
    ({"a": Spec((5, 2, 100), E4M3)}, ValueError, "a is [5, 2, 100]; it must have two dimensions"),
    ({"a": Spec((5, 200))}, TypeError, "a is torch.bfloat16; it must be torch.float8_e4m3fn"),
]
WRONG_OF: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *((op, *row) for op in OPS for row in WRONG),
    *(
        (
            "scaled_mm",
            {"residual": Spec(shape)},
            ValueError,
            f"residual is {list(shape)}; it must be [5, 300], as the result",
        )
        for shape in ((5, 299), (300, 5), (300,), (1, 300), (1, 5, 300), (), (0, 300))
    ),
    *(
        ("scaled_mm", {"residual": Spec((5, 300), wrong)}, TypeError, f"residual is {wrong}; it must be {FLOATS}")
        for wrong in (torch.float64, E4M3, INT8, E8M0)
    ),
    *(
        (
            "scaled_mm",
            arguments | {"residual": Spec((5, 300))},
            ValueError,
            "residual is [5, 300]; it must be None, since the scales are not for each 128 k",
        )
        for arguments in (ONE, INTEGERS | ONE, {"scale_a": Spec((5, 1), FP32), "scale_b": Spec((300,), FP32)})
    ),
    (
        "scaled_mm",
        {"zero_point_a": Spec((5, 1), torch.int32), "sum_b": Spec((300,), torch.int32)},
        ValueError,
        "zero_point_a is [5, 1]; it must be None, since a and b are not torch.int8",
    ),
    (
        "scaled_mm",
        INTEGERS,
        ValueError,
        "scale_a is [5, 2]; it must have one element, or be [5] or [5, 1], one element for each row of a",
    ),
    (
        "scaled_mm",
        INTEGERS | {"scale_a": Spec((5,), FP32)},
        ValueError,
        "scale_b is [3, 2]; it must have one element, or be [300] or [1, 300] or [300, 1], one element for each column "
        "of b",
    ),
    *(
        (
            "scaled_mm",
            INTEGERS | ONE | {"scale_b": Spec((3, 2), dtype)},
            TypeError,
            f"scale_b is {dtype}; it must be torch.float32",
        )
        for dtype in (E8M0, UINT8)
    ),
    *(
        (op, {"out_dtype": wrong}, TypeError, f"out_dtype is {wrong}; it must be {FLOATS}")
        for op in ("scaled_mm", "scaled_mm_silu_and_mul")
        for wrong in (E4M3, E8M0, torch.int32)
    ),
    ("scaled_mm", {"out": Spec((300, 5))}, ValueError, "out is [300, 5]; it must be [5, 300]"),
    (
        "scaled_mm",
        {"out": Spec((5, 300), BF16, (0, 1))},
        ValueError,
        "out has the strides [0, 1]; its elements must not share memory",
    ),
    (
        "scaled_mm",
        {"kernel": "mm_bf16_bf16_any"},
        ValueError,
        f"kernel is 'mm_bf16_bf16_any', which is not a kernel of scaled_mm; {LIST}",
    ),
    *(
        (op, INTEGERS | ONE, TypeError, "a is torch.int8; it must be torch.float8_e4m3fn or torch.float8_e5m2")
        for op in ("scaled_mm_silu_and_mul", "scaled_mm_quant")
    ),
    *(
        (op, {"kernel": name}, ValueError, f"kernel is '{name}', which is not a kernel of scaled_mm; {LIST}")
        for op in ("scaled_mm_silu_and_mul", "scaled_mm_quant")
        for name in ("fast", "mm_bf16_bf16_any")
    ),
    *(
        (
            op,
            {"b": Spec((200, 301), E4M3, (1, 200)), **options},
            ValueError,
            "b is [200, 301]; its n must be even, a gate for each value",
        )
        for op, options in (("scaled_mm_silu_and_mul", {}), ("scaled_mm_quant", {"silu_and_mul": True}))
    ),
    ("scaled_mm_silu_and_mul", {"out": Spec((5, 300))}, ValueError, "out is [5, 300]; it must be [5, 150]"),
    (
        "scaled_mm_silu_and_mul",
        {"out": Spec((5, 150), FP16), "out_dtype": BF16},
        TypeError,
        "out is torch.float16; it must be out_dtype, torch.bfloat16",
    ),
    (
        "scaled_mm_silu_and_mul",
        {"out": Spec((5, 150), BF16, (149, 1))},
        ValueError,
        "out has the strides [149, 1]; its elements must not share memory",
    ),
]


def call(op: str, arguments: dict[str, Any], device: str) -> Any:
    made = {name: x.on(device) if isinstance(x, Spec) else x for name, x in (RIGHT | arguments).items()}
    return OPS[op](**made)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("op", "arguments", "kind", "sentence"),
    WRONG_OF,
    ids=[f"{i}-{row[0]}-{'-'.join(row[1])}" for i, row in enumerate(WRONG_OF)],
)
def test_errors(where: str, op: str, arguments: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    end = "" if arguments.get("a") == Spec((5, 200)) else "$"  # of some ops the list of dtypes is longer
    with (
        FakeTensorMode() if where == "fake" else nullcontext(),
        pytest.raises(RuntimeError if where == "cuda" else kind, match=f"^{re.escape(f'{op}: {sentence}')}{end}"),
    ):
        call(op, arguments, "cuda" if where == "fake" else where)


@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", OPS)
def test_devices_are_not_mixed(where: str, op: str) -> None:
    here = "cuda:0" if where == "cuda" else where
    other = "cpu" if where != "cpu" else "meta"
    names = {"scale_a": RIGHT["scale_a"], "scale_b": RIGHT["scale_b"], "bias": Spec((300,))}
    if op == "scaled_mm":
        names |= {"residual": Spec((5, 300)), "out": Spec((5, 300))}
    elif op == "scaled_mm_silu_and_mul":
        names["out"] = Spec((5, 150))
    for name, spec in names.items():
        text = f"{op}: {name} is on {other}; it must be on the device of a, {here}"
        with pytest.raises(RuntimeError if where == "cuda" else ValueError, match=f"^{re.escape(text)}$"):
            call(op, names | {name: spec.on(other)}, where)


def test_nothing_is_written_by_a_call_that_is_refused(device: str) -> None:
    product = make_block_product(5, 16, 200, residual=BF16, device=device)
    out, check = guarded((5, 16), BF16, device=device)
    for name, wrong in (("scale_b", torch.ones(2, 2)), ("residual", torch.ones(5, 15, dtype=BF16))):
        rest = product.rest | {name: wrong.to(device)}
        with pytest.raises(RuntimeError if device == "cuda" else ValueError, match=f"^scaled_mm: {name} is"):
            BlockProduct(product.a, product.b, rest)(out=out)
        assert bool(out.isnan().all())
        check()


# Fakes and torch.compile


@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize("kind", KINDS)
def test_fakes_have_the_shape_dtype_and_strides_of_results(where: str, kind: str) -> None:
    mode = FakeTensorMode()
    for size, scale in itertools.product([(5, 264, 300), (1, 2, 3), (0, 4, 8), (3, 0, 8), (3, 4, 0)], SCALES):
        product = make_block_product(*size, kind, scales=(scale, scale))
        move = (lambda x: x.to("meta")) if where == "meta" else mode.from_tensor
        fake = BlockProduct(move(product.a), move(product.b), {name: move(x) for name, x in product.rest.items()})
        calls: list[Callable[[Product], Any]] = [
            *(lambda p, dtype=dtype: p(out_dtype=dtype) for dtype in (None, *OUTPUT)),
            *(lambda p, dtype=dtype: fused(scaled_mm_silu_and_mul, p, out_dtype=dtype) for dtype in (None, *OUTPUT)),
            *(lambda p, gate=gate: fused(scaled_mm_quant, p, silu_and_mul=gate)[0] for gate in (False, True)),
            *(lambda p, gate=gate: fused(scaled_mm_quant, p, silu_and_mul=gate)[1] for gate in (False, True)),
        ]
        for each in calls:
            want, got = each(product), each(fake)
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
            assert got.device.type == ("meta" if where == "meta" else "cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["new", "out", "residual in place"])
def test_compiles_once_for_every_m(device: str, how: str, kind: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def f(a: Tensor, b: Tensor, rest: dict[str, Tensor], out: Tensor | None) -> Tensor:
        return BlockProduct(a, b, rest)(out=out) + 1

    for m in (5, 40, 24, 64, 1, 0):  # n is 136, and k 272
        product = make_block_product(m, 136, 272, kind, residual=BF16, device=device)
        want = product.exact(BF16)
        out = None if how == "new" else torch.empty(m, 136, dtype=BF16, device=device)
        if how == "residual in place" and out is not None:
            product.rest["residual"] = out.copy_(product.rest["residual"])
        assert_same(f(product.a, product.b, product.rest, out), want + 1)
        if out is not None:
            assert_same(out, want)
        if m > 1:
            assert counter.frame_count == 1, f"compiled again for m = {m}"


@pytest.mark.parametrize("mode", ["vectors", "group"])
def test_a_fused_layer_compiles_once_for_every_m(device: str, mode: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")

    def layer(up: Product, down: Product) -> tuple[Tensor, Tensor]:
        q, scale = fused(scaled_mm_quant, up, silu_and_mul=True)
        return scaled_mm(q, down.b, scale, down.rest["scale_b"]), fused(scaled_mm_silu_and_mul, up)

    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    down = make_block_product(1, 40, 300, exact=False, device=device)
    for m in (5, 40, 24, 64):
        up = make_fused(m, 600, 272, mode, device=device)
        saturate(up)  # so that one way to compute silu is as good as another
        for got, want in zip(compiled(up, down), layer(up, down), strict=True):
            assert_same(got, want)
        assert counter.frame_count == 1, f"compiled again for m = {m}"


def test_cost_by_hand() -> None:
    def cost(name: str, case: int) -> tuple[int, int]:
        op = REGISTERED[name]
        inputs = op.inputs(op.cases[case])
        return op.bytes(**inputs), op.flops(**inputs)

    read, flops = 5 * 272 + 272 * 136 + 4 * (5 * 3 + 2 * 3), 2 * 5 * 272 * 136
    assert cost("scaled_mm", 3) == cost("scaled_mm_out", 3) == (read + 2 * 2 * 5 * 136, flops)  # the residual, and d
    assert cost("scaled_mm_silu_and_mul", 1) == cost("scaled_mm_silu_and_mul_out", 1) == (read + 2 * 5 * 68, flops)
    assert cost("scaled_mm_quant", 1) == (read + 5 * 136 + 4 * 5 * 2, flops)
    assert cost("scaled_mm_quant", 3) == (read + 5 * 68 + 4 * 5, flops)


def test_public_names() -> None:
    for name in OPS:
        assert name in cutegemm.__all__ and getattr(cutegemm, name) is OPS[name]


# Every kernel by its name


NAMES = [name for name, kernel in KERNELS.items() if kernel.gemm.op == "scaled_mm" and kernel.gemm.scales]
GATED = [name for name in NAMES if isinstance(KERNELS[name].tile, Blockwise) and KERNELS[name].tile.gated]
PLAIN = [name for name in NAMES if name not in GATED]
QUANTIZING = [
    name for name in NAMES if isinstance(tile := KERNELS[name].tile, Blockwise) and tile.quantizes and not tile.columns
]


def kinds_of(kernel: Kernel) -> tuple[str, ...]:
    if isinstance(kernel.tile, Blockwise):
        return ("group",) if kernel.tile.columns else ("block",)
    return KINDS


def types_of(kernel: Kernel) -> list[tuple[torch.dtype, torch.dtype]]:
    return OPERANDS if kernel.gemm.a == "fp8" else OPERANDS[:1]


def sizes_of(kernel: Kernel) -> list[tuple[int, int, int, str]]:
    """m, n, k and options: tails everywhere, more tiles than multiprocessors, every way to launch."""
    tile = kernel.tile
    if isinstance(tile, AnyShape):
        return [(1, 1, 1, ""), (3, 7, 5, ""), (65, 131, 67, "no_chain=1"), (130, 63, 259, ""), (1111, 1303, 77, "")]
    if isinstance(tile, Decode):
        most, many = tile.tokens, 132 * 256 + 17
        sizes = [
            (1, 1, 1, ""),
            (1, 61, 48, "split=8"),
            (most, 64, 257, "split=2,rows=8"),
            (most // 2 + 1, 333, 805, "split=4,rows=24,prefetch=64"),
            (most - 1, 200, 643, "split=8,rows=56,no_chain=1"),
            (most, many, 149, "rows=40"),
            (most, many // 4, 530, "split=4,prefetch=16"),
            (most - 1, 131, 640, ""),
            (most // 2 + 1, 333, 1408, "split=2,rows=24,prefetch=64"),
            (most - 1, 77, 2176, ""),
        ]
        return as_taken(sizes, tile)
    assert isinstance(tile, Blockwise)
    m, n = tile.m, tile.width
    sizes = [
        (1, 2 if tile.columns else 1, 1, ""),
        (1, 24, 16, ""),
        (m - 1, n + 9, 133, "no_chain=1"),
        (2 * m + 5, n - 8, 509, ""),
        (m + 1, 3 * n - 5, 320, "swizzle=1"),
        (3 * m + 1, 80 * n - 8, 131, "swizzle=2"),
        (5 * m - 1, 61 * n + 8, 19, "swizzle=8"),
        (37 * m + 2, 9 * n - 24, 33, "swizzle=4,no_chain=1"),
        (m, n, 2055, ""),
        (3 * m + 4, 2 * n + 8, 5248, ""),  # more blocks than a warp has lanes
    ]
    if tile.splits:
        sizes += [
            (m - 3, 2 * n + 4, 700, "split=2"),
            (m + 2, 3 * n + 1, 1296, "split=4"),
            (2 * m + 3, n - 5, 400, "split=8,no_chain=1"),
            (1, 2, 1, "split=4"),
            (m, n, 5248, "split=8"),
        ]
    return sizes


def side_by_side(scale: Tensor) -> Tensor:
    """The scales of neighbouring rows next to each other, as quantize_fp8 has them, and NaN behind them."""
    wide = torch.full((scale.shape[1], scale.shape[0] + 7 & ~3), math.nan, device=scale.device)
    view = in_dtype(wide, scale.dtype).t()[: scale.shape[0]]
    if scale.dtype == FP32:
        return view.copy_(scale)
    view.view(UINT8).copy_(scale.view(UINT8))
    return view


def for_blocks(k: int) -> tuple[torch.dtype, torch.dtype]:
    """Types of scales that are for blocks of k also if there is one."""
    return (FP32, FP32) if k > 128 else (FP32, E8M0)


def whole(n: int) -> int:
    """The next n whose halves begin at whole chunks of 64."""
    return -(-n // 64) * 128


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_kernel_is_exact(name: str) -> None:
    kernel = KERNELS[name]
    for i, (m, n, k, options) in enumerate(sizes_of(kernel)):
        kind, types = kinds_of(kernel)[i % len(kinds_of(kernel))], types_of(kernel)[i % len(types_of(kernel))]
        scales = (SCALES[i % 3], SCALES[i // 2 % 3])
        bias, residual, dtype = (FP32, None, BF16)[i % 3], (None, BF16, FP32, FP16)[i % 4], OUTPUT[i % 3]
        if residual is None and scales == (FP32, FP32):
            scales = for_blocks(k)
        how: dict[str, Any] = {"bias": bias, "residual": residual, "pitch": 16, "seed": i, "device": "cuda"}
        product = make_block_product(m, n, k, kind, types, scales, **how)
        want = product.exact(dtype)
        for scale_a in (product.rest["scale_a"], side_by_side(product.rest["scale_a"])):
            product.rest["scale_a"] = scale_a
            check_in_every_place(product, product, want, f"{name}:{options}", f"m={m} n={n} k={k}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_kernel_keeps_its_bound_and_its_bits(name: str) -> None:
    """With outliers, zeros and denormals."""
    kernel, tile = KERNELS[name], KERNELS[name].tile
    for kind in kinds_of(kernel):
        m = tile.tokens if isinstance(tile, Decode) else 141
        product = make_block_product(m, 208, 417, kind, exact=False, residual=BF16, pitch=16, device="cuda")
        product.rest["scale_a"] = side_by_side(product.rest["scale_a"])
        options = f"{name}:split=2" if tile.splits else name
        for dtype in OUTPUT:
            out = outs(m, 208, dtype, "cuda")["padded"][0]
            product(out=out, kernel=options)
            assert mismatches(out, gemm_reference(*product.float64()), error_bound(product, dtype)) == "", dtype
            check_bits(product, out, options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_kernel_error_over_a_long_k(name: str) -> None:
    """What the tensor core alone would lose of sums that grow, every kernel here keeps."""
    kernel, tile = KERNELS[name], KERNELS[name].tile
    m, n, k = tile.tokens if isinstance(tile, Decode) else 96, 256, 32768
    product = make_block_product(m, n, k, kinds_of(kernel)[0], exact=False, bias=None, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    for x in (product.a, product.b):
        x.copy_(torch.rand(x.shape, generator=generator, device="cuda") + 0.5)
    for scale in ("scale_a", "scale_b"):
        product.rest[scale].fill_(1.0)
    reference = gemm_reference(*product.float64())
    error = relative_error(product(kernel=name, out_dtype=FP32), reference)
    assert error <= 1e-3
    one = torch.ones(1, device="cuda")
    fast = scaled_mm(
        product.a, product.b, one, one, out_dtype=FP32, kernel="scaled_mm_e4m3_e4m3_fp32_fast_128x128x128_2x1_pingpong"
    )
    assert relative_error(fast, reference) >= 4 * error


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_scales_beyond_float32_give_infinity(name: str) -> None:
    """As the reference has it, also where a kernel computes more blocks than there are."""
    kernel = KERNELS[name]
    product = make_block_product(at_most(kernel, 7), 24, 3 * 128, kinds_of(kernel)[0], bias=None, device="cuda")
    for x in (product.a, product.b):
        x.copy_(torch.ones(x.shape, device="cuda"))
    for scale in ("scale_a", "scale_b"):
        product.rest[scale][:, -1] = 1e30
    assert bool((product(kernel=name, out_dtype=FP32) == math.inf).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_operands_written_just_before(name: str) -> None:
    kernel = KERNELS[name]
    how: dict[str, Any] = {"kind": kinds_of(kernel)[0], "residual": BF16, "device": "cuda"}
    m = at_most(kernel, 7)
    sources = [make_block_product(m, 264, 1024, seed=seed, **how) for seed in range(3)]
    product = make_block_product(m, 264, 1024, **how)
    choice = name
    if isinstance(kernel.tile, Decode):
        choice = f"{name}:prefetch=64" if kernel.tile.folded else f"{name}:split=4,prefetch=64"

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
@pytest.mark.parametrize("name", [name for name in FAMILIES.values() if name in NAMES])
def test_stream_of_the_caller(name: str) -> None:
    kinds: dict[str, Any] = {"kind": kinds_of(KERNELS[name])[0], "device": "cuda"}
    source, product = (make_block_product(7, 264, 512, seed=seed, **kinds) for seed in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the slow producer: some 10 ms
        for to, now in zip(product.tensors(), source.tensors(), strict=True):
            to.copy_(now)
        got = product(kernel=name)
    stream.synchronize()
    assert_same(got, source.exact(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATED)
def test_gated_kernel_is_exact_where_silu_is(name: str) -> None:
    for i, (m, n, k, options) in enumerate(sizes_of(KERNELS[name])):
        product = make_block_product(m, whole(n), k, scales=for_blocks(k), pitch=16, seed=i, device="cuda")
        saturate(product)
        if i % 2 == 0:
            product.rest["scale_a"] = side_by_side(product.rest["scale_a"])
        want, dtype = saturated(product), OUTPUT[i % 3]
        check_in_every_place(
            partial(fused, scaled_mm_silu_and_mul, product),
            product,
            want.to(dtype),
            f"{name}:{options}",
            f"m={m} n={n} k={k}",
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZING)
def test_kernel_quantizes_what_it_computes(name: str) -> None:
    gate = name in GATED
    for i, (m, n, k, options) in enumerate(sizes_of(KERNELS[name])):
        columns = whole(n) if gate else n
        product = make_block_product(m, columns, k, scales=for_blocks(k), pitch=16, seed=i, device="cuda")
        if gate:
            saturate(product)
        values = saturated(product) if gate else product.exact(FP32)
        how = {"power_of_two_scale": i % 2 == 1}
        if i // 2 % 2 == 0:
            product.rest["scale_a"] = side_by_side(product.rest["scale_a"])
        want, want_scale = quantize_fp8(values, granularity="group", **how)
        if "split" in options:
            continue
        with product.unchanged():
            q, scale = fused(scaled_mm_quant, product, silu_and_mul=gate, kernel=f"{name}:{options}", **how)
        assert torch.equal(scale, want_scale), f"m={m} n={n} k={k} {options}"
        assert torch.equal(q.float(), want.float()), f"m={m} n={n} k={k} {options}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATED)
def test_gated_kernel_keeps_its_bound_and_its_bits(name: str) -> None:
    product = make_block_product(141, 640, 417, exact=False, pitch=16, device="cuda")
    reference, bound = gated(product, FP32)
    out = fused(scaled_mm_silu_and_mul, product, out_dtype=FP32, kernel=name)
    assert mismatches(out, reference, bound) == ""
    codes = fused(scaled_mm_quant, product, silu_and_mul=True, kernel=name)
    want = quantize_fp8(out, granularity="group")
    assert torch.equal(codes[1], want[1]) and torch.equal(codes[0].float(), want[0].float())
    for _ in range(20):
        again = fused(scaled_mm_quant, product, silu_and_mul=True, kernel=name)
        assert torch.equal(again[1], codes[1]) and codes_are_equal(again[0], codes[0])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 200])
@pytest.mark.parametrize("gate", [False, True])
def test_fused_forms_in_two_launches(m: int, gate: bool) -> None:
    """The sums in float32, and what follows of them: the same bits as those ops give one after the other."""
    product = make_block_product(m, 512, 417, exact=False, pitch=16, device="cuda")
    sums = product(out_dtype=FP32)
    want = activation_quant(sums, granularity="group") if gate else quantize_fp8(sums, granularity="group")
    with product.unchanged():
        q, scale = fused(scaled_mm_quant, product, silu_and_mul=gate, kernel="separate")
    assert torch.equal(scale, want[1]) and codes_are_equal(q, want[0])
    if gate:
        for dtype in OUTPUT:
            got = fused(scaled_mm_silu_and_mul, product, out_dtype=dtype, kernel="separate")
            assert torch.equal(got, activation(sums).to(dtype))
    with pytest.raises(RuntimeError, match=r"^scaled_mm_quant: kernel .*_128x64x128_1x1_columns does not take m = "):
        fused(scaled_mm_quant, product, silu_and_mul=gate, kernel="scaled_mm_e4m3_e4m3_block_128x64x128_1x1_columns")


@pytest.mark.gpu
def test_gate_up_and_down_in_two_kernels() -> None:
    """As a model calls them, in a graph: the codes of one are the operand of the next."""
    up = make_block_product(200, 1024, 640, exact=False, bias=None, device="cuda")
    down = make_block_product(200, 640, 512, exact=False, bias=None, device="cuda")

    def steps() -> list[Tensor]:
        results = []
        for _ in range(12):
            q, scale = fused(scaled_mm_quant, up, silu_and_mul=True)
            results.append(scaled_mm(q, down.b, scale, down.rest["scale_b"]))
        return results

    reference, _ = gated(up, FP32)
    want = BlockProduct(reference, down.b, {**down.rest, "scale_a": torch.ones(200, 4, device="cuda")})
    for result in replayed(steps):
        assert relative_error(result, gemm_reference(*want.float64())) <= 4e-2  # FP8's, of the codes between
