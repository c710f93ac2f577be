// Emitted by tools/emit.py from cutegemm/variants.py.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_64, cute::_144, cute::_64>;
// epilogues/linear.py
using Epilogue = cutlass::epilogue::fusion::Sm90EVT<
  cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, cutlass::bfloat16_t, float, cutlass::FloatRoundStyle::round_to_nearest>,
  cutlass::epilogue::fusion::Sm90AccFetch,
  cutegemm::VectorBroadcast<cutegemm::Along::N, TileShape>>;

using mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_64, cute::_144, cute::_64>,
    cute::Shape<cute::_1, cute::_2, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    float, float,
    void, cutlass::layout::RowMajor, 0,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::epilogue::TmaWarpSpecialized,
    Epilogue
  >::CollectiveOp;




using mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    float,
    cute::Shape<cute::_64, cute::_144, cute::_64>,
    cute::Shape<cute::_1, cute::_2, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecialized
  >::CollectiveOp;

// Gemm operator mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized
using mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized_mainloop,
    mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized :
  public mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized_base { };

struct Variant {
  using Kernel = mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized;
  static constexpr bool kSwap = false;
  static Epilogue::Arguments epilogue(const cutegemm_call& call) {
    return {{}, {call.bias, 0.0f}, {}};
  }
};

CUTEGEMM_KERNEL_FILE("mm_bf16_bf16_bf16_64x144x64_1x2_warpspecialized", cutegemm::Universal<Variant>)
