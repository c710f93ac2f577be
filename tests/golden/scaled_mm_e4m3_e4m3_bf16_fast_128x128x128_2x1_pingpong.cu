// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_128, cute::_128, cute::_128>;
// epilogues/scaled.py
using Epilogue = cutlass::epilogue::fusion::Sm90EVT<
  cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, cutlass::bfloat16_t, float, cutlass::FloatRoundStyle::round_to_nearest>,
  cutlass::epilogue::fusion::Sm90EVT<
    cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, cutlass::FloatRoundStyle::round_to_nearest>,
    cutegemm::VectorBroadcast<cutegemm::Along::M, TileShape>,
    cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, cutlass::FloatRoundStyle::round_to_nearest>,
      cutegemm::VectorBroadcast<cutegemm::Along::N, TileShape>,
      cutlass::epilogue::fusion::Sm90AccFetch>>,
  cutegemm::VectorBroadcast<cutegemm::Along::N, TileShape>>;

using scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_128, cute::_128, cute::_128>,
    cute::Shape<cute::_2, cute::_1, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    float, float,
    void, cutlass::layout::RowMajor, 0,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::epilogue::TmaWarpSpecialized,
    Epilogue
  >::CollectiveOp;




using scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::float_e4m3_t, cutlass::layout::RowMajor, 16,
    cutlass::float_e4m3_t, cutlass::layout::ColumnMajor, 16,
    float,
    cute::Shape<cute::_128, cute::_128, cute::_128>,
    cute::Shape<cute::_2, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum
  >::CollectiveOp;

// Gemm operator scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong
using scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong_mainloop,
    scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong :
  public scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong_base { };

struct Variant {
  using Kernel = scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong;
  static constexpr bool kSwap = false;
  static Epilogue::Arguments epilogue(const cutegemm_call& call) {
    return {{{call.scale_a, 1.0f}, {{call.scale_b, 1.0f}, {}, {}}, {}}, {call.bias, 0.0f}, {}};
  }
};

CUTEGEMM_KERNEL_FILE("scaled_mm_e4m3_e4m3_bf16_fast_128x128x128_2x1_pingpong", cutegemm::Universal<Variant>)
