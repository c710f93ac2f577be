// Scales for blocks of 128 k, of a row or a column of d or of 128 columns: FP32, or powers of two as E8M0 has them.
#pragma once
#include "kernel_abi.h"

namespace cutegemm {

inline bool is_scale(const cutegemm_vector& scale, int group) {
  return scale.data && (scale.dtype == CUTEGEMM_FP32 || scale.dtype == CUTEGEMM_E8M0) && scale.group == group;
}

__device__ __forceinline__ float power_of_two(uint32_t e8m0) {
  return __uint_as_float(e8m0 == 0 ? 1u << 22 : e8m0 == 255 ? 0x7fffffffu : e8m0 << 23);
}

__device__ __forceinline__ float load_scale(const cutegemm_vector& scale, int row, int block) {
  int64_t const i = row * scale.stride + block * scale.block_stride;
  if (scale.dtype == CUTEGEMM_FP32) return static_cast<const float*>(scale.data)[i];
  return power_of_two(static_cast<const uint8_t*>(scale.data)[i]);
}

}  // namespace cutegemm
