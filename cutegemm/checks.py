"""What is wrong with a call: the checks that several ops share. Each raises a sentence that begins with the op's name.
On CUDA it is the C++ side that checks, in the same sentences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def any_of(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def check_dtype(op: str, name: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> None:
    if dtype not in dtypes:
        raise TypeError(f"{op}: {name} is {dtype}; it must be {any_of(dtypes)}")


def check_floats(op: str, name: str, x: Tensor) -> None:
    check_dtype(op, name, x.dtype, FLOATS)
    if x.dim() == 0:
        raise ValueError(f"{op}: {name} has no dimension; it must have at least one")


def check_device(op: str, name: str, x: Tensor, of: Tensor, of_name: str = "x") -> None:
    if x.device != of.device:
        raise ValueError(f"{op}: {name} is on {x.device}; it must be on the device of {of_name}, {of.device}")


def check_last_stride(op: str, name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{op}: {name} has the strides {list(x.stride())}; its last dimension must have stride one")


def check_like(op: str, name: str, other: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    if other.dtype != x.dtype:
        raise TypeError(f"{op}: {name} is {other.dtype}; it must be the dtype of x, {x.dtype}")
    if tuple(other.shape) != shape:
        of_x = "the shape of x, " if shape == tuple(x.shape) else ""
        raise ValueError(f"{op}: {name} is {list(other.shape)}; it must be {of_x}{list(shape)}")
    check_device(op, name, other, x)


def is_fake(x: Tensor) -> bool:
    """Whether it has a shape and no values, as while torch.compile looks at a call."""
    return x.is_meta or isinstance(x, FakeTensor)


def check_output(op: str, name: str, out: Tensor | None, itself: str = "", **reads: Tensor | None) -> None:
    """Refuses an out that has no rows at equal distances, or in whose memory lies what is read while it is written.

    itself: what out may be. Views that interleave without touching can't be told from others: those pass.
    """
    if out is None or is_fake(out):
        return
    *leading, k = out.shape
    rows, stride = 1, k
    equal = k <= 1 or out.stride(-1) == 1
    for size, step in zip(reversed(leading), reversed(out.stride()[:-1]), strict=True):
        if size != 1:
            stride = step if rows == 1 else stride
            equal = equal and (step == rows * stride or out.numel() == 0)
            rows *= size
    if not equal or (rows > 1 and stride < k):
        raise ValueError(
            f"{op}: {name} has the strides {list(out.stride())}; its last dimension must have stride one, and its rows "
            f"lie at equal distances"
        )
    for other, x in reads.items():
        if x is None or not lies_in_memory_of(out, x):
            continue
        if other != itself or not is_itself(out, x):
            either = f"be {other} itself, or " if other == itself else ""
            raise ValueError(f"{op}: {name} lies in the memory of {other}; it must {either}lie apart from it")


def is_itself(out: Tensor, x: Tensor) -> bool:
    """Whether every element of out is that of x: then writing one changes no other."""
    sizes = [[d for d in zip(t.shape, t.stride(), strict=True) if d[0] != 1] for t in (out, x)]
    same = (out.data_ptr(), out.dtype, out.shape) == (x.data_ptr(), x.dtype, x.shape)
    return same and sizes[0] == sizes[1]


def lies_in_memory_of(out: Tensor, x: Tensor) -> bool:
    """Whether writing out would change x, where that is plain to see."""

    def span(t: Tensor) -> tuple[int, int, bool]:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.dtype.itemsize, last + 1 == math.prod(t.shape)

    if not math.prod(out.shape) or not math.prod(x.shape):
        return False
    (begin, end, dense), (x_begin, x_end, x_dense) = span(out), span(x)
    if begin >= x_end or x_begin >= end:
        return False
    return begin == x_begin or (dense and begin <= x_begin) or (x_dense and x_begin <= begin)
