"""Times the ops beside their peers, and keeps the results.

    python tools/bench.py                                   all families, into benchmarks/<gpu>/<family>.json
    python tools/bench.py gemm_fp8 --m 1,16 --nk 6144x4096  some rows, printed; kept only where --out says
    python tools/bench.py --peers DIR                       also vLLM's compiled ops, in DIR or DIR/vllm
    python tools/bench.py --check                           compare results with float32, time nothing
    python tools/bench.py gemm_w4a16_sm80                   what the kernels for compute capability 8 reach on this GPU
    python tools/bench.py --tables                          rewrite README.md's tables from what is committed

What is compared is replayed in turns, in one run, from CUDA graphs over inputs that exceed L2
(cutegemm/testing.py). A kernel whose result is wrong is not timed. benchmarks/README.md explains the results.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cutegemm
from cutegemm import plan, roofline, testing
from cutegemm.tools import heads as head_ops
from cutegemm.tools import rows as row_ops
from cutegemm.tools import timed, weights

ROOT = Path(__file__).resolve().parent.parent
MARKS = "<!-- measured:begin -->", "<!-- measured:end -->"

Row = dict[str, Any]

KN = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (7168, 2112), (7168, 18432), (18432, 7168))
M = (1, 16, 64, 256, 1024, 4096, 8192)
# With scales for blocks: DeepSeek-V3's weights as well, and more numbers of tokens.
BLOCK_KN = (
    *KN[:5],
    (1536, 24576),
    (7168, 4096),
    (2048, 7168),
    *KN[5:],
    (7168, 576),
)
BLOCK_M = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Of gate_up, n for both: Llama-3-8B, DeepSeek-V3's experts and its dense layers, Qwen-14B.
GATED_KN = ((4096, 28672), (7168, 4096), (7168, 36864), (5120, 27648))
GATED_M = (64, 256, 1024, 2048, 4096, 8192)
# Of weights of few bits: Llama-3-8B and 70B, and one of DeepSeek-V3, whose n is no multiple of 128.
WEIGHT_KN = (*KN[:4], (8192, 10240), (8192, 57344), (28672, 8192), (7168, 2112))
WEIGHT_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
WEIGHT8_KN = ((4096, 6144), (4096, 28672), (14336, 4096), (7168, 2112))
HOST = 1024  # n and k of the row with host times, at M = 1

# Rounding to BF16 alone gives 1.7e-3, and FP8's fast accumulation up to 3e-3. A wrong kernel is far above.
MAX_ERROR = 1e-2
LARGE = 50_000_000  # elements of a weight, for bars

# Peers by what --peers finds.
PEERS = {"vllm": ("vllm", "machete", "marlin"), "deep_gemm": ("deep_gemm",)}


class Operands(NamedTuple):
    """Inputs of one call, with the scales in every shape that a candidate takes: no call makes a view."""

    a: Tensor  # (m, k)
    b: Tensor  # (k, n), a weight's transposed view
    scale_a: Tensor  # (m, 1); for blocks (m, k / 128), the scales of neighbouring rows side by side
    scale_b: Tensor  # (1, n); for blocks (n / 128, k / 128)
    scale_w: Tensor  # scale_b as (n, 1); for blocks its transposed view
    one_a: Tensor  # (1,), and one_b: the scales of tensor-wise candidates, which read the same a and b
    one_b: Tensor

    def rows(self, m: int) -> Operands:
        return self._replace(a=self.a[:m], scale_a=self.scale_a[:m])

    def copy(self) -> Operands:
        return self._replace(a=self.a.clone(), b=self.b.t().clone().t())


def as_it_is(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Candidate:
    """Its inputs are Operands or, of weights of few bits, weights.Inputs. What it wants otherwise is not timed."""

    title: str
    call: Callable[..., Any]  # with inputs and the tensor to write, or None to make one; ours also with kernel=
    tensor_wise: bool = False  # takes one_a and one_b
    eager: bool = True  # can make its result, so that a host time can be told
    prepare: Callable[[Any], Any] = as_it_is  # of inputs that are cut to m
    pack: Callable[[Any], Any] = as_it_is  # of inputs with the weight of ours, once for all m


@dataclass(frozen=True)
class Family:
    name: str
    title: str
    op: str
    mode: str
    dtype: torch.dtype
    ours: Candidate
    peers: dict[str, Candidate]  # the first is the one that README.md compares with
    blocks: bool = False  # scales for 128 k, and 128 columns of b
    gated: bool = False  # codes and scales are returned, of silu of the first half of the columns times the second
    weight: weights.W4 | weights.W8 | None = None  # what it has in place of dtype, which is then a's
    hopper: bool = True  # or ours is the best of the kernels for GPUs of compute capability 8
    kn: tuple[tuple[int, int], ...] = KN
    m: tuple[int, ...] = M
    most: float = MAX_ERROR  # of the error


def _scaled_mm(x: Operands, out: Tensor | None, kernel: str | None = None) -> Tensor:
    # Fast accumulation is its default.
    return cutegemm.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, out=out, kernel=kernel)


def _mm(x: Operands, out: Tensor | None, kernel: str | None = None) -> Tensor:
    return cutegemm.mm(x.a, x.b, out=out, kernel=kernel)


def _torch_row(x: Operands, out: Tensor | None) -> object:
    return torch._scaled_mm(x.a, x.b, x.scale_a, x.scale_b, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)


def _torch_tensor(x: Operands, out: Tensor | None) -> object:
    return torch._scaled_mm(x.a, x.b, x.one_a, x.one_b, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)


def _vllm(x: Operands, out: Tensor | None) -> object:
    return torch.ops._C.cutlass_scaled_mm(out, x.a, x.b, x.scale_a, x.scale_w, None)


def _vllm_block(x: Operands, out: Tensor | None) -> object:
    return torch.ops._C.cutlass_scaled_mm(out, x.a, x.b, x.scale_a, x.scale_w, None)


def _for_vllm_block(x: Operands) -> Operands:
    """Tokens by fours: it takes no other number of them."""
    rows = -(-len(x.a) // 4) * 4
    a = torch.zeros(rows, x.a.shape[1], dtype=torch.uint8, device=x.a.device)
    a[: len(x.a)] = x.a.view(torch.uint8)
    scale = torch.ones(x.scale_a.shape[1], rows, device=x.a.device)
    scale[:, : len(x.a)] = x.scale_a.t()
    return x._replace(a=a.view(x.a.dtype), scale_a=scale.t())


def _deep() -> Any:
    return importlib.import_module("deep_gemm")


def _deep_gemm(x: Operands, out: Tensor | None) -> object:
    return _deep().fp8_gemm_nt((x.a, x.scale_a), (x.b.t(), x.scale_b), out)


def _for_deep_gemm(x: Operands) -> Operands:
    return x._replace(scale_a=_deep().get_mn_major_tma_aligned_tensor(x.scale_a.contiguous()))


def _fused(x: Operands, out: Tensor | None, kernel: str | None = None) -> object:
    return cutegemm.scaled_mm_quant(x.a, x.b, x.scale_a, x.scale_b, silu_and_mul=True, kernel=kernel)


def _separate(x: Operands, out: Tensor | None) -> object:
    return cutegemm.activation_quant(_scaled_mm(x, out), granularity="group")


def _deep_gemm_then_ours(x: Operands, out: Tensor | None) -> object:
    assert out is not None
    _deep_gemm(x, out)
    return cutegemm.activation_quant(out, granularity="group")


def _deep_gemm_then_vllm(x: Operands, out: Tensor | None) -> object:
    assert out is not None
    _deep_gemm(x, out)
    m, n = out.shape
    q = torch.empty(m, n // 2, dtype=torch.float8_e4m3fn, device=out.device)
    scale = torch.empty(m, -(-n // 256), device=out.device)
    torch.ops._C.silu_and_mul_per_block_quant(q, out, scale, 128, None, False)
    return q, scale


TORCH_BF16 = Candidate("torch.mm in BF16", weights.torch_mm, pack=weights.for_torch)
MARLIN = Candidate("Marlin", weights.marlin, pack=weights.for_marlin)
W4A16 = Family(
    "gemm_w4a16",
    "W4A16: `w4a16_mm`, BF16, four bits with a scale for each group of 128",
    op="w4a16_mm",
    mode="group 128",
    dtype=torch.bfloat16,
    ours=Candidate("w4a16_mm", weights.w4a16_mm),
    peers={
        "torch_mm": TORCH_BF16,
        "machete": Candidate("Machete", weights.machete, pack=weights.for_machete),
        "marlin": MARLIN,
    },
    weight=weights.W4(128),
    kn=WEIGHT_KN,
    m=WEIGHT_M,
)
W8A16 = Family(
    "gemm_w8a16",
    "W8A16: `w8a16_mm`, BF16, e4m3 with a scale per channel",
    op="w8a16_mm",
    mode="e4m3, channel",
    dtype=torch.bfloat16,
    ours=Candidate("w8a16_mm", weights.w8a16_mm),
    peers={"torch_mm": TORCH_BF16},
    weight=weights.W8(torch.float8_e4m3fn),
    kn=WEIGHT8_KN,
    m=M,
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gemm_fp8",
            "FP8: `scaled_mm`, e4m3, a scale per token and per channel, fast accumulation, BF16 result",
            op="scaled_mm",
            mode="token-channel",
            dtype=torch.float8_e4m3fn,
            ours=Candidate("scaled_mm", _scaled_mm),
            peers={
                "torch_row": Candidate("torch row-wise", _torch_row),
                "torch_tensor": Candidate("torch tensor-wise", _torch_tensor, tensor_wise=True),
                "vllm": Candidate("vLLM", _vllm, eager=False),
            },
        ),
        Family(
            "gemm_int8",
            "INT8: `scaled_mm`, a scale per token and per channel, BF16 result",
            op="scaled_mm",
            mode="int8, token-channel",
            dtype=torch.int8,
            ours=Candidate("scaled_mm", _scaled_mm),
            peers={"vllm": Candidate("vLLM", _vllm, eager=False)},
        ),
        Family(
            "gemm_blockwise",
            "FP8 with scales for blocks: `scaled_mm`, e4m3, a scale for 1 x 128 of a and 128 x 128 of b, BF16 result",
            op="scaled_mm",
            mode="block",
            dtype=torch.float8_e4m3fn,
            ours=Candidate("scaled_mm", _scaled_mm),
            peers={
                "deep_gemm": Candidate("DeepGEMM", _deep_gemm, eager=False, prepare=_for_deep_gemm),
                "vllm": Candidate("vLLM", _vllm_block, eager=False, prepare=_for_vllm_block),
            },
            blocks=True,
            kn=BLOCK_KN,
            m=BLOCK_M,
        ),
        Family(
            "gemm_fused",
            "FP8 gate_up: `scaled_mm_quant` with `silu_and_mul`, scales for blocks, fresh ones for its codes",
            op="scaled_mm_quant",
            mode="block, silu_and_mul",
            dtype=torch.float8_e4m3fn,
            ours=Candidate("scaled_mm_quant", _fused),
            peers={
                "separate": Candidate("scaled_mm + activation_quant", _separate),
                "deep_gemm": Candidate(
                    "DeepGEMM + activation_quant", _deep_gemm_then_ours, eager=False, prepare=_for_deep_gemm
                ),
                "vllm": Candidate("DeepGEMM + vLLM", _deep_gemm_then_vllm, eager=False, prepare=_for_deep_gemm),
            },
            blocks=True,
            gated=True,
            kn=GATED_KN,
            m=GATED_M,
            most=timed.MAX_ERROR,
        ),
        Family(
            "gemm_bf16",
            "BF16: `mm`",
            op="mm",
            mode="bf16",
            dtype=torch.bfloat16,
            ours=Candidate("mm", _mm),
            peers={"torch_mm": Candidate("torch.mm", lambda x, out: torch.mm(x.a, x.b, out=out))},
        ),
        W4A16,
        replace(
            W4A16,
            name="gemm_w4a16_zeros",
            title="W4A16 with zero points: `w4a16_mm`, BF16, four bits with a scale and a zero for each group of 64",
            mode="group 64, zeros",
            peers={"torch_mm": TORCH_BF16},
            weight=weights.W4(64, zeros=True),
        ),
        replace(
            W4A16,
            name="gemm_w4a16_sm80",
            title="W4A16 by the kernels for compute capability 8: `w4a16_mm(kernel=...)`, the best of them",
            peers={"marlin": MARLIN},
            m=WEIGHT_M[:7],
            hopper=False,
        ),
        W8A16,
        replace(
            W8A16,
            name="gemm_w8a16_int8",
            title="W8A16: `w8a16_mm`, BF16, INT8 with a scale per channel",
            mode="int8, channel",
            weight=weights.W8(torch.int8),
        ),
    )
}


@dataclass(frozen=True)
class Bar:
    """What is wanted of the ratio peer time / our time over the rows with first <= m <= last."""

    family: str
    peer: str  # as ratios() has it
    of: str  # "geomean" or "minimum"
    least: float
    first: int = 1
    last: int | None = None
    large: bool | None = None  # only weights that have LARGE elements, or only those that don't

    def __str__(self) -> str:
        if self.last is None:
            tokens = "all M" if self.first == 1 else f"M >= {self.first}"
        elif self.first == self.last:
            tokens = f"M = {self.first}"
        else:
            tokens = f"M <= {self.last}" if self.first == 1 else f"{self.first} <= M <= {self.last}"
        if self.large is not None:
            tokens += f", weights of {'at least' if self.large else 'less than'} {LARGE // 10**6} M"
        return f"{self.of} vs {self.peer}, {tokens}, >= {self.least:.2f}"


MEMORY_BOUND = {module.NAME: module for module in (row_ops, head_ops)}

BARS = (
    Bar("gemm_fp8", "torch_row", "geomean", 1.40, last=64),
    Bar("gemm_fp8", "torch_row", "geomean", 1.15, first=256, last=256),
    Bar("gemm_fp8", "torch_row", "geomean", 1.00, first=1024),
    Bar("gemm_fp8", "torch_row", "minimum", 0.93),
    Bar("gemm_fp8", "vllm", "geomean", 1.12, last=16),
    Bar("gemm_fp8", "vllm", "geomean", 1.00, last=256),
    Bar("gemm_blockwise", "best", "geomean", 1.05),
    Bar("gemm_blockwise", "best", "geomean", 1.15, last=64),
    Bar("gemm_blockwise", "best", "minimum", 0.95),
    Bar("gemm_fused", "best", "minimum", 1.25, first=1024),  # at most 0.8 of the time
    Bar("gemm_bf16", "torch_mm", "geomean", 1.00),
    Bar("gemm_bf16", "torch_mm", "minimum", 0.92),
    Bar("gemm_w4a16", "machete or marlin", "geomean", 1.50, last=64),
    *(
        bar
        for name in ("gemm_w4a16", "gemm_w4a16_zeros")
        for bar in (
            Bar(name, "torch_mm", "geomean", 3.10, last=16, large=True),
            Bar(name, "torch_mm", "geomean", 2.40, last=16, large=False),
            Bar(name, "floor", "minimum", 1 / 1.2, last=16),
            Bar(name, "best", "geomean", 1.10, first=65, last=511),
            Bar(name, "torch_mm", "geomean", 1.00, first=512),
            Bar(name, "torch_mm", "minimum", 0.95, first=512),
        )
    ),
    Bar("gemm_w4a16_sm80", "marlin", "minimum", 1.00),
)


# Inputs and calls


def operand(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (rows, k) in the dtype, and a scale per row, (rows, 1): of one where the dtype is that of x."""
    if dtype == x.dtype:
        return x, torch.ones(len(x), 1, device=x.device)
    quantize = cutegemm.quantize_int8 if dtype == torch.int8 else cutegemm.quantize_fp8
    return quantize(x, granularity="token")


class Shape:
    """The tensors of one family, n and k: made once and cut to each m. The values are normal."""

    def __init__(self, family: Family, n: int, k: int, ms: Sequence[int], device: str = "cuda"):
        self.family, self.n, self.k, self.device = family, n, k, device
        generator = torch.Generator(device).manual_seed(k * 131 + n)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, k, generator=generator, device=device, dtype=torch.bfloat16)

        self.outs = [torch.empty(max(ms) + 3, n, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self._packed: dict[Callable[[Any], Any], list[Any]] = {}
        if family.weight:
            w = family.weight.quantize(normal(n) / k**0.5)
            self.weight, self.weight_bytes = weights.values(w), sum(part.nbytes for part in w)
            self._add_sets(weights.Inputs(normal(max(ms)), w), min(ms))
            return
        if family.blocks:
            a, scale_a = cutegemm.quantize_fp8(normal(max(ms)), granularity="group")
            # So that products are about normal, where silu is not yet 0 or the identity.
            weight, scale_b = cutegemm.quantize_fp8(normal(n) / k**0.5, granularity="block")
            scale_w = scale_b.t()
            self.weight = cutegemm.dequantize_fp8(weight, scale_b)
        else:
            a, scale_a = operand(normal(max(ms)), family.dtype)
            weight, scale_w = operand(normal(n), family.dtype)
            scale_b = scale_w.view(1, n)
            self.weight = weight.float()
        # Each in an allocation of its own: cuBLAS refuses a scale that is not aligned to 16 bytes.
        one_a, one_b = (torch.tensor([scale], device=device) for scale in (0.01, 0.02))
        self._add_sets(Operands(a, weight.t(), scale_a, scale_b, scale_w, one_a, one_b), min(ms))

    def _add_sets(self, x: Operands | weights.Inputs, m: int) -> None:
        self.sets: list[Any] = [x, *(x.copy() for _ in range(1, self.count(m)))]

    def packed(self, candidate: Candidate) -> list[Any]:
        """The input sets with the weight as the candidate takes it."""
        if candidate.pack not in self._packed:
            self._packed[candidate.pack] = [candidate.pack(x) for x in self.sets]
        return self._packed[candidate.pack]

    def bytes(self, m: int) -> int:
        if self.family.weight:
            return roofline.gemm_bytes(m, self.n, self.k, self.family.dtype, weight=self.weight_bytes)
        scales = m + self.n if self.family.op == "scaled_mm" else 0
        if self.family.blocks:
            scales = -(-self.k // 128) * (m + -(-self.n // 128))
        nbytes = roofline.gemm_bytes(m, self.n, self.k, self.family.dtype, scales=scales)
        # In place of n BF16 there are n / 2 codes and a scale for 128 of them.
        return nbytes - m * (2 * self.n - self.n // 2 - 4 * (self.n // 256)) if self.family.gated else nbytes

    def count(self, m: int) -> int:
        return max(2, testing.input_sets(self.bytes(m), self.device))

    def calls(self, candidate: Candidate, m: int) -> list[Callable[[], Any]]:
        """One call for each input set, into two results in turns."""

        def bind(x: Operands, out: Tensor) -> Callable[[], Any]:
            return lambda: candidate.call(x, out)

        # A candidate may add rows; they lie behind those that are looked at.
        prepared = [candidate.prepare(x.rows(m)) for x in self.packed(candidate)[: self.count(m)]]
        return [bind(x, self.outs[i % 2][: len(x.a)]) for i, x in enumerate(prepared)]

    def error(self, candidate: Candidate, m: int) -> float:
        """Relative error of two calls in a row: a kernel may start before the one ahead of it has ended.

        16 rows are compared with the float32 product of the dequantized operands. The others must be finite,
        where they were NaN before.
        """
        x = self.sets[0].rows(m)
        sample = torch.linspace(0, m - 1, min(m, 16), device=self.device).round().long()
        # Few operations take FP8; indexing bytes gives the same rows.
        rows = x.a.view(torch.uint8)[sample].view(x.a.dtype)
        if self.family.weight:
            want = rows.float() @ self.weight.t()
        elif self.family.blocks:
            want = cutegemm.dequantize_fp8(rows, x.scale_a[sample]) @ self.weight.t()
        else:
            want = rows.float() @ self.weight.t()
            want *= x.one_a * x.one_b if candidate.tensor_wise else x.scale_a[sample] * x.scale_b
        outs = [out[:m] for out in self.outs]
        for out in outs:
            out.fill_(math.nan)
        calls = self.calls(candidate, m)[:2]
        if self.family.gated and self.device != "cpu":
            testing.poison(2 * m * self.n)  # codes and scales are NaN before, too; this is room for those of two calls
        results = [call() for call in calls]
        if self.family.gated:
            gate, up = want.chunk(2, 1)
            want = torch.nn.functional.silu(gate) * up
            outs = [cutegemm.dequantize_fp8(*codes) for codes in results]
        else:  # some peers make their result, and leave alone what they were given
            outs = [made[:m] if isinstance(made, Tensor) else out for made, out in zip(results, outs, strict=True)]
        if not all(bool(out.isfinite().all()) for out in outs):
            return math.inf
        return max(testing.relative_error(out[sample], want) for out in outs)


class WrongResult(RuntimeError):
    pass


def refuse_wrong(shape: Shape, candidate: Candidate, m: int) -> float:
    """The candidate's error; WrongResult where it is too large."""
    error = shape.error(candidate, m)
    most = shape.family.most
    if not error <= most:
        raise WrongResult(f"{candidate.title}: relative error is {error:.3g}; it must be at most {most:g}")
    return error


def problem(family: Family, n: int, k: int) -> plan.Problem:
    operand, width = plan.DTYPES[family.dtype], family.dtype.itemsize
    of_weight = {"b": operand, "scales": "block" if family.blocks else ""}
    if family.weight:
        of_weight = family.weight.problem(k)
    return plan.Problem(
        op=next(product for product in plan.PRODUCTS if family.op.startswith(product)),
        a=operand,
        d="e4m3" if family.gated else "bf16",
        n=n,
        k=k,
        fast_accum=family.dtype == torch.float8_e4m3fn and not family.blocks,
        gated=family.gated,
        aligned=k * width % 16 == 0,
        aligned_out=n * 2 % 16 == 0,
        hopper=family.hopper,
        **of_weight,
    )


def forced(family: Family, kernel: str) -> Candidate:
    """Ours with a kernel by its name."""
    return replace(family.ours, title=kernel, call=partial(family.ours.call, kernel=kernel))


def contenders(family: Family, n: int, k: int, m: int) -> dict[str, Candidate]:
    """By kernel, what may be timed as ours: what the plan chooses or, not for Hopper, each that is worth trying."""
    of = problem(family, n, k)
    if family.hopper:
        return {str(plan.choose(of, m, torch.cuda.get_device_name())): family.ours}
    return {str(choice): forced(family, str(choice)) for choice in plan.candidates(of, m)}


# Measuring


def times(candidates: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Median us a call. Half of the rounds run in opposite order, since a hot kernel slows the next one."""
    half = math.ceil(rounds / 2)
    samples = testing.interleaved_samples(candidates, rounds=half)
    back = testing.interleaved_samples(dict(reversed(candidates.items())), rounds=half)
    return {name: statistics.median(samples[name] + back[name]) for name in candidates}


def measure(shape: Shape, m: int, peers: dict[str, Candidate], rounds: int, check_only: bool = False) -> Row:
    """One row. Raises where our kernel fails or is wrong; a peer that does is left out, and said so."""
    family, n, k = shape.family, shape.n, shape.k
    ours = contenders(family, n, k, m)
    error = max(refuse_wrong(shape, candidate, m) for candidate in ours.values())
    flops = roofline.gemm_flops(m, n, k)
    row: Row = {"op": family.op, "mode": family.mode, "m": m, "n": n, "k": k}
    row["kernel"] = next(iter(ours))
    row["floor_us"] = round(roofline.floor_us(shape.bytes(m), flops, family.dtype), 2)
    row["err"] = float(f"{error:.2e}")
    if check_only:
        return row

    if len(ours) > 1:
        calls = {name: shape.calls(candidate, m) for name, candidate in ours.items()}
        glanced = testing.time_interleaved(calls, rounds=5, replay_ms=0.5)
        row["kernel"] = min(glanced, key=glanced.__getitem__)
    candidates = {"": shape.calls(ours[row["kernel"]], m)}
    for name, peer in peers.items():
        try:
            refuse_wrong(shape, peer, m)
        except Exception as fault:  # a peer's kernels raise what they like
            print(f"  left out at m={m} n={n} k={k}: {name}: {first_line(fault)}", flush=True)
        else:
            candidates[name] = shape.calls(peer, m)
    measured = times(candidates, rounds)
    us = measured.pop("")
    row["us"] = round(us, 2)
    row["tflops"] = round(flops / us / 1e6, 1)
    row["peers"] = {name: round(t, 2) for name, t in measured.items()}
    return row


def measure_host(row: Row, shape: Shape, peers: dict[str, Candidate]) -> None:
    """Adds the host's share of an eager call, result allocated: `eager_us` and `peers_eager_us`."""

    def host(candidate: Candidate) -> float:
        x = shape.packed(candidate)[0].rows(row["m"])
        return round(testing.host_time(lambda: candidate.call(x, None)), 2)

    row["eager_us"] = host(shape.family.ours)
    row["peers_eager_us"] = {name: host(peers[name]) for name in row["peers"] if peers[name].eager}


def run(
    family: Family,
    kn: Sequence[tuple[int, int]] = KN,
    ms: Sequence[int] = M,
    without: Collection[str] = (),
    rounds: int = 20,
    check_only: bool = False,
    device: str = "cuda",
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> tuple[list[Row], list[str]]:
    """The family's rows, the last of them with host times, and a sentence for each row that was refused.

    A kernel by its name has no host times, since calls otherwise have none. keep: is called after each shape of the
    weight, with the rows so far.
    """
    peers = {name: peer for name, peer in family.peers.items() if name not in without}
    rows: list[Row] = []
    refused: list[str] = []

    def sweep(n: int, k: int, ms: Sequence[int], host: bool = False) -> None:
        shape = Shape(family, n, k, ms, device)
        for m in ms:
            try:
                row = measure(shape, m, peers, rounds, check_only)
                if host:
                    measure_host(row, shape, peers)
            except Exception as fault:
                refused.append(f"{family.op} m={m} n={n} k={k}: {first_line(fault)}")
                print(f"  REFUSED {refused[-1]}", flush=True)
            else:
                rows.append(row)
                print(line(row), flush=True)

    for k, n in kn:
        sweep(n, k, ms)
        keep(rows)
    if not check_only and family.hopper:
        sweep(HOST, HOST, (1,), host=True)
    return rows, refused


def first_line(fault: Exception) -> str:
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__


# Results


def models(rows: Iterable[Row]) -> list[Row]:
    """All but the row with host times, whose shape is no model's."""
    return [row for row in rows if "eager_us" not in row]


def ratios(
    rows: Iterable[Row], peer: str, first: int = 1, last: int | None = None, large: bool | None = None
) -> list[tuple[float, Row]]:
    """(peer time / our time, row) over the models' shapes, the worst first.

    peer: a name; "one or other", the better of those that were measured; "best" of all; or "floor", the floor's time.
    """
    pairs = []
    for row in models(rows):
        us = row["peers"] | {"floor": row["floor_us"]}
        names = row["peers"] if peer == "best" else [name for name in peer.split(" or ") if name in us]
        wanted = large is None or large == (row["n"] * row["k"] >= LARGE)
        if names and wanted and first <= row["m"] <= (last or math.inf):
            pairs.append((min(us[name] for name in names) / row["us"], row))
    return sorted(pairs, key=lambda pair: pair[0])


def judge(bar: Bar, rows: Iterable[Row]) -> tuple[bool | None, str]:
    """Whether the bar is passed (None: nothing was measured), and a line that says so."""
    found = ratios(rows, bar.peer, bar.first, bar.last, bar.large)
    if not found:
        return None, f"----  {bar.family}: {bar}: not measured"
    worst, row = found[0]
    value = statistics.geometric_mean(ratio for ratio, _ in found) if bar.of == "geomean" else worst
    passed = value >= bar.least
    where = f"worst of {len(found)} {worst:.3f} at m={row['m']} k={row['k']} n={row['n']}"
    return passed, f"{'pass' if passed else 'MISS'}  {bar.family}: {bar}: {value:.3f} ({where})"


def by_m(family: Family, rows: Sequence[Row]) -> dict[int, dict[str, Any]]:
    """For each m: `floor`, the mean of floor / time, and by peer the mean ratio and the least."""
    table: dict[int, dict[str, Any]] = {}
    for m in sorted({row["m"] for row in models(rows)}):
        shares = [row["floor_us"] / row["us"] for row in models(rows) if row["m"] == m]
        table[m] = {"floor": statistics.geometric_mean(shares)}
        for peer in family.peers:
            found = [ratio for ratio, _ in ratios(rows, peer, m, m)]
            if found:
                table[m][peer] = statistics.geometric_mean(found), found[0]
    return table


def host_times(family: Family, rows: Iterable[Row]) -> str:
    """The host's time of an eager call, ours first; empty where it was not measured."""
    for row in rows:
        if "eager_us" in row:
            times = {family.ours.title: row["eager_us"]}
            times |= {family.peers[name].title: us for name, us in row["peers_eager_us"].items()}
            return ", ".join(f"{title} {us:.1f} µs" for title, us in times.items())
    return ""


def line(row: Row) -> str:
    text = f"{row['op']} m={row['m']:<5} k={row['k']:<6} n={row['n']:<6}"
    if "us" in row:
        peers = " ".join(f"{name} {us:.2f}" for name, us in row["peers"].items())
        text += f"{row['us']:9.2f} us {row['floor_us'] / row['us']:4.0%} of floor  {peers}  "
    return text + f"err {row['err']:.1e}  {row['kernel']}"


def summary(family: Family, rows: Sequence[Row]) -> list[str]:
    """For a terminal: the ratios by M, host times, and the bars."""
    lines = [f"{family.name}: peer time / ours, geometric mean (minimum) over shapes"]
    lines.append(f"{'M':>6} {'% of floor':>11}" + "".join(f"{peer:>15}" for peer in family.peers))
    for m, cells in by_m(family, rows).items():
        pairs = (f"{cells[p][0]:.2f} ({cells[p][1]:.2f})" if p in cells else "-" for p in family.peers)
        lines.append(f"{m:>6} {cells['floor']:>11.0%}" + "".join(f"{pair:>15}" for pair in pairs))
    if host := host_times(family, rows):
        lines.append(f"host time of an eager call: {host}")
    return lines + [judge(bar, rows)[1] for bar in BARS if bar.family == family.name]


def microseconds(us: float) -> str:
    """As a cell of a table has them."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def markdown(family: Family, meta: dict[str, Any], rows: Sequence[Row]) -> str:
    """README.md's table: times by shape and M, with the ratio to the first peer, then the means."""
    table = by_m(family, rows)
    shapes = dict.fromkeys((row["k"], row["n"]) for row in models(rows))
    at = {(row["k"], row["n"], row["m"]): row for row in models(rows)}
    first = next(iter(family.peers))

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        us = microseconds(row["us"])
        return us + (f" ({row['peers'][first] / row['us']:.2f})" if first in row["peers"] else "")

    lines = [["k × n", *(f"M = {m}" for m in table)], ["---", *("--:" for _ in table)]]
    lines += [[f"{k} × {n}", *(cell(at.get((k, n, m))) for m in table)] for k, n in shapes]
    for name, peer in family.peers.items():
        if ratios(rows, name):
            means = (f"{cells[name][0]:.2f}" if name in cells else "-" for cells in table.values())
            lines.append([f"mean, vs {peer.title}", *means])
    lines.append(["mean, % of the floor", *(f"{cells['floor']:.0%}" for cells in table.values())])

    versions = "".join(f", {name} {version}" for name, version in meta["peers"].items())
    where = f"{meta['gpu']}, driver {meta['driver']}, torch {meta['torch']}{versions}"
    host = host_times(family, rows)
    return "\n".join(
        [
            f"**{family.title}.** µs a call; in parentheses {family.peers[first].title}'s time over ours. "
            "Means are geometric.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in lines),
            "",
            *([f"Host time of an eager call: {host}."] if host else []),
            f"Measured on one {where}; {meta['date']}, commit {meta['commit']}.",
        ]
    )


def tables(results: Path) -> str:
    """What stands between README.md's marks, from the results in a folder."""
    blocks = []
    for family in FAMILIES.values():
        path = results / f"{family.name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            blocks.append(markdown(family, found["meta"], found["rows"]))
    for name, module in MEMORY_BOUND.items():
        path = results / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            blocks.append(module.markdown(found["meta"], found["rows"]))
    return "\n\n".join(blocks) or "Nothing is measured yet."


def between(marks: tuple[str, str], readme: str, text: str) -> str:
    """README.md's text with the given one in place of what stands between the marks."""
    begin, end = marks
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(end) < readme.index(begin):
        raise ValueError(f"README.md must hold {begin} once and, after it, {end} once")
    head, rest = readme.split(begin)
    tail = rest.split(end)[1]
    return f"{head}{begin}\n{text}\n{end}{tail}"


def with_tables(readme: str, results: Path) -> str:
    return between(MARKS, readme, tables(results))


def write(path: Path, text: str) -> None:
    """All of the file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def dump(meta: dict[str, Any], rows: Iterable[Row]) -> str:
    """A results file: a line a row, so that a diff shows which rows moved."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"meta": {json.dumps(meta)},\n"rows": [\n{lines}\n]}}\n'


def metadata(commit: str | None = None) -> dict[str, Any]:
    """Where and with what the results are made. commit: its name, where the tree has no git folder."""

    def output(*command: str) -> str:
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        return done.stdout.strip()

    if commit is None:
        commit = output("git", "rev-parse", "--short=12", "HEAD") or "unknown"
        # What this tool writes itself doesn't change what is measured.
        changed = (
            "git",
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ".",
            ":!benchmarks",
            ":!README.md",
        )
        if output(*changed):
            commit += "+dirty"
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": next(iter(driver.splitlines()), "unknown"),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }


def load_vllm(folder: Path) -> str:
    """Loads vLLM's ops from their shared objects, without vLLM, and returns its version.

    The version is the text of the file VERSION beside them or, without one, the hash of what was loaded.
    """
    if (folder / "vllm").is_dir():
        folder = folder / "vllm"
    digest = hashlib.sha256()
    for name in ("_C_stable_libtorch", "_C"):
        path = folder / f"{name}.abi3.so"
        if path.exists():
            digest.update(path.read_bytes())
            torch.ops.load_library(path)
    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        raise FileNotFoundError(f"--peers: {folder} has no _C.abi3.so that registers cutlass_scaled_mm")
    version = folder / "VERSION"
    return version.read_text().strip() if version.exists() else f"sha256 {digest.hexdigest()[:16]}"


def slug(gpu: str) -> str:
    """The folder of a GPU's results: "NVIDIA H200" is h200."""
    return gpu.removeprefix("NVIDIA ").lower().replace(" ", "_")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def nk_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """(k, n) of each NxK in a list."""
    pairs = [part.split("x") for part in text.split(",")]
    return tuple((int(k), int(n)) for n, k in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tools/bench.py", description="Time the ops beside their peers, and keep the results."
    )
    add = parser.add_argument
    names = [*FAMILIES, *MEMORY_BOUND]
    add("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(names)} (default: all)")
    add("--m", type=numbers, metavar="M,...", help="numbers of tokens")
    add("--nk", type=nk_pairs, metavar="NxK,...", help="shapes of the weight, (n, k)")
    add(
        "--peers",
        type=Path,
        metavar="DIR",
        help="folder of vLLM's shared objects; with it, DeepGEMM too",
    )
    add("--without", type=lambda text: text.split(","), default=[], metavar="PEER,...", help="peers to leave out")
    add("--rounds", type=int, default=20, metavar="N", help="samples of each candidate (default: 20)")
    add("--out", type=Path, metavar="DIR", help="folder of the results (default: benchmarks/<gpu>)")
    add("--commit", metavar="NAME", help="what is measured, where the tree has no git folder")
    add("--check", action="store_true", help="compare results with float32, time nothing")
    add("--tables", action="store_true", help="rewrite the tables in README.md, measure nothing")
    args = parser.parse_args(argv)

    if unknown := [name for name in args.families if name not in names]:
        parser.error(f"{unknown[0]} is not a family; they are {', '.join(names)}")
    if args.tables:
        readme = ROOT / "README.md"
        write(readme, with_tables(readme.read_text(), args.out or ROOT / "benchmarks" / "h200"))
        return 0
    if not torch.cuda.is_available():
        parser.error("there is no GPU: torch.cuda.is_available() is false")

    meta = metadata(args.commit) | {"peers": {}}
    if args.peers:
        try:
            meta["peers"]["vllm"] = load_vllm(args.peers)
        except OSError as fault:
            parser.error(str(fault))
        if importlib.util.find_spec("deep_gemm"):
            meta["peers"]["deep_gemm"] = importlib.import_module("deep_gemm").__version__
    out = args.out
    if out is None and not (args.m or args.nk):
        out = ROOT / "benchmarks" / slug(meta["gpu"])

    lines: list[str] = []
    refused: list[str] = []
    without = [*args.without, *(name for of, names in PEERS.items() if of not in meta["peers"] for name in names)]
    for name in args.families or names:
        if name in MEMORY_BOUND:
            module = MEMORY_BOUND[name]
            results, bad = module.run(times, args.m or timed.TOKENS, without, args.rounds, args.check)
            found = module.judge(results)
        else:
            family = FAMILIES[name]

            def keep(rows: list[Row], name: str = name) -> None:  # a run that is cut off leaves what it measured
                if args.out and not args.check:
                    write(args.out / f"{name}.json", dump(meta, rows))

            kn, ms = args.nk or family.kn, args.m or family.m
            results, bad = run(family, kn, ms, without, args.rounds, args.check, "cuda", keep)
            found = summary(family, results)
        refused += bad
        if not args.check:
            lines += ["", *found]
            if out:
                write(out / f"{name}.json", dump(meta, results))
    print("\n".join(lines))
    for sentence in refused:
        print(f"REFUSED {sentence}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
