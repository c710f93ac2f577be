"""The paged cache of keys and values: rows into it and back by slot, stored as they are or as FP8.

A cache has blocks of block_size slots, a slot has what one token left, of every head, and

    slot = block * block_size + offset in the block

so that a sequence takes the blocks that are free, wherever they lie (PagedAttention: Kwon et al., 2023). The layouts
are vLLM's; a cache may have any strides, but for a last dimension of stride one:

    "NHD"  (blocks, block_size, heads, head_size)
    "HND"  (blocks, heads, block_size, head_size)
    "v1"   keys (blocks, heads, head_size / x, block_size, x), where x values are 16 bytes,
           values (blocks, heads, head_size, block_size)

FP8 caches hold codes, of which x ≈ code * scale. On CUDA a head has at most 1000 values, and a cache less than 2**32
slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .checks import FLOATS, check_device, check_floats, check_last_stride, is_fake
from .norm import rms_norm
from .quantize import AMAX_FLOOR, E4M3_MAX
from .registry import Input, nbytes, op
from .rope import check_heads, check_norm_weight, check_rotation, heads_of, rotate

FP8_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: 57344.0}

_BLOCK_SIZE_AXIS = {"NHD": 1, "HND": 2, "v1": 3}


# What is wrong with a call


def _check_layout(op: str, layout: str) -> None:
    if layout not in _BLOCK_SIZE_AXIS:
        raise ValueError(f"{op}: layout is '{layout}'; it must be 'NHD', 'HND' or 'v1'")


def _check_slots(op: str, slot_mapping: Tensor, of_name: str, of: Tensor) -> None:
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: slot_mapping is {slot_mapping.dtype}; it must be torch.int32 or torch.int64")
    if slot_mapping.dim() != 1:
        raise ValueError(f"{op}: slot_mapping is {list(slot_mapping.shape)}; it must have one dimension")
    check_device(op, "slot_mapping", slot_mapping, of, of_name)


def _check_slots_of_tokens(op: str, slot_mapping: Tensor, of_name: str, of: Tensor) -> None:
    _check_slots(op, slot_mapping, of_name, of)
    if slot_mapping.shape[0] > of.shape[0]:
        raise ValueError(
            f"{op}: slot_mapping has {slot_mapping.shape[0]} slots; it must have at most {of.shape[0]}, "
            f"one for each token of {of_name}"
        )


def _check_rows(op: str, name: str, x: Tensor, shape: Sequence[int | str], of_name: str, of: Tensor) -> None:
    """Of another tensor of tokens; a name in its shape stands for any size."""
    if x.dtype != of.dtype:
        raise TypeError(f"{op}: {name} is {x.dtype}; it must be the dtype of {of_name}, {of.dtype}")
    if not _is_of_shape(x, shape):
        raise ValueError(f"{op}: {name} is {list(x.shape)}; it must be {_text(shape)}")
    check_last_stride(op, name, x)
    check_device(op, name, x, of, of_name)


def _check_cache(
    op: str, name: str, cache: Tensor, shape: Sequence[int | str], layout: str, of_name: str, of: Tensor
) -> None:
    if not _is_of_shape(cache, shape):
        said = f"for layout '{layout}' it" if layout else "it"
        raise ValueError(f"{op}: {name} is {list(cache.shape)}; {said} must be {_text(shape)}")
    check_last_stride(op, name, cache)
    check_device(op, name, cache, of, of_name)


def _check_cache_dtype(op: str, name: str, cache: Tensor, of_name: str, of: Tensor) -> None:
    if cache.dtype != of.dtype and cache.dtype not in FP8_MAX:
        raise TypeError(
            f"{op}: {name} is {cache.dtype}; it must be the dtype of {of_name}, {of.dtype}, "
            "or torch.float8_e4m3fn or torch.float8_e5m2"
        )


def _check_scales(
    op: str,
    cache: Tensor,
    slots: Tensor,
    scale_name: str,
    scale: Tensor | None,
    scale_cache_name: str = "",
    scale_cache: Tensor | None = None,
) -> None:
    """slots: the cache as (blocks, block_size, heads, ...)."""
    for name, given in ((scale_name, scale), (scale_cache_name, scale_cache)):
        if given is None:
            continue
        if cache.dtype not in FP8_MAX:
            raise ValueError(
                f"{op}: {name} is given, and the cache is {cache.dtype}; "
                "it must be left out, since only FP8 is stored with a scale"
            )
        if given.dtype != torch.float32:
            raise TypeError(f"{op}: {name} is {given.dtype}; it must be torch.float32")
        check_device(op, name, given, cache, "the cache")
    if scale is not None and scale_cache is not None:
        raise ValueError(f"{op}: {scale_name} is given with {scale_cache_name}; one of them must be left out")
    heads = slots.shape[2]
    if scale is not None and scale.numel() != 1 and tuple(scale.shape) != (heads,):
        wanted = "one element" if heads == 1 else f"one element or be [{heads}], one for each head"
        raise ValueError(f"{op}: {scale_name} is {list(scale.shape)}; it must have {wanted}")
    if scale_cache is not None and scale_cache.shape != slots.shape[:3]:
        raise ValueError(
            f"{op}: {scale_cache_name} is {list(scale_cache.shape)}; "
            f"it must be {list(slots.shape[:3])}, the cache's blocks, block size and heads"
        )


def _is_of_shape(x: Tensor, shape: Sequence[int | str]) -> bool:
    return x.dim() == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, x.shape, strict=True))


def _text(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _cache_shape(
    layout: str, blocks: int | str, block_size: int | str, heads: int, head_size: int, x: int = 0
) -> tuple[int | str, ...]:
    """x: of v1's keys."""
    if layout == "NHD":
        return blocks, block_size, heads, head_size
    if layout == "HND":
        return blocks, heads, block_size, head_size
    return (blocks, heads, head_size // x, block_size, x) if x else (blocks, heads, head_size, block_size)


def _check_write(
    op: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_cache: Tensor | None,
    v_scale_cache: Tensor | None,
) -> None:
    check_floats(op, "k", k)
    if k.dim() != 3:
        raise ValueError(f"{op}: k is {list(k.shape)}; it must be [tokens, heads, head_size]")
    check_last_stride(op, "k", k)
    tokens, heads, head_size = k.shape
    _check_rows(op, "v", v, (tokens, heads, "head_size"), "k", k)
    _check_layout(op, layout)
    _check_cache_dtype(op, "k_cache", k_cache, "k", k)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"{op}: v_cache is {v_cache.dtype}; it must be the dtype of k_cache, {k_cache.dtype}")
    x = 16 // k_cache.dtype.itemsize if layout == "v1" else 0
    if x and head_size % x:
        raise ValueError(f"{op}: k has heads of {head_size}; for layout 'v1' it must be a multiple of {x}, 16 bytes")
    _check_cache(op, "k_cache", k_cache, _cache_shape(layout, "blocks", "block_size", heads, head_size, x), layout,
                 "k", k)  # fmt: skip
    blocks, block_size = k_cache.shape[0], k_cache.shape[_BLOCK_SIZE_AXIS[layout]]
    _check_cache(op, "v_cache", v_cache, _cache_shape(layout, blocks, block_size, heads, v.shape[2]), layout, "k", k)
    _check_slots_of_tokens(op, slot_mapping, "k", k)
    _check_scales(op, k_cache, _by_slot(k_cache, layout), "k_scale", k_scale, "k_scale_cache", k_scale_cache)
    _check_scales(op, v_cache, _by_slot(v_cache, layout), "v_scale", v_scale, "v_scale_cache", v_scale_cache)


# Into a cache


def _by_slot(cache: Tensor, layout: str) -> Tensor:
    """A view (blocks, block_size, heads, head_size), with the last dimension in two for v1's keys."""
    if layout == "NHD":
        return cache
    if layout == "HND":
        return cache.transpose(1, 2)
    return cache.permute(0, 3, 1, 2, *range(4, cache.dim()))


def _places(slot_mapping: Tensor, slots: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which of the slots are in the cache, and the blocks and offsets of those."""
    blocks, block_size = slots.shape[:2]
    slot = slot_mapping.long()
    inside = (slot >= 0) & (slot < blocks * block_size)
    slot = slot[inside]
    return inside, (slot // block_size, slot % block_size)


def _store(x: Tensor, slots: Tensor, slot_mapping: Tensor, scale: Tensor | None, scale_cache: Tensor | None) -> None:
    """x (tokens, heads, head_size) into slots (blocks, block_size, heads, ...)."""
    if is_fake(slots):  # which slots are in the cache is known by their values
        return
    inside, places = _places(slot_mapping, slots)
    rows = x[: len(slot_mapping)][inside]
    if slots.dtype in FP8_MAX:
        largest, values = FP8_MAX[slots.dtype], rows.float()
        if scale_cache is not None:
            finite = values.abs().nan_to_num(nan=0.0, posinf=0.0)
            amax = functional.pad(finite, (0, 1)).amax(-1)  # a head may have no values
            scale = amax.clamp_min(AMAX_FLOOR) / largest
            scale_cache[places] = scale
        scaled = values if scale is None else values / _of_heads(scale)
        # The cast keeps the sign of a NaN, which is not the same everywhere.
        rows = torch.where(scaled.isnan(), torch.nan, scaled.clamp(-largest, largest)).to(slots.dtype)
    slots[places] = rows.reshape(len(rows), *slots.shape[2:])


def _of_heads(scale: Tensor) -> Tensor:
    """One element or (..., heads), to go with (..., heads, head_size)."""
    return scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(-1)


def _bytes_written(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_cache: Tensor | None,
    v_scale_cache: Tensor | None,
    **others: Any,
) -> int:
    """Of a call in which no slot is skipped."""
    heads = slot_mapping.numel() * k.shape[1]
    values = heads * (k.shape[2] + v.shape[2]) * (k.itemsize + k_cache.itemsize)
    scales = sum(heads * scales.itemsize for scales in (k_scale_cache, v_scale_cache) if scales is not None)
    return values + scales + nbytes(slot_mapping, k_scale, v_scale)


_SLOTS = Input((5,), torch.int64, high=40)
_KV: dict[str, object] = {"k": Input((7, 3, 32)), "v": Input((7, 3, 40)), "slot_mapping": _SLOTS}


@op(
    "reshape_and_cache_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    'str layout="NHD", Tensor? k_scale=None, Tensor? v_scale=None, Tensor(c!)? k_scale_cache=None, '
    "Tensor(d!)? v_scale_cache=None) -> ()",
    cases=[
        {**_KV, "k_cache": Input((2, 16, 3, 32)), "v_cache": Input((2, 16, 3, 40))},
        {**_KV, "k_cache": Input((2, 3, 16, 32)), "v_cache": Input((2, 3, 16, 40)), "layout": "HND"},
        {**_KV, "k_cache": Input((11, 3, 4, 3, 8)), "v_cache": Input((11, 3, 40, 3)), "layout": "v1"},
    ],
    bytes=_bytes_written,
)
def reshape_and_cache_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    layout: str = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Write the keys and values of tokens into their slots of a paged cache, in place.

    k, v: (tokens, heads, head_size) of BF16, FP16 or FP32; v may have another head_size. The last dimension has
    stride one, the others any: slices of a packed qkv are read where they are.
    k_cache, v_cache: in the layout that is named ("NHD", "HND" or "v1", see the module), of the dtype of k, of
    torch.float8_e4m3fn or of torch.float8_e5m2, both alike. Views of one allocation will do.
    slot_mapping: (n,) of int32 or int64, n <= tokens: token i goes to slot_mapping[i], and the tokens after the first
    n are padding. A slot that is negative or past the cache is skipped. Nothing else of a cache is written. Where two
    tokens have one slot, it is undefined which of them it gets.

    An FP8 cache gets x / scale in float32, clamped to ±448 (e4m3) or ±57344 (e5m2) and rounded to nearest even. ±Inf
    becomes the largest number and NaN stays NaN. k_scale, v_scale: float32, of one element or (heads,); None is 1.
    They must be positive and finite, which is not checked. k_scale_cache, v_scale_cache: float32 (blocks, block_size,
    heads), of any strides and for any layout, in place of a scale: each token's head then has its own, which is
    max(amax, 2**-40) over 448 or 57344, where amax is the largest finite |x|, and it is written there.
    """
    _check_write(
        "reshape_and_cache_", k, v, k_cache, v_cache, slot_mapping, layout, k_scale, v_scale, k_scale_cache,
        v_scale_cache,
    )  # fmt: skip
    _store(k, _by_slot(k_cache, layout), slot_mapping, k_scale, k_scale_cache)
    _store(v, _by_slot(v_cache, layout), slot_mapping, v_scale, v_scale_cache)


@op(
    "concat_and_cache_mla_(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? scale=None) "
    "-> ()",
    cases=[
        {"kv_c": Input((7, 96)), "k_pe": Input((7, 16)), "kv_cache": Input((4, 8, 112)), "slot_mapping": _SLOTS},
    ],
    bytes=lambda kv_c, kv_cache, slot_mapping, scale, **others: (
        slot_mapping.numel() * kv_cache.shape[2] * (kv_c.itemsize + kv_cache.itemsize) + nbytes(slot_mapping, scale)
    ),
)
def concat_and_cache_mla_(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor | None = None
) -> None:
    """Write [kv_c | k_pe] of tokens into their slots of the cache of multi-head latent attention, in place.

    kv_c: (tokens, rank), the compressed keys and values; k_pe: (tokens, rope), the part of a key that is rotated, which
    all heads share. kv_cache: (blocks, block_size, rank + rope). scale: float32 of one element, for an FP8 cache; None
    is 1. The rest, and what FP8 holds, is as in reshape_and_cache_ with one head (DeepSeek-V2, 2024). To gather_cache
    such a cache is kv_cache.unsqueeze(2).
    """
    name = "concat_and_cache_mla_"
    check_floats(name, "kv_c", kv_c)
    if kv_c.dim() != 2:
        raise ValueError(f"{name}: kv_c is {list(kv_c.shape)}; it must be [tokens, rank]")
    check_last_stride(name, "kv_c", kv_c)
    _check_rows(name, "k_pe", k_pe, (kv_c.shape[0], "rope"), "kv_c", kv_c)
    _check_cache_dtype(name, "kv_cache", kv_cache, "kv_c", kv_c)
    width = kv_c.shape[1] + k_pe.shape[1]
    _check_cache(name, "kv_cache", kv_cache, ("blocks", "block_size", width), "", "kv_c", kv_c)
    _check_slots_of_tokens(name, slot_mapping, "kv_c", kv_c)
    _check_scales(name, kv_cache, kv_cache.unsqueeze(2), "scale", scale)
    _store(torch.cat((kv_c, k_pe), -1).unsqueeze(1), kv_cache.unsqueeze(2), slot_mapping, scale, None)


def _bytes_fused(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_size: int,
    cos_sin_cache: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    norm: bool,
    **write: Any,
) -> int:
    total = nbytes(q_weight, k_weight) + _bytes_written(heads_of(k, head_size), heads_of(v, head_size), **write)
    if cos_sin_cache is not None:
        length, rotary_dim = cos_sin_cache.shape
        total += nbytes(positions) + min(q.shape[0], length) * rotary_dim * cos_sin_cache.itemsize
    if norm:
        return total + 2 * nbytes(q)
    return total if cos_sin_cache is None else total + 2 * nbytes(q) * rotary_dim // head_size


_QKV: dict[str, object] = {
    "positions": Input((7,), torch.int64, high=20),
    "q": Input((7, 6 * 40)),
    "k": Input((7, 3 * 40)),
    "v": Input((7, 3 * 40)),
    "head_size": 40,
    "cos_sin_cache": Input((16, 24), torch.float32),
    "slot_mapping": _SLOTS,
}


@op(
    "qk_norm_rope_and_cache_(Tensor positions, Tensor(a!) q, Tensor k, Tensor v, int head_size, "
    "Tensor? cos_sin_cache, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, Tensor? q_weight=None, "
    "Tensor? k_weight=None, float eps=1e-6, float weight_offset=0.0, bool norm=False, bool is_neox=True, "
    'int rope_dim_offset=0, int[]? mrope_section=None, str layout="NHD", Tensor? k_scale=None, Tensor? v_scale=None, '
    "Tensor(d!)? k_scale_cache=None, Tensor(e!)? v_scale_cache=None) -> ()",
    cases=[
        {**_QKV, "k_cache": Input((2, 16, 3, 40)), "v_cache": Input((2, 16, 3, 40))},
        {
            **_QKV,
            "k_cache": Input((2, 3, 16, 40)),
            "v_cache": Input((2, 3, 16, 40)),
            "q_weight": Input((40,)),
            "k_weight": Input((40,), torch.float32),
            "norm": True,
            "is_neox": False,
            "rope_dim_offset": 16,
            "layout": "HND",
        },
        {
            **_QKV,
            "v": Input((7, 3, 24)),
            "cos_sin_cache": None,
            "k_cache": Input((11, 3, 5, 3, 8)),
            "v_cache": Input((11, 3, 24, 3)),
            "norm": True,
            "layout": "v1",
        },
    ],
    bytes=_bytes_fused,
)
def qk_norm_rope_and_cache_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_size: int,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm: bool = False,
    is_neox: bool = True,
    rope_dim_offset: int = 0,
    mrope_section: list[int] | None = None,
    layout: str = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """All between the product that makes q, k and v and the attention, in one pass: norm, RoPE and the cache's rows.

    Bit for bit it is qk_norm_rope_, or if norm is False rotary_embedding_, of q in place and of a copy of k, and
    reshape_and_cache_ of that copy and v. k itself stays as it is. All tokens of q are computed; of k and v the first
    n, the slots of slot_mapping, are written.

    q, k, v: (tokens, heads * head_size) or (tokens, heads, head_size), as in rotary_embedding_; v has the heads of k,
    and with three dimensions it may have another head_size. norm: RMSNorm of the heads of q and k, with q_weight and
    k_weight, eps and weight_offset as in qk_norm_rope_. cos_sin_cache: None leaves out RoPE, and positions are not
    read. The others are as in rotary_embedding_ and reshape_and_cache_.
    """
    name = "qk_norm_rope_and_cache_"
    check_heads(name, "q", q, head_size, q)
    check_heads(name, "k", k, head_size, q, written=False)
    if v.dim() == 2:
        check_heads(name, "v", v, head_size, q, written=False)
    for which, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and not norm:
            raise ValueError(f"{name}: {which} is given, and norm is False; it must be left out, or norm be True")
        check_norm_weight(name, which, weight, q, head_size)
    if cos_sin_cache is not None:
        check_rotation(name, positions, cos_sin_cache, q, head_size, rope_dim_offset, mrope_section)
    _check_write(
        name, heads_of(k, head_size), heads_of(v, head_size), k_cache, v_cache, slot_mapping, layout, k_scale, v_scale,
        k_scale_cache, v_scale_cache,
    )  # fmt: skip

    def turned(heads: Tensor, weight: Tensor | None) -> Tensor:
        if norm:
            heads = rms_norm(heads, weight, eps, weight_offset)
        if cos_sin_cache is not None:
            heads = rotate(heads, positions, cos_sin_cache, is_neox, rope_dim_offset, False, mrope_section)
        return heads

    queries = heads_of(q, head_size)
    queries.copy_(turned(queries, q_weight))
    keys, values = turned(heads_of(k, head_size), k_weight), heads_of(v, head_size)
    _store(keys, _by_slot(k_cache, layout), slot_mapping, k_scale, k_scale_cache)
    _store(values, _by_slot(v_cache, layout), slot_mapping, v_scale, v_scale_cache)


# Out of it


def _gathered_dtype(cache: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (torch.bfloat16 if cache.dtype in FP8_MAX else cache.dtype)


def _bytes_gathered(
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    scale: Tensor | None,
    scale_cache: Tensor | None,
    dtype: torch.dtype | None,
) -> int:
    heads, *head = _by_slot(cache, layout).shape[2:]
    each = math.prod(head) * (cache.itemsize + _gathered_dtype(cache, dtype).itemsize)
    each += 0 if scale_cache is None else scale_cache.itemsize
    return slot_mapping.numel() * heads * each + nbytes(slot_mapping, scale)


@op(
    'gather_cache(Tensor cache, Tensor slot_mapping, str layout="NHD", Tensor? scale=None, Tensor? scale_cache=None, '
    "ScalarType? dtype=None) -> Tensor",
    cases=[
        {"cache": Input((2, 16, 3, 40)), "slot_mapping": _SLOTS},
        {"cache": Input((2, 3, 16, 40)), "slot_mapping": _SLOTS, "layout": "HND", "dtype": torch.float32},
        {"cache": Input((11, 3, 4, 3, 8)), "slot_mapping": _SLOTS, "layout": "v1"},
        {
            "cache": Input((2, 16, 3, 40), torch.float8_e4m3fn),
            "slot_mapping": Input((5,), torch.int32, high=40),
            "scale_cache": Input((2, 16, 3), torch.float32, positive=True),
        },
    ],
    bytes=_bytes_gathered,
)
def gather_cache(
    cache: Tensor,
    slot_mapping: Tensor,
    layout: str = "NHD",
    scale: Tensor | None = None,
    scale_cache: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What slots of a paged cache hold, as (n, heads, head_size).

    cache: the keys or the values, in the layout that is named and as reshape_and_cache_ takes them; for "v1" keys are
    known by their five dimensions. slot_mapping: (n,) of int32 or int64, in any order and with repetitions. A slot that
    is negative or past the cache gives zeros.
    scale: float32, of one element or (heads,), or scale_cache: float32 (blocks, block_size, heads), for an FP8 cache:
    those that it was written with. None is 1.
    dtype: of the result, torch.bfloat16, torch.float16 or torch.float32. None is that of the cache, bit for bit, and
    torch.bfloat16 for an FP8 cache. code * scale is computed in float32 and rounded once.
    """
    name = "gather_cache"
    _check_layout(name, layout)
    if cache.dtype not in (*FLOATS, *FP8_MAX):
        raise TypeError(
            f"{name}: cache is {cache.dtype}; it must be torch.bfloat16, torch.float16, torch.float32, "
            "torch.float8_e4m3fn or torch.float8_e5m2"
        )
    x = 16 // cache.dtype.itemsize
    shapes: dict[str, list[tuple[int | str, ...]]] = {
        "NHD": [("blocks", "block_size", "heads", "head_size")],
        "HND": [("blocks", "heads", "block_size", "head_size")],
        "v1": [("blocks", "heads", "head_size / x", "block_size", x), ("blocks", "heads", "head_size", "block_size")],
    }
    if not any(_is_of_shape(cache, shape) for shape in shapes[layout]):
        wanted = " or ".join(map(_text, shapes[layout]))
        raise ValueError(f"{name}: cache is {list(cache.shape)}; for layout '{layout}' it must be {wanted}")
    check_last_stride(name, "cache", cache)
    _check_slots(name, slot_mapping, "cache", cache)
    slots = _by_slot(cache, layout)
    _check_scales(name, cache, slots, "scale", scale, "scale_cache", scale_cache)
    dtype = _gathered_dtype(cache, dtype)
    if dtype not in FLOATS:
        raise TypeError(f"{name}: dtype is {dtype}; it must be torch.bfloat16, torch.float16 or torch.float32")
    head_size = slots.shape[3] * (slots.shape[4] if slots.dim() == 5 else 1)
    out = cache.new_zeros((slot_mapping.shape[0], slots.shape[2], head_size), dtype=dtype)
    if is_fake(cache):
        return out
    inside, places = _places(slot_mapping, slots)
    rows = slots[places].flatten(2)
    if scale_cache is not None:
        scale = scale_cache[places]
    if scale is not None:
        rows = rows.float() * _of_heads(scale)
    out[inside] = rows.to(out.dtype)
    return out


def slots_of(block_table: Tensor, lengths: Tensor | Sequence[int], block_size: int) -> Tensor:
    """The slots of positions 0 .. length - 1 of each sequence, one sequence after the other, as one int64 tensor.

    block_table: (sequences, most blocks) of integers: row s has the blocks of sequence s, in the order of its
    positions. lengths: one for each sequence. This is plain torch, and waits for lengths that are on a GPU.
    """
    if block_table.dim() != 2:
        raise ValueError(f"slots_of: block_table is {list(block_table.shape)}; it must be [sequences, blocks]")
    sequences, most = block_table.shape[0], block_table.shape[1] * block_size
    each = torch.as_tensor(lengths, device="cpu").tolist()
    if len(each) != sequences:
        raise ValueError(f"slots_of: lengths has {len(each)} numbers; it must have {sequences}, one for each sequence")
    if wrong := [length for length in each if not 0 <= length <= most]:
        raise ValueError(f"slots_of: lengths has {wrong[0]}; it must have 0 to {most}, the slots of a row's blocks")
    slots = block_table.long().unsqueeze(-1) * block_size + torch.arange(block_size, device=block_table.device)
    rows = [row[:length] for row, length in zip(slots.flatten(1), each, strict=True)]
    return torch.cat(rows) if rows else slots.flatten()
