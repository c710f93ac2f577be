"""The ops on rows beside their peers: what tools/bench.py measures as `rows`.

vLLM's ops write into results that are there already; torch.compile has each op as one plain function and makes code
for every number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cutegemm
from cutegemm import roofline, testing
from cutegemm.tools import timed
from cutegemm.tools.timed import Calls, Row

NAME = "rows"
TITLE = "Norm, activation and quantization"
HIDDEN, FF = 4096, 14336  # Llama-3-8B
EPS = 1e-6
F8 = torch.float8_e4m3fn
CHAIN = "add, norm, scaled_mm, silu_and_mul, scaled_mm"


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # (tokens, width)
    residual: Tensor
    weight: Tensor
    scale: Tensor  # of one element, static

    def copy(self) -> Inputs:
        return Inputs(self.x.clone(), self.residual.clone(), self.weight, self.scale)


@dataclass(frozen=True)
class Results:
    """Where vLLM's ops write."""

    out: Tensor
    q: Tensor
    scale: Tensor  # (tokens, 1)
    groups: Tensor  # (tokens, width / 128)
    one: Tensor


@dataclass(frozen=True)
class RowOp:
    """One op in one mode. ours, plain and vllm make or write the same; most: µs at 8192 tokens, at most."""

    op: str
    mode: str
    width: int  # of a row of the result
    most: float
    ours: Callable[[Inputs], object]
    plain: Callable[..., object]  # of x, residual, weight, scale; torch.compile's
    vllm: Callable[[Inputs, Results], object]
    gated: bool = False
    bytes_each: int = 0  # that are moved for an element of the result

    @property
    def bars(self) -> Mapping[int, float]:
        return {8192: self.most}

    def nbytes(self, tokens: int) -> int:
        return self.bytes_each * tokens * self.width

    def calls(self, tokens: int, peers: Collection[str], device: str = "cuda") -> tuple[dict[str, Calls], float]:
        return calls(self, tokens, peers, device)


# In plain torch


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def _by(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(F8)


def _token(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-10) / 448
    return _by(x, scale), scale


def _group(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.unflatten(-1, (-1, 128))
    q, scale = _token(groups)
    return q.flatten(-2), scale.squeeze(-1)


def _silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)


def _add_in_place(x: Tensor, residual: Tensor) -> Tensor:
    residual.copy_((x.float() + residual.float()).to(x.dtype))
    return residual


def _add_norm_in_place(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    x.copy_(_norm(_add_in_place(x, residual), weight))


def _tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().float().clamp_min(1e-10) / 448
    return _by(x, scale), scale


def _vllm(name: str) -> Callable[..., object]:
    return lambda *arguments: getattr(torch.ops._C, name)(*arguments)


def _vllm_group(i: Inputs, r: Results) -> object:
    return _vllm("per_token_group_fp8_quant")(i.x, r.q, r.groups, 128, 1e-10, -448.0, 448.0, False, False, False)


OPS = (
    RowOp(
        "rms_norm", "", HIDDEN, 34,
        lambda i: cutegemm.rms_norm(i.x, i.weight, EPS),
        lambda x, residual, weight, scale: _norm(x, weight),
        lambda i, r: _vllm("rms_norm")(r.out, i.x, i.weight, EPS),
        bytes_each=4,
    ),
    RowOp(
        "fused_add_rms_norm_", "", HIDDEN, 66,
        lambda i: cutegemm.fused_add_rms_norm_(i.x, i.residual, i.weight, EPS),
        lambda x, residual, weight, scale: _add_norm_in_place(x, residual, weight),
        lambda i, r: _vllm("fused_add_rms_norm")(i.x, i.residual, i.weight, EPS),
        bytes_each=8,
    ),
    RowOp(
        "rms_norm_quant", "FP8 per token", HIDDEN, 28,
        lambda i: cutegemm.rms_norm_quant(i.x, i.weight, EPS),
        lambda x, residual, weight, scale: _token(_norm(x, weight)),
        lambda i, r: _vllm("rms_norm_dynamic_per_token_quant")(r.q, i.x, i.weight, r.scale, EPS, None, None),
        bytes_each=3,
    ),
    RowOp(
        "rms_norm_quant", "FP8 per group of 128", HIDDEN, 29,
        lambda i: cutegemm.rms_norm_quant(i.x, i.weight, EPS, granularity="group"),
        lambda x, residual, weight, scale: _group(_norm(x, weight)),
        lambda i, r: _vllm("rms_norm_per_block_quant")(r.q, i.x, i.weight, r.groups, EPS, None, None, 128, False),
        bytes_each=3,
    ),
    RowOp(
        "fused_add_rms_norm_quant_", "FP8 per token", HIDDEN, 63,
        lambda i: cutegemm.fused_add_rms_norm_quant_(i.x, i.residual, i.weight, EPS),
        lambda x, residual, weight, scale: _token(_norm(_add_in_place(x, residual), weight)),
        lambda i, r: _vllm("rms_norm_dynamic_per_token_quant")(r.q, i.x, i.weight, r.scale, EPS, None, i.residual),
        bytes_each=7,
    ),
    *(
        RowOp(
            "quantize_fp8", "per token", width, most,
            lambda i: cutegemm.quantize_fp8(i.x, granularity="token"),
            lambda x, residual, weight, scale: _token(x),
            lambda i, r: _vllm("dynamic_per_token_scaled_fp8_quant")(r.q, i.x, r.scale, None),
            bytes_each=3,
        )
        for width, most in ((HIDDEN, 28), (FF, 92))
    ),
    RowOp(
        "quantize_fp8", "per group of 128", HIDDEN, 29,
        lambda i: cutegemm.quantize_fp8(i.x, granularity="group"),
        lambda x, residual, weight, scale: _group(x),
        _vllm_group,
        bytes_each=3,
    ),
    RowOp(
        "quantize_fp8", "per tensor", HIDDEN, 48,
        lambda i: cutegemm.quantize_fp8(i.x),
        lambda x, residual, weight, scale: _tensor(x),
        lambda i, r: _vllm("dynamic_scaled_fp8_quant")(r.q, i.x, r.one),
        bytes_each=3,
    ),
    RowOp(
        "silu_and_mul", "", FF, 166,
        lambda i: cutegemm.silu_and_mul(i.x),
        lambda x, residual, weight, scale: _silu(x),
        lambda i, r: _vllm("silu_and_mul")(r.out, i.x),
        gated=True, bytes_each=6,
    ),
    RowOp(
        "silu_and_mul, quantized", "FP8, static", FF, 155,
        lambda i: cutegemm.activation_quant(i.x, scale=i.scale, granularity="tensor"),
        lambda x, residual, weight, scale: (_by(_silu(x), scale), scale),
        lambda i, r: _vllm("silu_and_mul_quant")(r.q, i.x, i.scale),
        gated=True, bytes_each=5,
    ),
    RowOp(
        "silu_and_mul, quantized", "FP8 per token", FF, 165,
        lambda i: cutegemm.activation_quant(i.x),
        lambda x, residual, weight, scale: _token(_silu(x)),
        lambda i, r: (
            _vllm("silu_and_mul")(r.out, i.x),
            _vllm("dynamic_per_token_scaled_fp8_quant")(r.q, r.out, r.scale, None),
        ),
        gated=True, bytes_each=5,
    ),
    RowOp(
        "silu_and_mul, quantized", "FP8 per group of 128", FF, 160,
        lambda i: cutegemm.activation_quant(i.x, granularity="group"),
        lambda x, residual, weight, scale: _group(_silu(x)),
        lambda i, r: _vllm("silu_and_mul_per_block_quant")(r.q, i.x, r.groups, 128, None, False),
        gated=True, bytes_each=5,
    ),
)  # fmt: skip


def _value(result: object, i: Inputs) -> Tensor:
    """What a result stands for, in float32."""
    if isinstance(result, Tensor):
        return result.float()
    if result is None:
        return i.x.float()
    q, scale = result[0], result[1]  # type: ignore[index]
    return cutegemm.dequantize_fp8(q, scale)


def error(row_op: RowOp, i: Inputs) -> float:
    """Relative error, in norm, of a call on a copy of 16 rows against the plain function's float32."""
    few = Inputs(i.x[:16].clone(), i.residual[:16].clone(), i.weight, i.scale)
    other = few.copy()
    got = _value(row_op.ours(few), few)
    want = _value(row_op.plain(other.x, other.residual, other.weight, other.scale), other)
    return testing.relative_error(got, want)


def calls(row_op: RowOp, tokens: int, peers: Collection[str], device: str = "cuda") -> tuple[dict[str, Calls], float]:
    """For each candidate ("" is ours) one call for each input set, and our error."""
    width = row_op.width * (2 if row_op.gated else 1)
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    first = Inputs(normal(tokens, width), normal(tokens, width), normal(width), torch.tensor([0.03], device=device))
    fault = error(row_op, first)
    count = max(2, testing.input_sets(row_op.nbytes(tokens), device))
    sets = [first, *(first.copy() for _ in range(1, count))]

    def results() -> Results:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        return Results(
            empty(tokens, row_op.width, dtype=torch.bfloat16), empty(tokens, row_op.width, dtype=F8),
            empty(tokens, 1), empty(tokens, row_op.width // 128), empty(1),
        )  # fmt: skip

    found: dict[str, Calls] = {"": [lambda i=i: row_op.ours(i) for i in sets]}  # type: ignore[misc]
    if "compile" in peers:
        torch._dynamo.reset()
        compiled = torch.compile(row_op.plain, dynamic=False, fullgraph=True)
        found["compile"] = [lambda i=i: compiled(i.x, i.residual, i.weight, i.scale) for i in sets]  # type: ignore[misc]
    if "vllm" in peers:
        to = [results() for _ in range(2)]
        found["vllm"] = [lambda i=i, r=to[n % 2]: row_op.vllm(i, r) for n, i in enumerate(sets)]  # type: ignore[misc]
    return found, fault


def run(
    times: timed.Times,
    tokens: Sequence[int] = timed.TOKENS,
    without: Collection[str] = (),
    rounds: int = 20,
    check_only: bool = False,
) -> tuple[list[Row], list[str]]:
    """As timed.run of OPS, and then chain."""
    rows, refused = timed.run(OPS, times, tokens, without, rounds, check_only)
    return [*rows, *([] if check_only else chain(times, rounds=rounds))], refused


def chain(times: timed.Times, tokens: Sequence[int] = (1, 16, 64), rounds: int = 20) -> list[Row]:
    """A feed-forward layer in FP8, four launches, with and without programmatic dependent launch."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    rows = []
    weight = normal(HIDDEN)
    sets = [
        [
            cutegemm.quantize_fp8(normal(n, k) / k**0.5, granularity="channel")
            for n, k in ((2 * FF, HIDDEN), (HIDDEN, FF))
        ]
        for _ in range(2)
    ]
    for t in tokens:
        x, residual = normal(t, HIDDEN), normal(t, HIDDEN)

        def layer(chained: bool, i: int, x: Tensor = x, residual: Tensor = residual) -> Tensor:
            (up, up_scale), (down, down_scale) = sets[i]
            cutegemm.chain_launches(chained)
            q, scale = cutegemm.fused_add_rms_norm_quant_(x, residual, weight, EPS)
            q, scale = cutegemm.activation_quant(cutegemm.scaled_mm(q, up.t(), scale, up_scale))
            out = cutegemm.scaled_mm(q, down.t(), scale, down_scale)
            cutegemm.chain_launches(True)
            return out

        measured = times(
            {
                "": [lambda i=i: layer(True, i) for i in range(2)],  # type: ignore[misc]
                "unchained": [lambda i=i: layer(False, i) for i in range(2)],  # type: ignore[misc]
            },
            rounds,
        )
        nbytes = 3 * HIDDEN * FF
        row: Row = {"op": CHAIN, "mode": "FP8", "shape": {"tokens": t, "width": HIDDEN}, "bytes": nbytes}
        row |= {"floor_us": round(roofline.floor_us(nbytes), 2), "us": round(measured.pop(""), 2)}
        rows.append(row | {"peers": {name: round(value, 2) for name, value in measured.items()}})
        print(timed.line(rows[-1]), flush=True)
    return rows


def single(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["op"] != CHAIN]


def judge(rows: Sequence[Row]) -> list[str]:
    return timed.judge(NAME, OPS, single(rows))


def markdown(meta: Mapping[str, Any], rows: Sequence[Row]) -> str:
    layers = "; ".join(
        f"T = {row['shape']['tokens']}: {row['us']:.1f} and {row['peers']['unchained']:.1f} µs"
        for row in rows
        if row["op"] == CHAIN
    )
    note = (
        "A feed-forward layer in FP8 of four launches (add and norm, `scaled_mm`, SiLU, `scaled_mm`), with and "
        f"without programmatic dependent launch: {layers}."
    )
    return timed.markdown(TITLE, meta, single(rows), note)
