"""Faults that were reported publicly for GEMMs of this kind; the numbers are those of the list of public cases.

Operands are small integers and scales powers of two, so that every result is exact and compared bit for bit.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_packing import awq, gptq
from torch import Tensor

from cutegemm import (
    from_awq,
    from_gptq,
    mm,
    pack_w4,
    quantize_fp8,
    scaled_mm,
    w4a16_mm,
    w4a16_mm_silu_and_mul,
    w8a16_mm,
)
from cutegemm.plan import Problem
from cutegemm.testing import assert_same, first_mismatches, gemm_reference, guarded, make_operand, padded
from cutegemm.variants import FAMILIES, KERNELS, Decode, Kernel, MixedInput, Sm80, Tile

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("one_thread")


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """a, and a weight of n rows."""
    return tuple(  # type: ignore[return-value]
        make_operand(rows, k, dtype, seed=rows, exact=True, device=device) for rows in (m, n)
    )


def powers_of_two(count: int, device: str) -> Tensor:
    return torch.arange(count, device=device).remainder(5).sub(2).float().exp2()


def product(a: Tensor, weight: Tensor, **rest: Any) -> Tensor:
    """mm, or scaled_mm with the scales of one that the test does not give, for blocks where the kernel has them."""
    if a.dtype != E4M3:
        return mm(a, weight.t(), **rest)
    (m, k), n, name = a.shape, len(weight), rest.get("kernel", "").partition(":")[0]
    shapes: tuple[tuple[int, ...], ...] = ((), ())
    if name and KERNELS[name].gemm.scales:
        columns = getattr(KERNELS[name].tile, "columns", False)
        shapes = (m, -(-k // 128)), (n if columns else -(-n // 128), -(-k // 128))
    one_a, one_b = (torch.ones(shape, device=a.device).to(torch.float8_e8m0fnu if shape else FP32) for shape in shapes)
    return scaled_mm(a, weight.t(), **{"scale_a": one_a, "scale_b": one_b, **rest})


def exact(a: Tensor, weight: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    return gemm_reference(a, weight.t()).to(dtype)


OF_WEIGHTS = [
    name
    for name, kernel in KERNELS.items()
    if isinstance(kernel.tile, (MixedInput, Sm80)) and not getattr(kernel.tile, "gated", False)
]


def with_weight(choice: str, n: int, k: int) -> tuple[Callable[..., Tensor], Tensor]:
    """The product of a kernel named for a weight with one of its kind, always the same; and that one in float64."""
    name = choice.partition(":")[0]
    gemm, rounded = KERNELS[name].gemm, getattr(KERNELS[name].tile, "rounded", False)
    generator = torch.Generator("cuda").manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device="cuda")

    if gemm.op == "w8a16_mm":
        w = integers(-4, 4, n, k)
        scale = integers(-2, 2, *((-(-n // 128), -(-k // 128)) if gemm.scales else (n, 1))).float().exp2()
        each = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] if gemm.scales else scale
        codes = w.to(E4M3 if gemm.b == "e4m3" else torch.int8)
        return lambda x, **rest: w8a16_mm(x, codes, scale, kernel=choice, **rest), w * each.double()
    size = 32 if "32" in gemm.scales else 64 if "64" in gemm.scales else 128
    q, scales = integers(0, 15, n, k), integers(-2, 2, n, -(-k // size)).float().exp2()
    minima = integers(-8, 8, *scales.shape).float() if gemm.minimum else None
    # All values are exact in 16 bits.
    stored = scales.to(half_of(name) if rounded else FP32)
    packed = pack_w4(q, stored, None if minima is None else minima.to(stored.dtype), size, minimum=gemm.minimum)
    group = torch.arange(k, device="cuda") // size
    s, z = scales.double()[:, group], 0.0 if minima is None else minima.double()[:, group]
    return lambda x, **rest: w4a16_mm(x, packed, kernel=choice, **rest), (q - (0 if gemm.minimum else 8)) * s + z


def half_of(name: str) -> torch.dtype:
    return FP16 if KERNELS[name].gemm.a == "fp16" else BF16


# 1. Dimensions of size one, and offsets beyond 32 bits


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3])
@pytest.mark.parametrize("stride", [2**31, 2**40, 3, 0])
def test_case_001_the_stride_of_a_size_one_dimension_is_free(device: str, stride: int, dtype: torch.dtype) -> None:
    for m, n, k in ((1, 24, 128), (6, 1, 128), (1, 1, 128), (1, 40, 1), (6, 24, 1)):
        a, weight = operands(m, n, k, dtype, device)

        def free(x: Tensor) -> Tensor:
            strides = [stride if size == 1 else old for size, old in zip(x.shape, x.stride(), strict=True)]
            return x.as_strided(x.shape, strides)

        assert_same(product(free(a), free(weight), out_dtype=FP32), exact(a, weight, FP32))
        out, check = guarded((m, n), FP32, device=device)
        product(a, weight, out=free(out))
        assert_same(out, exact(a, weight, FP32))
        check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("which", ["a", "weight", "out"])
@pytest.mark.parametrize("pitch", [2**30, 2**30 + 1])  # for the fast kernels, and for the one that takes every stride
def test_case_001_offsets_beyond_32_bits(which: str, dtype: torch.dtype, pitch: int) -> None:
    m, n = {"a": (3, 24), "weight": (100, 3), "out": (3, 24)}[which]
    a, weight = operands(m, n, 64, dtype, "cuda")
    want = exact(a, weight)
    far = torch.zeros(2 * pitch + 64, dtype=BF16 if which == "out" else dtype, device="cuda")
    if which == "out":
        view = far.as_strided((m, n), (pitch, 1))
        product(a, weight, out=view)
        assert_same(view, want)
    elif which == "a":
        assert_same(product(far.as_strided(a.shape, (pitch, 1)).copy_(a), weight), want)
    else:
        assert_same(product(a, far.as_strided(weight.shape, (pitch, 1)).copy_(weight)), want)


def widest_decode(dtype: str, scales: str = "") -> str:
    tokens = {
        name: kernel.tile.tokens
        for name, kernel in KERNELS.items()
        if isinstance(kernel.tile, Decode)
        and (kernel.gemm.a, kernel.gemm.b, kernel.gemm.scales) == (dtype, dtype, scales)
    }
    return max(tokens, key=tokens.__getitem__)


def is_plain(kernel: Kernel) -> bool:
    """Of BF16 or e4m3, and without an output of another form."""
    gemm = kernel.gemm
    return gemm.a == gemm.b and gemm.a in ("bf16", "e4m3") and not getattr(kernel.tile, "gated", False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [widest_decode("bf16"), widest_decode("e4m3"), widest_decode("e4m3", "block"), FAMILIES["blockwise"]]
    + [FAMILIES[family] for family in ("any", "universal", "universal_swap")],
)
def test_case_001_more_than_2_to_the_31_results(name: str) -> None:
    tile = KERNELS[name].tile
    m, n = (tile.tokens, 2**31 // tile.tokens + 264) if isinstance(tile, Decode) else (70_001, 31_000)
    a, weight = operands(m, n, 16, E4M3 if name.startswith("scaled") else BF16, "cuda")
    out = product(a, weight, kernel=name)
    across = 2**31 // n
    for row in (0, 1, across - 1, across, m - 1):
        assert_same(out[row : row + 1], exact(a[row : row + 1], weight))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [FAMILIES[family] for family in ("mixed_input", "sm80_w4", "sm80_w8")])
def test_case_001_more_than_2_to_the_31_results_with_a_weight(name: str) -> None:
    m, n = 70_001, 31_000
    product, weight = with_weight(name, n, 16)
    x = make_operand(m, 16, half_of(name), exact=True, device="cuda")
    out, across = product(x), 2**31 // n
    for row in (0, 1, across - 1, across, m - 1):
        assert_same(out[row : row + 1], (x[row : row + 1].double() @ weight.t()).to(x.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [FAMILIES[family] for family in ("mixed_input", "sm80_w4", "sm80_w8")])
@pytest.mark.parametrize("pitch", [2**30, 2**30 + 1])  # of which one is copied
def test_case_001_offsets_beyond_32_bits_with_a_weight(name: str, pitch: int) -> None:
    product, weight = with_weight(name, 24, 64)
    x = make_operand(3, 64, half_of(name), exact=True, device="cuda")
    want = (x.double() @ weight.t()).to(x.dtype)
    far = torch.zeros(2 * pitch + 64, dtype=x.dtype, device="cuda")
    assert_same(product(far.as_strided(x.shape, (pitch, 1)).copy_(x)), want)
    out = far.as_strided(want.shape, (pitch, 1))
    product(x, out=out)
    assert_same(out, want)


# 2. The leading stride of every matrix


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("padding", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize(
    ("m", "n", "k", "pitch"),
    [(512, 512, 512, 1024), (3, 384, 256, 384), (4, 384, 256, 400), (128, 384, 256, 416), (1, 67, 33, 77)],
)
def test_case_002_padded_matrices(
    device: str, m: int, n: int, k: int, pitch: int, padding: tuple[bool, bool, bool], dtype: torch.dtype
) -> None:
    a, weight = operands(m, n, k, dtype, device)
    want = {out_dtype: exact(a, weight, out_dtype) for out_dtype in (BF16, FP16, FP32)}
    if padding[0]:
        a = padded(a, pitch, fill=math.nan)
    if padding[1]:
        weight = padded(weight, pitch, fill=math.nan)
    for out_dtype, expected in want.items():
        out, check = guarded((m, n), out_dtype, device=device, pitch=max(pitch, n) if padding[2] else None)
        product(a, weight, out=out)
        assert_same(out, expected)
        check()


# 3. Scales and bias are not read beyond their ends


def at_the_end(x: Tensor) -> Tensor:
    """x as the last elements of an allocation of its own (on CUDA: mapped in pieces of 2 MB)."""
    buffer = torch.empty(2**25 // x.element_size(), dtype=x.dtype, device=x.device)
    return buffer[len(buffer) - x.numel() :].view(x.shape).copy_(x)


@pytest.mark.parametrize("m", [1, 7, 65, 127, 129])
@pytest.mark.parametrize("n", [1, 8, 72, 136])
def test_case_003_scales_of_a_partial_tile(device: str, m: int, n: int) -> None:
    a, weight = operands(m, n, 64, E4M3, device)
    scale_a, scale_b = at_the_end(powers_of_two(m, device)), at_the_end(powers_of_two(n, device))
    bias = at_the_end(torch.arange(float(n), device=device))
    want = gemm_reference(a.double() * scale_a[:, None], weight.double().t() * scale_b, bias).to(BF16)
    for shapes in (((m, 1), (1, n)), ((m,), (n, 1))):
        assert_same(
            product(a, weight, scale_a=scale_a.view(shapes[0]), scale_b=scale_b.view(shapes[1]), bias=bias), want
        )


@pytest.mark.gpu
def test_case_003_as_it_was_reported() -> None:
    m, n, k = 8352, 1536, 4096
    a, weight = operands(m, n, k, E4M3, "cuda")
    scale_a, scale_b = at_the_end(powers_of_two(m, "cuda")), at_the_end(powers_of_two(n, "cuda"))
    want = exact(a, weight, FP32) * scale_a[:, None] * scale_b
    names = [
        name
        for name, kernel in KERNELS.items()
        if Problem("scaled_mm", "e4m3", "e4m3", "bf16", n, k, fast_accum=True).takes(kernel, m)
    ]
    assert len(names) > 5
    for name in names:
        got = product(a, weight, scale_a=scale_a[:, None], scale_b=scale_b[None], kernel=name)
        assert first_mismatches(got, want.to(BF16)) == "", name


# 5. A vector of scales is never cut to its first


def test_case_005_a_row_has_its_own_scale_or_the_call_is_refused(device: str) -> None:
    a, weight = operands(4, 64, 64, E4M3, device)
    values = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)
    alone = torch.cat([product(a[i : i + 1], weight, scale_a=values[i]) for i in range(4)])
    assert_same(product(a, weight, scale_a=values), alone)
    for wrong in (values[:3], values[:2, None], torch.ones(64, device=device)):
        with pytest.raises((ValueError, RuntimeError), match=r"scaled_mm: scale_a is .*; it must have one element, or"):
            product(a, weight, scale_a=wrong)
    x = make_operand(4, 64, device=device)
    with pytest.raises((ValueError, RuntimeError), match=r"scale is \[4\]; for granularity 'tensor' it must have one"):
        quantize_fp8(x, values)


# 6. Scales of one element mean the same in every shape

ONE_ELEMENT = [(), (1,), (1, 1)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("shape_a", "shape_b"), list(itertools.product(ONE_ELEMENT, repeat=2)))
def test_case_006_scales_of_one_element(device: str, shape_a: Any, shape_b: Any, compiled: bool) -> None:
    f: Callable[..., Tensor] = scaled_mm
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(scaled_mm, backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True)
    one_a, one_b = torch.full(shape_a, 4.0, device=device), torch.full(shape_b, 0.5, device=device)
    for m in (1, 23773):
        a, weight = operands(m, 8, 16, E4M3, device)
        rows, columns = powers_of_two(m, device), powers_of_two(8, device)
        want = exact(a, weight, FP32)
        assert_same(f(a, weight.t(), one_a, one_b), (want * 2).to(BF16))
        if not compiled:
            assert_same(f(a, weight.t(), one_a, columns), (want * 4 * columns).to(BF16))
            assert_same(f(a, weight.t(), rows[:, None], one_b), (want * rows[:, None] / 2).to(BF16))


def test_case_006_with_one_row_both_readings_agree(device: str) -> None:
    a, weight = operands(1, 24, 64, E4M3, device)
    results = [product(a, weight, scale_a=torch.full(shape, 0.37, device=device)) for shape in ONE_ELEMENT]
    several = torch.full((3, 1), 0.37, device=device)
    results += [product(a.expand(3, 64), weight, scale_a=several)[:1]]
    for result in results:
        assert torch.equal(result, results[0])


# 7. A dtype that is left out, or wrong, is named


def test_case_007_out_dtype(device: str) -> None:
    for dtype, default in ((E4M3, BF16), (BF16, BF16), (FP16, FP16)):
        a, weight = operands(3, 8, 16, dtype, device)
        assert product(a, weight).dtype == default
        assert product(a, weight, out_dtype=None).dtype == default
        op = "scaled_mm" if dtype == E4M3 else "mm"
        for wrong in (torch.float64, torch.int8, E4M3):
            sentence = f"{op}: out_dtype is {wrong}; it must be torch.bfloat16, torch.float16 or torch.float32"
            with pytest.raises((TypeError, RuntimeError), match=f"^{re.escape(sentence)}$"):
                product(a, weight, out_dtype=wrong)


# 9. The bias is added once, however k is cut


def cut_kernels() -> list[tuple[str, int]]:
    """Every kernel that can cut k, with the parts, and one of each other kind."""
    cases = []
    for name, kernel in KERNELS.items():
        if is_plain(kernel) and kernel.gemm.layout == "tn" and kernel.gemm.d in ("", "bf16"):
            cases += [(name, split) for split in ((1, 2, 4, 8) if kernel.tile.splits else (0,))]
    return cases


def check_bias(m: int, n: int, k: int, dtype: torch.dtype, device: str, **options: Any) -> None:
    a, weight = torch.zeros(m, k, device=device).to(dtype), torch.zeros(n, k, device=device).to(dtype)
    bias = torch.arange(float(n), device=device)
    expected = bias.to(BF16).expand(m, n)
    assert_same(product(a, weight, bias=bias, out_dtype=BF16, **options), expected)
    a[:, ::1024], weight[:, ::1024] = 1.0, 1.0  # in every part of k
    assert_same(product(a, weight, bias=bias, out_dtype=BF16, **options), (bias + k // 1024).to(BF16).expand(m, n))


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 16384), (3, 24, 8192), (1, 1, 2048)])
def test_case_009_bias(device: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    check_bias(m, n, k, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "split"), cut_kernels())
def test_case_009_bias_with_parts_of_k(name: str, split: int) -> None:
    kernel = KERNELS[name]
    tile = kernel.tile
    dtype = E4M3 if kernel.gemm.a == "e4m3" else BF16
    m = tile.tokens if isinstance(tile, Decode) else 128
    check_bias(m, 256, 16384, dtype, "cuda", kernel=f"{name}:split={split}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_case_009_bias_with_parts_of_k_and_a_weight(name: str) -> None:
    n, k = 256, 16384
    bias = torch.arange(float(n), device="cuda")
    for split in (1, 2, 4, 8) if KERNELS[name].tile.splits else (0,):
        product, weight = with_weight(f"{name}:split={split}", n, k)
        for m in (1, 16, 128):
            x = torch.zeros(m, k, dtype=half_of(name), device="cuda")
            assert_same(product(x, bias=bias, out_dtype=BF16), bias.to(BF16).expand(m, n))
            x[:, ::1024] = 1.0  # in every part of k
            want = x.double() @ weight.t() + bias
            assert_same(product(x, bias=bias, out_dtype=BF16), want.to(BF16))


# 14 to 22. Weights of four bits

GROUPS_OF_128 = [
    name
    for name, kernel in KERNELS.items()
    if kernel.gemm.scales == "group128" and not getattr(kernel.tile, "gated", False)
]


def codes(n: int, k: int, groups: int, device: str, zeros: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """q (n, k), and scales, powers of two, and zero points (n, groups) from 1 to 15."""
    generator = torch.Generator().manual_seed(n + k)
    q = torch.randint(0, 16, (n, k), generator=generator)
    scales = torch.randint(-2, 3, (n, groups), generator=generator).float().exp2()
    points = torch.randint(1, 16, (n, groups), generator=generator) if zeros else torch.full((n, groups), 8)
    return q.to(device), scales.half().to(device), points.to(device)


def values(q: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    group = torch.arange(q.shape[1], device=q.device) // group_size
    return (q - zeros.double()[:, group]) * scales.double()[:, group]


@pytest.mark.parametrize(
    ("where", "name"), [("cpu", None), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in GROUPS_OF_128)]
)
def test_case_014_more_groups_than_columns_in_a_group(where: str, name: str | None) -> None:
    n, k = 256, 28672
    q, scales, zeros = codes(n, k, k // 128, where)
    dtype = FP16 if name and KERNELS[name].gemm.a == "fp16" else BF16
    w = pack_w4(q, scales.to(dtype), zeros, 128)
    want = values(q, scales, zeros, 128).t()
    x = torch.zeros(k // 128, k, dtype=dtype, device=where)
    at = torch.arange(k // 128, device=where)
    columns = at * 128 + 37 * at % 128
    x[at, columns] = 1.0  # a row for each group
    assert_same(w4a16_mm(x, w, out_dtype=FP32, kernel=name), want[columns].float())
    x = make_operand(16, k, dtype, exact=True, device=where)
    assert_same(w4a16_mm(x, w, out_dtype=FP32, kernel=name), (x.double() @ want).float())


def test_case_015_zero_points_of_both_versions(device: str) -> None:
    q, scales, zeros = codes(24, 128, 2, "cpu")
    for points in (zeros, torch.full_like(zeros, 8)):  # of a symmetric checkpoint 7 is stored, or 8
        weights = []
        for version in (1, 2):
            checkpoint = gptq(q, scales, points, version)
            weights.append(from_gptq(**checkpoint, group_size=64, version=version).to(device))
        x = make_operand(5, 128, FP16, exact=True, device=device)
        want = x.double() @ values(q, scales, points, 64).t().to(device)
        for w in weights:
            assert_same(w4a16_mm(x, w), want.half())
    mistaken = from_gptq(**gptq(q, scales, zeros, 2), group_size=64, version=1).to(device)  # off by one, and no more
    off = x.double() @ values(q, scales, zeros + 1, 64).t().to(device)
    assert_same(w4a16_mm(x, mistaken), off.half())
    sixteen = gptq(q, scales, torch.full_like(zeros, 16), 1)  # 15 is stored
    want = x.double() @ values(q, scales, torch.full_like(zeros, 16), 64).t().to(device)
    assert_same(w4a16_mm(x, from_gptq(**sixteen, group_size=64, version=1).to(device)), want.half())


@pytest.mark.parametrize("n", [64, 192, 320, 8, 72])
def test_case_017_n_that_is_no_multiple_of_128(device: str, n: int) -> None:
    k = 128
    q, _, zeros = codes(n, k, 2, "cpu")
    scales = torch.randn(n, 2, generator=torch.Generator().manual_seed(n)).half()
    w = from_awq(**awq(q, scales, zeros), group_size=64).to(device)
    want = values(q, scales, zeros, 64).float().t().to(device)
    identity = torch.eye(k, dtype=FP16, device=device)
    assert_same(w4a16_mm(identity, w, out_dtype=FP32), want)
    assert_same(w4a16_mm(identity, w), want.half())
    if device == "cuda":
        for split in (1, 2, 4, 8):
            for tile in ("128x64", "64x32", "sm80_64x16", "sm80_128x128"):
                name = f"w4a16_mm_fp16_int4_group64_{tile}:split={split}"
                assert_same(w4a16_mm(identity, w, kernel=name), want.half())


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_case_018_group_sizes(device: str, group_size: int) -> None:
    n, k = 40, 4096
    size = k if group_size == -1 else group_size
    q, scales, zeros = codes(n, k, k // size, device)
    x = make_operand(7, k, exact=True, device=device)
    want = x.double() @ values(q, scales, zeros, size).t()
    assert_same(w4a16_mm(x, pack_w4(q, scales, zeros, group_size), out_dtype=FP32), want.float())


def test_case_018_a_group_size_that_is_none_is_refused() -> None:
    q, scales, zeros = codes(8, 2752, 8, "cpu")
    with pytest.raises(ValueError, match=r"^pack_w4: group_size is 344; it must be 32, 64, 128, 256 or -1"):
        pack_w4(q, scales, zeros, 344)
    with pytest.raises(
        ValueError, match=r"^pack_w4: scales is \[8, 8\]; with a k of 2752 in groups of 128 it must be \[8, 22\]"
    ):
        pack_w4(q, scales, zeros, 128)
    checkpoint = gptq(q, scales, zeros, 2)
    with pytest.raises(
        ValueError, match=r"^from_gptq: scales is \[8, 8\]; with a k of 2752 in groups of 128 it must be"
    ):
        from_gptq(**checkpoint, group_size=128, version=2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_case_019_the_same_bits_every_call(name: str) -> None:
    for m, n, k in ((16, 256, 512), (33, 1000, 1040)):
        x = make_operand(m, k, half_of(name), device="cuda")
        for split in (1, 4) if KERNELS[name].tile.splits else (0,):
            product, _ = with_weight(f"{name}:split={split}", n, k)
            first = product(x)
            for _ in range(50):
                assert torch.equal(product(x), first)


@pytest.mark.parametrize("form", ["four bits", "eight bits"])
def test_case_021_partial_sums_beyond_fp16(device: str, form: str) -> None:
    n, k = 40, 4096
    x = torch.full((7, k), 64.0, dtype=FP16, device=device)
    q = torch.full((n, k), 15, dtype=torch.uint8, device=device)
    q[:, k // 2 :] = 1
    q[:, -1] = 2  # the sum is one scale of 64, and halves of it are beyond 65504
    bias = torch.ones(n, device=device)
    if form == "four bits":
        got = w4a16_mm(x, pack_w4(q, torch.ones(n, k // 128, dtype=FP16, device=device), group_size=128), bias)
    else:
        got = w8a16_mm(x, q.to(torch.int8) - 8, torch.ones(1, device=device), bias)
    assert_same(got, torch.full((7, n), 65.0, dtype=FP16, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in OF_WEIGHTS if KERNELS[name].tile.splits])
def test_case_021_parts_of_k_are_added_in_float32(name: str) -> None:
    """Rounding to BF16 happens once, however many parts there are."""
    m, n, k = 64, 256, 14336
    x = torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(half_of(name))
    for split in (1, 2, 4, 8):
        product, weight = with_weight(f"{name}:split={split}", n, k)
        want = x.double() @ weight.t()
        # Of values with minima what is added, a code and its minimum each, is larger than they are.
        bound = 2.0**-8 * want.abs() + k * 2.0**-24 * (x.double().abs() @ (weight.abs() + 64).t())
        assert first_mismatches(product(x, out_dtype=BF16), want, bound) == "", split


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["planned", "gated", "act-order", "strided x", "eight bits"])
@pytest.mark.parametrize("m", [16, 300])
def test_case_022_on_the_stream_of_the_caller(m: int, form: str) -> None:
    n, k = 256, 512
    q, scales, zeros = codes(n, k, 4, "cuda")
    order = torch.arange(k)[torch.randperm(k, generator=torch.Generator().manual_seed(0))] // 128
    w = pack_w4(q, scales, zeros, 128, g_idx=order.int().cuda() if form == "act-order" else None)
    eight = (q - 8).to(torch.int8)

    def product(x: Tensor) -> Tensor:
        if form == "eight bits":
            return w8a16_mm(x, eight, torch.ones(1, device="cuda"))
        return w4a16_mm_silu_and_mul(x, w) if form == "gated" else w4a16_mm(x, w)

    source = make_operand(m, k, FP16, exact=True, device="cuda")
    x = torch.full((m, 2 * k), math.nan, dtype=FP16, device="cuda")[:, :: 2 if form == "strided x" else 1][:, :k]
    want = product(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # the slow producer: some 50 ms
        x.copy_(source)
        got = product(x)
    stream.synchronize()
    assert_same(got, want)


# 57. Two streams at once


def check_two_streams(products: list[Callable[[], Tensor]], want: list[Tensor]) -> None:
    wrong = torch.zeros(2, device="cuda", dtype=torch.int64)
    graphs = [torch.cuda.CUDAGraph() for _ in products]

    def calls(i: int, count: int) -> None:
        results = [products[i]() for _ in range(count)]
        for result in results:
            wrong[i] += (result != want[i]).sum()

    for i, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            calls(i, 50)
    streams = [torch.cuda.Stream() for _ in products]
    torch.cuda.synchronize()
    for _ in range(40):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    for _ in range(10):  # a replay beside eager calls
        with torch.cuda.stream(streams[0]):
            graphs[0].replay()
        with torch.cuda.stream(streams[1]):
            calls(1, 5)
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kernel in KERNELS.items()
        if is_plain(kernel) and (kernel.tile.splits or not isinstance(kernel.tile, Tile))
    ],
)
def test_case_057_two_streams_at_once(name: str) -> None:
    kernel = KERNELS[name]
    choice = f"{name}:split=4" if kernel.tile.splits else name
    dtype = E4M3 if kernel.gemm.a == "e4m3" else BF16
    most = kernel.tile.tokens if isinstance(kernel.tile, Decode) else 8
    inputs = [operands(m, 264, 1024, dtype, "cuda") for m in (min(most, 7), min(most, 8))]
    products = [lambda each=each: product(*each, kernel=choice) for each in inputs]
    check_two_streams(products, [exact(*each) for each in inputs])


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_case_057_two_streams_at_once_with_a_weight(name: str) -> None:
    product, weight = with_weight(f"{name}:split=4" if KERNELS[name].tile.splits else name, 264, 1024)
    inputs = [make_operand(m, 1024, half_of(name), seed=m, exact=True, device="cuda") for m in (7, 8)]
    want = [(x.double() @ weight.t()).to(x.dtype) for x in inputs]
    check_two_streams([lambda x=x: product(x) for x in inputs], want)
