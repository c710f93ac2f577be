// What becomes of a GEMM's sums in registers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace cutegemm {

__device__ __forceinline__ float silu(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + __expf(-x)));
  return x * inverse;
}

// Two results of 16 bits in a register.
template <bool kFp16>
__device__ __forceinline__ uint32_t rounded_pair(float a, float b) {
  if constexpr (kFp16) {
    __half2 const two = __floats2half2_rn(a, b);
    return reinterpret_cast<uint32_t const&>(two);
  } else {
    __nv_bfloat162 const two = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<uint32_t const&>(two);
  }
}

}  // namespace cutegemm
