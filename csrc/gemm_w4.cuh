// The GEMM with a weight of four-bit codes: d = Formula(x @ w^T), one kernel from a token to a prefill's thousands.
//
// A code less its zero is exact in BF16 and FP16, a code times its scale is not. So the MMA multiplies codes, and
// scales go to its FP32 sums, group by group. The weight is the MMA's A, in registers, and tokens run along its n side:
//  - W4Weight is packed so that a lane's 64 columns of a strip of 16 rows are 16 bytes, and the pairs of codes in them
//    already stand in the halves of registers. To make two values takes a shift, a lop3 and a subtraction, and shared
//    memory is read once for 32 codes.
//  - Two threads issue all TMA loads, one of codes and scales, one of x, ahead of the MMAs and across tiles. One took
//    longer for a stage than HBM does.
//  - Up to 16 tokens warps multiply with mma.sync, where every one goes its own way. From 32 on it is wgmma: while MMAs
//    of some columns run the next ones are made, and while sums of a group are added MMAs of other warpgroups run.
//  - A multiprocessor has to make 37 values a cycle for HBM to be the limit, and shifts and lop3 take 14 cycles for
//    each 256 on a quarter of it. So many warps share a tile for few tokens: each has its own k of a stage, and their
//    sums are added in the end.
//  - For few tokens a cluster of `split` CTAs may share a tile, each with its part of k, and adds through distributed
//    shared memory in a fixed order. There is no workspace and no second launch.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_common.inl>
#include <type_traits>

#include "cluster.cuh"
#include "cutlass_dtype.cuh"
#include "kernel_file.cuh"
#include "tma.cuh"
#include "vector.cuh"

namespace cutegemm {

using namespace cute;

namespace w4 {

constexpr int kMmaRows = 64, kStrip = 16;  // rows of wgmma, and of a warp in it
constexpr int kSpan = 64;        // k: 128 bytes of x, TMA's and wgmma's swizzle, and 16 bytes of a lane's codes
constexpr int kSpanBytes = 512;  // of a strip's codes
constexpr int kOwnK = 128;       // of a stage's k, what a warp multiplies
constexpr int kMaxStages = 16;
constexpr int kSharedBytes = 227 * 1024, kHalfShared = 113 * 1024;
constexpr int kBytesInFlight = 8 << 20;  // of codes, over all CTAs

// A tile of kRows of the weight and kTokens of x, as the emitted Variant declares it: see variants.py's MixedInput.
template <class Variant>
struct Tile : Variant {
  using Variant::kRows, Variant::kTokens, Variant::kStep, Variant::kGated, Variant::kMinimum;
  static constexpr bool kSplits = !kGated && kTokens <= 64;
  // Up to so many tokens mma.sync is as fast as wgmma, and needs no waiting for sums.
  static constexpr bool kSync = kTokens <= 16;
  // What was the fastest: more warps hide more, and each must be given x, barriers and registers.
  static constexpr int kWarps = kTokens == 16 || kTokens == 32 ? 16 : 8, kConsumers = 32 * kWarps;
  static constexpr int kStrips = kRows / kStrip, kOwnStrips = kTokens == 8 ? 2 : 1;
  static constexpr int kAlongK = kWarps * kOwnStrips / kStrips;  // warps that share a strip, each with its own k
  static constexpr int kStageK = kOwnK * kAlongK, kSpans = kStageK / kSpan;
  static constexpr int kPiece = std::min(kStep, kSpan);  // k that are made at a time
  static constexpr int kPieces = kOwnK / kPiece, kOfStep = kStep / kPiece;
  static constexpr bool kExchanges = kAlongK > 1;  // sums that warps add, also without a split
  static constexpr bool kWide = kTokens > 32;
  // Whether registers leave room for the next kernel's CTA on the same multiprocessor.
  static constexpr bool kBeside = kTokens == 8 && !kMinimum;
  static constexpr int kThreads = kConsumers + (kWide ? 128 : 64);
  static constexpr int kStripBytes = kSpans * kSpanBytes, kCodes = kStrips * kStripBytes;
  static constexpr int kX = kStageK * kTokens * 2;
  static constexpr int kScales = kStrips * (kStageK / kStep) * kStrip * 4;  // at most: FP32
  static constexpr int kStage = (kCodes + kX + 2 * kScales + 1023) / 1024 * 1024;
  // Sums of the tile as [part of k][token][row], and those of other CTAs. Of a gated tile that does not add any there
  // are its values, as [token][row].
  static constexpr int kSums = kTokens * kRows, kPitch = kMmaRows + 4;
  static constexpr int kSumBytes = 4 * (kExchanges || kSplits ? (kAlongK + (kSplits ? 1 : 0)) * kSums
                                        : kGated              ? kTokens * kPitch
                                                              : 0);
  static constexpr int kOutBytes = kWide ? kRows / kMmaRows * kTokens * 128 : 0;  // of d on its way to TMA
  static constexpr int kBarriers = 1024;
  static constexpr int kHeader = (kOutBytes + kSumBytes + 1023) / 1024 * 1024 + kBarriers;
  static_assert((kRows == 128 || kRows == kMmaRows) && kTokens % 8 == 0 && (!kGated || kRows == 128));
  static_assert(!kMinimum || kStep == 32);
};

// What the host decides.
struct Shape {
  int32_t strips;  // of a tile of the weight
  int32_t row_tiles, token_tiles;
  int32_t band;          // that many token tiles are walked together along the weight
  int32_t blocks, part;  // stages that k takes, all and of a CTA
  int32_t stages;
  int32_t box_tokens;   // of x, that a load brings: those there are, since rows of zeros take TMA longer
  int32_t group_shift;  // log2 of the columns of a group where a stage has several, or 31
  int32_t groups;       // of a stage
  int32_t scale_bytes;  // of a strip's scales in a stage
  int32_t bytes;        // of a stage
  bool store_by_tma;
};

// Pairs of codes less a pair of zeros, exactly.
template <class Element>
struct Codes {
  static constexpr bool kBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr uint32_t kMagic = kBf16 ? 0x43004300 : 0x64006400;  // 128 and 1024: code bits are their last ones
  static constexpr uint32_t kOnes = kBf16 ? 0x3f803f80 : 0x3c003c00;

  CUTE_DEVICE static uint32_t zero(int code) { return kMagic + uint32_t(code) * 0x00010001u; }
  CUTE_DEVICE static uint32_t pair(uint32_t word, uint32_t zero) {
    uint32_t x;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(x) : "r"(word), "r"(kMagic));
    if constexpr (kBf16) {
      asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(zero));
    } else {
      asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(zero));
    }
    return x;
  }
};

template <bool kFp16>
CUTE_DEVICE uint32_t rounded_pair(float a, float b) {
  if constexpr (kFp16) {
    __half2 const two = __floats2half2_rn(a, b);
    return reinterpret_cast<uint32_t const&>(two);
  } else {
    __nv_bfloat162 const two = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<uint32_t const&>(two);
  }
}

CUTE_DEVICE void store_matrices_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

CUTE_DEVICE void load_matrices(uint32_t (&to)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at));
}

// 16 rows of a, 8 columns of b.
template <class Element>
CUTE_DEVICE void multiply_add(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  using Mma = std::conditional_t<Codes<Element>::kBf16, SM80_16x8x16_F32BF16BF16F32_TN, SM80_16x8x16_F32F16F16F32_TN>;
  Mma::fma(c[0], c[1], c[2], c[3], a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]);
}

CUTE_DEVICE float silu(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + __expf(-x)));
  return x * inverse;
}

// The tiles of a CTA, one after the other.
struct Tiles {
  Shape const& shape;
  int tile, step;

  CUTE_DEVICE bool next(int& row_tile, int& token_tile) {
    if (tile >= shape.row_tiles * shape.token_tiles) return false;
    int const in_band = shape.band * shape.row_tiles, first = tile / in_band * shape.band, i = tile % in_band;
    int const width = min(shape.band, shape.token_tiles - first);
    token_tile = first + i % width;
    row_tile = i / width;
    tile += step;
    return true;
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
CUTE_DEVICE uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
CUTE_DEVICE uint64_t read_often() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace w4

template <class Variant>
__global__ void __launch_bounds__(w4::Tile<Variant>::kThreads, w4::Tile<Variant>::kBeside ? 2 : 1)
    w4_kernel(const __grid_constant__ cutegemm_call call, const __grid_constant__ w4::Shape shape,
              const __grid_constant__ CUtensorMap map_codes, const __grid_constant__ CUtensorMap map_scales,
              const __grid_constant__ CUtensorMap map_zeros, const __grid_constant__ CUtensorMap map_x,
              const __grid_constant__ CUtensorMap map_d) {
  using namespace w4;
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
  int const first = min(shape.blocks, shape.part * rank), last = min(shape.blocks, first + shape.part);
  Tiles tiles = {shape, int(blockIdx.x) / split, int(gridDim.x) / split};
  int row_tile, token_tile;
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

  int stage = 0, phase = 0;
  auto const next_stage = [&] {
    if (++stage == shape.stages) stage = 0, phase ^= 1;
  };

  if (warp >= kWarps) {
    if constexpr (T::kWide) cutlass::arch::warpgroup_reg_dealloc<56>();
    // Of the first strip of a tile, and in a gated one of the first of those that are gated.
    auto const strip_of = [&](int half) {
      return row_tile * (T::kGated ? T::kStrips / 2 : shape.strips) + half * gates;
    };
    constexpr int kHalves = T::kGated ? 2 : 1;
    if (warp == kWarps && lane == 0) {
      bool more = tiles.next(row_tile, token_tile);
      if (!call.options.no_chain && more) {
        int const ahead = min(call.options.prefetch * 1024 / T::kCodes, last - first);
        for (int i = 0; i < ahead; ++i) {
          for (int h = 0; h < kHalves; ++h) prefetch_codes(map_codes, (first + i) * T::kSpans, strip_of(h));
        }
      }
      wait_for_previous_kernel();
      uint64_t const once = T::kWide ? read_often() : read_once();
      int const size = call.groups.size, begin = first * T::kStageK;
      for (; more; more = tiles.next(row_tile, token_tile)) {
        int group = shape.groups > 1 ? first * shape.groups : begin / size, in_group = begin - group * size;
        for (int block = first; block < last; ++block, next_stage()) {
          empty(stage)->wait(phase ^ 1);
          full(stage)->arrive_and_expect_tx(shape.bytes);
          uint32_t const to = cast_smem_ptr_to_uint(stages + stage * T::kStage), to_scales = to + T::kCodes + T::kX;
          uint32_t const barrier = cast_smem_ptr_to_uint(full(stage));
          CUTE_UNROLL
          for (int h = 0; h < kHalves; ++h) {
            int const strip = strip_of(h), at = h * T::kStrips / 2;
            load_codes(map_codes, to + at * T::kStripBytes, barrier, block * T::kSpans, strip, once);
            load_box(map_scales, to_scales + at * shape.scale_bytes, barrier, group * kStrip, strip, once);
            if (call.groups.zeros) {
              load_box(map_zeros, to_scales + T::kScales + at * shape.scale_bytes, barrier, group * kStrip, strip,
                       once);
            }
          }
          if (shape.groups > 1) {
            group += shape.groups;
          } else if ((in_group += T::kStageK) >= size) {
            in_group = 0, ++group;
          }
        }
      }
    } else if (warp == kWarps + 1 && lane == 0) {
      wait_for_previous_kernel();
      uint64_t const often = read_often();
      int const bytes = T::kSpans * shape.box_tokens * 128;
      while (tiles.next(row_tile, token_tile)) {
        for (int block = first; block < last; ++block, next_stage()) {
          empty(stage)->wait(phase ^ 1);
          full(stage)->arrive_and_expect_tx(bytes);
          uint32_t const to = cast_smem_ptr_to_uint(stages + stage * T::kStage) + T::kCodes;
          uint32_t const barrier = cast_smem_ptr_to_uint(full(stage));
          CUTE_UNROLL
          for (int s = 0; s < T::kSpans; ++s) {
            load_box(map_x, to + s * kTokens * 128, barrier, block * T::kStageK + s * kSpan, token_tile * kTokens,
                     often);
          }
        }
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

  if constexpr (T::kWide) cutlass::arch::warpgroup_reg_alloc<224>();
  wait_for_previous_kernel();
  // A warp has strips side by side, and of a stage its own k. Of an MMA's sums a thread holds, for every 8 tokens, 2
  // neighbours in 2 rows that lie 8 apart.
  constexpr int kOwnStrips = T::kOwnStrips, kStripWarps = T::kStrips / kOwnStrips;
  int const strip = warp % kStripWarps * kOwnStrips, along_k = warp / kStripWarps;
  int const own_row = strip * kStrip + lane / 4, own_token = lane % 4 * 2;
  constexpr int kSums = kTokens / 2;  // of a thread, in a strip
  float total[kOwnStrips][kSums];

  // Where a thread finds the scales of its rows: a word, and the bytes of it that are FP32, or are when converted.
  int const scale_width = shape.scale_bytes / (shape.groups * kStrip);
  int const scale_at = (lane / 4 * scale_width) & ~3;
  bool const upper = scale_width == 2 && lane / 4 % 2, fp16 = call.groups.dtype == CUTEGEMM_FP16;
  uint32_t const scale_bytes = scale_width == 4 ? 0x3210 : fp16 ? (upper ? 0x4432 : 0x4410) : (upper ? 0x3244 : 0x1044);
  uint8_t* at = stages;  // the stage that is worked on
  auto const of_row = [&](int from, int own_strip, int step, int row) {
    int const group = (along_k * kOwnK + step * T::kStep) >> shape.group_shift;
    uint32_t const word = *reinterpret_cast<const uint32_t*>(at + from + (strip + own_strip) * shape.scale_bytes +
                                                             (group * kStrip + row * 8) * scale_width + scale_at);
    uint32_t const bits = __byte_perm(word, 0, scale_bytes);
    return fp16 ? __half2float(__ushort_as_half(uint16_t(bits))) : __uint_as_float(bits);
  };
  constexpr int kScalesAt = T::kCodes + T::kX, kZerosAt = kScalesAt + T::kScales;
  // What a step of k is multiplied with in a thread's rows.
  struct Step {
    float scale[2];
    float minimum[T::kMinimum ? 2 : 1];
  };
  auto const scales_of = [&](int own_strip, int step) {
    Step s;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      s.scale[i] = of_row(kScalesAt, own_strip, step, i);
      if constexpr (T::kMinimum) s.minimum[i] = of_row(kZerosAt, own_strip, step, i);
    }
    return s;
  };
  uint32_t zero[kOwnStrips][2];
  for (auto& of_strip : zero) of_strip[0] = of_strip[1] = Codes<Element>::zero(T::kMinimum ? 0 : 8);
  auto const load_zeros = [&](int step) {
    if (!T::kMinimum && call.groups.zeros) {
      CUTE_UNROLL
      for (int i = 0; i < 2 * kOwnStrips; ++i) {
        zero[i / 2][i % 2] = Codes<Element>::zero(int(of_row(kZerosAt, i / 2, step, i % 2)));
      }
    }
  };
  constexpr int kWords = T::kPiece / 16;
  auto const load_words = [&](uint32_t (&word)[kWords], int own_strip, int piece) {
    int const k = along_k * kOwnK + piece * T::kPiece;
    auto const* const from = reinterpret_cast<const uint32_t*>(at + (strip + own_strip) * T::kStripBytes +
                                                               k / kSpan * kSpanBytes + lane * 16);
    if constexpr (T::kPiece == kSpan) {
      uint4 const four = *reinterpret_cast<const uint4*>(from);
      word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
    } else {
      uint2 const two = *reinterpret_cast<const uint2*>(from + k % kSpan / 16);
      word[0] = two.x, word[1] = two.y;
    }
  };
  auto const add = [&](auto&& part, auto&& x_sums, Step const& step, int own_strip) {
    CUTE_UNROLL
    for (int i = 0; i < kSums; ++i) {
      float& sum = total[own_strip][i];
      sum = __fmaf_rn(part(i), step.scale[i / 2 % 2], sum);
      if constexpr (T::kMinimum) sum = __fmaf_rn(x_sums(i), step.minimum[i / 2 % 2], sum);
    }
  };

  // A stage with mma.sync. Of x ldmatrix brings a token's 16 bytes as a unit. Neighbouring MMAs are of different sums.
  auto const multiply_now = [&] {
    constexpr int kEights = kTokens / 8;
    CUTE_UNROLL
    for (int piece = 0; piece < T::kPieces; piece += T::kOfStep) {
      int const step = piece / T::kOfStep;
      load_zeros(step);
      uint32_t x[kEights][4];
      float part[2][kOwnStrips][kSums] = {}, x_sums[T::kMinimum ? kSums : 1] = {};
      CUTE_UNROLL
      for (int of_step = 0; of_step < T::kOfStep; ++of_step) {
        int const k0 = along_k * kOwnK + (piece + of_step) * T::kPiece;
        uint32_t word[kOwnStrips][kWords];
        CUTE_UNROLL
        for (int s = 0; s < kOwnStrips; ++s) load_words(word[s], s, piece + of_step);
        CUTE_UNROLL
        for (int w = 0; w < kWords; ++w) {
          if (w % 2 == 0) {
            CUTE_UNROLL
            for (int e = 0; e < kEights; ++e) {
              int const unit = (k0 % kSpan / 8 + w * 2 + lane / 8) ^ lane % 8;
              load_matrices(x[e], cast_smem_ptr_to_uint(at) + T::kCodes + k0 / kSpan * (kTokens * 128) +
                                      (e * 8 + lane % 8) * 128 + unit * 16);
            }
          }
          CUTE_UNROLL
          for (int s = 0; s < kOwnStrips; ++s) {
            uint32_t values[4];
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) values[i] = Codes<Element>::pair(word[s][w] >> i * 4, zero[s][i % 2]);
            CUTE_UNROLL
            for (int e = 0; e < kEights; ++e) {
              multiply_add<Element>(&part[w % 2][s][e * 4], values[0], values[1], values[2], values[3], x[e][w % 2 * 2],
                                    x[e][w % 2 * 2 + 1]);
            }
          }
          if constexpr (T::kMinimum) {
            CUTE_UNROLL
            for (int e = 0; e < kEights; ++e) {
              constexpr uint32_t kOnes = Codes<Element>::kOnes;
              multiply_add<Element>(&x_sums[e * 4], kOnes, kOnes, kOnes, kOnes, x[e][w % 2 * 2], x[e][w % 2 * 2 + 1]);
            }
          }
        }
      }
      CUTE_UNROLL
      for (int s = 0; s < kOwnStrips; ++s) {
        add([&](int i) { return part[0][s][i] + part[1][s][i]; }, [&](int i) { return x_sums[i]; }, scales_of(s, step),
            s);
      }
    }
    __syncwarp();
    if (lane == 0) empty(stage)->arrive();
  };

  using Atom = decltype(GMMA::rs_op_selector<Element, Element, float, cute::Shape<Int<64>, Int<kTokens>, Int<16>>,
                                             GMMA::Major::K, GMMA::Major::K>());
  static_assert(size<1>(typename MMA_Traits<Atom>::Shape_MNK{}) == kTokens);  // CuTe has some widths on demand only
  auto mma = make_tiled_mma(Atom{});
  auto const thread_mma = mma.get_slice(threadIdx.x % 128);
  using LayoutX =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<Int<kTokens>, Int<kSpan>>{}));
  using Sum = decltype(partition_fragment_C(mma, cute::Shape<Int<kMmaRows>, Int<kTokens>>{}));
  using A = decltype(make_tensor<Element>(cute::Shape<cute::Shape<_2, _2, _2>, _1, Int<kWords>>{}));
  Sum part;
  [[maybe_unused]] Sum x_sums;  // of tokens over a step, in every row the same
  A a[2], ones;
  fill(ones, Element(1.f));
  Step of_part;
  // With wgmma, whose last MMAs still run when it returns: those of the stage that is held.
  int held;
  auto const release = [&] {
    if (held >= 0 && lane == 0) empty(held)->arrive();
  };
  auto const finish_step = [&] {
    warpgroup_wait<0>();
    warpgroup_fence_operand(part);
    if constexpr (T::kMinimum) warpgroup_fence_operand(x_sums);
    add(part, x_sums, of_part, 0);
    for (float& sum : total[0]) warpgroup_fence_operand(sum);  // or they would be put off until `part` has other sums
  };
  auto const multiply = [&] {
    for_each(make_seq<T::kPieces>{}, [&](auto piece) {
      constexpr bool kFirst = piece % T::kOfStep == 0;
      if constexpr (kFirst) load_zeros(piece / T::kOfStep);
      A& values = a[piece % 2];
      uint32_t word[kWords];
      load_words(word, 0, piece);
      Tensor registers = recast<uint32_t>(values);
      CUTE_UNROLL
      for (int i = 0; i < 4 * kWords; ++i) {
        registers(i) = Codes<Element>::pair(word[i / 4] >> i % 4 * 4, zero[0][i % 2]);
      }
      if constexpr (kFirst) {
        finish_step();
        if constexpr (piece == 0) release();
      }
      int const k0 = along_k * kOwnK + piece * T::kPiece;
      Tensor const x = make_tensor(
          make_smem_ptr(reinterpret_cast<Element*>(at + T::kCodes + k0 / kSpan * (kTokens * 128))), LayoutX{});
      Tensor const fragments_x = thread_mma.make_fragment_B(thread_mma.partition_B(x));
      warpgroup_fence_operand(part);
      if constexpr (T::kMinimum) warpgroup_fence_operand(x_sums);
      warpgroup_arrive();
      for_each(make_seq<kWords>{}, [&](auto k) {
        mma.accumulate_ = k == 0 && kFirst ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        auto const of_x = fragments_x(_, _, k + piece * T::kPiece % kSpan / 16);
        gemm(mma, values(_, _, k), of_x, part);
        if constexpr (T::kMinimum) gemm(mma, ones(_, _, k), of_x, x_sums);
      });
      warpgroup_commit_batch();
      if constexpr (kFirst) of_part = scales_of(0, piece / T::kOfStep);
      if constexpr (!kFirst) warpgroup_wait<1>();  // the values before are not read any more
    });
    held = stage;
  };

  if (split > 1) cluster_wait();                      // no CTA of a cluster may write to another before that one runs
  bool const exchanged = T::kExchanges || split > 1;  // whether sums are added before they are d's
  // Rows of the tile, columns of d, that this CTA finishes, and of them a thread's.
  constexpr int kWidth = T::kGated ? kMmaRows : kRows;
  int const part_bits = __ffs(kWidth / split) - 1, part_rows = 1 << part_bits;
  int const part_row = int(threadIdx.x) & part_rows - 1, part_token = int(threadIdx.x) >> part_bits;
  auto const token_of = [&](int i) { return i / 4 * 8 + own_token + i % 2; };
  auto const row_of = [&](int i) { return own_row + i / 2 % 2 * 8; };
  bool const has_elements = !std::is_empty_v<typename Formula::Element> && call.residual.data;
  while (tiles.next(row_tile, token_tile)) {
    int const row0 = row_tile * (T::kGated ? kMmaRows : shape.strips * kStrip), token0 = token_tile * kTokens;
    int const width = T::kGated ? call.n / 2 : call.n;  // of d
    int const end = T::kGated ? width : min(width, row0 + shape.strips * kStrip);
    // The epilogue's operands of a thread's two rows of w, columns of d; or of the row that it finishes and its gated.
    typename Formula::Column columns[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = exchanged ? rank * part_rows + part_row + (T::kGated ? i * kMmaRows : 0) : own_row + i * 8;
      int const column = T::kGated ? row % kMmaRows + row / kMmaRows * width : row;
      columns[i] = Formula::column(call, min(row0 + column, call.n - 1));
    }

    for (auto& of_strip : total) {
      for (float& sum : of_strip) sum = 0.f;
    }
    held = -1;
    if constexpr (!T::kSync) {
      clear(part);
      if constexpr (T::kMinimum) clear(x_sums);
      of_part = {};
    }
    for (int block = first; block < last; ++block) {
      full(stage)->wait(phase);
      at = stages + stage * T::kStage;
      if constexpr (T::kSync) {
        multiply_now();
      } else {
        multiply();
      }
      next_stage();
    }
    if constexpr (!T::kSync) {
      finish_step();
      release();
    }

    if (exchanged) {
      float* const own = own_sums + along_k * T::kSums;  // [CTA that finishes][token][row], or gated [token][row]
      int const own_bits = T::kGated ? 7 : part_bits, own_rows = 1 << own_bits;
      CUTE_UNROLL
      for (int s = 0; s < kOwnStrips; ++s) {
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) {
          int const row = row_of(i) + s * kStrip;
          own[((row >> own_bits) * kTokens + token_of(i) << own_bits) + (row & own_rows - 1)] = total[s][i];
        }
      }
      int const of_part = T::kSums / split;
      if (split > 1) {
        if constexpr (T::kExchanges) {
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
        auto const sum_of = [&](int row) {
          int const i = (token << own_bits) + row;
          float sum = 0.f;
          if (split > 1) {
            for (int s = 0; s < split; ++s) sum += (s == rank ? own_sums : others_sums)[s * of_part + i];
          } else {
            CUTE_UNROLL
            for (int p = 0; p < T::kAlongK; ++p) sum += own_sums[p * T::kSums + i];
          }
          return sum;
        };
        typename Formula::Element element = {};
        if (has_elements) element = Formula::element(call, m, n);
        auto const row = Formula::row(call, m);
        float value = Formula::apply(sum_of(part_row), row, columns[0], element);
        if constexpr (T::kGated) {
          value = silu(value) * Formula::apply(sum_of(part_row + kMmaRows), row, columns[1], element);
        }
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

    int const group = warp / 4;
    auto const apply = [&](auto element) {
      CUTE_UNROLL
      for (int i = 0; i < kSums; ++i) {
        total[0][i] = Formula::apply(total[0][i], typename Formula::Row{}, columns[i / 2 % 2], element(i));
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
      if (group == 1) {
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) own_sums[token_of(i) * T::kPitch + row_of(i) - kMmaRows] = total[0][i];
      }
      NamedBarrier::sync(kConsumers, 2);
      if (group == 0) {
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) {
          total[0][i] = silu(total[0][i]) * own_sums[token_of(i) * T::kPitch + row_of(i)];
        }
      }
      NamedBarrier::sync(kConsumers, 2);
      if (group == 1) continue;
    }
    if (T::kWide && shape.store_by_tma) {
      auto const storer = [&] { return warp % 4 == 0 && elect_one_sync(); };
      uint32_t const box = cast_smem_ptr_to_uint(out + group * kTokens * 128);
      if (storer()) wait_until_stores_read<0>();
      NamedBarrier::sync(128, 3 + group);
      auto const store_as = [&](auto fp16) {
        CUTE_UNROLL
        for (int j = 0; j < kTokens / 8; j += 2) {
          auto const two = [&](int i) {
            return rounded_pair<decltype(fp16)::value>(total[0][j * 4 + i], total[0][j * 4 + i + 1]);
          };
          int const token = j * 8 + lane / 16 * 8 + lane % 8, unit = (warp % 4 * 2 + lane / 8 % 2) ^ token % 8;
          store_matrices_transposed(box + token * 128 + unit * 16, two(0), two(2), two(4), two(6));
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
        store_rows(map_d, box, row0 + group * kMmaRows, token0);
        commit_stores();
      }
    } else {
      with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
        CUTE_UNROLL
        for (int i = 0; i < kSums; ++i) {
          int const m = token0 + token_of(i), n = row0 + row_of(i);
          if (m < call.m && n < end) store(d + m * call.d_stride[0] + n * call.d_stride[1], total[0][i]);
        }
      });
    }
  }
  // Shared memory must outlive what reads it. That d is where it belongs the end of the launch sees to.
  if (T::kWide && warp % 4 == 0 && elect_one_sync()) wait_until_stores_read<0>();
}

template <class Variant>
struct MixedInput {
  using T = w4::Tile<Variant>;
  using Element = typename Variant::Element;
  static constexpr auto* kKernel = &w4_kernel<Variant>;

  static int32_t prepare() { return load_kernel(kKernel, w4::kSharedBytes); }
  static int64_t workspace(const cutegemm_call&) { return 0; }

  static int32_t launch(const cutegemm_call& call) {
    using namespace w4;
    auto const& groups = call.groups;
    if (call.a_dtype != dtype_of<Element>() || call.b_dtype != CUTEGEMM_INT4) return kWrongTypes;
    if (groups.dtype != CUTEGEMM_FP32 && groups.dtype != CUTEGEMM_BF16 && groups.dtype != CUTEGEMM_FP16) {
      return kWrongTypes;
    }
    if (call.m < 1 || call.n < 1 || call.k < 1) return kWrongSize;
    bool const one_group = groups.size >= call.k;
    if (bool(groups.minimum) != T::kMinimum || groups.size < 1 || (!one_group && groups.size % T::kStep != 0)) {
      return kWrongOptions;
    }
    if (call.a_stride[1] != 1) return kWrongLayout;
    auto const aligned = [](const void* data, int64_t bytes) {
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
    };
    if (!aligned(call.a, call.a_stride[0] * 2) || !aligned(call.b, 0) || !aligned(groups.scales, 0) ||
        !aligned(groups.zeros, 0)) {
      return kMisaligned;
    }
    cutegemm_call own = call;
    int const split = own.options.split = std::max(1, call.options.split);
    int const rows = call.options.rows ? call.options.rows : T::kRows;
    if ((split != 1 && split != 2 && split != 4 && split != 8) || (split > 1 && !T::kSplits)) return kWrongOptions;
    if (rows < kStrip || rows > T::kRows || rows % kStrip != 0 || (T::kGated && rows != T::kRows)) return kWrongOptions;
    if (bool(call.output.gated) != T::kGated || (T::kGated && (call.residual.data || call.n % (2 * kStrip) != 0))) {
      return kWrongOptions;
    }
    w4::Shape shape = {};
    int const width = T::kGated ? call.n / 2 : call.n;
    shape.strips = rows / kStrip;
    shape.row_tiles = ceil_div(width, T::kGated ? kMmaRows : rows);
    shape.token_tiles = ceil_div(call.m, T::kTokens);
    int64_t const tiles = int64_t(shape.row_tiles) * shape.token_tiles;
    if (tiles > INT32_MAX / 16) return kWrongSize;
    int const band = call.options.swizzle ? call.options.swizzle : std::max(1, 768 / T::kTokens);
    shape.band = std::min(shape.token_tiles, band);
    shape.blocks = ceil_div(call.k, T::kStageK);
    shape.part = ceil_div(shape.blocks, split);
    shape.box_tokens = std::min(T::kTokens, call.m);
    int const scale_width = groups.dtype == CUTEGEMM_FP32 ? 4 : 2;
    bool const several = !one_group && groups.size < T::kStageK;
    shape.groups = several ? T::kStageK / groups.size : 1;
    for (shape.group_shift = 31; several && 1 << shape.group_shift != groups.size;) --shape.group_shift;
    shape.scale_bytes = shape.groups * kStrip * scale_width;
    shape.bytes = shape.strips * (T::kStripBytes + (groups.zeros ? 2 : 1) * shape.scale_bytes);
    int const ctas = int(split > 1 ? tiles * split : std::min<int64_t>(tiles, call.sm_count));
    int const rest = 1024 + T::kHeader, most = (kSharedBytes - rest) / T::kStage;
    shape.stages = std::min(kMaxStages, most);
    if (!T::kWide) {
      int64_t const all = int64_t(ceil_div(tiles * split, int64_t(ctas))) * shape.part;
      int const wanted = 2 + kBytesInFlight / (ctas * shape.strips * T::kStripBytes);
      shape.stages = std::min({shape.stages, wanted, int(std::clamp<int64_t>(all, 2, kMaxStages))});
    }
    // Where a call has a CTA on every multiprocessor, and shared memory has room for two, the next call's start is over
    // when this one ends. Where it leaves some free, two of the next one's would meet on those.
    int const of_half = (kHalfShared - rest) / T::kStage;
    bool const half = T::kBeside && ctas == call.sm_count && of_half >= std::max(3, shape.stages - 1);
    if (half) shape.stages = std::min(shape.stages, of_half);
    int const shared_bytes = half ? rest + shape.stages * T::kStage : kSharedBytes;

    int const bytes = call.d_dtype == CUTEGEMM_FP32 ? 4 : 2;
    shape.store_by_tma = T::kWide && bytes == 2 && rows == T::kRows && call.d_stride[1] == 1 &&
                         call.d_stride[0] >= width && aligned(call.d, call.d_stride[0] * 2) && width % 8 == 0;
    int const strips = ceil_div(call.n, kMmaRows) * (kMmaRows / kStrip),
              box_strips = T::kGated ? shape.strips / 2 : shape.strips;
    int64_t const spans = ceil_div(int64_t(call.k), int64_t(kSpan));
    int64_t const scales = ceil_div(int64_t(call.k), int64_t(groups.size)) * kStrip;
    CUtensorMap map_codes, map_scales, map_zeros = {}, map_x, map_d = {};
    auto const encode_scales = [&](CUtensorMap& map, const void* data) {
      return encode<2>(map, scale_width == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16, data,
                       {cuuint64_t(scales), cuuint64_t(strips)}, {cuuint64_t(scales * scale_width)},
                       {cuuint32_t(shape.groups * kStrip), cuuint32_t(box_strips)}, CU_TENSOR_MAP_SWIZZLE_NONE,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
    };
    if (!encode<3>(map_codes, CU_TENSOR_MAP_DATA_TYPE_UINT64, call.b,
                   {kSpanBytes / 8, cuuint64_t(spans), cuuint64_t(strips)},
                   {kSpanBytes, cuuint64_t(spans * kSpanBytes)}, {kSpanBytes / 8, T::kSpans, cuuint32_t(box_strips)},
                   CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B) ||
        !encode_scales(map_scales, groups.scales) || (groups.zeros && !encode_scales(map_zeros, groups.zeros)) ||
        !encode_rows(map_x, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.a, call.m, call.k, call.a_stride[0],
                     shape.box_tokens) ||
        (shape.store_by_tma &&
         !encode_rows(map_d, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.d, call.m, width, call.d_stride[0], T::kTokens))) {
      return kNotImplementable;
    }
    return launch_cluster(call, kKernel, dim3(ctas), split, dim3(T::kThreads), shared_bytes, own, shape, map_codes,
                          map_scales, map_zeros, map_x, map_d);
  }
};

}  // namespace cutegemm
