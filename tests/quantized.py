"""What the tests of norm.py and activation.py share: how codes are asked for, and how calls are refused."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cutegemm
from cutegemm.quantize import quantize_fp8, quantize_int8
from cutegemm.testing import padded

E4M3 = torch.float8_e4m3fn


def given(x: Tensor, per: int | None = None, store: Callable[[Tensor], Tensor] = lambda scale: scale) -> Tensor:
    """A scale of each row of x or, with per, of each group of so many, all of them different."""
    groups = 1 if per is None else -(-x.shape[-1] // per)
    scale = torch.rand(math.prod(x.shape[:-1]), groups, generator=torch.Generator().manual_seed(5)) * 0.1 + 0.01
    return store(scale.to(x.device)).view(*x.shape[:-1], groups)


def columns(scale: Tensor) -> Tensor:
    """The scales of a group side by side."""
    return scale.t().contiguous().t()


def case_for(case: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """A case with its tensors on the device of x; what is callable makes one for x."""
    made = {name: value(x) if callable(value) else value for name, value in case.items()}
    return {name: value.to(x.device) if isinstance(value, Tensor) else value for name, value in made.items()}


def codes_of(normed: Tensor, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    case = {name: value for name, value in case.items() if name != "normed"}
    if case.pop("dtype", E4M3) == torch.int8:
        return quantize_int8(normed, case.get("scale"), case.get("granularity", "token"))
    return quantize_fp8(normed, **{"granularity": "token", **case})


QUANTIZED: dict[str, dict[str, Any]] = {
    "token": {},
    "token, bound": {"scale_ub": torch.tensor([2.0])},
    "token, powers of two": {"power_of_two_scale": True},
    "token, int8": {"dtype": torch.int8},
    "token, given": {"scale": given},
    "token, given with gaps": {"scale": lambda x: given(x, store=lambda scale: padded(scale, 3))},
    "token, given, int8": {"scale": given, "dtype": torch.int8},
    "tensor": {"granularity": "tensor", "scale": torch.tensor(0.03)},
    "tensor, int8": {"granularity": "tensor", "scale": torch.tensor([0.03]), "dtype": torch.int8},
    "group": {"granularity": "group"},
    "group of 64, rows": {"granularity": "group", "group_size": 64, "column_major_scale": False},
    "group, powers of two": {"granularity": "group", "power_of_two_scale": True},
    "group, bound": {"granularity": "group", "scale_ub": torch.tensor(1.5)},
    "group, given": {"granularity": "group", "scale": lambda x: given(x, 128)},
    "group, given in columns": {"granularity": "group", "scale": lambda x: given(x, 128, columns)},
    "group of 64, rows, given": {
        "granularity": "group",
        "group_size": 64,
        "column_major_scale": False,
        "scale": lambda x: given(x, 64),
    },
    "group of 64, rows, given in columns with gaps": {
        "granularity": "group",
        "group_size": 64,
        "column_major_scale": False,
        "scale": lambda x: given(x, 64, lambda scale: padded(scale.t(), scale.shape[0] + 3).t()),
    },
}


def refused(device: str, sentence: str, memory: Tensor, call: Callable[..., object], *args: Any, **named: Any) -> None:
    """The call refuses its arguments with this sentence, before it writes to memory."""
    before = memory.clone()
    with pytest.raises(RuntimeError if device == "cuda" else ValueError, match="^" + re.escape(sentence) + "$"):
        call(*args, **named)
    assert torch.equal(memory, before)


def check_sentence(device: str, op: str, arguments: dict[str, Any], sentence: str) -> None:
    """The op refuses the arguments with what begins with this sentence; a wrong dtype is a TypeError on a CPU."""
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    wrong_type = " is torch." in sentence and "float32 of" not in sentence
    kind = RuntimeError if device == "cuda" else TypeError if wrong_type else ValueError
    with pytest.raises(kind, match="^" + re.escape(f"{op}: {sentence}")):
        getattr(cutegemm, op)(**moved)


def check_device_sentence(device: str, op: str, arguments: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    """The op refuses an argument of this name and shape that is on another device than the others."""
    other, where, kind = ("cpu", "cuda:0", RuntimeError) if device == "cuda" else ("meta", "cpu", ValueError)
    moved = {**arguments, name: torch.ones(shape, device=other)}
    with pytest.raises(kind, match=f"^{op}: {name} is on {other}; it must be on the device of x, {where}"):
        getattr(cutegemm, op)(**moved)
