// CUTLASS's element types by the names of kernel_abi.h.
#pragma once
#include <cutlass/numeric_types.h>

#include <type_traits>

#include "kernel_abi.h"

namespace cutegemm {

template <class Element>
constexpr int32_t dtype_of() {
  if (std::is_same<Element, float>::value) return CUTEGEMM_FP32;
  if (std::is_same<Element, cutlass::bfloat16_t>::value) return CUTEGEMM_BF16;
  if (std::is_same<Element, cutlass::half_t>::value) return CUTEGEMM_FP16;
  if (std::is_same<Element, cutlass::float_e4m3_t>::value) return CUTEGEMM_E4M3;
  if (std::is_same<Element, cutlass::float_e5m2_t>::value) return CUTEGEMM_E5M2;
  if (std::is_same<Element, int8_t>::value) return CUTEGEMM_INT8;
  return CUTEGEMM_NONE;
}

}  // namespace cutegemm
