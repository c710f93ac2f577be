"""Kernels of an LLM decoder layer for NVIDIA Hopper, with a CPU reference for each. See README.md."""

from pathlib import Path

# In a checkout, epilogues/, csrc/ and tools/ lie beside this folder; in an installed package they are inside.
if not (Path(__path__[0]) / "epilogues").is_dir():
    __path__.append(str(Path(__path__[0]).parent))

from .activation import (
    activation,
    activation_quant,
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    gelu_quick,
    gelu_tanh_and_mul,
    mul_and_silu,
    relu2,
    silu_and_mul,
    swigluoai_and_mul,
)
from .gemm import mm, scaled_mm
from .library import chain_launches
from .norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_,
    fused_add_rms_norm_quant,
    fused_add_rms_norm_quant_,
    rms_norm,
    rms_norm_quant,
)
from .plan import explain
from .quantize import dequantize_fp8, dequantize_int8, quantize_fp8, quantize_int8, quantize_int8_asymmetric

__version__ = "0.1.0"
__all__ = [
    "activation",
    "activation_quant",
    "chain_launches",
    "dequantize_fp8",
    "dequantize_int8",
    "explain",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_add_rms_norm_quant",
    "fused_add_rms_norm_quant_",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "mm",
    "mul_and_silu",
    "quantize_fp8",
    "quantize_int8",
    "quantize_int8_asymmetric",
    "relu2",
    "rms_norm",
    "rms_norm_quant",
    "scaled_mm",
    "silu_and_mul",
    "swigluoai_and_mul",
]
