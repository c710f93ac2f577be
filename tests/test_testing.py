"""The instruments themselves: input makers, guards, error measures, timing."""

import math

import pytest
import torch
from torch import Tensor

from cutegemm import testing

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_operand_has_outliers_zeros_and_denormals(dtype: torch.dtype) -> None:
    x = testing.make_operand(40, 300, dtype).double()
    smallest = torch.finfo(dtype).smallest_normal
    assert bool(x.isfinite().all())
    assert float(x.abs().max()) > 100
    assert float(x.abs().median()) < 1
    assert not x[1].any()
    assert x[2].any()
    assert float(x[2].abs().max()) < smallest
    assert torch.equal(x, testing.make_operand(40, 300, dtype).double())
    assert not torch.equal(x, testing.make_operand(40, 300, dtype, seed=1).double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_operands_multiply_exactly(dtype: torch.dtype) -> None:
    a = testing.make_operand(3, 999, dtype, exact=True).float()
    b = testing.make_operand(999, 5, dtype, seed=1, exact=True).float()
    assert torch.equal((a @ b).double(), testing.gemm_reference(a, b))
    assert sorted(set(a.flatten().tolist())) == list(range(-4, 5))


def test_integer_operands_have_the_whole_range_and_no_nan_between_their_rows() -> None:
    x = testing.make_operand(40, 300, torch.int8)
    assert (int(x.min()), int(x.max())) == (-128, 127)
    assert not x[1].any() and x[0].any() and x[2].any()
    assert testing.make_operand(3, 300, torch.int8)[1].any()
    gap = testing.padded(x, 304, fill=math.nan).as_strided((40, 4), (304, 1), 300)
    assert bool((gap == 127).all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_views(dtype: torch.dtype) -> None:
    x = torch.arange(12, dtype=torch.float32).view(3, 4).to(dtype)
    view = testing.padded(x, 7)
    assert view.stride() == (7, 1)
    assert torch.equal(view.float(), x.float())
    gap = view.as_strided((3, 3), (7, 1), 4).float()
    assert bool((gap >= 255).all())
    moved = testing.misaligned(x, 3)
    assert torch.equal(moved.float(), x.float())
    assert moved.storage_offset() == 3
    with pytest.raises(ValueError, match="pitch is 3; it must be at least 4"):
        testing.padded(x, 3)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
@pytest.mark.parametrize(("shape", "pitch"), [((), None), ((5,), None), ((3, 4), 6), ((2, 3, 4), 7), ((0, 4), 6)])
def test_guards(dtype: torch.dtype, shape: tuple[int, ...], pitch: int | None) -> None:
    x, check = testing.guarded(shape, dtype, pitch=pitch)
    assert x.shape == shape
    assert bool((x.float().isnan() if dtype.is_floating_point else x == -1).all())
    x.copy_(torch.zeros(shape))
    check()
    size, start = dtype.itemsize, x.storage_offset()
    outside = [start - 1, start + (x.numel() if pitch is None else math.prod(shape[:-1]) * pitch)]
    if pitch and x.numel():
        outside.append(start + shape[-1])
    for i in outside:
        raw = x.as_strided((1,), (1,), i)
        before = raw.clone()
        raw.zero_()
        with pytest.raises(AssertionError, match=rf"^{size} guard bytes were written, \[{(i - start) * size}"):
            check()
        raw.copy_(before)
        check()


def test_relative_error() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert testing.relative_error(reference, reference) == 0
    assert testing.relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert math.isnan(testing.relative_error(torch.tensor([math.nan, 4.0]), reference))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gemm_bound_holds_for_rounding_and_for_nothing_larger(dtype: torch.dtype) -> None:
    a, b, bias = testing.make_operand(9, 257), testing.make_operand(257, 33, seed=1), torch.arange(33.0)
    out = (a.float() @ b.float() + bias).to(dtype)
    testing.assert_gemm(out, a, b, bias)
    off = out.clone()
    bound = testing.gemm_bound(a, b, dtype, bias)[4, 7]
    off[4, 7] = (testing.gemm_reference(a, b, bias)[4, 7] + 3 * bound).to(dtype)
    with pytest.raises(AssertionError, match=r"1 of 297 elements are wrong\n  \[4, 7\]: "):
        testing.assert_gemm(off, a, b, bias)


def test_first_mismatches() -> None:
    reference = torch.zeros(3, 4)
    reference[0, 0] = math.nan
    out = reference.clone()
    assert testing.first_mismatches(out, reference) == ""
    out[1:] = 1.5
    lines = testing.first_mismatches(out, reference, 1.0).splitlines()
    assert lines[0] == "8 of 12 elements are wrong"
    assert lines[1] == "  [1, 0]: 1.5 must be 0 within 1"
    assert len(lines) == 6
    assert testing.first_mismatches(out, reference, 2.0) == ""
    assert testing.first_mismatches(out[0], reference) == "shape is [4] and must be [3, 4]"
    out[0, 1] = math.nan
    assert "nan must be 0" in testing.first_mismatches(out, reference, torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"dtype is torch.float16 and must be torch.float32"):
        testing.assert_same(reference.half(), reference)


def test_host_time() -> None:
    calls = []
    assert testing.host_time(lambda: calls.append(None), calls=1000) > 0
    assert len(calls) == 1100


@pytest.mark.gpu
def test_poison() -> None:
    living = [torch.zeros(5000, device="cuda") for _ in range(40)]
    del living[::2]  # leaves room between tensors
    for sizes in ([5000] * 30, [100] * 4, [100_000], [10_000_000]):
        testing.poison()
        made = [torch.empty(size, device="cuda") for size in sizes]
        assert all(bool(x.cpu().isnan().all()) for x in made)  # on the CPU, since results need memory too
    assert all(int(x.count_nonzero()) == 0 for x in living)


@pytest.mark.gpu
def test_time_interleaved() -> None:
    def copies(n: int) -> list:
        sets = testing.input_sets(2 * n)
        assert sets * 2 * n > 3 * torch.cuda.get_device_properties(0).L2_cache_size or sets == 256

        def call(x: Tensor, y: Tensor):
            return lambda: y.copy_(x)

        return [call(torch.randn(n // 4, device="cuda"), torch.empty(n // 4, device="cuda")) for _ in range(sets)]

    n = 64 << 20
    times = testing.time_interleaved({"one": copies(n), "again": copies(n), "half": copies(n // 2)})
    # A copy of 64 MiB moves 128 MiB: 28 µs at 4.8 TB/s.
    assert 20 < times["one"] < 100
    assert times["again"] == pytest.approx(times["one"], rel=0.05)
    assert times["half"] == pytest.approx(times["one"] / 2, rel=0.25)
