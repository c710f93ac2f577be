// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_blockwise.cuh"

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

struct scaled_mm_e4m3_e4m3_block_128x128x128_2x1 {
  using Formula = ::Formula;
  static constexpr int kM = 128, kRowsB = 128, kClusterM = 2, kClusterN = 1;
  static constexpr bool kColumns = false, kGated = false, kSplits = false, kQuantizes = true;
};

CUTEGEMM_KERNEL_FILE("scaled_mm_e4m3_e4m3_block_128x128x128_2x1", cutegemm::Blockwise<scaled_mm_e4m3_e4m3_block_128x128x128_2x1>)
