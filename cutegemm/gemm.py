"""Matrix products: `mm` for BF16 and FP16, `scaled_mm` for FP8 and INT8 with scales, and `w4a16_mm` and `w8a16_mm` for
BF16 and FP16 with a weight of 4 or 8 bits. Their forms `_silu_and_mul` and `_quant` go on with what was summed before
it is rounded.

mm and scaled_mm are d = a @ b as in torch, with b (k, n); a weight stored (n, k) is passed as `w.t()`. Those named for
a weight take it as it is stored. The checks here are the only ones there are: the CUDA dispatcher asks them for the
sentence whenever a call is not in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor

from .activation import FUNCTIONS
from .checks import any_of, check_device, check_dtype, check_last_stride, is_itself, lies_in_memory_of
from .epilogues import EPILOGUES, asymmetric, linear, scaled, weight_scaled
from .packing import W4Weight, check_packed, dequantize_w4
from .quantize import BLOCK, columns_of_scales, quantize_rows
from .registry import F, Input, nbytes, op
from .variants import KERNELS, SEPARATE, Choice

HALF = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED = (*FP8, torch.int8)
WEIGHT_8 = (torch.float8_e4m3fn, torch.int8)  # of w8a16_mm
E8M0 = (torch.float8_e8m0fnu, torch.uint8)  # which is taken for the bytes of the other
SCALES = (torch.float32, *E8M0)
OUTPUT = (torch.bfloat16, torch.float16, torch.float32)
_ONE_ELEMENT: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


def _shape(x: Any) -> str:
    return str(list(x.shape))


def _check_product(op: str, a: Any, b: Any, bias: Any, out_dtype: torch.dtype) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.dim() != 2:
            raise ValueError(f"{op}: {name} is {_shape(x)}; it must have two dimensions")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{op}: a is {_shape(a)} and b is {_shape(b)}; the k of a, {a.shape[1]}, must be the k of b, {b.shape[0]}"
        )
    _check_sizes(op, a.shape[0], b.shape[1], a.shape[1])
    check_device(op, "b", b, a, "a")
    _check_result(op, b.shape[1], bias, out_dtype, a, "a", "column of b")


def _check_sizes(op: str, m: int, n: int, k: int) -> None:
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size >= 2**31 - 1:
            raise ValueError(f"{op}: {name} is {size}; it must be under 2**31 - 1")


def _check_result(op: str, n: int, bias: Any, out_dtype: torch.dtype, of: Any, of_name: str, line: str) -> None:
    """of: the operand on whose device the bias must be. line: of the weight, what has an element of the bias."""
    if bias is not None:
        check_device(op, "bias", bias, of, of_name)
    check_dtype(op, "out_dtype", out_dtype, OUTPUT)
    if bias is not None:
        check_dtype(op, "bias", bias.dtype, OUTPUT)
        if tuple(bias.shape) != (n,):
            raise ValueError(f"{op}: bias is {_shape(bias)}; it must be [{n}], one element for each {line}")


def _check_out(op: str, out: Any, out_dtype: torch.dtype, m: int, n: int, of: Any, of_name: str = "a") -> None:
    if out is None:
        return
    check_device(op, "out", out, of, of_name)
    if out.dtype != out_dtype:
        raise TypeError(f"{op}: out is {out.dtype}; it must be out_dtype, {out_dtype}")
    if tuple(out.shape) != (m, n):
        raise ValueError(f"{op}: out is {_shape(out)}; it must be [{m}, {n}]")
    row, column = out.stride()
    rows_apart = n <= 1 or (column > 0 and (m <= 1 or row >= n * column))
    columns_apart = m <= 1 or (row > 0 and (n <= 1 or column >= m * row))
    if not (rows_apart or columns_apart):
        raise ValueError(f"{op}: out has the strides {[row, column]}; its elements must not share memory")


def _check_kernel(op: str, kernel: str | None, of: str | None = None) -> None:
    """of: the op whose kernels they are, if it is another: then op is a fused form, whose sums may be separate."""
    if kernel is None or (of and kernel == SEPARATE):
        return
    of = of or op
    try:
        name = Choice.parse(kernel).kernel
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    if name not in KERNELS or KERNELS[name].gemm.op != of:
        raise ValueError(
            f"{op}: kernel is {name!r}, which is not a kernel of {of}; `python tools/emit.py --list` prints them"
        )


def check_memory(op: str, out: Any, **operands: Any) -> None:
    """Refuses an out in whose memory an operand lies, where that is plain; it may be the residual itself."""
    for name, x in operands.items():
        if out is None or x is None or not lies_in_memory_of(out, x):
            continue
        if name != "residual":
            raise ValueError(
                f"{op}: out lies in the memory of {name}; it must not, since {name} is read while it is written"
            )
        if not is_itself(out, x):
            raise ValueError(f"{op}: out lies in the memory of {name}; it must be {name} itself, or lie apart from it")


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
            raise TypeError(f"mm: {name} is {x.dtype}; it must be {any_of(HALF)}")
    if a.dtype != b.dtype:
        raise TypeError(f"mm: a is {a.dtype} and b is {b.dtype}; they must have one dtype")
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    _check_product("mm", a, b, bias, dtype)
    _check_out("mm", out, dtype, a.shape[0], b.shape[1], a)
    _check_kernel("mm", kernel_name)
    return dtype


def scales_of(m: int, n: int, k: int, scale_a: Any, scale_b: Any, residual: bool = False) -> str:
    """What has a scale of its own in a call of scaled_mm, of FP8:

      ""       all of an operand, or each row of a and each column of b
      "block"  each 128 k of a row of a, and each 128 x 128 of the (n, k) weight
      "group"  each 128 k of a row of a and of a column of b

    Where two of them mean the same, float32 scales of k up to 128 are "" unless there is a residual, which that has
    not, and those of a b of one column "block". Of scales that are refused this says nothing.
    """
    groups = -(-k // BLOCK)
    of_block = (-(-n // BLOCK), groups)
    a, b = tuple(scale_a.shape), tuple(scale_b.shape)
    if scale_a.dtype in E8M0 or scale_b.dtype in E8M0 or ((groups != 1 or residual) and a == (m, groups)):
        return "block" if b == of_block else "group"
    return "block" if k <= BLOCK < n and b == of_block else ""


def _check_vector(
    op: str,
    name: str,
    x: Any,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[tuple[int, ...], ...],
    shape: str,
    of: Any,
    of_name: str = "a",
) -> None:
    """shape: the shapes in words. of: the operand on whose device it must be."""
    check_dtype(op, name, x.dtype, dtypes)
    check_device(op, name, x, of, of_name)
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{op}: {name} is {_shape(x)}; it must {shape}")


def _check_scales(
    op: str, m: int, n: int, k: int, scale_a: Any, scale_b: Any, a: Any, int8: bool, residual: bool
) -> str:
    groups, blocks = -(-k // BLOCK), -(-n // BLOCK)
    each_a = f"[{m}, {groups}], one for each 128 k of each row"
    each_b = (
        f"[{blocks}, {groups}], one for each 128 x 128 of the (n, k) weight, or [{n}, {groups}], one for each 128 k of "
        "each column"
    )
    kind = "" if int8 else scales_of(m, n, k, scale_a, scale_b, residual)
    if kind:
        _check_vector(op, "scale_a", scale_a, SCALES, ((m, groups),), f"be {each_a} of a", a)
        _check_vector(op, "scale_b", scale_b, SCALES, ((blocks, groups), (n, groups)), f"be {each_b} of b", a)
        return kind
    rows = f"have one element, or be [{m}] or [{m}, 1], one element for each row of a"
    columns = f"have one element, or be [{n}] or [1, {n}] or [{n}, 1], one element for each column of b"
    if not int8:
        rows += "" if groups == 1 else f", or {each_a}"
        columns += "" if groups == 1 and n <= BLOCK else f", or, with a scale_a of [{m}, {groups}], be {each_b}"
    one, float32 = _ONE_ELEMENT, (torch.float32,)
    _check_vector(op, "scale_a", scale_a, float32, (*one, (m,), (m, 1)), rows, a)
    _check_vector(op, "scale_b", scale_b, float32, (*one, (n,), (1, n), (n, 1)), columns, a)
    return kind


def _check_scaled(
    op: str,
    types: tuple[torch.dtype, ...],
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    out_dtype: torch.dtype,
    residual: bool = False,
) -> str:
    """Raises what is wrong with the product of scaled operands of these types; returns what has a scale of its own."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in types:
            raise TypeError(f"{op}: {name} is {x.dtype}; it must be {any_of(types)}")
    int8 = a.dtype == torch.int8
    if int8 != (b.dtype == torch.int8):
        raise TypeError(f"{op}: a is {a.dtype} and b is {b.dtype}; both must be torch.int8, or neither")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError(f"{op}: a and b are both torch.float8_e5m2; at least one must be torch.float8_e4m3fn")
    _check_product(op, a, b, bias, out_dtype)
    (m, k), n = a.shape, b.shape[1]
    if k > 1 and n > 1 and b.stride(0) != 1 and b.stride(1) == 1:
        raise ValueError(
            f"{op}: b is {_shape(b)} with the strides {list(b.stride())}, so its rows are contiguous; its columns "
            "must be: pass w.t() of a contiguous (n, k) weight w"
        )
    return _check_scales(op, m, n, k, scale_a, scale_b, a, int8, residual)


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
    residual: Any = None,
    kernel_name: str | None = None,
    *,
    out: Any = None,
) -> torch.dtype:
    """Raises what is wrong with a call of scaled_mm; returns the dtype of its result."""
    op = "scaled_mm"
    dtype = out_dtype or (out.dtype if out is not None else torch.bfloat16)
    kind = _check_scaled(op, QUANTIZED, a, b, scale_a, scale_b, bias, dtype, residual is not None)
    (m, k), n = a.shape, b.shape[1]
    _check_out(op, out, dtype, m, n, a)
    int8 = a.dtype == torch.int8
    for name, x in (("zero_point_a", zero_point_a), ("sum_b", sum_b)):
        if x is not None and not int8:
            raise ValueError(f"{op}: {name} is {_shape(x)}; it must be None, since a and b are not torch.int8")
    if zero_point_a is None and sum_b is not None:
        raise ValueError(f"{op}: zero_point_a is None; it must be given where sum_b is")
    if zero_point_a is not None:
        if sum_b is None:
            raise ValueError(f"{op}: sum_b is None; it must be given where zero_point_a is")
        rows = f"have one element, or be [{m}] or [{m}, 1], one element for each row of a"
        columns = f"be [{n}], one element for each column of b"
        int32 = (torch.int32,)
        _check_vector(op, "zero_point_a", zero_point_a, int32, (*_ONE_ELEMENT, (m,), (m, 1)), rows, a)
        _check_vector(op, "sum_b", sum_b, int32, ((n,),), columns, a)
    # Up to here int32 holds every sum of k products, each up to 2**14, and with a zero point of int8's range every sum
    # of (a - zero_point_a) * b, each up to 255 * 2**7.
    most = 2**17 - 1 if zero_point_a is None else 2**16
    if int8 and k > most:
        raise ValueError(f"{op}: k is {k}; it must be at most {most}, so that the sums of int8 products fit int32")
    if residual is not None:
        if not kind:
            raise ValueError(
                f"{op}: residual is {_shape(residual)}; it must be None, since the scales are not for each 128 k"
            )
        _check_vector(op, "residual", residual, OUTPUT, ((m, n),), f"be [{m}, {n}], as the result", a)
    _check_kernel(op, kernel_name)
    return dtype


def _check_gate(op: str, name: str, shape: str, n: int) -> None:
    if n % 2:
        raise ValueError(f"{op}: {name} is {shape}; its n must be even, a gate for each value")


def check_scaled_mm_silu_and_mul(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str | None = None,
    *,
    out: Any = None,
) -> torch.dtype:
    """Raises what is wrong with a call of scaled_mm_silu_and_mul; returns the dtype of its result."""
    op = "scaled_mm_silu_and_mul"
    dtype = out_dtype or (out.dtype if out is not None else torch.bfloat16)
    _check_scaled(op, FP8, a, b, scale_a, scale_b, bias, dtype)
    _check_gate(op, "b", _shape(b), b.shape[1])
    _check_out(op, out, dtype, a.shape[0], b.shape[1] // 2, a)
    _check_kernel(op, kernel_name, "scaled_mm")
    return dtype


def check_scaled_mm_quant(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    silu_and_mul: bool = False,
    power_of_two_scale: bool = False,
    kernel_name: str | None = None,
) -> int:
    """Raises what is wrong with a call of scaled_mm_quant; returns how many columns its codes have."""
    op = "scaled_mm_quant"
    _check_scaled(op, FP8, a, b, scale_a, scale_b, bias, torch.float32)
    if silu_and_mul:
        _check_gate(op, "b", _shape(b), b.shape[1])
    _check_kernel(op, kernel_name, "scaled_mm")
    return b.shape[1] // 2 if silu_and_mul else b.shape[1]


def _check_weight(op: str, x: Any, n: int, k: int, bias: Any, out_dtype: torch.dtype, residual: Any) -> None:
    """Raises what is wrong with a product of x and a weight (n, k), but for the weight itself."""
    check_dtype(op, "x", x.dtype, HALF)
    if x.dim() != 2:
        raise ValueError(f"{op}: x is {_shape(x)}; it must have two dimensions")
    if x.shape[1] != k:
        raise ValueError(
            f"{op}: x is {_shape(x)} and w is [{n}, {k}]; the k of x, {x.shape[1]}, must be the k of w, {k}"
        )
    m = x.shape[0]
    _check_sizes(op, m, n, k)
    _check_result(op, n, bias, out_dtype, x, "x", "row of w")
    if residual is not None:
        _check_vector(op, "residual", residual, OUTPUT, ((m, n),), f"be [{m}, {n}], as the result", x, "x")


def group_of(k: int, group_size: int, minimum: bool) -> str:
    """Which k of an INT4 weight surely have one scale, as variants.STEPS has it."""
    size = k if group_size == -1 else group_size
    if minimum:
        return "group32_minimum"
    return next(f"group{step}" for step in (128, 64, 32) if size >= k or size % step == 0)


def check_w4a16_mm(
    x: Any,
    packed: Any,
    scales: Any,
    zeros: Any,
    permutation: Any,
    n: int,
    k: int,
    group_size: int,
    minimum: bool,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    residual: Any = None,
    kernel_name: str | None = None,
    *,
    out: Any = None,
    op: str = "w4a16_mm",
) -> torch.dtype:
    """Raises what is wrong with a call of w4a16_mm, or of its gated form; returns the dtype of its result."""
    dtype = out_dtype or (out.dtype if out is not None else x.dtype)
    check_packed(op, packed, scales, zeros, permutation, n, k, group_size, minimum)
    check_device(op, "packed", packed, x)
    _check_weight(op, x, n, k, bias, dtype, residual)
    gated = op != "w4a16_mm"
    if gated:
        _check_gate(op, "w", f"[{n}, {k}]", n)
    _check_out(op, out, dtype, x.shape[0], n // 2 if gated else n, x, "x")
    _check_kernel(op, kernel_name, "w4a16_mm" if gated else None)
    return dtype


def check_w4a16_mm_silu_and_mul(
    x: Any,
    packed: Any,
    scales: Any,
    zeros: Any,
    permutation: Any,
    n: int,
    k: int,
    group_size: int,
    minimum: bool,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str | None = None,
    *,
    out: Any = None,
) -> torch.dtype:
    """Raises what is wrong with a call of w4a16_mm_silu_and_mul; returns the dtype of its result."""
    weight = packed, scales, zeros, permutation, n, k, group_size, minimum
    return check_w4a16_mm(x, *weight, bias, out_dtype, None, kernel_name, out=out, op="w4a16_mm_silu_and_mul")


def blocks_of(n: int, k: int, scale: Any) -> str:
    """What has a scale of its own in a weight (n, k) of w8a16_mm: "block", 128 x 128, or "", all of it or a row."""
    shape = tuple(scale.shape)
    one_or_rows = shape in (*_ONE_ELEMENT, (n,), (n, 1))
    return "block" if shape == (-(-n // BLOCK), -(-k // BLOCK)) and not one_or_rows else ""


def check_w8a16_mm(
    x: Any,
    w: Any,
    scale: Any,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    residual: Any = None,
    kernel_name: str | None = None,
    *,
    out: Any = None,
) -> torch.dtype:
    """Raises what is wrong with a call of w8a16_mm; returns the dtype of its result."""
    op = "w8a16_mm"
    check_dtype(op, "w", w.dtype, WEIGHT_8)
    if w.dim() != 2:
        raise ValueError(f"{op}: w is {_shape(w)}; it must have two dimensions")
    check_device(op, "w", w, x)
    check_last_stride(op, "w", w)
    n, k = w.shape
    dtype = out_dtype or (out.dtype if out is not None else x.dtype)
    _check_weight(op, x, n, k, bias, dtype, residual)
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    shapes = f"[{n}] or [{n}, 1], one for each row of w, or {list(blocks)}, one for each 128 x 128"
    allowed = (*_ONE_ELEMENT, (n,), (n, 1), blocks)
    _check_vector(op, "scale", scale, (torch.float32,), allowed, f"have one element, or be {shapes}", x, "x")
    _check_out(op, out, dtype, x.shape[0], n, x, "x")
    _check_kernel(op, kernel_name)
    return dtype


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.int8:
        return (a.double() @ b.double()).int()  # float64 is exact here, and fast
    return a.float() @ b.float()


def _dequantizing(scale: Tensor) -> Tensor:
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _block_scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kind: str) -> Tensor:
    """The sums of a @ b in float32, each 128 k times its scales before it is added."""
    m, k, n = *a.shape, b.shape[1]
    rows, columns = _dequantizing(scale_a), _dequantizing(scale_b)
    if kind == "block":
        columns = columns.repeat_interleave(BLOCK, 0)[:n]
    total = a.new_zeros((m, n), dtype=torch.float32)
    for i, start in enumerate(range(0, k, BLOCK)):
        stop = start + BLOCK
        # 128 products of e4m3 fit float64 as they are, whatever their order, so this is rounded once.
        part = (a[:, start:stop].double() @ b[start:stop].double()).float()
        total += part * (rows[:, i, None] * columns[:, i])
    return total


def _fp8_values(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
    """What scaled_mm makes of FP8 operands, in float32: all but the residual."""
    added = 0.0 if bias is None else bias.float()
    kind = scales_of(a.shape[0], b.shape[1], a.shape[1], scale_a, scale_b)
    if kind:
        return linear(_block_scaled(a, b, scale_a, scale_b, kind), added)
    return scaled(_product(a, b), scale_a.reshape(-1, 1), scale_b.reshape(1, -1), added)


def _gated(values: Tensor) -> Tensor:
    """silu of the first half of values times the second half."""
    half = values.shape[1] // 2
    return FUNCTIONS["silu"](values[:, :half], 1.0) * values[:, half:]


def _product_op(
    schema: str,
    *,
    check: Callable[..., torch.dtype],
    size: Callable[..., tuple[int, int]],
    cases: Iterable[Mapping[str, Any]],
    flops: Callable[..., int],
) -> Callable[[F], F]:
    """@op for a product, and for the same into a tensor: `<name>_out(Tensor(a!) out, ...) -> ()`.

    check: raises what is wrong with the arguments, perhaps with an out, and returns the dtype of the result. The
    reference is called after it, and its result rounded to that. size: of the result, by arguments or a case's Inputs.
    """
    name, _, arguments = schema.removesuffix(") -> Tensor").partition("(")

    def register(reference: F) -> F:
        takes = signature(reference)

        def of(*args: Any, **named: Any) -> dict[str, Any]:
            call = takes.bind(*args, **named)
            call.apply_defaults()
            return call.arguments

        @wraps(reference)
        def product(*args: Any, **named: Any) -> Tensor:
            call = of(*args, **named)
            dtype = check(**call)
            return reference(**call).to(dtype)

        def fake(*args: Any, **named: Any) -> Tensor:
            call = of(*args, **named)
            dtype = check(**call)
            return next(iter(call.values())).new_empty(size(**call), dtype=dtype)

        def into(out: Tensor, *args: Any, **named: Any) -> None:
            call = of(*args, **named)
            dtype = check(**call, out=out)
            check_memory(name, out, **{key: value for key, value in call.items() if isinstance(value, Tensor)})
            out.copy_(reference(**call).to(dtype))

        def into_fake(out: Tensor, *args: Any, **named: Any) -> None:
            check(**of(*args, **named), out=out)

        first = Parameter("out", Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
        into.__signature__ = takes.replace(  # type: ignore[attr-defined]
            parameters=[first, *takes.parameters.values()], return_annotation=None
        )
        into.__doc__ = f"`{name}` into out, as a torch op."
        op(
            f"{name}_out(Tensor(a!) out, {arguments}) -> ()",
            cases=[{"out": Input(size(**case), case.get("out_dtype", torch.bfloat16)), **case} for case in cases],
            fake=into_fake,
            bytes=lambda **arguments: nbytes(arguments),
            flops=flops,
        )(into)
        return op(schema, cases=cases, fake=fake, flops=flops)(cast(F, product))

    return register


_MM_CASES: list[dict[str, Any]] = [
    {"a": Input((5, 72)), "b": Input((72, 24), transposed=True)},
    {"a": Input((33, 130)), "b": Input((130, 67)), "bias": Input((67,)), "out_dtype": torch.float32},
    {"a": Input((1, 64), torch.float16), "b": Input((64, 16), torch.float16, transposed=True)},
]


def _product_flops(a: Tensor, b: Tensor, **others: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


@_product_op(
    "mm(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None, str? kernel_name=None) -> Tensor",
    check=check_mm,
    size=lambda a, b, **others: (a.shape[0], b.shape[1]),
    cases=_MM_CASES,
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
    return linear(_product(a, b), 0.0 if bias is None else bias.float())


_mm_out = torch.ops.cutegemm.mm_out.default


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
    {
        "a": Input((5, 272), FP8[0]),
        "b": Input((272, 136), FP8[0], transposed=True),
        "scale_a": Input((5, 3), torch.float32, positive=True, transposed=True),
        "scale_b": Input((2, 3), torch.float32, positive=True),
        "residual": Input((5, 136)),
    },
    {
        "a": Input((6, 130), FP8[0]),
        "b": Input((130, 24), FP8[0], transposed=True),
        "scale_a": Input((6, 2), torch.float8_e8m0fnu, positive=True),
        "scale_b": Input((24, 2), torch.float8_e8m0fnu, positive=True),
        "bias": Input((24,)),
        "out_dtype": torch.float32,
    },
]


@_product_op(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, ScalarType? out_dtype=None, "
    "bool use_fast_accum=True, Tensor? zero_point_a=None, Tensor? sum_b=None, Tensor? residual=None, "
    "str? kernel_name=None) -> Tensor",
    check=check_scaled_mm,
    size=lambda a, b, **others: (a.shape[0], b.shape[1]),
    cases=_SCALED_MM_CASES,
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
    residual: Tensor | None = None,
    kernel_name: str | None = None,
) -> Tensor:
    """`scaled_mm` as a torch op."""
    if a.dtype != torch.int8:
        values = _fp8_values(a, b, scale_a, scale_b, bias)
        return values if residual is None else values + residual.float()
    operands = (scale_a.reshape(-1, 1), scale_b.reshape(1, -1), 0.0 if bias is None else bias.float())
    zero_points = 0 if zero_point_a is None else zero_point_a.reshape(-1, 1)
    return asymmetric(_product(a, b), *operands, zero_points, 0 if sum_b is None else sum_b)


_scaled_mm_out = torch.ops.cutegemm.scaled_mm_out.default


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
    residual: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """d = scale_a * (scale_b * (a @ b)) + bias, in float32 and rounded once: the product of two FP8 or INT8 matrices.

    a: (m, k), row-major; b: (k, n), column-major, that is `w.t()` of a contiguous (n, k) weight. Both e4m3, or one of
    them e5m2, or both int8. A row-major b is refused: of a square one nobody could tell which was meant. Views' strides
    are read.
    scale_a, scale_b: float32 on the device, dequantizing (x ≈ q * scale): one element ([], [1] or [1, 1]), or (m,) or
    (m, 1) for a and (n,), (1, n) or (n, 1) for b; or for each 128 k, see below. bias: (n,), BF16, FP16 or FP32, added
    once.
    out_dtype: BF16 (the default, or the dtype of `out`), FP16 or FP32. out: (m, n), written in place and returned.
    use_fast_accum: the tensor core adds FP8 products with about 14 bits. True lets it add along all of k; False has its
    sums moved to float32 every 128 k, which halves the error at k = 4096 and costs some speed. INT8's sums are exact,
    in int32, and this changes nothing; nor where scales are for each 128 k, whose sums are moved anyway.
    zero_point_a, sum_b: of an a that was quantized asymmetrically, x ≈ (q - zero_point_a) * scale_a. Both int32, given
    together: zero_point_a of one element, or (m,) or (m, 1); sum_b (n,), the sums of b's columns, made once for a
    weight with `w.sum(1, dtype=torch.int32)`. In place of a @ b then stands a @ b - zero_point_a * sum_b. That is
    exact in int32, and rounded where it becomes float32, by up to 2**-24 of it. For zero points of -128 to 127 it does
    not overflow, since k may be 2**16 at most (without them, 2**17 - 1); others are computed modulo 2**32.
    m, n and k may be 0; with k = 0, d is the bias. kernel: as in `mm`.

    FP8 with a scale for each 128 k: scale_a is (m, ceil(k / 128)), as quantize_fp8 makes it with granularity "group",
    and scale_b (ceil(n / 128), ceil(k / 128)), one for each 128 x 128 of the (n, k) weight (granularity "block"), or
    (n, ceil(k / 128)), one for each 128 k of each column. What is left over at the end of n or k has a scale of its
    own. Each may have any strides, and be float32, float8_e8m0fnu, or uint8, the same bytes: 2**(byte - 127), and NaN
    for 255. E8M0 scales are always for each 128 k, also if that is all. Then
        d[i, j] = sum over g of (a[i, g] @ b[g, j]) * (scale_a[i, g] * scale_b[j, g]) + bias[j] + residual[i, j]
    where the product of 128 k is rounded to float32, and the sum is in float32 and in the order of g.
    residual: (m, n), BF16, FP16 or FP32, of any strides, for such scales only. out may be the residual itself.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    operands = (a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, zero_point_a, sum_b, residual, kernel)
    if out is None:
        return _scaled_mm(*operands)
    _scaled_mm_out(out, *operands)
    return out


_FUSED_CASES: list[dict[str, Any]] = [
    {**{name: _SCALED_MM_CASES[0][name] for name in ("a", "b", "scale_a", "scale_b")}, "bias": Input((24,))},
    {name: _SCALED_MM_CASES[3][name] for name in ("a", "b", "scale_a", "scale_b")},
    {name: _SCALED_MM_CASES[4][name] for name in ("a", "b", "scale_a", "scale_b", "bias")},
]


@_product_op(
    "scaled_mm_silu_and_mul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "ScalarType? out_dtype=None, str? kernel_name=None) -> Tensor",
    check=check_scaled_mm_silu_and_mul,
    size=lambda a, b, **others: (a.shape[0], b.shape[1] // 2),
    cases=[*_FUSED_CASES, {**_FUSED_CASES[1], "out_dtype": torch.float32}],
    flops=_product_flops,
)
def _scaled_mm_silu_and_mul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str | None = None,
) -> Tensor:
    """`scaled_mm_silu_and_mul` as a torch op."""
    return _gated(_fp8_values(a, b, scale_a, scale_b, bias))


_scaled_mm_silu_and_mul_out = torch.ops.cutegemm.scaled_mm_silu_and_mul_out.default


def scaled_mm_silu_and_mul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    *,
    kernel: str | None = None,
) -> Tensor:
    """d = silu(g) * u, in float32 and rounded once, where [g, u] = scaled_mm(a, b, ...) in float32, with the bias.

    b's first n / 2 columns are those of the gates g, the others those of u, so n is even; silu(x) = x / (1 + exp(-x)).
    a, b: FP8. scale_a, scale_b: in every shape and dtype that scaled_mm takes, for each 128 k too. bias: (n,).
    out_dtype: as in `scaled_mm`. out: (m, n / 2), written in place and returned. m, n and k may be 0; with k = 0, g and
    u are the bias. kernel: one that computes all of it, or "separate": one launch for the sums, and another.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    if out is None:
        return _scaled_mm_silu_and_mul(a, b, scale_a, scale_b, bias, out_dtype, kernel)
    _scaled_mm_silu_and_mul_out(out, a, b, scale_a, scale_b, bias, out_dtype, kernel)
    return out


def _quant_fake(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    columns = check_scaled_mm_quant(a, b, *rest, **named)
    q = a.new_empty((a.shape[0], columns), dtype=torch.float8_e4m3fn)
    return q, columns_of_scales((a.shape[0],), -(-columns // BLOCK), a.device)


@op(
    "scaled_mm_quant(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, bool silu_and_mul=False, "
    "bool power_of_two_scale=False, str? kernel_name=None) -> (Tensor, Tensor)",
    cases=[
        *_FUSED_CASES,
        {**_FUSED_CASES[1], "silu_and_mul": True},
        {**_FUSED_CASES[2], "silu_and_mul": True, "power_of_two_scale": True},
    ],
    fake=_quant_fake,
    flops=_product_flops,
)
def _scaled_mm_quant(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    silu_and_mul: bool = False,
    power_of_two_scale: bool = False,
    kernel_name: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`scaled_mm_quant` as a torch op."""
    check_scaled_mm_quant(a, b, scale_a, scale_b, bias, silu_and_mul, power_of_two_scale, kernel_name)
    values = _fp8_values(a, b, scale_a, scale_b, bias)
    values = _gated(values) if silu_and_mul else values
    return quantize_rows(values, torch.float8_e4m3fn, None, "group", power_of_two_scale=power_of_two_scale)


def scaled_mm_quant(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    silu_and_mul: bool = False,
    power_of_two_scale: bool = False,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What scaled_mm or, with silu_and_mul, scaled_mm_silu_and_mul computes, quantized before it is rounded.

    Returns e4m3 codes q (m, n), or (m, n / 2) with silu_and_mul, and their scale, one for each 128 of a row: from the
    float32 values, as quantize_fp8 makes them with granularity "group". So the next scaled_mm takes the two as its a
    and scale_a. power_of_two_scale: the scale is rounded up to a power of two, still as float32.

    a, b: FP8. scale_a, scale_b, bias: as in `scaled_mm`, the scales in each of their shapes and dtypes. m, n and k may
    be 0. kernel: one that computes all of it, or "separate": one launch for the sums, and another.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    return _scaled_mm_quant(a, b, scale_a, scale_b, bias, silu_and_mul, power_of_two_scale, kernel)


def _float32(*operands: Tensor | None) -> list[Tensor | float]:
    """What is added to a product, 0 if it is None."""
    return [0.0 if each is None else each.float() for each in operands]


def _w4_values(x: Tensor, weight: tuple[Any, ...], bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """What w4a16_mm makes of a W4Weight's fields, in float32."""
    return EPILOGUES["residual"](x.float() @ dequantize_w4(W4Weight(*weight)).t(), *_float32(bias, residual))


def _w4_case(
    n: int, k: int, group_size: int, groups: int, dtype: torch.dtype = torch.bfloat16, zeros: bool = False
) -> dict[str, Any]:
    of_groups = Input((-(-n // 64) * 4, groups, 16), dtype, positive=True)
    return {
        "packed": Input((-(-n // 64) * 4, -(-k // 64), 32, 4), torch.int32, high=2**31 - 1),
        "scales": of_groups,
        "zeros": of_groups if zeros else None,
        "permutation": None,
        "n": n,
        "k": k,
        "group_size": group_size,
        "minimum": zeros,
    }


_W4A16_MM_CASES: list[dict[str, Any]] = [
    {"x": Input((5, 256)), **_w4_case(24, 256, 128, 2), "bias": Input((24,))},
    {"x": Input((3, 100), torch.float16), **_w4_case(66, 100, 32, 4, torch.float16, True), "out_dtype": torch.float32},
    {
        "x": Input((7, 96)),
        **_w4_case(40, 96, 96, 1, torch.float32),
        "residual": Input((7, 40)),
    },
]
_W4 = "Tensor packed, Tensor scales, Tensor? zeros, Tensor? permutation, int n, int k, int group_size, bool minimum"


def _w4_flops(x: Tensor, n: int, k: int, **others: Any) -> int:
    return 2 * x.shape[0] * n * k


@_product_op(
    f"w4a16_mm(Tensor x, {_W4}, Tensor? bias=None, ScalarType? out_dtype=None, Tensor? residual=None, "
    "str? kernel_name=None) -> Tensor",
    check=check_w4a16_mm,
    size=lambda x, n, **others: (x.shape[0], n),
    cases=_W4A16_MM_CASES,
    flops=_w4_flops,
)
def _w4a16_mm(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    permutation: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    minimum: bool,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    kernel_name: str | None = None,
) -> Tensor:
    """`w4a16_mm` as a torch op."""
    weight = packed, scales, zeros, permutation, n, k, group_size, minimum
    return _w4_values(x, weight, bias, residual)


_w4a16_mm_out = torch.ops.cutegemm.w4a16_mm_out.default


def _parts(w: W4Weight) -> tuple[Any, ...]:
    return w.packed, w.scales, w.zeros, w.permutation, w.n, w.k, w.group_size, w.minimum


def w4a16_mm(
    x: Tensor,
    w: W4Weight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    residual: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """d = x @ dequantize_w4(w).t() + bias + residual, summed in float32 and rounded once: with a weight of four bits.

    x: (m, k), BF16 or FP16. The kernels read rows whose addresses are multiples of 16 bytes, without a stride along k;
    another x is copied first, by a small kernel, and so is x[:, w.permutation] of a weight with act-order.
    w: (n, k), from `quantize_w4`, `pack_w4` or a checkpoint (`from_gptq`, `from_awq`, `from_compressed_tensors`,
    `from_gguf`), with groups of every size, with zero points, minima or neither, and scales in every dtype. The product
    of x and codes less their zero point, which are exact in x's dtype, is summed in each group and then scaled:
        d[i, j] = sum over g of scale[j, g] * (x[i, g] @ (q[j, g] - zero[j, g])) + bias[j] + residual[i, j]
    and of a weight with minima scale[j, g] * (x[i, g] @ q[j, g]) + minimum[j, g] * sum(x[i, g]).
    For more than 16 tokens or so and where scales have x's dtype, values of w are first rounded to that dtype, as those
    of a weight in 16 bits are; and in BF16 a product of x and a value that is less than 2^-73 in size may count as 0.
    bias: (n,), residual: (m, n), of any strides: BF16, FP16 or FP32. out_dtype: BF16, FP16 or FP32; by default that of
    `out`, or of x. out: (m, n), written in place and returned; it may be the residual itself, and must else lie apart
    from what is read. m, n and k may be 0; with k = 0, d is the bias and the residual. kernel: as in `mm`.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    operands = (x, *_parts(w), bias, out_dtype, residual, kernel)
    if out is None:
        return _w4a16_mm(*operands)
    _w4a16_mm_out(out, *operands)
    return out


@_product_op(
    f"w4a16_mm_silu_and_mul(Tensor x, {_W4}, Tensor? bias=None, ScalarType? out_dtype=None, str? kernel_name=None)"
    " -> Tensor",
    check=check_w4a16_mm_silu_and_mul,
    size=lambda x, n, **others: (x.shape[0], n // 2),
    cases=_W4A16_MM_CASES[:2],
    flops=_w4_flops,
)
def _w4a16_mm_silu_and_mul(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    permutation: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    minimum: bool,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str | None = None,
) -> Tensor:
    """`w4a16_mm_silu_and_mul` as a torch op."""
    weight = packed, scales, zeros, permutation, n, k, group_size, minimum
    return _gated(_w4_values(x, weight, bias))


_w4a16_mm_silu_and_mul_out = torch.ops.cutegemm.w4a16_mm_silu_and_mul_out.default


def w4a16_mm_silu_and_mul(
    x: Tensor,
    w: W4Weight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    kernel: str | None = None,
) -> Tensor:
    """d = silu(g) * u, in float32 and rounded once, where [g, u] = w4a16_mm(x, w, bias) in float32.

    w's first n / 2 rows are those of the gates g, the others those of u, so n is even; silu(x) = x / (1 + exp(-x)).
    x, w, bias, out_dtype: as in `w4a16_mm`. out: (m, n / 2), written in place and returned. m, n and k may be 0; with
    k = 0, g and u are the bias. kernel: one that computes all of it, or "separate": one launch for the sums, and
    another.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    operands = (x, *_parts(w), bias, out_dtype, kernel)
    if out is None:
        return _w4a16_mm_silu_and_mul(*operands)
    _w4a16_mm_silu_and_mul_out(out, *operands)
    return out


_W8A16_MM_CASES: list[dict[str, Any]] = [
    {
        "x": Input((5, 96)),
        "w": Input((24, 96), torch.float8_e4m3fn),
        "scale": Input((24, 1), torch.float32, positive=True),
        "bias": Input((24,)),
    },
    {
        "x": Input((3, 130), torch.float16),
        "w": Input((40, 130), torch.int8, high=128),
        "scale": Input((1,), torch.float32, positive=True),
        "residual": Input((3, 40), torch.float16),
        "out_dtype": torch.float32,
    },
    {
        "x": Input((7, 272)),
        "w": Input((136, 272), torch.float8_e4m3fn),
        "scale": Input((2, 3), torch.float32, positive=True),
    },
]


def _w8_flops(x: Tensor, w: Tensor, **others: Any) -> int:
    return 2 * x.shape[0] * w.shape[0] * w.shape[1]


@_product_op(
    "w8a16_mm(Tensor x, Tensor w, Tensor scale, Tensor? bias=None, ScalarType? out_dtype=None, Tensor? residual=None, "
    "str? kernel_name=None) -> Tensor",
    check=check_w8a16_mm,
    size=lambda x, w, **others: (x.shape[0], w.shape[0]),
    cases=_W8A16_MM_CASES,
    flops=_w8_flops,
)
def _w8a16_mm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    kernel_name: str | None = None,
) -> Tensor:
    """`w8a16_mm` as a torch op."""
    n, k = w.shape
    added = _float32(bias, residual)
    if blocks_of(n, k, scale):
        scale = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        return EPILOGUES["residual"](x.float() @ (w.float() * scale).t(), *added)
    return weight_scaled(x.float() @ w.float().t(), scale.reshape(-1), *added)


_w8a16_mm_out = torch.ops.cutegemm.w8a16_mm_out.default


def w8a16_mm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    residual: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """d = x @ (scale * w).t() + bias + residual, summed in float32 and rounded once: with a weight of eight bits.

    x: as in `w4a16_mm`. w: (n, k), e4m3 or int8, as it is stored, with contiguous rows that may lie apart; those that
    begin at multiples of 16 bytes are read faster.
    scale: float32, dequantizing: one element ([], [1] or [1, 1]); (n,) or (n, 1), one for each row of w; or
    (ceil(n / 128), ceil(k / 128)), one for each 128 x 128 of w, as quantize_fp8 makes them with granularity "block". Of
    any strides. It is multiplied with sums: with those of all k, or of each 128 k.
    bias, residual, out_dtype, out, kernel: as in `w4a16_mm`. m, n and k may be 0.

    Raises ValueError or TypeError on a CPU, RuntimeError on CUDA, with the same sentences.
    """
    operands = (x, w, scale, bias, out_dtype, residual, kernel)
    if out is None:
        return _w8a16_mm(*operands)
    _w8a16_mm_out(out, *operands)
    return out
