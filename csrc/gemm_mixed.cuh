// The GEMM with a weight of four-bit codes or eight-bit values: d = Formula(x @ w^T), for 17 tokens and more. The
// weight is wgmma's A, in registers, and tokens run along its n side.
//  - W4Weight is packed so that a lane's 64 columns of a strip of 16 rows are 16 bytes, and the pairs of codes in them
//    already stand in the halves of registers. Four registers take 9 instructions, and shared memory is read once for
//    32 codes. Of a weight of eight bits, which is as it is, a lane reads two neighbours of a row at a time.
//  - A code's value is rounded to 16 bits (kRounded), as a weight of 16 bits would be, and MMAs add over all of k. In
//    BF16 without zeros a value takes one FMA. Beside running MMAs each instruction takes two or three cycles, since
//    both want the register file: so there are few of them, and values of a piece of k are made while MMAs of another
//    run.
//  - Or it is exact, a code less its zero, which BF16 and FP16 are wide enough for, and scales of any type go to FP32
//    sums of groups of k.
//  - Scales of eight bits are of rows, and sums over all of k too.
//  - Two threads issue all TMA loads, one of codes and scales, one of x, ahead of the MMAs and across tiles. One took
//    longer for a stage than HBM does.
//  - For 32 tokens and exact values warps share strips: each has its own k of a stage, and their sums are added in the
//    end. It takes 16 warps to make values as fast as HBM brings codes. A cluster of `split` CTAs may share a tile,
//    each with its part of k, and adds through distributed shared memory in a fixed order. There is no workspace and
//    no second launch.
//  - Else tiles that would leave multiprocessors idle, those of the last wave, may be shared: all their k is dealt
//    out evenly. The CTA that has the end of a tile's k adds what up to `split` - 1 others, of lower numbers, left in
//    the workspace. They did that first of all, and CTAs start in the order of their numbers, so that none waits for
//    one that cannot run.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <atomic>
#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_common.inl>
#include <random>
#include <type_traits>

#include "cluster.cuh"
#include "cutlass_dtype.cuh"
#include "kernel_file.cuh"
#include "results.cuh"
#include "tma.cuh"
#include "vector.cuh"
#include "weight_values.cuh"

namespace cutegemm {

using namespace cute;

namespace mixed {

constexpr int kMmaRows = 64, kStrip = 16;  // rows of wgmma, and of a warp in it
constexpr int kSpan = 64;        // k: 128 bytes of x, TMA's and wgmma's swizzle, and 16 bytes of a lane's codes
constexpr int kSpanBytes = 512;  // of a strip's codes
constexpr int kMaxStages = 16;
constexpr int kTurn = 5;   // and the next: named barriers by which warpgroups order themselves
constexpr int kGiven = 7;  // another one, for sums that go to the workspace
constexpr int kSharedBytes = 227 * 1024;
constexpr int kMaxCtas = 1 << 30;
constexpr int kBytesInFlight = 8 << 20;  // of codes, over all CTAs

// A tile of kRows of the weight and kTokens of x, as the emitted Variant declares it: see variants.py's MixedInput.
//
// A warpgroup has 64 rows. Of a gated tile the first one has gates, and the second one what they gate.
template <class Variant>
struct Tile : Variant {
  using Variant::kRows, Variant::kTokens, Variant::kStep, Variant::kGated, Variant::kMinimum, Variant::kRounded;
  static constexpr bool kInt4 = std::is_same_v<typename Variant::Weight, Int4>;
  static constexpr bool kNans = std::is_same_v<typename Variant::Weight, E4m3>;
  static constexpr bool kOneSum = kRounded || !kInt4;  // an MMA adds to the sums of all k before
  static constexpr bool kSplits = kTokens == 32 && !kRounded, kShares = !kSplits;
  static constexpr int kWarps = kSplits ? 16 : 8, kConsumers = 32 * kWarps, kGroups = kWarps / 4;
  static constexpr int kStrips = kRows / kStrip, kWidth = kGated ? kRows / 2 : kRows;  // kWidth: of d
  static constexpr int kAlongK = std::max(1, kWarps / kStrips);  // warps that share a strip, each with its own k
  // Of a stage's k, what a warp multiplies. Each stage takes some 40 instructions beside its values.
  static constexpr int kOwnK = kTokens > 128 || !kInt4 ? kSpan : kTokens > 32 || !kRounded ? 128 : 256;
  static constexpr int kStageK = kOwnK * kAlongK, kSpans = kStageK / kSpan;
  static constexpr int kPiece = kOneSum ? std::min(kOwnK / 2, kSpan) : std::min(kStep, kSpan);  // made at a time
  static constexpr int kPieces = kOwnK / kPiece, kOfStep = std::max(1, kStep / kPiece);
  static constexpr bool kTakesTurns = !kOneSum && kTokens == 128;
  // While sums of one warpgroup become d, MMAs of the other one run, which is so many stages behind.
  static constexpr int kLag = kOneSum ? std::max(1, 128 / kStageK) : 0;
  static constexpr int kThreads = kConsumers + (kShares ? 128 : 64);
  static constexpr int kStripBytes = kInt4 ? kSpans * kSpanBytes : kStrip * kStageK, kCodes = kStrips * kStripBytes;
  static constexpr int kX = kStageK * kTokens * 2;
  static constexpr int kMostGroups = std::max(1, kStageK / kStep);                      // of a stage
  static constexpr int kScales = kInt4 ? kRows * kMostGroups * (kRounded ? 2 : 4) : 0;  // at most: FP32
  static constexpr int kStage = (kCodes + kX + 2 * kScales + 1023) / 1024 * 1024;
  // Sums of the tile as [part of k][token][row], and those of other CTAs. Of a gated tile there are the values of what
  // one warpgroup has for the other, as [token][row], and of d on its way to TMA, so many tokens at a time.
  static constexpr int kOutTokens = std::min(kTokens, 128);
  static constexpr int kSums = kTokens * kRows, kPitch = kMmaRows + 4;
  static constexpr int kSumBytes = 4 * (kSplits ? (kAlongK + 1) * kSums : kGated ? kOutTokens * kPitch : 0);
  static constexpr int kOutBytes = kShares ? (kGated ? 1 : kGroups) * kOutTokens * 128 : 0;
  // Of sums that are given, by which they come to shared memory in stages: a thread's and bytes of all.
  static constexpr int kChunkFours = 4, kChunkBytes = kChunkFours * 16 * kConsumers;
  static constexpr int kChunks = kSums * 4 / kChunkBytes;
  static constexpr int kBarriers = 1024;
  static constexpr int kHeader = (kOutBytes + kSumBytes + 1023) / 1024 * 1024 + kBarriers;
  static_assert(kTokens >= 32 && kTokens % 8 == 0 && kTokens <= 256 && kGroups * kMmaRows == kRows * kAlongK);
  static_assert(!kGated || (kRows == 128 && kShares));
  static_assert(kTokens <= 128 || kOneSum);
  static_assert(kInt4 || (kShares && !kGated && !kMinimum && !kRounded));
  static_assert(kAlongK == 1 || kSplits);
  static_assert(!kMinimum || kStep == 32);
  static constexpr int kStages = std::min(kMaxStages, (kSharedBytes - 1024 - kHeader) / kStage);  // at most
  static_assert(kStages >= kLag + 2 && (!kShares || kChunkBytes <= kStage));
};

// What the host decides.
struct Shape {
  int32_t strips;  // of a tile of the weight
  int32_t row_tiles, token_tiles;
  int32_t band;          // that many token tiles are walked together along the weight
  int32_t blocks, part;  // stages that k takes, all and of a CTA
  int32_t unshared;      // that many tiles, the first ones, have a CTA or a cluster each
  int32_t share;         // of the stages of all others, one after the other, a CTA's
  int32_t earlier;       // so many stages less than that has who begins a tile, and who ends it more
  int32_t givers;        // CTAs that have a share
  int32_t stages;
  int32_t box_tokens;   // of x, that a load brings: those there are, since rows of zeros take TMA longer
  int32_t group_shift;  // log2 of the columns of a group where a stage has several, or 31
  int32_t groups;       // of a stage
  int32_t scale_bytes;  // of a strip's scales in a stage
  int32_t bytes;        // of a stage
  bool store_by_tma;
  // What a flag in the workspace becomes when sums are there: no other launch has the same, so that flags need not be
  // written before. (compute-sanitizer's initcheck sees them read.)
  uint64_t ticket;
};

template <bool kBf16>
CUTE_DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (kBf16) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

// What a CTA makes, one after the other: the beginning of a shared tile, tiles of its own, and the end of a shared one.
template <bool kShares>
struct Tiles {
  Shape const& shape;
  int cta, step, tile;  // tile: the next one of its own
  int turn = 0;
  int at, end;               // of shared tiles' stages, those that are the CTA's
  int row_tile, token_tile;  // what it makes,
  int first, last;           // stages of it,
  bool gives = false;        // whether another CTA adds its sums,
  int giver = kMaxCtas;      // and the first CTA whose sums are to be added

  // part: the CTA's part of k, where a cluster has a tile.
  CUTE_DEVICE Tiles(Shape const& shape, int cta, int step, int part) : shape(shape), cta(cta), step(step), tile(cta) {
    first = min(shape.blocks, shape.part * part), last = min(shape.blocks, first + shape.part);
    if constexpr (kShares) at = border(cta), end = border(cta + 1);
  }

  CUTE_DEVICE bool next() {
    int const i = kShares ? at / shape.blocks : 0, tile_end = (i + 1) * shape.blocks;
    if (kShares && turn == 0) {
      turn = 1;
      int const from = end > tile_end ? tile_end : at;
      if (end != tile_end && end > from) {
        take(shape.unshared + from / shape.blocks, from % shape.blocks, from % shape.blocks + end - from);
        gives = true;
        return true;
      }
    }
    if (tile < shape.unshared) {
      take(tile, kShares ? 0 : first, kShares ? shape.blocks : last);
      tile += step;
      return true;
    }
    if (kShares && turn == 1) {
      turn = 2;
      if (end >= tile_end) {
        take(shape.unshared + i, at - i * shape.blocks, shape.blocks);
        giver = i * shape.blocks / shape.share;
        return true;
      }
    }
    return false;
  }

 private:
  // Where a CTA's stages of shared tiles begin. Within a tile that is a little earlier, since who ends it adds what
  // others gave, which takes them as long to write.
  CUTE_DEVICE int border(int cta) const {
    int const all = (shape.row_tiles * shape.token_tiles - shape.unshared) * shape.blocks;
    int const at = min(all, cta * shape.share);
    return at % shape.blocks > shape.earlier ? at - shape.earlier : at;
  }
  CUTE_DEVICE void take(int of, int from, int to) {
    int const in_band = shape.band * shape.row_tiles, band = of / in_band * shape.band, i = of % in_band;
    int const width = min(shape.band, shape.token_tiles - band);
    token_tile = band + i % width;
    row_tile = i / width;
    first = from, last = to;
    gives = false;
  }
};

// Codes are mapped as (word of 8 bytes in a span, span, strip), the rest by rows.
CUTE_DEVICE void load_codes(const CUtensorMap& map, uint32_t to, uint32_t barrier, int span, int strip,
                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(0), "r"(span), "r"(strip), "r"(barrier), "l"(policy)
      : "memory");
}
CUTE_DEVICE void prefetch_codes(const CUtensorMap& map, int span, int strip) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(0), "r"(span),
               "r"(strip)
               : "memory");
}
CUTE_DEVICE void load_box(const CUtensorMap& map, uint32_t to, uint32_t barrier, int column, int row, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
CUTE_DEVICE void load_bytes(uint32_t to, uint32_t barrier, void const* from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
CUTE_DEVICE void store_release(uint64_t* to, uint64_t value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
CUTE_DEVICE uint64_t load_acquire(uint64_t const* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace mixed

template <class Variant>
__global__ void __launch_bounds__(mixed::Tile<Variant>::kThreads, 1)
    mixed_kernel(const __grid_constant__ cutegemm_call call, const __grid_constant__ mixed::Shape shape,
                 const __grid_constant__ CUtensorMap map_codes, const __grid_constant__ CUtensorMap map_scales,
                 const __grid_constant__ CUtensorMap map_zeros, const __grid_constant__ CUtensorMap map_x,
                 const __grid_constant__ CUtensorMap map_d) {
  using namespace mixed;
  using T = Tile<Variant>;
  using Element = typename Variant::Element;
  using Formula = typename Variant::Formula;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  using cutlass::arch::NamedBarrier;
  constexpr int kTokens = T::kTokens, kRows = T::kRows, kWarps = T::kWarps, kConsumers = T::kConsumers;

  extern __shared__ uint8_t raw[];
  // An offset from raw, so that the compiler knows it for shared memory.
  uint8_t* const shared = raw + (-cast_smem_ptr_to_uint(raw) & 1023);
  uint8_t* const out = shared;
  auto* const own_sums = reinterpret_cast<float*>(shared + T::kOutBytes);
  auto* const others_sums = own_sums + T::kAlongK * T::kSums;
  uint8_t* const stages = shared + T::kHeader;
  auto* const barriers = reinterpret_cast<uint64_t*>(stages - T::kBarriers);  // full, empty, and of sums
  auto const full = [&](int stage) { return reinterpret_cast<Full*>(&barriers[stage]); };
  auto const empty = [&](int stage) { return reinterpret_cast<Empty*>(&barriers[kMaxStages + stage]); };
  uint64_t& sums_ready = barriers[2 * kMaxStages];

  int const split = T::kSplits ? call.options.split : 1, rank = T::kSplits ? int(block_rank_in_cluster()) : 0;
  int const warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
  Tiles<T::kShares> tiles(shape, int(blockIdx.x) / split, int(gridDim.x) / split, rank);
  // What a CTA gives to another one, and the flags that say that it is there.
  auto const piece_of = [&](int cta) {
    return static_cast<float4*>(call.workspace) + int64_t(cta) * (T::kChunks * T::kChunkBytes / 16);
  };
  auto* const flags = reinterpret_cast<uint64_t*>(piece_of(shape.givers));
  int const gates = call.n / 2 / kStrip;  // strips ahead of those that are gated

  launch_next_kernel();
  constexpr int kRunning = kConsumers + 64;  // threads that do something
  if (warp == kWarps) {                      // it makes the barriers for its loads, and waits for nobody
    if (lane == 0) {
      for (int s = 0; s < shape.stages; ++s) full(s)->init(2), empty(s)->init(kWarps);
      reinterpret_cast<Full&>(sums_ready).init(1);
      cutlass::arch::fence_barrier_init();
      if (split > 1) {
        reinterpret_cast<Full&>(sums_ready).arrive_and_expect_tx(T::kSums / split * (split - 1) * int(sizeof(float)));
      }
    }
    __syncwarp();
    NamedBarrier::arrive(kRunning, 1);
  } else if (warp <= kWarps + 1) {
    if (threadIdx.x == 0) {
      for (auto const* map : {&map_codes, &map_scales, &map_x}) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
      }
    }
    NamedBarrier::sync(kRunning, 1);
  }
  if (split > 1) cluster_arrive_relaxed();

  int const stage_count = T::kShares ? T::kStages : shape.stages;
  int stage = 0, phase = 0;
  auto const next_stage = [&] {
    if (++stage == stage_count) stage = 0, phase ^= 1;
  };

  if (warp >= kWarps) {
    if constexpr (T::kShares) cutlass::arch::warpgroup_reg_dealloc<56>();
    // Of the first strip of a tile, and in a gated one of the first of those that are gated.
    auto const strip_of = [&](int half) {
      return tiles.row_tile * (T::kGated ? T::kWidth / kStrip : shape.strips) + half * gates;
    };
    constexpr int kHalves = T::kGated ? 2 : 1;
    if (warp == kWarps && lane == 0) {
      bool more = tiles.next();
      if (T::kInt4 && !call.options.no_chain && more) {
        int const ahead = min(call.options.prefetch * 1024 / T::kCodes, tiles.last - tiles.first);
        for (int i = 0; i < ahead; ++i) {
          for (int h = 0; h < kHalves; ++h) prefetch_codes(map_codes, (tiles.first + i) * T::kSpans, strip_of(h));
        }
      }
      wait_for_previous_kernel();
      uint64_t const once = kTokens > 32 ? read_often() : read_once();
      int const size = call.groups.size;
      for (; more; more = tiles.next()) {
        int const begin = tiles.first * T::kStageK;
        int group = shape.groups > 1 ? tiles.first * shape.groups : begin / size, in_group = begin - group * size;
        for (int block = tiles.first; block < tiles.last; ++block, next_stage()) {
          empty(stage)->wait(phase ^ 1);
          full(stage)->arrive_and_expect_tx(shape.bytes);
          uint32_t const to = cast_smem_ptr_to_uint(stages + stage * T::kStage), to_scales = to + T::kCodes + T::kX;
          uint32_t const barrier = cast_smem_ptr_to_uint(full(stage));
          CUTE_UNROLL
          for (int h = 0; h < kHalves; ++h) {
            int const strip = strip_of(h), at = h * T::kStrips / 2;
            if constexpr (!T::kInt4) {
              load_box(map_codes, to, barrier, block * T::kStageK, strip * kStrip, once);
              continue;
            }
            load_codes(map_codes, to + at * T::kStripBytes, barrier, block * T::kSpans, strip, once);
            load_box(map_scales, to_scales + at * shape.scale_bytes, barrier, group * kStrip, strip, once);
            if (call.groups.zeros) {
              load_box(map_zeros, to_scales + T::kScales + at * shape.scale_bytes, barrier, group * kStrip, strip,
                       once);
            }
          }
          if (!T::kInt4) continue;
          if (shape.groups > 1) {
            group += shape.groups;
          } else if ((in_group += T::kStageK) >= size) {
            in_group = 0, ++group;
          }
        }
        for (int i = T::kShares ? (tiles.cta - tiles.giver) * T::kChunks : 0; i > 0; --i, next_stage()) {
          empty(stage)->wait(phase ^ 1);
          full(stage)->arrive();
        }
      }
    } else if (warp == kWarps + 1 && lane == 0) {
      wait_for_previous_kernel();
      uint64_t const often = read_often();
      int const bytes = T::kSpans * shape.box_tokens * 128;
      while (tiles.next()) {
        for (int block = tiles.first; block < tiles.last; ++block, next_stage()) {
          empty(stage)->wait(phase ^ 1);
          full(stage)->arrive_and_expect_tx(bytes);
          uint32_t const to = cast_smem_ptr_to_uint(stages + stage * T::kStage) + T::kCodes;
          uint32_t const barrier = cast_smem_ptr_to_uint(full(stage));
          CUTE_UNROLL
          for (int s = 0; s < T::kSpans; ++s) {
            load_box(map_x, to + s * kTokens * 128, barrier, block * T::kStageK + s * kSpan, tiles.token_tile * kTokens,
                     often);
          }
        }
        for (int cta = tiles.giver; T::kShares && cta < tiles.cta; ++cta) {
          while (load_acquire(flags + cta) != shape.ticket) continue;
          flags[cta] = 0;  // the launch may be replayed
          asm volatile("fence.proxy.async.global;" ::: "memory");
          for (int chunk = 0; chunk < T::kChunks; ++chunk, next_stage()) {
            empty(stage)->wait(phase ^ 1);
            full(stage)->arrive_and_expect_tx(T::kChunkBytes);
            load_bytes(cast_smem_ptr_to_uint(stages + stage * T::kStage), cast_smem_ptr_to_uint(full(stage)),
                       piece_of(cta) + chunk * (T::kChunkBytes / 16), T::kChunkBytes);
          }
        }
      }
    } else if (T::kShares && warp == kWarps + 2) {
      // While consumers go on, this warp sees to it that what they give is there before the flag.
      if (tiles.next() && tiles.gives) {
        NamedBarrier::sync(kConsumers + 32, kGiven);
        if (lane == 0) store_release(flags + tiles.cta, shape.ticket);
      }
    }
    __syncwarp();
    if (split > 1) {  // nor may it leave while another reads its sums
      cluster_wait();
      cluster_arrive_relaxed();
      cluster_wait();
    }
    return;
  }

  if constexpr (T::kShares) cutlass::arch::warpgroup_reg_alloc<224>();
  wait_for_previous_kernel();
  // Warps of a warpgroup have strips side by side, and of a stage its own k. Of an MMA's sums a thread holds, for every
  // 8 tokens, 2 neighbours in 2 rows that lie 8 apart.
  int const group = warp / 4, along_k = warp / T::kStrips;
  int const strip = warp % T::kStrips;
  int const own_row = strip * kStrip + lane / 4, own_token = lane % 4 * 2;

  using Atom = decltype(GMMA::rs_op_selector<Element, Element, float, cute::Shape<Int<64>, Int<kTokens>, Int<16>>,
                                             GMMA::Major::K, GMMA::Major::K>());
  static_assert(size<1>(typename MMA_Traits<Atom>::Shape_MNK{}) == kTokens);  // CuTe has some widths on demand only
  auto mma = make_tiled_mma(Atom{});
  auto const thread_mma = mma.get_slice(threadIdx.x % 128);
  using LayoutX =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<Int<kTokens>, Int<kSpan>>{}));
  using Sum = decltype(partition_fragment_C(mma, cute::Shape<Int<kMmaRows>, Int<kTokens>>{}));
  constexpr int kSums = kTokens / 2, kWords = T::kPiece / 16;  // of a thread
  using A = decltype(make_tensor<Element>(cute::Shape<cute::Shape<_2, _2, _2>, _1, Int<kWords>>{}));
  static_assert(size(Sum{}) == kSums);
  Sum total;
  A a[2];
  uint8_t* at = stages;  // the stage that is worked on
  // Its x from k on, as far as the span reaches.
  Tensor const first_x = thread_mma.make_fragment_B(
      thread_mma.partition_B(make_tensor(make_smem_ptr(reinterpret_cast<Element*>(stages + T::kCodes)), LayoutX{})));
  auto const x_from = [&](int k) {
    return make_tensor(first_x.data() + (stage * T::kStage + k / kSpan * (kTokens * 128)) / 16, first_x.layout());
  };
  // With wgmma, whose last MMAs still run when it returns: those of the stage that is held.
  int held;
  auto const release = [&] {
    if (held >= 0 && lane == 0) empty(held)->arrive();
  };

  constexpr bool kBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  using Values = cutegemm::Values<typename Variant::Weight, kBf16>;
  constexpr int kScalesAt = T::kCodes + T::kX, kZerosAt = kScalesAt + T::kScales;
  [[maybe_unused]] uint32_t nans[2];  // of the lane's k of both rows, see Values::nans
  // Bytes from a group's 16 scales to the next group's.
  int const group_bytes = T::kRounded ? kStrip * 2 : shape.scale_bytes / shape.groups;
  int const strip_scales = T::kMostGroups == 1 ? group_bytes : shape.scale_bytes;
  auto const group_at = [&](int k) { return T::kMostGroups == 1 ? 0 : (k >> shape.group_shift) * group_bytes; };
  int const own_codes = strip * T::kStripBytes + lane * 16;

  [[maybe_unused]] auto const zeros_of = [&](float zero) {
    if constexpr (T::kInt4) {
      return Values::zeros(zero, zero);
    } else {
      return 0;
    }
  };
  constexpr float kZero = T::kMinimum ? 0.f : 8.f;
  bool const has_zeros = !T::kMinimum && call.groups.zeros;

  // Values that are final: while MMAs of one piece of a stage run, values of the next are made from what was read
  // before.
  constexpr int kParts = std::max(1, T::kStageK / T::kStep);  // of a stage
  constexpr int kOfPiece = T::kOneSum ? kWords : 1;           // 16 k each
  [[maybe_unused]] uint32_t loaded[2][kOfPiece][T::kInt4 ? 1 : 2];
  [[maybe_unused]] uint32_t loaded_scale[kParts][2], loaded_zero[kParts][2], scale[kParts][2], offset[kParts][2];
  [[maybe_unused]] decltype(zeros_of(kZero)) zeros_of_part[kParts];
  for (auto& zeros : zeros_of_part) zeros = zeros_of(kZero);
  [[maybe_unused]] auto const read = [&](int stage, auto piece) {
    uint8_t const* const at = stages + stage * T::kStage;
    constexpr int kFrom = piece * T::kPiece, kTo = piece % 2;
    if constexpr (T::kInt4) {
      uint8_t const* const from = at + own_codes + kFrom / kSpan * kSpanBytes + kFrom % kSpan / 4;
      if constexpr (kOfPiece == 2) {
        uint2 const words = *reinterpret_cast<uint2 const*>(from);
        loaded[kTo][0][0] = words.x, loaded[kTo][1][0] = words.y;
      } else {
        uint4 const words = *reinterpret_cast<uint4 const*>(from);
        loaded[kTo][0][0] = words.x, loaded[kTo][1][0] = words.y;
        loaded[kTo][2][0] = words.z, loaded[kTo][3][0] = words.w;
      }
    } else {
      // They stand in the order of 64-byte swizzle: as 16 bytes, exchanged by two bits of the row.
      uint8_t const* const own = at + own_row * kSpan + lane % 4 * 2;
      for_each(make_seq<kOfPiece>{}, [&](auto k) {
        uint8_t const* const chunk = own + ((kFrom / 16 + k) ^ lane / 8) * 16;
        for_each(make_seq<2>{}, [&](auto row) {
          auto const pair = [&](int k) {
            return uint32_t(*reinterpret_cast<uint16_t const*>(chunk + row * (8 * kSpan) + k));
          };
          loaded[kTo][k][row] = pair(0) | pair(8) << 16;
        });
      });
    }
  };
  [[maybe_unused]] auto const read_scales = [&](int stage) {
    uint8_t const* const from = stages + stage * T::kStage + kScalesAt + strip * strip_scales + lane / 4 * 2;
    if constexpr (!T::kRounded) return;
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      CUTE_UNROLL
      for (int row = 0; row < 2; ++row) {
        uint8_t const* const own = from + group_at(part * T::kStep) + row * 16;
        loaded_scale[part][row] = *reinterpret_cast<uint16_t const*>(own);
        if (T::kMinimum || has_zeros) loaded_zero[part][row] = *reinterpret_cast<uint16_t const*>(own + T::kScales);
      }
    }
  };
  // Of both rows, in both halves. fused: see Values::make_scaled.
  [[maybe_unused]] auto const take_scales = [&](auto fused) {
    if constexpr (T::kRounded) {
      auto const twice = [](uint32_t lower) { return __byte_perm(lower, 0, 0x1010); };
      CUTE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        CUTE_UNROLL
        for (int row = 0; row < 2; ++row) {
          uint32_t const own = twice(loaded_scale[part][row]);
          if constexpr (fused) {
            scale[part][row] = multiply_pair<kBf16>(own, Values::kScaled);
            offset[part][row] = T::kMinimum
                                    ? multiply_pair<kBf16>(twice(loaded_zero[part][row]), Values::scaled_one(row))
                                    : multiply_pair<kBf16>(own, Values::scaled_minus_eight(row));
            continue;
          }
          scale[part][row] = Values::kFactor == 1.f ? own : multiply_pair<kBf16>(own, Values::twice(Values::kFactor));
          if constexpr (T::kMinimum) offset[part][row] = twice(loaded_zero[part][row]);
        }
        if (!fused && has_zeros) {
          auto const none = Values::zeros(0.f, 0.f);
          uint32_t const factor = Values::twice(-1.f / Values::kFactor);
          zeros_of_part[part] = {fma_pairs<kBf16>(twice(loaded_zero[part][0]), factor, none.lower),
                                 fma_pairs<kBf16>(twice(loaded_zero[part][1]), factor, none.upper)};
        }
      }
    }
  };
  [[maybe_unused]] auto const make_final = [&](auto piece, auto fused) {
    constexpr int kFrom = piece % 2;
    Tensor registers = recast<uint32_t>(a[kFrom]);
    for_each(make_seq<kOfPiece>{}, [&](auto k) {
      uint32_t four[4];
      if constexpr (T::kInt4) {
        constexpr int kPart = (piece * kOfPiece + k) * kParts / (T::kPieces * kOfPiece);
        if constexpr (fused) {
          Values::make_scaled(four, loaded[kFrom][k][0], scale[kPart], offset[kPart]);
        } else {
          Values::make(four, loaded[kFrom][k][0], zeros_of_part[kPart]);
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            four[i] = T::kMinimum ? fma_pairs<kBf16>(four[i], scale[kPart][i % 2], offset[kPart][i % 2])
                                  : multiply_pair<kBf16>(four[i], scale[kPart][i % 2]);
          }
        }
      } else {
        CUTE_UNROLL
        for (int row = 0; row < 2; ++row) {
          if constexpr (T::kNans) nans[row] |= Values::nans(loaded[kFrom][k][row]);
          Values::make(four[row], four[row + 2], loaded[kFrom][k][row]);
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) registers(4 * k + i) = four[i];
    });
  };
  [[maybe_unused]] uint32_t first_x_at = first_x.data().desc_.reg32_[0];
  if constexpr (T::kOneSum) asm volatile("" : "+r"(first_x_at));  // or it would be made again for every stage
  [[maybe_unused]] auto const multiply_piece = [&](uint32_t x_at, auto piece) {
    constexpr int kFrom = piece * T::kPiece;
    GmmaDescriptor from = first_x.data().desc_;
    from.reg32_[0] = x_at;
    warpgroup_fence_operand(total);
    warpgroup_fence_operand(a[piece % 2]);
    warpgroup_arrive();
    for_each(make_seq<kOfPiece>{}, [&](auto k) {
      constexpr int kAt = kFrom + k * 16;
      Tensor const x =
          make_tensor(GMMA::DescriptorIterator{from} + kAt / kSpan * (kTokens * 128) / 16, first_x.layout());
      gemm(mma, a[piece % 2](_, _, k), x(_, _, Int<kAt % kSpan / 16>{}), total);
    });
    warpgroup_commit_batch();
  };
  // All k of a tile. arrives_at: the block at which the other warpgroup may begin, or -1.
  [[maybe_unused]] auto const multiply_final = [&](int blocks, int arrives_at, auto fused) {
    full(stage)->wait(phase);
    read(stage, _0{}), read(stage, _1{}), read_scales(stage);
    take_scales(fused);
    make_final(_0{}, fused);
    for (int block = 0; block < blocks; ++block) {
      if (block == arrives_at) NamedBarrier::arrive(kConsumers, kTurn);
      // The same in all lanes, which the compiler must be told for it to use its uniform registers.
      uint32_t const x_at = __shfl_sync(~0u, first_x_at + stage * (T::kStage / 16), 0);
      int const own = stage;
      bool const more = block + 1 < blocks;
      for_each(make_seq<T::kPieces>{}, [&](auto piece) {
        constexpr bool kLast = piece + 1 == T::kPieces, kAhead = piece + 2 >= T::kPieces;
        bool ready = false;
        if constexpr (kAhead && !kLast) {
          next_stage();
          ready = full(stage)->test_wait(phase, more);
        }
        multiply_piece(x_at, piece);
        if constexpr (!kAhead) {
          read(own, Int<piece + 2>{});
        } else if (more) {
          if constexpr (!kLast) {
            if (!ready) full(stage)->wait(phase);
            read_scales(stage);
          }
          read(stage, Int<piece + 2 - T::kPieces>{});
        }
        if (kLast && !more) return;
        if constexpr (kLast) take_scales(fused);
        warpgroup_wait<1>();
        if constexpr (piece == 0) {
          release();
          held = own;
        }
        make_final(Int<(piece + 1) % T::kPieces>{}, fused);
      });
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(total);
    if constexpr (T::kRounded) {
      if constexpr (fused) {
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) total(i) *= Values::scaled_by(i / 2 % 2);
      }
    }
  };

  // Where a thread finds the scales of its rows: a word, and the bytes of it that are FP32, or are when converted.
  int const scale_width = group_bytes / kStrip;
  int const own_scales = strip * shape.scale_bytes + (lane / 4 * scale_width & ~3);
  bool const upper = scale_width == 2 && lane / 4 % 2, fp16 = call.groups.dtype == CUTEGEMM_FP16;
  uint32_t selector = scale_width == 4 ? 0x3210 : fp16 ? (upper ? 0x4432 : 0x4410) : (upper ? 0x3244 : 0x1044);
  asm volatile("" : "+r"(selector));  // or it would be made again for every scale
  auto const of_rows = [&](float (&to)[2], int from, int step) {
    uint8_t const* const scales = at + from + own_scales + group_at(along_k * T::kOwnK + step * T::kStep);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      uint32_t const word = *reinterpret_cast<uint32_t const*>(scales + row * (group_bytes / 2));
      uint32_t const bits = __byte_perm(word, 0, selector);
      to[row] = fp16 ? __half2float(__ushort_as_half(uint16_t(bits))) : __uint_as_float(bits);
    }
  };
  // What a step of k is multiplied with in a thread's rows.
  struct Step {
    float scale[2];
    float minimum[2];
  };
  auto const scales_of = [&](int step) {
    Step s;
    of_rows(s.scale, kScalesAt, step);
    CUTE_UNROLL
    for (float& scale : s.scale) scale *= Values::kFactor;
    if constexpr (T::kMinimum) of_rows(s.minimum, kZerosAt, step);
    return s;
  };
  auto zeros = zeros_of(kZero);
  Sum part;
  [[maybe_unused]] Sum x_sums;  // of tokens over a step, in every row the same
  A ones;
  fill(ones, Element(1.f));
  Step of_part;
  auto const finish_step = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(part);
    if constexpr (T::kMinimum) warpgroup_fence_operand(x_sums);
    Sum& sum = total;
    CUTE_UNROLL
    for (int i = 0; i < kSums; ++i) {
      sum(i) = __fmaf_rn(part(i), of_part.scale[i / 2 % 2], sum(i));
      if constexpr (T::kMinimum) sum(i) = __fmaf_rn(x_sums(i), of_part.minimum[i / 2 % 2], sum(i));
    }
    warpgroup_fence_operand(sum);  // or they would be put off until `part` has other sums
  };
  // A stage with exact values.
  [[maybe_unused]] auto const multiply_exact = [&] {
    if constexpr (!T::kOneSum) {
      for_each(make_seq<T::kPieces>{}, [&](auto piece) {
        constexpr int kInStep = piece % T::kOfStep, kOwn = piece * T::kPiece;
        constexpr bool kFirst = kInStep == 0, kLast = kInStep == T::kOfStep - 1;
        if (kFirst && has_zeros) {
          float of_row[2];
          of_rows(of_row, kZerosAt, piece / T::kOfStep);
          zeros = Values::zeros(of_row[0], of_row[1]);
        }
        uint32_t word[kWords];
        uint8_t const* const words =
            at + own_codes + along_k * (T::kOwnK / kSpan * kSpanBytes) + kOwn / kSpan * kSpanBytes + kOwn % kSpan / 4;
        if constexpr (T::kPiece == kSpan) {
          uint4 const four = *reinterpret_cast<uint4 const*>(words);
          word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
        } else {
          uint2 const two = *reinterpret_cast<uint2 const*>(words);
          word[0] = two.x, word[1] = two.y;
        }
        A& values = a[piece % 2];
        Tensor registers = recast<uint32_t>(values);
        CUTE_UNROLL
        for (int w = 0; w < kWords; ++w) {
          uint32_t four[4];
          Values::make(four, word[w], zeros);
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) registers(4 * w + i) = four[i];
        }
        if constexpr (kFirst) {
          finish_step();
          if constexpr (piece == 0) release();
          if constexpr (T::kTakesTurns) NamedBarrier::sync(kConsumers, kTurn + group);
        }
        Tensor const x = x_from(along_k * T::kOwnK + kOwn);
        warpgroup_fence_operand(part);
        if constexpr (T::kMinimum) warpgroup_fence_operand(x_sums);
        warpgroup_arrive();
        for_each(make_seq<kWords>{}, [&](auto k) {
          mma.accumulate_ = k == 0 && kFirst ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
          auto const of_x = x(_, _, k + kOwn % kSpan / 16);
          gemm(mma, values(_, _, k), of_x, part);
          if constexpr (T::kMinimum) gemm(mma, ones(_, _, 0), of_x, x_sums);
        });
        warpgroup_commit_batch();
        if constexpr (T::kTakesTurns && kLast) NamedBarrier::arrive(kConsumers, kTurn + 1 - group);
        if constexpr (kFirst) of_part = scales_of(piece / T::kOfStep);
        if constexpr (!kFirst) warpgroup_wait<1>();  // the values before are not read any more
      });
      held = stage;
    }
  };
  if (T::kTakesTurns && group == 1) NamedBarrier::arrive(kConsumers, kTurn);

  if (split > 1) cluster_wait();                       // no CTA of a cluster may write to another before that one runs
  bool const exchanged = T::kAlongK > 1 || split > 1;  // whether sums are added before they are d's
  // Rows of the tile, columns of d, that this CTA finishes where sums are exchanged, and of them a thread's.
  int const part_bits = __ffs(kRows / split) - 1, part_rows = 1 << part_bits;
  int const part_row = int(threadIdx.x) & part_rows - 1, part_token = int(threadIdx.x) >> part_bits;
  auto const token_of = [&](int i) { return i / 4 * 8 + own_token + i % 2; };
  auto const row_of = [&](int i) { return own_row + i / 2 % 2 * 8; };
  bool const has_elements = !T::kGated && !std::is_empty_v<typename Formula::Element> && call.residual.data;
  while (tiles.next()) {
    int const row0 = tiles.row_tile * (T::kGated ? T::kWidth : shape.strips * kStrip);
    int const token0 = tiles.token_tile * kTokens, blocks = tiles.last - tiles.first;
    int const width = T::kGated ? call.n / 2 : call.n;  // of d
    int const end = T::kGated ? width : min(width, row0 + shape.strips * kStrip);
    // The epilogue's operands of a thread's rows of w, columns of d; or of the one that it finishes.
    typename Formula::Column columns[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = exchanged ? rank * part_rows + part_row : own_row + i * 8;
      int const column = T::kGated ? row + group * (width - T::kWidth) : row;
      columns[i] = Formula::column(call, min(row0 + column, call.n - 1));
    }

    held = -1;
    clear(total);
    nans[0] = nans[1] = 0;
    if constexpr (T::kOneSum) {
      mma.accumulate_ = GMMA::ScaleOut::One;
      bool const lags = T::kLag && blocks >= stage_count;
      if (lags && group == 1) NamedBarrier::sync(kConsumers, kTurn);
      int const arrives_at = lags && group == 0 ? T::kLag : -1;
      if constexpr (!T::kRounded || !kBf16) {
        multiply_final(blocks, arrives_at, false_type{});
      } else if (has_zeros) {
        if constexpr (!T::kMinimum) multiply_final(blocks, arrives_at, false_type{});
      } else {
        multiply_final(blocks, arrives_at, true_type{});
      }
      if constexpr (T::kNans) {  // four lanes have a row's k
        CUTE_UNROLL
        for (int row = 0; row < 2; ++row) {
          uint32_t found = nans[row];
          found |= __shfl_xor_sync(~0u, found, 1), found |= __shfl_xor_sync(~0u, found, 2);
          if (!(found & Values::kNan)) continue;
          CUTE_UNROLL
          for (int i = 0; i < kSums; ++i) {
            if (i / 2 % 2 == row) total(i) = __int_as_float(0x7fffffff);
          }
        }
      }
      if constexpr (!T::kInt4 && Values::kFactor != 1.f) {
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) total(i) *= Values::kFactor;
      }
    } else {
      clear(part);
      if constexpr (T::kMinimum) clear(x_sums);
      of_part = {};
      for (int block = 0; block < blocks; ++block) {
        full(stage)->wait(phase);
        at = stages + stage * T::kStage;
        multiply_exact();
        next_stage();
      }
      finish_step();
    }
    release();

    if constexpr (T::kSplits) {
      if (exchanged) {
        float* const own = own_sums + along_k * T::kSums;  // [CTA that finishes][token][row]
        int bits = part_bits;
        asm volatile("" : "+r"(bits));  // or registers would hold the addresses of all sums, also while MMAs run
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) {
          int const row = row_of(i);
          own[((row >> bits) * kTokens + token_of(i) << bits) + (row & part_rows - 1)] = total(i);
        }
        int const of_part = T::kSums / split;
        if (split > 1) {
          if constexpr (T::kAlongK > 1) {
            NamedBarrier::sync(kConsumers, 2);
            for (int i = int(threadIdx.x); i < T::kSums; i += kConsumers) {
              CUTE_UNROLL
              for (int p = 1; p < T::kAlongK; ++p) own_sums[i] += own_sums[p * T::kSums + i];
            }
          }
          cutlass::arch::fence_view_async_shared();
        }
        NamedBarrier::sync(kConsumers, 2);
        if (split > 1) {
          if (warp < split && warp != rank && lane == 0) {
            copy_to_remote(remote_address(others_sums + rank * of_part, warp), remote_address(&sums_ready, warp),
                           own_sums + warp * of_part, of_part * int(sizeof(float)));
          }
          wait_cluster(sums_ready, 0);
        }
        int const n = row0 + rank * part_rows + part_row;
        for (int token = part_token; token < kTokens; token += kConsumers >> part_bits) {
          int const m = token0 + token;
          if (m >= call.m || n >= end) continue;
          int const i = (token << part_bits) + part_row;
          float sum = 0.f;
          if (split > 1) {
            for (int s = 0; s < split; ++s) sum += (s == rank ? own_sums : others_sums)[s * of_part + i];
          } else {
            CUTE_UNROLL
            for (int p = 0; p < T::kAlongK; ++p) sum += own_sums[p * T::kSums + i];
          }
          typename Formula::Element element = {};
          if (has_elements) element = Formula::element(call, m, n);
          float const value = Formula::apply(sum, Formula::row(call, m), columns[0], element);
          store_from_float(call.d, call.d_dtype, m * call.d_stride[0] + n * call.d_stride[1], value);
        }
        if (split > 1) {
          cluster_arrive_relaxed();
          cluster_wait();  // none may leave while another reads its sums
          return;          // there is no second tile
        }
        NamedBarrier::sync(kConsumers, 2);
        continue;
      }
    }

    if constexpr (T::kShares) {
      // Of a thread's sums four are neighbours, and so are those of the threads.
      int const thread = int(threadIdx.x) % 128;
      if (tiles.gives) {
        float4* const to = piece_of(tiles.cta) + group * (T::kChunkFours * 128) + thread;
        for_each(make_seq<T::kChunks * T::kChunkFours>{}, [&](auto i) {
          to[(i / T::kChunkFours * T::kGroups * T::kChunkFours + i % T::kChunkFours) * 128] = {
              total(4 * i), total(4 * i + 1), total(4 * i + 2), total(4 * i + 3)};
        });
        NamedBarrier::arrive(kConsumers + 32, kGiven);
        continue;
      }
      for (int cta = tiles.giver; cta < tiles.cta; ++cta) {
        for_each(make_seq<T::kChunks>{}, [&](auto chunk) {
          full(stage)->wait(phase);
          auto const* const from =
              reinterpret_cast<float4 const*>(stages + stage * T::kStage) + group * (T::kChunkFours * 128) + thread;
          for_each(make_seq<T::kChunkFours>{}, [&](auto j) {
            constexpr int kAt = (chunk * T::kChunkFours + j) * 4;
            float4 const v = from[j * 128];
            total(kAt) += v.x, total(kAt + 1) += v.y, total(kAt + 2) += v.z, total(kAt + 3) += v.w;
          });
          __syncwarp();
          if (lane == 0) empty(stage)->arrive();
          next_stage();
        });
      }
    }

    auto const apply = [&](auto element) {
      CUTE_UNROLL
      for (int i = 0; i < kSums; ++i) {
        total(i) = Formula::apply(total(i), typename Formula::Row{}, columns[i / 2 % 2], element(i));
      }
    };
    if (has_elements) {
      apply([&](int i) {
        return Formula::element(call, min(token0 + token_of(i), call.m - 1), min(row0 + row_of(i), width - 1));
      });
    } else {
      apply([](int) { return typename Formula::Element{}; });
    }
    if constexpr (T::kGated) {
      for_each(make_seq<kTokens / T::kOutTokens>{}, [&](auto part) {
        constexpr int kFirst = part * T::kOutTokens / 2, kLast = kFirst + T::kOutTokens / 2;
        auto const given = [&](int i) -> float& {
          return own_sums[(token_of(i) - part * T::kOutTokens) * T::kPitch + row_of(i) - group * kMmaRows];
        };
        if (group == 1) {
          CUTE_UNROLL
          for (int i = kFirst; i < kLast; ++i) given(i) = total(i);
        }
        NamedBarrier::sync(kConsumers, 2);
        if (group == 0) {
          CUTE_UNROLL
          for (int i = kFirst; i < kLast; ++i) total(i) = silu(total(i)) * given(i);
        }
        NamedBarrier::sync(kConsumers, 2);
      });
      if (group == 1) continue;
    }
    if (T::kShares && shape.store_by_tma) {
      auto const storer = [&] { return warp % 4 == 0 && elect_one_sync(); };
      uint32_t const box = cast_smem_ptr_to_uint(out + group * T::kOutTokens * 128);
      // A lane's row of the first matrices.
      uint32_t to = box + (lane / 16 * 8 + lane % 8) * 128 + ((warp % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
      asm volatile("" : "+r"(to));  // or registers would hold those of all matrices, also while MMAs run
      for_each(make_seq<kTokens / T::kOutTokens>{}, [&](auto half) {
        constexpr int kFirst = half * T::kOutTokens;
        if (storer()) wait_until_stores_read<0>();
        NamedBarrier::sync(128, 3 + group);
        auto const store_as = [&](auto fp16) {
          CUTE_UNROLL
          for (int j = 0; j < T::kOutTokens / 8; j += 2) {
            auto const two = [&](int i) {
              int const at = (kFirst / 8 + j) * 4 + i;
              return rounded_pair<decltype(fp16)::value>(total(at), total(at + 1));
            };
            store_matrices_transposed(to + j * (8 * 128), two(0), two(2), two(4), two(6));
          }
        };
        if (call.d_dtype == CUTEGEMM_FP16) {
          store_as(std::true_type{});
        } else {
          store_as(std::false_type{});
        }
        cutlass::arch::fence_view_async_shared();
        NamedBarrier::sync(128, 3 + group);
        if (storer()) {
          store_rows(map_d, box, row0 + group * kMmaRows, token0 + kFirst);
          commit_stores();
        }
      });
    } else {
      with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) {
          int const m = token0 + token_of(i), n = row0 + row_of(i);
          if (m < call.m && n < end) store(d + m * call.d_stride[0] + n * call.d_stride[1], total(i));
        }
      });
    }
  }
  // Shared memory must outlive what reads it. That d is where it belongs the end of the launch sees to.
  if (T::kShares && warp % 4 == 0 && elect_one_sync()) wait_until_stores_read<0>();
}

template <class Variant>
struct MixedInput {
  using T = mixed::Tile<Variant>;
  using Element = typename Variant::Element;
  static constexpr auto* kKernel = &mixed_kernel<Variant>;

  static int32_t prepare() { return load_kernel(kKernel, mixed::kSharedBytes); }

  // What each CTA gives to another one, and a flag for it.
  static int64_t workspace(const cutegemm_call& call) {
    if (call.m < 1 || call.n < 1 || call.k < 1) return 0;
    return tiles(call).givers * int64_t(T::kSums * sizeof(float) + sizeof(uint64_t));
  }

  static int32_t launch(const cutegemm_call& call) {
    using namespace mixed;
    auto const& groups = call.groups;
    auto const is_float = [](int dtype) {
      return dtype == CUTEGEMM_FP32 || dtype == CUTEGEMM_BF16 || dtype == CUTEGEMM_FP16;
    };
    auto const aligned = [](const void* data, int64_t bytes) {
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
    };
    if (call.a_dtype != dtype_of<Element>() || call.b_dtype != kWeightType) return kWrongTypes;
    if (call.m < 1 || call.n < 1 || call.k < 1) return kWrongSize;
    if (call.a_stride[1] != 1) return kWrongLayout;
    if (!aligned(call.a, call.a_stride[0] * 2)) return kMisaligned;
    if constexpr (T::kInt4) {
      if (!is_float(groups.dtype) || (T::kRounded && groups.dtype != dtype_of<Element>())) return kWrongTypes;
      if (bool(groups.minimum) != T::kMinimum || groups.size < 1 ||
          (groups.size < call.k && (groups.size % T::kStep != 0 || (groups.size & groups.size - 1) != 0))) {
        return kWrongOptions;
      }
      if (!aligned(call.b, 0) || !aligned(groups.scales, 0) || !aligned(groups.zeros, 0)) return kMisaligned;
    } else {
      if (call.scale_b.group || (call.scale_b.data && !is_float(call.scale_b.dtype))) return kWrongTypes;
      if (call.b_stride[0] != 1) return kWrongLayout;
      if (!aligned(call.b, call.n > 1 ? call.b_stride[1] : 0)) return kMisaligned;
    }
    cutegemm_call own = call;
    int const split = own.options.split = std::max(1, call.options.split);
    int const rows = call.options.rows ? call.options.rows : T::kRows;
    if ((split & split - 1) || split > (T::kSplits ? 8 : 16)) return kWrongOptions;
    if (rows < kStrip || rows > T::kRows || rows % kStrip != 0 || ((T::kGated || T::kOneSum) && rows != T::kRows)) {
      return kWrongOptions;
    }
    if (bool(call.output.gated) != T::kGated || (T::kGated && (call.residual.data || call.n % (2 * kStrip) != 0))) {
      return kWrongOptions;
    }
    int const width = T::kGated ? call.n / 2 : call.n;
    if (int64_t(ceil_div(width, T::kGated ? T::kWidth : rows)) * ceil_div(call.m, T::kTokens) > INT32_MAX / 16) {
      return kWrongSize;
    }
    mixed::Shape shape = tiles(call);
    int const all = shape.row_tiles * shape.token_tiles;
    if (shape.givers && (!call.workspace || !aligned(call.workspace, 0))) return kNoWorkspace;
    shape.box_tokens = std::min(T::kTokens, call.m);
    int const ctas = T::kSplits && split > 1 ? all * split
                     : shape.unshared        ? std::min(all, call.sm_count)
                                             : shape.givers;
    shape.stages = T::kStages;
    if (!T::kShares) {
      int64_t const blocks = int64_t(ceil_div(all * split, ctas)) * shape.part;
      int const wanted = 2 + kBytesInFlight / (ctas * shape.strips * T::kStripBytes);
      shape.stages = std::min({shape.stages, wanted, int(std::clamp<int64_t>(blocks, 2, kMaxStages))});
    }
    int const bytes = call.d_dtype == CUTEGEMM_FP32 ? 4 : 2;
    shape.store_by_tma = T::kShares && bytes == 2 && rows == T::kRows && call.d_stride[1] == 1 &&
                         call.d_stride[0] >= width && aligned(call.d, call.d_stride[0] * 2) && width % 8 == 0;
    CUtensorMap map_codes, map_scales = {}, map_zeros = {}, map_x, map_d = {};
    if (!encode_weight(call, shape, map_codes, map_scales, map_zeros) ||
        !encode_rows(map_x, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.a, call.m, call.k, call.a_stride[0],
                     shape.box_tokens) ||
        (shape.store_by_tma && !encode_rows(map_d, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.d, call.m, width,
                                            call.d_stride[0], T::kOutTokens))) {
      return kNotImplementable;
    }
    shape.ticket = ticket();
    return launch_cluster(call, kKernel, dim3(ctas), T::kSplits ? split : 1, dim3(T::kThreads), kSharedBytes, own,
                          shape, map_codes, map_scales, map_zeros, map_x, map_d);
  }

 private:
  static constexpr int32_t kWeightType = T::kInt4 ? CUTEGEMM_INT4 : T::kNans ? CUTEGEMM_E4M3 : CUTEGEMM_INT8;

  static bool encode_weight(const cutegemm_call& call, mixed::Shape& shape, CUtensorMap& codes, CUtensorMap& scales,
                            CUtensorMap& zeros) {
    using namespace mixed;
    shape.groups = 1;
    if constexpr (!T::kInt4) {
      shape.bytes = T::kCodes;
      return encode_rows(codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, call.b, call.n, call.k,
                         call.n > 1 ? call.b_stride[1] : ceil_div(call.k, 16) * 16, T::kRows, kSpan);
    }
    auto const& groups = call.groups;
    int const width = groups.dtype == CUTEGEMM_FP32 ? 4 : 2;
    bool const several = groups.size < call.k && groups.size < T::kStageK;
    if (several) shape.groups = T::kStageK / groups.size;
    for (shape.group_shift = 31; several && 1 << shape.group_shift != groups.size;) --shape.group_shift;
    shape.scale_bytes = shape.groups * kStrip * width;
    shape.bytes = shape.strips * (T::kStripBytes + (groups.zeros ? 2 : 1) * shape.scale_bytes);
    int const strips = ceil_div(call.n, kMmaRows) * (kMmaRows / kStrip),
              box_strips = T::kGated ? shape.strips / 2 : shape.strips;
    int64_t const spans = ceil_div(int64_t(call.k), int64_t(kSpan));
    int64_t const columns = ceil_div(int64_t(call.k), int64_t(groups.size)) * kStrip;
    auto const encode_scales = [&](CUtensorMap& map, const void* data) {
      return encode<2>(map, width == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16, data,
                       {cuuint64_t(columns), cuuint64_t(strips)}, {cuuint64_t(columns * width)},
                       {cuuint32_t(shape.groups * kStrip), cuuint32_t(box_strips)}, CU_TENSOR_MAP_SWIZZLE_NONE,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
    };
    return encode<3>(codes, CU_TENSOR_MAP_DATA_TYPE_UINT64, call.b,
                     {kSpanBytes / 8, cuuint64_t(spans), cuuint64_t(strips)},
                     {kSpanBytes, cuuint64_t(spans * kSpanBytes)}, {kSpanBytes / 8, T::kSpans, cuuint32_t(box_strips)},
                     CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B) &&
           encode_scales(scales, groups.scales) && (!groups.zeros || encode_scales(zeros, groups.zeros));
  }

  // How d and k are cut.
  static mixed::Shape tiles(const cutegemm_call& call) {
    mixed::Shape shape = {};
    int const rows = call.options.rows ? call.options.rows : T::kRows, split = std::max(1, call.options.split);
    shape.strips = rows / mixed::kStrip;
    shape.row_tiles = T::kGated ? ceil_div(call.n / 2, T::kWidth) : ceil_div(call.n, rows);
    shape.token_tiles = ceil_div(call.m, T::kTokens);
    int const band = call.options.swizzle ? call.options.swizzle : std::max(1, 768 / T::kTokens);
    shape.band = std::min(shape.token_tiles, band);
    shape.blocks = ceil_div(call.k, T::kStageK);
    shape.part = T::kSplits ? ceil_div(shape.blocks, split) : shape.blocks;
    int const all = shape.row_tiles * shape.token_tiles, last_wave = all % call.sm_count;
    shape.unshared = all;
    if (T::kShares && split > 1 && last_wave) {
      int share = std::max(ceil_div(last_wave * shape.blocks, call.sm_count), ceil_div(shape.blocks, split));
      // Tiles that are all cut alike have fewer pieces.
      int const alike = ceil_div(shape.blocks, std::max(1, shape.blocks / share));
      if (alike * 10 <= share * 11) share = alike;
      if (share < shape.blocks) {
        shape.unshared -= last_wave, shape.share = share;
        shape.givers = ceil_div(last_wave * shape.blocks, share);
        shape.earlier = shape.blocks % share == 0 && share >= 8 ? 1 : 0;
      }
    }
    return shape;
  }

  // Odd, since a flag that was seen becomes 0. Memory that was never a flag of this launch holds it by a chance of
  // 2^-63.
  static uint64_t ticket() {
    static std::atomic<uint64_t> next = [] {
      std::random_device random;
      return uint64_t(random()) << 32 | random() | 1;
    }();
    return next += 2;
  }
};

}  // namespace cutegemm
