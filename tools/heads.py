"""The ops on heads beside their peers: what tools/bench.py measures as `rope_kv`.

A batch is some sequences of equal lengths, 64 of them for 64 tokens and more, whose tokens lie in blocks of 16 of a
paged cache. q, k and v are slices of one packed tensor, as a model's projection makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

import cutegemm
from cutegemm import testing
from cutegemm.tools import timed
from cutegemm.tools.timed import Calls, Row

NAME = "rope_kv"
TITLE = "RoPE, QK-norm and the paged KV cache"
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16  # Llama-3-8B
Q, KV = HEADS * SIZE, KV_HEADS * SIZE
LENGTH = 8192
EPS = 1e-6
F8 = torch.float8_e4m3fn
FUSED = "qk_norm_rope_and_cache_"


class Inputs(NamedTuple):
    qkv: Tensor  # (tokens, Q + 2 KV)
    positions: Tensor
    table: Tensor  # in BF16, as vLLM wants it
    q_weight: Tensor
    k_weight: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    scale: Tensor  # of one element

    def copy(self) -> Inputs:
        again = [x.clone() for x in (self.qkv, self.k_cache, self.v_cache)]
        return self._replace(qkv=again[0], k_cache=again[1], v_cache=again[2])

    def first(self, tokens: int) -> Inputs:
        few = {name: getattr(self, name)[:tokens] for name in ("qkv", "positions", "slots")}
        return self._replace(**few).copy()

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.split((Q, KV, KV), -1)
        return q, k, v

    def heads(self) -> tuple[Tensor, Tensor]:
        return tuple(x.unflatten(-1, (KV_HEADS, SIZE)) for x in self.packed()[1:])  # type: ignore[return-value]


@dataclass(frozen=True)
class HeadOp:
    """One op in one mode. ours, plain and vllm write the same."""

    op: str
    mode: str
    width: int
    bars: Mapping[int, float]
    ours: Callable[[Inputs], object]
    plain: Callable[[Inputs], object]  # torch.compile's
    vllm: Callable[[Inputs], object] | None
    token_bytes: int
    layout: str = "NHD"
    cache: torch.dtype = torch.bfloat16

    def nbytes(self, tokens: int) -> int:
        return self.token_bytes * tokens

    def inputs(self, tokens: int, device: str = "cuda", seed: int = 0) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

        def random(most: int, count: int) -> Tensor:
            return torch.randint(most, (count,), generator=generator, device=device)

        sequences = math.gcd(tokens, 64)
        each = tokens // sequences
        of_sequence = -(-each // BLOCK)
        blocks = torch.randperm(2 * sequences * of_sequence, generator=generator, device=device)
        start = random((LENGTH - each) // BLOCK, sequences) * BLOCK
        at = torch.arange(each, device=device) + (0 if each > 1 else random(BLOCK, sequences)[:, None])
        table = blocks[: sequences * of_sequence].view(sequences, of_sequence)
        slots = table.gather(1, at.expand(sequences, -1) // BLOCK) * BLOCK + at % BLOCK
        return Inputs(
            normal(tokens, Q + 2 * KV),
            (start[:, None] + at).flatten(),
            _table(device),
            normal(SIZE),
            normal(SIZE),
            *_caches(self.layout, len(blocks), self.cache, device),
            slots.flatten(),
            torch.tensor([0.03], device=device),
        )

    def calls(self, tokens: int, peers: Collection[str], device: str = "cuda") -> tuple[dict[str, Calls], float]:
        """For each candidate ("" is ours) one call for each input set, and our error."""
        first = self.inputs(tokens, device)
        fault = error(self, first)
        count = max(2, testing.input_sets(self.nbytes(tokens), device))
        sets = [first, *(self.inputs(tokens, device, seed) for seed in range(1, count))]
        found: dict[str, Calls] = {"": [lambda i=i: self.ours(i) for i in sets]}  # type: ignore[misc]
        if "compile" in peers:
            torch._dynamo.reset()
            compiled = torch.compile(lambda *i: self.plain(Inputs(*i)), dynamic=False, fullgraph=True)
            found["compile"] = [lambda i=i: compiled(*i) for i in sets]  # type: ignore[misc]
        if "vllm" in peers and self.vllm:
            found["vllm"] = [lambda i=i: self.vllm(i) for i in sets]  # type: ignore[misc]
        return found, fault


@cache
def _table(device: str) -> Tensor:
    return cutegemm.build_cos_sin_cache(SIZE, LENGTH, 500000.0, dtype=torch.bfloat16, device=device)


def _caches(layout: str, blocks: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    shapes = 2 * [(blocks, BLOCK, KV_HEADS, SIZE)]
    if layout == "v1":
        x = 16 // dtype.itemsize
        shapes = [(blocks, KV_HEADS, SIZE // x, BLOCK, x), (blocks, KV_HEADS, SIZE, BLOCK)]  # type: ignore[list-item]
    k, v = (torch.zeros(shape, device=device, dtype=torch.uint8 if dtype == F8 else dtype) for shape in shapes)
    return k.view(dtype), v.view(dtype)


# In plain torch


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def _turned(x: Tensor, i: Inputs, neox: bool = True, weight: Tensor | None = None) -> Tensor:
    heads = x.unflatten(-1, (-1, SIZE))
    values = (heads if weight is None else _norm(heads, weight)).float()
    cos, sin = i.table[i.positions].float()[:, None].chunk(2, -1)
    a, b = values.chunk(2, -1) if neox else (values[..., ::2], values[..., 1::2])
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat(pairs, -1) if neox else torch.stack(pairs, -1).flatten(-2)
    return turned.to(x.dtype)


def _rope(i: Inputs, neox: bool = True, norm: bool = False) -> None:
    q, k, _ = i.packed()
    for x, weight in ((q, i.q_weight), (k, i.k_weight)):
        x.copy_(_turned(x, i, neox, weight if norm else None).flatten(1))


def _write(i: Inputs, k: Tensor, v: Tensor, layout: str = "NHD") -> None:
    block, at = i.slots // BLOCK, i.slots % BLOCK
    if i.k_cache.dtype == F8:
        k, v = ((x.float() / i.scale).clamp(-448, 448).to(F8).view(torch.uint8) for x in (k, v))
    k_cache, v_cache = (x.view(torch.uint8) if x.dtype == F8 else x for x in (i.k_cache, i.v_cache))
    if layout == "NHD":
        k_cache[block, at], v_cache[block, at] = k, v
    else:
        k_cache[block, :, :, at] = k.unflatten(-1, (-1, k_cache.shape[-1]))
        v_cache[block, :, :, at] = v


def _fused(i: Inputs) -> None:
    q, k, _ = i.packed()
    q.copy_(_turned(q, i, True, i.q_weight).flatten(1))
    _write(i, _turned(k, i, True, i.k_weight), i.heads()[1])


# vLLM's


def _vllm_rope(i: Inputs, neox: bool) -> None:
    q, k, _ = i.packed()
    torch.ops._C.rotary_embedding(i.positions, q, k, SIZE, i.table, neox)


def _vllm_qk_norm_rope(i: Inputs) -> None:
    torch.ops._C.fused_qk_norm_rope(
        i.qkv, HEADS, KV_HEADS, KV_HEADS, SIZE, EPS, i.q_weight, i.k_weight, i.table, True, i.positions
    )


def _vllm_write(i: Inputs, op: str = "reshape_and_cache_flash") -> None:
    fp8 = i.k_cache.dtype == F8
    k_cache, v_cache = (x.view(torch.uint8) if fp8 else x for x in (i.k_cache, i.v_cache))
    getattr(torch.ops._C_cache_ops, op)(
        *i.heads(), k_cache, v_cache, i.slots, "fp8" if fp8 else "auto", i.scale, i.scale
    )


def _vllm_fused(i: Inputs) -> None:
    _vllm_qk_norm_rope(i)
    _vllm_write(i)


# The ops

_ANGLES = 2 * SIZE + 8  # the table's row and the position
_SLOT = 8


def _rotary(neox: bool) -> HeadOp:
    def ours(i: Inputs) -> None:
        q, k, _ = i.packed()
        cutegemm.rotary_embedding_(i.positions, q, k, SIZE, i.table, neox)

    return HeadOp(
        "rotary_embedding_", "NEOX" if neox else "GPT-J", Q + KV, {1: 3.5, 64: 3.5, 8192: 44},
        ours, lambda i: _rope(i, neox), lambda i: _vllm_rope(i, neox), 4 * (Q + KV) + _ANGLES,
    )  # fmt: skip


def _ours_norm(i: Inputs) -> None:
    q, k, _ = i.packed()
    cutegemm.qk_norm_rope_(i.positions, q, k, SIZE, i.q_weight, i.k_weight, i.table, EPS)


def _cached(layout: str, most: float, fp8: bool = False) -> HeadOp:
    def ours(i: Inputs) -> None:
        scale = i.scale if fp8 else None
        cutegemm.reshape_and_cache_(*i.heads(), i.k_cache, i.v_cache, i.slots, layout, scale, scale)

    dtype = F8 if fp8 else torch.bfloat16
    vllm = "reshape_and_cache" if layout == "v1" else "reshape_and_cache_flash"
    return HeadOp(
        "reshape_and_cache_", layout + (", FP8" if fp8 else ""), 2 * KV, {1: 3.5, 64: 3.5, 8192: most},
        ours, lambda i: _write(i, *i.heads(), layout), lambda i: _vllm_write(i, vllm),
        2 * KV * (2 + dtype.itemsize) + _SLOT, layout, dtype,
    )  # fmt: skip


def _ours_fused(i: Inputs) -> None:
    cutegemm.qk_norm_rope_and_cache_(
        i.positions, *i.packed(), SIZE, i.table, i.k_cache, i.v_cache, i.slots, i.q_weight, i.k_weight, EPS,
        norm=True, k_scale=i.scale, v_scale=i.scale,
    )  # fmt: skip


OPS = (
    _rotary(True),
    _rotary(False),
    HeadOp(
        "qk_norm_rope_", "", Q + KV, {1: 3.5, 64: 3.5, 8192: 48},
        _ours_norm, lambda i: _rope(i, norm=True), _vllm_qk_norm_rope, 4 * (Q + KV) + _ANGLES,
    ),
    _cached("NHD", 21),
    _cached("v1", 32),
    _cached("NHD", 18, fp8=True),
    HeadOp(
        FUSED, "FP8", Q + 2 * KV, {8192: 55},
        _ours_fused, _fused, _vllm_fused, 4 * Q + 2 * KV * 3 + _ANGLES + _SLOT, cache=F8,
    ),
)  # fmt: skip


def _state(i: Inputs) -> Tensor:
    """All that an op may write, as the float32 that it stands for."""
    caches = (x.float() * (i.scale if x.dtype == F8 else 1) for x in (i.k_cache, i.v_cache))
    return torch.cat([x.flatten() for x in (i.qkv.float(), *caches)])


def error(head_op: HeadOp, i: Inputs) -> float:
    """Relative error, in norm, of a call on a copy of 16 tokens against the plain function's."""
    few, other = i.first(16), i.first(16)
    head_op.ours(few)
    head_op.plain(other)
    return testing.relative_error(_state(few), _state(other))


def judge(rows: Sequence[Row]) -> list[str]:
    """timed.judge of OPS, and the one launch beside a single op, for a few tokens."""
    lines = timed.judge(NAME, OPS, rows)
    at = {(row["op"], row["shape"]["tokens"]): row for row in rows}
    for tokens in (1, 64):
        fused, single = at.get((FUSED, tokens)), at.get(("qk_norm_rope_", tokens))
        if fused and single:
            ratio = fused["us"] / single["us"]
            word = "pass" if ratio <= 1.2 else "MISS"
            lines.append(f"{word}  {NAME}: {FUSED} at {tokens} tokens: {ratio:.2f} times qk_norm_rope_, <= 1.2")
    return lines


run = partial(timed.run, OPS)
markdown = partial(timed.markdown, TITLE)
