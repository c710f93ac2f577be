"""quantize_fp8 against e4m3 built by hand; with `device`, the same expectations hold on CUDA."""

import bisect
import math
import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cutegemm.quantize import AMAX_FLOOR, dequantize_fp8, quantize_fp8
from cutegemm.testing import make_operand, misaligned, padded

E4M3 = torch.float8_e4m3fn
GRANULARITIES = ["tensor", "token", "channel"]

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


def expected(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Codes and one scale a row (a tensor's repeated), from double arithmetic and `nearest_code`.

    A quotient of two float32 that was rounded to float64 first rounds to the same float32.
    """
    rows = x.cpu().double().reshape(-1, x.shape[-1])
    amax = torch.tensor([amax_of_row(row) for row in rows], dtype=torch.float64)
    if granularity == "tensor":
        amax = amax.max().expand(len(rows)) if len(rows) else amax
    scale = (amax.clamp_min(AMAX_FLOOR) / 448).float()
    quotient = (rows / scale.double()[:, None]).float()
    q = torch.tensor([nearest_code(y) for y in quotient.flatten().tolist()], dtype=torch.uint8)
    return q.view(x.shape), scale


def check(x: Tensor, granularity: str) -> None:
    before = x.clone()
    q, scale = quantize_fp8(x, granularity=granularity)
    want_q, want_scale = expected(x, granularity)
    leading = x.shape[:-1]
    assert scale.shape == {"tensor": (), "token": (*leading, 1), "channel": leading}[granularity]
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    assert torch.equal(codes(q), want_q)
    assert torch.equal(
        scale.cpu().expand(leading).flatten() if granularity == "tensor" else scale.cpu().flatten(),
        want_scale,
    )
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
    step = torch.maximum(x.abs().double() * 2**-4, 2**-10 * scale.double().reshape(-1, 1))
    assert bool(((dequantize_fp8(q, scale).double() - x).abs() <= step * (1 + 1e-6)).all())


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
    if granularity != "tensor":
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
    q, scale = quantize_fp8(torch.empty(shape, device=device), granularity=granularity)
    assert q.shape == shape
    assert bool((scale == torch.tensor(AMAX_FLOOR / 448)).all())
    check(make_operand(3, 5).to(device), granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [65535, 65536, 262141])
def test_case_025_many_rows(device: str, rows: int, granularity: str) -> None:
    x = make_operand(rows, 16, device=device)
    q, scale = quantize_fp8(x, granularity=granularity)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        if granularity == "tensor":
            want = codes(quantize_fp8(x[part], scale)[0])
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
    ((torch.ones(4, 8), None, "row"), "granularity is 'row'; it must be 'tensor', 'token' or 'channel'"),
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
    kind = RuntimeError if device == "cuda" else TypeError if " is torch." in sentence else ValueError
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
    with pytest.raises(ValueError, match=r"scale is \[3\]; it must have one element or one for each row of q"):
        dequantize_fp8(q, torch.ones(3))


# torch.compile, CUDA graphs, streams and memory


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_compiles_with_dynamic_shapes(device: str, granularity: str) -> None:
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
