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
  struct Element {
  };
  static __device__ __forceinline__ Element element(const cutegemm_call&, int, int) {
    return {};
  }
  static __device__ __forceinline__ bool has_operands(const cutegemm_call& call) {
    return call.scale_a.data || call.scale_b.data || call.bias.data;
  }
  static __device__ __forceinline__ float apply(float accum, const Row& row, const Column& column, const Element&) {
    return ((row.scale_a * (column.scale_b * accum)) + column.bias);
  }
};

CUTEGEMM_KERNEL_FILE("scaled_mm_e4m3_e4m3_decode8", cutegemm::Decode<cutlass::float_e4m3_t, cutlass::float_e4m3_t, 8, 64, false, Formula>)
