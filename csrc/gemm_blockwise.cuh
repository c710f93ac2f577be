// The GEMM with a scale for every 128 k: d = Formula(sum of scale_a * scale_b * (a @ b) over blocks of k).
//
// The tensor cores add FP8 products with some 14 bits, and scales change from block to block. So every 128 k are a sum
// of their own, which is scaled and added in FP32. Beside running MMAs an FFMA takes 2.5 to 3 cycles, since both want
// the register file, so these additions take almost as long as the MMAs, and everything here serves to have both at
// the same time and little else:
//  - While one warpgroup adds, MMAs of the other one run; where registers allow, a warpgroup also has two sets of sums
//    and adds one while it waits for the other.
//  - One thread issues all TMA loads of a, b and the scales of a, in stages of 128 k.
//  - Three warps, or one, bring what scales TMA does not to shared memory, from any strides and in either type. A
//    consumer that loads its own waits for L2 in every block, which takes longer than its MMAs.
//  - CTAs of a cluster, whose tiles lie one above the other or side by side, load parts of the operand that they share
//    for each other.
//  - CTAs are persistent. While sums become d and leave through shared memory, the next tile has its first MMA running.
//  - A multiprocessor takes in 64 bytes a cycle, so a tile of 128 x 128 waits for its operands as long as for its MMAs.
//    Where there are few tiles the CTAs of a cluster have parts of k of one that is larger instead, and exchange sums
//    in the end, which are added in order.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_fp8.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_common.inl>
#include <numeric>
#include <type_traits>

#include "cluster.cuh"
#include "fp8_scale.cuh"
#include "kernel_file.cuh"
#include "results.cuh"
#include "scale_rows.cuh"
#include "tma.cuh"
#include "vector.cuh"

namespace cutegemm {

using namespace cute;

namespace blockwise {

constexpr int kSpan = 128;    // k in a stage: a block of scales, and the 128 bytes of TMA's and wgmma's swizzle
constexpr int kMmaRows = 64;  // of wgmma
constexpr int kScaleWarps = 3;
constexpr int kMaxStages = 8;
constexpr int kSharedBytes = 227 * 1024;

// A tile of kM rows of a and kRowsB of b, as the emitted Variant declares it: see variants.py's Blockwise. Its
// warpgroups stand one below the other, each with the tile's whole width, in one MMA, or two: of 64 rows each, or in a
// gated tile of half of the width, where the first half of an MMA's columns are gates.
template <class Variant>
struct Tile : Variant {
  using Variant::kColumns, Variant::kGated, Variant::kSplits, Variant::kQuantizes;
  using Variant::kM, Variant::kRowsB, Variant::kClusterM, Variant::kClusterN;
  using Column = typename Variant::Formula::Column;
  static constexpr int kCluster = kClusterM * kClusterN, kWidth = kGated ? kRowsB / 2 : kRowsB;  // kWidth: of d
  static constexpr int kGroups = kM > kMmaRows ? 2 : 1, kGroupM = kM / kGroups;
  static constexpr int kRowBlocks = kGroupM / kMmaRows, kColumnBlocks = kGated ? 2 : 1;  // of a group: an MMA each
  static constexpr int kMmas = kRowBlocks * kColumnBlocks;
  static constexpr int kN = kRowsB / kColumnBlocks,
                       kMmaWidth = kGated ? kN / 2 : kN;  // of an MMA, and what it has of d
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kChunk = std::gcd(kMmaWidth, 128);  // columns that surely have one scale_b
  static constexpr int kBytesA = kM * kSpan, kBytesB = kRowsB * kSpan;
  // Rows of a TMA load of b, which lie together in it as they do in memory.
  static constexpr int kBoxB = kGated ? kMmaWidth : kRowsB / kClusterM, kBoxesB = kRowsB / kBoxB;
  static constexpr int kScalesB = kColumns ? kRowsB : kRowsB / kChunk;
  // Whether one warp suffices for scales of b alone: those of a large tile take 512 cycles or more to be used. Long
  // runs are at the limit of power, and without the others' instructions they are 1 to 2 % faster.
  static constexpr bool kOneScaleWarp = !kColumns && kM * kRowsB >= 128 * 128;
  static constexpr int kSets = kMmas == 1 && kN <= 128 ? 2 : 1;  // of sums: a thread has 224 registers
  // d leaves by boxes of a block of rows and so many columns. Shared memory has room for all of 16 bits or less; FP32
  // leaves by halves of the columns, in boxes of half as many.
  static constexpr int kOutColumns = std::gcd(kMmaWidth, 64), kOutBox = kMmaRows * kOutColumns * 2;
  static constexpr int kOutBoxes = kWidth / kOutColumns;  // of a block of rows
  static constexpr int kSumPitch = kN + 8;  // of sums that other CTAs of a split tile want: rows begin 8 banks apart

  static constexpr int kOfStage = kBytesA + kBytesB + (kM + kScalesB) * 4 + 16;
  static constexpr int kRest = 4096 + kGroups * (kRowBlocks * kOutBoxes * kOutBox + kRowsB * int(sizeof(Column)));
  static constexpr int kStages = std::min(kMaxStages, (kSharedBytes - kRest) / kOfStage);

  struct Shared {
    alignas(1024) uint8_t a[kStages][kBytesA];
    uint8_t b[kStages][kBytesB];
    uint8_t out[kGroups][kRowBlocks][kOutBoxes][kOutBox];
    alignas(128) float scale_a[kStages][kM];
    float scale_b[kStages][kScalesB];
    Column columns[kGroups][kRowsB];  // the epilogue's operands
    uint64_t full[kStages], empty[kStages], sums_ready;
  };
  static constexpr int kBytes = sizeof(Shared) + 1024;
  static_assert(kBytes <= kSharedBytes && kN % kChunk == 0 && kStages >= kScaleWarps && kMmas <= 2);
  static_assert(!kGated || (kBoxB == kChunk && !kColumns));
  static_assert(!kSplits || (kCluster == 1 && !kGated));
  static_assert(!kSplits || 2 * kM * kSumPitch * 4 <= kStages * (kBytesA + kBytesB));  // they lie where stages were
  static_assert(!kQuantizes || kWidth == kSpan);
};

// What the host decides.
struct Shape {
  int32_t blocks, m_tiles, n_tiles;  // of k; of clusters' tiles
  int32_t band;                      // that many of m_tiles are walked together along n, so that both find L2 warm
  int32_t width;                     // of d
  int32_t box_a;                     // rows of a TMA load of a: those there are, since rows of zeros take TMA longer
  bool scale_a_by_tma, store_by_tma, codes_wide;  // codes_wide: rows of codes are whole 16 bytes
};

// The tiles of a CTA, one after the other.
template <class T>
struct Tiles {
  Shape const& shape;
  int tile, step, rank_m, rank_n;

  // Sets m and n, the first row and column of d in the tile.
  CUTE_DEVICE bool next(int& m, int& n) {
    if (tile >= shape.m_tiles * shape.n_tiles) return false;
    int const in_band = shape.band * shape.n_tiles, first = tile / in_band * shape.band, i = tile % in_band;
    int const width = min(shape.band, shape.m_tiles - first);
    m = ((first + i % width) * T::kClusterM + rank_m) * T::kM;
    n = (i / width * T::kClusterN + rank_n) * T::kWidth;
    tile += step;
    return true;
  }
};

// The sums stay what they are: a store of a pair would have them in an even register and the next one, as wgmma has
// what is added to them. An FFMA of two operands in one bank takes longer; ptxas has them in different ones where it is
// free to, and a tile of 128 x 192 took 4 % less time.
CUTE_DEVICE void store_pair(uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(__fadd_rn(a, -0.f)), "f"(__fadd_rn(b, -0.f))
               : "memory");
}

// Codes of a block of rows wait in shared memory as words of a thread's two columns in one eight and in the next, as
// stmatrix wants them, and units of 16 columns stand in the order of 128-byte swizzle. This puts them right, and stores
// those of rows from m0 on, up to m, and of `columns` of each.
CUTE_DEVICE void store_codes(uint8_t* d, int64_t row_stride, int64_t column_stride, const uint8_t* codes, int m0, int m,
                             int columns, bool wide) {
  constexpr int kUnits = kSpan / 16;
  for (int i = int(threadIdx.x) % 128; i < kMmaRows * kUnits; i += 128) {
    int const row = i / kUnits, unit = i % kUnits, column = unit * 16;
    if (m0 + row >= m || column >= columns) continue;
    uint4 const words = reinterpret_cast<uint4 const*>(codes)[row * kUnits + (unit ^ row % 8)];
    uint4 const ordered = {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.z, words.w, 0x5410),
                           __byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632)};
    uint8_t* const to = d + (m0 + row) * row_stride + column * column_stride;
    if (wide) {
      *reinterpret_cast<uint4*>(to) = ordered;
    } else {
      uint32_t const of[4] = {ordered.x, ordered.y, ordered.z, ordered.w};
      CUTE_UNROLL
      for (int j = 0; j < 16; ++j) {
        if (column + j < columns) to[j * column_stride] = uint8_t(of[j / 4] >> j % 4 * 8);
      }
    }
  }
}

}  // namespace blockwise

template <class Variant>
__global__ void __launch_bounds__(blockwise::Tile<Variant>::kThreads, 1)
    blockwise_kernel(const __grid_constant__ cutegemm_call call, const __grid_constant__ blockwise::Shape shape,
                     const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                     const __grid_constant__ CUtensorMap map_scale_a, const __grid_constant__ CUtensorMap map_d) {
  using namespace blockwise;
  using T = Tile<Variant>;
  using Formula = typename Variant::Formula;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  using cutlass::arch::NamedBarrier;
  using Element = cutlass::float_e4m3_t;
  constexpr int kStages = T::kStages, kGroups = T::kGroups, kN = T::kN, kMmaWidth = T::kMmaWidth;
  constexpr int kMmas = T::kMmas, kRowBlocks = T::kRowBlocks, kColumnBlocks = T::kColumnBlocks;
  constexpr bool kColumns = T::kColumns, kGated = T::kGated;

  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(raw + (-cast_smem_ptr_to_uint(raw) & 1023));
  auto const full = [&](int stage) { return reinterpret_cast<Full*>(&shared.full[stage]); };
  auto const empty = [&](int stage) { return reinterpret_cast<Empty*>(&shared.empty[stage]); };
  int const split = T::kSplits ? call.options.split : 1, cluster = T::kCluster * split;
  int const rank = int(blockIdx.x) % cluster;
  int const rank_m = T::kSplits ? 0 : rank % T::kClusterM, rank_n = T::kSplits ? 0 : rank / T::kClusterM;
  // The shuffle tells the compiler that these are the same in a warp, so that descriptors are in uniform registers.
  int const group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0) - 1;
  int const warp = __shfl_sync(~0u, int(threadIdx.x) % 128 / 32, 0);
  int const lane = int(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (auto const* map : {&map_a, &map_b, &map_scale_a}) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
    }
    for (int s = 0; s < kStages; ++s) {
      full(s)->init(2);  // TMA's, and a warp's with scales
      empty(s)->init(T::kCluster * kGroups * 4);
    }
    auto& sums_ready = *reinterpret_cast<Full*>(&shared.sums_ready);
    sums_ready.init(1);
    cutlass::arch::fence_barrier_init();
    if (split > 1) sums_ready.arrive_and_expect_tx(T::kM / split * (split - 1) * T::kSumPitch * int(sizeof(float)));
  }
  __syncthreads();
  if (cluster > 1) {  // no CTA of a cluster may write to another before that one runs
    cluster_arrive_relaxed();
    cluster_wait();
  }
  launch_next_kernel();

  Tiles<T> tiles = {shape, int(blockIdx.x) / cluster, int(gridDim.x) / cluster, rank_m, rank_n};
  int tile_m, tile_n;
  // The blocks of k that are this CTA's.
  int const part = T::kSplits ? ceil_div(shape.blocks, split) : shape.blocks;
  int const first_block = T::kSplits ? min(shape.blocks, rank * part) : 0;
  int const last_block = T::kSplits ? min(shape.blocks, first_block + part) : shape.blocks;
  // Of b, the row that a tile at n has as its i-th.
  int const gates = call.n / 2;
  auto const row_of_b = [&](int n, int i) {
    if constexpr (!kGated) return n + i;
    return n + i / kN * kMmaWidth + i % kMmaWidth + (i % kN < kMmaWidth ? 0 : gates);
  };
  int stage = 0, phase = 0;
  auto const next_stage = [&] {
    if (++stage == kStages) stage = 0, phase ^= 1;
  };

  if (group < 0) {
    cutlass::arch::warpgroup_reg_dealloc<kGroups == 1 ? 96 : 56>();
    if (warp == 0) {
      if (elect_one_sync()) {  // of any other condition ptxas does not know that it is one thread's
        bool more = tiles.next(tile_m, tile_n);
        wait_for_previous_kernel();
        int const bytes =
            T::kClusterN * shape.box_a * kSpan + T::kBytesB + (shape.scale_a_by_tma ? T::kM * int(sizeof(float)) : 0);
        for (; more; more = tiles.next(tile_m, tile_n)) {
          for (int block = first_block; block < last_block; ++block, next_stage()) {
            empty(stage)->wait(phase ^ 1);
            full(stage)->arrive_and_expect_tx(bytes);
            uint32_t const barrier = cast_smem_ptr_to_uint(full(stage));
            if (shape.scale_a_by_tma) {
              load_rows(map_scale_a, cast_smem_ptr_to_uint(shared.scale_a[stage]), barrier, tile_m, block);
            }
            uint32_t const to_a = cast_smem_ptr_to_uint(shared.a[stage]) + rank_n * shape.box_a * kSpan;
            if constexpr (T::kClusterN > 1) {
              constexpr int kRow = T::kClusterN * T::kClusterM == 2 ? 0b11 : 0b0101;
              load_rows(map_a, to_a, barrier, block * kSpan, tile_m + rank_n * shape.box_a, kRow << rank_m);
            } else {
              load_rows(map_a, to_a, barrier, block * kSpan, tile_m);
            }
            CUTE_UNROLL
            for (int i = 0; i < T::kBoxesB; i += T::kClusterM) {
              int const box = i + rank_m, row = row_of_b(tile_n, box * T::kBoxB);
              uint32_t const to = cast_smem_ptr_to_uint(shared.b[stage]) + box * T::kBoxB * kSpan;
              if constexpr (T::kClusterM > 1) {
                constexpr int kColumn = (1 << T::kClusterM) - 1;
                load_rows(map_b, to, barrier, block * kSpan, row, kColumn << (rank_n * T::kClusterM));
              } else {
                load_rows(map_b, to, barrier, block * kSpan, row);
              }
            }
          }
        }
        // It may not leave while another CTA may still arrive at its barriers.
        for (int s = 0; T::kCluster > 1 && s < kStages; ++s, next_stage()) empty(stage)->wait(phase ^ 1);
      }
    } else {
      int const scale_warps = T::kOneScaleWarp && shape.scale_a_by_tma ? 1 : kScaleWarps;
      if (warp > scale_warps) return;
      wait_for_previous_kernel();
      int turn = 0;
      while (tiles.next(tile_m, tile_n)) {
        float ahead[kColumns ? 1 : T::kScalesB];  // of the lane-th of 32 blocks
        for (int block = first_block; block < last_block; ++block, next_stage()) {
          int const in_ahead = (block - first_block) % 32;
          if (!kColumns && in_ahead == 0) {
            CUTE_UNROLL
            for (int i = 0; i < T::kScalesB; ++i) {
              int const n = min(row_of_b(tile_n, i * T::kChunk), call.n - 1);
              ahead[i] = load_scale(call.scale_b, n / kSpan, min(block + lane, shape.blocks - 1));
            }
          }
          bool const own = turn == warp - 1;
          turn = turn == scale_warps - 1 ? 0 : turn + 1;
          if (!own) continue;
          empty(stage)->wait(phase ^ 1);
          if (!shape.scale_a_by_tma) {
#pragma unroll 2
            for (int i = lane; i < T::kM; i += 32) {
              shared.scale_a[stage][i] = load_scale(call.scale_a, min(tile_m + i, call.m - 1), block);
            }
          }
          if constexpr (kColumns) {
#pragma unroll 2
            for (int i = lane; i < T::kRowsB; i += 32) {
              shared.scale_b[stage][i] = load_scale(call.scale_b, min(tile_n + i, call.n - 1), block);
            }
          } else {
            CUTE_UNROLL
            for (int i = 0; i < T::kScalesB; ++i) {
              if (lane == in_ahead) shared.scale_b[stage][i] = ahead[i];
            }
          }
          __syncwarp();
          if (lane == 0) full(stage)->arrive();
        }
      }
    }
    return;
  }

  cutlass::arch::warpgroup_reg_alloc<kGroups == 1 ? 240 : 224>();
  wait_for_previous_kernel();
  using Atom = decltype(GMMA::ss_op_selector<Element, Element, float, cute::Shape<Int<kMmaRows>, Int<kN>, Int<kSpan>>,
                                             GMMA::Major::K, GMMA::Major::K>());
  using LayoutA =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<Int<kMmaRows>, Int<kSpan>>{}));
  using LayoutB = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<Int<kN>, Int<kSpan>>{}));
  static_assert(size<1>(typename MMA_Traits<Atom>::Shape_MNK{}) == kN);  // CuTe has some widths on demand only
  auto mma = make_tiled_mma(Atom{});
  auto const thread_mma = mma.get_slice(threadIdx.x % 128);
  // Of the first stage; others lie so many bytes behind.
  auto const element = [](uint8_t* at) { return make_smem_ptr(reinterpret_cast<Element*>(at)); };
  Tensor const fragments_a = thread_mma.make_fragment_A(
      thread_mma.partition_A(make_tensor(element(shared.a[0] + group * T::kGroupM * kSpan), LayoutA{})));
  Tensor const fragments_b =
      thread_mma.make_fragment_B(thread_mma.partition_B(make_tensor(element(shared.b[0]), LayoutB{})));
  auto const behind = [](auto const& fragments, int bytes) {
    return make_tensor(fragments.data() + bytes / 16, fragments.layout());
  };
  using Sum = decltype(partition_fragment_C(mma, cute::Shape<Int<kMmaRows>, Int<kN>>{}));
  // For every 8 columns a thread holds 2 neighbours in 2 rows that lie 8 apart.
  int const own_row = warp * 16 + lane / 4, own_column = lane % 4 * 2;

  constexpr int kChunks = kN / T::kChunk;
  int const row_in_tile = group * T::kGroupM + own_row;
  // Of one block: the scales, and the stage that it came in.
  struct Scales {
    float a[2], b[kColumns ? 1 : kChunks];
    int stage;
  };
  // Starts a group's MMA (of each 32 k), the first of which also waits for the stage, and the last goes on to the next.
  auto const start = [&](Sum& part, auto mma_index, bool wait = true) {
    constexpr int kRowBlock = mma_index / kColumnBlocks, kColumnBlock = mma_index % kColumnBlocks;
    if (mma_index == 0 && wait) full(stage)->wait(phase);
    Tensor const a = behind(fragments_a, stage * T::kBytesA + kRowBlock * kMmaRows * kSpan);
    Tensor const b = behind(fragments_b, stage * T::kBytesB + kColumnBlock * kN * kSpan);
    warpgroup_fence_operand(part);
    warpgroup_arrive();
    for_each(make_seq<kSpan / 32>{}, [&](auto k) {
      mma.accumulate_ = k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      gemm(mma, a(_, _, k), b(_, _, k), part);
    });
    warpgroup_commit_batch();
    Scales scales;  // which the MMA does not wait for
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) scales.a[i] = shared.scale_a[stage][row_in_tile + kRowBlock * kMmaRows + 8 * i];
    if constexpr (!kColumns) {
      CUTE_UNROLL
      for (int i = 0; i < kChunks; ++i) scales.b[i] = shared.scale_b[stage][kColumnBlock * kChunks + i];
    }
    scales.stage = stage;
    if constexpr (mma_index == kMmas - 1) next_stage();
    return scales;
  };
  // Adds their sums, or sets the first.
  auto const finish = [&](Sum& sum, Sum& part, Scales const& scales, auto mma_index, auto first) {
    auto const add = [&](int i, float s) { sum(i) = first ? __fmul_rn(part(i), s) : __fmaf_rn(part(i), s, sum(i)); };
    warpgroup_fence_operand(part);
    auto const release = [&] {
      if constexpr (mma_index == kMmas - 1) {
        __syncwarp();  // all lanes have read their scales
        if constexpr (T::kCluster > 1) {
          if (lane < T::kCluster) empty(scales.stage)->arrive(lane);
        } else {
          if (lane == 0) empty(scales.stage)->arrive();
        }
      }
    };
    if constexpr (kColumns) {
      auto const& scale_b = shared.scale_b[scales.stage];
      CUTE_UNROLL
      for (int i = 0; i < size(sum); ++i) {
        add(i, scales.a[i / 2 % 2] * scale_b[i / 4 * 8 + own_column + i % 2]);
      }
      warpgroup_fence_operand(sum);  // or they would be put off until `part` has other sums
      release();
    } else {
      release();
      float s[kChunks][2];
      CUTE_UNROLL
      for (int c = 0; c < kChunks; ++c) s[c][0] = scales.a[0] * scales.b[c], s[c][1] = scales.a[1] * scales.b[c];
      CUTE_UNROLL
      for (int i = 0; i < size(sum); ++i) add(i, s[i / (T::kChunk / 2)][i / 2 % 2]);
    }
  };

  Sum sums[kMmas], even, odd;
  int const blocks = last_block - first_block;  // of a part there may be none
  // Whether a tile's first MMA is started ahead. With two sets ptxas does not see through it, and would serialize all.
  constexpr bool kAhead = T::kSets == 1;
  auto const sum_blocks = [&](Scales of_even) {
    if (!kAhead) of_even = start(even, Int<0>{}, blocks > 0);
    std::true_type const first;
    std::false_type const later;
    if constexpr (T::kSets == 1) {
      for_each(make_seq<kMmas>{}, [&](auto i) {
        if constexpr (i > 0) of_even = start(even, i);
        warpgroup_wait<0>();
        finish(sums[i], even, of_even, i, first);
      });
#pragma unroll 4
      for (int block = 1; block < blocks; ++block) {
        for_each(make_seq<kMmas>{}, [&](auto i) {
          of_even = start(even, i);
          warpgroup_wait<0>();
          finish(sums[i], even, of_even, i, later);
        });
      }
    } else {
      Int<0> const only;
      if (blocks <= 1) {
        warpgroup_wait<0>();
        finish(sums[0], even, of_even, only, first);
        return;
      }
      Scales of_odd = start(odd, only);
      warpgroup_wait<1>();
      finish(sums[0], even, of_even, only, first);
      int block = 2;
#pragma unroll 2
      for (; block + 1 < blocks; block += 2) {
        of_even = start(even, only);
        warpgroup_wait<1>();
        finish(sums[0], odd, of_odd, only, later);
        of_odd = start(odd, only);
        warpgroup_wait<1>();
        finish(sums[0], even, of_even, only, later);
      }
      if (block < blocks) {
        of_even = start(even, only);
        warpgroup_wait<1>();
        finish(sums[0], odd, of_odd, only, later);
        warpgroup_wait<0>();
        finish(sums[0], even, of_even, only, later);
      } else {
        warpgroup_wait<0>();
        finish(sums[0], odd, of_odd, only, later);
      }
    }
  };

  bool const has_operands = Formula::has_operands(call);  // without them its formula is the sum itself
  bool more = tiles.next(tile_m, tile_n);
  Scales of_first;
  if constexpr (kAhead) of_first = start(even, Int<0>{}, blocks > 0);
  while (more) {
    int const m0 = tile_m + group * T::kGroupM, n0 = tile_n;
    // The epilogue's operands are on their way before they are needed.
    constexpr int kOwn = (T::kRowsB + 127) / 128;
    typename Formula::Column own[kOwn];
    typename Formula::Row rows[kRowBlocks][2];
    if (has_operands) {
      CUTE_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        own[i] = Formula::column(call, min(row_of_b(n0, int(threadIdx.x) % 128 + 128 * i), call.n - 1));
      }
      CUTE_UNROLL
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        rows[i / 2][i % 2] = Formula::row(call, min(m0 + own_row + i / 2 * kMmaRows + i % 2 * 8, call.m - 1));
      }
    }
    sum_blocks(of_first);
    if (T::kSplits && split > 1) {
      // CTA r finishes the r-th part of the tile's rows, all of its threads together.
      int const rows_of_part = T::kM / split, floats_of_part = rows_of_part * T::kSumPitch;
      auto* const sent = reinterpret_cast<float*>(shared.a);  // [part of the rows][row][kSumPitch]
      auto* const received = sent + T::kM * T::kSumPitch;     // [part of k][row][kSumPitch]
      cluster_arrive_relaxed();                               // no stage of a CTA is read any more
      cluster_wait();
      for_each(make_seq<2 * kRowBlocks>{}, [&](auto i) {
        float* const to = &sent[(row_in_tile + i / 2 * kMmaRows + i % 2 * 8) * T::kSumPitch + own_column];
        CUTE_UNROLL
        for (int j = i % 2 * 2; j < size(Sum{}); j += 4) {
          float2 const two = {sums[i / 2](j), sums[i / 2](j + 1)};
          *reinterpret_cast<float2*>(to + j / 4 * 8) = blocks > 0 ? two : float2{};
        }
      });
      cutlass::arch::fence_view_async_shared();
      NamedBarrier::sync(128 * kGroups, kGroups);
      if (group == 0 && warp == 0 && elect_one_sync()) {
        for (int to = 0; to < split; ++to) {
          if (to == rank) continue;
          copy_to_remote(remote_address(received + rank * floats_of_part, to), remote_address(&shared.sums_ready, to),
                         sent + to * floats_of_part, floats_of_part * int(sizeof(float)));
        }
      }
      wait_cluster(shared.sums_ready, 0);
      cluster_arrive_relaxed();  // what others sent is here, and they may leave
      for (int i = int(threadIdx.x) - 128; i < rows_of_part * kN / 4; i += 128 * kGroups) {
        int const row = i / (kN / 4), column = i % (kN / 4) * 4;
        int const m = tile_m + rank * rows_of_part + row, n = tile_n + column;
        if (m >= call.m || n >= call.n) continue;
        float total[4] = {};
        for (int pair = 0; pair < split; pair += 2) {  // whose loads are on their way together
          CUTE_UNROLL
          for (int p = pair; p < pair + 2; ++p) {
            auto const* const part = (p == rank ? sent : received) + p * floats_of_part;
            float4 const four = *reinterpret_cast<float4 const*>(&part[row * T::kSumPitch + column]);
            total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w;
          }
        }
        if (has_operands) {
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) {
            int const at_n = min(n + j, call.n - 1);
            total[j] = Formula::apply(total[j], Formula::row(call, m), Formula::column(call, at_n),
                                      Formula::element(call, m, at_n));
          }
        }
        int64_t const at = m * call.d_stride[0] + n * call.d_stride[1];
        if (shape.store_by_tma) {
          auto* const to = reinterpret_cast<uint2*>(static_cast<uint16_t*>(call.d) + at);
          if (call.d_dtype == CUTEGEMM_FP32) {
            *reinterpret_cast<float4*>(static_cast<float*>(call.d) + at) = {total[0], total[1], total[2], total[3]};
          } else if (call.d_dtype == CUTEGEMM_FP16) {
            *to = {rounded_pair<true>(total[0], total[1]), rounded_pair<true>(total[2], total[3])};
          } else {
            *to = {rounded_pair<false>(total[0], total[1]), rounded_pair<false>(total[2], total[3])};
          }
        } else {
          for (int j = 0; j < min(4, call.n - n); ++j) {
            store_from_float(call.d, call.d_dtype, at + j * call.d_stride[1], total[j]);
          }
        }
      }
      cluster_wait();
      return;  // there is no second tile
    }

    // The next tile's first MMA runs during this one's epilogue. Behind the last tile it reads what is there, in vain:
    // ptxas would wait for one that may be left out.
    more = tiles.next(tile_m, tile_n);
    if constexpr (kAhead) of_first = start(even, Int<0>{}, more);

    auto const storer = [&] { return warp == 0 && elect_one_sync(); };
    if (storer()) wait_until_stores_read<0>();
    NamedBarrier::sync(128, group);  // what shared memory has of the tile before is not read any more
    if (has_operands) {
      CUTE_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        if (T::kRowsB % 128 == 0 || int(threadIdx.x) % 128 + 128 * i < T::kRowsB) {
          shared.columns[group][int(threadIdx.x) % 128 + 128 * i] = own[i];
        }
      }
      NamedBarrier::sync(128, group);
    }
    for_each(make_seq<kRowBlocks>{}, [&](auto r) {
      int const block_m = m0 + r * kMmaRows;
      constexpr int kValues = kMmaWidth / 2;  // of a thread in an MMA's part of d
      // Calls f with the sums of each MMA of the block of rows, and with its first column in the tile of d.
      auto const for_each_mma = [&](auto f) {
        for_each(make_seq<kColumnBlocks>{}, [&](auto c) { f(sums[r * kColumnBlocks + c], c * Int<kMmaWidth>{}); });
      };
      auto const row_of = [&](int i) { return own_row + i / 2 % 2 * 8; };
      auto const column_of = [&](int i) { return i / 4 * 8 + own_column + i % 2; };
      auto const apply = [&](auto element) {
        for_each_mma([&](Sum& sum, int column) {
          auto const* const columns = &shared.columns[group][kGated ? 2 * column : column];
          CUTE_UNROLL
          for (int i = 0; i < size(sum); ++i) {
            sum(i) = Formula::apply(sum(i), rows[r][i / 2 % 2], columns[column_of(i)], element(i));
          }
        });
      };
      if (!kGated && call.residual.data) {
        apply([&](int i) {
          return Formula::element(call, min(block_m + row_of(i), call.m - 1), min(n0 + column_of(i), call.n - 1));
        });
      } else if (has_operands) {
        apply([&](int) { return typename Formula::Element{}; });
      }
      if constexpr (kGated) {
        for_each_mma([&](Sum& sum, int) {
          CUTE_UNROLL
          for (int i = 0; i < kValues; ++i) sum(i) = silu(sum(i)) * sum(i + kValues);
        });
      }
      if constexpr (T::kQuantizes) {
        if (call.d_dtype == CUTEGEMM_E4M3) {
          uint8_t* const out = shared.out[group][r][0];
          // Of what is finite and inside of d. That all of it is can be told by the largest itself.
          float amax[2];
          auto const find = [&](auto inside) {
            amax[0] = amax[1] = 0.f;
            for_each_mma([&](Sum& sum, int column) {
              CUTE_UNROLL
              for (int i = 0; i < kValues; ++i) {
                float const x = fabsf(sum(i));
                if (inside(column + column_of(i), x)) amax[i / 2 % 2] = fmaxf(amax[i / 2 % 2], x);
              }
            });
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) {
              amax[i] = fmaxf(amax[i], __shfl_xor_sync(~0u, amax[i], 1));
              amax[i] = fmaxf(amax[i], __shfl_xor_sync(~0u, amax[i], 2));
            }
          };
          bool finite = n0 + T::kWidth <= shape.width;
          if (finite) {
            find([](int, float) { return true; });
            finite = __all_sync(~0u, fmaxf(amax[0], amax[1]) < INFINITY);
          }
          if (!finite) find([&](int column, float x) { return x < INFINITY && n0 + column < shape.width; });
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            amax[i] = __fdiv_rn(fmaxf(amax[i], kAmaxFloor), kE4m3Max);
            if (call.output.power_of_two) amax[i] = power_of_two_above(amax[i]);
            int const m = block_m + own_row + 8 * i;
            if (lane % 4 == 0 && m < call.m && n0 < shape.width) {
              call.output.scale[m * call.output.scale_stride[0] + n0 / kSpan * call.output.scale_stride[1]] = amax[i];
            }
          }
          auto const put = [&](auto divided) {
            for_each_mma([&](Sum& sum, int column) {
              CUTE_UNROLL
              for (int u = 0; u < kMmaWidth / 16; u += 2) {
                auto const word = [&](int i) {
                  auto const two = [&](int i) -> uint32_t {
                    float2 const quotients = {divided(sum(i), i / 2 % 2), divided(sum(i + 1), i / 2 % 2)};
                    return __nv_cvt_float2_to_fp8x2(quotients, __NV_SATFINITE, __NV_E4M3);
                  };
                  return two(i) | two(i + 4) << 16;
                };
                int const row = warp * 16 + lane % 16, unit = (column / 16 + u + lane / 16) ^ row % 8;
                store_matrices(cast_smem_ptr_to_uint(out + row * kSpan + unit * 16), word(u * 8), word(u * 8 + 2),
                               word(u * 8 + 8), word(u * 8 + 10));
              }
            });
          };
          if (finite) {
            // Where divided() underflows the code is zero.
            float const inverse[2] = {__frcp_rn(amax[0]), __frcp_rn(amax[1])};
            put([&](float x, int i) { return divided(x, amax[i], inverse[i]); });
          } else {
            put([&](float x, int i) { return x / amax[i]; });
          }
          NamedBarrier::sync(128, group);
          store_codes(static_cast<uint8_t*>(call.d) + n0 * call.d_stride[1], call.d_stride[0], call.d_stride[1], out,
                      block_m, call.m, shape.width - n0, shape.codes_wide);
          return;
        }
      }
      if (shape.store_by_tma) {
        constexpr int kUnits = T::kOutColumns / 8;  // of 16 bytes, in a row of a box
        auto const swizzle_of = [](int row) { return row * kUnits / 8 % kUnits; };
        auto const send = [&](int first_column, int columns_of_box) {
          cutlass::arch::fence_view_async_shared();
          NamedBarrier::sync(128, group);
          if (storer()) {
            CUTE_UNROLL
            for (int c = 0; c < T::kOutBoxes; ++c) {
              store_rows(map_d, cast_smem_ptr_to_uint(shared.out[group][r][c]), n0 + first_column + c * columns_of_box,
                         block_m);
            }
            commit_stores();
          }
        };
        auto const store_as = [&](auto fp16) {
          int const row = warp * 16 + lane % 16, swizzle = swizzle_of(row);
          for_each_mma([&](Sum& sum, auto column) {
            CUTE_UNROLL
            for (int u = 0; u < kMmaWidth / 8; u += 2) {
              auto const two = [&](int i) {
                return rounded_pair<decltype(fp16)::value>(sum(u * 4 + i), sum(u * 4 + i + 1));
              };
              uint32_t const box = cast_smem_ptr_to_uint(shared.out[group][r][column / T::kOutColumns + u / kUnits]);
              uint32_t const unit = (u % kUnits + lane / 16) ^ swizzle;
              store_matrices(box + (row * kUnits + unit) * 16, two(0), two(2), two(4), two(6));
            }
          });
          send(0, T::kOutColumns);
        };
        if (call.d_dtype == CUTEGEMM_FP32) {
          constexpr int kHalf = T::kWidth / 2, kBoxColumns = T::kOutColumns / 2;
          // Of the first eight columns; others' units are at this address, the bits of their index toggled.
          uint32_t const own = cast_smem_ptr_to_uint(shared.out[group][r][0]) + lane % 2 * 8 +
                               (own_row * kUnits + (lane % 4 / 2 ^ swizzle_of(own_row))) * 16;
          for_each(make_seq<2>{}, [&](auto half) {
            if (half > 0) {
              if (storer()) wait_until_stores_read<0>();
              NamedBarrier::sync(128, group);
            }
            for_each_mma([&](Sum& sum, auto column) {
              CUTE_UNROLL
              for (int i = 0; i < kValues; i += 2) {
                int const eight = column + i / 4 * 8 - half * kHalf, box = eight / kBoxColumns;
                if (eight < 0 || eight >= kHalf) continue;
                store_pair((own ^ eight % kBoxColumns * 4) + box * T::kOutBox + i / 2 % 2 * 8 * kUnits * 16, sum(i),
                           sum(i + 1));
              }
            });
            send(half * kHalf, kBoxColumns);
          });
        } else if (call.d_dtype == CUTEGEMM_FP16) {
          store_as(std::true_type{});
        } else {
          store_as(std::false_type{});
        }
      } else {
        with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
          for_each_mma([&](Sum& sum, int column) {
            CUTE_UNROLL
            for (int i = 0; i < kValues; ++i) {
              int const m = block_m + row_of(i), n = n0 + column + column_of(i);
              if (m < call.m && n < shape.width) store(d + m * call.d_stride[0] + n * call.d_stride[1], sum(i));
            }
          });
        });
      }
    });
  }
  warpgroup_wait<0>();
  // Shared memory must outlive what reads it. That d is where it belongs the end of the launch sees to.
  if (warp == 0 && elect_one_sync()) wait_until_stores_read<0>();
}

template <class Variant>
struct Blockwise {
  using T = blockwise::Tile<Variant>;
  static constexpr auto* kKernel = &blockwise_kernel<Variant>;

  static int32_t prepare() { return load_kernel(kKernel, T::kBytes); }
  static int64_t workspace(const cutegemm_call&) { return 0; }

  static int32_t launch(const cutegemm_call& call) {
    using namespace blockwise;
    if (call.a_dtype != CUTEGEMM_E4M3 || call.b_dtype != CUTEGEMM_E4M3) return kWrongTypes;
    if (!is_scale(call.scale_a, 1) || !is_scale(call.scale_b, T::kColumns ? 1 : kSpan)) return kWrongTypes;
    if (call.m < 1 || call.n < 1 || call.k < 1) return kWrongSize;
    if (call.a_stride[1] != 1 || call.b_stride[0] != 1) return kWrongLayout;
    auto const aligned = [](const void* data, int64_t bytes) {
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
    };
    if (!aligned(call.a, call.a_stride[0]) || !aligned(call.b, call.b_stride[1])) return kMisaligned;
    cutegemm_call own = call;
    int const split = own.options.split = std::max(1, call.options.split);
    if (split > 1 && (!T::kSplits || (split != 2 && split != 4 && split != 8))) return kWrongOptions;
    if (bool(call.output.gated) != T::kGated || (T::kGated && (call.residual.data || call.n % (2 * T::kChunk) != 0))) {
      return kWrongOptions;
    }
    bool const codes = call.d_dtype == CUTEGEMM_E4M3;
    if (codes && (!call.output.scale || !T::kQuantizes || split > 1)) return kWrongTypes;
    blockwise::Shape shape = {};
    shape.width = T::kGated ? call.n / 2 : call.n;
    shape.blocks = ceil_div(call.k, kSpan);
    shape.m_tiles = ceil_div(call.m, T::kM * T::kClusterM);
    shape.n_tiles = ceil_div(shape.width, T::kWidth * T::kClusterN);
    int64_t const tiles = int64_t(shape.m_tiles) * shape.n_tiles;
    if (tiles > INT32_MAX / 2) return kWrongSize;
    if (split > 1 && tiles * split > call.sm_count) return kWrongOptions;  // sums lie where a next tile's stages would
    int const band = call.options.swizzle ? call.options.swizzle : std::max(1, 1024 / (T::kM * T::kClusterM));
    shape.band = std::min(shape.m_tiles, band);
    int const rows_a = std::min(T::kM, ceil_div(call.m, 8 * T::kClusterN) * 8 * T::kClusterN);  // whole swizzles
    shape.box_a = rows_a / T::kClusterN;
    int const bytes = call.d_dtype == CUTEGEMM_FP32 ? 4 : 2;
    bool const rows = call.d_stride[1] == 1 && call.d_stride[0] >= shape.width;
    // TMA writes whole pieces of 16 bytes, also where a row ends inside of one.
    shape.store_by_tma = !codes && rows && aligned(call.d, call.d_stride[0] * bytes) && shape.width * bytes % 16 == 0;
    shape.codes_wide = codes && rows && aligned(call.d, call.d_stride[0]) && shape.width % 16 == 0;
    int64_t const pitch = shape.blocks > 1 ? call.scale_a.block_stride : (int64_t(call.m) + 3) / 4 * 4;
    shape.scale_a_by_tma = call.scale_a.dtype == CUTEGEMM_FP32 && (call.m == 1 || call.scale_a.stride == 1) &&
                           pitch >= call.m && aligned(call.scale_a.data, pitch * 4);
    CUtensorMap map_a, map_b, map_scale_a = {}, map_d = {};
    auto const byte = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    if (!encode_rows(map_a, byte, 1, call.a, call.m, call.k, call.a_stride[0], shape.box_a) ||
        !encode_rows(map_b, byte, 1, call.b, call.n, call.k, call.b_stride[1], T::kBoxB) ||
        (shape.scale_a_by_tma && !encode_row(map_scale_a, call.scale_a.data, shape.blocks, call.m, pitch, T::kM)) ||
        (shape.store_by_tma &&
         !encode_rows(map_d, bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16, bytes,
                      call.d, call.m, shape.width, call.d_stride[0], kMmaRows, 2 * T::kOutColumns))) {
      return kNotImplementable;
    }
    int const cluster = T::kCluster * split;
    int const clusters = int(std::min<int64_t>(tiles, call.sm_count / cluster));
    return launch_cluster(call, kKernel, dim3(clusters * cluster), cluster, dim3(T::kThreads), T::kBytes, own, shape,
                          map_a, map_b, map_scale_a, map_d);
  }
};

}  // namespace cutegemm
