// The GEMM of a few tokens: d = Formula(a @ b) for m <= 8, 16, 32 or 64, one skeleton for every weight format.
//
// With so few rows of a the weight's bytes are all that counts, so everything here serves to keep them flowing:
//  - The weight's rows run along the MMA's m side (64 a warpgroup), the tokens along its n side, which may be 8 wide.
//    wgmma reads both from shared memory, so between TMA and tensor core no register and no instruction is spent on
//    them. (mma.sync has no FP8 of its own on Hopper: converting to FP16 cost a fifth of the bandwidth.)
//  - One thread issues all TMA loads, up to 200 KB ahead of the MMAs and across tiles, so that even half of the
//    multiprocessors have enough in flight to use all of the memory's bandwidth.
//  - A cluster of `split` CTAs shares a tile, each with its part of k, and adds through distributed shared memory in a
//    fixed order. There is no workspace and no second launch.
//  - The tensor cores' FP8 sums lose bits, so each 128 bytes of k are summed apart and added in FP32: that is free
//  here,
//    and the results are as good as with use_fast_accum=False.
//  - Programmatic dependent launch: before a CTA waits for the kernel ahead of it, it asks for its first weights. It
//  asks
//    into L2, where every write ends up, so the weights are right even if that kernel is still writing them.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_common.inl>

#include "cutlass_dtype.cuh"
#include "kernel_file.cuh"
#include "vector.cuh"

namespace cutegemm {

using namespace cute;

template <class ElementA, class ElementB, int kTokens_>
struct DecodeTile {
  static constexpr int kTokens = kTokens_;
  static_assert(sizeof(ElementA) == sizeof(ElementB));
  static constexpr int kWarpgroups = kTokens <= 16 ? 1 : 2;  // more rows of weight where a's bytes begin to count
  static constexpr int kRows = 64 * kWarpgroups;
  // A stage is several 128-byte spans of k: one alone is too short a piece of a row for HBM to be quick.
  static constexpr int kSpans = 2;
  static constexpr int kSpan = 128 / sizeof(ElementB), kBlock = kSpans * kSpan;
  // Two CTAs fit a multiprocessor: this kernel's, and the next one's, which sets itself up and asks for its weights
  // while this one ends. With more tokens the ring would get too short for that.
  static constexpr int kOccupancy = kTokens <= 16 ? 2 : 1;
  static constexpr int kStageBytes = 128 * kSpans * (kRows + kTokens);
  static constexpr int kSumBytes = kTokens * kRows * int(sizeof(float));
  static constexpr int kStages = (226 * 1024 / kOccupancy - kSumBytes - 2048) / kStageBytes;
  static constexpr int kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 32;

  using Atom = decltype(GMMA::ss_op_selector<ElementB, ElementA, float, Shape<Int<64>, Int<kTokens>, Int<kSpan>>,
                                             GMMA::Major::K, GMMA::Major::K>());
  using Mma = decltype(make_tiled_mma(Atom{}, Layout<Shape<Int<kWarpgroups>, _1, _1>>{}));
  using LayoutB =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<ElementB>{}, Shape<Int<kRows>, Int<kBlock>, Int<kStages>>{}));
  using LayoutA =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<ElementA>{}, Shape<Int<kTokens>, Int<kBlock>, Int<kStages>>{}));

  struct Shared {
    alignas(1024) uint8_t b[cosize_v<LayoutB> * sizeof(ElementB)];
    alignas(1024) uint8_t a[cosize_v<LayoutA> * sizeof(ElementA)];
    alignas(16) float sums[kTokens * kRows];  // of the cluster, for the rows that this CTA finishes
    uint64_t full[kStages], empty[kStages], sums_ready, sums_free;
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;  // to align it

  template <class Element, class Layout, int kSide>
  static auto tma(const void* data, int side, int k, int64_t pitch) {
    Tensor tensor =
        make_tensor(make_gmem_ptr(static_cast<const Element*>(data)), make_shape(side, k), make_stride(pitch, _1{}));
    return make_tma_copy(SM90_TMA_LOAD{}, tensor, Layout{}(_, _, _0{}), Shape<Int<kSide>, Int<kBlock>>{}, _1{});
  }
  static auto tma_a(const cutegemm_call& c) { return tma<ElementA, LayoutA, kTokens>(c.a, c.m, c.k, c.a_stride[0]); }
  static auto tma_b(const cutegemm_call& c) { return tma<ElementB, LayoutB, kRows>(c.b, c.n, c.k, c.b_stride[1]); }
  using TmaA = decltype(tma_a(std::declval<cutegemm_call>()));
  using TmaB = decltype(tma_b(std::declval<cutegemm_call>()));
};

namespace decode {

// Barriers of the cluster's sums: the phases of a remote arrival and of the wait for it are the whole cluster's.
template <class T>
CUTE_DEVICE uint32_t remote_address(T* p, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(cast_smem_ptr_to_uint(p)), "r"(rank));
  return remote;
}
CUTE_DEVICE void store_remote(uint32_t remote, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
CUTE_DEVICE void arrive_at(uint64_t& barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_address(&barrier, rank))
               : "memory");
}
CUTE_DEVICE void wait_cluster(uint64_t& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(cast_smem_ptr_to_uint(&barrier)),
      "r"(phase)
      : "memory");
}
}  // namespace decode

template <class Tile, class Formula>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kOccupancy)
    decode_kernel(const __grid_constant__ cutegemm_call call, const __grid_constant__ typename Tile::TmaA tma_a,
                  const __grid_constant__ typename Tile::TmaB tma_b) {
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kRows = Tile::kRows, kTokens = Tile::kTokens, kBlock = Tile::kBlock, kConsumers = Tile::kConsumers;
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  auto const full = [&](int stage) { return reinterpret_cast<Full*>(&shared.full[stage]); };
  auto const empty = [&](int stage) { return reinterpret_cast<Empty*>(&shared.empty[stage]); };

  int const split = call.options.split, rank = blockIdx.x % split;
  int const cluster = blockIdx.x / split, clusters = gridDim.x / split;
  int const tiles = ceil_div(call.n, kRows), blocks = ceil_div(call.k, kBlock);
  int const first = min(blocks, ceil_div(blocks, split) * rank), last = min(blocks, first + ceil_div(blocks, split));
  bool const is_producer = threadIdx.x >= kConsumers;
  int const lane = threadIdx.x % 32;

  if (threadIdx.x == kConsumers) {
    prefetch_tma_descriptor(tma_a.get_tma_descriptor());
    prefetch_tma_descriptor(tma_b.get_tma_descriptor());
    for (int s = 0; s < Tile::kStages; ++s) {
      full(s)->init(1);
      empty(s)->init(kConsumers / 32);
    }
    reinterpret_cast<Empty*>(&shared.sums_ready)->init(split * kConsumers / 32);
    reinterpret_cast<Empty*>(&shared.sums_free)->init(split * kConsumers / 32);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (split > 1) {  // no CTA of a cluster may write to another before that one runs
    cluster_arrive_relaxed();
    cluster_wait();
  }
  asm volatile("griddepcontrol.launch_dependents;");

  Tensor const shared_a = make_tensor(make_smem_ptr(reinterpret_cast<typename Tile::TmaA::ValType*>(shared.a)),
                                      typename Tile::LayoutA{});  // (token, k, stage)
  Tensor const shared_b = make_tensor(make_smem_ptr(reinterpret_cast<typename Tile::TmaB::ValType*>(shared.b)),
                                      typename Tile::LayoutB{});  // (row, k, stage)

  if (is_producer) {
    if (lane == 0) {
      Tensor const all_a = local_tile(tma_a.get_tma_tensor(make_shape(call.m, call.k)),
                                      Shape<Int<kTokens>, Int<kBlock>>{}, make_coord(_0{}, _));  // (token, k, block)
      Tensor const all_b = local_tile(tma_b.get_tma_tensor(make_shape(call.n, call.k)),
                                      Shape<Int<kRows>, Int<kBlock>>{}, make_coord(_, _));
      auto const copies_a =
          tma_partition(tma_a, _0{}, Layout<_1>{}, group_modes<0, 2>(shared_a), group_modes<0, 2>(all_a));
      auto const copies_b =
          tma_partition(tma_b, _0{}, Layout<_1>{}, group_modes<0, 2>(shared_b), group_modes<0, 2>(all_b));
      Tensor const from_a = get<0>(copies_a);  // (box, block)
      Tensor const to_a = get<1>(copies_a);    // (box, stage)
      Tensor const from_b = get<0>(copies_b);  // (box, tile, block)
      Tensor const to_b = get<1>(copies_b);    // (box, stage)
      auto const load_b = [&](int tile, int block, int stage) {
        full(stage)->arrive_and_expect_tx(Tile::kStageBytes);
        copy(tma_b.with(shared.full[stage], 0, TMA::CacheHintSm90::EVICT_FIRST), from_b(_, tile, block),
             to_b(_, stage));
      };
      auto const load_a = [&](int block, int stage) {
        copy(tma_a.with(shared.full[stage], 0, TMA::CacheHintSm90::EVICT_LAST), from_a(_, block), to_a(_, stage));
      };
      int early = 0;  // stages whose weights are on their way before the wait
      if (call.options.constant_b) {
        early = min(Tile::kStages, last - first);
        for (int s = 0; s < early; ++s) load_b(cluster, first + s, s);
      } else if (!call.options.no_chain) {
        int const ahead = min(call.options.prefetch * 1024 / (kRows * Tile::kSpans * 128), last - first);
        for (int i = 0; i < ahead; ++i) prefetch(tma_b, from_b(_, cluster, first + i));
      }
      wait_for_previous_kernel();
      int stage = 0, phase = 1;
      for (int tile = cluster; tile < tiles; tile += clusters) {
        for (int block = first; block < last; ++block) {
          if (early > 0) {
            --early;
          } else {
            empty(stage)->wait(phase);
            load_b(tile, block, stage);
          }
          load_a(block, stage);
          if (++stage == Tile::kStages) stage = 0, phase ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    wait_for_previous_kernel();
    typename Tile::Mma mma;
    auto const thread_mma = mma.get_slice(threadIdx.x);
    Tensor const fragments_b = thread_mma.make_fragment_A(thread_mma.partition_A(shared_b));  // the weight is MMA's A
    Tensor const fragments_a = thread_mma.make_fragment_B(thread_mma.partition_B(shared_a));
    Tensor sum = partition_fragment_C(mma, Shape<Int<kRows>, Int<kTokens>>{});
    decltype(sum) parts[Tile::kSpans];
    // Of the sums of wgmma a thread holds, for every 8 tokens, 2 neighbours in 2 rows that lie 8 apart.
    int const own_row = threadIdx.x / 32 * 16 + lane / 4, own_token = lane % 4 * 2;
    auto const token_of = [&](int i) { return i / 4 * 8 + own_token + i % 2; };
    auto const row_of = [&](int i) { return own_row + i / 2 % 2 * 8; };
    // In a cluster, CTA r finishes the r-th part of a tile's rows, a thread the same row for every token.
    int const part_rows = kRows / split, part_row = threadIdx.x % part_rows, part_token = threadIdx.x / part_rows;

    int stage = 0, phase = 0, sums_phase = 0;
    for (int tile = cluster; tile < tiles; tile += clusters) {
      // The epilogue's operands are wanted when the last sum is there, and not a trip to L2 later.
      int const row0 = tile * kRows;
      typename Formula::Row rows[kTokens / 4];
      typename Formula::Column columns[2];
      if (split == 1) {
        CUTE_UNROLL
        for (int i = 0; i < kTokens / 4; ++i) {
          rows[i] = Formula::row(call, min(i / 2 * 8 + own_token + i % 2, call.m - 1));
        }
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) columns[i] = Formula::column(call, min(row0 + row_of(i * 2), call.n - 1));
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kTokens / 4; ++i) {
          rows[i] = Formula::row(call, min(part_token + i * (kConsumers / part_rows), call.m - 1));
        }
        columns[0] = Formula::column(call, min(row0 + rank * part_rows + part_row, call.n - 1));
      }

      clear(sum);
      for (int block = first; block < last; ++block) {
        full(stage)->wait(phase);
        constexpr int kSteps = size<2>(decltype(fragments_b){}) / Tile::kSpans;
        for_each(make_seq<Tile::kSpans>{}, [&](auto span) {
          auto& part = parts[span];
          mma.accumulate_ = GMMA::ScaleOut::Zero;
          warpgroup_fence_operand(part);
          warpgroup_arrive();
          CUTE_UNROLL
          for (int k = 0; k < kSteps; ++k) {
            int const at = span * kSteps + k;
            gemm(mma, fragments_b(_, _, at, stage), fragments_a(_, _, at, stage), part);
            mma.accumulate_ = GMMA::ScaleOut::One;
          }
          warpgroup_commit_batch();
        });
        warpgroup_wait<0>();
        if (lane == 0) empty(stage)->arrive();
        if (++stage == Tile::kStages) stage = 0, phase ^= 1;
        for_each(make_seq<Tile::kSpans>{}, [&](auto span) {
          warpgroup_fence_operand(parts[span]);
          CUTE_UNROLL
          for (int i = 0; i < size(sum); ++i) sum(i) += parts[span](i);
        });
      }

      if (split == 1) {
        with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
          CUTE_UNROLL
          for (int i = 0; i < size(sum); ++i) {
            int const m = token_of(i), n = row0 + row_of(i);
            if (m < call.m && n < call.n) {
              store(d + m * call.d_stride[0] + n * call.d_stride[1],
                    Formula::apply(sum(i), rows[i / 4 * 2 + i % 2], columns[i / 2 % 2]));
            }
          }
        });
      } else {
        // What a CTA is sent lies as [split][token][row].
        decode::wait_cluster(shared.sums_free, sums_phase ^ 1);
        uint32_t to[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const row = row_of(i * 2);
          to[i] = decode::remote_address(&shared.sums[(rank * kTokens + own_token) * part_rows + row % part_rows],
                                         row / part_rows);
        }
        CUTE_UNROLL
        for (int i = 0; i < size(sum); ++i) {
          decode::store_remote(to[i / 2 % 2] + (i / 4 * 8 + i % 2) * part_rows * int(sizeof(float)), sum(i));
        }
        __syncwarp();
        if (lane < split) decode::arrive_at(shared.sums_ready, lane);
        decode::wait_cluster(shared.sums_ready, sums_phase);
        int const n = row0 + rank * part_rows + part_row;
        CUTE_UNROLL
        for (int i = 0; i < kTokens / 4; ++i) {  // a cluster has two CTAs or more
          int const m = part_token + i * (kConsumers / part_rows);
          if (m < call.m && n < call.n) {
            float total = 0.f;
            for (int s = 0; s < split; ++s) total += shared.sums[(s * kTokens + m) * part_rows + part_row];
            store_from_float(call.d, call.d_dtype, m * call.d_stride[0] + n * call.d_stride[1],
                             Formula::apply(total, rows[i], columns[0]));
          }
        }
        __syncwarp();
        if (lane < split) decode::arrive_at(shared.sums_free, lane);
        sums_phase ^= 1;
      }
    }
  }
  if (split > 1) {  // nor may it leave while another may still write to it
    cluster_arrive();
    cluster_wait();
  }
}

template <class ElementA, class ElementB, int kTokens, class Formula>
struct Decode {
  using Tile = DecodeTile<ElementA, ElementB, kTokens>;
  static constexpr auto* kKernel = &decode_kernel<Tile, Formula>;

  static int32_t prepare() {
    int32_t const status = load_kernel(kKernel, Tile::kSharedBytes);
    // Unasked, the driver may leave shared memory for one CTA only.
    return status ? status : cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  }
  static int64_t workspace(const cutegemm_call&) { return 0; }

  static int32_t launch(const cutegemm_call& call) {
    if (call.a_dtype != dtype_of<ElementA>() || call.b_dtype != dtype_of<ElementB>()) return kWrongTypes;
    if (call.m < 1 || call.m > kTokens || call.n < 1 || call.k < 1) return kWrongSize;
    if (call.a_stride[1] != 1 || call.b_stride[0] != 1) return kWrongLayout;
    if (reinterpret_cast<uintptr_t>(call.a) % 16 || reinterpret_cast<uintptr_t>(call.b) % 16 ||
        call.a_stride[0] * int(sizeof(ElementA)) % 16 || call.b_stride[1] * int(sizeof(ElementB)) % 16) {
      return kMisaligned;
    }
    cutegemm_call own = call;
    if (own.options.split == 0) own.options.split = 1;
    int const split = own.options.split;
    if (split != 1 && split != 2 && split != 4 && split != 8) return kWrongOptions;
    int const tiles = ceil_div(call.n, Tile::kRows), most = call.sm_count / split;
    return launch_cluster(call, kKernel, dim3((tiles < most ? tiles : most) * split), split, dim3(Tile::kThreads),
                          Tile::kSharedBytes, own, Tile::tma_a(call), Tile::tma_b(call));
  }
};

}  // namespace cutegemm
