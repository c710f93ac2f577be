// Emitted by tools/emit.py from cutegemm/variants.py.
#include "decode.cuh"

// epilogues/linear.py
struct Formula {
  struct Row {
  };
  static __device__ __forceinline__ Row row(const cutegemm_call& call, int m) {
    return {};
  }
  struct Column {
    float bias;
  };
  static __device__ __forceinline__ Column column(const cutegemm_call& call, int n) {
    return {cutegemm::load(call.bias, n, 0.0f)};
  }
  static __device__ __forceinline__ float apply(float accum, const Row& row, const Column& column) {
    return (accum + column.bias);
  }
};

CUTEGEMM_KERNEL_FILE("mm_bf16_bf16_decode8", cutegemm::Decode<cutlass::bfloat16_t, cutlass::bfloat16_t, 8, Formula>)
