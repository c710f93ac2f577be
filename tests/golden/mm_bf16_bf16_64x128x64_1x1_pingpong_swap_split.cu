// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_64, cute::_128, cute::_64>;
// epilogues/linear.py
struct Formula {
  struct Row {
  };
  static __device__ __forceinline__ Row row(const cutegemm_call& call, int m) {
    return {};
  }
  struct Column {
    float bias;
  };
  static __device__ __forceinline__ Column column(const cutegemm_call& call, int n) {
    return {cutegemm::load(call.bias, n, 0.0f)};
  }
  static __device__ __forceinline__ float apply(float accum, const Row& row, const Column& column) {
    return (accum + column.bias);
  }
};

using mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_64, cute::_128, cute::_64>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    float, float,
    void, cutlass::layout::ColumnMajor, 0,
    float, cutlass::layout::ColumnMajor, 4,
    cutlass::epilogue::TmaWarpSpecialized,
    cutlass::epilogue::fusion::Sm90EVT<cutlass::epilogue::fusion::Sm90Compute<cutlass::epilogue::thread::Identity, float, float, cutlass::FloatRoundStyle::round_to_nearest>, cutlass::epilogue::fusion::Sm90AccFetch>
  >::CollectiveOp;




using mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    float,
    cute::Shape<cute::_64, cute::_128, cute::_64>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong
  >::CollectiveOp;

// Gemm operator mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split
using mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split_mainloop,
    mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split :
  public mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split_base { };

struct Variant {
  using Kernel = mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split;
  static constexpr bool kSwap = true;
  using Formula = ::Formula;
};

CUTEGEMM_KERNEL_FILE("mm_bf16_bf16_64x128x64_1x1_pingpong_swap_split", cutegemm::UniversalSplit<Variant>)
