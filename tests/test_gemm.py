"""mm and scaled_mm against float64 and hand-made numbers; with `device`, the same expectations hold on CUDA.

Then every declared kernel by its name, on a GPU: exact products bit for bit, derived bounds, streams, graphs and
chains of kernels that start before the one ahead of them has ended.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from cutegemm import mm, plan, scaled_mm
from cutegemm.testing import (
    assert_gemm,
    assert_same,
    first_mismatches,
    gemm_bound,
    gemm_reference,
    guarded,
    make_operand,
    misaligned,
    padded,
    relative_error,
)
from cutegemm.variants import FAMILIES, KERNELS, AnyShape, Decode, Kernel, Tile

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
OUTPUT = (BF16, FP16, FP32)
TYPES = {name: dtype for dtype, name in plan.DTYPES.items()}
OPERANDS = [(BF16, BF16), (FP16, FP16), (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (INT8, INT8)]
KINDS = [OPERANDS[0], OPERANDS[2], OPERANDS[5]]  # one of each way to multiply
LAYOUTS = ("tn", "tt", "nt", "nn")

pytestmark = pytest.mark.usefixtures("one_thread")


def is_scaled(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def no_number(dtype: torch.dtype) -> float:
    """What no result may depend on: NaN, and of integers the largest."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


@dataclass
class Product:
    """The operands of a call of mm, or with FP8 or INT8 of scaled_mm."""

    a: Tensor
    b: Tensor
    rest: dict[str, Tensor]

    def __call__(self, **options: Any) -> Tensor:
        return (scaled_mm if is_scaled(self.a.dtype) else mm)(self.a, self.b, **self.rest, **options)

    def float64(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """a and b with their scales, and the bias. A zero point is one more k: a's is minus it, b's the sum."""
        a, b = self.a.double(), self.b.double()
        if "sum_b" in self.rest:
            zero_points = self.rest["zero_point_a"].double().reshape(-1, 1).expand(len(a), 1)
            a, b = torch.cat([a, -zero_points], 1), torch.cat([b, self.rest["sum_b"].double()[None]])
        if is_scaled(self.a.dtype):
            a = a * self.rest["scale_a"].double().reshape(-1, 1)
            b = b * self.rest["scale_b"].double().reshape(1, -1)
        return a, b, self.rest.get("bias")

    def exact(self, dtype: torch.dtype) -> Tensor:
        return gemm_reference(*self.float64()).to(dtype)

    def tensors(self) -> list[Tensor]:
        return [self.a, self.b, *self.rest.values()]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        def values() -> list[Tensor]:
            return [x.view(torch.uint8).clone() if is_scaled(x.dtype) else x.nan_to_num() for x in self.tensors()]

        before = values()
        yield
        assert all(torch.equal(*pair) for pair in zip(before, values(), strict=True))


def views_of_vector(values: Tensor) -> dict[str, Tensor]:
    """The vector as it is, and at a stride with NaN in between."""
    wide = torch.full((len(values), 3), no_number(values.dtype), dtype=values.dtype, device=values.device)
    wide[:, 1] = values
    return {"contiguous": values, "strided": wide[:, 1]}


def make_product(
    m: int,
    n: int,
    k: int,
    types: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    *,
    layout: str = "tn",
    exact: bool = True,
    bias: torch.dtype | None = FP32,
    scales: str = "vectors",
    zero_point: bool = True,
    pitch: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Product:
    """exact: integers and powers of two, so that every order of summation gives the same bits while k < 1000.

    pitch: lines of an operand begin at multiples of this many elements, with NaN in between, and with an odd seed
    vectors have a stride. scales: "vectors", or "one" for all rows, of INT8 also in the zero point.
    """

    def operand(rows: int, k: int, dtype: torch.dtype, k_inner: bool, seed: int) -> Tensor:
        lines, length = (rows, k) if k_inner else (k, rows)
        x = make_operand(lines, length, dtype, seed=seed, device=device, exact=exact)
        if not exact and dtype == FP16:
            x.clamp_(-120, 120)  # so that no d of FP16 is infinite
        if pitch:
            x = padded(x, (length // pitch + 1) * pitch, fill=math.nan)
        return x if k_inner else x.t()

    generator = torch.Generator(device).manual_seed(seed)

    def view(x: Tensor) -> Tensor:
        return views_of_vector(x)["strided" if pitch and seed % 2 else "contiguous"]

    def vector(count: int, dtype: torch.dtype, positive: bool) -> Tensor:
        if exact:
            x = torch.randint(-2, 3, (count,), generator=generator, device=device).float()
            x = x.exp2() if positive else x
        else:
            x = torch.rand(count, generator=generator, device=device)
            x = (x + 0.5) / 8 if positive else x - 0.5
        return view(x.to(dtype))

    a = operand(m, k, types[0], layout[0] == "t", 3 * seed + 1)
    b = operand(n, k, types[1], layout[1] == "n", 3 * seed + 2).t()
    rest = {}
    if is_scaled(types[0]):
        vectors = scales == "vectors"
        rest = {"scale_a": vector(m if vectors else 1, FP32, True), "scale_b": vector(n if vectors else 1, FP32, True)}
    if bias:
        rest["bias"] = vector(n, bias, False)
    if types[0] == INT8 and zero_point:
        low, high = (-4, 5) if exact else (-128, 128)
        count = m if scales == "vectors" else 1
        points = torch.randint(low, high, (count,), generator=generator, device=device, dtype=torch.int32)
        rest |= {"zero_point_a": view(points), "sum_b": view(b.t().sum(1, dtype=torch.int32))}
    return Product(a, b, rest)


def tensor(values: Any, dtype: torch.dtype, device: str) -> Tensor:
    return torch.tensor(values, dtype=FP32).to(device, dtype)


# Values


@pytest.mark.parametrize("types", OPERANDS[:2])
def test_mm_by_hand(device: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = tensor([[1, 2, 3], [4, 5, 6]], types[0], device), tensor([[1, 0], [0, 1], [2, -2]], types[1], device)
    assert mm(a, b).tolist() == [[7, -4], [16, -7]]
    assert mm(a, b, tensor([10, 20], FP32, device)).tolist() == [[17, 16], [26, 13]]
    assert mm(a, b).dtype == types[0]


@pytest.mark.parametrize("types", OPERANDS[2:])
def test_scaled_mm_by_hand(device: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    a, w = tensor([[1, 2], [3, 4]], types[0], device), tensor([[1, 0], [0, 1]], types[1], device)
    scale_a, scale_b = tensor([2, 4], FP32, device), tensor([0.5, 8], FP32, device)
    d = scaled_mm(a, w.t(), scale_a, scale_b, tensor([1, -1], BF16, device))
    assert d.dtype == BF16
    assert d.tolist() == [[2, 31], [7, 127]]


@pytest.mark.parametrize("types", [(BF16, BF16), (E4M3, E4M3)])
def test_rounds_once_after_the_bias(device: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    # 257 is half-way between two BF16 numbers; rounded before the bias, the sum would be 256.
    a, w = tensor([[256, 1]], types[0], device), tensor([[1, 1]], types[1], device)
    scales = [torch.ones((), device=device)] * 2 if is_scaled(types[0]) else []
    op = scaled_mm if scales else mm
    assert op(a, w.t(), *scales, bias=tensor([1], FP32, device), out_dtype=BF16).tolist() == [[258]]


SIZES = [(1, 1, 1), (2, 3, 5), (1, 24, 80), (5, 40, 96), (33, 67, 130), (64, 72, 257), (129, 16, 48), (17, 136, 384)]


@pytest.mark.parametrize(
    ("types", "layout"),
    [*itertools.product(OPERANDS[:2], LAYOUTS), *zip(OPERANDS[2:], ("tn", "nn", "tn", "nn"), strict=True)],
)
@pytest.mark.parametrize("size", SIZES)
def test_exact_sums_are_exact(device: str, size: tuple[int, int, int], types: Any, layout: str) -> None:
    for i, dtype in enumerate(OUTPUT):
        product = make_product(*size, types, layout=layout, bias=(None, *OUTPUT)[sum(size) % 4 - i], device=device)
        with product.unchanged():
            assert_same(product(out_dtype=dtype), product.exact(dtype))


@pytest.mark.parametrize("types", OPERANDS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_reference_is_within_the_bound_of_float64(types: Any, dtype: torch.dtype) -> None:
    product = make_product(31, 45, 200, types, exact=False)
    assert_gemm(product(out_dtype=dtype), *product.float64())


def test_default_dtypes(device: str) -> None:
    for types in OPERANDS:
        product = make_product(5, 16, 32, types, device=device)
        assert product().dtype == (BF16 if is_scaled(types[0]) else types[0])
        for dtype in OUTPUT:
            out = torch.empty(5, 16, dtype=dtype, device=device)
            assert product(out_dtype=dtype).dtype == product(out=out).dtype == dtype


# Scales and bias


@pytest.mark.parametrize("m", [1, 2, 40])
@pytest.mark.parametrize("n", [1, 2, 24])
def test_every_shape_of_scales(device: str, m: int, n: int) -> None:
    product = make_product(m, n, 64, (E4M3, E4M3), device=device)
    ones = {(): 4.0, (1,): 4.0, (1, 1): 4.0}
    for_a = [torch.full(shape, value, device=device) for shape, value in ones.items()]
    for_b = [torch.full(shape, value / 32, device=device) for shape, value in ones.items()]
    for scale in views_of_vector(product.rest["scale_a"]).values():
        for_a += [scale, scale[:, None]]
    for scale in views_of_vector(product.rest["scale_b"]).values():
        for_b += [scale, scale[:, None], scale[None]]
    for_a.append(torch.full((), 0.5, device=device).expand(m, 1))
    for product.rest["scale_a"], product.rest["scale_b"] in itertools.product(for_a, for_b):
        assert_same(product(), product.exact(BF16))
        assert_same(product(use_fast_accum=False), product.exact(BF16))


def test_each_scale_and_bias_moves_what_is_its_own(device: str) -> None:
    m, n = 6, 24
    for types in KINDS:
        product = make_product(m, n, 64, types, device=device)
        product.a.fill_(1.0), product.b.fill_(1.0)
        if "sum_b" in product.rest:
            product.rest["zero_point_a"].fill_(3), product.rest["sum_b"].fill_(64)
        before = product(out_dtype=FP32)
        for name, values in product.rest.items():
            for i in range(len(values)):
                values[i] += 1
                moved = product(out_dtype=FP32) != before
                values[i] -= 1
                want = torch.zeros_like(moved)
                want[(i,) if name.endswith("_a") else (slice(None), i)] = True
                assert torch.equal(moved, want), (name, i)


@pytest.mark.parametrize("types", [*KINDS, OPERANDS[1]])
@pytest.mark.parametrize("dtype", OUTPUT)
def test_bias_of_every_type_and_stride(device: str, types: Any, dtype: torch.dtype) -> None:
    for bias in OUTPUT:
        product = make_product(9, 40, 64, types, bias=bias, exact=False, zero_point=False, device=device)
        product.a.zero_()
        for view in views_of_vector(product.rest["bias"]).values():
            product.rest["bias"] = view
            assert_same(product(out_dtype=dtype), view.to(dtype).expand(9, 40))
        product.rest["bias"] = torch.full((1,), 3.0, dtype=bias, device=device).expand(40)
        assert_same(product(out_dtype=dtype), torch.full((9, 40), 3.0, dtype=dtype, device=device))


def test_a_nan_stays_in_its_row_or_column(device: str) -> None:
    for types, dtype in itertools.product(OPERANDS[:5], (BF16, FP32)):
        healthy = make_product(12, 40, 96, types, device=device)
        want = healthy(out_dtype=dtype)
        product = make_product(12, 40, 96, types, device=device)
        product.a[3, 5], product.b[7, 2] = math.nan, math.nan
        if types[0] != E4M3:
            product.a[4, 6] = math.inf
        got = product(out_dtype=dtype)
        assert bool(got[3].isnan().all() and got[:, 2].isnan().all())
        assert types[0] == E4M3 or not bool(got[4].isfinite().any())
        rows, columns = [i for i in range(12) if i not in (3, 4)], [j for j in range(40) if j != 2]
        assert_same(got[rows][:, columns], want[rows][:, columns])


# Layouts


def views_of(x: Tensor) -> dict[str, Tensor]:
    """x with other strides, and NaN in between; the fast kernels take the first three."""
    rows, columns = x.shape
    between = no_number(x.dtype)
    wide = torch.full((2 * rows, 3 * columns), between, device=x.device).to(x.dtype)
    return {
        "as it is": x,
        "padded": padded(x, columns + 16, fill=math.nan),
        "column-major": x.t().contiguous().t(),
        "column-major, padded": padded(x.t().contiguous(), rows + 7, fill=math.nan).t(),
        "odd pitch": padded(x, columns + 1, fill=math.nan),
        "misaligned": misaligned(x),
        "misaligned by 8 bytes": misaligned(x, 8 // x.dtype.itemsize),
        "neither is contiguous": wide[::2, ::3].copy_(x),
    }


@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize("name", views_of(torch.ones(2, 2)))
def test_layouts_of_operands(device: str, types: Any, name: str) -> None:
    product = make_product(20, 48, 112, types, device=device)
    a, weight = product.a, product.b.t()
    want = product.exact(BF16)
    product.a = views_of(a)[name]
    for other, view in views_of(weight).items():
        if is_scaled(types[0]) and "column-major" in other:
            continue  # a row-major b is refused
        product.b = view.t()
        with product.unchanged():
            assert_same(product(), want)


@pytest.mark.parametrize("types", KINDS)
def test_operands_that_share_memory(device: str, types: Any) -> None:
    for m, n, k in ((7, 24, 64), (70, 130, 48)):
        product = make_product(m, n, k, types, device=device)
        line = make_operand(1, 8 * 16 * max(m, n) + k, types[0], exact=True, device=device)[0]
        for stride in (0, 1, 16):
            product.a = line.as_strided((m, k), (stride, 1))
            assert_same(product(), product.exact(BF16))
            product.b = line.to(types[1]).as_strided((n, k), (stride, 1)).t()
            assert_same(product(), product.exact(BF16))
    square = make_product(48, 48, 48, types, device=device)
    square.b = square.a.to(types[1]).t()
    assert_same(square(), square.exact(BF16))


@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize("size", [(1, 24, 64), (6, 1, 64), (6, 24, 1), (1, 1, 64), (1, 24, 1), (1, 1, 1)])
def test_the_stride_of_a_dimension_of_size_one_means_nothing(device: str, size: Any, types: Any) -> None:
    product = make_product(*size, types, device=device)
    want = product.exact(BF16)
    out = torch.empty(size[:2], dtype=BF16, device=device)

    def odd(x: Tensor, stride: int) -> Tensor:
        strides = [stride if length == 1 else old for length, old in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)

    a, b = product.a, product.b
    for stride in (0, 1, 3, 8, 2**31, 2**40):
        product.a, product.b = odd(a, stride), odd(b, stride)
        assert_same(product(), want)
        assert_same(product(out=odd(out, stride)), want)


def outs(m: int, n: int, dtype: torch.dtype, device: str) -> dict[str, tuple[Tensor, Callable[[], None]]]:
    """Where a result may be written, each with the check that nothing else was."""

    def transposed(pitch: int) -> tuple[Tensor, Callable[[], None]]:
        x, check = guarded((n, m), dtype, device=device, pitch=pitch)
        return x.t(), check

    def sparse() -> tuple[Tensor, Callable[[], None]]:
        x, check = guarded((m, 3 * n), dtype, device=device, pitch=3 * n + 1)

        def check_all() -> None:
            check()
            assert bool(x[:, 1::3].isnan().all() and x[:, 2::3].isnan().all())

        return x[:, ::3], check_all

    return {
        "contiguous": guarded((m, n), dtype, device=device),
        "padded": guarded((m, n), dtype, device=device, pitch=(n // 8 + 2) * 8),
        "odd pitch": guarded((m, n), dtype, device=device, pitch=n + 1 + n % 2),
        "column-major": transposed(m),
        "column-major, padded": transposed(m + 3),
        "every third column": sparse(),
    }


@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize("dtype", OUTPUT)
@pytest.mark.parametrize(
    "size", [(1, 24, 64), (7, 40, 128), (66, 136, 64), (130, 67, 33), (130, 67, 64), (70, 44, 64), (6, 1, 64)]
)
def test_out(device: str, size: tuple[int, int, int], dtype: torch.dtype, types: Any) -> None:
    product = make_product(*size, types, device=device)
    for name, (out, check) in outs(*size[:2], dtype, device).items():
        assert product(out=out) is out
        assert first_mismatches(out, product.exact(dtype)) == "", name
        check()


@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_out_must_not_be_an_operand(device: str, name: str) -> None:
    buffer = torch.zeros(64, 192, dtype=BF16, device=device)
    operands = {
        "a": torch.zeros(64, 64, dtype=BF16, device=device),
        "b": torch.zeros(64, 64, dtype=BF16, device=device),
    }
    operands["bias"] = torch.zeros(64, dtype=BF16, device=device)
    out = torch.zeros(64, 64, dtype=BF16, device=device)
    operands[name] = out[0] if name == "bias" else out
    with pytest.raises(
        RuntimeError if device == "cuda" else ValueError, match=rf"^mm: out lies in the memory of {name};"
    ):
        mm(**operands, out=out)
    # Side by side in one buffer they touch nowhere.
    product = mm(buffer[:, :64], buffer[:, 64:128], out=buffer[:, 128:])
    assert product.data_ptr() == buffer[:, 128:].data_ptr()


@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize("size", [(0, 24, 64), (5, 0, 64), (5, 24, 0), (0, 24, 0), (5, 0, 0), (0, 0, 64), (0, 0, 0)])
def test_empty(device: str, size: tuple[int, int, int], types: Any) -> None:
    m, n, k = size
    for with_bias in (True, False):
        product = make_product(*size, types, bias=FP32 if with_bias else None, device=device)
        want = product.rest["bias"].expand(m, n) if with_bias else torch.zeros(m, n, device=device)
        assert_same(product(out_dtype=FP32), want)
        out, check = guarded((m, n), BF16, device=device, pitch=n + 3)
        assert_same(product(out=out), want.to(BF16))
        check()
        if k == 0:  # torch gives a matrix without elements the strides of a row-major one
            product.b = torch.empty(k, n, dtype=types[1], device=device)
            assert_same(product(out_dtype=FP32), want)
        if is_scaled(types[0]):
            product.rest |= {"scale_a": torch.ones(m, 1, device=device), "scale_b": torch.ones(1, n, device=device)}
            assert_same(product(out_dtype=FP32), want)
    after = make_product(5, 24, 64, types, device=device)
    assert_same(after(), after.exact(BF16))


# Errors


class Spec(NamedTuple):
    """A tensor, on the device that a test is for or on another."""

    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    strides: tuple[int, ...] | None = None

    def on(self, device: str) -> Tensor:
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


RIGHT: dict[str, dict[str, Any]] = {
    "mm": {"a": Spec((3, 16)), "b": Spec((16, 8))},
    "scaled_mm": {
        "a": Spec((3, 16), E4M3),
        "b": Spec((16, 8), E4M3, (1, 16)),
        "scale_a": Spec((3,), FP32),
        "scale_b": Spec((1, 8), FP32),
    },
}
FLOATS = "torch.bfloat16, torch.float16 or torch.float32"
QUANTIZED = "torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8"
LIST = "`python tools/emit.py --list` prints them"
HUGE = 2**31 - 1

INTEGERS = {
    "a": Spec((3, 16), INT8),
    "b": Spec((16, 8), INT8, (1, 16)),
    "zero_point_a": Spec((3, 1), torch.int32),
    "sum_b": Spec((8,), torch.int32),
}

# What is passed in place of the right arguments, and the sentence that comes back after the op's name.
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("mm", {"a": Spec((3, 16), FP32)}, TypeError, "a is torch.float32; it must be torch.bfloat16 or torch.float16"),
    ("mm", {"a": Spec((3, 16), torch.int8)}, TypeError, "a is torch.int8; it must be torch.bfloat16 or torch.float16"),
    (
        "mm",
        {"b": Spec((16, 8), E4M3)},
        TypeError,
        "b is torch.float8_e4m3fn; it must be torch.bfloat16 or torch.float16",
    ),
    (
        "mm",
        {"b": Spec((16, 8), FP16)},
        TypeError,
        "a is torch.bfloat16 and b is torch.float16; they must have one dtype",
    ),
    ("mm", {"a": Spec((2, 3, 16))}, ValueError, "a is [2, 3, 16]; it must have two dimensions"),
    ("mm", {"b": Spec((16,))}, ValueError, "b is [16]; it must have two dimensions"),
    ("mm", {"a": Spec(())}, ValueError, "a is []; it must have two dimensions"),
    ("mm", {"b": Spec((24, 8))}, ValueError, "a is [3, 16] and b is [24, 8]; the k of a, 16, must be the k of b, 24"),
    ("mm", {"b": Spec((8, 16))}, ValueError, "a is [3, 16] and b is [8, 16]; the k of a, 16, must be the k of b, 8"),
    ("mm", {"a": Spec((HUGE, 16), BF16, (0, 1))}, ValueError, "m is 2147483647; it must be under 2**31 - 1"),
    ("mm", {"b": Spec((16, HUGE), BF16, (1, 0))}, ValueError, "n is 2147483647; it must be under 2**31 - 1"),
    (
        "mm",
        {"a": Spec((3, HUGE), BF16, (1, 0)), "b": Spec((HUGE, 8), BF16, (0, 1))},
        ValueError,
        "k is 2147483647; it must be under 2**31 - 1",
    ),
    ("mm", {"out_dtype": torch.int32}, TypeError, f"out_dtype is torch.int32; it must be {FLOATS}"),
    ("mm", {"out_dtype": E4M3}, TypeError, f"out_dtype is torch.float8_e4m3fn; it must be {FLOATS}"),
    ("mm", {"out": Spec((3, 8), torch.float64)}, TypeError, f"out_dtype is torch.float64; it must be {FLOATS}"),
    ("mm", {"bias": Spec((8,), torch.float64)}, TypeError, f"bias is torch.float64; it must be {FLOATS}"),
    ("mm", {"bias": Spec((8,), E4M3)}, TypeError, f"bias is torch.float8_e4m3fn; it must be {FLOATS}"),
    *(
        (
            "mm",
            {"bias": Spec(shape)},
            ValueError,
            f"bias is {list(shape)}; it must be [8], one element for each column of b",
        )
        for shape in ((7,), (3,), (1,), (), (1, 8), (8, 1), (0,))
    ),
    (
        "mm",
        {"out": Spec((3, 8), FP16), "out_dtype": BF16},
        TypeError,
        "out is torch.float16; it must be out_dtype, torch.bfloat16",
    ),
    *(
        ("mm", {"out": Spec(shape)}, ValueError, f"out is {list(shape)}; it must be [3, 8]")
        for shape in ((3, 9), (8, 3), (24,), (1, 3, 8), (0, 8))
    ),
    *(
        (
            "mm",
            {"out": Spec((3, 8), BF16, strides)},
            ValueError,
            f"out has the strides {list(strides)}; its elements must not share memory",
        )
        for strides in ((0, 1), (1, 0), (0, 0), (4, 1), (1, 2), (2, 3))
    ),
    *(
        ("mm", {"kernel": kernel}, ValueError, f"kernel is '{name}', which is not a kernel of mm; {LIST}")
        for kernel, name in (
            ("fast", "fast"),
            ("", ""),
            ("fast:split=2", "fast"),
            ("scaled_mm_fp8_fp8_any", "scaled_mm_fp8_fp8_any"),
            ("mm_bf16_bf16_any ", "mm_bf16_bf16_any "),
        )
    ),
    (
        "scaled_mm",
        {"a": Spec((3, 16))},
        TypeError,
        f"a is torch.bfloat16; it must be {QUANTIZED}",
    ),
    (
        "scaled_mm",
        {"b": Spec((16, 8), torch.float8_e4m3fnuz, (1, 16))},
        TypeError,
        f"b is torch.float8_e4m3fnuz; it must be {QUANTIZED}",
    ),
    (
        "scaled_mm",
        {"a": Spec((3, 16), E5M2), "b": Spec((16, 8), E5M2, (1, 16))},
        TypeError,
        "a and b are both torch.float8_e5m2; at least one must be torch.float8_e4m3fn",
    ),
    (
        "scaled_mm",
        {"a": Spec((3, 24), E4M3)},
        ValueError,
        "a is [3, 24] and b is [16, 8]; the k of a, 24, must be the k of b, 16",
    ),
    *(
        (
            "scaled_mm",
            {"b": Spec((16, n), E4M3, (pitch, 1)), "scale_b": Spec((n,), FP32)},
            ValueError,
            f"b is [16, {n}] with the strides [{pitch}, 1], so its rows are contiguous; its columns must be: "
            "pass w.t() of a contiguous (n, k) weight w",
        )
        for n, pitch in ((8, 8), (16, 16), (2, 2), (16, 32))
    ),
    ("scaled_mm", {"scale_a": Spec((3,), BF16)}, TypeError, "scale_a is torch.bfloat16; it must be torch.float32"),
    (
        "scaled_mm",
        {"scale_b": Spec((8,), torch.float64)},
        TypeError,
        "scale_b is torch.float64; it must be torch.float32",
    ),
    *(
        (
            "scaled_mm",
            {"scale_a": Spec(shape, FP32)},
            ValueError,
            f"scale_a is {list(shape)}; it must have one element, or be [3] or [3, 1], one element for each row of a",
        )
        for shape in ((2,), (4,), (16,), (0,), (1, 3), (3, 3), (3, 1, 1), (1, 1, 1))
    ),
    *(
        (
            "scaled_mm",
            {"scale_b": Spec(shape, FP32)},
            ValueError,
            f"scale_b is {list(shape)}; it must have one element, or be [8] or [1, 8] or [8, 1], one element for each "
            "column of b",
        )
        for shape in ((7,), (16,), (3,), (0,), (8, 8), (1, 8, 1), (1, 1, 1))
    ),
    (
        "scaled_mm",
        {"bias": Spec((3,))},
        ValueError,
        "bias is [3]; it must be [8], one element for each column of b",
    ),
    ("scaled_mm", {"out_dtype": E4M3}, TypeError, f"out_dtype is torch.float8_e4m3fn; it must be {FLOATS}"),
    ("scaled_mm", {"out": Spec((8, 3))}, ValueError, "out is [8, 3]; it must be [3, 8]"),
    (
        "scaled_mm",
        {"out": Spec((3, 8), BF16, (0, 1))},
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
        (
            "scaled_mm",
            {"a": Spec((3, 16), a), "b": Spec((16, 8), b, (1, 16))},
            TypeError,
            f"a is {a} and b is {b}; both must be torch.int8, or neither",
        )
        for a, b in ((INT8, E4M3), (E5M2, INT8))
    ),
    (
        "scaled_mm",
        INTEGERS | {"b": Spec((16, 8), INT8, (8, 1))},
        ValueError,
        "b is [16, 8] with the strides [8, 1], so its rows are contiguous; its columns must be: pass w.t() of a "
        "contiguous (n, k) weight w",
    ),
    *(
        (
            "scaled_mm",
            {name: INTEGERS[name]},
            ValueError,
            f"{name} is {list(INTEGERS[name].shape)}; it must be None, since a and b are not torch.int8",
        )
        for name in ("zero_point_a", "sum_b")
    ),
    ("scaled_mm", INTEGERS | {"sum_b": None}, ValueError, "sum_b is None; it must be given where zero_point_a is"),
    ("scaled_mm", INTEGERS | {"zero_point_a": None}, ValueError, "zero_point_a is None; it must be given where sum_b"),
    *(
        ("scaled_mm", INTEGERS | {name: Spec(shape, wrong)}, TypeError, f"{name} is {wrong}; it must be torch.int32")
        for name, shape in (("zero_point_a", (3,)), ("sum_b", (8,)))
        for wrong in (torch.int64, INT8, FP32)
    ),
    *(
        (
            "scaled_mm",
            INTEGERS | {"zero_point_a": Spec(shape, torch.int32)},
            ValueError,
            f"zero_point_a is {list(shape)}; it must have one element, or be [3] or [3, 1], one element for each row "
            "of a",
        )
        for shape in ((2,), (8,), (0,), (1, 3), (3, 3), (1, 1, 1))
    ),
    *(
        (
            "scaled_mm",
            INTEGERS | {"sum_b": Spec(shape, torch.int32)},
            ValueError,
            f"sum_b is {list(shape)}; it must be [8], one element for each column of b",
        )
        for shape in ((7,), (1,), (), (1, 8), (8, 1))
    ),
    *(
        (
            "scaled_mm",
            integers | {"a": Spec((3, most + 1), INT8), "b": Spec((most + 1, 8), INT8, (1, most + 1))},
            ValueError,
            f"k is {most + 1}; it must be at most {most}, so that the sums of int8 products fit int32",
        )
        for integers, most in ((INTEGERS, 2**16), ({}, 2**17 - 1))
    ),
]
OPS = {"mm": mm, "scaled_mm": scaled_mm}


def call(op: str, arguments: dict[str, Any], device: str) -> Tensor:
    made = {name: x.on(device) if isinstance(x, Spec) else x for name, x in (RIGHT[op] | arguments).items()}
    return OPS[op](**made)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("op", "arguments", "kind", "sentence"), WRONG, ids=[f"{i}-{'-'.join(row[1])}" for i, row in enumerate(WRONG)]
)
def test_errors(where: str, op: str, arguments: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with (
        FakeTensorMode() if where == "fake" else nullcontext(),
        pytest.raises(RuntimeError if where == "cuda" else kind, match=f"^{re.escape(f'{op}: {sentence}')}"),
    ):
        call(op, arguments, "cuda" if where == "fake" else where)


@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", ["speed=9", "split", "split=", "split=two", "split=-1", "split=2;swizzle=1"])
def test_bad_options_are_named(where: str, options: str) -> None:
    with pytest.raises(
        RuntimeError if where == "cuda" else ValueError, match=rf"kernel.*'{re.escape(options)}'.* swizzle"
    ):
        call("mm", {"kernel": f"mm_bf16_bf16_any:{options}"}, where)


@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", RIGHT)
def test_devices_are_not_mixed(where: str, op: str) -> None:
    here = "cuda:0" if where == "cuda" else where
    other = "cpu" if where != "cpu" else "meta"
    more = {"bias": Spec((8,)), "out": Spec((3, 8))}
    kind = RuntimeError if where == "cuda" else ValueError
    for name, spec in {**RIGHT[op], **more}.items():
        text = f"{op}: {name} is on {other}; it must be on the device of a, {here}"
        if name == "a":
            text = f"{op}: b is on {here}; it must be on the device of a, {other}"
        with pytest.raises(kind, match=f"^{re.escape(text)}$"):
            call(op, {**more, name: spec.on(other)}, where)


def test_nothing_is_written_by_a_call_that_is_refused(device: str) -> None:
    product = make_product(5, 16, 64, OPERANDS[2], device=device)
    out, check = guarded((5, 16), BF16, device=device)
    product.rest["scale_b"] = torch.ones(7, device=device)
    with pytest.raises(RuntimeError if device == "cuda" else ValueError):
        product(out=out)
    assert bool(out.isnan().all())
    check()


@pytest.mark.gpu
def test_a_kernel_that_does_not_take_the_problem_says_so() -> None:
    a, b = Spec((9, 64)), Spec((64, 24), BF16, (1, 64))
    name = "mm_bf16_bf16_decode8"
    sentence = f"mm: kernel {name} does not take m = 9, n = 24, k = 64 of bf16 and bf16 to bf16 in layout tn"
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        call("mm", {"a": a, "b": b, "kernel": name}, "cuda")
    odd = {"a": Spec((5, 64), BF16, (65, 1)), "b": b, "kernel": name}
    with pytest.raises(RuntimeError, match=r"^mm: kernel .* in layout tn, not aligned to 16 bytes$"):
        call("mm", odd, "cuda")
    for choice in (f"{name}:split=3", f"{name}:rows=12", f"{name}x16:split=2", f"{name}x16:rows=8"):
        with pytest.raises(
            RuntimeError, match=r"^mm: kernel .* was not launched for m = 5, .*: the launch options ask"
        ):
            call("mm", {"a": Spec((5, 64)), "b": b, "kernel": choice}, "cuda")
    product = make_product(5, 24, 64, device="cuda")
    assert_same(product(kernel=name), product.exact(BF16))


# INT8


def of_int8(a: Tensor, b: Tensor, **rest: Any) -> Tensor:
    """With scales of one, in float32."""
    one = torch.ones((), device=a.device)
    return scaled_mm(a, b, one, one, out_dtype=FP32, **rest)


def test_int8_is_exact_at_the_ends_of_its_range(device: str) -> None:
    """Where sums are as large as they can be, and where int32 would overflow with one more k."""
    ends = (-128, 127)
    for x, y, zero_point in itertools.product(ends, ends, (None, *ends)):
        k = 2**17 - 1 if zero_point is None else 2**16
        a, w = torch.full((3, k), x, dtype=INT8, device=device), torch.full((8, k), y, dtype=INT8, device=device)
        rest = {}
        if zero_point is not None:
            rest["zero_point_a"] = torch.tensor(zero_point, dtype=torch.int32, device=device)
            rest["sum_b"] = w.sum(1, dtype=torch.int32)
        exact = torch.tensor(k * (x - (zero_point or 0)) * y, dtype=torch.float64, device=device)
        assert_same(of_int8(a, w.t(), **rest), exact.float().expand(3, 8))


@pytest.mark.parametrize("size", [(5, 24, 4096), (40, 72, 1000), (130, 48, 2064), (33, 65, 777)])
def test_int8_sums_are_rounded_once(device: str, size: tuple[int, int, int]) -> None:
    """To float32, after the zero point: the sums have more bits than it has."""
    for zero_point in (False, True):
        product = make_product(*size, (INT8, INT8), exact=False, bias=None, zero_point=zero_point, device=device)
        product.rest |= {"scale_a": torch.full((1,), 4.0, device=device), "scale_b": torch.ones(1, device=device)}
        a, b = product.a.cpu().long(), product.b.cpu().long()
        if zero_point:
            a = a - product.rest["zero_point_a"].cpu()[:, None]
        want = a @ b
        assert bool((want.abs() > 2**17).any())
        got = product(out_dtype=FP32)
        assert_same(got.cpu(), 4 * want.float())
        assert_same(product(out_dtype=FP32, use_fast_accum=False), got)


def test_int8_zero_points_of_every_shape(device: str) -> None:
    for m, n in ((1, 1), (1, 24), (2, 24), (40, 72)):
        product = make_product(m, n, 64, (INT8, INT8), device=device)
        points = [torch.full(shape, 3, dtype=torch.int32, device=device) for shape in ((), (1,), (1, 1))]
        for view in views_of_vector(product.rest["zero_point_a"]).values():
            points += [view, view[:, None]]
        points.append(torch.full((), -2, dtype=torch.int32, device=device).expand(m, 1))
        sums = views_of_vector(product.rest["sum_b"]).values()
        for product.rest["zero_point_a"], product.rest["sum_b"] in itertools.product(points, sums):
            assert_same(product(), product.exact(BF16))


def test_int8_of_an_asymmetric_activation(device: str) -> None:
    """Between -1 and 7 there are twice as many steps with a zero point as without one."""
    x = 8 * torch.rand(17, 256, generator=torch.Generator().manual_seed(0)) - 1
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    step_w = weight.abs().amax(1) / 127
    w = (weight / step_w[:, None]).round().to(INT8)
    low, high = x.amin(1), x.amax(1)
    step, point = (high - low) / 255, (-128 - low / ((high - low) / 255)).round().int()
    q = (x / step[:, None] + point[:, None]).round().clamp(-128, 127).to(INT8)
    w, q, step, step_w, point = (each.to(device) for each in (w, q, step, step_w, point))
    d = scaled_mm(q, w.t(), step, step_w, zero_point_a=point, sum_b=w.sum(1, dtype=torch.int32), out_dtype=FP32)
    dequantized = (w.double() * step_w[:, None]).t()
    assert relative_error(d, (q.double() - point[:, None]) * step[:, None] @ dequantized) < 1e-6
    assert relative_error(d.cpu(), x.double() @ dequantized.cpu()) < 4e-3


def test_int8_vectors_are_looked_at_as_the_others_are(device: str) -> None:
    product = make_product(4, 16, 32, (INT8, INT8), device=device)
    kind = RuntimeError if device == "cuda" else ValueError
    out = torch.zeros(4, 16, dtype=BF16, device=device)
    for name, count in (("zero_point_a", 4), ("sum_b", 16)):
        inside = out.view(torch.int32).flatten()[:count]
        with pytest.raises(kind, match=rf"^scaled_mm: out lies in the memory of {name};"):
            Product(product.a, product.b, product.rest | {name: inside})(out=out)
        elsewhere = product.rest | {name: product.rest[name].to("meta" if device == "cpu" else "cpu")}
        with pytest.raises(kind, match=rf"^scaled_mm: {name} is on (meta|cpu); it must be on the device of a, "):
            Product(product.a, product.b, elsewhere)()


# Fakes and torch.compile


@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize("types", OPERANDS)
def test_fakes_have_the_shape_dtype_and_strides_of_results(where: str, types: Any) -> None:
    for size, dtype in itertools.product([(5, 24, 64), (1, 1, 3), (0, 4, 8), (3, 0, 8), (3, 4, 0)], (None, *OUTPUT)):
        product = make_product(*size, types)
        real = product(out_dtype=dtype)
        mode = FakeTensorMode()
        move = (lambda x: x.to("meta")) if where == "meta" else mode.from_tensor
        product = Product(move(product.a), move(product.b), {name: move(x) for name, x in product.rest.items()})
        fake = product(out_dtype=dtype)
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        assert fake.device.type == ("meta" if where == "meta" else "cpu")


@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize("with_out", [False, True])
def test_compiles_once_for_every_m(device: str, types: Any, with_out: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def f(a: Tensor, b: Tensor, rest: dict[str, Tensor], out: Tensor | None) -> Tensor:
        return Product(a, b, rest)(out=out) + 1

    for m in (5, 40, 24, 64, 1, 0):  # n is 24, and k 64
        product = make_product(m, 24, 64, types, device=device)
        out = torch.empty(m, 24, dtype=BF16, device=device) if with_out else None
        assert_same(f(product.a, product.b, product.rest, out), product.exact(BF16) + 1)
        if out is not None:
            assert_same(out, product.exact(BF16))
        if m > 1:
            assert counter.frame_count == 1, f"compiled again for m = {m}"


# Every kernel by its name. Those for blocks of k are in test_gemm_blockwise.py, those named for a weight in
# test_gemm_w4.py.


NAMES = [name for name, kernel in KERNELS.items() if kernel.gemm.op in ("mm", "scaled_mm") and not kernel.gemm.scales]


def dtypes_of(kernel: Kernel) -> tuple[torch.dtype, torch.dtype]:
    fp8 = {"fp8": E4M3}
    return (fp8 | TYPES)[kernel.gemm.a], (fp8 | TYPES)[kernel.gemm.b]


def outputs_of(kernel: Kernel) -> tuple[torch.dtype, ...]:
    return (TYPES[kernel.gemm.d],) if kernel.gemm.d else OUTPUT


def make_for(kernel: Kernel, m: int, n: int, k: int, **how: Any) -> Product:
    """Operands whose lines the kernel can read; m, n and k may be odd, since only pitches must be aligned."""
    pitch = 16 // dtypes_of(kernel)[0].itemsize
    return make_product(m, n, k, dtypes_of(kernel), layout=kernel.gemm.layout, pitch=pitch, device="cuda", **how)


def as_taken(sizes: list[tuple[int, int, int, str]], tile: Decode) -> list[tuple[int, int, int, str]]:
    """At least a token, and the options that a folded tile has."""

    def options_of(options: str) -> str:
        kept = [option for option in options.split(",") if not tile.folded or not option.startswith(("split", "rows"))]
        return ",".join(kept)

    return [(max(m, 1), n, k, options_of(options)) for m, n, k, options in sizes]


def at_most(kernel: Kernel, m: int) -> int:
    """m, or as many rows as the kernel takes."""
    return min(m, kernel.tile.tokens) if isinstance(kernel.tile, Decode) else m


def sizes_of(kernel: Kernel) -> list[tuple[int, int, int, str]]:
    """m, n, k and options: one of each, tails everywhere, more tiles than multiprocessors, every way to launch."""
    tile = kernel.tile
    vector = 16 // dtypes_of(kernel)[0].itemsize
    if isinstance(tile, AnyShape):
        return [(1, 1, 1, ""), (3, 7, 5, ""), (65, 131, 67, "no_chain=1"), (130, 63, 259, ""), (1111, 1303, 77, "")]
    if isinstance(tile, Decode):
        most, many = tile.tokens, 132 * 256 + 17
        span = 8 * vector  # of whole spans of 128 bytes TMA loads a stage's at a time
        sizes = [
            (1, 1, 1, ""),
            (1, 61, 3 * vector, "split=8"),
            (most, 64, 257, "split=2,rows=8"),
            (most // 2 + 1, 333, 805, "split=4,rows=24,prefetch=64"),
            (most - 1, 200, 643, "split=8,rows=56,no_chain=1"),
            (most - 1, 131, 900, "split=1,prefetch=64"),
            (most, many, 149, "rows=40"),
            (most, many // 4, 530, "split=4,prefetch=16"),
            (min(2, most), many // 2, 661, "split=2,rows=48,no_chain=1"),
            (most - 1, 131, 5 * span, ""),
            (most // 2 + 1, 333, 11 * span, "split=2,rows=24,prefetch=64"),
            (most, many // 2, 4 * span, "rows=40,prefetch=32"),
            (most - 1, 77, 17 * span, ""),
        ]
        return as_taken(sizes, tile)
    rows, columns = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
    if tile.split:
        part = 3 * vector
        return [
            (1, 4, 7, ""),
            (rows - 1, columns + 4, tile.k + 5, "split=1"),
            (2 * rows + 5, columns - 4, 2 * part, "split=2"),
            (rows + 1, 2 * columns + 12, 6 * part, "split=3,swizzle=2,raster=1"),
            (3, 4 * columns - 8, 8 * part, "split=8,no_chain=1"),
            (3 * rows + 1, 60 * columns - 4, 4 * part, "split=4,raster=2"),
            (2**16 + 1, 8, 2 * part, "split=2"),  # more rows than a grid has blocks along y
        ]
    # TMA stores whole pieces of 16 bytes, so n is a multiple of 8 here; k and m need not be one of anything.
    return [
        (1, 8, 1 if kernel.gemm.layout == "tn" else 2, ""),  # with k = 1 every layout is "tn"
        (1, 24, vector, ""),
        (rows - 1, columns + 8, tile.k + 5, "no_chain=1"),
        (2 * rows + 5, columns - 8, 4 * tile.k - 3, ""),
        (rows + 1, 3 * columns - 8, 5 * tile.k // 2 + 1, "raster=2"),
        (3 * rows + 1, 80 * columns - 8, tile.k + 3, "swizzle=1,raster=1"),
        (5 * rows - 1, 61 * columns + 8, 19, "swizzle=8,raster=2"),
        (37 * rows + 2, 9 * columns - 24, 33, "swizzle=4,raster=1"),
    ]


def places_of(kernel: Kernel, m: int, n: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Callable[[], None]]]:
    names = ["padded"]
    if not isinstance(kernel.tile, Tile) or kernel.tile.split:  # those that don't store through TMA
        names += ["odd pitch", "column-major, padded"]
    made = outs(m, n, dtype, "cuda")
    return {name: made[name] for name in names}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernel_is_exact(name: str) -> None:
    kernel = KERNELS[name]
    for i, (m, n, k, options) in enumerate(sizes_of(kernel)):
        dtype = outputs_of(kernel)[i % len(outputs_of(kernel))]
        scales, bias = ("vectors", "vectors", "one")[i % 3], (FP32, BF16, None, FP16)[i % 4]
        product = make_for(kernel, m, n, k, scales=scales, bias=bias, zero_point=i % 5 != 1, seed=i)
        places, want = places_of(kernel, m, n, dtype), product.exact(dtype)
        check_in_every_place(product, product, want, f"{name}:{options}", f"m={m} n={n} k={k}", places)


def fp8_bound(product: Product, dtype: torch.dtype, every: int) -> Tensor:
    """Bound of the error of sums on the FP8 tensor core that are moved to float32 after `every` k.

    One instruction adds 32 products to a sum. It keeps about 14 bits: of each of the 33 it cuts off what is less than
    2**-13 of the largest (here 2**-12, for the "about"). No sum is larger than the difference of two partial sums,
    wherever summing starts, so this holds for parts of k too.
    """
    a, b, bias = product.float64()
    products = functional.pad(a[:, None] * b.t()[None], (0, -a.shape[1] % every)).unflatten(-1, (-1, every))
    sums = products.cumsum(-1)
    spread = sums.amax(-1).clamp_min(0) - sums.amin(-1).clamp_max(0)
    largest = torch.maximum(products.abs().amax(-1), spread)
    return gemm_bound(a, b, dtype, bias) + 33 * every / 32 * 2.0**-12 * largest.sum(-1)


def int8_bound(product: Product, dtype: torch.dtype) -> Tensor:
    """Bound of the error of exact sums: float32 rounds them, both products with a scale and the sum with the bias."""
    a, b, bias = product.float64()
    in_float32 = 4 * gemm_reference(a, b).abs() + 2 * gemm_reference(a, b, bias).abs()
    return gemm_bound(a, b, dtype, bias, c=0.0) + 2.0**-24 * in_float32


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernel_keeps_its_bound_and_its_bits(name: str) -> None:
    """With outliers, zeros and denormals."""
    kernel, tile = KERNELS[name], KERNELS[name].tile
    m = tile.tokens if isinstance(tile, Decode) else 141
    k = 384 if tile.splits else 417
    product = make_for(kernel, m, 208, k, exact=False)
    for dtype in outputs_of(kernel):
        out = outs(m, 208, dtype, "cuda")["padded"][0]
        options = f"{name}:split=4" if tile.splits else name
        product(out=out, kernel=options)
        reference = gemm_reference(*product.float64())
        if kernel.gemm.a == "int8":
            bound = int8_bound(product, dtype)
        elif kernel.gemm.op == "mm" or isinstance(tile, AnyShape):
            bound = gemm_bound(*product.float64()[:2], dtype, product.rest["bias"])
        else:
            every = k + -k % 32 if kernel.gemm.fast_accum else 128
            bound = fp8_bound(product, dtype, every)
        assert first_mismatches(out, reference, bound) == "", dtype
        check_bits(product, out, options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernel_error_over_a_long_k(name: str) -> None:
    kernel, tile = KERNELS[name], KERNELS[name].tile
    m, n, k = tile.tokens if isinstance(tile, Decode) else 96, 256, 4096
    product = make_for(kernel, m, n, k)
    generator = torch.Generator("cuda").manual_seed(1)
    for x in (product.a, product.b):
        values = torch.randn(x.shape, generator=generator, device="cuda")
        x.copy_(values if x.is_floating_point() else values * 2)  # small, so that no d of FP16 is infinite
    dtype = outputs_of(kernel)[0]
    if kernel.gemm.op == "mm":
        limit = {BF16: 2e-3, FP16: 3e-4, FP32: 1e-5}[dtype]
    else:
        limit = 4e-3 if kernel.gemm.fast_accum else 2e-3
    assert relative_error(product(kernel=name, out_dtype=dtype), gemm_reference(*product.float64())) <= limit


# Chains: what each kernel before wrote must be read, though this one starts before that one has ended


def check_in_every_place(
    call: Callable[..., Any],
    product: Product,
    want: Tensor,
    choice: str,
    what: str,
    places: dict[str, tuple[Tensor, Callable[[], None]]] | None = None,
) -> None:
    """Calls with every kind of `out`, of a large one with one kind: it gets what it should and nothing else changes."""
    for place, (out, check) in (places or outs(*want.shape, want.dtype, "cuda")).items():
        if want.numel() >= 2**16 and place != "padded":
            continue
        with product.unchanged():
            call(out=out, kernel=choice)
        assert first_mismatches(out, want) == "", f"{what} {choice}, {place} out, {want.dtype}"
        check()


def check_bits(call: Callable[..., Any], out: Tensor, choice: str) -> None:
    """Whether a call gives the bits that `out` has again and again."""
    first = out.clone()
    for _ in range(20):
        call(out=out.fill_(math.nan), kernel=choice)
        assert torch.equal(out, first)


def replayed(steps: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What steps() returns, run from a graph: nothing on the host keeps one kernel from the next."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = steps()
    graph.replay()
    torch.cuda.synchronize()
    return results


def with_split(kernel: Kernel, split: int) -> str:
    if isinstance(kernel.tile, Decode):
        return f"{kernel.name}:prefetch=64" + f",split={split}" * (not kernel.tile.folded)
    return f"{kernel.name}:split={split}" if isinstance(kernel.tile, Tile) and kernel.tile.split else kernel.name


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_operands_written_just_before(name: str) -> None:
    kernel = KERNELS[name]
    choice, dtype = with_split(kernel, 4), outputs_of(kernel)[0]
    sources = [make_for(kernel, at_most(kernel, 7), 264, 1024, seed=seed) for seed in range(3)]
    product = make_for(kernel, at_most(kernel, 7), 264, 1024)

    def steps() -> list[Tensor]:
        results = []
        for i in range(24):
            for to, source in zip(product.tensors(), sources[i % 3].tensors(), strict=True):
                to.copy_(source)
            results.append(product(kernel=choice, out_dtype=dtype))
        return results

    for i, result in enumerate(replayed(steps)):
        assert first_mismatches(result, sources[i % 3].exact(dtype)) == "", f"step {i}"


IN_ROWS = [name for name, kernel in KERNELS.items() if kernel.gemm.op == "mm" and kernel.gemm.layout == "tn"]


def widest_decode(types: tuple[torch.dtype, torch.dtype]) -> tuple[str, int]:
    tokens = {
        name: kernel.tile.tokens
        for name, kernel in KERNELS.items()
        if isinstance(kernel.tile, Decode) and dtypes_of(kernel) == types
    }
    return max(tokens.items(), key=lambda item: item[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "split"),
    [(name, s) for name in IN_ROWS for s in (1, 8) if s == 1 or "split=" in with_split(KERNELS[name], s)],
)
def test_weight_written_by_the_kernel_before(name: str, split: int) -> None:
    """Decode lets the next kernel start at once, and so ask for a weight that is not yet written."""
    kernel = KERNELS[name]
    types, dtype = dtypes_of(kernel), outputs_of(kernel)[0]
    writer, n = widest_decode(types)
    writers = [make_product(n, 2048, 992, types, seed=seed, device="cuda") for seed in range(2)]
    consumer = make_product(at_most(kernel, 5), n, 2048, types, device="cuda")
    consumer.a.zero_()[:, ::512] = 1  # few, so that sums of large numbers stay exact
    want = [Product(consumer.a, source.exact(types[0]).t(), consumer.rest).exact(dtype) for source in writers]
    weight = torch.empty(n, 2048, dtype=types[0], device="cuda")
    consumer.b = weight.t()

    def steps() -> list[Tensor]:
        results = []
        for i in range(24):
            writers[i % 2](out=weight, kernel=f"{writer}:split=1")
            results.append(consumer(kernel=with_split(kernel, split), out_dtype=dtype))
        return results

    for i, result in enumerate(replayed(steps)):
        assert first_mismatches(result, want[i % 2]) == "", f"step {i}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*(name for name in IN_ROWS if KERNELS[name].gemm.d != "fp32"), None])
def test_chain_through_two_buffers(name: str | None) -> None:
    """A weight that moves every column by one: after so many layers, each has moved by as many."""
    kernel, size, layers = KERNELS[name or FAMILIES["any"]], 320, 60
    x = make_operand(at_most(kernel, 7), size, dtypes_of(kernel)[0], device="cuda")
    buffers = [x.clone(), torch.empty_like(x)]
    weight = torch.eye(size, device="cuda").roll(1, 0).to(x.dtype)  # row j has its one in column j - 1

    def steps() -> list[Tensor]:
        for i in range(layers):
            out = buffers[(i + 1) % 2]
            mm(buffers[i % 2], weight.t(), out=out, kernel=with_split(kernel, 2) if name else None)
        return [buffers[layers % 2]]

    # The kernels that a plan chooses follow each other fast without a graph too.
    (result,) = replayed(steps) if name else steps()
    assert_same(result, x.roll(layers, 1))


# Streams, graphs, devices


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*(name for name in FAMILIES.values() if name in NAMES), None])
def test_stream_of_the_caller(name: str | None) -> None:
    kernel = KERNELS[name or "mm_bf16_bf16_decode8"]
    source, product = make_for(kernel, 7, 264, 512), make_for(kernel, 7, 264, 512, seed=1)
    want = source(kernel=name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the slow producer: some 10 ms
        for to, now in zip(product.tensors(), source.tensors(), strict=True):
            to.copy_(now)
        got = product(kernel=name)
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_graph_replays_on_changed_inputs(name: str) -> None:
    kernel = KERNELS[name]
    choice, dtype = with_split(kernel, 4), outputs_of(kernel)[-1]
    m = at_most(kernel, 7)
    product = make_for(kernel, m, 136, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The first call may come here: nothing has to be loaded or built before.
        got = [product(kernel=choice, out_dtype=dtype) for _ in range(3)]
    for seed in (1, 2):
        for to, source in zip(product.tensors(), make_for(kernel, m, 136, 512, seed=seed).tensors(), strict=True):
            to.copy_(source)
        for each in got:
            each.fill_(math.nan)
        graph.replay()
        for each in got:
            assert_same(each, product.exact(dtype))


FIRST_CALLS = {
    "graph": """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = f(x, w, q, s)
x.copy_(torch.roll(x, 1, 0))
graph.replay()
""",
    "compile": "got = torch.compile(f, fullgraph=True, dynamic=True)(x, w, q, s)",
}


@pytest.mark.gpu
@pytest.mark.parametrize("how", FIRST_CALLS)
def test_first_call_of_a_process(how: str) -> None:
    program = f"""
import torch
from cutegemm import mm, scaled_mm
def f(x, w, q, s):
    return mm(x, w.t()), scaled_mm(q, q.t(), s, s)
x, w = (torch.arange(64 * n, device="cuda").view(n, 64).remainder(7).bfloat16() for n in (5, 24))
q, s = w[:16].to(torch.float8_e4m3fn), torch.ones((), device="cuda")
{FIRST_CALLS[how]}
torch.cuda.synchronize()
for d, want in zip(got, f(x.cpu(), w.cpu(), q.cpu(), s.cpu())):
    assert torch.equal(d.cpu(), want)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("types", OPERANDS)
def test_another_than_the_current_device(types: Any) -> None:
    for m in (3, 200):
        product = make_product(m, 72, 64, types, device="cuda:1")
        assert_same(product(), product.exact(BF16 if is_scaled(types[0]) else types[0]))
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match=r"b is on cuda:0; it must be on the device of a, cuda:1"):
        Product(product.a, product.b.to("cuda:0"), product.rest)()


@pytest.mark.gpu
@pytest.mark.parametrize("types", OPERANDS)
@pytest.mark.parametrize(("n", "k"), [(272, 528), (1160, 176)])
def test_where_the_plan_changes_kernels(types: Any, n: int, k: int) -> None:
    scaled = is_scaled(types[0])
    a, b, d = (plan.DTYPES[dtype] for dtype in (*types, BF16 if scaled else types[0]))
    fast_accum = scaled and types[0] != INT8
    rows = plan.plan(plan.Problem("scaled_mm" if scaled else "mm", a, b, d, n, k, fast_accum=fast_accum))
    limits = [row.m_limit for row in rows if row.m_limit < plan.NO_LIMIT]
    for m in sorted({1, *limits, *(limit + 1 for limit in limits)}):
        product = make_product(m, n, k, types, device="cuda")
        assert first_mismatches(product(), product.exact(TYPES[d])) == "", f"m = {m}"
