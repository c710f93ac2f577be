// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_128, cute::_128, cute::_64>;
// epilogues/linear.py
using Epilogue = cutlass::epilogue::fusion::Sm90EVT<
  cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, float, float, cutlass::FloatRoundStyle::round_to_nearest>,
  cutlass::epilogue::fusion::Sm90AccFetch,
  cutegemm::VectorBroadcast<cutegemm::Along::N, TileShape>>;

using mm_fp16_fp16_fp32_128x128x64_2x1_pingpong_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_128, cute::_128, cute::_64>,
    cute::Shape<cute::_2, cute::_1, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    float, float,
    void, cutlass::layout::RowMajor, 0,
    float, cutlass::layout::RowMajor, 4,
    cutlass::epilogue::TmaWarpSpecialized,
    Epilogue
  >::CollectiveOp;




using mm_fp16_fp16_fp32_128x128x64_2x1_pingpong_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::half_t, cutlass::layout::RowMajor, 8,
    cutlass::half_t, cutlass::layout::ColumnMajor, 8,
    float,
    cute::Shape<cute::_128, cute::_128, cute::_64>,
    cute::Shape<cute::_2, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename mm_fp16_fp16_fp32_128x128x64_2x1_pingpong_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong
  >::CollectiveOp;

// Gemm operator mm_fp16_fp16_fp32_128x128x64_2x1_pingpong
using mm_fp16_fp16_fp32_128x128x64_2x1_pingpong_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    mm_fp16_fp16_fp32_128x128x64_2x1_pingpong_mainloop,
    mm_fp16_fp16_fp32_128x128x64_2x1_pingpong_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct mm_fp16_fp16_fp32_128x128x64_2x1_pingpong :
  public mm_fp16_fp16_fp32_128x128x64_2x1_pingpong_base { };

struct Variant {
  using Kernel = mm_fp16_fp16_fp32_128x128x64_2x1_pingpong;
  static constexpr bool kSwap = false;
  static Epilogue::Arguments epilogue(const cutegemm_call& call) {
    return {{}, {call.bias, 0.0f}, {}};
  }
};

CUTEGEMM_KERNEL_FILE("mm_fp16_fp16_fp32_128x128x64_2x1_pingpong", cutegemm::Universal<Variant>)
