"""RoPE against complex multiplication in float64, its tables against the formulas of their sources, pair by pair."""

import cmath
import itertools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutegemm
from cutegemm import build_cos_sin_cache, qk_norm_rope_, rms_norm, rotary_embedding_
from cutegemm.registry import OPS
from cutegemm.testing import assert_same, guarded, make_operand, misaligned, padded, relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
LENGTH = 40  # of the tables here
# head_size, rotary_dim, rope_dim_offset
PARTS = [
    (2, 2, 0), (46, 46, 0), (46, 6, 0), (46, 6, 39), (64, 64, 0), (64, 2, 1), (80, 72, 0), (80, 72, 8), (96, 96, 0),
    (96, 72, 24), (128, 128, 0), (128, 32, 0), (128, 64, 64), (192, 64, 128), (192, 192, 0), (256, 96, 5),
    (256, 192, 0), (256, 256, 0), (512, 64, 448), (512, 512, 0), (576, 64, 512), (576, 576, 0),
]  # fmt: skip


def make(tokens: int, heads: int, size: int, dtype: torch.dtype = BF16, seed: int = 0, device: str = "cpu") -> Tensor:
    return make_operand(tokens * heads, size, dtype, seed=seed).view(tokens, heads, size).to(device)


def make_table(rotary_dim: int, dtype: torch.dtype = FP32, device: str = "cpu", length: int = LENGTH) -> Tensor:
    """Values with no relation between a cosine and its sine, so that one in another's place shows."""
    generator = torch.Generator().manual_seed(rotary_dim)
    return (2 * torch.rand(length, rotary_dim, generator=generator) - 1).to(dtype).to(device)


def make_positions(tokens: int, dtype: torch.dtype = torch.int64, device: str = "cpu", length: int = LENGTH) -> Tensor:
    return torch.randint(length, (tokens,), generator=torch.Generator().manual_seed(tokens), dtype=dtype).to(device)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize]).cpu()


def exact(
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    is_neox: bool = True,
    offset: int = 0,
    inverse: bool = False,
    section: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """x (tokens, heads, head_size), rotated in float64, and for each value the size of its pair, |x1| + |x2|, or NaN
    where x stays."""
    x, table, pairs = x.cpu().double(), table.cpu().double(), table.shape[1] // 2
    out, size, i = x.clone(), torch.full_like(x, math.nan), 0
    rows = [positions.tolist()] if section is None else positions.tolist()
    for row, count in zip(rows, section or [pairs], strict=True):
        tokens = [t for t, position in enumerate(row) if 0 <= position < len(table)]
        at = [row[t] for t in tokens]
        for _ in range(count):
            a, b = (offset + i, offset + pairs + i) if is_neox else (offset + 2 * i, offset + 2 * i + 1)
            turn = torch.complex(table[at, i], table[at, pairs + i])
            x1, x2 = x[tokens, :, a], x[tokens, :, b]
            turned = torch.complex(x1, x2) * (turn.conj() if inverse else turn)[:, None]
            out[tokens, :, a], out[tokens, :, b] = turned.real, turned.imag
            size[tokens, :, a] = size[tokens, :, b] = x1.abs() + x2.abs()
            i += 1
    assert i == pairs
    return out, size


def assert_rotated(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """out is x rotated, within three roundings of float32 and one to the dtype, and x itself, bit for bit, elsewhere.

    Cosines and sines are up to 1.
    """
    want, size = exact(x, *args, **kwargs)
    info, kept = torch.finfo(out.dtype), size.isnan()
    bound = want.abs() * (info.eps / 2) + size * (3 * 2.0**-24) + info.smallest_normal * info.eps
    over = (((out.cpu().double() - want).abs() > bound) | out.cpu().isnan()) & ~kept
    assert not bool(over.any()), f"{int(over.sum())} of {over.numel()}, the first at {over.nonzero()[0].tolist()}"
    assert torch.equal(bits(out)[kept], bits(x)[kept])


# One call against the definition


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "rotary_dim", "offset"), PARTS)
def test_case_035_any_part_of_a_head(
    device: str, head_size: int, rotary_dim: int, offset: int, dtype: torch.dtype
) -> None:
    """The table's width is rotary_dim, all around the rotated part stays, and so do the bytes around the tensors."""
    tokens = 5
    for is_neox, inverse, of_model, short in itertools.product((True, False), repeat=4):
        q, k = make(tokens, 5, head_size, dtype), make(tokens, 2, head_size, dtype, 1)
        table = make_table(rotary_dim, dtype if of_model else FP32, device)
        positions = make_positions(tokens, torch.int32 if short else torch.int64, device)
        in_q, check_q = guarded(q.shape, dtype, device=device)
        in_k, check_k = guarded(k.shape, dtype, device=device)
        in_q.copy_(q)
        in_k.copy_(k)
        before = table.clone(), positions.clone()
        rotary_embedding_(positions, in_q, in_k, head_size, table, is_neox, offset, inverse)
        check_q()
        check_k()
        assert torch.equal(table, before[0])
        assert torch.equal(positions, before[1])
        assert_rotated(in_q, q, positions, table, is_neox, offset, inverse)
        assert_rotated(in_k, k, positions, table, is_neox, offset, inverse)


def test_known_values(device: str) -> None:
    # A quarter turn, and 3 + 4i times 0.6 + 0.8i.
    table = torch.tensor([[0.0, 0.6, 1.0, 0.8]], device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    for is_neox, inverse, want in (
        (True, False, [-5.0, -1.4, 2.0, 4.8, 7.0]),
        (True, True, [5.0, 5.0, -2.0, 0.0, 7.0]),
        (False, False, [-3.0, 2.0, -1.0, 7.0, 7.0]),
        (False, True, [3.0, -2.0, 7.0, -1.0, 7.0]),
    ):
        x = torch.tensor([[2.0, 3.0, 5.0, 4.0, 7.0]] if is_neox else [[2.0, 3.0, 5.0, 5.0, 7.0]], device=device)
        rotary_embedding_(position, x, None, 5, table, is_neox, 0, inverse)
        assert torch.allclose(x.cpu(), torch.tensor([want]), atol=1e-6), (is_neox, inverse)


@pytest.mark.parametrize("is_neox", [True, False])
def test_inverse_brings_back(device: str, is_neox: bool) -> None:
    x = make(9, 3, 96, FP32)
    table, positions = build_cos_sin_cache(72, LENGTH, device=device), make_positions(9, device=device)
    there = x.to(device, copy=True)
    rotary_embedding_(positions, there, None, 96, table, is_neox, 24)
    assert relative_error(there.cpu(), x) > 0.1
    rotary_embedding_(positions, there, None, 96, table, is_neox, 24, inverse=True)
    assert relative_error(there.cpu(), x) < 2**-22


@pytest.mark.parametrize("is_neox", [True, False])
def test_a_product_depends_on_the_distance_alone(device: str, is_neox: bool) -> None:
    length, table = 3000, build_cos_sin_cache(128, 3000, device=device)
    q, k = (torch.randn(128, generator=torch.Generator().manual_seed(i)).repeat(length, 1).to(device) for i in (0, 1))
    rotary_embedding_(torch.arange(length, device=device), q, k, 128, table, is_neox)
    products = q.double() @ k.double().t()
    for distance in (0, 1, 17, 1000, 2999):
        assert products.diagonal(distance).std(correction=0) < 2e-5
        assert products.diagonal(-distance).std(correction=0) < 2e-5
    assert products[0].std() > 1


@pytest.mark.parametrize("section", [[3, 6, 7], [16, 0, 0], [0, 0, 16], [0, 15, 1], [5, 5, 6]])
@pytest.mark.parametrize("is_neox", [True, False])
def test_mrope(device: str, is_neox: bool, section: list[int]) -> None:
    q, k = make(7, 4, 46), make(7, 1, 46, seed=1)
    table = make_table(32, device=device)
    rows = make_positions(7, torch.int32) * torch.tensor([[1], [3], [7]], dtype=torch.int32) % LENGTH
    rows[1, 2], rows[2, 3], rows[0, 4], rows[2, 4] = -1, LENGTH, -(2**31), 2**31 - 1
    for positions in (rows.to(device), rows.long().to(device), padded(rows.to(device), 9)):
        in_q, in_k = q.to(device, copy=True), k.to(device, copy=True)
        rotary_embedding_(positions, in_q, in_k, 46, table, is_neox, 10, False, section)
        assert_rotated(in_q, q, positions, table, is_neox, 10, section=section)
        assert_rotated(in_k, k, positions, table, is_neox, 10, section=section)


def test_mrope_of_three_equal_positions_is_plain(device: str) -> None:
    positions, table = make_positions(7, device=device), make_table(96, device=device)
    x = make(7, 4, 96, device=device)
    plain = x.clone()
    rotary_embedding_(positions, plain, None, 96, table)
    rotary_embedding_(positions.repeat(3, 1), x, None, 96, table, mrope_section=[13, 14, 21])
    assert torch.equal(bits(x), bits(plain))


@pytest.mark.parametrize("name", ["rotary_embedding_", "qk_norm_rope_"])
def test_positions_outside_of_the_table(device: str, name: str) -> None:
    # Some are inside if they are taken modulo 2**32, or as Python takes a negative index.
    wrong = [-1, -LENGTH, LENGTH, LENGTH + 7, 2**30, 2**31 - 1, -(2**31)]
    beyond = [2**32 + 1, 2**40, -(2**40), -(2**32) + 3, 2**63 - 1, -(2**63)]
    around = torch.full((LENGTH + 20, 64), math.nan)
    around[10:-10] = make_table(64)
    table = around.to(device)[10:-10]
    for dtype, bad in ((torch.int32, wrong), (torch.int64, wrong + beyond)):
        positions = torch.tensor([0, *itertools.chain.from_iterable((p, LENGTH - 1) for p in bad)], dtype=dtype)
        tokens = len(positions)
        x = make(tokens, 5, 80)
        x[1, 0, 0], x[1, 1, 3] = math.nan, math.inf
        out = x.to(device, copy=True)
        if name == "rotary_embedding_":
            rotary_embedding_(positions.to(device), out, None, 80, table)
        else:
            x = rms_norm(x.to(device)).cpu()
            qk_norm_rope_(positions.to(device), out, None, 80, None, None, table)
        assert torch.equal(bits(out)[1::2], bits(x)[1::2])
        good = torch.tensor([0, *range(2, tokens, 2)])
        assert_rotated(out[good.to(device)], x[good], positions[good], table)
        assert not torch.equal(out.cpu()[good], x[good])


def test_a_table_without_rows_rotates_nothing(device: str) -> None:
    x = make(4, 2, 64)
    out = x.to(device, copy=True)
    rotary_embedding_(make_positions(4, device=device), out, None, 64, torch.empty(0, 32, device=device))
    assert torch.equal(bits(out), bits(x))


def test_nan_stays_in_its_pair(device: str) -> None:
    x = make(3, 2, 64, FP32)
    clean, bad = x.to(device, copy=True), x.clone()
    bad[1, 0, 5] = math.nan
    bad = bad.to(device, copy=True)
    positions, table = make_positions(3, device=device), make_table(48, device=device)
    for each in (clean, bad):
        rotary_embedding_(positions, each, None, 64, table)
    assert bad.isnan().nonzero().tolist() == [[1, 0, 5], [1, 0, 29]]
    assert torch.equal(bad.nan_to_num(nan=0.0)[~bad.isnan()], clean[~bad.isnan()])


# The norm ahead of it


def exact_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    values = x.cpu().double()
    normed = values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * (weight.cpu().double() + offset)


def assert_normed_and_rotated(
    out: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, *args: Any, **kwargs: Any
) -> None:
    """The definition in float64; the norm is rounded to the dtype, and after it the rotation."""
    normed = exact_norm(x, weight, eps, offset)
    want, size = exact(normed, *args, **kwargs)
    info, size = torch.finfo(out.dtype), size.nan_to_num(0.0)
    bound = (want.abs() + size) * (info.eps / 2 * 1.01 + 8 * 2.0**-24)
    over = ((out.cpu().double() - want).abs() > bound + 4 * info.smallest_normal * info.eps) | out.cpu().isnan()
    assert not bool(over.any()), f"{int(over.sum())} of {over.numel()}, the first at {over.nonzero()[0].tolist()}"


@pytest.mark.parametrize(
    ("head_size", "rotary_dim"), [(h, r) for h in (64, 128, 192, 256) for r in (32, 64, 96, 128) if r <= h]
)
@pytest.mark.parametrize(
    ("device", "tokens"),
    [("cpu", 1), ("cpu", 9), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (1, 9, 511, 512, 640, 2049))],
)
def test_case_034_partial_rotation_after_the_norm(device: str, tokens: int, head_size: int, rotary_dim: int) -> None:
    q, k = make(tokens, 16, head_size), make(tokens, 4, head_size, seed=1)
    weights = [(1 + torch.randn(head_size, generator=torch.Generator().manual_seed(i)) / 4).to(BF16) for i in (0, 1)]
    table, positions = build_cos_sin_cache(rotary_dim, LENGTH), make_positions(tokens)
    for is_neox in (True, False):
        in_q, in_k = q.to(device, copy=True), k.to(device, copy=True)
        of_q, of_k = (weight.to(device) for weight in weights)
        qk_norm_rope_(positions.to(device), in_q, in_k, head_size, of_q, of_k, table.to(device), 1e-6, 0.0, is_neox)
        for out, x, weight in ((in_q, q, weights[0]), (in_k, k, weights[1])):
            assert_normed_and_rotated(out, x, weight, 1e-6, 0.0, positions, table, is_neox)
            normed = rms_norm(x.to(device), weight.to(device))
            assert torch.equal(bits(out[..., rotary_dim:]), bits(normed[..., rotary_dim:]))


WEIGHTS: dict[str, Callable[[int, torch.dtype], tuple[Tensor | None, float]]] = {
    "none": lambda size, dtype: (None, 0.0),
    "none, offset ignored": lambda size, dtype: (None, 1.0),
    "own dtype": lambda size, dtype: (torch.linspace(0.5, 2, size).to(dtype), 0.0),
    "float32": lambda size, dtype: (torch.linspace(0.5, 2, size), 0.0),
    "less one": lambda size, dtype: (torch.linspace(-0.5, 1, size).to(dtype), 1.0),
    "less one, float32": lambda size, dtype: (torch.linspace(-0.5, 1, size), 1.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_qk_norm_rope_has_the_bits_of_the_ops_apart(device: str, name: str, dtype: torch.dtype) -> None:
    for head_size, rotary_dim, offset in PARTS:
        q, k = make(5, 5, head_size, dtype), make(5, 2, head_size, dtype, 1)
        weight, weight_offset = WEIGHTS[name](head_size, dtype)
        of_q = None if weight is None else weight.to(device)
        of_k = None if weight is None else weight.flip(0).to(device)
        section = [rotary_dim // 4, 0, rotary_dim // 2 - rotary_dim // 4] if head_size % 3 == 0 else None
        positions, table = make_positions(5, device=device), make_table(rotary_dim, dtype, device)
        positions[3] = LENGTH
        if section is not None:
            positions = torch.stack([positions, positions.flip(0), positions.roll(1)])
        for is_neox in (True, False):
            in_q, in_k = q.to(device, copy=True), k.to(device, copy=True)
            want_q, want_k = rms_norm(in_q, of_q, 1e-5, weight_offset), rms_norm(in_k, of_k, 1e-5, weight_offset)
            rotary_embedding_(positions, want_q, want_k, head_size, table, is_neox, offset, False, section)
            qk_norm_rope_(
                positions, in_q, in_k, head_size, of_q, of_k, table, 1e-5, weight_offset, is_neox, offset, section
            )
            assert torch.equal(bits(in_q), bits(want_q))
            assert torch.equal(bits(in_k), bits(want_k))
            assert_normed_and_rotated(
                in_k, k, of_k, 1e-5, weight_offset, positions, table, is_neox, offset, section=section
            )


def test_eps_keeps_heads_of_zeros_and_denormals_finite(device: str) -> None:
    x = torch.zeros(2, 2, 64)
    x[1] = 1e-30
    out = x.to(device, copy=True)
    positions, table = make_positions(2, device=device), make_table(64, device=device)
    qk_norm_rope_(positions, out, None, 64, None, None, table)
    assert out[0].abs().max() == 0
    assert_normed_and_rotated(out, x, None, 1e-6, 0.0, positions, table)


# Layouts


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("tokens", [1, 7])
def test_case_033_slices_of_mla(device: str, tokens: int, is_neox: bool) -> None:
    """The last 64 of each head's 192 in q, and of the 576 of k that all heads share."""
    wide_q, wide_k = make(tokens, 16, 192), make(tokens, 1, 576, seed=1)
    positions, table = make_positions(tokens, device=device), make_table(64, device=device)
    in_q, check_q = guarded((tokens, 16, 192), device=device)
    in_k, check_k = guarded((tokens, 576), device=device)
    in_q.copy_(wide_q)
    in_k.copy_(wide_k[:, 0])
    q, k = in_q[..., 128:], in_k[:, 512:].unsqueeze(1)
    apart_q, apart_k = q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
    rotary_embedding_(positions, q, k, 64, table, is_neox)
    check_q()
    check_k()
    assert torch.equal(bits(in_q[..., :128]), bits(wide_q[..., :128]))
    assert torch.equal(bits(in_k[:, :512]), bits(wide_k[:, 0, :512]))
    rotary_embedding_(positions, apart_q, apart_k, 64, table, is_neox)
    assert torch.equal(bits(q), bits(apart_q))
    assert torch.equal(bits(k), bits(apart_k))
    assert_rotated(q, wide_q[..., 128:], positions, table, is_neox)
    # The same by rope_dim_offset.
    whole_q, whole_k = wide_q.to(device, copy=True), wide_k.to(device, copy=True)
    rotary_embedding_(positions, whole_q, None, 192, table, is_neox, 128)
    rotary_embedding_(positions, whole_k, None, 576, table, is_neox, 512)
    assert torch.equal(bits(whole_q), bits(in_q))
    assert torch.equal(bits(whole_k[:, 0]), bits(in_k))


def run(name: str, positions: Tensor, q: Tensor, k: Tensor | None, size: int, table: Tensor, is_neox: bool) -> None:
    if name == "rotary_embedding_":
        rotary_embedding_(positions, q, k, size, table, is_neox)
    else:
        weight = torch.linspace(0.5, 2, size, device=q.device)
        qk_norm_rope_(positions, q, k, size, weight, weight.to(q.dtype), table, 1e-6, 0.0, is_neox)


NAMES = ["rotary_embedding_", "qk_norm_rope_"]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(46, 6), (64, 64), (96, 72), (128, 128)])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_slices_of_one_packed_qkv(
    device: str, gap: int, head_size: int, rotary_dim: int, name: str, is_neox: bool
) -> None:
    tokens, heads, kv_heads = 6, 5, 2
    widths = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    qkv, check = guarded((tokens, sum(widths)), device=device, pitch=sum(widths) + gap)
    qkv.copy_(make(tokens, 1, sum(widths))[:, 0])
    before = qkv.clone()
    positions, table = make_positions(tokens, device=device), make_table(rotary_dim, device=device)
    want_q, want_k, _ = (x.contiguous() for x in qkv.split(widths, -1))
    run(name, positions, want_q, want_k, head_size, table, is_neox)
    for three in (False, True):
        qkv.copy_(before)
        q, k, v = qkv.split(widths, -1)
        if three:
            q, k = q.unflatten(-1, (heads, head_size)), k.unflatten(-1, (kv_heads, head_size))
        run(name, positions, q, k, head_size, table, is_neox)
        assert torch.equal(bits(q.reshape(tokens, -1)), bits(want_q))
        assert torch.equal(bits(k.reshape(tokens, -1)), bits(want_k))
        assert torch.equal(bits(v), bits(before.split(widths, -1)[2]))
        check()
    assert not torch.equal(want_q, before[:, : widths[0]])


def views() -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to store a (6, 5, 64)."""
    return {
        "gaps": lambda x: padded(x, 72),
        "odd pitch": lambda x: padded(x, 65),
        "gaps between tokens": lambda x: padded(x.flatten(1), 5 * 64 + 24),
        "odd gaps between tokens": lambda x: padded(x.flatten(1), 5 * 64 + 3).unflatten(1, (5, 64)),
        "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "every second head": lambda x: x.repeat_interleave(2, 1)[:, ::2],
        "every second token": lambda x: x.repeat_interleave(2, 0)[1::2],
        "between others": lambda x: torch.cat([x] * 3, 2)[..., 64:128],
    }


@pytest.mark.parametrize("layout", views())
@pytest.mark.parametrize("name", NAMES)
def test_case_029_layouts_give_what_their_copies_give(device: str, name: str, layout: str) -> None:
    q, k = make(6, 5, 64, device=device), make(6, 5, 64, seed=1, device=device)
    positions, table = make_positions(6, device=device), make_table(48, device=device)
    in_q, in_k = views()[layout](q), views()[layout](k)
    around = in_q._base if in_q._base is not None else in_q
    before = around.clone()
    run(name, positions, in_q, in_k, 64, padded(table, 51), True)
    run(name, positions, q, k, 64, table, True)
    assert torch.equal(bits(in_q.reshape(6, 5, 64)), bits(q))
    assert torch.equal(bits(in_k.reshape(6, 5, 64)), bits(k))
    # Nothing else has changed: with q back in its place, all is as before.
    in_q.copy_(views()[layout](make(6, 5, 64, device=device)))
    assert torch.equal(bits(around), bits(before))


def test_positions_and_weights_of_any_stride(device: str) -> None:
    x, positions, table = make(6, 5, 64, device=device), make_positions(6, device=device), make_table(64, device=device)
    weight = torch.linspace(0.5, 2, 64, device=device)
    apart = [each.repeat_interleave(2)[::2] for each in (positions, weight)]
    want = x.clone()
    qk_norm_rope_(positions, want, None, 64, weight, None, table)
    qk_norm_rope_(apart[0], x, None, 64, apart[1], None, table)
    assert torch.equal(bits(x), bits(want))
    rotary_embedding_(positions, want, None, 64, table)
    rotary_embedding_(apart[0], x, None, 64, table)
    assert torch.equal(bits(x), bits(want))
    # Positions of M-RoPE that lie by token, and one that all tokens share.
    rotary_embedding_(positions.repeat(3, 1), want, None, 64, table, mrope_section=[5, 16, 11])
    rotary_embedding_(positions[:, None].repeat(1, 3).t(), x, None, 64, table, mrope_section=[5, 16, 11])
    assert torch.equal(bits(x), bits(want))
    rotary_embedding_(positions[:1].repeat(6), want, None, 64, table)
    rotary_embedding_(positions[:1].expand(6), x, None, 64, table)
    assert torch.equal(bits(x), bits(want))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", range(1, 8))
def test_case_030_alignment_changes_no_bit(device: str, offset: int, name: str, dtype: torch.dtype) -> None:
    for head_size, rotary_dim, is_neox in ((64, 64, True), (128, 64, True), (96, 72, False), (46, 6, True)):
        q, k = make(5, 3, head_size, dtype), make(5, 1, head_size, dtype, 1)
        for of_model in (False, True):
            table = make_table(rotary_dim, dtype if of_model else FP32, device)
            positions = make_positions(5, device=device)
            weight = torch.linspace(0.5, 2, head_size).to(dtype).to(device)
            outs = []
            for moved in range(6):  # none, each argument alone, all
                place = [misaligned if moved in (i, 5) else lambda x, _: x.clone() for i in range(1, 5)]
                in_q, in_k = place[0](q.to(device), offset), place[1](k.to(device), offset)
                of, at = place[2](table, offset), place[3](positions, offset)
                if name == "rotary_embedding_":
                    rotary_embedding_(at, in_q, in_k, head_size, of, is_neox)
                else:
                    w = place[3](weight, offset)
                    qk_norm_rope_(at, in_q, in_k, head_size, w, w, of, 1e-6, 0.0, is_neox)
                outs.append((bits(in_q), bits(in_k)))
            for out in outs[1:]:
                assert torch.equal(out[0], outs[0][0])
                assert torch.equal(out[1], outs[0][1])


@pytest.mark.parametrize("name", NAMES)
def test_a_heads_bits_do_not_depend_on_what_is_beside_it(device: str, name: str) -> None:
    positions, table = make_positions(9, device=device), make_table(64, device=device)
    q, k = make(9, 8, 128, device=device), make(9, 3, 128, seed=1, device=device)
    parts = [(q[t : t + 1, h : h + 1].clone(), positions[t : t + 1]) for t in range(9) for h in range(8)]
    run(name, positions, q, k, 128, table, True)
    for part, position in parts:
        run(name, position, part, None, 128, table, True)
    assert torch.equal(bits(torch.cat([part for part, _ in parts]).view(9, 8, 128)), bits(q))


@pytest.mark.parametrize("name", NAMES)
def test_repeats_give_the_same_bits(device: str, name: str) -> None:
    tokens, repeats = (700, 100) if device == "cuda" else (40, 5)
    positions, table = make_positions(tokens, device=device), make_table(96, device=device)
    q, k = make(tokens, 6, 128, device=device), make(tokens, 2, 128, seed=1, device=device)
    first: list[Tensor] = []
    for _ in range(repeats):
        in_q, in_k = q.clone(), k.clone()
        run(name, positions, in_q, in_k, 128, table, True)
        first = first or [in_q, in_k]
        assert torch.equal(in_q.view(torch.int16), first[0].view(torch.int16))
        assert torch.equal(in_k.view(torch.int16), first[1].view(torch.int16))


@pytest.mark.parametrize("name", NAMES)
def test_empty(device: str, name: str) -> None:
    positions, table = make_positions(4, device=device), make_table(32, device=device)
    for q_shape, k_shape in (
        ((0, 4, 64), (0, 2, 64)),
        ((0, 256), (0, 128)),
        ((4, 0, 64), (4, 2, 64)),
        ((4, 2, 64), (4, 0)),
        ((0, 0), (0, 0, 64)),
    ):
        q, k = torch.ones(q_shape, dtype=BF16, device=device), torch.ones(k_shape, dtype=BF16, device=device)
        run(name, positions[: q_shape[0]], q, k, 64, table, True)
        assert q.shape == q_shape
        x = torch.ones(4, 2, 64, dtype=BF16, device=device)
        run(name, positions, x, None, 64, table, True)
        for each in (q, k):
            if each.numel():
                assert torch.equal(each.view(4, 2, 64)[..., :32], x[..., :32])
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 96), (256, 72)])
@pytest.mark.parametrize(("tokens", "heads"), [(10241, (3, 2)), (10241, (24, 6)), (65535, (3, 2)), (65536, (3, 2))])
def test_case_025_many_tokens(
    tokens: int, heads: tuple[int, int], head_size: int, rotary_dim: int, is_neox: bool, name: str
) -> None:
    q, k = (torch.randn(tokens, n * head_size, device="cuda") for n in heads)
    q, k, length = q.to(BF16), k.to(BF16), 20000
    positions = make_positions(tokens, torch.int32, "cuda", length)
    table = build_cos_sin_cache(rotary_dim, length, device="cuda")
    before = q.clone(), k.clone()
    run(name, positions, q, k, head_size, table, is_neox)
    for at in (0, tokens - 1, *range(5, tokens, 997)):
        few = before[0][at : at + 1].clone(), before[1][at : at + 1].clone()
        run(name, positions[at : at + 1], *few, head_size, table, is_neox)
        assert torch.equal(few[0], q[at : at + 1])
        assert torch.equal(few[1], k[at : at + 1])
    if name == "rotary_embedding_" and tokens == 10241:
        for pair in ((q, before[0]), (k, before[1])):
            out, x = (each.unflatten(1, (-1, head_size)) for each in pair)
            assert_rotated(out, x, positions, table, is_neox)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_more_tokens_than_two_grid_dimensions_of_16_bits(name: str) -> None:
    tokens = 262141
    x = torch.randn(tokens, 2, 64, device="cuda").to(BF16)
    positions, table = make_positions(tokens, device="cuda"), make_table(64, device="cuda")
    before = x.clone()
    run(name, positions, x, None, 64, table, True)
    for part in (slice(0, 5), slice(65533, 65540), slice(tokens - 5, tokens)):
        few = before[part].clone()
        run(name, positions[part], few, None, 64, table, True)
        assert torch.equal(few, x[part])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_offsets_beyond_32_bits(name: str) -> None:
    buffer = torch.full((2**31 + 2**12,), 1e4, dtype=BF16, device="cuda")
    x = make(3, 2, 64, device="cuda")
    positions, table = make_positions(3, device="cuda"), make_table(64, device="cuda")
    far = buffer.as_strided((3, 2, 64), (2**30, 64, 1)).copy_(x)
    run(name, positions, far, None, 64, table, True)
    beside = buffer.as_strided((3, 2, 64), (64, 2**30, 1), 2**11).copy_(x)
    run(name, positions, beside, None, 64, table, True)
    run(name, positions, x, None, 64, table, True)
    assert torch.equal(far, x)
    assert torch.equal(beside, x)
    # A table whose rows lie as far apart.
    wide = buffer.view(torch.float32).as_strided((3, 64), (2**29, 1))
    wide.copy_(table[:3])
    out, want = make(3, 2, 64, device="cuda"), make(3, 2, 64, device="cuda")
    run(name, positions % 3, out, None, 64, wide, True)
    run(name, positions % 3, want, None, 64, table, True)
    assert torch.equal(out, want)


# Errors

Q, P, T = torch.ones(4, 3, 8), torch.zeros(4, dtype=torch.int64), torch.ones(9, 6)
P3 = P.repeat(3, 1)
GOOD: dict[str, Any] = {"positions": P, "q": Q, "k": torch.ones(4, 2, 8), "head_size": 8, "cos_sin_cache": T}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": Q.double()}, "q is torch.float64; it must be torch.bfloat16, torch.float16 or torch.float32"),
    ({"q": Q[0, 0, 0]}, "q has no dimension; it must have at least one"),
    ({"q": Q[0, 0]}, "q is [8]; it must be (tokens, heads * head_size) or (tokens, heads, head_size)"),
    ({"q": Q[None]}, "q is [1, 4, 3, 8]; it must be (tokens, heads * head_size) or (tokens, heads, head_size)"),
    ({"q": torch.ones(4, 20)}, "q is [4, 20]; its last dimension must be a multiple of head_size, 8"),
    ({"q": torch.ones(4, 3, 16)}, "q is [4, 3, 16]; its last dimension must be head_size, 8"),
    ({"q": torch.ones(4, 8, 3).transpose(1, 2)}, "q has the strides [24, 1, 3]; its last dimension must have stride"),
    ({"q": torch.ones(24, 4).t()}, "q has the strides [1, 4]; its last dimension must have stride one"),
    ({"head_size": 0}, "head_size is 0; it must be at least 1"),
    ({"k": Q.half()}, "k is torch.float16; it must be the dtype of q, torch.float32"),
    ({"k": Q[:3]}, "k is [3, 3, 8]; it must have as many tokens as q, 4"),
    ({"k": torch.ones(4, 3, 4)}, "k is [4, 3, 4]; its last dimension must be head_size, 8"),
    ({"k": torch.ones(4, 12)}, "k is [4, 12]; its last dimension must be a multiple of head_size, 8"),
    ({"k": torch.ones(4)}, "k is [4]; it must be (tokens, heads * head_size) or (tokens, heads, head_size)"),
    ({"k": torch.ones(8, 4).t()}, "k has the strides [1, 4]; its last dimension must have stride one"),
    ({"positions": P.float()}, "positions is torch.float32; it must be torch.int32 or torch.int64"),
    ({"positions": P.to(torch.int16)}, "positions is torch.int16; it must be torch.int32 or torch.int64"),
    ({"positions": P[:3]}, "positions is [3]; it must be [4], one for each token of q"),
    ({"positions": P3}, "positions is [3, 4]; it must be [4], one for each token of q"),
    ({"mrope_section": [1, 1, 1]}, "positions is [4]; it must be [3, 4], with mrope_section three for each token of q"),
    (
        {"cos_sin_cache": T.half()},
        "cos_sin_cache is torch.float16; it must be torch.float32 or the dtype of q, torch.float32",
    ),
    (
        {"cos_sin_cache": T[0]},
        "cos_sin_cache is [6]; it must be (length, rotary_dim), with a rotary_dim that is even and at least 2",
    ),
    ({"cos_sin_cache": T[:, :5]}, "cos_sin_cache is [9, 5]; it must be (length, rotary_dim), with a rotary_dim that"),
    ({"cos_sin_cache": T[:, :0]}, "cos_sin_cache is [9, 0]; it must be (length, rotary_dim), with a rotary_dim that"),
    (
        {"cos_sin_cache": torch.ones(9, 10)},
        "cos_sin_cache is [9, 10]; its last dimension must be at most head_size - rope_dim_offset, 8",
    ),
    (
        {"rope_dim_offset": 3},
        "cos_sin_cache is [9, 6]; its last dimension must be at most head_size - rope_dim_offset, 5",
    ),
    ({"rope_dim_offset": -1}, "rope_dim_offset is -1; it must be at least 0"),
    ({"cos_sin_cache": torch.ones(6, 9).t()}, "cos_sin_cache has the strides [1, 9]; its last dimension must have"),
    *(
        (
            {"positions": P3, "mrope_section": section},
            f"mrope_section is {section}; it must be three numbers, none of them negative, that add up to "
            "rotary_dim / 2, 3",
        )
        for section in ([1, 1], [1, 1, 2], [2, 2, -1], [], [1, 1, 1, 0])
    ),
]
WRONG_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    ({"q_weight": torch.ones(7)}, "q_weight is [7]; it must be [8], as a head"),
    ({"k_weight": torch.ones(8, 1)}, "k_weight is [8, 1]; it must be [8], as a head"),
    (
        {"q_weight": torch.ones(8).half()},
        "q_weight is torch.float16; it must be torch.float32 or the dtype of q, torch.float32",
    ),
    ({"k_weight": torch.ones(8).double()}, "k_weight is torch.float64; it must be torch.float32 or the dtype of q"),
]


def assert_refused(device: str, name: str, arguments: dict[str, Any], sentence: str) -> None:
    """With that sentence, and before anything is written."""
    kinds = (RuntimeError,) if device == "cuda" else (TypeError, ValueError)
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor) and not value.is_meta}
    before = {key: value.clone() for key, value in tensors.items()}
    with pytest.raises(kinds, match="^" + re.escape(f"{name}: {sentence}")):
        getattr(cutegemm, name)(**arguments)
    for key, value in tensors.items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [(name, *case) for name in NAMES for case in WRONG] + [("qk_norm_rope_", *case) for case in WRONG_WEIGHTS],
)
def test_errors(device: str, name: str, wrong: dict[str, Any], sentence: str) -> None:
    more: dict[str, Any] = {"q_weight": None, "k_weight": None} if name == "qk_norm_rope_" else {}
    arguments = {**GOOD, **more, **wrong}
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in arguments.items()}
    assert_refused(device, name, moved, sentence)


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_devices_and_overlaps(device: str, name: str) -> None:
    more: dict[str, Any] = {"q_weight": torch.ones(8), "k_weight": torch.ones(8)} if name == "qk_norm_rope_" else {}
    arguments = {
        key: value.to(device) if isinstance(value, Tensor) else value for key, value in {**GOOD, **more}.items()
    }
    other = "cpu" if device == "cuda" else "meta"
    here = arguments["q"].device
    for key in arguments.keys() - {"q", "head_size"}:
        wrong = {**arguments, key: arguments[key].to(other)}
        assert_refused(device, name, wrong, f"{key} is on {other}; it must be on the device of q, {here}")
    one = torch.ones(4, 1, 8, device=device)
    for key in ("q", "k"):
        for view in (one.expand(4, 3, 8), one[:1].expand(4, 1, 8), one.view(-1).as_strided((4, 3, 8), (7, 1, 1))):
            assert_refused(
                device, name, {**arguments, key: view},
                f"{key} has the strides {list(view.stride())}; its heads must not overlap, since it is written",
            )  # fmt: skip


# Graphs, streams, compilation, costs


def test_compiles_with_dynamic_shapes(device: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="inductor" if device == "cuda" else "aot_eager", dynamic=True, fullgraph=True)
    def f(positions: Tensor, qkv: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        q, k, v = (qkv * 2).split([192, 64, 64], -1)
        qk_norm_rope_(positions, q, k, 64, weight, weight, table)
        rotary_embedding_(positions, q, k.view(-1, 1, 64), 64, table, False, 8, True)
        rotary_embedding_(positions, qkv[:, :64], None, 64, table)  # writes an input of the graph
        return torch.cat([q, k, v], -1) + qkv

    table, weight = make_table(48, device=device), torch.linspace(0.5, 2, 64, device=device)
    for tokens in (3, 8, 1):
        positions, qkv = make_positions(tokens, device=device), make(tokens, 1, 320, device=device)[:, 0]
        other = qkv.clone()
        want = f.__wrapped__(positions, other, weight, table)
        assert_same(f(positions, qkv, weight, table), want)
        assert torch.equal(qkv, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_graph_replay_follows_positions_and_heads(name: str) -> None:
    q, k = make(40, 4, 96, device="cuda"), make(40, 2, 96, seed=1, device="cuda")
    positions, table = make_positions(40, device="cuda"), make_table(72, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # the first call of the library may be this one
            run(name, positions, q, k, 96, table, True)
        for seed in (2, 3):
            torch.cuda._sleep(20_000_000)
            q.copy_(make(40, 4, 96, seed=seed))
            k.copy_(make(40, 2, 96, seed=seed + 5))
            positions.copy_((make_positions(40) * seed + 1) % (LENGTH + 2))
            want = q.clone(), k.clone()
            graph.replay()
            run(name, positions, *want, 96, table, True)
            assert torch.equal(bits(q), bits(want[0]))
            assert torch.equal(bits(k), bits(want[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_current_stream(name: str) -> None:
    source, x = make(64, 8, 128, device="cuda"), torch.zeros(64, 8, 128, dtype=BF16, device="cuda")
    positions, table = make_positions(64, device="cuda"), make_table(128, device="cuda")
    want = source.clone()
    run(name, positions, want, None, 128, table, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
        run(name, positions, x, None, 128, table, True)
    stream.synchronize()
    assert torch.equal(bits(x), bits(want))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_case_041_another_than_the_current_device(name: str) -> None:
    x = make(8, 2, 128)
    outs = []
    for device in ("cuda:0", "cuda:1"):
        outs.append(x.to(device, copy=True))
        run(name, make_positions(8, device=device), outs[-1], None, 128, make_table(64, device=device), True)
        assert torch.cuda.current_device() == 0
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    with pytest.raises(RuntimeError, match=r"positions is on cuda:0; it must be on the device of q, cuda:1"):
        run(name, make_positions(8, device="cuda:0"), outs[1], None, 128, make_table(64, device="cuda:1"), True)


def test_costs() -> None:
    q, k, table = Q.to(BF16), Q[:, :2].to(BF16), torch.ones(9, 6)
    moved = 8 * 4 + 4 * 6 * 4  # positions, and four rows of the table
    values = 4 * (3 + 2) * 2
    assert OPS["rotary_embedding_"].bytes(P, q, k, 8, table, False) == moved + 2 * 6 * values
    assert OPS["rotary_embedding_"].bytes(positions=P, q=q, k=None, head_size=8, cos_sin_cache=table[:2]) == (
        8 * 4 + 2 * 6 * 4 + 2 * 6 * 4 * 3 * 2
    )
    assert OPS["qk_norm_rope_"].bytes(P, q, k, 8, torch.ones(8), None, table) == moved + 2 * 8 * values + 8 * 4


# Tables


def frequencies(table: Tensor) -> list[float]:
    """Of its pairs, by the angles of row 1, to a float32's relative accuracy: none is over pi."""
    pairs = table.shape[1] // 2
    return torch.atan2(table[1, pairs:].double(), table[1, :pairs].double()).tolist()


def attention_factor(table: Tensor) -> float:
    pairs = table.shape[1] // 2
    lengths = table[:, :pairs].double().square() + table[:, pairs:].double().square()
    assert lengths.max() - lengths.min() < 1e-6
    return math.sqrt(float(lengths.mean()))


def plain(rotary_dim: int, base: float) -> list[float]:
    """By steps of the ratio between one frequency and the next."""
    ratio = base ** (-1 / (rotary_dim // 2))
    return list(itertools.accumulate(range(rotary_dim // 2 - 1), lambda f, _: f * ratio, initial=1.0))


def close(values: list[float], want: list[float]) -> bool:
    return len(values) == len(want) and all(math.isclose(a, b, rel_tol=3e-7) for a, b in zip(values, want, strict=True))


@pytest.mark.parametrize(("rotary_dim", "base"), [(2, 10000.0), (6, 100), (72, 10000.0), (128, 500000.0), (576, 1e6)])
def test_plain_table(rotary_dim: int, base: float) -> None:
    length, pairs = 131073, rotary_dim // 2
    table = build_cos_sin_cache(rotary_dim, length, base)
    assert table.dtype == FP32 and table.shape == (length, rotary_dim) and table.is_contiguous()
    assert close(frequencies(table), plain(rotary_dim, base))
    assert table[0].tolist() == [1.0] * pairs + [0.0] * pairs
    # One rounding to float32, which angles in float32 would exceed by far, and the float64 of p * frequency.
    for p in (1, 2, 1000, 65537, 131072):
        for i in range(pairs):
            turn = cmath.exp(1j * (p * math.exp(-math.log(base) * 2 * i / rotary_dim)))
            assert abs(table[p, i].item() - turn.real) < 2**-25 + 1e-9
            assert abs(table[p, pairs + i].item() - turn.imag) < 2**-25 + 1e-9


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_tables_dtype_and_device(device: str, dtype: torch.dtype) -> None:
    table = build_cos_sin_cache(64, 100, 500.0)
    made = build_cos_sin_cache(64, 100, 500.0, dtype=dtype, device=device)
    assert made.device.type == device
    assert torch.equal(made.cpu(), table.to(dtype))
    with torch.device("meta"):
        assert build_cos_sin_cache(64, 100).is_meta
    assert build_cos_sin_cache(64, 0, dtype=dtype, device=device).shape == (0, 64)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_types_without_scaling(key: str) -> None:
    table = build_cos_sin_cache(64, 100, 500000.0)
    sections = {key: "mrope", "mrope_section": [8, 12, 12]}
    for scaling in (None, {}, {key: "default"}, {key: "default", "rope_theta": 500000.0, "factor": 8.0}, sections):
        assert torch.equal(build_cos_sin_cache(64, 100, 500000.0, scaling), table)


def test_linear_scaling_interpolates_positions() -> None:
    table = build_cos_sin_cache(64, 100)
    scaled = build_cos_sin_cache(64, 400, scaling={"type": "linear", "factor": 4.0})
    assert torch.equal(scaled[::4], table)
    assert close(
        frequencies(build_cos_sin_cache(64, 2, scaling={"rope_type": "linear", "factor": 3})),
        [f / 3 for f in plain(64, 10000)],
    )


@pytest.mark.parametrize("rotary_dim", [4, 72, 128])
def test_dynamic_scaling_keeps_the_first_frequency_and_divides_the_last(rotary_dim: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 100}
    for length in (2, 100):
        assert torch.equal(
            build_cos_sin_cache(rotary_dim, length, scaling=scaling), build_cos_sin_cache(rotary_dim, length)
        )
    found, want = frequencies(build_cos_sin_cache(rotary_dim, 250, scaling=scaling)), plain(rotary_dim, 10000)
    stretch = 3 * 250 / 100 - (3 - 1)  # 5.5
    assert close([found[0], found[-1]], [1.0, want[-1] / stretch])
    assert close(found, plain(rotary_dim, found[-1] ** (-rotary_dim / (rotary_dim - 2))))  # a plain one of another base


def test_dynamic_scaling_of_one_pair() -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 100}
    assert torch.equal(build_cos_sin_cache(2, 250, scaling=scaling), build_cos_sin_cache(2, 250))


def crossing(want: list[float], original: float, turns: float) -> float:
    """The real index at which a pair turns that many times over the original length, by bisection."""
    ratio, low, high = want[1] / want[0], -500.0, 500.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if original * ratio**middle / (2 * math.pi) > turns else (low, middle)
    return low


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("rotary_dim", "base", "factor", "original", "fast", "slow"),
    [
        (64, 10000.0, 40.0, 4096, 32, 1),  # DeepSeek-V3
        (128, 1e6, 4.0, 32768, 32, 1),  # Qwen2.5
        (64, 150000.0, 32.0, 4096, 32, 1),  # gpt-oss
        (96, 10000.0, 2.5, 2048, 20, 3),
        (6, 100.0, 8.0, 64, 32, 1),  # the ramp begins before the first pair
        (72, 10000.0, 2.0, 10**9, 10**5, 1),  # it ends far after the last, and is cut off
    ],
)
def test_yarn(rotary_dim: int, base: float, factor: float, original: int, fast: int, slow: int, truncate: bool) -> None:
    scaling = {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
        "beta_fast": fast, "beta_slow": slow, "truncate": truncate,
    }  # fmt: skip
    want = plain(rotary_dim, base)
    first, last = crossing(want, original, fast), crossing(want, original, slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    for i, f in enumerate(want):
        if i >= last:
            want[i] = f / factor
        elif i > first:
            share = (i - first) / (last - first)
            want[i] = f / factor * share + f * (1 - share)
    table = build_cos_sin_cache(rotary_dim, 50, base, scaling)
    assert close(frequencies(table), want)
    assert math.isclose(attention_factor(table), 0.1 * math.log(factor) + 1, rel_tol=1e-7)
    if (fast, slow, truncate) == (32, 1, True):
        for key in ("beta_fast", "beta_slow", "truncate"):
            del scaling[key]
        assert torch.equal(build_cos_sin_cache(rotary_dim, 50, base, scaling), table)


def test_yarn_of_deepseek_v3() -> None:
    scaling = {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    table = build_cos_sin_cache(64, 50, 10000, scaling)
    ratios = [a / b for a, b in zip(plain(64, 10000), frequencies(table), strict=True)]
    # The ramp is from pair 10 to pair 23 in DeepSeek's code.
    assert all(math.isclose(ratio, 1, rel_tol=1e-6) for ratio in ratios[:11])
    assert all(1.01 < ratio < 39.9 for ratio in ratios[11:23])
    assert all(math.isclose(ratio, 40, rel_tol=1e-6) for ratio in ratios[23:])
    assert math.isclose(attention_factor(table), 1, rel_tol=1e-7)


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({}, 1.1386294361),  # 0.1 ln 4 + 1
        ({"factor": 0.5}, 1.0),
        ({"factor": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.2772588722 / 1.1386294361),
        ({"mscale": 2.0}, 1.1386294361),
        ({"mscale": 2.0, "mscale_all_dim": 0}, 1.1386294361),
        ({"attention_factor": 0.75}, 0.75),
        ({"attention_factor": 1.25, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.25),
        ({"attention_factor": None}, 1.1386294361),
    ],
)
def test_yarns_attention_factor(more: dict[str, Any], want: float) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **more}
    assert math.isclose(attention_factor(build_cos_sin_cache(64, 50, 10000.0, scaling)), want, rel_tol=1e-7)


LLAMA3 = {  # the published parameters of Llama 3.1
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_llama3() -> None:
    table = build_cos_sin_cache(128, 2, 500000.0, LLAMA3)
    want = []
    for f in plain(128, 500000.0):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            want.append(f)
        elif wavelength > 8192 / 1:
            want.append(f / 8)
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - share) * f / 8 + share * f)
    found = frequencies(table)
    assert close(found, want)
    # Wavelengths of 2048 and 8192 lie between pairs 28 and 29, 34 and 35.
    ratios = [a / b for a, b in zip(plain(128, 500000.0), found, strict=True)]
    assert [i for i, ratio in enumerate(ratios) if 1.0001 < ratio < 7.999] == list(range(29, 35))
    assert math.isclose(found[63], 500000.0 ** (-63 / 64) / 8, rel_tol=3e-7)


LONG, SHORT = [1.0 + i / 3 for i in range(24)], [1.0 + i / 50 for i in range(24)]


@pytest.mark.parametrize(
    ("more", "attention"),
    [
        ({"factor": 32.0}, 1.1902380714),  # sqrt(1 + ln 32 / ln 4096) = sqrt(17 / 12), of Phi-3
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
        ({"attention_factor": 1.5}, 1.5),
        ({"attention_factor": 1.5, "factor": 32.0}, 1.5),
    ],
)
def test_longrope(more: dict[str, Any], attention: float) -> None:
    scaling = {
        "type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096, **more
    }  # fmt: skip
    for length, divisors in ((2, SHORT), (4096, SHORT), (4097, LONG)):
        table = build_cos_sin_cache(48, length, 10000.0, scaling)
        assert close(frequencies(table), [f / d for f, d in zip(plain(48, 10000), divisors, strict=True)])
        assert math.isclose(attention_factor(table), attention, rel_tol=1e-7)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 30},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 700, "truncate": False},
        {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
        {
            "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 4096, "short_factor": SHORT,
            "long_factor": LONG,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_scaling_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters={"rope_theta": 10000.0, **scaling},
        standardize_rope_params=lambda: None,
        hidden_size=4 * 48,
        num_attention_heads=4,
        max_position_embeddings=4096,
        head_dim=48,
    )
    for length in (100, 9000):
        theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)
        table = build_cos_sin_cache(48, length, 10000.0, scaling)
        assert torch.allclose(torch.tensor(frequencies(table)), theirs, rtol=1e-6, atol=0)
        assert math.isclose(attention_factor(table), factor, rel_tol=1e-6)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}  # fmt: skip
WRONG_TABLES: list[tuple[dict[str, Any], str]] = [
    ({"rotary_dim": 7}, "rotary_dim is 7; it must be even, and at least 2"),
    ({"rotary_dim": 0}, "rotary_dim is 0; it must be even, and at least 2"),
    ({"length": -1}, "length is -1; it must be at least 0"),
    ({"base": 1.0}, "base is 1.0; it must be more than 1"),
    ({"base": math.nan}, "base is nan; it must be more than 1"),
    ({"dtype": torch.float64}, "dtype is torch.float64; it must be torch.bfloat16, torch.float16 or torch.float32"),
    *(
        ({"scaling": scaling}, sentence)
        for scaling, sentence in (
            (
                {"rope_type": "ntk"},
                "rope_type of scaling is 'ntk'; it must be 'default', 'mrope', 'linear', 'dynamic', 'yarn', 'llama3' "
                "or 'longrope'",
            ),
            ({"factor": 2.0}, "rope_type of scaling is None; it must be 'default'"),
            (
                {"rope_type": "default", "rope_theta": 5e5},
                "base is 10000.0; it must be rope_theta of scaling, 500000.0",
            ),
            ({"type": "linear", "factor": 0}, "factor of scaling is 0; it must be positive"),
            (
                {**LLAMA3, "high_freq_factor": 1.0},
                "high_freq_factor of scaling is 1.0; it must be over low_freq_factor, 1.0",
            ),
            (
                {**YARN, "beta_fast": 1, "beta_slow": 2},
                "beta_fast of scaling is 1.0; it must be over beta_slow, 2.0",
            ),
            ({**YARN, "mscale": -1.0, "mscale_all_dim": 1.0}, "mscale of scaling is -1.0; it must be positive"),
            ({**YARN, "attention_factor": 0}, "attention_factor of scaling is 0; it must be positive"),
            (
                {**LONGROPE, "short_factor": [1.0]},
                "short_factor of scaling has 1 numbers; it must have rotary_dim / 2, 4",
            ),
        )
    ),
    *(
        (
            {"length": length, "scaling": {**scaling, key: None}},
            f"scaling has no {key}; it must have one for rope_type '{scaling['rope_type']}'",
        )
        for scaling, length, keys in (
            ({"rope_type": "linear"}, 5, ["factor"]),
            ({**YARN, "rope_type": "dynamic"}, 5, ["factor", "original_max_position_embeddings"]),
            (YARN, 5, ["factor", "original_max_position_embeddings"]),
            (LLAMA3, 5, ["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]),
            (LONGROPE, 64, ["factor", "original_max_position_embeddings", "short_factor"]),
            (LONGROPE, 65, ["long_factor"]),
        )
        for key in keys
    ),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_TABLES)
def test_errors_of_tables(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(f"build_cos_sin_cache: {sentence}")):
        build_cos_sin_cache(**{"rotary_dim": 8, "length": 5, **wrong})
