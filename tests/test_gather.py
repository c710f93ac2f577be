"""gather_columns against indexing, on every stride, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_gemm import views_of
from torch import Tensor

from cutegemm import gather_columns
from cutegemm.testing import make_operand

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 16), (5, 77), (33, 130), (70, 4104), (300, 9)]


def permutation_of(k: int, device: str) -> Tensor:
    return torch.randperm(k, generator=torch.Generator().manual_seed(k)).int().to(device)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_in_another_order(device: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    m, k = size
    x, permutation = make_operand(m, k, dtype, device=device), permutation_of(k, device)
    every_second = permutation.repeat_interleave(2)[::2]
    for name, view in views_of(x).items():
        for order in (None, permutation, every_second):
            got = gather_columns(view, order)
            assert (got.dtype, got.stride()) == (dtype, (-(-k // 8) * 8, 1)) and got.data_ptr() % 16 == 0
            assert torch.equal(got, x if order is None else x[:, order]), name


def test_a_row_that_all_share(device: str) -> None:
    x = make_operand(1, 77, device=device)
    assert torch.equal(gather_columns(x.expand(5, 77)), x.expand(5, 77))


@pytest.mark.parametrize("size", [(0, 8), (8, 0), (0, 0)])
def test_empty(device: str, size: tuple[int, int]) -> None:
    x = torch.empty(size, dtype=torch.bfloat16, device=device)
    for order in (None, permutation_of(size[1], device)):
        assert gather_columns(x, order).shape == size


@pytest.mark.gpu
def test_an_index_past_the_columns_gives_zero() -> None:
    x, permutation = make_operand(3, 40, device="cuda"), permutation_of(40, "cuda")
    permutation[3], permutation[39], permutation[20] = -1, 40, 2**31 - 1
    got = gather_columns(x, permutation)
    assert not got[:, [3, 20, 39]].any()
    right = (permutation >= 0) & (permutation < 40)
    assert torch.equal(got[:, right], x[:, permutation[right]])


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        ({"x": torch.ones(3, 4, 5).half()}, ValueError, "x is [3, 4, 5]; it must have two dimensions"),
        ({"x": torch.ones(3, 8)}, TypeError, "x is torch.float32; it must be torch.bfloat16 or torch.float16"),
        ({"permutation": torch.zeros(8).long()}, TypeError, "permutation is torch.int64; it must be torch.int32"),
        ({"permutation": torch.zeros(7).int()}, ValueError, "permutation is [7]; it must be [8], as a row of x"),
        ({"permutation": torch.zeros(8, 1).int()}, ValueError, "permutation is [8, 1]; it must be [8], as a row of x"),
    ],
)
def test_errors(device: str, arguments: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    made = {"x": torch.ones(3, 8).half()} | arguments
    with pytest.raises(
        RuntimeError if device == "cuda" else kind, match=f"^{re.escape(f'gather_columns: {sentence}')}$"
    ):
        gather_columns(**{name: x.to(device) for name, x in made.items()})
