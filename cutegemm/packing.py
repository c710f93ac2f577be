"""Weights of four bits: into the one layout that all W4A16 kernels read, and back, in plain torch on any device.

Packing works on a few million elements at a time, so besides the result it needs little but the codes, a byte each.
What is wrong with a call is a TypeError or ValueError, also if it is a value: on a GPU the host waits to see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .checks import FLOATS, check_device, check_dtype

Dtypes = tuple[torch.dtype, ...]
GROUP_SIZES = (32, 64, 128, 256)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SYMMETRIC_ZERO = 8  # what codes without zero points are relative to, so that they stand for -8 to 7
LARGEST_SCALE = 2**47
BLOCK = 64  # n and k are padded to multiples of it: the rows of a wgmma, and the columns of a lane's 16 bytes
SLAB = 1 << 22  # elements that are worked on at a time


@dataclass(frozen=True, eq=False)
class W4Weight:
    """A weight (n, k) of codes q from 0 to 15, with a scale s and perhaps a zero z for each group of a row. Its values:

      (q - 8) * s   without zeros
      (q - z) * s   with zero points, whole numbers from 0 to 16
      q * s + z     with minimum

    A group is group_size columns side by side; the last one may be shorter.

    packed: int32 (n' / 16, k' / 64, 32, 4), where n' and k' are n and k rounded up to multiples of 64. An int32 is what
    a lane holds of 16 rows x 16 columns. Lane 4 * g + t has

      in the bits from   0     4     8     12    16    20    24    28
      the row g +        0     8     0     8     0     8     0     8
      the column 2t +    0     0     8     8     1     1     9     9

    These are its elements of A in mma.m16n8k16, and also in a wgmma with A in registers, where each of the four warps
    has 16 rows in this way (PTX ISA, register fragments of both). So one packed weight serves kernels of either kind,
    and those without tensor cores. A lane's four int32, of four neighbouring tiles, are one load of 16 bytes, and a
    warp's are 512 bytes in a row. `(word >> 4 * i) & 0x000f000f` is the pair of codes of A's register i, neighbours
    along k, each in the half of a register in which its 16-bit value has to be.

    scales: FP16, BF16 or FP32 (n' / 16, groups, 16): a tile's 16 scales of a group side by side, each less than 2^47 in
    size (kernels in BF16 multiply them by 2^80 on the way). zeros: the same, or None. permutation: int32 (k,), which
    column is at each place along k, or None if each is at its own. A product with x takes x[..., permutation]. It is
    for GPTQ's act-order, where the columns of a group are not neighbours.

    Padding: rows past n have scale 0 and zero 0, so their values are 0. Columns past k belong to the last group, and
    what is multiplied with them must be 0; their code is the one whose value is nearest to 0 there (8; z, or 15 if z is
    16; the first of the least |q * s + z|).
    """

    LAYOUT_VERSION: ClassVar[int] = 1

    packed: Tensor = field(repr=False)
    scales: Tensor = field(repr=False)
    zeros: Tensor | None = field(repr=False)
    permutation: Tensor | None = field(repr=False)
    n: int
    k: int
    group_size: int
    minimum: bool = False

    def __post_init__(self) -> None:
        size = check_packed("W4Weight", *(getattr(self, each.name) for each in fields(self)))
        object.__setattr__(self, "group_size", size)

    def _tensors(self) -> dict[str, Tensor]:
        names = ("packed", "scales", "zeros", "permutation")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def g_idx(self) -> Tensor | None:
        """With a permutation, the group of each column, int32 (k,), as pack_w4 takes it."""
        if self.permutation is None:
            return None
        group = _columns(self) // self.group_size
        return torch.empty_like(group).scatter_(0, self.permutation.long(), group)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device | str) -> W4Weight:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors there are, and meta: int64 (5,), the layout's version, n, k, group_size and minimum."""
        meta = [self.LAYOUT_VERSION, self.n, self.k, self.group_size, int(self.minimum)]
        return {**self._tensors(), "meta": torch.tensor(meta)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> W4Weight:
        """What state_dict gave. Another layout, and tensors that don't fit together, are refused."""
        op, optional = "W4Weight.from_state_dict", ("zeros", "permutation")
        if not {"packed", "scales", "meta"} <= set(state) <= {"packed", "scales", "meta", *optional}:
            must = "it must have packed, scales and meta, and may have zeros and permutation"
            raise ValueError(f"{op}: state has {', '.join(state) or 'nothing'}; {must}")
        _check(op, "meta", state["meta"], (torch.int64,), (5,))
        version, n, k, group_size, minimum = state["meta"].tolist()
        if version != cls.LAYOUT_VERSION:
            raise ValueError(f"{op}: the layout version is {version}; it must be {cls.LAYOUT_VERSION}: pack it again")
        zeros, permutation = (state.get(name) for name in optional)
        w = cls(state["packed"], state["scales"], zeros, permutation, n, k, group_size, bool(minimum))
        if w.permutation is not None and not torch.equal(w.permutation.sort().values, _columns(w)):
            raise ValueError(f"{op}: permutation leaves a column out; it must hold each of 0 to {k - 1} once")
        return w


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _columns(w: W4Weight) -> Tensor:
    return torch.arange(w.k, dtype=torch.int32, device=w.packed.device)


# Checks


def _check(
    op: str, name: str, x: Tensor | None, dtypes: Dtypes, shape: tuple[int, ...] | None = None, why: str = ""
) -> None:
    """shape: by default that of any matrix. why: what it follows from."""
    if x is None:
        raise ValueError(f"{op}: {name} is None; it must be given")
    check_dtype(op, name, x.dtype, dtypes)
    if shape is None and x.dim() != 2:
        raise ValueError(f"{op}: {name} is {list(x.shape)}; it must have two dimensions")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{op}: {name} is {list(x.shape)}; {why}it must be {list(shape)}")


def check_packed(
    op: str,
    packed: Any,
    scales: Any,
    zeros: Any,
    permutation: Any,
    n: int,
    k: int,
    group_size: int,
    minimum: bool,
) -> int:
    """Raises what is wrong with the parts of a W4Weight, of which tensors may also be descriptions; returns its group
    size, of -1 what it stands for."""
    if n < 0:
        raise ValueError(f"{op}: n is {n}; it must be 0 or more")
    tiles = _padded(n) // 16
    size, groups, _ = grouping(op, group_size, k)
    _check(op, "packed", packed, (torch.int32,), (tiles, _padded(k) // BLOCK, 32, 4))
    _check(op, "scales", scales, FLOATS, (tiles, groups, 16))
    if zeros is not None or minimum:
        _check(op, "zeros", zeros, (scales.dtype,), (tiles, groups, 16))
    if permutation is not None:
        _check(op, "permutation", permutation, (torch.int32,), (k,))
    tensors = {"packed": packed, "scales": scales, "zeros": zeros, "permutation": permutation}
    _check_devices(op, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} has the strides {list(tensor.stride())}; it must be contiguous")
    return size


def _check_devices(op: str, **tensors: Tensor | None) -> None:
    (first, of), *rest = tensors.items()
    for name, x in rest:
        if x is not None and of is not None:
            check_device(op, name, x, of, first)


def _check_values(op: str, name: str, x: Tensor, largest: int) -> None:
    """Whether all are whole numbers from 0 to `largest`."""
    low, high = x.aminmax() if x.numel() else (0, 0)
    if low >= 0 and high <= largest and (not x.is_floating_point() or torch.equal(x, x.round())):
        return
    wrong = x[~((x >= 0) & (x <= largest) & (x == x.round()))][0].item()
    raise ValueError(f"{op}: {name} holds {wrong:g}; it must hold whole numbers from 0 to {largest}")


def _check_size_of(op: str, scales: Tensor) -> None:
    too_large = scales.isfinite() & (scales.abs() >= LARGEST_SCALE)
    if too_large.any():
        raise ValueError(f"{op}: scales holds {scales[too_large][0]:g}; it must hold less than 2**47 in size")


def grouping(op: str, group_size: int, k: int) -> tuple[int, int, str]:
    """group_size, of -1 what it stands for; how many groups there are; and that as the reason for a shape."""
    size = max(k, 1) if group_size == -1 else group_size
    if size not in (*GROUP_SIZES, max(k, 1)):
        raise ValueError(f"{op}: group_size is {group_size}; it must be 32, 64, 128, 256 or -1, all of k, which is {k}")
    return size, -(-k // size), f"with a k of {k} in groups of {size} "


def _permutation(op: str, name: str, g_idx: Tensor | None, k: int, group_size: int) -> Tensor | None:
    """int32 (k,): the columns by their groups, and those of a group in their order. None if they are so already."""
    if g_idx is None:
        return None
    _check(op, name, g_idx, INTEGERS, (k,))
    in_order = torch.arange(k, device=g_idx.device) // group_size
    if torch.equal(g_idx.long(), in_order):
        return None
    wanted = in_order.bincount()
    _check_values(op, name, g_idx, len(wanted) - 1)
    sizes = g_idx.long().bincount(minlength=len(wanted))
    if wrong := (sizes != wanted).nonzero().flatten().tolist():
        has, must = sizes[wrong[0]], f"in groups of {group_size} it must have {wanted[wrong[0]]}"
        raise ValueError(f"{op}: {name} has {has} of {k} columns in group {wrong[0]}; {must}")
    return g_idx.argsort(stable=True).int()


# The layout


def _slabs(rows: int, columns: int) -> Iterator[slice]:
    """The rows in parts of about SLAB elements, all but the last of whole blocks."""
    step = max(1, SLAB // max(columns, 1) // BLOCK) * BLOCK
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _fragments(codes: Tensor) -> Tensor:
    """uint8 (rows, columns), multiples of 16 and 64, as (rows / 16, columns / 64, 32, 4) of `packed`."""
    tiles, loads = codes.shape[0] // 16, codes.shape[1] // BLOCK
    # tile, row half, g, load, tile of a load, column half, t, column of a pair
    parts = codes.view(tiles, 2, 8, loads, 4, 2, 4, 2)
    both = parts[:, 0] | parts[:, 1] << 4
    # Bytes of an int32 from its lowest: column and column + 8 of a pair's first, then of its second.
    return both.permute(0, 2, 1, 5, 3, 6, 4).reshape(tiles, loads, 32, 16).view(torch.int32)


def _codes(packed: Tensor) -> Tensor:
    """The inverse of _fragments."""
    tiles, loads = packed.shape[:2]
    both = packed.view(torch.uint8).view(tiles, loads, 8, 4, 4, 2, 2).permute(0, 2, 1, 4, 6, 3, 5)
    return torch.stack((both & 15, both >> 4), 1).view(tiles * 16, loads * BLOCK)


def _by_tile(of_groups: Tensor, n: int) -> Tensor:
    """(n, groups) as (n' / 16, groups, 16), with 0 in the rows past n."""
    tiles = functional.pad(of_groups, (0, 0, 0, _padded(n) - n)).unflatten(0, (-1, 16))
    return tiles.transpose(1, 2).contiguous()


def _by_row(of_groups: Tensor, n: int) -> Tensor:
    """The inverse of _by_tile."""
    return of_groups.transpose(1, 2).flatten(0, 1)[:n].contiguous()


def _past_k(scale: Tensor, zero: Tensor, minimum: bool) -> Tensor:
    """(rows, 1): the code of columns past k, as W4Weight says, from what the last group has, (rows, 1)."""
    if not minimum:
        return zero.clamp_max(15)
    codes = torch.arange(16, device=scale.device)
    return (codes * scale.float() + zero.float()).abs().argmin(-1, keepdim=True)


@torch.no_grad()
def _pack(
    op: str,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    permutation: Tensor | None = None,
    minimum: bool = False,
) -> W4Weight:
    """q (n, k), scales and zeros (n, groups) of one dtype; all checked but the values of q and scales."""
    _check_size_of(op, scales)
    n, k = q.shape
    tiles, k_padded = _padded(n) // 16, _padded(k)
    packed = torch.empty(tiles, k_padded // BLOCK, 32, 4, dtype=torch.int32, device=q.device)
    padding = SYMMETRIC_ZERO if zeros is None else 0
    for rows in _slabs(n, k_padded):
        codes = q[rows]
        _check_values(op, "q", codes, 15)
        count = len(codes)
        slab = torch.full((_padded(count), k_padded), padding, dtype=torch.uint8, device=q.device)
        slab[:count, :k] = codes if permutation is None else codes.index_select(1, permutation)
        if zeros is not None and k_padded > k:
            slab[:count, k:] = _past_k(scales[rows, -1:], zeros[rows, -1:], minimum)
        packed[rows.start // 16 :][: len(slab) // 16] = _fragments(slab)
    zeros = None if zeros is None else _by_tile(zeros, n)
    return W4Weight(packed, _by_tile(scales, n), zeros, permutation, n, k, group_size, minimum)


def pack_w4(
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group_size: int = 128,
    *,
    g_idx: Tensor | None = None,
    minimum: bool = False,
) -> W4Weight:
    """Pack codes q (n, k), integers from 0 to 15; W4Weight says what they stand for.

    scales: FP16, BF16 or FP32 (n, ceil(k / group_size)), kept as they are. zeros: of that shape; whole numbers from 0
    to 16 in any dtype, kept in that of scales, which has them all; with minimum any numbers in the dtype of scales.
    group_size: 32, 64, 128, 256, or -1 for all of k. If it doesn't divide k, the last group is short. g_idx: integers
    (k,), the group of each column, where a group's columns are not neighbours. It must fill every group.
    """
    op = "pack_w4"
    _check(op, "q", q, INTEGERS)
    n, k = q.shape
    group_size, groups, why = grouping(op, group_size, k)
    _check(op, "scales", scales, FLOATS, (n, groups), why)
    if zeros is not None or minimum:
        _check(op, "zeros", zeros, (scales.dtype,) if minimum else (*INTEGERS, *FLOATS), (n, groups), why)
    _check_devices(op, q=q, scales=scales, zeros=zeros, g_idx=g_idx)
    if zeros is not None and not minimum:
        _check_values(op, "zeros", zeros, 16)
        zeros = zeros.to(scales.dtype)
    return _pack(op, q, scales, zeros, group_size, _permutation(op, "g_idx", g_idx, k, group_size), minimum)


def unpack_w4(w: W4Weight) -> tuple[Tensor, Tensor, Tensor | None]:
    """(q, scales, zeros) as pack_w4 took them: uint8 (n, k), and (n, groups) in the dtype of scales.

    With w.group_size, w.g_idx and w.minimum, pack_w4 makes the same bits of them again.
    """
    q = torch.empty(w.n, w.k, dtype=torch.uint8, device=w.packed.device)
    inverse = None if w.permutation is None else w.permutation.argsort()
    for rows in _slabs(w.n, w.k):
        codes = _codes(w.packed[rows.start // 16 : _padded(rows.stop) // 16])[: rows.stop - rows.start, : w.k]
        q[rows] = codes if inverse is None else codes.index_select(1, inverse)
    return q, _by_row(w.scales, w.n), None if w.zeros is None else _by_row(w.zeros, w.n)


def dequantize_w4(w: W4Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values (n, k), computed in float32, or in float64 if dtype is that, and then rounded to dtype."""
    check_dtype("dequantize_w4", "dtype", dtype, (*FLOATS, torch.float64))
    wide = torch.promote_types(dtype, torch.float32)
    q, scales, zeros = unpack_w4(w)
    if zeros is None:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    group = _columns(w) // w.group_size if w.g_idx is None else w.g_idx
    out = torch.empty(w.n, w.k, dtype=dtype, device=q.device)
    for rows in _slabs(w.n, w.k):
        s, z = (of_groups[rows].to(wide).index_select(1, group) for of_groups in (scales, zeros))
        out[rows] = q[rows] * s + z if w.minimum else (q[rows] - z) * s
    return out


@torch.no_grad()
def quantize_w4(
    weight: Tensor, group_size: int = 128, *, symmetric: bool = True, dtype: torch.dtype | None = None
) -> W4Weight:
    """Quantize a weight (n, k) of BF16, FP16 or FP32 to the nearest codes. dtype: that of scales, weight's by default.

    With low = min(0, least) and high = max(0, largest value) of a group, symmetric is (q - 8) * s with

      s = max(-low / 8, high / 7.5)    if -low >= high
      s = -max(high / 8, -low / 7.5)   otherwise

    so the end that is farther from 0 is not past the code 0, the other at most half a step past 15, and no value more
    than half a step off. Of normal weights the squared error is 0.78 times that of s = amax / 7. Not symmetric is
    (q - z) * s with s = (high - low) / 15 and z = -low / s, rounded.

    Codes are chosen for s as dtype has it. Where that is 0, s becomes 1 and all of the group is 0. Weights that are not
    finite, or whose s is not finite in dtype, are refused.
    """
    op = "quantize_w4"
    _check(op, "weight", weight, FLOATS)
    check_dtype(op, "dtype", dtype := dtype or weight.dtype, FLOATS)
    n, k = weight.shape
    group_size, groups, _ = grouping(op, group_size, k)
    q = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=dtype, device=weight.device)
    zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    for rows in _slabs(n, k):
        x = functional.pad(weight[rows].float(), (0, groups * group_size - k)).unflatten(1, (groups, group_size))
        if not x.isfinite().all():
            raise ValueError(f"{op}: weight holds an infinity or a NaN; it must be finite")
        low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
        if symmetric:
            s = torch.where(-low >= high, torch.maximum(-low / 8, high / 7.5), -torch.maximum(high / 8, -low / 7.5))
        else:
            s = (high - low) / 15
        scales[rows] = s
        if not scales[rows].isfinite().all():
            largest = s.abs().max().item()
            raise ValueError(f"{op}: dtype is {dtype}; it must be one in which a scale of {largest:g} is finite")
        scales[rows] += scales[rows] == 0
        s = scales[rows].float()
        if not symmetric:
            zeros[rows] = (-low / s).round().clamp(0, 15)
        codes = (x / s[..., None]).round() + zeros[rows].float()[..., None]
        q[rows] = codes.clamp(0, 15).flatten(1)[:, :k].to(torch.uint8)
    return _pack(op, q, scales, None if symmetric else zeros, group_size)


# Checkpoints


def _copied(x: Tensor) -> Tensor:
    """Ready to be seen in another dtype: of any x, also at an odd address, with no stride but that of its shape."""
    return x.clone(memory_format=torch.contiguous_format)


def _nibbles(words: Tensor) -> Tensor:
    """int32 (..., w) as uint8 (..., 8 * w): each one's eight nibbles, lowest first."""
    both = _copied(words).view(torch.uint8)
    return torch.stack((both & 15, both >> 4), -1).flatten(-2)


def _zeros(zeros: Tensor, scales: Tensor) -> Tensor | None:
    """In the dtype of scales; None if all are 8, as in the checkpoint of a symmetric quantization."""
    return None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros.to(scales.dtype)


def _check_along_n(op: str, qweight: Tensor, scales: Tensor, qzeros: Tensor, n: int, k: int, group_size: int) -> int:
    """Of scales (groups, n) and qzeros (groups, n / 8), which GPTQ and AWQ have; the group size."""
    group_size, groups, why = grouping(op, group_size, k)
    _check(op, "scales", scales, FLOATS, (groups, n), why)
    _check(op, "qzeros", qzeros, (torch.int32,), (groups, -(-n // 8)), why)
    _check_devices(op, qweight=qweight, scales=scales, qzeros=qzeros)
    return group_size


def from_gptq(
    qweight: Tensor, scales: Tensor, qzeros: Tensor, g_idx: Tensor | None = None, *, group_size: int, version: int
) -> W4Weight:
    """The weight of a GPTQ checkpoint of four bits (AutoGPTQ and GPTQModel, QuantLinear.pack).

    qweight: int32 (k / 8, n), eight codes along k each, lowest first. scales: (groups, n). qzeros: int32
    (groups, n / 8), eight zero points along n each, lowest first; if all are 8, they are left out. g_idx: (k,), the
    group of each column, which act-order mixes. group_size: the config's, with -1 for all of k.

    version: 1, in configs "gptq", has zero points less one in qzeros, where a 15 is the zero point 16, as AutoGPTQ
    dequantizes; 2, "gptq_v2", has them as they are. A symmetric checkpoint of version 1 has 7 there and one of version
    2 has 8; some of version 2 are called "gptq" (vLLM, pull request 38966).
    """
    op = "from_gptq"
    if version not in (1, 2):
        raise ValueError(f"{op}: version is {version}; it must be 1 or 2")
    _check(op, "qweight", qweight, (torch.int32,))
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    group_size = _check_along_n(op, qweight, scales, qzeros, n, k, group_size)
    _check_devices(op, qweight=qweight, g_idx=g_idx)
    permutation = _permutation(op, "g_idx", g_idx, k, group_size)
    zeros = _zeros(_nibbles(qzeros)[:, :n].t() + (2 - version), scales)
    return _pack(op, _nibbles(qweight.t()), scales.t(), zeros, group_size, permutation)


def _awq_rows(words: Tensor) -> Tensor:
    """int32 (k, n / 8) as uint8 (n, k)."""
    both = _copied(words.t()).view(torch.uint8).unflatten(1, (-1, 4))
    rows = torch.empty(len(both), 8, len(words), dtype=torch.uint8, device=words.device)
    for nibble, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        rows[:, row] = both[..., nibble // 2] >> 4 * (nibble % 2) & 15
    return rows.flatten(0, 1)


def from_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor, *, group_size: int) -> W4Weight:
    """The weight of an AWQ checkpoint of four bits in the version "gemm" (AutoAWQ, WQLinear_GEMM).

    qweight: int32 (k, n / 8), eight of n each, lowest first in the order 0, 2, 4, 6, 1, 3, 5, 7. scales: (groups, n).
    qzeros: int32 (groups, n / 8), zero points in the same order; if all are 8, they are left out. group_size: the
    config's, with -1 for all of k.
    """
    op = "from_awq"
    _check(op, "qweight", qweight, (torch.int32,))
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    group_size = _check_along_n(op, qweight, scales, qzeros, n, k, group_size)
    zeros = _zeros(_awq_rows(qzeros), scales)
    return _pack(op, _awq_rows(qweight), scales.t(), zeros, group_size)


def from_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Any,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    group_size: int | None = None,
) -> W4Weight:
    """The weight of a checkpoint in compressed-tensors' format "pack-quantized" (its PackedQuantizationCompressor).

    weight_packed: int32 (n, ceil(k / 8)), eight codes along k each, lowest first; a code is the signed value plus 8.
    weight_scale: (n, groups). weight_shape: n and k. weight_zero_point: int32 (ceil(n / 8), groups), packed as codes
    are but along n; if all are 8, which is 0 without the offset, they are left out. weight_g_idx: (k,), the group of
    each column; -1 is for one that was never set, and then groups are neighbours. group_size: the config's, with -1
    for the strategy "channel"; by default k / groups.
    """
    op = "from_compressed_tensors"
    _check(op, "weight_packed", weight_packed, (torch.int32,))
    n, k = (int(size) for size in weight_shape)
    _check(op, "weight_packed", weight_packed, (torch.int32,), (n, -(-k // 8)), f"for a weight of [{n}, {k}] ")
    _check(op, "weight_scale", weight_scale, FLOATS)
    if group_size is None:
        group_size = k // max(weight_scale.shape[1], 1) or -1
    group_size, groups, why = grouping(op, group_size, k)
    _check(op, "weight_scale", weight_scale, FLOATS, (n, groups), why)
    optional = {"weight_zero_point": weight_zero_point, "weight_g_idx": weight_g_idx}
    _check_devices(op, weight_packed=weight_packed, weight_scale=weight_scale, **optional)
    zeros = None
    if weight_zero_point is not None:
        _check(op, "weight_zero_point", weight_zero_point, (torch.int32,), (-(-n // 8), groups), why)
        zeros = _zeros(_nibbles(weight_zero_point.t())[:, :n].t(), weight_scale)
    if weight_g_idx is not None and bool((weight_g_idx == -1).any()):
        weight_g_idx = None
    permutation = _permutation(op, "weight_g_idx", weight_g_idx, k, group_size)
    return _pack(op, _nibbles(weight_packed)[:, :k], weight_scale, zeros, group_size, permutation)


def from_gguf(data: Tensor, quantization: Any, shape: Any) -> W4Weight:
    """The weight of a tensor of GGUF's type Q4_0 or Q4_1 (ggml, block_q4_0 and block_q4_1 in ggml-common.h).

    data: uint8 (n, bytes of a row), as a GGUFReader has it: blocks of 32 columns, each with d in FP16, in Q4_1 also m
    in FP16, and 16 bytes, whose low nibbles are the first 16 codes and whose high ones are the last 16. Their values
    are (q - 8) * d in Q4_0 and q * d + m in Q4_1. quantization: "Q4_0", "Q4_1", or gguf's constant of that name.
    shape: n and k, which the file has the other way round.
    """
    op, name = "from_gguf", getattr(quantization, "name", quantization)
    _check(op, "data", data, (torch.uint8,))
    n, k = (int(size) for size in shape)
    if name not in ("Q4_0", "Q4_1"):
        raise ValueError(f"{op}: quantization is {name}; it must be Q4_0 or Q4_1")
    if k % 32:
        raise ValueError(f"{op}: shape is [{n}, {k}]; k must be a multiple of 32, the columns of a block")
    head = 2 if name == "Q4_0" else 4
    _check(op, "data", data, (torch.uint8,), (n, k // 32 * (head + 16)), f"for {name} of [{n}, {k}] ")
    blocks = data.unflatten(1, (k // 32, head + 16))
    numbers = _copied(blocks[..., :head]).view(torch.float16)
    q = torch.cat((blocks[..., head:] & 15, blocks[..., head:] >> 4), -1).flatten(1)
    minima = numbers[..., 1] if name == "Q4_1" else None
    return _pack(op, q, numbers[..., 0], minima, 32, minimum=minima is not None)
