"""Packed four-bit weights, against layouts, formats and values written out in plain Python."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from cutegemm import (
    W4Weight,
    dequantize_w4,
    from_awq,
    from_compressed_tensors,
    from_gguf,
    from_gptq,
    pack_w4,
    packing,
    quantize_w4,
    unpack_w4,
)
from cutegemm.testing import make_operand, misaligned, padded

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = ["symmetric", "zero points", "minimum"]
SIZES = [32, 64, 128, 256, -1]
SHAPES = [(1, 1), (5, 33), (16, 64), (64, 128), (65, 65), (17, 96), (3, 511), (130, 200), (2, 576)]


def made(form: str, n: int, k: int, group_size: int, dtype: torch.dtype = BF16, seed: int = 0) -> dict[str, Any]:
    """Arguments of pack_w4. No two scales are equal."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // (max(k, 1) if group_size == -1 else group_size))
    q = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, groups, generator=generator) + 0.5) * (torch.rand(n, 1, generator=generator) - 0.5) / 8
    zeros = None
    if form == "zero points":
        zeros = torch.randint(0, 17, (n, groups), generator=generator).to(dtype)
    if form == "minimum":
        zeros = torch.randn(n, groups, generator=generator).to(dtype)
    given = {"q": q, "scales": scales.to(dtype), "zeros": zeros, "group_size": group_size}
    return {**given, "minimum": form == "minimum"}


def shuffled_groups(k: int, group_size: int, seed: int = 0) -> Tensor:
    """A g_idx of act-order: each column's group, in no order."""
    return (torch.arange(k) // group_size)[torch.randperm(k, generator=torch.Generator().manual_seed(seed))].int()


def values(q: Tensor, scales: Tensor, zeros: Tensor | None, group: Tensor, minimum: bool) -> Tensor:
    """The formulas in float32, with the group of each column given. Of 16-bit scales, products are exact."""
    s, z = scales.float()[:, group], 8.0 if zeros is None else zeros.float()[:, group]
    return q * s + z if minimum else (q - z) * s


def assert_same(one: W4Weight, other: W4Weight) -> None:
    """Bit for bit, and nothing more or less."""
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor.cpu(), second[name].cpu()), name


def assert_equal(one: Tensor | None, other: Tensor | None) -> None:
    if one is None or other is None:
        assert one is other is None
    else:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def repacked(w: W4Weight) -> W4Weight:
    return pack_w4(*unpack_w4(w), w.group_size, g_idx=w.g_idx, minimum=w.minimum)


# The layout


def fragment_of_a() -> dict[tuple[int, int], tuple[int, int, int]]:
    """Who holds A's element (row, column) in mma.m16n8k16, of 16-bit types: (lane, register, half).

    PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": of lane's a0 to a7,
    row = groupID for a0, a1, a4, a5, else groupID + 8; column = 2 * threadID_in_group + (i & 1), + 8 for i >= 4.
    """
    where = {}
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(8):
            row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
            column = 2 * thread + (i & 1) + (8 if i >= 4 else 0)
            where[row, column] = lane, i // 2, i % 2
    return where


def codes_of(w: W4Weight) -> Tensor:
    """packed, read element by element: (n', k')."""
    where, packed = fragment_of_a(), w.packed.tolist()
    tiles, loads = w.packed.shape[:2]
    rows = []
    for row in range(16 * tiles):
        codes = []
        for column in range(64 * loads):
            lane, register, half = where[row % 16, column % 16]
            word = packed[row // 16][column // 64][lane][column % 64 // 16]
            pair = (word >> 4 * register) & 0x000F000F
            codes.append(pair >> 16 * half & 0xFFFF)
        rows.append(codes)
    return torch.tensor(rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(5, 33), (64, 64), (37, 130), (70, 192)])
def test_packed_holds_fragments(n: int, k: int, form: str) -> None:
    given = made(form, n, k, 64)
    w = pack_w4(**given)
    n_padded, k_padded = -(-n // 64) * 64, -(-k // 64) * 64
    assert w.packed.shape == (n_padded // 16, k_padded // 64, 32, 4)
    assert torch.equal(codes_of(w)[:n, :k], given["q"].long())
    for name in ("scales",) if form == "symmetric" else ("scales", "zeros"):
        stored = getattr(w, name)
        assert stored.shape == (n_padded // 16, w.groups, 16)
        for row in range(n_padded):
            for group in range(w.groups):
                want = given[name][row, group].item() if row < n else 0
                assert stored[row // 16, group, row % 16].item() == want


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k", "group_size"), [(5, 33, 32), (67, 96, 32), (3, 64, -1), (64, 200, 128)])
def test_padding_stands_for_zero(n: int, k: int, group_size: int, form: str) -> None:
    given = made(form, n, k, group_size)
    scales, zeros = given["scales"], given["zeros"]
    if form == "minimum":
        scales[0, -1], zeros[0, -1] = 0, 1  # all codes are as far from 0: the first
    codes = codes_of(w := pack_w4(**given))
    rows = torch.arange(len(codes))
    for stored in (w.scales, w.zeros):
        if stored is not None:
            assert (stored[rows // 16, :, rows % 16][n:] == 0).all()
    assert (codes[n:] == (8 if form == "symmetric" else 0)).all()
    for row in range(n):
        s, z = scales[row, -1].item(), 8 if zeros is None else zeros[row, -1].item()
        distances = [abs(code * s + z if form == "minimum" else (code - z) * s) for code in range(16)]
        past_k = set(codes[row, k:].tolist())
        assert past_k <= {distances.index(min(distances))}
        assert form != "zero points" or past_k <= {min(int(z), 15)}


def test_bytes() -> None:
    w = pack_w4(**made("zero points", 100, 300, 128))
    assert w.packed.nbytes == 128 * 320 // 2
    assert w.nbytes == 128 * 320 // 2 + 2 * 128 * 3 * 2
    ordered = pack_w4(**made("symmetric", 64, 64, 32), g_idx=shuffled_groups(64, 32))
    assert ordered.nbytes == 64 * 64 // 2 + 64 * 2 * 2 + 64 * 4


# Values


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_code_and_zero_point(dtype: torch.dtype) -> None:
    q = torch.arange(16).expand(17, 16)
    scales = torch.tensor([[0.37 * (z + 1)] for z in range(17)]).to(dtype)
    zeros = torch.arange(17)[:, None]
    for zeros_given in (zeros, zeros.to(torch.uint8), zeros.to(BF16), zeros.to(FP16), zeros.float()):
        w = pack_w4(q, scales, zeros_given, 32)
        assert w.zeros is not None
        assert w.zeros.dtype == dtype
        got = dequantize_w4(w, torch.float64).tolist()
        assert got == [[(code - z) * scales[z].item() for code in range(16)] for z in range(17)]
    symmetric = dequantize_w4(pack_w4(q, scales, None, 32), torch.float64)
    assert torch.equal(symmetric, dequantize_w4(pack_w4(q, scales, torch.full_like(zeros, 8), 32), torch.float64))
    assert symmetric.tolist() == [[(code - 8) * scales[z].item() for code in range(16)] for z in range(17)]
    least = scales * -3
    minimum = dequantize_w4(pack_w4(q, scales, least, 32, minimum=True), torch.float64).tolist()
    assert minimum == [[code * scales[z].item() + least[z].item() for code in range(16)] for z in range(17)]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_size", SIZES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_round_trip(n: int, k: int, group_size: int, form: str, dtype: torch.dtype) -> None:
    given = made(form, n, k, group_size, dtype, seed=n + k)
    w = pack_w4(**given)
    size = k if group_size == -1 else group_size
    assert (w.n, w.k, w.group_size, w.minimum, w.permutation) == (n, k, size, form == "minimum", None)
    for got, name in zip(unpack_w4(w), ("q", "scales", "zeros"), strict=True):
        assert_equal(got, given[name])
    assert_same(repacked(w), w)
    want = values(given["q"], given["scales"], given["zeros"], torch.arange(k) // size, form == "minimum")
    assert_equal(dequantize_w4(w), want)
    for rounded in (BF16, FP16):
        assert_equal(dequantize_w4(w, rounded), want.to(rounded))


@settings(max_examples=100)
@given(
    st.integers(0, 140), st.integers(0, 300), st.sampled_from(SIZES), st.sampled_from(FORMS), st.booleans(), st.data()
)
def test_any_shape_in_any_number_of_slabs(
    n: int, k: int, group_size: int, form: str, act_order: bool, data: st.DataObject
) -> None:
    given = made(form, n, k, group_size, FP16, seed=n * k)
    size = max(k, 1) if group_size == -1 else group_size
    g_idx = shuffled_groups(k, size) if act_order else None
    w = pack_w4(**given, g_idx=g_idx)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packing, "SLAB", data.draw(st.integers(1, 20000)))
        assert_same(pack_w4(**given, g_idx=g_idx), w)
        for got, name in zip(unpack_w4(w), ("q", "scales", "zeros"), strict=True):
            assert_equal(got, given[name])
        group = torch.arange(k) // size if g_idx is None else g_idx.long()
        assert_equal(dequantize_w4(w), values(given["q"], given["scales"], given["zeros"], group, w.minimum))
    assert_same(repacked(w), w)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "int8", "int16", "int32", "int64"])
def test_layouts_and_dtypes_of_codes(layout: str) -> None:
    given = made("zero points", 37, 130, 64)
    w = pack_w4(**given)
    q, scales, zeros = given["q"], given["scales"], given["zeros"]
    if layout == "transposed":
        q, scales, zeros = (x.t().contiguous().t() for x in (q, scales, zeros))
    elif layout == "sliced":
        q, scales, zeros = padded(misaligned(q), 137), padded(scales, 5, float("nan")), padded(zeros, 6, float("nan"))
    else:
        q = q.to(getattr(torch, layout))
    before = [x.clone() for x in (q, scales, zeros)]
    assert_same(pack_w4(q, scales, zeros, 64), w)
    for x, old in zip((q, scales, zeros), before, strict=True):
        assert torch.equal(x, old)


def test_nothing_is_shared_with_what_was_given() -> None:
    q, scales = torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 1, requires_grad=True)
    w = pack_w4(q, scales, scales, -1, minimum=True)
    storages = {t.untyped_storage().data_ptr() for t in (q, scales, w.packed, w.scales, w.zeros) if t is not None}
    assert len(storages) == 5
    assert not w.scales.requires_grad


# Act-order


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("k", "group_size"), [(96, 32), (256, 64), (200, 64), (33, 32), (512, 128), (320, 256)])
def test_act_order(k: int, group_size: int, form: str) -> None:
    n, g_idx = 21, shuffled_groups(k, group_size, seed=k)
    given = made(form, n, k, group_size)
    w = pack_w4(**given, g_idx=g_idx)
    order = sorted(range(k), key=g_idx.tolist().__getitem__)
    assert w.permutation is not None
    assert w.permutation.dtype == torch.int32
    assert w.permutation.tolist() == order
    assert_equal(w.g_idx, g_idx)
    in_order = pack_w4(**{**given, "q": given["q"][:, order]})
    assert torch.equal(w.packed, in_order.packed)
    assert torch.equal(w.scales, in_order.scales)
    for got, name in zip(unpack_w4(w), ("q", "scales", "zeros"), strict=True):
        assert_equal(got, given[name])
    assert_same(repacked(w), w)
    weight = dequantize_w4(w)
    assert_equal(weight, values(given["q"], given["scales"], given["zeros"], g_idx.long(), w.minimum))
    x = torch.randint(-3, 4, (2, k)).double()
    packed_order = dequantize_w4(in_order).double()
    torch.testing.assert_close(x[:, w.permutation.long()] @ packed_order.t(), x @ weight.double().t())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_groups_in_order_need_no_permutation(dtype: torch.dtype) -> None:
    given = made("symmetric", 5, 200, 64)
    w = pack_w4(**given, g_idx=(torch.arange(200) // 64).to(dtype))
    assert w.permutation is w.g_idx is None
    assert_same(w, pack_w4(**given))
    channel = made("symmetric", 5, 200, -1)
    assert_same(pack_w4(**channel, g_idx=torch.zeros(200, dtype=dtype)), pack_w4(**channel))


# Keeping it


def kinds() -> dict[str, W4Weight]:
    ordered = pack_w4(**made("zero points", 21, 200, 64), g_idx=shuffled_groups(200, 64))
    return {form: pack_w4(**made(form, 37, 130, 128)) for form in FORMS} | {"act-order": ordered}


@pytest.mark.parametrize("kind", [*FORMS, "act-order"])
def test_state_dict_and_safetensors(tmp_path: Any, kind: str) -> None:
    w = kinds()[kind]
    state = w.state_dict()
    assert state["meta"].tolist() == [1, w.n, w.k, w.group_size, w.minimum]
    assert sorted(state) == sorted(
        ["meta", "packed", "scales"] + ["zeros"] * (kind != "symmetric") + ["permutation"] * (kind == "act-order")
    )
    assert_same(W4Weight.from_state_dict(state), w)
    save_file(state, tmp_path / "weight.safetensors")
    loaded = W4Weight.from_state_dict(load_file(tmp_path / "weight.safetensors"))
    assert_same(loaded, w)
    assert torch.equal(dequantize_w4(loaded), dequantize_w4(w))
    torch.save(state, tmp_path / "weight.pt")
    assert_same(W4Weight.from_state_dict(torch.load(tmp_path / "weight.pt")), w)
    assert_same(copy.deepcopy(w), w)


@pytest.mark.parametrize("kind", [*FORMS, "act-order"])
def test_to(kind: str) -> None:
    w = kinds()[kind]
    assert_same(w.to("cpu"), w)
    moved = w.to("meta")
    assert {tensor.device.type for name, tensor in moved.state_dict().items() if name != "meta"} == {"meta"}
    assert (moved.n, moved.k, moved.group_size, moved.minimum) == (w.n, w.k, w.group_size, w.minimum)


@pytest.mark.parametrize("kind", [*FORMS, "act-order"])
def test_devices_have_the_same_bits(device: str, kind: str) -> None:
    w = kinds()[kind]
    there = w.to(device)
    assert there.packed.device.type == device
    assert_same(repacked(there), w)
    assert torch.equal(dequantize_w4(there).cpu(), dequantize_w4(w))
    weight = make_operand(37, 130)
    assert_same(quantize_w4(weight.to(device), symmetric=False), quantize_w4(weight, symmetric=False))


def test_repr_is_short() -> None:
    assert repr(kinds()["minimum"]) == "W4Weight(n=37, k=130, group_size=128, minimum=True)"


# quantize_w4


def test_exact_codes() -> None:
    # Each group reaches its ends, so the scale is that of the grid; the second and the fourth are mirrored.
    step = torch.tensor([0.25, -0.25, 2.0, -2.0])
    codes = torch.randint(1, 16, (3, 4, 32), generator=torch.Generator().manual_seed(0))
    codes[..., 0] = 0
    weight = ((codes - 8) * step[:, None]).flatten(1)
    w = quantize_w4(weight, 32)
    q, scales, zeros = unpack_w4(w)
    assert torch.equal(scales, step.expand(3, 4))
    assert torch.equal(q.long(), codes.flatten(1))
    assert zeros is None
    assert torch.equal(dequantize_w4(w), weight)

    codes[..., 1], zero = 15, torch.tensor([0, 5, 8, 15])
    weight = ((codes - zero[:, None]) * step.abs()[:, None]).flatten(1)
    q, scales, zeros = unpack_w4(quantize_w4(weight, 32, symmetric=False))
    assert torch.equal(scales, step.abs().expand(3, 4))
    assert zeros is not None
    assert torch.equal(zeros.long(), zero.expand(3, 4))
    assert torch.equal(q.long(), codes.flatten(1))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_codes_are_the_nearest(dtype: torch.dtype, group_size: int, symmetric: bool) -> None:
    weight = make_operand(9, 300, FP32).clamp(-6e4, 6e4).to(dtype)
    weight[4] = weight[4].abs()
    weight[5] = -weight[5].abs()
    w = quantize_w4(weight, group_size, symmetric=symmetric)
    assert w.scales.dtype == dtype
    _, scales, zeros = unpack_w4(w)
    group = torch.arange(300) // w.group_size
    s = scales.double()[:, group]
    z = 8 if zeros is None else zeros.double()[:, group]
    x = weight.double()
    codes = torch.arange(16, dtype=torch.float64)
    nearest = ((codes - (z if zeros is None else z[..., None])) * s[..., None] - x[..., None]).abs().amin(-1)
    error = (dequantize_w4(w, torch.float64) - x).abs()
    assert (error <= nearest + 1e-6 * s.abs()).all()
    # Half a step, and at the ends what rounding the scale takes off.
    off = (
        s.abs() * (0.5 + 16 * torch.finfo(dtype).eps) + 16 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )
    assert (error <= off).all()
    assert (dequantize_w4(w)[x == 0] == 0).all()
    assert_same(repacked(w), w)


def test_scales() -> None:
    weight = torch.tensor([[-8.0, 7.5], [-7.5, 8.0], [-8.0, 7.75], [0.0, 16.0], [-16.0, 0.0], [4.0, -8.0]])
    assert unpack_w4(quantize_w4(weight, -1))[1].flatten().tolist() == pytest.approx([1, -1, 7.75 / 7.5, -2, 2, 1])
    q, scales, zeros = unpack_w4(quantize_w4(weight, -1, symmetric=False))
    assert scales.flatten().tolist() == pytest.approx([15.5 / 15, 15.5 / 15, 15.75 / 15, 16 / 15, 16 / 15, 0.8])
    assert zeros is not None
    assert zeros.flatten().tolist() == [8, 7, 8, 0, 15, 10]
    assert q.tolist() == [[0, 15], [0, 15], [0, 15], [0, 15], [0, 15], [15, 0]]


def test_squared_error() -> None:
    weight = torch.randn(400, 1024, generator=torch.Generator().manual_seed(0))

    def error(w: W4Weight) -> float:
        return (dequantize_w4(w) - weight).square().sum().item()

    scales = weight.unflatten(1, (-1, 128)).abs().amax(-1) / 7
    codes = (weight / scales.repeat_interleave(128, 1)).round() + 8
    by_amax = error(pack_w4(codes.to(torch.uint8), scales))
    assert error(quantize_w4(weight)) / by_amax == pytest.approx(0.78, abs=0.01)
    assert error(quantize_w4(weight, symmetric=False)) < 0.81 * by_amax
    assert error(quantize_w4(weight, dtype=BF16)) / by_amax == pytest.approx(0.78, abs=0.01)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_groups_of_zeros(dtype: torch.dtype, symmetric: bool) -> None:
    weight = torch.zeros(4, 96)
    weight[1, 32:64] = torch.linspace(-1, 1, 32)
    weight[2] = 1e-12  # no FP16 scale is so small
    weight[3] = -0.0
    w = quantize_w4(weight, 32, symmetric=symmetric, dtype=dtype)
    assert bool(w.scales.isfinite().all())
    back = dequantize_w4(w)
    assert bool((back[[0, 3]] == 0).all())
    assert bool((back[1, :32] == 0).all())
    assert bool((back[1, 32:64] != 0).any())
    assert bool(((back[2] - 1e-12).abs() <= 1e-12).all())
    scales = unpack_w4(w)[1]
    assert bool((scales[[0, 3]] == 1).all())


def test_parameters_and_views_are_quantized() -> None:
    weight = torch.nn.Parameter(make_operand(40, 70, FP32))
    w = quantize_w4(weight, 64)
    assert not w.scales.requires_grad
    assert_same(quantize_w4(padded(weight.detach(), 77, float("nan")), 64), w)
    assert_same(quantize_w4(weight.detach().t().contiguous().t(), 64), w)


# GPTQ


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def packed_along_k(codes: list[list[int]]) -> Tensor:
    """(n, k) as int32 (n, ceil(k / 8)): code 8 * i + j in the bits from 4 * j of int32 i."""
    words = [
        [signed(sum(code << 4 * j for j, code in enumerate(row[i : i + 8]))) for i in range(0, len(row), 8)]
        for row in codes
    ]
    return torch.tensor(words, dtype=torch.int32)


def gptq(q: Tensor, scales: Tensor, zeros: Tensor, version: int) -> dict[str, Tensor]:
    """q (n, k), scales and zeros (n, groups) as GPTQ keeps them. Zero points of version 1 are those of 2, less one."""
    stored = (zeros.long() - (2 - version)).t().tolist()
    assert all(0 <= zero <= 15 for row in stored for zero in row)
    return {
        "qweight": packed_along_k(q.tolist()).t().clone(memory_format=torch.contiguous_format),
        "scales": scales.t().contiguous(),
        "qzeros": packed_along_k(stored),
    }


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(8, 8, -1), (8, 64, 32), (16, 128, -1), (72, 200, 64), (24, 256, 256)]
)
def test_gptq(n: int, k: int, group_size: int, dtype: torch.dtype, version: int) -> None:
    given = made("zero points", n, k, group_size, dtype)
    given["zeros"] = given["zeros"].clamp(2 - version, 17 - version)
    w = from_gptq(**gptq(given["q"], given["scales"], given["zeros"], version), group_size=group_size, version=version)
    assert_same(w, pack_w4(**given))


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_act_order(version: int) -> None:
    given = made("zero points", 16, 256, 64)
    given["zeros"] = given["zeros"].clamp(1, 15)
    g_idx = shuffled_groups(256, 64)
    tensors = gptq(given["q"], given["scales"], given["zeros"], version)
    assert_same(from_gptq(**tensors, g_idx=g_idx, group_size=64, version=version), pack_w4(**given, g_idx=g_idx))
    in_order = (torch.arange(256) // 64).int()
    assert_same(from_gptq(**tensors, g_idx=in_order, group_size=64, version=version), pack_w4(**given))


def test_case_015_zero_points_of_both_versions() -> None:
    q = torch.arange(16).repeat_interleave(8).expand(16, 128)
    scales = torch.linspace(0.01, 0.5, 16)[:, None].to(FP16)
    for zero in range(17):
        zeros = torch.full((16, 1), zero)
        want = (q - zero) * scales.float()
        for version in (1, 2):
            if 0 <= zero - (2 - version) <= 15:  # what is stored
                w = from_gptq(**gptq(q, scales, zeros, version), group_size=128, version=version)
                assert torch.equal(dequantize_w4(w), want)
                assert (w.zeros is None) == (zero == 8)
    # Each of the zero points in its place.
    mixed = torch.arange(1, 17)[:, None]
    w = from_gptq(**gptq(q, scales, mixed, 1), group_size=128, version=1)
    assert torch.equal(dequantize_w4(w), (q - mixed) * scales.float())
    # The fault as it was reported: version 2 taken for 1 is off by a step, so the version has to be said.
    as_two = gptq(q, scales, torch.full((16, 1), 8), 2)
    right, wrong = (dequantize_w4(from_gptq(**as_two, group_size=128, version=version)) for version in (2, 1))
    assert torch.equal(right, (q - 8) * scales.float())
    assert torch.equal(wrong, (q - 9) * scales.float())
    with pytest.raises(TypeError, match="version"):
        from_gptq(**as_two, group_size=128)  # type: ignore[call-arg]


# AWQ

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed_along_n(codes: list[list[int]]) -> Tensor:
    """(rows, n) as int32 (rows, n / 8): nibble i, from the lowest, is column AWQ_ORDER[i] of eight."""
    words = [
        [signed(sum(row[i + AWQ_ORDER[j]] << 4 * j for j in range(8))) for i in range(0, len(row), 8)] for row in codes
    ]
    return torch.tensor(words, dtype=torch.int32)


def awq(q: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": packed_along_n(q.t().tolist()),
        "scales": scales.t().contiguous(),
        "qzeros": packed_along_n(zeros.long().t().tolist()),
    }


@pytest.mark.parametrize(
    ("k", "n", "group_size"), [(128, 64, 64), (128, 192, 64), (96, 8, 32), (200, 24, 128), (64, 72, -1)]
)
def test_case_017_awq_is_its_codes_less_zeros_times_scales(k: int, n: int, group_size: int) -> None:
    given = made("zero points", n, k, group_size, FP16)
    given["zeros"].clamp_(max=15)
    w = from_awq(**awq(given["q"], given["scales"], given["zeros"]), group_size=group_size)
    assert_same(w, pack_w4(**given))
    q, scales, zeros = (given[name].tolist() for name in ("q", "scales", "zeros"))
    size = k if group_size == -1 else group_size
    want = [[(q[i][j] - zeros[i][j // size]) * scales[i][j // size] for j in range(k)] for i in range(n)]
    assert dequantize_w4(w, torch.float64).tolist() == want
    # The product with an identity, which the kernels' test of this case has, is this one.
    assert torch.equal(torch.eye(k) @ dequantize_w4(w).t(), dequantize_w4(w).t())


def test_awq_every_code_and_zero_point() -> None:
    q = torch.arange(16).repeat(2).expand(16, 32)
    scales, zeros = torch.linspace(0.01, 0.5, 16)[:, None].to(FP16), torch.arange(16)[:, None]
    assert torch.equal(dequantize_w4(from_awq(**awq(q, scales, zeros), group_size=32)), (q - zeros) * scales.float())
    eights = from_awq(**awq(q, scales, torch.full_like(zeros, 8)), group_size=32)
    assert eights.zeros is None
    assert torch.equal(dequantize_w4(eights), (q - 8) * scales.float())


# compressed-tensors


@pytest.mark.parametrize("shape_as", [torch.tensor, tuple, torch.Size])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(1, 3, -1), (5, 33, -1), (16, 128, 32), (9, 256, 128), (13, 64, 64)]
)
def test_compressed_tensors(n: int, k: int, group_size: int, shape_as: Callable[[list[int]], Any]) -> None:
    signed_codes = torch.randint(-8, 8, (n, k), generator=torch.Generator().manual_seed(0))
    scales = made("symmetric", n, k, group_size)["scales"]
    tensors = {
        "weight_packed": packed_along_k((signed_codes + 8).tolist()),
        "weight_scale": scales,
        "weight_shape": shape_as([n, k]),
    }
    group = torch.arange(k) // (k if group_size == -1 else group_size)
    want = signed_codes * scales.float()[:, group]
    w = from_compressed_tensors(**tensors)
    assert w.zeros is None
    assert torch.equal(dequantize_w4(w), want)
    assert_same(w, from_compressed_tensors(**tensors, group_size=group_size))

    signed_zeros = torch.randint(-8, 8, tuple(scales.shape), generator=torch.Generator().manual_seed(1))
    packed_zeros = packed_along_k((signed_zeros + 8).t().tolist()).t().contiguous()
    assert packed_zeros.shape == (-(-n // 8), scales.shape[1])
    w = from_compressed_tensors(**tensors, weight_zero_point=packed_zeros)
    assert torch.equal(dequantize_w4(w), (signed_codes - signed_zeros[:, group]) * scales.float()[:, group])
    eights = packed_along_k(torch.full_like(signed_zeros, 8).t().tolist()).t()
    assert_same(from_compressed_tensors(**tensors, weight_zero_point=eights), from_compressed_tensors(**tensors))

    for unset in (torch.full((k,), -1, dtype=torch.int32), group.int()):
        assert_same(from_compressed_tensors(**tensors, weight_g_idx=unset), from_compressed_tensors(**tensors))
    if group_size != -1:
        g_idx = shuffled_groups(k, group_size)
        w = from_compressed_tensors(**tensors, weight_g_idx=g_idx)
        assert torch.equal(dequantize_w4(w), signed_codes * scales.float()[:, g_idx.long()])


def test_compressed_tensors_every_code_and_zero_point() -> None:
    codes, zeros = torch.arange(-8, 8).repeat(2).expand(16, 32), torch.arange(-8, 8)[:, None]
    scales = torch.linspace(0.01, 0.5, 16)[:, None].to(BF16)
    packed_zeros = packed_along_k((zeros + 8).t().tolist()).t()
    w = from_compressed_tensors(packed_along_k((codes + 8).tolist()), scales, (16, 32), packed_zeros)
    assert torch.equal(dequantize_w4(w), (codes - zeros) * scales.float())


def test_compressed_tensors_with_a_short_last_group() -> None:
    given = made("symmetric", 6, 200, 128)
    tensors = packed_along_k(given["q"].tolist()), given["scales"], (6, 200)
    assert_same(from_compressed_tensors(*tensors, group_size=128), pack_w4(**given))
    with pytest.raises(ValueError, match="from_compressed_tensors: group_size is 100; it must be 32, 64, 128, 256 or"):
        from_compressed_tensors(*tensors)


# GGUF


def half(number: float) -> list[int]:
    return torch.tensor([number], dtype=FP16).view(torch.uint8).tolist()


@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 96), (17, 576)])
@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1"])
def test_gguf_blocks(quantization: str, n: int, k: int) -> None:
    form = "symmetric" if quantization == "Q4_0" else "minimum"
    given = made(form, n, k, 32, FP16)
    data = []
    for i in range(n):
        row = []
        for block in range(k // 32):
            q = given["q"][i, 32 * block : 32 * block + 32].tolist()
            row += half(given["scales"][i, block].item())
            row += half(given["zeros"][i, block].item()) if form == "minimum" else []
            row += [q[j] | q[16 + j] << 4 for j in range(16)]
        data.append(row)
    rows = torch.tensor(data, dtype=torch.uint8)
    w = from_gguf(rows, quantization, (n, k))
    assert_same(w, pack_w4(**given))
    assert_same(from_gguf(misaligned(rows), quantization, (n, k)), w)
    assert_same(from_gguf(padded(rows, rows.shape[1] + 3), quantization, torch.Size((n, k))), w)


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1"])
def test_gguf_is_what_gguf_dequantizes(quantization: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[quantization]
    weight = make_operand(70, 576, FP32)
    data = gguf.quants.quantize(weight.numpy(), kind)
    w = from_gguf(torch.from_numpy(data), kind, (70, 576))
    assert (w.group_size, w.minimum, w.scales.dtype) == (32, quantization == "Q4_1", FP16)
    assert torch.equal(dequantize_w4(w), torch.from_numpy(gguf.quants.dequantize(data, kind)))
    # Every byte, under every kind of block.
    blocks = torch.randint(0, 256, (256, 36 if quantization == "Q4_0" else 40), dtype=torch.uint8)
    blocks[:, len(blocks[0]) // 2 - 1] = torch.arange(256)
    blocks[:, [1, len(blocks[0]) // 2 + 1]] &= 0x3B  # finite numbers
    if quantization == "Q4_1":
        blocks[:, [3, 23]] &= 0xBB
    w = from_gguf(blocks, kind, (256, 64))
    assert torch.equal(dequantize_w4(w), torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind)))


# Scales of groups


def test_case_014_more_groups_than_columns_in_a_group() -> None:
    n, k = 3, 28672
    groups = torch.arange(k // 128)
    scales = (groups + 1) * torch.tensor([[1.0], [1000.0], [1e6]])
    w = pack_w4(torch.full((n, k), 9, dtype=torch.uint8), scales)
    assert torch.equal(dequantize_w4(w), scales.repeat_interleave(128, 1))
    assert torch.equal(w.scales[0, :, :n], scales.t())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_scale_is_that_of_its_row_and_group_only(group_size: int, act_order: bool) -> None:
    n, k = 18, 200
    given = made("zero points", n, k, group_size)
    g_idx = shuffled_groups(k, group_size) if act_order else torch.arange(k) // group_size
    given["q"][:] = 3
    given["zeros"].clamp_(4)  # no value is 0
    base = dequantize_w4(pack_w4(**given, g_idx=g_idx))
    for name in ("scales", "zeros"):
        for row in (0, 8, 15, 17):
            for group in range(given["scales"].shape[1]):
                other = {**given, name: given[name].clone()}
                other[name][row, group] = other[name][row, group] * 2 % 17 + 0.25 if name == "scales" else 2
                changed = dequantize_w4(pack_w4(**other, g_idx=g_idx)) != base
                want = torch.zeros_like(changed)
                want[row] = g_idx == group
                assert torch.equal(changed, want)


@pytest.mark.parametrize("group_size", SIZES)
def test_case_018_group_sizes(group_size: int) -> None:
    given = made("zero points", 8, 4096, group_size, FP16)
    given["zeros"].clamp_(1, 15)
    group = torch.arange(4096) // (4096 if group_size == -1 else group_size)
    want = values(given["q"], given["scales"], given["zeros"], group, False)
    assert torch.equal(dequantize_w4(pack_w4(**given)), want)
    tensors = gptq(given["q"], given["scales"], given["zeros"], 2)
    assert torch.equal(dequantize_w4(from_gptq(**tensors, group_size=group_size, version=2)), want)


def test_case_018_scales_of_another_split() -> None:
    # A quarter of 11008 columns, with the scales of 1024 columns.
    qweight, scales = torch.zeros(344, 64, dtype=torch.int32), torch.ones(8, 64)
    qzeros = torch.zeros(8, 8, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"scales is \[8, 64\]; with a k of 2752 in groups of 128 it must be \[22, 64\]"
    ):
        from_gptq(qweight, scales, qzeros, group_size=128, version=1)
    with pytest.raises(
        ValueError, match="group_size is 344; it must be 32, 64, 128, 256 or -1, all of k, which is 2752"
    ):
        from_gptq(qweight, scales, qzeros, group_size=344, version=1)
    with pytest.raises(
        ValueError, match=r"scales is \[8, 64\]; with a k of 2752 in groups of 2752 it must be \[1, 64\]"
    ):
        from_gptq(qweight, scales, qzeros, group_size=-1, version=1)
    with pytest.raises(ValueError, match="from_compressed_tensors: group_size is 344; it must be"):
        from_compressed_tensors(torch.zeros(64, 344, dtype=torch.int32), torch.ones(64, 8), (64, 2752))


# Errors

Q, S = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 3)
W, AWQ_W = torch.zeros(12, 16, dtype=torch.int32), torch.zeros(96, 2, dtype=torch.int32)
S_T, Z = torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.int32)
CT, BLOCKS = torch.zeros(4, 12, dtype=torch.int32), torch.zeros(4, 54, dtype=torch.uint8)
META = torch.tensor([1, 4, 96, 32, 0])
PACKED, TILES = torch.zeros(4, 2, 32, 4, dtype=torch.int32), torch.zeros(4, 3, 16)
STATE = {"packed": PACKED, "scales": TILES, "meta": META}
MANY = torch.arange(96).int()


def changed(x: Tensor, value: float, *index: int) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def gidx(*groups: int) -> Tensor:
    return torch.tensor(groups).repeat_interleave(96 // len(groups)).flip(0)


WRONG: list[tuple[Callable[..., Any], tuple, dict[str, Any], str]] = [
    (
        pack_w4,
        (Q.float(), S, None, 32),
        {},
        "q is torch.float32; it must be torch.uint8, torch.int8, torch.int16, torch.i",
    ),
    (pack_w4, (Q[0], S, None, 32), {}, "q is [96]; it must have two dimensions"),
    (pack_w4, (changed(Q, 16, 3, 95), S, None, 32), {}, "q holds 16; it must hold whole numbers from 0 to 15"),
    (pack_w4, (changed(Q.int(), -1, 0, 0), S, None, 32), {}, "q holds -1; it must hold whole numbers from 0 to 15"),
    (
        pack_w4,
        (Q, S.double(), None, 32),
        {},
        "scales is torch.float64; it must be torch.bfloat16, torch.float16 or torch",
    ),
    (pack_w4, (Q, S, None), {}, "scales is [4, 3]; with a k of 96 in groups of 128 it must be [4, 1]"),
    (pack_w4, (Q, S.t(), None, 32), {}, "scales is [3, 4]; with a k of 96 in groups of 32 it must be [4, 3]"),
    (pack_w4, (Q, S.to("meta"), None, 32), {}, "scales is on meta; it must be on the device of q, cpu"),
    (pack_w4, (Q, S, S.to("meta"), 32), {}, "zeros is on meta; it must be on the device of q, cpu"),
    (pack_w4, (Q, S, None, 32), {"g_idx": gidx(0, 1, 2).to("meta")}, "g_idx is on meta; it must be on the device of q"),
    (pack_w4, (Q, S, S[:, :2], 32), {}, "zeros is [4, 2]; with a k of 96 in groups of 32 it must be [4, 3]"),
    (
        pack_w4,
        (Q, S, S.double(), 32),
        {},
        "zeros is torch.float64; it must be torch.uint8, torch.int8, torch.int16, to",
    ),
    (
        pack_w4,
        (Q, changed(S.float(), -(2.0**47), 2, 1), None, 32),
        {},
        "scales holds -1.40737e+14; it must hold less than 2**47 in size",
    ),
    (pack_w4, (Q, S, changed(S, 16.5, 0, 0), 32), {}, "zeros holds 16.5; it must hold whole numbers from 0 to 16"),
    (pack_w4, (Q, S, changed(S, 7.5, 2, 1), 32), {}, "zeros holds 7.5; it must hold whole numbers from 0 to 16"),
    (pack_w4, (Q, S, changed(S, 17, 2, 1).int(), 32), {}, "zeros holds 17; it must hold whole numbers from 0 to 16"),
    (pack_w4, (Q, S, changed(S, -1, 2, 1), 32), {}, "zeros holds -1; it must hold whole numbers from 0 to 16"),
    (
        pack_w4,
        (Q, S, changed(S, float("nan"), 2, 1), 32),
        {},
        "zeros holds nan; it must hold whole numbers from 0 to 16",
    ),
    (pack_w4, (Q, S, None, 32), {"minimum": True}, "zeros is None; it must be given"),
    (pack_w4, (Q, S, S.half(), 32), {"minimum": True}, "zeros is torch.float16; it must be torch.float32"),
    (pack_w4, (Q, S, None, 48), {}, "group_size is 48; it must be 32, 64, 128, 256 or -1, all of k, which is 96"),
    (pack_w4, (Q, S, None, 0), {}, "group_size is 0; it must be 32, 64, 128, 256 or -1, all of k, which is 96"),
    (pack_w4, (Q, S, None, 32), {"g_idx": MANY[:95]}, "g_idx is [95]; it must be [96]"),
    (
        pack_w4,
        (Q, S, None, 32),
        {"g_idx": MANY.float()},
        "g_idx is torch.float32; it must be torch.uint8, torch.int8, t",
    ),
    (pack_w4, (Q, S, None, 32), {"g_idx": gidx(0, 1, 3)}, "g_idx holds 3; it must hold whole numbers from 0 to 2"),
    (pack_w4, (Q, S, None, 32), {"g_idx": gidx(0, 1, -1)}, "g_idx holds -1; it must hold whole numbers from 0 to 2"),
    (
        pack_w4,
        (Q, S, None, 32),
        {"g_idx": gidx(0, 1, 2, 2)},
        "g_idx has 24 of 96 columns in group 0; in groups of 32 it must have 32",
    ),
    (
        pack_w4,
        (Q, S, None, 32),
        {"g_idx": gidx(0, 1, 1)},
        "g_idx has 64 of 96 columns in group 1; in groups of 32 it must have 32",
    ),
    (
        pack_w4,  # the short group has to be the last one
        (Q, S[:, :2], None, 64),
        {"g_idx": gidx(0, 1, 1)},
        "g_idx has 32 of 96 columns in group 0; in groups of 64 it must have 64",
    ),
    (
        dequantize_w4,
        (pack_w4(Q, S, None, 32), torch.int8),
        {},
        "dtype is torch.int8; it must be torch.bfloat16, torch.f",
    ),
    (quantize_w4, (Q,), {}, "weight is torch.uint8; it must be torch.bfloat16, torch.float16 or torch.float32"),
    (quantize_w4, (S[0],), {}, "weight is [3]; it must have two dimensions"),
    (
        quantize_w4,
        (S,),
        {"dtype": torch.float64},
        "dtype is torch.float64; it must be torch.bfloat16, torch.float16 or",
    ),
    (quantize_w4, (S, 16), {}, "group_size is 16; it must be 32, 64, 128, 256 or -1, all of k, which is 3"),
    (quantize_w4, (changed(S, float("nan"), 3, 2),), {}, "weight holds an infinity or a NaN; it must be finite"),
    (quantize_w4, (changed(S, float("-inf"), 3, 2),), {}, "weight holds an infinity or a NaN; it must be finite"),
    (
        quantize_w4,
        (S * 2**20,),
        {"dtype": FP16},
        "dtype is torch.float16; it must be one in which a scale of 131072 is f",
    ),
    (from_gptq, (W, S_T, Z), {"version": 3}, "version is 3; it must be 1 or 2"),
    (from_gptq, (W.long(), S_T, Z), {}, "qweight is torch.int64; it must be torch.int32"),
    (from_gptq, (W[0], S_T, Z), {}, "qweight is [16]; it must have two dimensions"),
    (from_gptq, (W, S_T.t(), Z), {}, "scales is [16, 3]; with a k of 96 in groups of 32 it must be [3, 16]"),
    (
        from_gptq,
        (W, S_T.int(), Z),
        {},
        "scales is torch.int32; it must be torch.bfloat16, torch.float16 or torch.float32",
    ),
    (from_gptq, (W, S_T, Z[:2]), {}, "qzeros is [2, 2]; with a k of 96 in groups of 32 it must be [3, 2]"),
    (from_gptq, (W, S_T, Z.float()), {}, "qzeros is torch.float32; it must be torch.int32"),
    (from_gptq, (W, S_T.to("meta"), Z), {}, "scales is on meta; it must be on the device of qweight, cpu"),
    (from_gptq, (W, S_T, Z.to("meta")), {}, "qzeros is on meta; it must be on the device of qweight, cpu"),
    (from_gptq, (W, S_T, Z, MANY.to("meta")), {}, "g_idx is on meta; it must be on the device of qweight, cpu"),
    (from_gptq, (W, S_T, Z, MANY), {}, "g_idx holds 3; it must hold whole numbers from 0 to 2"),
    (from_awq, (AWQ_W.float(), S_T, Z), {}, "qweight is torch.float32; it must be torch.int32"),
    (from_awq, (AWQ_W, S_T[:1], Z), {}, "scales is [1, 16]; with a k of 96 in groups of 32 it must be [3, 16]"),
    (from_awq, (AWQ_W, S_T, Z.t()), {}, "qzeros is [2, 3]; with a k of 96 in groups of 32 it must be [3, 2]"),
    (from_compressed_tensors, (CT.long(), S, (4, 96)), {}, "weight_packed is torch.int64; it must be torch.int32"),
    (
        from_compressed_tensors,
        (CT[None], S, (1, 4, 96)),
        {},
        "weight_packed is [1, 4, 12]; it must have two dimensions",
    ),
    (
        from_compressed_tensors,
        (CT, S, (4, 97)),
        {},
        "weight_packed is [4, 12]; for a weight of [4, 97] it must be [4, 13]",
    ),
    (from_compressed_tensors, (CT, S[0], (4, 96)), {}, "weight_scale is [3]; it must have two dimensions"),
    (
        from_compressed_tensors,
        (CT, S[:3], (4, 96)),
        {},
        "weight_scale is [3, 3]; with a k of 96 in groups of 32 it must b",
    ),
    (
        from_compressed_tensors,
        (CT, S, (4, 96), torch.zeros(4, 3, dtype=torch.int32)),
        {},
        "weight_zero_point is [4, 3]; with a k of 96 in groups of 32 it must be [1, 3]",
    ),
    (
        from_compressed_tensors,
        (CT, S, (4, 96), torch.zeros(1, 3, dtype=torch.int8)),
        {},
        "weight_zero_point is torch.int8; it must be torch.int32",
    ),
    (
        from_compressed_tensors,
        (CT, S, (4, 96), None, gidx(0, 1, 2, 2)),
        {},
        "weight_g_idx has 24 of 96 columns in group 0; in groups of 32 it must have 32",
    ),
    (
        from_compressed_tensors,
        (CT, S.to("meta"), (4, 96)),
        {},
        "weight_scale is on meta; it must be on the device of weight_packed, cpu",
    ),
    (from_gguf, (BLOCKS, "Q8_0", (4, 96)), {}, "quantization is Q8_0; it must be Q4_0 or Q4_1"),
    (from_gguf, (BLOCKS.int(), "Q4_0", (4, 96)), {}, "data is torch.int32; it must be torch.uint8"),
    (from_gguf, (BLOCKS[0], "Q4_0", (4, 96)), {}, "data is [54]; it must have two dimensions"),
    (
        from_gguf,
        (BLOCKS, "Q4_0", (4, 100)),
        {},
        "shape is [4, 100]; k must be a multiple of 32, the columns of a block",
    ),
    (from_gguf, (BLOCKS, "Q4_1", (4, 96)), {}, "data is [4, 54]; for Q4_1 of [4, 96] it must be [4, 60]"),
    (from_gguf, (BLOCKS, "Q4_0", (96, 4)), {}, "shape is [96, 4]; k must be a multiple of 32, the columns of a block"),
    (W4Weight, (PACKED.long(), TILES, None, None, 4, 96, 32), {}, "packed is torch.int64; it must be torch.int32"),
    (W4Weight, (PACKED, TILES, None, None, 65, 96, 32), {}, "packed is [4, 2, 32, 4]; it must be [8, 2, 32, 4]"),
    (W4Weight, (PACKED, TILES, None, None, 4, 129, 32), {}, "packed is [4, 2, 32, 4]; it must be [4, 3, 32, 4]"),
    (W4Weight, (PACKED, TILES, None, None, 4, 97, 32), {}, "scales is [4, 3, 16]; it must be [4, 4, 16]"),
    (
        W4Weight,
        (PACKED, TILES.int(), None, None, 4, 96, 32),
        {},
        "scales is torch.int32; it must be torch.bfloat16, tor",
    ),
    (W4Weight, (PACKED, TILES, TILES.half(), None, 4, 96, 32), {}, "zeros is torch.float16; it must be torch.float32"),
    (W4Weight, (PACKED, TILES, TILES[:1], None, 4, 96, 32), {}, "zeros is [1, 3, 16]; it must be [4, 3, 16]"),
    (W4Weight, (PACKED, TILES, None, None, 4, 96, 32, True), {}, "zeros is None; it must be given"),
    (W4Weight, (PACKED, TILES, None, MANY.long(), 4, 96, 32), {}, "permutation is torch.int64; it must be torch.int32"),
    (W4Weight, (PACKED, TILES, None, MANY[1:], 4, 96, 32), {}, "permutation is [95]; it must be [96]"),
    (
        W4Weight,
        (PACKED, TILES, None, None, 4, 96, 33),
        {},
        "group_size is 33; it must be 32, 64, 128, 256 or -1, all of",
    ),
    (
        W4Weight,
        (PACKED, TILES.to("meta"), None, None, 4, 96, 32),
        {},
        "scales is on meta; it must be on the device of pa",
    ),
    (
        W4Weight,
        (PACKED, TILES.transpose(1, 2).contiguous().transpose(1, 2), None, None, 4, 96, 32),
        {},
        "scales has the strides [48, 1, 3]; it must be contiguous",
    ),
    (
        W4Weight.from_state_dict,
        ({"packed": PACKED, "scales": TILES},),
        {},
        "state has packed, scales; it must have packed, scales and meta, and may have zeros and permutation",
    ),
    (W4Weight.from_state_dict, ({},), {}, "state has nothing; it must have packed, scales and meta, and may have"),
    (
        W4Weight.from_state_dict,
        ({**STATE, "bias": S},),
        {},
        "state has packed, scales, meta, bias; it must have packed, scales and meta, and may have zeros and perm",
    ),
    (W4Weight.from_state_dict, ({**STATE, "meta": META.int()},), {}, "meta is torch.int32; it must be torch.int64"),
    (W4Weight.from_state_dict, ({**STATE, "meta": META[:4]},), {}, "meta is [4]; it must be [5]"),
    (
        W4Weight.from_state_dict,
        ({**STATE, "meta": changed(META, 2, 0)},),
        {},
        "the layout version is 2; it must be 1: pack it again",
    ),
    (
        W4Weight.from_state_dict,
        ({**STATE, "permutation": changed(MANY, 0, 5)},),
        {},
        "permutation leaves a column out; it must hold each of 0 to 95 once",
    ),
    (
        W4Weight.from_state_dict,
        ({**STATE, "permutation": changed(MANY, 2**30, 5)},),
        {},
        "permutation leaves a column out; it must hold each of 0 to 95 once",
    ),
]
MORE = {from_gptq: {"group_size": 32, "version": 1}, from_awq: {"group_size": 32}}


@pytest.mark.parametrize(("op", "args", "rest", "sentence"), WRONG)
def test_errors(op: Callable[..., Any], args: tuple, rest: dict[str, Any], sentence: str) -> None:
    kind = TypeError if " is torch." in sentence and "one in which" not in sentence else ValueError
    with pytest.raises(kind, match="^" + re.escape(f"{op.__qualname__}: {sentence}")):
        op(*args, **{**MORE.get(op, {}), **rest})


def test_a_state_that_does_not_fit_is_refused_in_the_weights_words() -> None:
    with pytest.raises(ValueError, match=re.escape("W4Weight: packed is [4, 2, 32, 4]; it must be [8, 2, 32, 4]")):
        W4Weight.from_state_dict({**STATE, "meta": changed(META, 65, 1)})
    with pytest.raises(ValueError, match="W4Weight: zeros is None; it must be given"):
        W4Weight.from_state_dict({**STATE, "meta": changed(META, 1, 4)})
    assert_same(W4Weight.from_state_dict(STATE), W4Weight(PACKED, TILES, None, None, 4, 96, 32))


def test_a_code_of_the_last_slab_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SLAB", 1)
    with pytest.raises(ValueError, match="pack_w4: q holds 255; it must hold whole numbers from 0 to 15"):
        pack_w4(changed(torch.zeros(200, 64, dtype=torch.uint8), 255, 199, 63), torch.ones(200, 1), None, 64)
