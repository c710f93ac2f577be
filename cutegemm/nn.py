"""Modules on the library's ops, for inference, and `quantize_`, which puts its Linear modules into a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

import cutegemm


class Quantized(NamedTuple):
    """Activations in e4m3, with a scale a token: what an Fp8Linear takes in place of a tensor."""

    codes: Tensor  # (..., k)
    scale: Tensor  # (..., 1)
    dtype: torch.dtype  # of what they stand for

    @classmethod
    def of(cls, x: Tensor) -> Quantized:
        return cls(*cutegemm.quantize_fp8(x, granularity="token"), x.dtype)


class RMSNorm(nn.Module):
    """`cutegemm.rms_norm` with a weight, for a Linear to follow: an Fp8Linear gets the norm in e4m3, from one pass."""

    def __init__(self, hidden: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden), requires_grad=False), eps

    def forward(
        self, x: Tensor, residual: Tensor | None = None, linear: nn.Module | None = None
    ) -> tuple[Tensor | Quantized, Tensor]:
        """The norm of x, or of x + residual, as `linear` takes it; and x, or x + residual."""
        arguments = self.weight, self.eps
        if isinstance(linear, Fp8Linear):
            if residual is None:
                return Quantized(*cutegemm.rms_norm_quant(x, *arguments), x.dtype), x
            q, scale, total = cutegemm.fused_add_rms_norm_quant(x, residual, *arguments)
            return Quantized(q, scale, x.dtype), total
        if residual is None:
            return cutegemm.rms_norm(x, *arguments), x
        return cutegemm.fused_add_rms_norm(x, residual, *arguments)


def silu_and_mul(x: Tensor, linear: nn.Module | None = None) -> Tensor | Quantized:
    """`cutegemm.silu_and_mul`, for a Linear to follow: for an Fp8Linear in e4m3, from one pass."""
    if isinstance(linear, Fp8Linear):
        return Quantized(*cutegemm.activation_quant(x), x.dtype)
    return cutegemm.silu_and_mul(x)


class Linear(nn.Module):
    """x @ weight.t() + bias through `cutegemm.mm`, with a BF16 weight. Forward only.

    Leading dimensions of x are flattened, which copies an x that has no view with two dimensions. The result
    has x's dtype unless `out_dtype` names another.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        out_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.out_dtype = in_features, out_features, out_dtype

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device), requires_grad=False)

        self.weight = empty(out_features, in_features)
        self.register_parameter("bias", empty(out_features) if bias else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, out_dtype: torch.dtype | None = None) -> Linear:
        """A BF16 copy of a torch Linear. What is BF16 already is shared: a tied weight stays tied."""
        has_bias = linear.bias is not None
        new = cls(linear.in_features, linear.out_features, has_bias, "meta", out_dtype)
        new.weight = _bf16(linear.weight)
        if has_bias:
            new.bias = _bf16(linear.bias)
        return new

    def forward(self, x: Tensor) -> Tensor:
        y = cutegemm.mm(_rows(x), self.weight.t(), self.bias, out_dtype=self.out_dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _bf16(parameter: Tensor) -> nn.Parameter:
    if isinstance(parameter, nn.Parameter) and parameter.dtype == torch.bfloat16:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)


class _Moved(nn.Module):
    """Whose buffers are only moved, where `.to(dtype)` would convert all that is floating point."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Moved:
        # It is shown them as integers.
        def move(tensor: Tensor) -> Tensor:
            if any(tensor is buffer for buffer in self.buffers(recurse=False)):
                integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
                return fn(tensor.view(integers)).view(tensor.dtype)
            return fn(tensor)

        return super()._apply(move, recurse)


class Fp8Linear(_Moved):
    """x @ weight.t() + bias through `cutegemm.scaled_mm`, with an e4m3 weight. Forward only.

    The weight has one scale an output channel; x is quantized at each call, with one scale a token, unless it comes
    so. Leading dimensions of x are flattened as in `Linear`, and the result has x's dtype.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: torch.device | str | None = None
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device=device)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", torch.empty(out_features, dtype=torch.float32, device=device))
        empty = torch.empty(out_features, dtype=torch.bfloat16, device=device) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty, requires_grad=False))

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Fp8Linear:
        """A quantized copy of a torch Linear. The best source is the weight in its original precision."""
        has_bias = linear.bias is not None
        new = cls(linear.in_features, linear.out_features, has_bias, "meta")
        new.weight, new.weight_scale = cutegemm.quantize_fp8(linear.weight.detach(), granularity="channel")
        if has_bias:
            new.bias = _bf16(linear.bias)
        return new

    def forward(self, x: Tensor | Quantized) -> Tensor:
        q, scale, dtype = Quantized.of(x) if isinstance(x, Tensor) else x
        y = cutegemm.scaled_mm(_rows(q), self.weight.t(), _rows(scale), self.weight_scale, self.bias, out_dtype=dtype)
        return y.reshape(*q.shape[:-1], self.out_features)

    extra_repr = Linear.extra_repr


class W4Linear(_Moved):
    """x @ weight.t() + bias through `cutegemm.w4a16_mm`, with a weight of four bits. Forward only.

    Leading dimensions of x are flattened as in `Linear`, and the result has x's dtype, BF16 or FP16. A state_dict has
    the tensors that the `W4Weight` has: it is for a module made with a weight of the same form.
    """

    def __init__(self, weight: cutegemm.W4Weight, bias: Tensor | None = None):
        super().__init__()
        self.in_features, self.out_features = weight.k, weight.n
        self.group_size, self.minimum = weight.group_size, weight.minimum
        for name in ("packed", "scales", "zeros", "permutation"):
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def from_linear(cls, linear: nn.Linear, group_size: int = 128) -> W4Linear:
        """A copy of a torch Linear, quantized symmetrically. The best source is the weight as it was trained."""
        weight = cutegemm.quantize_w4(linear.weight.detach(), group_size)
        return cls(weight, None if linear.bias is None else _bf16(linear.bias))

    def _product(self, op: Callable[..., Tensor], x: Tensor) -> Tensor:
        tensors = self.packed, self.scales, self.zeros, self.permutation
        how = self.out_features, self.in_features, self.group_size, self.minimum
        y = op(_rows(x), *tensors, *how, self.bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        return self._product(torch.ops.cutegemm.w4a16_mm, x)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu of the first half of what forward returns, times the second, in one launch."""
        return self._product(torch.ops.cutegemm.w4a16_mm_silu_and_mul, x)

    extra_repr = Linear.extra_repr


def quantize_(model: nn.Module, precision: str, skip: Collection[str] = ()) -> nn.Module:
    """Replace a model's torch Linear modules by `Linear` ("bf16"), `Fp8Linear` ("fp8") or `W4Linear` ("w4"); return it.

    Convert the model first, `model.to(torch.bfloat16)`: activations must be BF16. Modules whose dotted name
    matches a pattern in `skip` ("head", "layers.0.*") stay as they are.

    With "fp8" and "w4", a Linear that shares its weight with another module, as a head tied to the embedding does,
    becomes a BF16 `Linear`: the embedding keeps the 16-bit weight in memory anyway, and nothing after the
    head averages its errors out.
    """
    kinds: dict[str, type[Linear | Fp8Linear | W4Linear]] = {"bf16": Linear, "fp8": Fp8Linear, "w4": W4Linear}
    if precision not in kinds:
        raise ValueError(f"quantize_: precision is {precision!r}; it must be 'bf16', 'fp8' or 'w4'")
    if type(model) is nn.Linear:
        raise ValueError("quantize_: model is itself a Linear; it must be a module that has Linear modules in it")
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"quantize_: skip has {pattern!r}, which no module of the model is named; it must match one"
            )
    parameters = (p for module in model.modules() for p in module.parameters(recurse=False))
    uses: Counter[Tensor] = Counter(parameters)
    made: dict[nn.Linear, nn.Module] = {}  # a module that has two names is replaced by one
    for name, module in list(model.named_modules(remove_duplicate=False)):
        # A subclass of Linear may compute something else.
        if type(module) is not nn.Linear or any(fnmatchcase(name, pattern) for pattern in skip):
            continue
        if module not in made:
            kind = kinds[precision] if uses[module.weight] == 1 else Linear
            made[module] = kind.from_linear(module)
        model.set_submodule(name, made[module])
    return model
