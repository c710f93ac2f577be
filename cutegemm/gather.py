"""`gather_columns`: what a product has of a matrix whose columns, or addresses, are not those that kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_device, check_dtype
from .registry import Input, op


@op(
    "gather_columns(Tensor x, Tensor? permutation=None) -> Tensor",
    cases=[
        {"x": Input((5, 96)), "permutation": Input((96,), torch.int32, high=96)},
        {"x": Input((3, 77), torch.float16, transposed=True)},
    ],
)
def gather_columns(x: Tensor, permutation: Tensor | None = None) -> Tensor:
    """x[:, permutation], or a copy of x, in rows that begin at multiples of 16 bytes.

    x: (m, k), BF16 or FP16, of any strides. permutation: int32 (k,), which column of x is at each
    place, as `W4Weight.permutation` has it. Of an x that several weights with one permutation take, the copy may be
    made once, for weights without it (`dataclasses.replace(w, permutation=None)`).

    On CUDA, an index that is no column's gives 0.
    """
    name = "gather_columns"
    check_dtype(name, "x", x.dtype, (torch.bfloat16, torch.float16))
    if x.dim() != 2:
        raise ValueError(f"{name}: x is {list(x.shape)}; it must have two dimensions")
    m, k = x.shape
    if permutation is not None:
        check_dtype(name, "permutation", permutation.dtype, (torch.int32,))
        if tuple(permutation.shape) != (k,):
            raise ValueError(f"{name}: permutation is {list(permutation.shape)}; it must be [{k}], as a row of x")
        check_device(name, "permutation", permutation, x)
    out = x.new_empty_strided((m, k), (-(-k // 8) * 8, 1))
    return out.copy_(x if permutation is None else x.index_select(1, permutation))
