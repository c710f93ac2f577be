// Emitted by tools/emit.py from cutegemm/variants.py.
#include "decode.cuh"

// epilogues/asymmetric.py
struct Formula {
  struct Row {
    float scale_a;
    int32_t zero_point_a;
  };
  static __device__ __forceinline__ Row row(const cutegemm_call& call, int m) {
    return {cutegemm::load(call.scale_a, m, 1.0f), cutegemm::load(call.zero_point_a, m, 0)};
  }
  struct Column {
    float scale_b, bias;
    int32_t sum_b;
  };
  static __device__ __forceinline__ Column column(const cutegemm_call& call, int n) {
    return {cutegemm::load(call.scale_b, n, 1.0f), cutegemm::load(call.bias, n, 0.0f), cutegemm::load(call.sum_b, n, 0)};
  }
  struct Element {
  };
  static __device__ __forceinline__ Element element(const cutegemm_call&, int, int) {
    return {};
  }
  static __device__ __forceinline__ bool has_operands(const cutegemm_call& call) {
    return call.scale_a.data || call.scale_b.data || call.bias.data || call.zero_point_a.data || call.sum_b.data;
  }
  static __device__ __forceinline__ float apply(int32_t accum, const Row& row, const Column& column, const Element&) {
    return ((row.scale_a * (column.scale_b * (accum - (row.zero_point_a * column.sum_b)))) + column.bias);
  }
};

CUTEGEMM_KERNEL_FILE("scaled_mm_int8_int8_decode16", cutegemm::Decode<int8_t, int8_t, 16, 64, false, Formula>)
