// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_64, cute::_64, cute::_256>;
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

using scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_64, cute::_64, cute::_256>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    float, float,
    void, cutlass::layout::ColumnMajor, 0,
    float, cutlass::layout::ColumnMajor, 4,
    cutlass::epilogue::TmaWarpSpecialized,
    cutlass::epilogue::fusion::Sm90EVT<cutlass::epilogue::fusion::Sm90Compute<cutlass::epilogue::thread::Identity, float, float, cutlass::FloatRoundStyle::round_to_nearest>, cutlass::epilogue::fusion::Sm90AccFetch>
  >::CollectiveOp;




using scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::float_e4m3_t, cutlass::layout::RowMajor, 16,
    cutlass::float_e4m3_t, cutlass::layout::ColumnMajor, 16,
    float,
    cute::Shape<cute::_64, cute::_64, cute::_256>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum
  >::CollectiveOp;

// Gemm operator scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split
using scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split_mainloop,
    scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split :
  public scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split_base { };

struct Variant {
  using Kernel = scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split;
  static constexpr bool kSwap = true;
  using Formula = ::Formula;
};

CUTEGEMM_KERNEL_FILE("scaled_mm_e4m3_e4m3_fast_64x64x256_1x1_pingpong_swap_split", cutegemm::UniversalSplit<Variant>)
