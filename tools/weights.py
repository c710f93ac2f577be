"""Weights of four and eight bits with activations in BF16: what tools/bench.py makes of them for each candidate.

Machete and Marlin are vLLM's. Both take symmetric codes in groups of 128 here, and make their results themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cutegemm
from cutegemm import gemm, plan
from cutegemm.packing import W4Weight

BF16 = torch.bfloat16
UINT4B8 = 1125899907892224  # the number of vLLM's ScalarType of four bits that stand for -8 to 7


class Inputs(NamedTuple):
    """Inputs of one call. w: as the candidate takes it; before that, as ours do, (W4Weight,) or (codes, scale)."""

    a: Tensor  # (m, k), BF16
    w: tuple[Any, ...]

    def rows(self, m: int) -> Inputs:
        return self._replace(a=self.a[:m])

    def copy(self) -> Inputs:
        return Inputs(self.a.clone(), tuple(_copy(part) for part in self.w))


def _copy(part: Tensor | W4Weight) -> Tensor | W4Weight:
    if isinstance(part, Tensor):
        return part.clone()
    return W4Weight.from_state_dict({name: tensor.clone() for name, tensor in part.state_dict().items()})


def values(w: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """What ours' weight stands for, (n, k)."""
    if isinstance(w[0], W4Weight):
        return cutegemm.dequantize_w4(w[0], dtype)
    codes, scale = w
    return (codes.float() * scale.view(-1, 1)).to(dtype)


# Formats: ours' weight of one (n, k) in BF16, and the fields of its plan.Problem


@dataclass(frozen=True)
class W4:
    """Four bits, with a scale in BF16 for each group and, with zeros, a zero point."""

    group_size: int
    zeros: bool = False

    def quantize(self, weight: Tensor) -> tuple[Any, ...]:
        return (cutegemm.quantize_w4(weight, self.group_size, symmetric=not self.zeros),)

    def problem(self, k: int) -> dict[str, str]:
        return {"b": "int4", "scales": gemm.group_of(k, self.group_size, minimum=False)}


@dataclass(frozen=True)
class W8:
    """e4m3 or INT8, with a float32 scale for each of n."""

    dtype: torch.dtype

    def quantize(self, weight: Tensor) -> tuple[Any, ...]:
        quantize = cutegemm.quantize_int8 if self.dtype == torch.int8 else cutegemm.quantize_fp8
        return quantize(weight, granularity="channel")

    def problem(self, k: int) -> dict[str, str]:
        return {"b": plan.DTYPES[self.dtype]}


# Candidates: the call, and before it the weight


def w4a16_mm(x: Inputs, out: Tensor | None, kernel: str | None = None) -> Tensor:
    return cutegemm.w4a16_mm(x.a, *x.w, out=out, kernel=kernel)


def w8a16_mm(x: Inputs, out: Tensor | None, kernel: str | None = None) -> Tensor:
    return cutegemm.w8a16_mm(x.a, *x.w, out=out, kernel=kernel)


def for_torch(x: Inputs) -> Inputs:
    return x._replace(w=(values(x.w, BF16).t(),))


def torch_mm(x: Inputs, out: Tensor | None) -> Tensor:
    return torch.mm(x.a, *x.w, out=out)


def _gptq(w: W4Weight) -> tuple[Tensor, Tensor]:
    """int32 (n, k / 8), eight codes along k each, lowest first; and scales (groups, n)."""
    codes, scales, _ = cutegemm.unpack_w4(w)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int32), scales.t().contiguous()


def for_machete(x: Inputs) -> Inputs:
    w = x.w[0]
    if w.n % 128:
        raise ValueError(f"machete: n is {w.n}; it must be a multiple of 128")
    codes, scales = _gptq(w)
    return x._replace(w=(torch.ops._C.machete_prepack_B(codes.t(), BF16, UINT4B8, BF16), scales, w.group_size))


def machete(x: Inputs, out: Tensor | None) -> Tensor:
    w, scales, group_size = x.w
    return torch.ops._C.machete_mm(x.a, w, UINT4B8, None, scales, None, group_size, None, None, None)


def for_marlin(x: Inputs) -> Inputs:
    w = x.w[0]
    codes, scales = _gptq(w)
    no_permutation = torch.empty(0, dtype=torch.int32, device=codes.device)
    packed = torch.ops._C.gptq_marlin_repack(codes.t().contiguous(), no_permutation, w.k, w.n, 4, False)
    order = [column + 8 * row for column in range(8) for row in range(8)]
    scales = scales.reshape(-1, 64)[:, order].reshape(-1, w.n).contiguous()
    # Each call leaves it zero. It must have one for each multiprocessor.
    workspace = torch.zeros(1024, dtype=torch.int32, device=codes.device)
    return x._replace(w=(packed, scales, workspace))


def marlin(x: Inputs, out: Tensor | None) -> Tensor:
    w, scales, workspace = x.w
    sizes = len(x.a), scales.shape[1], x.a.shape[1]
    # k_full, atomic_add, fp32_reduce, zp_float
    flags = True, False, True, False
    nothing = (None,) * 5
    return torch.ops._C.marlin_gemm(x.a, None, w, None, scales, *nothing, workspace, UINT4B8, *sizes, *flags)
