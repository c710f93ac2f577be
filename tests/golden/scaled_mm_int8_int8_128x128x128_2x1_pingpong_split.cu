// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_128, cute::_128, cute::_128>;
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

using scaled_mm_int8_int8_128x128x128_2x1_pingpong_split_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_128, cute::_128, cute::_128>,
    cute::Shape<cute::_2, cute::_1, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    int32_t, float,
    void, cutlass::layout::RowMajor, 0,
    int32_t, cutlass::layout::RowMajor, 4,
    cutlass::epilogue::TmaWarpSpecialized,
    cutlass::epilogue::fusion::Sm90EVT<cutlass::epilogue::fusion::Sm90Compute<cutlass::epilogue::thread::Identity, int32_t, int32_t, cutlass::FloatRoundStyle::round_to_nearest>, cutlass::epilogue::fusion::Sm90AccFetch>
  >::CollectiveOp;




using scaled_mm_int8_int8_128x128x128_2x1_pingpong_split_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    int8_t, cutlass::layout::RowMajor, 16,
    int8_t, cutlass::layout::ColumnMajor, 16,
    int32_t,
    cute::Shape<cute::_128, cute::_128, cute::_128>,
    cute::Shape<cute::_2, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename scaled_mm_int8_int8_128x128x128_2x1_pingpong_split_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong
  >::CollectiveOp;

// Gemm operator scaled_mm_int8_int8_128x128x128_2x1_pingpong_split
using scaled_mm_int8_int8_128x128x128_2x1_pingpong_split_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    scaled_mm_int8_int8_128x128x128_2x1_pingpong_split_mainloop,
    scaled_mm_int8_int8_128x128x128_2x1_pingpong_split_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct scaled_mm_int8_int8_128x128x128_2x1_pingpong_split :
  public scaled_mm_int8_int8_128x128x128_2x1_pingpong_split_base { };

struct Variant {
  using Kernel = scaled_mm_int8_int8_128x128x128_2x1_pingpong_split;
  static constexpr bool kSwap = false;
  using Formula = ::Formula;
};

CUTEGEMM_KERNEL_FILE("scaled_mm_int8_int8_128x128x128_2x1_pingpong_split", cutegemm::UniversalSplit<Variant>)
