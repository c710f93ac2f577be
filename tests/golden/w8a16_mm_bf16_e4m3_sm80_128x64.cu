// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_sm80.cuh"

// epilogues/weight_scaled.py
struct Formula {
  struct Row {
  };
  static __device__ __forceinline__ Row row(const cutegemm_call&, int) {
    return {};
  }
  struct Column {
    float scale_b, bias;
  };
  static __device__ __forceinline__ Column column(const cutegemm_call& call, int n) {
    return {cutegemm::load(call.scale_b, n, 1.0f), cutegemm::load(call.bias, n, 0.0f)};
  }
  struct Element {
    float residual;
  };
  static __device__ __forceinline__ Element element(const cutegemm_call& call, int m, int n) {
    return {cutegemm::load(call.residual, m, n, 0.0f)};
  }
  static __device__ __forceinline__ bool has_operands(const cutegemm_call& call) {
    return call.scale_b.data || call.bias.data || call.residual.data;
  }
  static __device__ __forceinline__ float apply(float accum, const Row&, const Column& column, const Element& element) {
    return (((column.scale_b * accum) + column.bias) + element.residual);
  }
};

struct w8a16_mm_bf16_e4m3_sm80_128x64 {
  using Element = __nv_bfloat16;
  using Weight = cutegemm::E4m3;
  using Formula = ::Formula;
  static constexpr int kRows = 128, kTokens = 64, kStep = 128;
  static constexpr bool kMinimum = false, kRounded = false;
};

CUTEGEMM_KERNEL_FILE("w8a16_mm_bf16_e4m3_sm80_128x64", cutegemm::Sm80<w8a16_mm_bf16_e4m3_sm80_128x64>)
