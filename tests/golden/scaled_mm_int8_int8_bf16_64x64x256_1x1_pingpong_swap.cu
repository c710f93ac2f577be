// Emitted by tools/emit.py from cutegemm/variants.py.
#include "gemm_universal.cuh"

using TileShape = cute::Shape<cute::_64, cute::_64, cute::_256>;
// epilogues/asymmetric.py
using Epilogue = cutlass::epilogue::fusion::Sm90EVT<
  cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, cutlass::bfloat16_t, float, cutlass::FloatRoundStyle::round_to_nearest>,
  cutlass::epilogue::fusion::Sm90EVT<
    cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, cutlass::FloatRoundStyle::round_to_nearest>,
    cutegemm::VectorBroadcast<cutegemm::Along::N, TileShape>,
    cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, cutlass::FloatRoundStyle::round_to_nearest>,
      cutegemm::VectorBroadcast<cutegemm::Along::M, TileShape>,
      cutlass::epilogue::fusion::Sm90EVT<
        cutlass::epilogue::fusion::Sm90Compute<cutlass::minus, int32_t, int32_t, cutlass::FloatRoundStyle::round_to_nearest>,
        cutlass::epilogue::fusion::Sm90AccFetch,
        cutlass::epilogue::fusion::Sm90EVT<
          cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, int32_t, int32_t, cutlass::FloatRoundStyle::round_to_nearest>,
          cutegemm::VectorBroadcast<cutegemm::Along::N, TileShape, int32_t>,
          cutegemm::VectorBroadcast<cutegemm::Along::M, TileShape, int32_t>>>>>,
  cutegemm::VectorBroadcast<cutegemm::Along::M, TileShape>>;

using scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap_epilogue =
  typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cute::Shape<cute::_64, cute::_64, cute::_256>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::epilogue::collective::EpilogueTileAuto,
    int32_t, float,
    void, cutlass::layout::ColumnMajor, 0,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    cutlass::epilogue::TmaWarpSpecialized,
    Epilogue
  >::CollectiveOp;




using scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap_mainloop =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    int8_t, cutlass::layout::RowMajor, 16,
    int8_t, cutlass::layout::ColumnMajor, 16,
    int32_t,
    cute::Shape<cute::_64, cute::_64, cute::_256>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap_epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong
  >::CollectiveOp;

// Gemm operator scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap
using scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap_base = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int,int,int,int>,
    scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap_mainloop,
    scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap_epilogue,
    cutlass::gemm::PersistentScheduler>;

// Define named type
struct scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap :
  public scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap_base { };

struct Variant {
  using Kernel = scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap;
  static constexpr bool kSwap = true;
  static Epilogue::Arguments epilogue(const cutegemm_call& call) {
    return {{{call.scale_a, 1.0f}, {{call.scale_b, 1.0f}, {{}, {{call.zero_point_a, 0}, {call.sum_b, 0}, {}}, {}}, {}}, {}}, {call.bias, 0.0f}, {}};
  }
};

CUTEGEMM_KERNEL_FILE("scaled_mm_int8_int8_bf16_64x64x256_1x1_pingpong_swap", cutegemm::Universal<Variant>)
