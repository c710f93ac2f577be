// Emitted by tools/emit.py from cutegemm/variants.py.
#include "decode.cuh"

// epilogues/residual.py
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
    float residual;
  };
  static __device__ __forceinline__ Element element(const cutegemm_call& call, int m, int n) {
    return {cutegemm::load(call.residual, m, n, 0.0f)};
  }
  static __device__ __forceinline__ bool has_operands(const cutegemm_call& call) {
    return call.bias.data || call.residual.data;
  }
  static __device__ __forceinline__ float apply(float accum, const Row&, const Column& column, const Element& element) {
    return ((accum + column.bias) + element.residual);
  }
};

CUTEGEMM_KERNEL_FILE("scaled_mm_e4m3_e4m3_block_decode16", cutegemm::Decode<cutlass::float_e4m3_t, cutlass::float_e4m3_t, 16, 64, true, Formula>)
