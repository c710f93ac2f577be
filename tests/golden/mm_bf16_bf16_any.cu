// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_any.cuh"

// epilogues/linear.py
struct Formula {
  struct Row {
  };
  static __device__ __forceinline__ Row row(const cutegemm_call&, int) {
    return {};
  }
  struct Column {
    float bias;
  };
  static __device__ __forceinline__ Column column(const cutegemm_call& call, int n) {
    return {cutegemm::load(call.bias, n, 0.0f)};
  }
  struct Element {
  };
  static __device__ __forceinline__ Element element(const cutegemm_call&, int, int) {
    return {};
  }
  static __device__ __forceinline__ bool has_operands(const cutegemm_call& call) {
    return call.bias.data;
  }
  static __device__ __forceinline__ float apply(float accum, const Row&, const Column& column, const Element&) {
    return (accum + column.bias);
  }
};

CUTEGEMM_KERNEL_FILE("mm_bf16_bf16_any", cutegemm::any::AnyShape<__nv_bfloat16, false, Formula>)
