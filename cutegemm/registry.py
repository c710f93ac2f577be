"""`@op`: one Python function is an op's schema, specification, CPU implementation and fake (meta) one.

A case, for tests and bench, is a dict of keyword arguments for the op in which `Input` describes the tensors:

    @op("silu_and_mul(Tensor x) -> Tensor", cases=[{"x": Input((7, 192))}, {"x": Input((4096, 8192))}])
    def silu_and_mul(x): ...

CUDA kernels come with the op library of the family, which is the last part of the defining module's name
(gemm, norm, rope). Nothing is loaded at import. Every op has a stub under the alias key
CompositeExplicitAutograd, which torch takes only while the op has no kernel of its own for the device. On the
first CUDA call of the family the stub loads the library, whose kernels then stand in front of it under the
CUDA key: from there on there is no Python between `torch.ops` and the kernels, and at no moment does another
thread find an op without a kernel.

The ops are for inference and have no derivative. They may be called with tensors that require grad, as
parameters do, but a backward pass through one gives no gradient: torch warns that "an autograd kernel was not
registered", and says that later releases will raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

F = TypeVar("F", bound=Callable[..., Any])

OPS: dict[str, Op] = {}

_LIBRARY = torch.library.Library("cutegemm", "FRAGMENT")
_CUDA = torch._C.DispatchKey.CUDA


@dataclass(frozen=True)
class Input:
    """A random tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    positive: bool = False  # uniform in [0.5, 1.5), as scales need it; otherwise floating point is normal
    high: int = 2  # integers are uniform in [0, high)
    transposed: bool = False  # stored with the last two dimensions swapped, as `weight.t()` is

    def make(self, generator: torch.Generator) -> Tensor:
        shape, device = self.shape, generator.device
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if not self.dtype.is_floating_point:
            x = torch.randint(self.high, shape, generator=generator, device=device)
        elif self.positive:
            x = torch.rand(shape, generator=generator, device=device) + 0.5
        else:
            x = torch.randn(shape, generator=generator, device=device)
        x = x.to(self.dtype)
        return x.transpose(-1, -2) if self.transposed else x


@dataclass(frozen=True)
class Op:
    name: str
    schema: str
    family: str
    reference: Callable[..., Any]
    call: torch._ops.OpOverload
    cases: tuple[Mapping[str, Any], ...]
    bytes: Callable[..., int]  # what the op must read and write, as a function of its arguments
    flops: Callable[..., int]

    def inputs(self, case: Mapping[str, Any], device: str = "cpu", seed: int = 0) -> dict[str, Any]:
        """The arguments that a case describes."""
        generator = torch.Generator(device).manual_seed(seed)
        return {name: v.make(generator) if isinstance(v, Input) else v for name, v in case.items()}


def nbytes(*values: Any) -> int:
    """Bytes of all tensors in values, which may be nested."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(values) if isinstance(t, Tensor))


def op(
    schema: str,
    *,
    cases: Iterable[Mapping[str, Any]] = (),
    fake: Callable[..., Any] | None = None,
    bytes: Callable[..., int] | None = None,
    flops: Callable[..., int] = lambda **arguments: 0,
) -> Callable[[F], F]:
    """Register the decorated function, the reference, as the torch op `cutegemm::<name>`, and return that op.

    What comes back is the `OpOverload`, so that a call meets no Python of ours, with the reference's doc and
    signature. An op that changes its arguments says so in the schema: `f(Tensor(a!) out, ...) -> ()`.

    fake: gives results of the right shape and dtype on meta tensors; needed where the reference reads values
    to know them.

    bytes, flops: functions of the op's arguments, which they get by name and all of them, with defaults filled in.
    By default bytes are those of each argument and each result, once, which is wrong for an op that uses a part of
    an argument or both reads and writes it.
    """

    def register(reference: F) -> F:
        name, family = schema.partition("(")[0], reference.__module__.rpartition(".")[2]
        if name in OPS:
            raise ValueError(f"op {name}: {OPS[name].family}.py has registered it; a name must be used once")
        _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        packet, _, overload = name.partition(".")
        call = getattr(getattr(torch.ops.cutegemm, packet), overload or "default")

        signature = inspect.signature(reference)
        arguments = [argument.name for argument in call._schema.arguments]
        if list(signature.parameters) != arguments:
            raise TypeError(f"op {name}: the reference takes {list(signature.parameters)}; it must take {arguments}")

        # torch runs the kernels of an op that has no derivative with autograd on. Without no_grad the
        # reference would be differentiated on a CPU, where CUDA kernels are not.
        run, run_fake = torch.no_grad()(reference), torch.no_grad()(fake or reference)
        _LIBRARY.impl(name, run, "CPU")
        _LIBRARY.impl(name, _stub(family, call), "CompositeExplicitAutograd", with_keyset=True)
        torch.library.register_fake(f"cutegemm::{name}", run_fake, lib=_LIBRARY)

        def bytes_once(**arguments: Any) -> int:
            arguments = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), arguments)
            return nbytes(arguments, run_fake(**arguments))

        def of_call(count: Callable[..., int]) -> Callable[..., int]:
            def of_arguments(*args: Any, **kwargs: Any) -> int:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                return count(**bound.arguments)

            return of_arguments

        costs = of_call(bytes or bytes_once), of_call(flops)
        OPS[name] = Op(name, schema, family, reference, call, tuple(cases), *costs)
        call.__doc__ = reference.__doc__
        call.__signature__ = signature
        return cast(F, call)

    return register


def _stub(family: str, call: torch._ops.OpOverload) -> Callable[..., Any]:
    cuda = torch._C.DispatchKeySet(_CUDA)

    def stub(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not keyset.has(_CUDA):
            key = keyset.highestPriorityTypeId()
            raise NotImplementedError(f"{call.name()} was called for {key}; tensors must be dense, on CUDA or CPU")
        from . import library

        library.load(family)  # once: threads that come meanwhile wait in it
        if not torch._C._dispatch_has_kernel_for_dispatch_key(call.name(), "CUDA"):
            raise RuntimeError(f"{call.name()}: the op library of {family} has no kernel for it")
        return call.redispatch(cuda, *args, **kwargs)

    return stub
