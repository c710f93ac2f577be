"""Rotary position embedding (RoPE), alone and after an RMSNorm of each head, and its table of cosines and sines.

RoPE (Su et al., RoFormer, 2021) turns pairs of a head's values, pair i of a token at position p by the angle
p * frequency[i], so that the product of a query and a key depends on how far apart they are:

    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin

`rotate` is the specification of every rotated output, also of the op of kv_cache.py that writes one to the cache. On
CUDA a head has at most 1000 values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .checks import FLOATS, check_device, check_floats, check_last_stride
from .norm import rms_norm
from .registry import Input, nbytes, op

# The table


def build_cos_sin_cache(
    rotary_dim: int,
    length: int,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table of the RoPE ops, (length, rotary_dim): row p has the cosines of p * frequency, and then the sines.

    frequency[i] = base ** (-2 i / rotary_dim) for the rotary_dim / 2 pairs i, before scaling. dtype: torch.float32,
    or that of the model. Angles, cosines and sines are computed in float64 and rounded to float32; a table in BF16 or
    FP16 is that one, rounded. (Angles in float32, as in most engines, are off by up to 2**-7 at position 131072.)
    The table is computed on the CPU, so that its bits are the same for every device.

    scaling: what a Hugging Face config has as rope_scaling or rope_parameters. Its rope_type (or type) is one of

      "default"  no scaling; "mrope" means the same, as its sections are an argument of the ops.
      "linear"   frequency / factor (Chen et al., Position Interpolation, 2023).
      "dynamic"  with a base that grows with the length, by "NTK-aware" scaling (described in the YaRN paper): for a
                 length over original_max_position_embeddings, the base becomes
                 base * (factor * length / original - factor + 1) ** (rotary_dim / (rotary_dim - 2)).
      "yarn"     (Peng et al., YaRN, 2023) pairs that turn more than beta_fast (32) times over
                 original_max_position_embeddings keep their frequency, those that turn less than beta_slow (1) times
                 have frequency / factor, and between these two pairs the share of each is linear in i. The two are
                 rounded outwards to whole pairs unless truncate is false. Cosines and sines are multiplied by
                 attention_factor. If it isn't given, it is m(1) for m(x) = 0.1 x ln(factor) + 1, or, for models of
                 DeepSeek's that have both mscale and mscale_all_dim, m(mscale) / m(mscale_all_dim).
      "llama3"   (Meta's Llama 3.1 reference) the same idea with wavelengths 2 pi / frequency: below
                 original_max_position_embeddings / high_freq_factor a frequency stays, above original /
                 low_freq_factor it is divided by factor, between them the share is linear in 1 / wavelength.
      "longrope" (Ding et al., LongRoPE, 2024) frequency / long_factor[i] if length is over
                 original_max_position_embeddings, otherwise / short_factor[i]; times attention_factor, which is
                 sqrt(1 + ln(factor) / ln(original)) if it isn't given, and 1 for a factor up to 1.

    Keys that a type does not use are ignored, but for a rope_theta that is not base, which is an error: ValueError,
    as for an unknown type, a missing key and numbers that can't be.
    """
    name = "build_cos_sin_cache"
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"{name}: rotary_dim is {rotary_dim}; it must be even, and at least 2")
    if length < 0:
        raise ValueError(f"{name}: length is {length}; it must be at least 0")
    if not base > 1:
        raise ValueError(f"{name}: base is {base}; it must be more than 1")
    if dtype not in FLOATS:
        raise TypeError(f"{name}: dtype is {dtype}; it must be torch.bfloat16, torch.float16 or torch.float32")
    frequency, factor = _scaled_frequencies(name, rotary_dim, length, base, scaling or {"rope_type": "default"})
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequency)
    table = torch.empty(length, rotary_dim, dtype=torch.float32, device="cpu")
    table[:, : rotary_dim // 2] = angle.cos() * factor
    table[:, rotary_dim // 2 :] = angle.sin() * factor
    return table.to(dtype).to(torch.get_default_device() if device is None else device)


def _scaled_frequencies(
    op: str, rotary_dim: int, length: int, base: float, scaling: Mapping[str, Any]
) -> tuple[Tensor, float]:
    """The frequencies in float64, and the factor of cosines and sines."""
    kind = scaling.get("rope_type", scaling.get("type"))
    kinds = ("default", "mrope", "linear", "dynamic", "yarn", "llama3", "longrope")
    if kind not in kinds:
        names = ", ".join(f"'{known}'" for known in kinds[:-1])
        raise ValueError(f"{op}: rope_type of scaling is {kind!r}; it must be {names} or '{kinds[-1]}'")
    if scaling.get("rope_theta") not in (None, base):
        raise ValueError(f"{op}: base is {base}; it must be rope_theta of scaling, {scaling['rope_theta']}")

    def given(key: str) -> Any:
        if scaling.get(key) is None:
            raise ValueError(f"{op}: scaling has no {key}; it must have one for rope_type '{kind}'")
        return scaling[key]

    def number(key: str, default: float | None = None) -> float:
        value = default if default is not None and scaling.get(key) is None else given(key)
        if not value > 0:
            raise ValueError(f"{op}: {key} of scaling is {value}; it must be positive")
        return float(value)

    pair = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    plain = base ** (-2 * pair / rotary_dim)
    if kind in ("default", "mrope"):
        return plain, 1.0
    if kind == "linear":
        return plain / number("factor"), 1.0
    original = number("original_max_position_embeddings")
    if kind == "dynamic":
        factor = number("factor")
        stretch = factor * max(length, original) / original - factor + 1
        # The base's power of -2 i / rotary_dim, written so that a single pair is no division by zero.
        return plain * stretch ** (-2 * pair / max(rotary_dim - 2, 1)), 1.0
    if kind == "longrope":
        key = "long_factor" if length > original else "short_factor"
        divisors = given(key)
        if len(divisors) != rotary_dim // 2:
            raise ValueError(
                f"{op}: {key} of scaling has {len(divisors)} numbers; it must have rotary_dim / 2, {rotary_dim // 2}"
            )
        if scaling.get("attention_factor") is not None:
            attention = number("attention_factor")
        else:
            attention = math.sqrt(1 + math.log(max(number("factor"), 1)) / math.log(original))
        return plain / torch.tensor(divisors, dtype=torch.float64, device="cpu"), attention
    factor = number("factor")
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise ValueError(f"{op}: high_freq_factor of scaling is {high}; it must be over low_freq_factor, {low}")
        kept = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0

    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    fast, slow = number("beta_fast", 32), number("beta_slow", 1)
    if slow >= fast:
        raise ValueError(f"{op}: beta_fast of scaling is {fast}; it must be over beta_slow, {slow}")
    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    # Limits, and a ramp of no width as a step, as in the YaRN authors' code.
    first, last = max(first, 0), min(last, rotary_dim - 1)
    kept = 1 - ((pair - first) / (last - first or 1e-3)).clamp(0, 1)

    def m(x: float) -> float:
        return 0.1 * x * math.log(max(factor, 1)) + 1

    attention = m(1)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = m(number("mscale")) / m(number("mscale_all_dim"))
    return kept * plain + (1 - kept) * plain / factor, number("attention_factor", attention)


# What is wrong with a call


def check_heads(op: str, name: str, x: Tensor, head_size: int, q: Tensor, written: bool = True) -> None:
    """x, which may be q itself, is heads of head_size for each token of q; written: and can be written where it is."""
    if x is q:
        check_floats(op, name, x)
        if head_size < 1:
            raise ValueError(f"{op}: head_size is {head_size}; it must be at least 1")
    elif x.dtype != q.dtype:
        raise TypeError(f"{op}: {name} is {x.dtype}; it must be the dtype of q, {q.dtype}")
    shape = list(x.shape)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"{op}: {name} is {shape}; it must be (tokens, heads * head_size) or (tokens, heads, head_size)"
        )
    if x.dim() == 2 and shape[1] % head_size:
        raise ValueError(f"{op}: {name} is {shape}; its last dimension must be a multiple of head_size, {head_size}")
    if x.dim() == 3 and shape[2] != head_size:
        raise ValueError(f"{op}: {name} is {shape}; its last dimension must be head_size, {head_size}")
    if shape[0] != q.shape[0]:
        raise ValueError(f"{op}: {name} is {shape}; it must have as many tokens as q, {q.shape[0]}")
    check_last_stride(op, name, x)
    # From the nearest to the farthest: each step leaves behind all that the steps before it reach.
    heads, reach = heads_of(x, head_size), head_size
    for stride, size in sorted(zip(heads.stride()[:2], heads.shape[:2], strict=True)):
        if written and stride < reach and size > 1 and x.numel():
            raise ValueError(
                f"{op}: {name} has the strides {list(x.stride())}; its heads must not overlap, since it is written"
            )
        reach += (size - 1) * stride
    check_device(op, name, x, q, "q")


def check_rotation(
    op: str,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q: Tensor,
    head_size: int,
    rope_dim_offset: int,
    mrope_section: list[int] | None,
) -> None:
    """positions and cos_sin_cache are for the tokens and heads of q, which is checked."""
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: positions is {positions.dtype}; it must be torch.int32 or torch.int64")
    want = ([] if mrope_section is None else [3]) + [q.shape[0]]
    if list(positions.shape) != want:
        each = "one" if mrope_section is None else "with mrope_section three"
        raise ValueError(f"{op}: positions is {list(positions.shape)}; it must be {want}, {each} for each token of q")
    check_device(op, "positions", positions, q, "q")
    if cos_sin_cache.dtype not in (torch.float32, q.dtype):
        raise TypeError(
            f"{op}: cos_sin_cache is {cos_sin_cache.dtype}; it must be torch.float32 or the dtype of q, {q.dtype}"
        )
    shape = list(cos_sin_cache.shape)
    if len(shape) != 2 or shape[1] < 2 or shape[1] % 2:
        raise ValueError(
            f"{op}: cos_sin_cache is {shape}; it must be (length, rotary_dim), with a rotary_dim that is even and "
            "at least 2"
        )
    if rope_dim_offset < 0:
        raise ValueError(f"{op}: rope_dim_offset is {rope_dim_offset}; it must be at least 0")
    if shape[1] > head_size - rope_dim_offset:
        raise ValueError(
            f"{op}: cos_sin_cache is {shape}; its last dimension must be at most head_size - rope_dim_offset, "
            f"{head_size - rope_dim_offset}"
        )
    check_last_stride(op, "cos_sin_cache", cos_sin_cache)
    check_device(op, "cos_sin_cache", cos_sin_cache, q, "q")
    if mrope_section is not None and (
        len(mrope_section) != 3 or min(mrope_section) < 0 or sum(mrope_section) != shape[1] // 2
    ):
        raise ValueError(
            f"{op}: mrope_section is {list(mrope_section)}; it must be three numbers, none of them negative, that "
            f"add up to rotary_dim / 2, {shape[1] // 2}"
        )


def check_norm_weight(op: str, name: str, weight: Tensor | None, q: Tensor, head_size: int) -> None:
    if weight is None:
        return
    if weight.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"{op}: {name} is {weight.dtype}; it must be torch.float32 or the dtype of q, {q.dtype}")
    if tuple(weight.shape) != (head_size,):
        raise ValueError(f"{op}: {name} is {list(weight.shape)}; it must be [{head_size}], as a head")
    check_device(op, name, weight, q, "q")


# The specification


def heads_of(x: Tensor, head_size: int) -> Tensor:
    """The view (tokens, heads, head_size) of an x that check_heads has seen."""
    return x if x.dim() == 3 else x.view(x.shape[0], x.shape[1] // head_size, head_size)


def rotate(
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    rope_dim_offset: int = 0,
    inverse: bool = False,
    mrope_section: list[int] | None = None,
) -> Tensor:
    """x (tokens, heads, head_size) after rotary_embedding_, as a new tensor; all is checked."""
    length, rotary_dim = cos_sin_cache.shape
    out = x.clone()
    if length == 0:
        return out
    pairs = rotary_dim // 2
    if mrope_section is None:
        position = positions[:, None].expand(-1, pairs)
    else:
        position = positions[[axis for axis, count in enumerate(mrope_section) for _ in range(count)]].t()
    inside = (position >= 0) & (position < length)
    row = position.where(inside, 0).long()
    cos, sin = (half.gather(0, row).float()[:, None] for half in cos_sin_cache.split(pairs, -1))
    if inverse:
        sin = -sin
    rotated = out[..., rope_dim_offset : rope_dim_offset + rotary_dim]
    x1, x2 = rotated.split(pairs, -1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
    y1 = x1.float() * cos - x2.float() * sin
    y2 = x2.float() * cos + x1.float() * sin
    for old, new in ((x1, y1), (x2, y2)):
        old.copy_(new.to(x.dtype).where(inside[:, None], old))
    return out


# The ops


def _rope_bytes(
    positions: Tensor, q: Tensor, k: Tensor | None, head_size: int, cos_sin_cache: Tensor, **others: Any
) -> int:
    """positions, a row of the table for each of them, and the rotated part of q and k, which is read and written."""
    length, rotary_dim = cos_sin_cache.shape
    rows = min(q.shape[0], length) * rotary_dim * cos_sin_cache.element_size()
    return nbytes(positions) + rows + 2 * nbytes(q, k) * rotary_dim // head_size


_POSITIONS, _TABLE = Input((5,), torch.int64, high=16), Input((16, 32), torch.float32)


@op(
    "rotary_embedding_(Tensor positions, Tensor(a!) q, Tensor(b!)? k, int head_size, Tensor cos_sin_cache, "
    "bool is_neox=True, int rope_dim_offset=0, bool inverse=False, int[]? mrope_section=None) -> ()",
    cases=[
        {
            "positions": _POSITIONS,
            "q": Input((5, 4 * 64)),
            "k": Input((5, 2 * 64)),
            "head_size": 64,
            "cos_sin_cache": _TABLE,
        },
        {
            "positions": Input((5,), torch.int32, high=40),  # some of them outside
            "q": Input((5, 3, 46), torch.float16),
            "k": None,
            "head_size": 46,
            "cos_sin_cache": Input((16, 6), torch.float16),
            "is_neox": False,
            "rope_dim_offset": 40,
            "inverse": True,
        },
        {
            "positions": Input((3, 5), torch.int64, high=16),
            "q": Input((5, 4, 32), torch.float32),
            "k": Input((5, 32), torch.float32),
            "head_size": 32,
            "cos_sin_cache": _TABLE,
            "mrope_section": [3, 6, 7],
        },
        {
            "positions": Input((0,), torch.int64),
            "q": Input((0, 4, 64)),
            "k": Input((0, 2, 64)),
            "head_size": 64,
            "cos_sin_cache": _TABLE,
        },
    ],
    bytes=_rope_bytes,
)
def rotary_embedding_(
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    rope_dim_offset: int = 0,
    inverse: bool = False,
    mrope_section: list[int] | None = None,
) -> None:
    """Rotate the heads of q and k, in place, by the angles of each token's position (Su et al., RoFormer, 2021).

    For pair i of a head, with c = cos_sin_cache[position, i] and s = cos_sin_cache[position, rotary_dim / 2 + i]:
    y1 = x1 * c - x2 * s and y2 = x2 * c + x1 * s, in float32, rounded once. is_neox: the pairs are the dimensions
    (i, i + rotary_dim / 2), as in GPT-NeoX and Llama; otherwise (2 i, 2 i + 1), as in GPT-J and the paper; both count
    from rope_dim_offset. The other dimensions of a head keep every bit. inverse: by minus the angle.

    positions: (tokens,) of int32 or int64, with any strides.
    q, k: (tokens, heads * head_size) or (tokens, heads, head_size) of BF16, FP16 or FP32, both of one dtype, with any
    number of heads each; k may be None. Tokens and heads may have any strides, as slices of one packed qkv have, as
    long as no two values of q and k share memory (between q and k this is not checked); the last dimension has stride
    one. Bytes outside of the slices are not written.
    cos_sin_cache: (length, rotary_dim) in float32 or the dtype of q, with a last dimension of stride one, as
    build_cos_sin_cache makes it; rotary_dim, its width, is even, and at most head_size - rope_dim_offset.

    mrope_section: three numbers that add up to rotary_dim / 2, for M-RoPE (Wang et al., Qwen2-VL, 2024): positions is
    (3, tokens), for time, height and width, and of the pairs the first mrope_section[0] take the first position of
    their token, the next mrope_section[1] the second, the rest the third.

    A token whose position is outside of the table, negative or not below length, is left as it is; with mrope_section
    it is the pairs whose position is.
    """
    name = "rotary_embedding_"
    check_heads(name, "q", q, head_size, q)
    if k is not None:
        check_heads(name, "k", k, head_size, q)
    check_rotation(name, positions, cos_sin_cache, q, head_size, rope_dim_offset, mrope_section)
    for x in (q, k):
        if x is not None:
            heads = heads_of(x, head_size)
            heads.copy_(rotate(heads, positions, cos_sin_cache, is_neox, rope_dim_offset, inverse, mrope_section))


@op(
    "qk_norm_rope_(Tensor positions, Tensor(a!) q, Tensor(b!)? k, int head_size, Tensor? q_weight, Tensor? k_weight, "
    "Tensor cos_sin_cache, float eps=1e-6, float weight_offset=0.0, bool is_neox=True, int rope_dim_offset=0, "
    "int[]? mrope_section=None) -> ()",
    cases=[
        {
            "positions": _POSITIONS,
            "q": Input((5, 4 * 64)),
            "k": Input((5, 2 * 64)),
            "head_size": 64,
            "q_weight": Input((64,)),
            "k_weight": Input((64,), torch.float32),
            "cos_sin_cache": _TABLE,
        },
        {
            "positions": Input((3, 5), torch.int32, high=40),
            "q": Input((5, 3, 96), torch.float16),
            "k": None,
            "head_size": 96,
            "q_weight": None,
            "k_weight": None,
            "cos_sin_cache": Input((16, 72), torch.float16),
            "eps": 1e-5,
            "weight_offset": 1.0,
            "is_neox": False,
            "rope_dim_offset": 24,
            "mrope_section": [11, 12, 13],
        },
        {
            "positions": Input((0,), torch.int64),
            "q": Input((0, 4 * 64)),
            "k": Input((0, 64)),
            "head_size": 64,
            "q_weight": Input((64,)),
            "k_weight": Input((64,)),
            "cos_sin_cache": _TABLE,
        },
    ],
    bytes=lambda positions, q, k, q_weight, k_weight, cos_sin_cache, **others: (
        _rope_bytes(positions, q, k, cos_sin_cache.shape[1], cos_sin_cache) + nbytes(q_weight, k_weight)
    ),
)
def qk_norm_rope_(
    positions: Tensor,
    q: Tensor,
    k: Tensor | None,
    head_size: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin_cache: Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    is_neox: bool = True,
    rope_dim_offset: int = 0,
    mrope_section: list[int] | None = None,
) -> None:
    """RMSNorm of every head of q and k, then RoPE, in place: bit for bit rms_norm and rotary_embedding_ one by one.

    The norm is over the head_size values of a head, in float32, rounded to the dtype of q before the rotation.
    q_weight, k_weight: (head_size,) in float32 or the dtype of q; None is a weight of one, to which weight_offset (1
    for Gemma) is not added. The others are as in rotary_embedding_. A token whose position is outside of the table is
    normed and not rotated.
    """
    name = "qk_norm_rope_"
    check_heads(name, "q", q, head_size, q)
    if k is not None:
        check_heads(name, "k", k, head_size, q)
    check_norm_weight(name, "q_weight", q_weight, q, head_size)
    check_norm_weight(name, "k_weight", k_weight, q, head_size)
    check_rotation(name, positions, cos_sin_cache, q, head_size, rope_dim_offset, mrope_section)
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is not None:
            heads = heads_of(x, head_size)
            normed = rms_norm(heads, weight, eps, weight_offset)
            heads.copy_(rotate(normed, positions, cos_sin_cache, is_neox, rope_dim_offset, False, mrope_section))
