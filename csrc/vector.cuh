// Reading and writing values whose type is known only at launch: scales, biases and the output of the hand-written
// kernels. One kernel file so serves every such type, where a template would need a file for each.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernel_abi.h"

namespace cutegemm {

__device__ __forceinline__ float load_as_float(const void* data, int dtype, int64_t i) {
  if (dtype == CUTEGEMM_FP32) return static_cast<const float*>(data)[i];
  if (dtype == CUTEGEMM_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  return __half2float(static_cast<const __half*>(data)[i]);
}

__device__ __forceinline__ float load(const cutegemm_vector& v, int i, float absent) {
  return v.data ? load_as_float(v.data, v.dtype, i * v.stride) : absent;
}
__device__ __forceinline__ int32_t load(const cutegemm_vector& v, int i, int32_t absent) {
  return v.data ? static_cast<const int32_t*>(v.data)[i * v.stride] : absent;
}

__device__ __forceinline__ float load(const cutegemm_matrix& x, int m, int n, float absent) {
  return x.data ? load_as_float(x.data, x.dtype, m * x.stride[0] + n * x.stride[1]) : absent;
}

__device__ __forceinline__ void store(float* to, float x) { *to = x; }
__device__ __forceinline__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
__device__ __forceinline__ void store(__half* to, float x) { *to = __float2half(x); }

// Calls f with data as a pointer of its type: one decision around a loop of stores.
template <class F>
__device__ __forceinline__ void with_float_pointer(void* data, int dtype, F&& f) {
  if (dtype == CUTEGEMM_FP32) {
    f(static_cast<float*>(data));
  } else if (dtype == CUTEGEMM_BF16) {
    f(static_cast<__nv_bfloat16*>(data));
  } else {
    f(static_cast<__half*>(data));
  }
}

__device__ __forceinline__ void store_from_float(void* data, int dtype, int64_t i, float x) {
  with_float_pointer(data, dtype, [&](auto* to) { store(to + i, x); });
}

}  // namespace cutegemm
