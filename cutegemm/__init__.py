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
from .gather import gather_columns
from .gemm import (
    mm,
    scaled_mm,
    scaled_mm_quant,
    scaled_mm_silu_and_mul,
    w4a16_mm,
    w4a16_mm_silu_and_mul,
    w8a16_mm,
)
from .kv_cache import concat_and_cache_mla_, gather_cache, qk_norm_rope_and_cache_, reshape_and_cache_, slots_of
from .library import chain_launches
from .norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_,
    fused_add_rms_norm_quant,
    fused_add_rms_norm_quant_,
    rms_norm,
    rms_norm_quant,
)
from .packing import (
    W4Weight,
    dequantize_w4,
    from_awq,
    from_compressed_tensors,
    from_gguf,
    from_gptq,
    pack_w4,
    quantize_w4,
    unpack_w4,
)
from .plan import explain
from .quantize import dequantize_fp8, dequantize_int8, quantize_fp8, quantize_int8, quantize_int8_asymmetric
from .rope import build_cos_sin_cache, qk_norm_rope_, rotary_embedding_

__version__ = "0.1.0"
__all__ = [
    "W4Weight",
    "activation",
    "activation_quant",
    "build_cos_sin_cache",
    "chain_launches",
    "concat_and_cache_mla_",
    "dequantize_fp8",
    "dequantize_int8",
    "dequantize_w4",
    "explain",
    "from_awq",
    "from_compressed_tensors",
    "from_gguf",
    "from_gptq",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_add_rms_norm_quant",
    "fused_add_rms_norm_quant_",
    "gather_cache",
    "gather_columns",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "mm",
    "mul_and_silu",
    "pack_w4",
    "qk_norm_rope_",
    "qk_norm_rope_and_cache_",
    "quantize_fp8",
    "quantize_int8",
    "quantize_int8_asymmetric",
    "quantize_w4",
    "relu2",
    "reshape_and_cache_",
    "rms_norm",
    "rms_norm_quant",
    "rotary_embedding_",
    "scaled_mm",
    "scaled_mm_quant",
    "scaled_mm_silu_and_mul",
    "silu_and_mul",
    "slots_of",
    "swigluoai_and_mul",
    "unpack_w4",
    "w4a16_mm",
    "w4a16_mm_silu_and_mul",
    "w8a16_mm",
]
