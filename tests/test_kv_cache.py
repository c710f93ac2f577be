"""Paged caches against a loop over tokens: all of the memory that a cache lies in is compared, byte for byte."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cutegemm
from cutegemm.kv_cache import (
    concat_and_cache_mla_,
    gather_cache,
    qk_norm_rope_and_cache_,
    reshape_and_cache_,
    slots_of,
)
from cutegemm.registry import OPS
from cutegemm.testing import make_operand, misaligned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES, FP8 = [BF16, FP16, FP32], [E4M3, E5M2]
LAYOUTS = ["NHD", "HND", "v1"]
MANY = 150  # tokens: from 128 on v1 has a kernel of its own
FEW_AND_MANY = [("NHD", 9), ("HND", 9), ("v1", 9), ("v1", MANY)]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

pytestmark = pytest.mark.usefixtures("one_thread")


# Memory


def same_bits(x: Tensor, y: Tensor) -> bool:
    assert x.dtype == y.dtype and x.shape == y.shape
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


class Caches:
    """A cache of keys and one of values somewhere in one memory of random bytes, and what must become of it.

    how: "apart"; "misaligned", at odd elements; "gaps", with 3 elements after each last dimension; "blocks", a block's
    keys beside its values; "interleaved", a head's keys beside its values (not v1); "permuted", NHD stored as HND and
    the other way round.
    """

    def __init__(
        self,
        layout: str,
        how: str,
        blocks: int,
        block_size: int,
        heads: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: str,
    ):
        self.layout, self.how, self.dtype, self.block_size, self.slots = layout, how, dtype, block_size, 0
        self.slots = blocks * block_size
        x = 16 // dtype.itemsize
        self.shapes = [
            {
                "NHD": (blocks, block_size, heads, size),
                "HND": (blocks, heads, block_size, size),
                "v1": (blocks, heads, size // x, block_size, x) if keys else (blocks, heads, size, block_size),
            }[layout]
            for keys, size in zip((True, False), sizes, strict=True)
        ]
        elements = 4 * sum(map(math.prod, self.shapes)) + 256
        generator = torch.Generator().manual_seed(1)
        memory = torch.randint(256, (elements * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        self.want, self.memory = memory, memory.clone().to(device)
        self.k, self.v = self._views(self.memory)

    def _views(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        flat, (k, v) = memory.view(self.dtype), self.shapes
        if self.how == "blocks":
            both = flat[64 : 64 + math.prod(k) + math.prod(v)].view(k[0], -1)
            sizes = [math.prod(k[1:]), math.prod(v[1:])]
            of_k, of_v = both.split(sizes, 1)
            return of_k.unflatten(1, k[1:]), of_v.unflatten(1, v[1:])
        if self.how == "interleaved":
            both = flat[64 : 64 + math.prod(k) + math.prod(v)].view(*k[:-1], -1)
            return both[..., : k[-1]], both[..., k[-1] :]
        views, offset = [], 64
        for shape in (k, v):
            offset += self.how == "misaligned"
            stored = [shape[0], shape[2], shape[1], shape[3]] if self.how == "permuted" else [*shape]
            pitch = stored[-1] + 3 * (self.how == "gaps")
            end = offset + math.prod(stored[:-1]) * pitch
            view = flat[offset:end].view(*stored[:-1], pitch)[..., : stored[-1]]
            views.append(view.transpose(1, 2) if self.how == "permuted" else view)
            offset = end + 64
        return views[0], views[1]

    def expect(self, keys: bool, slot: int, head: int, row: Tensor) -> None:
        """row (head_size,) must be in a slot that may not exist."""
        if not 0 <= slot < self.slots:
            return
        cache, (block, offset) = self._views(self.want)[0 if keys else 1], divmod(slot, self.block_size)
        if self.layout == "NHD":
            place = cache[block, offset, head]
        elif self.layout == "HND":
            place = cache[block, head, offset]
        elif keys:
            place, row = cache[block, head, :, offset, :], row.view(-1, 16 // row.itemsize)
        else:
            place = cache[block, head, :, offset]
        place.copy_(row)

    def expect_tokens(self, k: Tensor, v: Tensor, slots: list[int]) -> None:
        for keys, x in ((True, k.cpu()), (False, v.cpu())):
            for i, slot in enumerate(slots):
                for head in range(x.shape[1]):
                    self.expect(keys, slot, head, x[i, head].contiguous())

    def check(self) -> None:
        wrong = (self.memory.cpu() != self.want).nonzero().flatten()
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first are at {wrong[:5].tolist()}"


def make(tokens: int, heads: int, size: int, dtype: torch.dtype = BF16, seed: int = 0, device: str = "cpu") -> Tensor:
    return make_operand(tokens * heads, size, dtype, seed=seed).view(tokens, heads, size).to(device)


def make_slots(tokens: int, slots: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """Slots in random order, each once. The first, the last and some between are in no cache."""
    order = torch.randperm(max(slots, tokens), generator=torch.Generator().manual_seed(seed))[:tokens]
    order[0], order[-1] = -1, slots
    for i, slot in enumerate((-(2**31), slots + 7, 2**30, 2**31 - 1, *((2**40, -(2**40)) * (dtype == torch.int64)))):
        if 3 * i + 2 < tokens - 1:
            order[3 * i + 2] = slot
    return order.to(dtype)


def packed(*parts: Tensor) -> list[Tensor]:
    """The parts (tokens, heads, size) as slices of one (tokens, ...), as a product makes q, k and v."""
    row = torch.cat([part.flatten(1) for part in parts], 1)
    widths = [part[0].numel() for part in parts]
    return [piece.unflatten(1, part.shape[1:]) for piece, part in zip(row.split(widths, 1), parts, strict=True)]


# FP8, from its definition


def values_of(dtype: torch.dtype) -> list[float]:
    """What the codes 0, 1, 2 ... stand for, up to the largest finite one."""
    bits, bias, count = (3, 7, 0x7F) if dtype == E4M3 else (2, 15, 0x7C)
    values = []
    for code in range(count):
        exponent, fraction = code >> bits, (code & (1 << bits) - 1) / (1 << bits)
        values.append(math.ldexp(fraction + (exponent > 0), max(exponent, 1) - bias))
    return values


def encode(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The nearest value of each float32 in x, the even code of two, the largest for those beyond; NaN is 0x7F."""
    table = np.array(values_of(dtype))
    size = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    above = np.searchsorted(table, np.nan_to_num(size), side="left")
    below = np.maximum(above - 1, 0)
    down, up = size - table[below], table[above] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    code = np.where(np.isnan(x), 0x7F, code | np.signbit(x) * 0x80)
    return torch.from_numpy(code.astype(np.uint8)).view(dtype)


def scale_of(row: np.ndarray, dtype: torch.dtype) -> np.float32:
    finite = np.abs(row[np.isfinite(row)])
    return np.float32(max(finite.max(initial=0.0), np.float32(2.0**-40))) / np.float32(LARGEST[dtype])


@pytest.mark.parametrize("dtype", FP8)
def test_these_tests_know_fp8(dtype: torch.dtype) -> None:
    values = values_of(dtype)
    assert values[-1] == LARGEST[dtype]
    codes = torch.arange(len(values), dtype=torch.uint8).view(dtype)
    assert codes.float().tolist() == values
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 100
    x = torch.cat([x, x * 1e-4, torch.tensor([*values, *np.convolve(values, [0.5, 0.5])])])
    assert same_bits(encode(x.numpy(), dtype), x.float().clamp(-values[-1], values[-1]).to(dtype))


# Into a cache


SHAPES = [
    # block_size, heads, head_size of k, of v
    (16, 3, 128, 128),
    (1, 2, 8, 40),
    (3, 5, 46, 46),
    (256, 1, 80, 96),
    (16, 4, 120, 46),
    (16, 1, 576, 512),
    (3, 8, 40, 8),
    (16, 2, 96, 120),
]
HOWS = [
    (layout, how)
    for layout in LAYOUTS
    for how in ("apart", "misaligned", "gaps", "blocks", "interleaved", "permuted")
    if layout != "v1" or how not in ("interleaved", "permuted")
]


def fit(layout: str, size: int, dtype: torch.dtype) -> int:
    """v1 takes keys in whole 16 bytes."""
    x = 16 // dtype.itemsize
    return -(-size // x) * x if layout == "v1" else size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("layout", "how", "tokens"), [(*call, 21) for call in HOWS] + [(*call, MANY) for call in HOWS if call[0] == "v1"]
)
def test_rows_go_to_their_slots(
    device: str, layout: str, how: str, tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    block_size, heads, size, v_size = shape
    size, blocks = fit(layout, size, dtype), 2 + 3 * tokens // 2 // block_size
    caches = Caches(layout, how, blocks, block_size, heads, (size, v_size), dtype, device)
    k, v = make(tokens, heads, size, dtype), make(tokens, heads, v_size, dtype, 1)
    k[3], v[4, 0], k[5, :, 0] = math.nan, -math.inf, math.inf
    slots = make_slots(tokens, caches.slots)
    caches.expect_tokens(k, v, slots.tolist())
    reshape_and_cache_(k.to(device), v.to(device), caches.k, caches.v, slots.to(device), layout)
    caches.check()


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3])
@pytest.mark.parametrize(("layout", "tokens"), FEW_AND_MANY)
def test_sources_are_read_where_they_are(device: str, layout: str, tokens: int, cache_dtype: torch.dtype) -> None:
    heads, size, v_size = 3, 48, 40
    k, v = make(tokens, heads, size, device=device), make(tokens, heads, v_size, seed=1, device=device)
    slots = make_slots(tokens, 192).to(device)
    q = make(tokens, 5, size, seed=2, device=device)
    wide = torch.full((tokens, heads, 107), 1e4, dtype=BF16, device=device)
    wide[..., 3:51], wide[..., 60:100] = k, v
    sources = {
        "packed": packed(q, k, v)[1:],
        "odd": [wide[..., 3:51], wide[..., 60:100]],
        "heads first": [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)],
        "every second token": [x.repeat_interleave(2, 0)[::2] for x in (k, v)],
        "one head's row for all": [x[:, :1].expand(-1, heads, -1) for x in (k, v)],
    }
    for name, (from_k, from_v) in sources.items():
        if name != "one head's row for all":
            assert not from_k.is_contiguous() and torch.equal(from_k, k), name
        stored, want = (Caches(layout, "apart", 12, 16, heads, (size, v_size), cache_dtype, device) for _ in range(2))
        before = wide.clone()
        reshape_and_cache_(from_k, from_v, stored.k, stored.v, slots, layout)
        reshape_and_cache_(from_k.contiguous(), from_v.contiguous(), want.k, want.v, slots, layout)
        assert torch.equal(stored.memory, want.memory), name
        assert not torch.equal(want.memory.cpu(), want.want), name
        assert torch.equal(wide, before)


@pytest.mark.parametrize("size", [46, 40, 72, 80, 96, 120])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_case_037_rows_that_are_no_multiple_of_16_bytes(
    device: str, layout: str, size: int, dtype: torch.dtype
) -> None:
    caches = Caches(layout, "apart", 2, 16, 1, (size, size), dtype, device)
    k, v = make(32, 1, size, device=device), make(32, 1, size, seed=1, device=device)
    reshape_and_cache_(k, v, caches.k, caches.v, torch.arange(32, device=device), layout)
    codes = [x if dtype == BF16 else encode(x.float().cpu().numpy(), dtype) for x in (k, v)]
    caches.expect_tokens(*codes, list(range(32)))
    caches.check()


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("dtype", [BF16, FP32, E4M3])
@pytest.mark.parametrize(("layout", "tokens"), FEW_AND_MANY)
def test_alignment_changes_no_bit(device: str, layout: str, tokens: int, dtype: torch.dtype, offset: int) -> None:
    x_dtype = BF16 if dtype in FP8 else dtype
    arguments: dict[str, Tensor] = {
        "k": make(tokens, 2, 64, x_dtype, device=device),
        "v": make(tokens, 2, 64, x_dtype, 1, device),
        "slot_mapping": make_slots(tokens, 160).to(device),
    }
    sources = list(arguments)
    if dtype in FP8:
        arguments["k_scale"] = torch.tensor([0.3, 0.7], device=device)
        arguments["v_scale_cache"] = torch.zeros(10, 16, 2, device=device)
    caches = Caches(layout, "apart", 10, 16, 2, (64, 64), dtype, device)
    arguments |= {"k_cache": caches.k, "v_cache": caches.v}
    want = {name: x.clone() for name, x in arguments.items()}
    reshape_and_cache_(**want, layout=layout)
    for name in [*arguments, "all"]:
        moved = {
            key: misaligned(x, offset) if name in (key, "all") else x.clone().contiguous()
            for key, x in arguments.items()
        }
        reshape_and_cache_(**moved, layout=layout)
        for key, x in moved.items():
            assert same_bits(x, want[key]), (name, key)
            assert key not in sources or torch.equal(x, arguments[key])
        for of in ("k_cache", "v_cache"):
            options = {"scale": arguments.get("k_scale")} if of == "k_cache" and dtype in FP8 else {}
            one = gather_cache(moved[of], moved["slot_mapping"], layout, **options)
            assert torch.equal(one, gather_cache(want[of], want["slot_mapping"], layout, **options))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("layout", "tokens"), [("NHD", 32), ("HND", 32), ("v1", 32), ("v1", 160)])
def test_case_038_slots_that_are_skipped_and_tokens_that_are_padding(
    device: str, layout: str, tokens: int, dtype: torch.dtype
) -> None:
    count = 3 * tokens // 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))[:tokens].tolist()
    far = 2**31 - 1 if dtype == torch.int32 else 2**63 - 1
    mappings = {
        "short": order[: tokens - 13],
        "none": [],
        "first": [-1, *order[1:]],
        "last": [*order[1:], -1],
        "padded": order[: tokens - 13] + [-1] * 13,
        "all": [-1] * tokens,
        "past": [count, count + 1, count + 7, 2**30, far, -far, -far - 1, -2, -16, *order[9:]],
        "all past": [count + i for i in range(tokens)],
    }
    for name, mapping in mappings.items():
        caches = Caches(layout, "blocks", count // 16, 16, 2, (32, 40), BF16, device)
        k, v = make(tokens, 2, 32, device=device), make(tokens, 2, 40, seed=1, device=device)
        slots = torch.tensor(mapping, dtype=dtype, device=device)
        reshape_and_cache_(k, v, caches.k, caches.v, slots, layout)
        caches.expect_tokens(k, v, mapping)
        caches.check()
        kept = [slot for slot in mapping if 0 <= slot < count]
        assert name not in ("none", "all", "all past") or not kept
        gathered = gather_cache(caches.v, slots, layout)
        for i, slot in enumerate(mapping):
            assert torch.equal(gathered[i], v[i] if slot in kept else torch.zeros_like(v[i])), (name, i)


def test_slots_with_a_stride(device: str) -> None:
    caches = Caches("NHD", "apart", 3, 16, 2, (32, 40), BF16, device)
    k, v = make(9, 2, 32, device=device), make(9, 2, 40, seed=1, device=device)
    slots = make_slots(9, 48)
    column = torch.stack([slots, torch.arange(9)], 1).to(device)[:, 0]
    assert column.stride() == (2,)
    reshape_and_cache_(k, v, caches.k, caches.v, column)
    caches.expect_tokens(k, v, slots.tolist())
    caches.check()
    assert torch.equal(gather_cache(caches.k, column), gather_cache(caches.k, slots.to(device)))


def test_case_039_strides_and_block_size_come_from_the_layout(device: str) -> None:
    # As reported, with two layers' blocks side by side where there were 36, so that all of it can be compared.
    blocks, heads, block_size, size = 4741, 4, 16, 64
    memory = torch.zeros(blocks, 2, block_size, heads, size, dtype=BF16, device=device)
    k_cache, v_cache = (memory[:, i].transpose(1, 2) for i in (0, 1))
    assert k_cache.shape == (blocks, 4, 16, 64) and k_cache.stride() == (8192, 64, 256, 1)
    slots = [75849, 0, 16, 75855, 18962]
    k, v = make(5, heads, size, device=device), make(5, heads, size, seed=1, device=device)
    reshape_and_cache_(k, v, k_cache, v_cache, torch.tensor(slots, device=device), "HND")
    for i, slot in enumerate(slots):
        for at, x in enumerate((k, v)):
            place = memory[slot // 16, at, slot % 16]
            assert torch.equal(place, x[i]), (slot, at)
            place.zero_()
    assert int(memory.count_nonzero()) == 0
    with pytest.raises((ValueError, RuntimeError), match=r"k_cache is \[4741, 4, 16, 64\]; for layout 'NHD' it must"):
        reshape_and_cache_(k, v, k_cache, v_cache, torch.tensor(slots, device=device))


@pytest.mark.gpu
def test_case_041_the_device_of_the_tensors_not_the_current_one() -> None:
    device = f"cuda:{torch.cuda.device_count() - 1}"
    with torch.cuda.device(0):
        k, v = make(8, 2, 128, device=device), make(8, 2, 128, seed=1, device=device)
        for layout in LAYOUTS:
            caches = Caches(layout, "apart", 3, 16, 2, (128, 128), BF16, device)
            slots = make_slots(8, 48)
            reshape_and_cache_(k, v, caches.k, caches.v, slots.to(device), layout)
            caches.expect_tokens(k, v, slots.tolist())
            caches.check()
            assert gather_cache(caches.k, slots.to(device), layout).device == k.device
        assert torch.cuda.current_device() == 0


def test_case_041_tensors_of_different_devices_are_refused(device: str) -> None:
    other = "cpu" if device == "cuda" else "meta"
    here, there = (str(torch.zeros(1, device=where).device) for where in (device, other))
    for op, arguments in good(device).items():
        of = {"gather_cache": "cache", "concat_and_cache_mla_": "kv_c", "qk_norm_rope_and_cache_": "q"}.get(op, "k")
        for name, x in arguments.items():
            if not isinstance(x, Tensor) or name == of:
                continue
            sentence = rf"^{op}: {name} is on {there}; it must be on the device of (k|q|kv_c|cache|the cache), {here}"
            with pytest.raises((ValueError, RuntimeError), match=sentence):
                getattr(cutegemm, op)(**{**arguments, name: x.to(other)})


# FP8


def fp8_scales(kind: str, heads: int, blocks: int, block_size: int, device: str) -> dict[str, Tensor]:
    if kind == "one":
        return {"k_scale": torch.tensor(0.37, device=device), "v_scale": torch.tensor([[2.1]], device=device)}
    if kind == "heads":
        both = torch.rand(2 * heads, generator=torch.Generator().manual_seed(3)).to(device) + 0.01
        return {"k_scale": both[:heads], "v_scale": both[heads:]}
    if kind == "strided heads":
        both = torch.rand(heads, 2, generator=torch.Generator().manual_seed(3)).to(device) + 0.01
        return {"k_scale": both[:, 0], "v_scale": both[:, 1]}
    if kind == "dynamic":  # with strides of every kind
        memory = torch.full((2, heads, block_size, blocks), -7.0, device=device)
        return {"k_scale_cache": memory[0].permute(2, 1, 0), "v_scale_cache": memory[1].permute(2, 1, 0)}
    if kind == "mixed":
        memory = torch.full((blocks, block_size, heads + 3), -7.0, device=device)
        return {"k_scale": torch.full((1,), 0.02, device=device), "v_scale_cache": memory[..., 1 : 1 + heads]}
    return {}


@pytest.mark.parametrize("kind", ["none", "one", "heads", "strided heads", "dynamic", "mixed"])
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "how", "tokens"),
    [("NHD", "apart", 17), ("HND", "permuted", 17), ("v1", "gaps", 17), ("v1", "gaps", MANY), ("NHD", "blocks", 17)],
)
def test_fp8(
    device: str, layout: str, how: str, tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype, kind: str
) -> None:
    for block_size, heads, size, v_size in [(16, 3, 128, 46), (3, 1, 96, 576), (16, 2, 80, 40)]:
        blocks = 2 + 3 * tokens // 2 // block_size
        k, v = make(tokens, heads, size, dtype, device=device), make(tokens, heads, v_size, dtype, 1, device)
        k[3], k[4, 0, 1], v[5, :, 2], v[6], k[7, :, 5] = math.nan, math.inf, -math.inf, 0, math.nan
        slots = make_slots(tokens, blocks * block_size)
        caches = Caches(layout, how, blocks, block_size, heads, (size, v_size), cache_dtype, device)
        scales = fp8_scales(kind, heads, blocks, block_size, device)
        want = {name: x.cpu().clone() for name, x in scales.items()}
        for of, x in (("k", k), ("v", v)):
            for i, slot in enumerate(slots.tolist()):
                for head, row in enumerate(x[i].float().cpu().numpy()):
                    scale = np.float32(1)
                    if f"{of}_scale" in scales:
                        given = scales[f"{of}_scale"].cpu().flatten().numpy()
                        scale = given[head if len(given) > 1 else 0]
                    elif f"{of}_scale_cache" in scales:
                        scale = scale_of(row, cache_dtype)
                        if 0 <= slot < caches.slots:
                            want[f"{of}_scale_cache"][slot // block_size, slot % block_size, head] = float(scale)
                    caches.expect(of == "k", slot, head, encode(row / scale, cache_dtype))
        reshape_and_cache_(k, v, caches.k, caches.v, slots.to(device), layout, **scales)
        caches.check()
        for name, x in scales.items():
            assert torch.equal(x.cpu(), want[name]), name


@pytest.mark.parametrize("dtype", FP8)
def test_saturation_zeros_and_numbers_that_are_none(device: str, dtype: torch.dtype) -> None:
    inf, nan, largest = math.inf, math.nan, LARGEST[dtype]
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, -nan, 1e38, -1e38, largest, 2 * largest], device=device).repeat(
        5, 2, 1
    )
    top = values_of(dtype).index(largest)
    caches = Caches("NHD", "apart", 1, 8, 2, (10, 10), dtype, device)
    slots = torch.arange(5, device=device)
    reshape_and_cache_(x, x, caches.k, caches.v, slots)
    want = [0, 0x80, top, top | 0x80, 0x7F, 0x7F, top, top | 0x80, top, top]
    assert caches.k[0, :5].view(torch.uint8).unique(dim=0).tolist() == [[want, want]]
    assert same_bits(caches.k[:, :5], caches.v[:, :5])

    x = torch.zeros(5, 2, 10, device=device)
    x[1], x[2, 0], x[3, 1] = nan, inf, 2.0**-45
    scales = torch.zeros(1, 8, 2, device=device)
    reshape_and_cache_(x, x, caches.k, caches.v, slots, k_scale_cache=scales)
    floor = 2.0**-40 / np.float32(largest)
    assert scales[0, :5].tolist() == [[floor, floor]] * 5
    assert scales[0, 5:].tolist() == [[0, 0]] * 3
    codes = caches.k[0, :5].view(torch.uint8)
    assert codes[0].unique().tolist() == [0]
    assert codes[1].unique().tolist() == [0x7F]
    assert codes[2, 0].unique().tolist() == [top]
    assert values_of(dtype)[codes[3, 1, 0]] == pytest.approx(largest / 32, rel=2**-2)


def test_a_bad_token_changes_no_other(device: str) -> None:
    k, v = make(9, 3, 64, device=device), make(9, 3, 64, seed=1, device=device)
    slots = torch.tensor([5, 3, 9, 0, 14, 2, 8, 30, 31], device=device)
    stored = []
    for bad in (False, True):
        if bad:
            k[4], v[4, 1, 7] = math.nan, math.inf
        caches = Caches("HND", "apart", 2, 16, 3, (64, 64), E4M3, device)
        scales = {f"{of}_scale_cache": torch.zeros(2, 16, 3, device=device) for of in "kv"}
        reshape_and_cache_(k, v, caches.k, caches.v, slots, "HND", **scales)
        for cache, scale in ((caches.k, scales["k_scale_cache"]), (caches.v, scales["v_scale_cache"])):
            cache[0, :, 14] = torch.zeros(3, 64, device=device).to(E4M3)
            scale[0, 14] = 0
        stored.append((caches.memory, *scales.values()))
    assert all(torch.equal(one, other) for one, other in zip(*stored, strict=True))


@pytest.mark.parametrize("name", ["scale", "k_scale_cache", "fused"])
def test_opcheck_of_fp8_caches(device: str, name: str) -> None:
    """Which test_registry.py can't have among its cases, since it takes FP8 arguments for unchanged."""
    tests = ["test_autograd_registration", "test_faketensor"]
    op = "qk_norm_rope_and_cache_" if name == "fused" else "reshape_and_cache_"
    arguments = OPS[op].inputs(OPS[op].cases[0], device)
    for cache in ("k_cache", "v_cache"):
        arguments[cache] = arguments[cache].to(E4M3)
    if name == "scale":
        arguments["k_scale"] = torch.ones(3, device=device)
    else:
        arguments["k_scale_cache"] = torch.ones(2, 16, 3, device=device)
    torch.library.opcheck(OPS[op].call, (), arguments, test_utils=tests)


# MLA


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (46, 8), (96, 3), (7, 1)])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, BF16), (FP32, FP32), (FP16, E4M3), (BF16, E5M2)])
def test_mla(device: str, rank: int, rope: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    tokens, blocks, block_size = 13, 5, 16
    both = make_operand(tokens, rank + rope + 5, dtype)
    both[4, 2], both[5, -6], both[6] = math.nan, -math.inf, 0
    both = both.to(device)
    kv_c, k_pe = both[:, 2 : 2 + rank], both[:, rank + 3 : rank + 3 + rope]
    slots = make_slots(tokens - 2, blocks * block_size, torch.int32)
    for scale in (None, torch.tensor([0.3], device=device)) if cache_dtype in FP8 else (None,):
        for pitch in (rank + rope, rank + rope + 7):
            memory = torch.randint(256, (blocks, block_size, pitch * cache_dtype.itemsize), dtype=torch.uint8)
            moved = memory.to(device)
            before = both.clone()
            concat_and_cache_mla_(kv_c, k_pe, moved.view(cache_dtype)[..., : rank + rope], slots.to(device), scale)
            assert same_bits(both, before)
            for i, slot in enumerate(slots.tolist()):
                if 0 <= slot < blocks * block_size:
                    row = torch.cat([kv_c[i], k_pe[i]]).cpu()
                    if cache_dtype in FP8:
                        row = encode(row.float().numpy() / np.float32(1 if scale is None else 0.3), cache_dtype)
                    row = row.view(torch.uint8)
                    memory[slot // block_size, slot % block_size, : len(row)] = row
            assert torch.equal(moved.cpu(), memory)


def test_mla_round_trip(device: str) -> None:
    kv_c, k_pe = make_operand(9, 96, device=device), make_operand(9, 16, seed=1, device=device)
    cache = torch.zeros(3, 16, 112, dtype=BF16, device=device)
    slots = torch.randperm(48)[:9].to(device)
    concat_and_cache_mla_(kv_c, k_pe, cache, slots)
    assert torch.equal(gather_cache(cache.unsqueeze(2), slots).flatten(1), torch.cat([kv_c, k_pe], 1))


# Out of a cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layout", "how"), HOWS)
def test_gather_returns_what_was_written(
    device: str, layout: str, how: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    block_size, heads, size, v_size = shape
    size, tokens, blocks = fit(layout, size, dtype), 21, 2 + 30 // block_size
    caches = Caches(layout, how, blocks, block_size, heads, (size, v_size), dtype, device)
    k, v = make(tokens, heads, size, dtype, device=device), make(tokens, heads, v_size, dtype, 1, device)
    k[3], v[4, 0], k[5, :, 0] = math.nan, -math.inf, math.inf
    slots = make_slots(tokens, caches.slots).to(device)
    reshape_and_cache_(k, v, caches.k, caches.v, slots, layout)
    before = caches.memory.clone()
    inside = (slots >= 0) & (slots < caches.slots)
    assert 0 < int(inside.sum()) < tokens
    again = torch.cat([slots, slots.flip(0), slots[:2]])  # more slots than tokens, and twice the same
    for cache, x in ((caches.k, k), (caches.v, v)):
        want = torch.where(inside[:, None, None], x, 0)
        out = gather_cache(cache, again, layout)
        assert out.is_contiguous()
        assert same_bits(out, torch.cat([want, want.flip(0), want[:2]]))
    assert torch.equal(caches.memory, before)


@pytest.mark.parametrize("kind", ["none", "one", "heads", "strided heads", "dynamic"])
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize(("layout", "how"), [("NHD", "apart"), ("HND", "gaps"), ("v1", "blocks")])
def test_gather_dequantizes(
    device: str, layout: str, how: str, cache_dtype: torch.dtype, dtype: torch.dtype | None, kind: str
) -> None:
    blocks, block_size, heads, size, v_size = 3, 16, 3, 64, 46
    caches = Caches(layout, how, blocks, block_size, heads, (size, v_size), cache_dtype, device)
    k, v = make(17, heads, size, device=device), make(17, heads, v_size, seed=1, device=device)
    k[3], v[4, :, 0] = math.nan, math.inf
    slots = make_slots(17, caches.slots).to(device)
    scales = fp8_scales(kind, heads, blocks, block_size, device)
    reshape_and_cache_(k, v, caches.k, caches.v, slots, layout, **scales)
    for of, cache, x in (("k", caches.k, k), ("v", caches.v, v)):
        options = {name[2:]: scale for name, scale in scales.items() if name.startswith(of)}
        out = gather_cache(cache, slots, layout, **options, dtype=dtype).cpu()
        assert out.dtype == (dtype or BF16)
        for i, slot in enumerate(slots.tolist()):
            inside = 0 <= slot < caches.slots
            for head in range(heads):
                row, scale = x[i, head].float().cpu().numpy(), np.float32(1)
                if "scale" in options:
                    given = options["scale"].cpu().flatten().numpy()
                    scale = given[head if len(given) > 1 else 0]
                elif "scale_cache" in options:
                    scale = scale_of(row, cache_dtype)
                codes = encode(row / scale, cache_dtype).float().numpy()
                with np.errstate(over="ignore"):
                    want = torch.from_numpy(codes * scale if inside else 0 * np.nan_to_num(row)).to(out.dtype)
                assert torch.equal(out[i, head].nan_to_num(nan=12345.0), want.nan_to_num(nan=12345.0)), (i, head)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_in_another_dtype(device: str, dtype: torch.dtype) -> None:
    cache = make(48, 2, 40, FP32, device=device).view(3, 16, 2, 40)
    slots = torch.randperm(48)[:20].to(device)
    assert same_bits(gather_cache(cache, slots, dtype=dtype), cache.flatten(0, 1)[slots].to(dtype))


def test_slots_of(device: str) -> None:
    table = torch.tensor([[4, 0, 9], [7, 2, -1], [5, -1, -1], [3, 8, 6]], dtype=torch.int32, device=device)
    for block_size, lengths in itertools.product((1, 3, 16), ([0, 1, 1, 2], [3, 2, 1, 3], [3, 0, 0, 1])):
        lengths = [max(length * block_size - 2, 0) if block_size > 1 else length for length in lengths]
        want = [
            int(table[s, p // block_size]) * block_size + p % block_size
            for s, length in enumerate(lengths)
            for p in range(length)
        ]
        for given in (lengths, torch.tensor(lengths, device=device), torch.tensor(lengths, dtype=torch.int32)):
            slots = slots_of(table, given, block_size)
            assert slots.dtype == torch.int64 and slots.device == table.device
            assert slots.tolist() == want
    assert slots_of(table[:0], [], 16).shape == (0,)
    assert slots_of(table[:, :0], [0] * 4, 16).shape == (0,)
    assert bool((slots_of(table, [0, 48, 0, 0], 16)[32:] < 0).all())  # a block of -1 is in no cache


def test_slots_of_refuses() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"slots_of: block_table is \[3\]; it must be \[sequences, blocks\]"):
        slots_of(table[0], [1], 16)
    with pytest.raises(ValueError, match="slots_of: lengths has 3 numbers; it must have 2, one for each sequence"):
        slots_of(table, [1, 2, 3], 16)
    for wrong in (49, -1):
        with pytest.raises(ValueError, match=f"slots_of: lengths has {wrong}; it must have 0 to 48, the slots of"):
            slots_of(table, torch.tensor([1, wrong]), 16)


def test_sequences_in_scattered_blocks_come_back_whole(device: str) -> None:
    lengths, block_size = [37, 1, 16, 50], 16
    table = torch.randperm(20, generator=torch.Generator().manual_seed(5))[:16].view(4, 4).int().to(device)
    slots = slots_of(table, lengths, block_size)
    k, v = make(sum(lengths), 2, 40, device=device), make(sum(lengths), 2, 40, seed=1, device=device)
    caches = Caches("HND", "interleaved", 20, block_size, 2, (40, 40), BF16, device)
    reshape_and_cache_(k, v, caches.k, caches.v, slots, "HND")
    for s, (rows, values) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
        one = slots_of(table[s : s + 1], lengths[s : s + 1], block_size)
        assert torch.equal(gather_cache(caches.k, one, "HND"), rows)
        assert torch.equal(gather_cache(caches.v, one, "HND"), values)


# With norm and RoPE


ROTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "neox": {"rotary_dim": 48},
    "pairs": {"rotary_dim": 48, "is_neox": False},
    "partial": {"rotary_dim": 24, "rope_dim_offset": 16},
    "m-rope": {"rotary_dim": 32, "mrope_section": [3, 6, 7]},
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [None, *FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_has_the_bits_of_the_ops_apart(
    device: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, layout: str, rotation: dict[str, Any], norm: bool
) -> None:
    tokens, heads, size, length = 13, 3, 48, 20
    rotation = dict(rotation)
    rows = (3, tokens) if "mrope_section" in rotation else (tokens,)
    positions = torch.randint(-2, length + 2, rows, generator=torch.Generator().manual_seed(4)).to(device)
    table = None
    if "rotary_dim" in rotation:
        table = cutegemm.build_cos_sin_cache(rotation.pop("rotary_dim"), length, device=device)
    k_weight = make(1, 1, size, dtype, 7, device)[0, 0] if norm else None
    how = {"q_weight": None, "k_weight": k_weight, "eps": 1e-5, "weight_offset": 1.0} if norm else {}
    slots = make_slots(tokens - 2, 48)[1:].to(device)
    for kind, flat in itertools.product(("none",) if cache_dtype is None else ("heads", "dynamic"), (False, True)):
        q, k, v = packed(*(make(tokens, n, size, dtype, n, device) for n in (5, heads, heads)))
        if flat:
            q, k, v = (x.flatten(1) for x in (q, k, v))
        store = cache_dtype or dtype
        stored, want = (Caches(layout, "blocks", 3, 16, heads, (size, size), store, device) for _ in range(2))
        scales, its_scales = (fp8_scales(kind, heads, 3, 16, device) for _ in range(2))

        its_q, its_k = q.clone(), k.clone()
        if table is not None and norm:
            cutegemm.qk_norm_rope_(positions, its_q, its_k, size, cos_sin_cache=table, **how, **rotation)
        elif table is not None:
            cutegemm.rotary_embedding_(positions, its_q, its_k, size, table, **rotation)
        elif norm:
            its_q = cutegemm.rms_norm(its_q.view(tokens, -1, size), None, 1e-5, 1.0).view(q.shape)
            its_k = cutegemm.rms_norm(its_k.view(tokens, -1, size), k_weight, 1e-5, 1.0).view(k.shape)
        k_heads, v_heads = (x.view(tokens, heads, size) for x in (its_k, v))
        reshape_and_cache_(k_heads, v_heads, want.k, want.v, slots, layout, **its_scales)
        assert not torch.equal(want.memory.cpu(), want.want)
        assert torch.equal(its_q, q) == (not norm and table is None)

        before = k.clone(), v.clone()
        qk_norm_rope_and_cache_(
            positions, q, k, v, size, table, stored.k, stored.v, slots, norm=norm, layout=layout, **how, **rotation,
            **scales,
        )  # fmt: skip
        assert same_bits(q, its_q)
        assert same_bits(k, before[0]) and same_bits(v, before[1])
        assert torch.equal(stored.memory, want.memory)
        for name, x in scales.items():
            assert torch.equal(x, its_scales[name]), name


def test_fused_takes_values_of_another_head_size_and_every_weight(device: str) -> None:
    q, k, v = (
        make(9, 6, 96, device=device),
        make(9, 2, 96, seed=1, device=device),
        make(9, 2, 46, seed=2, device=device),
    )
    weights = [make(1, 1, 96, dtype, 3 + i, device)[0, 0] for i, dtype in enumerate((FP32, BF16))]
    table, positions = cutegemm.build_cos_sin_cache(96, 16, dtype=BF16, device=device), torch.arange(9, device=device)
    slots = make_slots(9, 48, torch.int32).to(device)
    stored, want = (Caches("HND", "misaligned", 3, 16, 2, (96, 46), BF16, device) for _ in range(2))
    its_q, its_k = q.clone(), k.clone()
    cutegemm.qk_norm_rope_(positions, its_q, its_k, 96, *weights, table)
    reshape_and_cache_(its_k, v, want.k, want.v, slots, "HND")
    qk_norm_rope_and_cache_(positions, q, k, v, 96, table, stored.k, stored.v, slots, *weights, norm=True, layout="HND")
    assert same_bits(q, its_q)
    assert torch.equal(stored.memory, want.memory)


def test_each_option_of_fused_changes_what_it_is_for(device: str) -> None:
    def run(**options: Any) -> tuple[Tensor, Tensor]:
        q, k, v = make(5, 4, 32, device=device), make(5, 2, 32, seed=1, device=device), make(5, 2, 32, device=device)
        cache = torch.zeros(2, 1, 16, 2, 32, dtype=BF16, device=device)
        arguments = {
            "positions": torch.arange(1, 6, device=device),
            "cos_sin_cache": cutegemm.build_cos_sin_cache(16, 9, device=device),
            "slot_mapping": torch.arange(5, device=device),
            "norm": True,
            **options,
        }
        qk_norm_rope_and_cache_(q=q, k=k, v=v, head_size=32, k_cache=cache[0], v_cache=cache[1], **arguments)
        return q, cache

    plain, weight = run(), make(1, 1, 32, seed=5, device=device)[0, 0]
    changes: dict[str, tuple[Any, bool, bool]] = {
        "q_weight": (weight, True, False),
        "k_weight": (weight, False, True),
        "eps": (0.5, True, True),
        "norm": (False, True, True),
        "is_neox": (False, True, True),
        "rope_dim_offset": (16, True, True),
        "cos_sin_cache": (None, True, True),
        "slot_mapping": (torch.arange(4, device=device), False, True),
        "positions": (torch.arange(2, 7, device=device), True, True),
    }
    for name, (value, of_q, of_k) in changes.items():
        q, cache = run(**{name: value})
        assert torch.equal(q, plain[0]) == (not of_q), name
        assert torch.equal(cache, plain[1]) == (not of_k), name


# Empty


@pytest.mark.parametrize(
    ("tokens", "heads", "size", "blocks", "block_size"),
    [(0, 2, 32, 3, 16), (5, 0, 32, 3, 16), (5, 2, 0, 3, 16), (5, 2, 32, 0, 16), (5, 2, 32, 3, 0), (0, 0, 0, 0, 0)],
)
@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty(
    device: str, layout: str, dtype: torch.dtype, tokens: int, heads: int, size: int, blocks: int, block_size: int
) -> None:
    k, v = (torch.ones(tokens, heads, size, dtype=BF16, device=device) for _ in range(2))
    slots = torch.arange(tokens, device=device)
    x = 16 // dtype.itemsize
    shape = {"NHD": (blocks, block_size, heads, size), "HND": (blocks, heads, block_size, size)}
    k_shape = shape.get(layout, (blocks, heads, size // x, block_size, x))
    v_shape = shape.get(layout, (blocks, heads, size, block_size))
    k_cache, v_cache = (torch.zeros(s, device=device).to(dtype) for s in (k_shape, v_shape))
    scale = torch.zeros(blocks, block_size, heads, device=device) if dtype == E4M3 else None
    reshape_and_cache_(k, v, k_cache, v_cache, slots, layout, k_scale_cache=scale)
    assert not k_cache.numel() or not bool(k_cache.float().any())
    for cache in (k_cache, v_cache):
        out = gather_cache(cache, slots, layout)
        assert out.shape == (tokens, heads, size)
        assert not bool(out.any())
    if heads and size:
        q = k.clone()
        qk_norm_rope_and_cache_(slots, q, k, v, size, None, k_cache, v_cache, slots, norm=True, layout=layout)
        assert torch.equal(q, k)
    caches = Caches("NHD", "apart", 2, 16, 2, (32, 32), BF16, device)  # nothing is left behind
    k, v = make(5, 2, 32, device=device), make(5, 2, 32, seed=1, device=device)
    reshape_and_cache_(k, v, caches.k, caches.v, torch.arange(5, device=device))
    caches.expect_tokens(k, v, list(range(5)))
    caches.check()


@pytest.mark.parametrize(
    ("tokens", "rank", "rope", "blocks", "block_size"),
    [(0, 32, 8, 3, 16), (5, 0, 8, 3, 16), (5, 32, 0, 3, 16), (5, 0, 0, 3, 16), (5, 32, 8, 0, 16), (5, 32, 8, 3, 0)],
)
@pytest.mark.parametrize("dtype", [BF16, E5M2])
def test_empty_mla(
    device: str, dtype: torch.dtype, tokens: int, rank: int, rope: int, blocks: int, block_size: int
) -> None:
    both = torch.ones(tokens, rank + rope, dtype=BF16, device=device)
    cache = torch.zeros(blocks, block_size, rank + rope, dtype=dtype, device=device)
    slots = torch.arange(tokens, device=device)
    concat_and_cache_mla_(both[:, :rank].contiguous(), both[:, rank:].contiguous(), cache, slots)
    inside = blocks * block_size > 0
    assert torch.equal(gather_cache(cache.unsqueeze(2), slots).flatten(1), both if inside else torch.zeros_like(both))


# Large


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65535, 65536, 262141])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_tokens(tokens: int, layout: str) -> None:
    blocks = -(-tokens // 16)
    k, v = (torch.randn(tokens, 1, 16, device="cuda").to(BF16) for _ in range(2))
    slots = torch.randperm(blocks * 16, device="cuda")[:tokens]
    caches = Caches(layout, "blocks", blocks, 16, 1, (16, 16), BF16, "cuda")
    reshape_and_cache_(k, v, caches.k, caches.v, slots, layout)
    assert torch.equal(gather_cache(caches.k, slots, layout), k)
    assert torch.equal(gather_cache(caches.v, slots, layout), v)
    q = k.clone()
    qk_norm_rope_and_cache_(slots, q, k, v, 16, None, caches.k, caches.v, slots, norm=True, layout=layout)
    assert torch.equal(gather_cache(caches.k, slots, layout), q)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 6, 3])
@pytest.mark.parametrize("kind", [None, "one", "heads", "dynamic"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [None, 64, 128])
def test_fused_of_many_tokens(layout: str, kind: str | None, rotary_dim: int | None, kv_heads: int) -> None:
    """So many that a thread has several heads: the values are those of calls of few tokens."""
    tokens, heads, size, dtype = 1501, 32, 128, BF16 if kind is None else E4M3
    table = rotary_dim and cutegemm.build_cos_sin_cache(rotary_dim, 4096, device="cuda")
    positions = torch.randint(-5, 4100, (tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(96 * 16, device="cuda")[:tokens] - 3
    weight = torch.randn(size, device="cuda").to(BF16)
    q, k, v = packed(
        *(make(tokens, n, size, seed=n + i, device="cuda") for i, n in enumerate((heads, *2 * [kv_heads])))
    )
    caches = [Caches(layout, "blocks", 96, 16, kv_heads, (size, size), dtype, "cuda") for _ in range(2)]
    scales = [fp8_scales(kind or "none", kv_heads, 96, 16, "cuda") for _ in range(2)]
    before, its_q = q.clone(), q.clone()
    how = {"q_weight": weight, "norm": True, "layout": layout}
    stored, want = caches
    qk_norm_rope_and_cache_(positions, q, k, v, size, table, stored.k, stored.v, slots, **how, **scales[0])
    for part in torch.arange(tokens, device="cuda").split(50):
        few = its_q[part]
        qk_norm_rope_and_cache_(
            positions[part], few, k[part], v[part], size, table, want.k, want.v, slots[part], **how, **scales[1]
        )
        its_q[part] = few
    assert same_bits(q, its_q) and not same_bits(q, before)
    assert torch.equal(stored.memory, want.memory)
    assert all(torch.equal(x, scales[1][name]) for name, x in scales[0].items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offsets_beyond_32_bits(layout: str, dtype: torch.dtype) -> None:
    heads, size, block_size = 8, 128, 16
    blocks = 2**31 // (heads * size * block_size) + 2
    x = 16 // dtype.itemsize
    shape = {"NHD": (blocks, block_size, heads, size), "HND": (blocks, heads, block_size, size)}
    k_shape = shape.get(layout, (blocks, heads, size // x, block_size, x))
    v_shape = shape.get(layout, (blocks, heads, size, block_size))
    k_cache, v_cache = (torch.zeros(s, dtype=dtype, device="cuda") for s in (k_shape, v_shape))
    assert k_cache.numel() > 2**31
    last = blocks * block_size - 1
    slots = torch.tensor([last, 0, last - block_size, last + 1, last // 2], device="cuda")
    k, v = make(5, heads, size, device="cuda"), make(5, heads, size, seed=1, device="cuda")
    reshape_and_cache_(k, v, k_cache, v_cache, slots, layout)
    small, its_slots = Caches(layout, "apart", 1, 16, heads, (size, size), dtype, "cuda"), torch.arange(5).cuda()
    reshape_and_cache_(k, v, small.k, small.v, its_slots, layout)
    kept, axis = [0, 1, 2, 4], {"NHD": 1, "HND": 2, "v1": 3}[layout]
    bits = torch.int16 if dtype == BF16 else torch.uint8
    for cache, its in ((k_cache, small.k), (v_cache, small.v)):
        out, want = gather_cache(cache, slots, layout), gather_cache(its, its_slots, layout)
        assert torch.equal(out[kept], want[kept])
        assert not bool(out[3].any())
        written = sum(int(part.view(bits).count_nonzero()) for part in cache.split(1024))
        assert written == int(its.view(bits).movedim(axis, 0)[kept].count_nonzero())


@pytest.mark.gpu
def test_case_039_with_the_reported_strides() -> None:
    memory = torch.zeros(16384, 147456, dtype=BF16, device="cuda")
    k_cache = memory.as_strided((16384, 4, 16, 64), (147456, 64, 256, 1))
    v_cache = memory.as_strided((16384, 4, 16, 64), (147456, 64, 256, 1), 4096)
    k, v = (torch.rand(3, 4, 64, device="cuda").to(BF16) + 1 for _ in range(2))
    slots = torch.tensor([75849, 16384 * 16 - 1, 0], device="cuda")
    reshape_and_cache_(k, v, k_cache, v_cache, slots, "HND")
    for i, slot in enumerate(slots.tolist()):
        start = slot % 16 * 256
        assert torch.equal(memory[slot // 16, start : start + 256], k[i].flatten())
        assert torch.equal(memory[slot // 16, 4096 + start : 4096 + start + 256], v[i].flatten())
    assert sum(int(part.count_nonzero()) for part in memory.split(1024)) == 2 * 3 * 256


# Errors


def good(device: str) -> dict[str, dict[str, Any]]:
    """A call of each op that is right."""

    def ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.ones(shape, device=device).to(dtype)

    slots = torch.arange(5, device=device)
    k, v = ones(7, 3, 32), ones(7, 3, 40)
    caches = {"k_cache": ones(2, 16, 3, 32, dtype=E4M3), "v_cache": ones(2, 16, 3, 40, dtype=E4M3)}
    scales = {"k_scale": ones(3, dtype=FP32), "v_scale_cache": ones(2, 16, 3, dtype=FP32)}
    return {
        "reshape_and_cache_": {"k": k, "v": v, **caches, "slot_mapping": slots, **scales},
        "concat_and_cache_mla_": {
            "kv_c": ones(7, 32),
            "k_pe": ones(7, 8),
            "kv_cache": ones(2, 16, 40, dtype=E5M2),
            "slot_mapping": slots,
            "scale": ones(1, dtype=FP32),
        },
        "gather_cache": {
            "cache": caches["k_cache"],
            "slot_mapping": slots,
            "scale": scales["k_scale"],
        },
        "qk_norm_rope_and_cache_": {
            "positions": torch.arange(7, device=device),
            "q": ones(7, 6 * 32),
            "k": ones(7, 3 * 32),
            "v": v,
            "head_size": 32,
            "cos_sin_cache": ones(9, 16, dtype=FP32),
            **caches,
            "slot_mapping": slots,
            "q_weight": ones(32),
            "k_weight": ones(32),
            "norm": True,
            **scales,
        },
    }


def test_calls_of_the_error_tests_are_right_otherwise(device: str) -> None:
    for op, arguments in good(device).items():
        getattr(cutegemm, op)(**arguments)


ONES = torch.ones
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("reshape_and_cache_", {"k": ONES(7, 3, 32).double()}, "k is torch.float64; it must be torch.bfloat16, torch"),
    ("reshape_and_cache_", {"k": ONES(7, 96).bfloat16()}, "k is [7, 96]; it must be [tokens, heads, head_size]"),
    (
        "reshape_and_cache_",
        {"k": ONES(32, 3, 7).bfloat16().permute(2, 1, 0)},
        "k has the strides [1, 7, 21]; its last dimension must have stride one",
    ),
    ("reshape_and_cache_", {"v": ONES(7, 3, 40)}, "v is torch.float32; it must be the dtype of k, torch.bfloat16"),
    ("reshape_and_cache_", {"v": ONES(7, 2, 40).bfloat16()}, "v is [7, 2, 40]; it must be [7, 3, head_size]"),
    ("reshape_and_cache_", {"v": ONES(6, 3, 40).bfloat16()}, "v is [6, 3, 40]; it must be [7, 3, head_size]"),
    (
        "reshape_and_cache_",
        {"v": ONES(7, 40, 3).bfloat16().transpose(1, 2)},
        "v has the strides [120, 1, 3]; its last dimension must have stride one",
    ),
    ("reshape_and_cache_", {"layout": "nhd"}, "layout is 'nhd'; it must be 'NHD', 'HND' or 'v1'"),
    (
        "reshape_and_cache_",
        {"k_cache": ONES(2, 16, 3, 32)},
        "k_cache is torch.float32; it must be the dtype of k, torch.bfloat16, or torch.float8_e4m3fn or",
    ),
    (
        "reshape_and_cache_",
        {"v_cache": ONES(2, 16, 3, 40).bfloat16()},
        "v_cache is torch.bfloat16; it must be the dtype of k_cache, torch.float8_e4m3fn",
    ),
    (
        "reshape_and_cache_",
        {"k_cache": ONES(2, 3, 16, 32).to(E4M3)},
        "k_cache is [2, 3, 16, 32]; for layout 'NHD' it must be [blocks, block_size, 3, 32]",
    ),
    (
        "reshape_and_cache_",
        {"layout": "HND"},
        "k_cache is [2, 16, 3, 32]; for layout 'HND' it must be [blocks, 3, block_size, 32]",
    ),
    (
        "reshape_and_cache_",
        {"layout": "v1"},
        "k_cache is [2, 16, 3, 32]; for layout 'v1' it must be [blocks, 3, 2, block_size, 16]",
    ),
    (
        "reshape_and_cache_",
        {"layout": "v1", "k_cache": ONES(2, 3, 4, 16, 8).to(E4M3)},  # 8 are the values of BF16
        "k_cache is [2, 3, 4, 16, 8]; for layout 'v1' it must be [blocks, 3, 2, block_size, 16]",
    ),
    (
        "reshape_and_cache_",
        {"layout": "v1", "k": ONES(7, 3, 40).bfloat16()},
        "k has heads of 40; for layout 'v1' it must be a multiple of 16, 16 bytes",
    ),
    (
        "reshape_and_cache_",
        {"v_cache": ONES(3, 16, 3, 40).to(E4M3)},
        "v_cache is [3, 16, 3, 40]; for layout 'NHD' it must be [2, 16, 3, 40]",
    ),
    (
        "reshape_and_cache_",
        {"v_cache": ONES(2, 8, 3, 40).to(E4M3)},
        "v_cache is [2, 8, 3, 40]; for layout 'NHD' it must be [2, 16, 3, 40]",
    ),
    (
        "reshape_and_cache_",
        {"v_cache": ONES(2, 16, 40, 3).to(E4M3).transpose(2, 3)},
        "v_cache has the strides [1920, 120, 1, 3]; its last dimension must have stride one",
    ),
    ("reshape_and_cache_", {"slot_mapping": ONES(5)}, "slot_mapping is torch.float32; it must be torch.int32 or"),
    ("reshape_and_cache_", {"slot_mapping": ONES(5, 1).long()}, "slot_mapping is [5, 1]; it must have one dimension"),
    (
        "reshape_and_cache_",
        {"slot_mapping": torch.arange(8)},
        "slot_mapping has 8 slots; it must have at most 7, one for each token of k",
    ),
    (
        "reshape_and_cache_",
        {"k_cache": ONES(2, 16, 3, 32).bfloat16(), "v_cache": ONES(2, 16, 3, 40).bfloat16()},
        "k_scale is given, and the cache is torch.bfloat16; it must be left out, since only FP8 is stored with a scale",
    ),
    (
        "reshape_and_cache_",
        {"k_cache": ONES(2, 16, 3, 32).bfloat16(), "v_cache": ONES(2, 16, 3, 40).bfloat16(), "k_scale": None},
        "v_scale_cache is given, and the cache is torch.bfloat16; it must be left out",
    ),
    ("reshape_and_cache_", {"k_scale": ONES(3).half()}, "k_scale is torch.float16; it must be torch.float32"),
    (
        "reshape_and_cache_",
        {"k_scale": ONES(2)},
        "k_scale is [2]; it must have one element or be [3], one for each head",
    ),
    (
        "reshape_and_cache_",
        {"k_scale": ONES(3, 1)},
        "k_scale is [3, 1]; it must have one element or be [3], one for each head",
    ),
    (
        "reshape_and_cache_",
        {"v_scale": ONES(1)},
        "v_scale is given with v_scale_cache; one of them must be left out",
    ),
    (
        "reshape_and_cache_",
        {"v_scale_cache": ONES(2, 3, 16)},
        "v_scale_cache is [2, 3, 16]; it must be [2, 16, 3], the cache's blocks, block size and heads",
    ),
    (
        "reshape_and_cache_",
        {"v_scale_cache": ONES(2, 16, 3).bfloat16()},
        "v_scale_cache is torch.bfloat16; it must be torch.float32",
    ),
    ("concat_and_cache_mla_", {"kv_c": ONES(7, 32).int()}, "kv_c is torch.int32; it must be torch.bfloat16, torch"),
    ("concat_and_cache_mla_", {"kv_c": ONES(7, 1, 32).bfloat16()}, "kv_c is [7, 1, 32]; it must be [tokens, rank]"),
    ("concat_and_cache_mla_", {"k_pe": ONES(6, 8).bfloat16()}, "k_pe is [6, 8]; it must be [7, rope]"),
    ("concat_and_cache_mla_", {"k_pe": ONES(7, 8)}, "k_pe is torch.float32; it must be the dtype of kv_c, torch.bf"),
    (
        "concat_and_cache_mla_",
        {"kv_c": ONES(32, 7).bfloat16().t()},
        "kv_c has the strides [1, 7]; its last dimension must have stride one",
    ),
    (
        "concat_and_cache_mla_",
        {"kv_cache": ONES(2, 16, 39).to(E4M3)},
        "kv_cache is [2, 16, 39]; it must be [blocks, block_size, 40]",
    ),
    (
        "concat_and_cache_mla_",
        {"kv_cache": ONES(2, 16, 40)},
        "kv_cache is torch.float32; it must be the dtype of kv_c, torch.bfloat16, or torch.float8_e4m3fn or",
    ),
    (
        "concat_and_cache_mla_",
        {"slot_mapping": torch.arange(8)},
        "slot_mapping has 8 slots; it must have at most 7, one for each token of kv_c",
    ),
    ("concat_and_cache_mla_", {"scale": ONES(2)}, "scale is [2]; it must have one element"),
    (
        "concat_and_cache_mla_",
        {"kv_cache": ONES(2, 16, 40).bfloat16()},
        "scale is given, and the cache is torch.bfloat16; it must be left out, since only FP8 is stored with a scale",
    ),
    ("gather_cache", {"layout": "NDH"}, "layout is 'NDH'; it must be 'NHD', 'HND' or 'v1'"),
    ("gather_cache", {"cache": ONES(2, 16, 3, 32).int()}, "cache is torch.int32; it must be torch.bfloat16, torch"),
    (
        "gather_cache",
        {"cache": ONES(2, 16, 96).to(E4M3)},
        "cache is [2, 16, 96]; for layout 'NHD' it must be [blocks, block_size, heads, head_size]",
    ),
    (
        "gather_cache",
        {"cache": ONES(2, 3, 4, 16, 8).to(E4M3), "layout": "v1"},
        "cache is [2, 3, 4, 16, 8]; for layout 'v1' it must be [blocks, heads, head_size / x, block_size, 16] or "
        "[blocks, heads, head_size, block_size]",
    ),
    (
        "gather_cache",
        {"cache": ONES(2, 16, 32, 3).to(E4M3).transpose(2, 3)},
        "cache has the strides [1536, 96, 1, 3]; its last dimension must have stride one",
    ),
    ("gather_cache", {"slot_mapping": ONES(5)}, "slot_mapping is torch.float32; it must be torch.int32 or torch.int64"),
    ("gather_cache", {"slot_mapping": ONES(5, 1).long()}, "slot_mapping is [5, 1]; it must have one dimension"),
    ("gather_cache", {"scale": ONES(2)}, "scale is [2]; it must have one element or be [3], one for each head"),
    ("gather_cache", {"scale_cache": ONES(2, 16, 3)}, "scale is given with scale_cache; one of them must be left out"),
    (
        "gather_cache",
        {"cache": ONES(2, 16, 3, 32)},
        "scale is given, and the cache is torch.float32; it must be left out, since only FP8 is stored with a scale",
    ),
    (
        "gather_cache",
        {"scale": None, "scale_cache": ONES(2, 16, 1)},
        "scale_cache is [2, 16, 1]; it must be [2, 16, 3], the cache's blocks, block size and heads",
    ),
    ("gather_cache", {"dtype": E4M3}, "dtype is torch.float8_e4m3fn; it must be torch.bfloat16, torch.float16 or"),
    ("qk_norm_rope_and_cache_", {"q": ONES(7, 192).int()}, "q is torch.int32; it must be torch.bfloat16, torch"),
    ("qk_norm_rope_and_cache_", {"k": ONES(7, 97).bfloat16()}, "k is [7, 97]; its last dimension must be a multiple"),
    ("qk_norm_rope_and_cache_", {"k": ONES(6, 96).bfloat16()}, "k is [6, 96]; it must have as many tokens as q, 7"),
    ("qk_norm_rope_and_cache_", {"v": ONES(7, 97).bfloat16()}, "v is [7, 97]; its last dimension must be a multiple"),
    ("qk_norm_rope_and_cache_", {"v": ONES(7, 2, 40).bfloat16()}, "v is [7, 2, 40]; it must be [7, 3, head_size]"),
    (
        "qk_norm_rope_and_cache_",
        {"norm": False},
        "q_weight is given, and norm is False; it must be left out, or norm be True",
    ),
    (
        "qk_norm_rope_and_cache_",
        {"norm": False, "q_weight": None},
        "k_weight is given, and norm is False; it must be left out, or norm be True",
    ),
    ("qk_norm_rope_and_cache_", {"k_weight": ONES(31)}, "k_weight is [31]; it must be [32], as a head"),
    ("qk_norm_rope_and_cache_", {"positions": torch.arange(6)}, "positions is [6]; it must be [7], one for each token"),
    ("qk_norm_rope_and_cache_", {"rope_dim_offset": 17}, "cos_sin_cache is [9, 16]; its last dimension must be at"),
    ("qk_norm_rope_and_cache_", {"layout": "HND"}, "k_cache is [2, 16, 3, 32]; for layout 'HND' it must be [blocks,"),
    ("qk_norm_rope_and_cache_", {"slot_mapping": torch.arange(8)}, "slot_mapping has 8 slots; it must have at most 7"),
    ("qk_norm_rope_and_cache_", {"k_scale": ONES(2)}, "k_scale is [2]; it must have one element or be [3], one for"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "sentence"), WRONG)
def test_errors(device: str, op: str, changes: dict[str, Any], sentence: str) -> None:
    arguments = {**good(device)[op]}
    arguments |= {name: value.to(device) if isinstance(value, Tensor) else value for name, value in changes.items()}
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    kinds = (RuntimeError,) if device == "cuda" else (TypeError, ValueError)
    with pytest.raises(kinds, match="^" + re.escape(f"{op}: {sentence}")):
        getattr(cutegemm, op)(**arguments)
    for name, x in before.items():
        assert same_bits(x, arguments[name]), name


# Graphs, streams, compilation


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_case_038_graph_replay_with_other_slots_on_a_side_stream(dtype: torch.dtype) -> None:
    tokens, heads, size = 32, 3, 64
    q, k, v = packed(*(make(tokens, n, size, seed=n, device="cuda") for n in (5, heads, heads)))
    stored, want = (Caches("HND", "blocks", 4, 16, heads, (size, size), dtype, "cuda") for _ in range(2))
    fused = Caches("HND", "blocks", 4, 16, heads, (size, size), dtype, "cuda")
    latent = torch.zeros(4, 16, 2 * size, dtype=dtype, device="cuda")
    slots, positions = torch.full((tokens,), -1, device="cuda"), torch.zeros(tokens, dtype=torch.int64, device="cuda")
    table = cutegemm.build_cos_sin_cache(size, 64, device="cuda")
    copy = q.clone()

    def run(caches: Caches, fused: Caches, latent: Tensor) -> Tensor:
        copy.copy_(q)
        reshape_and_cache_(k, v, caches.k, caches.v, slots, "HND")
        qk_norm_rope_and_cache_(positions, copy, k, v, size, table, fused.k, fused.v, slots, layout="HND")
        concat_and_cache_mla_(k[:, 0], v[:, 1], latent, slots)
        return gather_cache(caches.k, slots, "HND")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = run(stored, fused, latent)
        its_fused = Caches("HND", "blocks", 4, 16, heads, (size, size), dtype, "cuda")
        its_latent = torch.zeros_like(latent)
        for seed in range(3):
            torch.cuda._sleep(20_000_000)
            padding = torch.full((tokens - 19,), -1, device="cuda")
            slots.copy_(torch.cat([make_slots(19, 64, seed=seed).cuda(), padding]))
            positions.copy_(torch.randint(0, 64, (tokens,), device="cuda"))
            k.copy_(make(tokens, heads, size, seed=10 + seed, device="cuda"))
            graph.replay()
            its_out, its_q = out.clone(), copy.clone()
            again = run(want, its_fused, its_latent)
            assert torch.equal(its_out, again)
            assert torch.equal(its_q, copy)
            assert torch.equal(stored.memory, want.memory)
            assert torch.equal(fused.memory, its_fused.memory)
            assert same_bits(latent, its_latent)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiles_with_dynamic_shapes(device: str, layout: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="inductor" if device == "cuda" else "aot_eager", dynamic=True, fullgraph=True)
    def f(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (qkv * 2).unflatten(1, (-1, 48)).split([4, 2, 2], 1)
        reshape_and_cache_(k, v, k_cache, v_cache, slots, layout)
        before = gather_cache(k_cache, slots, layout)
        qk_norm_rope_and_cache_(slots, q, k, v, 48, table, k_cache, v_cache, slots, norm=True, layout=layout)
        return before, q + gather_cache(k_cache, slots, layout).repeat_interleave(2, 1)

    # Given views of one storage that lie between each other with unlike strides, as v1's do, torch 2.13 writes wrong
    # elements with dynamic shapes, of x.fill_ too.
    how = "apart" if layout == "v1" else "blocks"
    table = cutegemm.build_cos_sin_cache(48, 64, device=device)
    for tokens in (3, 8, 20):
        qkv, slots = make_operand(tokens, 8 * 48, device=device), make_slots(tokens, 64).to(device)
        stored, want = (Caches(layout, how, 4, 16, 2, (48, 48), BF16, device) for _ in range(2))
        q, k, v = (qkv * 2).unflatten(1, (-1, 48)).split([4, 2, 2], 1)
        reshape_and_cache_(k, v, want.k, want.v, slots, layout)
        first = gather_cache(want.k, slots, layout)
        qk_norm_rope_and_cache_(slots, q, k, v, 48, table, want.k, want.v, slots, norm=True, layout=layout)
        before, after = f(qkv, stored.k, stored.v, slots, table)
        assert torch.equal(before, first)
        assert torch.equal(after, q + gather_cache(want.k, slots, layout).repeat_interleave(2, 1))
        assert torch.equal(stored.memory, want.memory)


# Cost


def test_cost_is_of_the_rows_and_not_of_the_cache() -> None:
    k, v, slots = torch.zeros(9, 2, 32, dtype=BF16), torch.zeros(9, 2, 40, dtype=BF16), torch.arange(5)
    arguments = {"k": k, "v": v, "slot_mapping": slots}
    for dtype, each in ((BF16, 4), (E4M3, 3)):
        caches = {"k_cache": torch.zeros(99, 16, 2, 32).to(dtype), "v_cache": torch.zeros(99, 16, 2, 40).to(dtype)}
        assert OPS["reshape_and_cache_"].bytes(**arguments, **caches) == 5 * 2 * 72 * each + 5 * 8
        assert OPS["gather_cache"].bytes(caches["k_cache"], slots) == 5 * 2 * 32 * each + 5 * 8
    scales = {"k_scale": torch.ones(2), "v_scale_cache": torch.ones(99, 16, 2)}
    assert OPS["reshape_and_cache_"].bytes(**arguments, **caches, **scales) == 5 * 2 * (72 * 3 + 4) + 5 * 8 + 8
    assert OPS["gather_cache"].bytes(caches["k_cache"], slots, dtype=FP32, scale_cache=scales["v_scale_cache"]) == (
        5 * 2 * (32 * 5 + 4) + 5 * 8
    )
    latent = torch.zeros(99, 16, 72).to(E4M3)
    assert OPS["concat_and_cache_mla_"].bytes(k[:, 0], v[:, 0], latent, slots, scales["k_scale"][:1]) == (
        5 * 72 * 3 + 5 * 8 + 4
    )
    q, positions, table = torch.zeros(9, 4, 32, dtype=BF16), torch.arange(9), torch.zeros(64, 16)
    fused = {"positions": positions, "q": q, **arguments, **caches, "head_size": 32}
    written = 5 * 2 * 72 * 3 + 5 * 8
    cost: Callable[..., int] = OPS["qk_norm_rope_and_cache_"].bytes
    assert cost(**fused, cos_sin_cache=None) == written
    assert cost(**fused, cos_sin_cache=None, norm=True) == written + 2 * 9 * 4 * 32 * 2
    turned = written + 9 * 8 + 9 * 16 * 4
    assert cost(**fused, cos_sin_cache=table) == turned + 2 * 9 * 4 * 16 * 2
    assert cost(**fused, cos_sin_cache=table, norm=True) == turned + 2 * 9 * 4 * 32 * 2
