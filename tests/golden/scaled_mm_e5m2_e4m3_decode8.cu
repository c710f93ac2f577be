// Emitted by tools/emit.py from cutegemm/variants.py.
#include "decode.cuh"

// epilogues/scaled.py
struct Formula {
  struct Row {
    float scale_a;
  };
  static __device__ __forceinline__ Row row(const cutegemm_call& call, int m) {
    return {cutegemm::load(call.scale_a, m, 1.0f)};
  }
  struct Column {
    float scale_b, bias;
  };
  static __device__ __forceinline__ Column column(const cutegemm_call& call, int n) {
    return {cutegemm::load(call.scale_b, n, 1.0f), cutegemm::load(call.bias, n, 0.0f)};
  }
  static __device__ __forceinline__ float apply(float accum, const Row& row, const Column& column) {
    return ((row.scale_a * (column.scale_b * accum)) + column.bias);
  }
};

CUTEGEMM_KERNEL_FILE("scaled_mm_e5m2_e4m3_decode8", cutegemm::Decode<cutlass::float_e5m2_t, cutlass::float_e4m3_t, 8, Formula>)
