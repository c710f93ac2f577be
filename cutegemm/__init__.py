"""Kernels of an LLM decoder layer for NVIDIA Hopper, with a CPU reference for each. See README.md."""

from pathlib import Path

# In a checkout, epilogues/, csrc/ and tools/ lie beside this folder; in an installed package they are inside.
if not (Path(__path__[0]) / "epilogues").is_dir():
    __path__.append(str(Path(__path__[0]).parent))

from .gemm import mm, scaled_mm
from .plan import explain
from .quantize import dequantize_fp8, quantize_fp8

__version__ = "0.1.0"
__all__ = ["dequantize_fp8", "explain", "mm", "quantize_fp8", "scaled_mm"]
