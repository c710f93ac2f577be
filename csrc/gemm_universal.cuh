// Launches the kernels that CUTLASS's 3.x collectives make: TMA into shared memory, wgmma from there, an EVT epilogue
// and a persistent grid. A generated file declares the kernel's type and its epilogue, and ends with one Universal<>.
#pragma once
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cutlass_dtype.cuh"
#include "epilogue.cuh"
#include "kernel_file.cuh"

namespace cutegemm {

// CUTLASS wants strides whose unit mode is a type. Returns false if that mode's stride is not one.
template <class Stride>
bool set_stride(Stride& stride, int64_t row, int64_t column, int64_t batch) {
  cute::get<2>(stride) = batch;
  if constexpr (cute::is_static<cute::remove_cvref_t<decltype(cute::get<0>(stride))>>::value) {
    cute::get<1>(stride) = column;
    return row == 1;
  } else {
    cute::get<0>(stride) = row;
    return column == 1;
  }
}

// TMA's rule for an address and for every stride but the unit one.
template <class Element, class Stride>
bool tma_can_read(const void* data, const Stride& stride) {
  int64_t const lead = cute::is_static<cute::remove_cvref_t<decltype(cute::get<0>(stride))>>::value
                           ? int64_t(cute::get<1>(stride))
                           : int64_t(cute::get<0>(stride));
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && lead * int64_t(sizeof(Element)) % 16 == 0;
}

// d^T = b^T @ a^T: with the operands swapped, the weight's n runs along the MMA's m side (64 or 128 rows at a time),
// and the few tokens along its n side, which can be as narrow as 8.
struct Operand {
  const void* data;
  int64_t row, k;  // strides
  int32_t rows, dtype;
};
inline Operand operand_a(const cutegemm_call& c) { return {c.a, c.a_stride[0], c.a_stride[1], c.m, c.a_dtype}; }
inline Operand operand_b(const cutegemm_call& c) { return {c.b, c.b_stride[1], c.b_stride[0], c.n, c.b_dtype}; }

template <class Kernel, bool kSwap>
struct UniversalProblem {
  using ElementA = typename Kernel::ElementA;
  using ElementB = typename Kernel::ElementB;
  using ElementD = typename Kernel::ElementD;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // Everything but the epilogue's operands and d, which a kernel that splits k sends elsewhere.
  static int32_t describe(const cutegemm_call& call, int split, void* d, int64_t d_row, int64_t d_column,
                          int64_t d_batch, typename Kernel::Arguments& args) {
    Operand const a = kSwap ? operand_b(call) : operand_a(call);
    Operand const b = kSwap ? operand_a(call) : operand_b(call);
    if (a.dtype != dtype_of<ElementA>() || b.dtype != dtype_of<ElementB>()) return kWrongTypes;
    if (split < 1 || call.k % split != 0) return kWrongOptions;
    int const k = call.k / split;
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = {a.rows, b.rows, k, split};
    args.mainloop.ptr_A = static_cast<ElementA const*>(a.data);
    args.mainloop.ptr_B = static_cast<ElementB const*>(b.data);
    args.epilogue.ptr_D = static_cast<ElementD*>(d);
    // From one part of k to the next; TMA wants a multiple of 16 bytes, or zero, even where there is one part.
    int64_t const a_part = split > 1 ? a.k * k : 0, b_part = split > 1 ? b.k * k : 0;
    if (!set_stride(args.mainloop.dA, a.row, a.k, a_part) || !set_stride(args.mainloop.dB, b.row, b.k, b_part) ||
        !set_stride(args.epilogue.dD, kSwap ? d_column : d_row, kSwap ? d_row : d_column, d_batch)) {
      return kWrongLayout;
    }
    if (!tma_can_read<ElementA>(a.data, args.mainloop.dA) || !tma_can_read<ElementB>(b.data, args.mainloop.dB) ||
        !tma_can_read<ElementD>(d, args.epilogue.dD) || a_part * sizeof(ElementA) % 16 != 0 ||
        b_part * sizeof(ElementB) % 16 != 0) {
      return kMisaligned;
    }
    args.hw_info.sm_count = call.sm_count;
    args.scheduler.max_swizzle_size = call.options.swizzle ? call.options.swizzle : 1;
    using Raster = decltype(args.scheduler.raster_order);
    // The option speaks of d's sides, the scheduler of the MMA's.
    int const raster = call.options.raster;
    args.scheduler.raster_order = raster == 0              ? Raster::Heuristic
                                  : (raster == 1) != kSwap ? Raster::AlongM
                                                           : Raster::AlongN;
    return 0;
  }

  static int32_t prepare() { return load_kernel(cutlass::device_kernel<Kernel>, Kernel::SharedStorageSize); }

  // can_implement() is not asked: it refuses every k that is not a multiple of the vector, and TMA reads those.
  // describe() has asked for what TMA needs.
  static int32_t enqueue(const cutegemm_call& call, const typename Kernel::Arguments& args) {
    auto params = Kernel::to_underlying_arguments(args, nullptr);
    auto const status = Adapter::run(params, static_cast<cudaStream_t>(call.stream), nullptr, !call.options.no_chain);
    if (status == cutlass::Status::kSuccess) return 0;
    cudaError_t const error = cudaGetLastError();
    return error != cudaSuccess ? int32_t(error) : int32_t(kNotImplementable);
  }
};

// Variant: Kernel (a cutlass::gemm::kernel::GemmUniversal), kSwap, and epilogue(call), the arguments of its EVT.
template <class Variant>
struct Universal {
  using Kernel = typename Variant::Kernel;
  using Problem = UniversalProblem<Kernel, Variant::kSwap>;

  static int32_t prepare() { return Problem::prepare(); }
  static int64_t workspace(const cutegemm_call&) { return 0; }
  static int32_t launch(const cutegemm_call& call) {
    if (call.d_dtype != dtype_of<typename Problem::ElementD>()) return kWrongTypes;
    if (call.options.split > 1) return kWrongOptions;
    // TMA stores whole pieces of 16 bytes: with another n it would write past the end of each row.
    if (call.n * sizeof(typename Problem::ElementD) % 16 != 0) return kMisaligned;
    typename Kernel::Arguments args{};
    int32_t const refused = Problem::describe(call, 1, call.d, call.d_stride[0], call.d_stride[1], 0, args);
    if (refused) return refused;
    args.epilogue.thread = Variant::epilogue(call);
    return Problem::enqueue(call, args);
  }
};

// d = Formula(sum over the parts of k, in order). A thread takes four neighbours of one row after the other, and n is a
// multiple of four.
constexpr int kReduceThreads = 128;
template <class Formula, class Sum>
__global__ void __launch_bounds__(kReduceThreads) reduce_split(cutegemm_call call, const Sum* parts) {
  using Four = cutlass::AlignedArray<Sum, 4>;
  wait_for_previous_kernel();
  int64_t const n = 4 * (int64_t(blockIdx.x) * kReduceThreads + threadIdx.x);
  if (n >= call.n) return;
  typename Formula::Column column[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) column[j] = Formula::column(call, int(n) + j);
  int64_t const size = int64_t(call.m) * call.n;
  for (int m = blockIdx.y; m < call.m; m += gridDim.y) {
    const Sum* part = parts + int64_t(m) * call.n + n;
    Four sum = *reinterpret_cast<const Four*>(part);
#pragma unroll 4
    for (int s = 1; s < call.options.split; ++s) {
      Four const next = *reinterpret_cast<const Four*>(part + s * size);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += next[j];
    }
    auto const row = Formula::row(call, m);
    with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store(d + m * call.d_stride[0] + (n + j) * call.d_stride[1],
              Formula::apply(sum[j], row, column[j], Formula::element(call, m, int(n) + j)));
      }
    });
  }
}

// The same kernel type with d of the sums' type, FP32 or INT32, and no epilogue, over the parts of k as a batch, and a
// second launch that adds the parts in order (so the bits do not depend on timing) and applies the epilogue once. It
// takes every type of d.
template <class Variant>
struct UniversalSplit {
  using Kernel = typename Variant::Kernel;
  using Formula = typename Variant::Formula;
  using Problem = UniversalProblem<Kernel, Variant::kSwap>;
  using Sum = typename Problem::ElementD;

  static int32_t prepare() {
    int32_t const status = load_kernel(reduce_split<Formula, Sum>);
    return status ? status : Problem::prepare();
  }
  // Each part's rows must be whole 16-byte pieces for TMA, so n is a multiple of four.
  static int64_t workspace(const cutegemm_call& call) {
    return int64_t(call.m) * call.n * sizeof(Sum) * (call.options.split ? call.options.split : 1);
  }
  static int32_t launch(const cutegemm_call& call) {
    int const split = call.options.split ? call.options.split : 1;
    if (call.workspace == nullptr || reinterpret_cast<uintptr_t>(call.workspace) % 256 != 0) return kNoWorkspace;
    if (call.n % 4 != 0) return kMisaligned;
    typename Kernel::Arguments args{};
    int32_t status = Problem::describe(call, split, call.workspace, call.n, 1, int64_t(call.m) * call.n, args);
    if (status == 0) status = Problem::enqueue(call, args);
    if (status) return status;
    cutegemm_call reduced = call;
    reduced.options.split = split;
    dim3 const grid((call.n / 4 + kReduceThreads - 1) / kReduceThreads, call.m < 65535 ? call.m : 65535);
    return launch_kernel(call, reduce_split<Formula, Sum>, grid, dim3(kReduceThreads), 0, reduced,
                         static_cast<const Sum*>(call.workspace));
  }
};

}  // namespace cutegemm
