// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_sm80.cuh"

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

struct w4a16_mm_fp16_int4_group32_minimum_sm80_64x16 {
  using Element = __half;
  using Weight = cutegemm::Int4;
  using Formula = ::Formula;
  static constexpr int kRows = 64, kTokens = 16, kStep = 32;
  static constexpr bool kMinimum = true, kRounded = false;
};

CUTEGEMM_KERNEL_FILE("w4a16_mm_fp16_int4_group32_minimum_sm80_64x16", cutegemm::Sm80<w4a16_mm_fp16_int4_group32_minimum_sm80_64x16>)
