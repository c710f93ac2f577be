"""The mathematics of a GEMM's epilogue, one plain function each, written once.

The emitter traces a function into a CUTLASS EVT and into a CUDA expression; the reference calls the same function on
torch tensors. So the two cannot drift apart.

A traced function takes `accum` first and operands by name; it assigns its result to `D` and returns `D`. It has a
comment above it in place of a docstring, and lives in a file of its own: the tracer reads the source and takes nothing
else. `OPERANDS` says along which side of the output an operand runs, and what it is when a caller leaves it out. Types
are promoted as torch does it: what is made of integers alone is an integer (INT8's accum is one), the rest float32.
"""

from typing import NamedTuple

from .asymmetric import asymmetric
from .linear import linear
from .residual import residual
from .scaled import scaled
from .weight_scaled import weight_scaled

__all__ = ["EPILOGUES", "OPERANDS", "Operand", "asymmetric", "linear", "residual", "scaled", "weight_scaled"]


class Operand(NamedTuple):
    along: str  # "m" or "n", or "mn" for an operand of the output's shape
    absent: float | int  # of the operand's own type


OPERANDS = {
    "scale_a": Operand("m", 1.0),
    "scale_b": Operand("n", 1.0),
    "bias": Operand("n", 0.0),
    "residual": Operand("mn", 0.0),
    "zero_point_a": Operand("m", 0),
    "sum_b": Operand("n", 0),
}

EPILOGUES = {function.__name__: function for function in (asymmetric, linear, residual, scaled, weight_scaled)}
