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

// The scales of some rows, or columns: those of one block of k after the other.
template <int kCount>
struct ScaleRows {
  const char* at[kCount];
  int64_t block_bytes;
  bool is_float;

  __device__ __forceinline__ explicit ScaleRows(const cutegemm_vector& scale)
      : block_bytes(scale.dtype == CUTEGEMM_FP32 ? 4 * scale.block_stride : scale.block_stride),
        is_float(scale.dtype == CUTEGEMM_FP32) {}
  __device__ __forceinline__ void set(int i, const cutegemm_vector& scale, int row) {
    at[i] = static_cast<const char*>(scale.data) + row * (is_float ? 4 * scale.stride : scale.stride);
  }
  // Into L2, where also what is written yet ends up.
  __device__ __forceinline__ void prefetch(int i, int block) const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at[i] + block * block_bytes) : "memory");
  }
  // As they lie in memory: who loads ahead must not compute with them yet.
  __device__ __forceinline__ uint32_t bits(int i, int block) const {
    const char* const from = at[i] + block * block_bytes;
    if (is_float) return *reinterpret_cast<const uint32_t*>(from);
    return *reinterpret_cast<const uint8_t*>(from);
  }
  __device__ __forceinline__ float value(uint32_t bits) const {
    return is_float ? __uint_as_float(bits) : power_of_two(bits);
  }
  __device__ __forceinline__ float load(int i, int block) const { return value(bits(i, block)); }
};

}  // namespace cutegemm
