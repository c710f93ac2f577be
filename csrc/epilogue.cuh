// The node that our EVT trees read their vectors through: VectorBroadcast.
//
// CUTLASS has one node type for each element type and side of the output, and none that takes a scale of one element
// or of one element a row as the caller happens to have it. This one decides both at launch: type and stride come from
// a cutegemm_vector, so a kernel file serves every bias type, no bias, and per-tensor next to per-token scales, without
// expanding anything in memory. Element, the type that the tree goes on with, is float, or int32_t for what is combined
// with INT8's sums before they become floats.
#pragma once
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>

#include "vector.cuh"

namespace cutegemm {

using namespace cute;

enum class Along { M, N };  // the side of the MMA's output that the vector runs along

template <Along kAlong, class CtaTile, class Element = float>
struct VectorBroadcast {
  // Along n a thread needs many values in few subtiles, so they wait in shared memory; along m it keeps its own few.
  static constexpr int kStaged = kAlong == Along::N ? size<1>(CtaTile{}) : 1;

  struct SharedStorage {
    alignas(16) Element staged[kStaged];
  };

  struct Arguments {
    cutegemm_vector vector = {};
    Element absent = 0;
  };
  using Params = Arguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE VectorBroadcast() {}
  CUTLASS_HOST_DEVICE VectorBroadcast(Params const& params, SharedStorage const& storage)
      : params(&params), staged(const_cast<Element*>(storage.staged)) {}

  Params const* params = nullptr;
  Element* staged = nullptr;

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_zero() const { return false; }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(cutlass::epilogue::fusion::detail::ProducerLoadArgs<Args...> const&) {
    return cutlass::epilogue::fusion::detail::EmptyProducerLoadCallbacks{};
  }

  template <class Values, class Coords, class Residue>
  struct AlongM : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE AlongM(Values values, Coords coords, Residue residue, int m, Params const& params)
        : values(values), coords(coords), residue(residue), m(m), params(params) {}
    Values values;    // (CPY, CPY_M, CPY_N, EPI_M, EPI_N), with stride zero along n
    Coords coords;    // the same, relative to this thread's first element
    Residue residue;  // what is left of the problem from there
    int m;
    Params const& params;

    CUTLASS_DEVICE void begin() {
      Tensor own = filter_zeros(values);
      Tensor at = filter_zeros(coords, values.stride());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(own); ++i) {
        bool const inside = get<0>(at(i)) < get<0>(residue);
        own(i) = inside ? load(params.vector, m - get<0>(residue) + get<0>(at(i)), params.absent) : Element(0);
      }
    }

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kSize> const&, int epi_v, int epi_m, int epi_n) {
      Tensor own = values(_, _, _, epi_m, epi_n);
      cutlass::Array<Element, kSize> fragment;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) fragment[i] = own(epi_v * kSize + i);
      return fragment;
    }
  };

  template <class Staged, class Values, class Residue>
  struct AlongN : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE AlongN(Staged source, Values values, Residue residue, int n, int thread, int threads,
                          Element* staged, Params const& params)
        : source(source),
          values(values),
          residue(residue),
          n(n),
          thread(thread),
          threads(threads),
          staged(staged),
          params(params) {}
    Staged source;  // (CPY, CPY_M, CPY_N, EPI_M, EPI_N) in shared memory, with stride zero along m
    Values values;  // (CPY, CPY_M, CPY_N) of one subtile
    Residue residue;
    int n, thread, threads;
    Element* staged;
    Params const& params;

    CUTLASS_DEVICE void begin() {
      for (int i = thread; i < kStaged; i += threads) {
        staged[i] = i < residue ? load(params.vector, n - residue + i, params.absent) : Element(0);
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      copy_aligned(filter_zeros(source(_, _, _, epi_m, epi_n)), filter_zeros(values));
    }

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kSize> const&, int epi_v, int, int) {
      cutlass::Array<Element, kSize> fragment;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) fragment[i] = values(epi_v * kSize + i);
      return fragment;
    }
  };

  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using cutlass::epilogue::fusion::sm90_partition_for_epilogue;
    auto [m, n, k, l] = args.problem_shape_mnkl;
    if constexpr (kAlong == Along::M) {
      // Only the layout of this tensor is used: which elements of the side a thread holds, each once.
      Tensor side = make_tensor(make_gmem_ptr(static_cast<Element const*>(nullptr)),
                                make_layout(make_shape(m, n, l), make_stride(_1{}, _0{}, _0{})));
      Tensor own = sm90_partition_for_epilogue<kReferenceSrc>(side, args.tile_shape_mnk, args.tile_coord_mnkl,
                                                              args.epi_tile, args.tiled_copy, args.thread_idx);
      Tensor values = make_tensor_like<Element>(own);
      return AlongM<decltype(values), decltype(args.tCcD), decltype(args.residue_tCcD)>(
          values, args.tCcD, args.residue_tCcD, int(m), *params);
    } else {
      Tensor side = make_tensor(make_smem_ptr(staged), make_layout(take<0, 2>(CtaTile{}), make_stride(_0{}, _1{})));
      Tensor source = sm90_partition_for_epilogue<kReferenceSrc>(side, args.epi_tile, args.tiled_copy, args.thread_idx);
      Tensor values = make_tensor_like<Element>(take<0, 3>(source));
      int const residue = get<1>(args.residue_cD);
      return AlongN<decltype(source), decltype(values), int>(source, values, residue, int(n), args.thread_idx,
                                                             int(size(args.tiled_copy)), staged, *params);
    }
  }
};

}  // namespace cutegemm
