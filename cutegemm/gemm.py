"""Matrix products: `mm` for BF16 and FP16, `scaled_mm` for FP8 and INT8 with scales.

Both are d = a @ b as in torch, with b (k, n); a weight stored (n, k) is passed as `w.t()`. The checks here are the only
ones there are: the CUDA dispatcher asks them for the sentence whenever a call is not in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import lies_in_memory_of
from .epilogues import asymmetric, linear, scaled
from .registry import Input, nbytes, op
from .variants import KERNELS, Choice

HALF = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED = (*FP8, torch.int8)
OUTPUT = (torch.bfloat16, torch.float16, torch.float32)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return ", ".join(names[:-1]) + " or " + names[-1]


def _shape(x: Any) -> str:
    return str(list(x.shape))


def _check_product(op: str, a: Any, b: Any, bias: Any, out: Any, out_dtype: torch.dtype) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.dim() != 2:
            raise ValueError(f"{op}: {name} is {_shape(x)}; it must have two dimensions")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{op}: a is {_shape(a)} and b is {_shape(b)}; the k of a, {a.shape[1]}, must be the k of b, {b.shape[0]}"
        )
    m, n = a.shape[0], b.shape[1]
    for name, size in (("m", m), ("n", n), ("k", a.shape[1])):
        if size >= 2**31 - 1:
            raise ValueError(f"{op}: {name} is {size}; it must be under 2**31 - 1")
    for name, x in (("b", b), ("bias", bias), ("out", out)):
        if x is not None and x.device != a.device:
            raise ValueError(f"{op}: {name} is on {x.device}; it must be on the device of a, {a.device}")
    if out_dtype not in OUTPUT:
        raise TypeError(f"{op}: out_dtype is {out_dtype}; it must be {_names(OUTPUT)}")
    if bias is not None:
        if bias.dtype not in OUTPUT:
            raise TypeError(f"{op}: bias is {bias.dtype}; it must be {_names(OUTPUT)}")
        if tuple(bias.shape) != (n,):
            raise ValueError(f"{op}: bias is {_shape(bias)}; it must be [{n}], one element for each column of b")
    if out is not None:
        if out.dtype != out_dtype:
            raise TypeError(f"{op}: out is {out.dtype}; it must be out_dtype, {out_dtype}")
        if tuple(out.shape) != (m, n):
            raise ValueError(f"{op}: out is {_shape(out)}; it must be [{m}, {n}]")
        row, column = out.stride()
        rows_apart = n <= 1 or (column > 0 and (m <= 1 or row >= n * column))
        columns_apart = m <= 1 or (row > 0 and (n <= 1 or column >= m * row))
        if not (rows_apart or columns_apart):
            raise ValueError(f"{op}: out has the strides {[row, column]}; its elements must not share memory")


def _check_kernel(op: str, kernel: str | None) -> None:
    if kernel is None:
        return
    try:
        name = Choice.parse(kernel).kernel
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    if name not in KERNELS or KERNELS[name].gemm.op != op:
        raise ValueError(
            f"{op}: kernel is {name!r}, which is not a kernel of {op}; `python tools/emit.py --list` prints them"
        )


def check_memory(op: str, out: Any, **operands: Any) -> None:
    """Refuses an out in whose memory an operand lies, where that is plain."""
    for name, x in operands.items():
        if out is not None and x is not None and lies_in_memory_of(out, x):
            raise ValueError(
                f"{op}: out lies in the memory of {name}; it must not, since {name} is read while it is written"
            )


def check_mm(
    a: Any,
    b: Any,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str | None = None,
    *,
    out: Any = None,
) -> torch.dtype:
    """Raises what is wrong with a call of mm; returns the dtype of its result."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in HALF:
            raise TypeError(f"mm: {name} is {x.dtype}; it must be {_names(HALF)}")
    if a.dtype != b.dtype:
        raise TypeError(f"mm: a is {a.dtype} and b is {b.dtype}; they must have one dtype")
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    _check_product("mm", a, b, bias, out, dtype)
    _check_kernel("mm", kernel_name)
    return dtype


def _check_vector(
    name: str, x: Any, dtype: torch.dtype, side: str, shapes: tuple[tuple[int, ...], ...], device: Any
) -> None:
    if x.dtype != dtype:
        raise TypeError(f"scaled_mm: {name} is {x.dtype}; it must be {dtype}")
    if x.device != device:
        raise ValueError(f"scaled_mm: {name} is on {x.device}; it must be on the device of a, {device}")
    if tuple(x.shape) not in ((), (1,), (1, 1), *shapes):
        raise ValueError(
            f"scaled_mm: {name} is {_shape(x)}; it must have one element, or be "
            f"{' or '.join(str(list(shape)) for shape in shapes)}, one element for each {side}"
        )


def check_scaled_mm(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    zero_point_a: Any = None,
    sum_b: Any = None,
    kernel_name: str | None = None,
    *,
    out: Any = None,
) -> torch.dtype:
    """Raises what is wrong with a call of scaled_mm; returns the dtype of its result."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in QUANTIZED:
            raise TypeError(f"scaled_mm: {name} is {x.dtype}; it must be {_names(QUANTIZED)}")
    int8 = a.dtype == torch.int8
    if int8 != (b.dtype == torch.int8):
        raise TypeError(f"scaled_mm: a is {a.dtype} and b is {b.dtype}; both must be torch.int8, or neither")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError("scaled_mm: a and b are both torch.float8_e5m2; at least one must be torch.float8_e4m3fn")
    dtype = out_dtype or (out.dtype if out is not None else torch.bfloat16)
    _check_product("scaled_mm", a, b, bias, out, dtype)
    (m, k), n = a.shape, b.shape[1]
    if k > 1 and n > 1 and b.stride(0) != 1 and b.stride(1) == 1:
        raise ValueError(
            f"scaled_mm: b is {_shape(b)} with the strides {list(b.stride())}, so its rows are contiguous; its columns "
            "must be: pass w.t() of a contiguous (n, k) weight w"
        )
    _check_vector("scale_a", scale_a, torch.float32, "row of a", ((m,), (m, 1)), a.device)
    _check_vector("scale_b", scale_b, torch.float32, "column of b", ((n,), (1, n), (n, 1)), a.device)
    for name, x in (("zero_point_a", zero_point_a), ("sum_b", sum_b)):
        if x is not None and not int8:
            raise ValueError(f"scaled_mm: {name} is {_shape(x)}; it must be None, since a and b are not torch.int8")
    if zero_point_a is None and sum_b is not None:
        raise ValueError("scaled_mm: zero_point_a is None; it must be given where sum_b is")
    if zero_point_a is not None:
        if sum_b is None:
            raise ValueError("scaled_mm: sum_b is None; it must be given where zero_point_a is")
        _check_vector("zero_point_a", zero_point_a, torch.int32, "row of a", ((m,), (m, 1)), a.device)
        if sum_b.dtype != torch.int32:
            raise TypeError(f"scaled_mm: sum_b is {sum_b.dtype}; it must be torch.int32")
        if sum_b.device != a.device:
            raise ValueError(f"scaled_mm: sum_b is on {sum_b.device}; it must be on the device of a, {a.device}")
        if tuple(sum_b.shape) != (n,):
            raise ValueError(f"scaled_mm: sum_b is {_shape(sum_b)}; it must be [{n}], one element for each column of b")
    # Up to here int32 holds every sum of k products, each up to 2**14, and with a zero point of int8's range every sum
    # of (a - zero_point_a) * b, each up to 255 * 2**7.
    most = 2**17 - 1 if zero_point_a is None else 2**16
    if int8 and k > most:
        raise ValueError(f"scaled_mm: k is {k}; it must be at most {most}, so that the sums of int8 products fit int32")
    _check_kernel("scaled_mm", kernel_name)
    return dtype


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.int8:
        return (a.double() @ b.double()).int()  # float64 is exact here, and fast
    return a.float() @ b.float()


def _mm_fake(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> Tensor:
    dtype = check_mm(a, b, *rest, **named)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


_MM_CASES: list[dict[str, Any]] = [
    {"a": Input((5, 72)), "b": Input((72, 24), transposed=True)},
    {"a": Input((33, 130)), "b": Input((130, 67)), "bias": Input((67,)), "out_dtype": torch.float32},
    {"a": Input((1, 64), torch.float16), "b": Input((64, 16), torch.float16, transposed=True)},
]


def _product_flops(a: Tensor, b: Tensor, **others: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


@op(
    "mm(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None, str? kernel_name=None) -> Tensor",
    cases=_MM_CASES,
    fake=_mm_fake,
    flops=_product_flops,
)
def _mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str | None = None,
) -> Tensor:
    """`mm` as a torch op."""
    dtype = check_mm(a, b, bias, out_dtype, kernel_name)
    return linear(_product(a, b), 0.0 if bias is None else bias.float()).to(dtype)


def _mm_out_fake(out: Tensor, *rest: Any, **named: Any) -> None:
    check_mm(*rest, **named, out=out)


@op(
    "mm_out(Tensor(a!) out, Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None, "
    "str? kernel_name=None) -> ()",
    cases=[{"out": Input((case["a"].shape[0], case["b"].shape[1]), torch.float32), **case} for case in _MM_CASES],
    fake=_mm_out_fake,
    bytes=lambda **arguments: nbytes(arguments),
    flops=_product_flops,
)
def _mm_out(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str | None = None,
) -> None:
    """`mm` into out, as a torch op."""
    dtype = check_mm(a, b, bias, out_dtype, kernel_name, out=out)
    check_memory("mm", out, a=a, b=b, bias=bias)
    out.copy_(_mm(a, b, bias, dtype))


def mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    kernel: str | None = None,
) -> Tensor:
    """d = a @ b + bias, summed in float32 and rounded once.

    a: (m, k), b: (k, n), both BF16 or both FP16, each row- or column-major or with any other strides. The fast kernels
    take addresses and leading strides that are multiples of 16 bytes; others are computed by a slower one, as is.
    bias: (n,), BF16, FP16 or FP32. out: (m, n), written in place and returned; its elements must share memory neither
    among themselves nor with an operand.
    out_dtype: BF16, FP16 or FP32; by default that of `out`, or of a. m, n and k may be 0; with k = 0, d is the bias.
    kernel: a kernel's name (see `cutegemm.variants`), perhaps with options ("name:split=2,swizzle=4"), in place of the
    planned one. The bits of d do not change from call to call.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    if out is None:
        return _mm(a, b, bias, out_dtype, kernel)
    _mm_out(out, a, b, bias, out_dtype, kernel)
    return out


def _scaled_mm_fake(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> Tensor:
    dtype = check_scaled_mm(a, b, *rest, **named)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


_SCALED_MM_CASES: list[dict[str, Any]] = [
    {
        "a": Input((5, 80), FP8[0]),
        "b": Input((80, 24), FP8[0], transposed=True),
        "scale_a": Input((5, 1), torch.float32, positive=True),
        "scale_b": Input((24,), torch.float32, positive=True),
    },
    {
        "a": Input((33, 130), FP8[1]),
        "b": Input((130, 67), FP8[0], transposed=True),
        "scale_a": Input((1,), torch.float32, positive=True),
        "scale_b": Input((1, 67), torch.float32, positive=True),
        "bias": Input((67,)),
        "out_dtype": torch.float32,
        "use_fast_accum": False,
    },
    {
        "a": Input((7, 96), torch.int8, high=128),
        "b": Input((96, 40), torch.int8, high=128, transposed=True),
        "scale_a": Input((7, 1), torch.float32, positive=True),
        "scale_b": Input((40,), torch.float32, positive=True),
        "zero_point_a": Input((7, 1), torch.int32, high=128),
        "sum_b": Input((40,), torch.int32, high=2**13),
    },
]


@op(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, ScalarType? out_dtype=None, "
    "bool use_fast_accum=True, Tensor? zero_point_a=None, Tensor? sum_b=None, str? kernel_name=None) -> Tensor",
    cases=_SCALED_MM_CASES,
    fake=_scaled_mm_fake,
    flops=_product_flops,
)
def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    zero_point_a: Tensor | None = None,
    sum_b: Tensor | None = None,
    kernel_name: str | None = None,
) -> Tensor:
    """`scaled_mm` as a torch op."""
    dtype = check_scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, zero_point_a, sum_b, kernel_name)
    rows = scale_a.reshape(-1, 1)  # of m elements, or of one
    columns = scale_b.reshape(1, -1)
    operands = (rows, columns, 0.0 if bias is None else bias.float())
    if a.dtype != torch.int8:
        return scaled(_product(a, b), *operands).to(dtype)
    zero_points = 0 if zero_point_a is None else zero_point_a.reshape(-1, 1)
    return asymmetric(_product(a, b), *operands, zero_points, 0 if sum_b is None else sum_b).to(dtype)


def _scaled_mm_out_fake(out: Tensor, *rest: Any, **named: Any) -> None:
    check_scaled_mm(*rest, **named, out=out)


@op(
    "scaled_mm_out(Tensor(a!) out, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "ScalarType? out_dtype=None, bool use_fast_accum=True, Tensor? zero_point_a=None, Tensor? sum_b=None, "
    "str? kernel_name=None) -> ()",
    cases=[
        {"out": Input((5, 24), torch.bfloat16), **_SCALED_MM_CASES[0]},
        {"out": Input((33, 67), torch.float32), **_SCALED_MM_CASES[1]},
        {"out": Input((7, 40), torch.bfloat16), **_SCALED_MM_CASES[2]},
    ],
    fake=_scaled_mm_out_fake,
    bytes=lambda **arguments: nbytes(arguments),
    flops=_product_flops,
)
def _scaled_mm_out(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    zero_point_a: Tensor | None = None,
    sum_b: Tensor | None = None,
    kernel_name: str | None = None,
) -> None:
    """`scaled_mm` into out, as a torch op."""
    dtype = check_scaled_mm(
        a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, zero_point_a, sum_b, kernel_name, out=out
    )
    operands = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    check_memory("scaled_mm", out, **operands, zero_point_a=zero_point_a, sum_b=sum_b)
    out.copy_(_scaled_mm(a, b, scale_a, scale_b, bias, dtype, use_fast_accum, zero_point_a, sum_b))


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    use_fast_accum: bool = True,
    *,
    zero_point_a: Tensor | None = None,
    sum_b: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """d = scale_a * (scale_b * (a @ b)) + bias, in float32 and rounded once: the product of two FP8 or INT8 matrices.

    a: (m, k), row-major; b: (k, n), column-major, that is `w.t()` of a contiguous (n, k) weight. Both e4m3, or one of
    them e5m2, or both int8. A row-major b is refused: of a square one nobody could tell which was meant. Views' strides
    are read.
    scale_a, scale_b: float32 on the device, dequantizing (x ≈ q * scale): one element ([], [1] or [1, 1]), or (m,) or
    (m, 1) for a and (n,), (1, n) or (n, 1) for b. bias: (n,), BF16, FP16 or FP32, added once.
    out_dtype: BF16 (the default, or the dtype of `out`), FP16 or FP32. out: (m, n), written in place and returned.
    use_fast_accum: the tensor core adds FP8 products with about 14 bits. True lets it add along all of k; False has its
    sums moved to float32 every 128 k, which halves the error at k = 4096 and costs some speed. INT8's sums are exact,
    in int32, and this changes nothing.
    zero_point_a, sum_b: of an a that was quantized asymmetrically, x ≈ (q - zero_point_a) * scale_a. Both int32, given
    together: zero_point_a of one element, or (m,) or (m, 1); sum_b (n,), the sums of b's columns, made once for a
    weight with `w.sum(1, dtype=torch.int32)`. In place of a @ b then stands a @ b - zero_point_a * sum_b. That is
    exact in int32, and rounded where it becomes float32, by up to 2**-24 of it. For zero points of -128 to 127 it does
    not overflow, since k may be 2**16 at most (without them, 2**17 - 1); others are computed modulo 2**32.
    m, n and k may be 0; with k = 0, d is the bias. kernel: as in `mm`.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    if out is None:
        return _scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, zero_point_a, sum_b, kernel)
    _scaled_mm_out(out, a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, zero_point_a, sum_b, kernel)
    return out
