// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_64, cute::_64, cute::_128>;
// epilogues/linear.py
using Epilogue = cutlass::epilogue::fusion::Sm90EVT<
  cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, cutlass::bfloat16_t, float, cutlass::FloatRoundStyle::round_to_nearest>,
  cutlass::epilogue::fusion::Sm90AccFetch,
  cutegemm::VectorBroadcast<cutegemm::Along::M, TileShape>>;

using mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_64, cute::_64, cute::_128>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    float, float,
    void, cutlass::layout::ColumnMajor, 0,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    cutlass::epilogue::TmaWarpSpecialized,
    Epilogue
  >::CollectiveOp;




using mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    float,
    cute::Shape<cute::_64, cute::_64, cute::_128>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong
  >::CollectiveOp;

// Gemm operator mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap
using mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap_mainloop,
    mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap :
  public mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap_base { };

struct Variant {
  using Kernel = mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap;
  static constexpr bool kSwap = true;
  static Epilogue::Arguments epilogue(const cutegemm_call& call) {
    return {{}, {call.bias, 0.0f}, {}};
  }
};

CUTEGEMM_KERNEL_FILE("mm_bf16_bf16_bf16_64x64x128_1x1_pingpong_swap", cutegemm::Universal<Variant>)
