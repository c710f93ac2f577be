// The GEMM of a few tokens: d = Formula(a @ b) for m <= 1, 2, 8, 16 or 32, one skeleton for every weight format.
//
// With so few rows of a the weight's bytes are all that counts, so everything here serves to keep them flowing:
//  - The weight's rows run along the MMA's m side, the tokens along its n side, which may be 8 wide. wgmma reads both
//    from shared memory, so between TMA and tensor core no register and no instruction is spent on them. (mma.sync has
//    no FP8 of its own on Hopper: converting to FP16 cost a fifth of the bandwidth.)
//  - A tile is as many rows as share n out evenly among the multiprocessors: the MMA's 64, or fewer. The rest
//    of the MMA is then computed for nothing, which costs nothing.
//  - But an MMA takes some 40 cycles however little of it counts, and all of k is too many of them where n gives a
//    multiprocessor but 16 rows, or 8. There the tile is folded: 4 or 8 spans of k stand in one MMA, below each other
//    as rows and beside each other as tokens. Its sums on the diagonal are those of a span with itself, each of which
//    one warp has, or a half of its rows; they are added in the end, as those of a cluster are.
//    The fewer the tokens, the less of a every CTA has to take in: one token of 8 rows is an eighth of what 8 are.
//  - One thread issues all TMA loads, ahead of the MMAs and across tiles, in stages of 256 bytes of each row, or of a
//    folded MMA's spans.
//  - All CTAs together ask for some 8 MB of the weight at a time, beyond the stages whose MMAs run. Less would leave
//    HBM idle; all that shared memory could hold made the first stages late, which cost small weights 4 %.
//  - A cluster of `split` CTAs may share a tile, each with its part of k, and adds through distributed shared memory in
//    a fixed order. There is no workspace and no second launch.
//  - The tensor cores' FP8 sums lose bits, so each 128 bytes of k are summed apart and added in FP32. That is free
//    here, and the results are as good as with use_fast_accum=False. INT8's sums are int32 and exact, however added.
//  - Where each 128 k have scales of their own, they are multiplied in there. Three more warps bring them to shared
//    memory, as many stages ahead as TMA is, and ask for those of nine more at a time: one trip to L2 takes as long as
//    TMA takes for a stage or two.
//  - Programmatic dependent launch: before a CTA waits for the kernel ahead of it, it may ask for its first weights. It
//    asks into L2, where every write ends up, so the weights are right even if that kernel is still writing them.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <array>
#include <cute/algorithm/gemm.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_common.inl>
#include <type_traits>

#include "cluster.cuh"
#include "cutlass_dtype.cuh"
#include "kernel_file.cuh"
#include "scale_rows.cuh"
#include "tma.cuh"
#include "vector.cuh"

namespace cutegemm {

using namespace cute;

namespace decode {

constexpr int kMmaRows = 64;
constexpr int kSpan = 128;  // bytes of k: TMA's and wgmma's swizzle
constexpr int kConsumers = 128;
constexpr int kMaxStages = 16;
constexpr int kScaleWarps = 3;  // each brings every third stage's scales
constexpr int kSharedBytes = 225 * 1024, kHalfShared = 113 * 1024;
constexpr int kBytesInFlight = 8 << 20;  // of the weight, over all CTAs

template <bool kBlocks>
constexpr int kThreads = kConsumers + 32 * (1 + (kBlocks ? kScaleWarps : 0));

// The type of the MMA's sums.
template <class Element>
using Accumulator = std::conditional_t<std::is_same_v<Element, int8_t>, int32_t, float>;

// kRows: of the weight in a tile, at most.
template <int kRows>
constexpr int kFold = kMmaRows / kRows;  // spans in an MMA
template <int kRows>
constexpr int kSpans = std::max(2, kFold<kRows>);  // in a stage

// Shared memory ahead of the stages. A stage is kSpans of the weight, [span][row][128 bytes], then kSpans of a.
template <int kTokens, int kRows, class Sum, bool kBlocks>
struct Header {
  struct Scales {
    float a[kTokens], b[kRows];
  };
  // The other CTAs' sums of the rows that this one finishes, as [CTA][token][row], and its own of all rows, as
  // [CTA that finishes them][token][row], or folded as [span of an MMA][token][row].
  Sum sums[kFold<kRows> > 1 ? 0 : kTokens * kMmaRows], own[kTokens * kMmaRows];
  Scales scales[kBlocks ? kMaxStages : 0][kSpans<kRows>];
  uint64_t full[kMaxStages], empty[kMaxStages], sums_ready, sums_free;
};

// The scales of up to kSize rows, or columns, a warp's lanes in turn: those of one block of k after the other.
template <int kSize>
struct ScaleRows {
  static constexpr int kCount = (kSize + 31) / 32;  // of a lane
  const char* at[kCount];
  int64_t block_bytes;
  bool is_float;

  __device__ __forceinline__ explicit ScaleRows(const cutegemm_vector& scale)
      : block_bytes(scale.dtype == CUTEGEMM_FP32 ? 4 * scale.block_stride : scale.block_stride),
        is_float(scale.dtype == CUTEGEMM_FP32) {}
  __device__ __forceinline__ void set(int i, const cutegemm_vector& scale, int row) {
    at[i] = static_cast<const char*>(scale.data) + row * (is_float ? 4 * scale.stride : scale.stride);
  }
  // Into L2, where also what is written yet ends up.
  __device__ __forceinline__ void prefetch(int block) const {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at[i] + block * block_bytes) : "memory");
    }
  }
  // Calls f with each row that is this lane's, and its index here.
  template <class F>
  __device__ __forceinline__ void for_each_row(int lane, F&& f) const {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (kSize % 32 == 0 || i * 32 + lane < kSize) f(i * 32 + lane, i);
    }
  }
  // FP32 to shared memory, without a register; zeros of what is not `inside`.
  __device__ __forceinline__ void copy(float (&to)[kSize], int lane, int block, bool inside) const {
    for_each_row(lane, [&](int row, int i) {
      auto const& from = *reinterpret_cast<const float*>(at[i] + block * block_bytes);
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(from, to[row], inside);
    });
  }
  __device__ __forceinline__ void load(float (&values)[kCount], int lane, int block, bool inside) const {
    for_each_row(lane, [&](int, int i) {
      const char* const from = at[i] + block * block_bytes;
      values[i] = !inside    ? 0.f
                  : is_float ? *reinterpret_cast<const float*>(from)
                             : power_of_two(*reinterpret_cast<const uint8_t*>(from));
    });
  }
};

// What the host decides.
struct Shape {
  int32_t rows;  // of a tile: a multiple of 8
  int32_t tiles;
  int32_t blocks, part;  // stages that k takes, all and of a CTA
  int32_t stages, stage_bytes, header_bytes;
  int32_t box_spans;  // of a TMA load: all of a stage's, or 1
};

// A (side, k) matrix, k contiguous, as (byte of a span, side, span), by boxes of `rows` and `spans`. What lies outside
// of the matrix reads as zero, and so that the end of k does where it is inside of a span, boxes of one span have all
// of k in the first dimension.
inline bool encode_spans(CUtensorMap& map, const void* data, int side, int64_t k_bytes, int64_t pitch_bytes, int rows,
                         int spans, CUtensorMapL2promotion promotion) {
  return encode<3>(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT8, data,
      {cuuint64_t(spans == 1 ? k_bytes : kSpan), cuuint64_t(side), cuuint64_t(spans == 1 ? 1 : k_bytes / kSpan)},
      {cuuint64_t(pitch_bytes), kSpan}, {kSpan, cuuint32_t(rows), cuuint32_t(spans)}, CU_TENSOR_MAP_SWIZZLE_128B,
      promotion);
}

CUTE_DEVICE void load_box(const CUtensorMap& map, uint32_t to, uint64_t& barrier, int byte, int row, int span,
                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(byte), "r"(row), "r"(span), "r"(cast_smem_ptr_to_uint(&barrier)), "l"(policy)
      : "memory");
}
CUTE_DEVICE void prefetch_box(const CUtensorMap& map, int byte, int row, int span) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(byte), "r"(row),
               "r"(span)
               : "memory");
}
}  // namespace decode

// kBlocks: each 128 k have scales of their own.
template <class ElementA, class ElementB, int kTokens, int kRows, bool kBlocks, class Formula>
__global__ void __launch_bounds__(decode::kThreads<kBlocks>, 1)
    decode_kernel(const __grid_constant__ cutegemm_call call, const __grid_constant__ decode::Shape shape,
                  const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b) {
  using namespace decode;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  constexpr int kStep = kSpan / int(sizeof(ElementB));  // of k, in a span
  constexpr int kSpans = decode::kSpans<kRows>, kFold = decode::kFold<kRows>, kColumns = kTokens * kFold;
  constexpr bool kFolded = kFold > 1, kNarrow = kTokens < 8;
  static_assert(!kNarrow || kColumns == 8);
  constexpr int kSums = kNarrow ? 4 : kTokens / 2;  // of a thread
  using Sum = Accumulator<ElementB>;
  using Atom = decltype(GMMA::ss_op_selector<ElementB, ElementA, Sum, cute::Shape<Int<64>, Int<kColumns>, Int<kStep>>,
                                             GMMA::Major::K, GMMA::Major::K>());
  using LayoutB =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<ElementB>{}, cute::Shape<Int<kMmaRows>, Int<kStep>>{}));
  using LayoutA =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<ElementA>{}, cute::Shape<Int<kColumns>, Int<kStep>>{}));

  extern __shared__ uint8_t raw[];
  // An offset from raw, so that the compiler knows it for shared memory.
  uint8_t* const shared = raw + (-cast_smem_ptr_to_uint(raw) & 1023);
  auto& header = *reinterpret_cast<Header<kTokens, kRows, Sum, kBlocks>*>(shared);
  auto const full = [&](int stage) { return reinterpret_cast<Full*>(&header.full[stage]); };
  auto const empty = [&](int stage) { return reinterpret_cast<Empty*>(&header.empty[stage]); };
  auto& sums_ready = reinterpret_cast<Full&>(header.sums_ready);
  uint8_t* const stages = shared + shape.header_bytes;
  int const span_b = shape.rows * kSpan, offset_a = kSpans * span_b;

  // Calls are short, and the first loads come first: nothing ahead of them is divided.
  int const split = kFolded ? 1 : call.options.split, rank = kFolded ? 0 : int(block_rank_in_cluster());
  int const cluster = int(cluster_id_in_grid().x), clusters = int(cluster_grid_dims().x), tiles = shape.tiles;
  int const first = min(shape.blocks, shape.part * rank), last = min(shape.blocks, first + shape.part);
  int const lane = threadIdx.x % 32;
  // Of those that are no consumers. The shuffle tells the compiler that it is the same in a warp, so that descriptors
  // are in uniform registers.
  int const warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0) - kConsumers / 32;
  int const split_bits = __ffs(split) - 1;
  int const sums_of_part = kTokens * kMmaRows >> split_bits;                             // for a CTA of the cluster
  auto const sum_bytes = [&] { return sums_of_part * (split - 1) * int(sizeof(Sum)); };  // from the others, of a tile

  launch_next_kernel();
  if (warp == 0) {  // it issues the loads, makes the barriers for them, and waits for nobody
    if (lane == 0) {
      for (int s = 0; s < shape.stages; ++s) {
        full(s)->init(kBlocks ? 1 + 32 : 1);  // TMA's, and those of a warp that brings scales
        empty(s)->init(kConsumers / 32);
      }
      sums_ready.init(1);
      reinterpret_cast<Empty*>(&header.sums_free)->init(split * kConsumers / 32);
      cutlass::arch::fence_barrier_init();
      if (split > 1) sums_ready.arrive_and_expect_tx(sum_bytes());
    }
    __syncwarp();
    cutlass::arch::NamedBarrier::arrive(kThreads<kBlocks>, 1);
  } else {
    if (threadIdx.x == 0) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(&map_a) : "memory");
      asm volatile("prefetch.tensormap [%0];" ::"l"(&map_b) : "memory");
    }
    cutlass::arch::NamedBarrier::sync(kThreads<kBlocks>, 1);
  }
  if (split > 1) cluster_arrive_relaxed();

  if (kBlocks && warp > 0) {
    int const k_blocks = ceil_div(call.k, kStep);
    ScaleRows<kTokens> tokens(call.scale_a);
    ScaleRows<kRows> rows(call.scale_b);
    CUTE_UNROLL
    for (int i = 0; i < tokens.kCount; ++i) tokens.set(i, call.scale_a, min(i * 32 + lane, call.m - 1));
    int tile = cluster, block = first;
    auto const advance = [&](int turns) {
      for (block += turns; block >= last && tile < tiles; block -= last - first) tile += clusters;
      CUTE_UNROLL
      for (int i = 0; i < rows.kCount; ++i) {
        int const row = min(tile * shape.rows + i * 32 + lane, call.n - 1);
        rows.set(i, call.scale_b, call.scale_b.group == 1 ? row : row / 128);
      }
    };
    if (first == last) tile = tiles;
    advance(warp - 1);
    if (!call.options.no_chain && tile < tiles) rows.prefetch(block * kSpans);
    wait_for_previous_kernel();
    int stage = warp - 1, phase = 1;  // there are more stages than scale warps, see launch()
    for (; tile < tiles; advance(kScaleWarps)) {
      empty(stage)->wait(phase);
      auto& scales = header.scales[stage];
      // Behind the end of k sums are zero, and so must scales be: inf * 0 is NaN.
      auto const inside = [&](int span) { return block * kSpans + span < k_blocks; };
      if (tokens.is_float && rows.is_float) {
        CUTE_UNROLL
        for (int s = 0; s < kSpans; ++s) {
          tokens.copy(scales[s].a, lane, block * kSpans + s, inside(s));
          rows.copy(scales[s].b, lane, block * kSpans + s, inside(s));
        }
        cutlass::arch::cpasync_barrier_arrive_noinc(&header.full[stage]);
      } else {
        float a[kSpans][tokens.kCount], b[kSpans][rows.kCount];
        CUTE_UNROLL
        for (int s = 0; s < kSpans; ++s) {
          tokens.load(a[s], lane, block * kSpans + s, inside(s));
          rows.load(b[s], lane, block * kSpans + s, inside(s));
        }
        CUTE_UNROLL
        for (int s = 0; s < kSpans; ++s) {
          tokens.for_each_row(lane, [&](int row, int i) { scales[s].a[row] = a[s][i]; });
          rows.for_each_row(lane, [&](int row, int i) { scales[s].b[row] = b[s][i]; });
        }
        full(stage)->arrive();
      }
      for (stage += kScaleWarps; stage >= shape.stages; stage -= shape.stages) phase ^= 1;
    }
  } else if (warp >= 0) {
    if (lane == 0) {  // with elect_one_sync() this is half as long, and decode 1 to 4 % slower
      bool const whole = shape.box_spans > 1;
      auto const byte_of = [&](int span) { return whole ? 0 : span * kSpan; };
      auto const span_of = [&](int span) { return whole ? span : 0; };
      if (!call.options.no_chain) {
        int const ahead = min(call.options.prefetch * 1024 / offset_a, last - first) * kSpans;
        for (int i = 0; i < ahead; i += shape.box_spans) {
          int const span = first * kSpans + i;
          prefetch_box(map_b, byte_of(span), cluster * shape.rows, span_of(span));
        }
      }
      wait_for_previous_kernel();
      uint64_t const once = read_once(), often = read_often();
      int stage = 0, phase = 1;
      for (int tile = cluster; tile < tiles; tile += clusters) {
        for (int block = first; block < last; ++block) {
          empty(stage)->wait(phase);
          full(stage)->arrive_and_expect_tx(shape.stage_bytes);
          uint32_t const to = cast_smem_ptr_to_uint(stages + stage * shape.stage_bytes);
          for (int s = 0; s < kSpans; s += shape.box_spans) {
            int const span = block * kSpans + s, byte = byte_of(span), z = span_of(span);
            load_box(map_b, to + s * span_b, header.full[stage], byte, tile * shape.rows, z, once);
            load_box(map_a, to + offset_a + s * kTokens * kSpan, header.full[stage], byte, 0, z, often);
          }
          if (++stage == shape.stages) stage = 0, phase ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    if (split > 1) cluster_wait();  // no CTA of a cluster may write to another before that one runs
    wait_for_previous_kernel();
    auto mma = make_tiled_mma(Atom{});
    auto const thread_mma = mma.get_slice(threadIdx.x);
    constexpr int kMmas = kSpans / kFold;  // of a stage (for each 32 bytes of k)
    decltype(partition_fragment_C(mma, cute::Shape<Int<kMmaRows>, Int<kColumns>>{})) even[kMmas], odd[kMmas];
    Tensor sum = make_tensor<Sum>(Int<kSums>{});
    // Of the sums of wgmma a thread holds, for every 8 columns, 2 neighbours in 2 rows that lie 8 apart.
    int const own_warp = warp + kConsumers / 32, own_row = own_warp * 16 + lane / 4, own_column = lane % 4 * 2;
    auto const token_of = [&](int i) { return i / 4 * 8 + (own_column + i % 2) % kTokens; };
    auto const row_of = [&](int i) { return own_row + i / 2 % 2 * 8; };
    // The span of a folded MMA that the i-th sum on the diagonal is of, in a warp.
    auto const span_in_mma = [](int of_warp, int i) { return (of_warp * 16 + i / 2 % 2 * 8) / kRows; };
    // A thread's sums are d's where no others are to be added. Where there are, CTA r of the cluster finishes the r-th
    // part of the tile's rows, and a thread the same row for all of its tokens.
    constexpr int kOwnTokens = std::max(2, kTokens / 4);
    bool const whole = !kFolded && split == 1;
    int const part_bits = __ffs(kRows) - 1 - split_bits, part_rows = 1 << part_bits;
    int const part_row = threadIdx.x & part_rows - 1, part_token = threadIdx.x >> part_bits;

    int stage = 0, phase = 0, sums_phase = 0;
    for (int tile = cluster; tile < tiles; tile += clusters) {
      int const row0 = tile * shape.rows, end = min(call.n, row0 + shape.rows);
      // The epilogue's operands are wanted when the last sum is there, and not a trip to L2 later.
      typename Formula::Row rows[kOwnTokens];
      typename Formula::Column columns[2];
      if (whole) {
        CUTE_UNROLL
        for (int i = 0; i < kOwnTokens; ++i) {
          rows[i] = Formula::row(call, min(token_of(i / 2 * 4 + i % 2), call.m - 1));
        }
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) columns[i] = Formula::column(call, min(row0 + row_of(i * 2), call.n - 1));
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kOwnTokens; ++i) {
          rows[i] = Formula::row(call, min(part_token + i * (kConsumers >> part_bits), call.m - 1));
        }
        columns[0] = Formula::column(call, min(row0 + rank * part_rows + part_row, call.n - 1));
      }

      clear(sum);
      auto const start = [&](auto& part) {
        full(stage)->wait(phase);
        uint8_t* const at = stages + stage * shape.stage_bytes;
        for_each(make_seq<kMmas>{}, [&](auto s) { warpgroup_fence_operand(part[s]); });
        warpgroup_arrive();
        // An MMA so narrow takes longer than its turn, so neighbours in the queue are of different sums.
        for_each(make_seq<kSpan / 32>{}, [&](auto k) {
          mma.accumulate_ = k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
          for_each(make_seq<kMmas>{}, [&](auto s) {
            Tensor const b = make_tensor(make_smem_ptr(reinterpret_cast<ElementB*>(at + s * span_b)), LayoutB{});
            Tensor const a =
                make_tensor(make_smem_ptr(reinterpret_cast<ElementA*>(at + offset_a + s * kTokens * kSpan)), LayoutA{});
            Tensor const fragments_b = thread_mma.make_fragment_A(thread_mma.partition_A(b));  // the weight is MMA's A
            Tensor const fragments_a = thread_mma.make_fragment_B(thread_mma.partition_B(a));
            gemm(mma, fragments_b(_, _, k), fragments_a(_, _, k), part[s]);
          });
        });
        warpgroup_commit_batch();
        int const read = stage;
        if (++stage == shape.stages) stage = 0, phase ^= 1;
        return read;
      };
      // Adds a stage's sums, once only `behind` later stages' MMAs run.
      auto const finish = [&](auto behind, int read, auto& part) {
        auto const wait_and_release = [&] {
          warpgroup_wait<decltype(behind)::value>();
          if (lane == 0) empty(read)->arrive();
        };
        auto const part_of = [&](auto s, int i) {
          if constexpr (kFolded && !kNarrow) {
            Sum x = {};
            CUTE_UNROLL
            for (int w = 0; w < kConsumers / 32; ++w) {
              if (own_warp == w) x = part[s](span_in_mma(w, i) * (kTokens / 2) + i);
            }
            return x;
          } else {
            return part[s](i);
          }
        };
        if constexpr (kBlocks) {
          constexpr int kHalves = kRows < 16 ? 2 : 1;  // where a warp's halves are of different spans
          constexpr int kEights = kSums / 4;
          float2 a[kMmas][kHalves][kEights];
          float b[kMmas][2];
          CUTE_UNROLL
          for (int s = 0; s < kMmas; ++s) {
            auto const scales = [&](int i) -> auto& {
              return header.scales[read][kFolded ? span_in_mma(own_warp, i) : s];
            };
            CUTE_UNROLL
            for (int i = 0; i < kHalves * kEights; ++i) {
              int const half = i % kHalves, eight = i / kHalves;
              float const* const two = &scales(half * 2).a[token_of(eight * 4)];
              a[s][half][eight] = kTokens == 1 ? float2{*two, *two} : *reinterpret_cast<const float2*>(two);
            }
            CUTE_UNROLL
            for (int i = 0; i < 2; ++i) b[s][i] = scales(i * 2).b[row_of(i * 2) % kRows];
          }
          __syncwarp();
          wait_and_release();
          for_each(make_seq<kMmas>{}, [&](auto s) {
            warpgroup_fence_operand(part[s]);
            CUTE_UNROLL
            for (int i = 0; i < size(sum); ++i) {
              float2 const two = a[s][i / 2 % kHalves][i / 4];
              sum(i) = __fmaf_rn(part_of(s, i), (i % 2 ? two.y : two.x) * b[s][i / 2 % 2], sum(i));
            }
            warpgroup_fence_operand(sum);  // or they would be put off until `part` has other sums
          });
        } else {
          wait_and_release();
          for_each(make_seq<kMmas>{}, [&](auto s) {
            warpgroup_fence_operand(part[s]);
            CUTE_UNROLL
            for (int i = 0; i < size(sum); ++i) sum(i) += part_of(s, i);
          });
        }
      };
      // The next stage's MMAs run while sums of the one before are added (there are three or more, see launch()).
      if (first < last) {
        int one = start(even), block = first + 1;
        for (; block + 1 < last; block += 2) {
          int const other = start(odd);
          finish(Int<1>{}, one, even);
          one = start(even);
          finish(Int<1>{}, other, odd);
        }
        if (block < last) {
          int const other = start(odd);
          finish(Int<1>{}, one, even);
          finish(Int<0>{}, other, odd);
        } else {
          finish(Int<0>{}, one, even);
        }
      }

      // Code is waited for where it is executed once, and that which loads an element's operand is long.
      bool const has_elements = !std::is_empty_v<typename Formula::Element> && call.residual.data;
      if (whole) {
        float values[size(sum)];
        auto const finish_all = [&](auto element) {
          CUTE_UNROLL
          for (int i = 0; i < size(sum); ++i) {
            values[i] = Formula::apply(sum(i), rows[i / 4 * 2 + i % 2], columns[i / 2 % 2],
                                       element(min(token_of(i), call.m - 1), min(row0 + row_of(i), call.n - 1)));
          }
        };
        if (has_elements) {
          finish_all([&](int m, int n) { return Formula::element(call, m, n); });
        } else {
          finish_all([](int, int) { return typename Formula::Element{}; });
        }
        with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
          CUTE_UNROLL
          for (int i = 0; i < size(sum); ++i) {
            int const m = token_of(i), n = row0 + row_of(i);
            if (m < call.m && n < end) store(d + m * call.d_stride[0] + n * call.d_stride[1], values[i]);
          }
        });
      } else {
        if (tile != cluster) wait_cluster(header.sums_free, sums_phase ^ 1);  // those of the tile before are read
        CUTE_UNROLL
        for (int i = 0; i < size(sum); ++i) {
          int const span = span_in_mma(own_warp, i);
          if constexpr (kNarrow) {  // of what a thread has little is on the diagonal
            if ((own_column + i % 2) / kTokens != span) continue;
          }
          int const row = row_of(i) % kRows, part = (row >> part_bits) * kFold + span;
          header.own[(part * kTokens + token_of(i) << part_bits) + (row & part_rows - 1)] = sum(i);
        }
        if (split > 1) cutlass::arch::fence_view_async_shared();
        cutlass::arch::NamedBarrier::sync(kConsumers, 0);
        if (split > 1) {
          for (int to = own_warp; to < split; to += kConsumers / 32) {
            if (to == rank || lane > 0) continue;
            copy_to_remote(remote_address(&header.sums[rank * sums_of_part], to),
                           remote_address(&header.sums_ready, to), &header.own[to * sums_of_part],
                           sums_of_part * int(sizeof(Sum)));
          }
          wait_cluster(header.sums_ready, sums_phase);
        }
        Sum totals[kOwnTokens] = {};
        CUTE_UNROLL
        for (int i = 0; i < kOwnTokens; ++i) {
          int const m = part_token + i * (kConsumers >> part_bits);
          if (m < call.m) {
#pragma unroll kFolded ? 1 : 2
            for (int s = 0; s < split; ++s) {
              auto const* const of_cta = (s == rank ? header.own : header.sums) + s * sums_of_part;
              CUTE_UNROLL
              for (int f = 0; f < kFold; ++f) totals[i] += of_cta[(f * kTokens + m << part_bits) + part_row];
            }
          }
        }
        // An arrival waits for the stores before it, so d's come later. None may be on its way to a CTA that has left.
        if (tile + clusters < tiles) {
          if (split > 1 && threadIdx.x == 0) sums_ready.arrive_and_expect_tx(sum_bytes());
          __syncwarp();
          if (lane < split) arrive_at(header.sums_free, lane);
        } else if (split > 1) {
          __syncwarp();
          cluster_arrive_relaxed();
        }
        int const n = row0 + (rank << part_bits) + part_row;
        CUTE_UNROLL
        for (int i = 0; i < kOwnTokens; ++i) {
          int const m = part_token + i * (kConsumers >> part_bits);
          if (m < call.m && n < end) {
            typename Formula::Element element = {};
            if (has_elements) element = Formula::element(call, m, n);
            store_from_float(call.d, call.d_dtype, m * call.d_stride[0] + n * call.d_stride[1],
                             Formula::apply(totals[i], rows[i], columns[0], element));
          }
        }
        sums_phase ^= 1;
      }
    }
  }
  if (split > 1) {  // nor may it leave while another reads its sums
    if (warp >= 0) {
      cluster_wait();
      cluster_arrive_relaxed();
    }
    cluster_wait();
  }
}

template <class ElementA, class ElementB, int kTokens, int kRows, bool kBlocks, class Formula>
struct Decode {
  static_assert(sizeof(ElementA) == sizeof(ElementB) && decode::kMmaRows % kRows == 0 && kRows % 8 == 0);
  static constexpr int kWidth = sizeof(ElementB);
  static constexpr auto* kKernel = &decode_kernel<ElementA, ElementB, kTokens, kRows, kBlocks, Formula>;

  static int32_t prepare() {
    int32_t const status = load_kernel(kKernel, decode::kSharedBytes);
    if (status == 0) clusters_at_once(1);
    return status;
  }
  static int64_t workspace(const cutegemm_call&) { return 0; }

  // How many clusters run at the same time: fewer than the multiprocessors would hold, since none leaves its group of
  // 16 or 18. Asked once, of the first device; on one that differs the count is not the best, and still right.
  static int clusters_at_once(int split) {
    static std::array<int, 9> const counts = [] {
      std::array<int, 9> found = {};
      for (int size : {1, 2, 4, 8}) {
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {unsigned(size), 1, 1};
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(size);
        config.blockDim = dim3(decode::kThreads<kBlocks>);
        config.dynamicSmemBytes = decode::kSharedBytes;
        config.attrs = &cluster;
        config.numAttrs = 1;
        if (cudaOccupancyMaxActiveClusters(&found[size], kKernel, &config) != cudaSuccess) cudaGetLastError();
        found[size] = std::max(1, found[size]);
      }
      return found;
    }();
    return counts[split];
  }

  static int32_t launch(const cutegemm_call& call) {
    using namespace decode;
    if (call.a_dtype != dtype_of<ElementA>() || call.b_dtype != dtype_of<ElementB>()) return kWrongTypes;
    if (kBlocks && !(is_scale(call.scale_a, 1) && (is_scale(call.scale_b, 1) || is_scale(call.scale_b, 128)))) {
      return kWrongTypes;
    }
    if (call.m < 1 || call.m > kTokens || call.n < 1 || call.k < 1) return kWrongSize;
    if (call.a_stride[1] != 1 || call.b_stride[0] != 1) return kWrongLayout;
    if (reinterpret_cast<uintptr_t>(call.a) % 16 || reinterpret_cast<uintptr_t>(call.b) % 16 ||
        call.a_stride[0] * kWidth % 16 || call.b_stride[1] * kWidth % 16) {
      return kMisaligned;
    }
    cutegemm_call own = call;
    if (own.options.split == 0) own.options.split = 1;
    int const split = own.options.split, rows = own.options.rows ? own.options.rows : kRows;
    if ((split != 1 && split != 2 && split != 4 && split != 8) || rows < 8 || rows > kRows || rows % 8 != 0) {
      return kWrongOptions;
    }
    if (kRows < kMmaRows && (split > 1 || rows < kRows)) return kWrongOptions;
    constexpr int kSpans = decode::kSpans<kRows>;
    decode::Shape shape = {};
    shape.rows = rows;
    shape.header_bytes = (int(sizeof(Header<kTokens, kRows, Accumulator<ElementB>, kBlocks>)) + 1023) / 1024 * 1024;
    shape.stage_bytes = kSpans * kSpan * (rows + kTokens);
    // wgmma reads 64 rows also of the last stage's last span: whatever lies behind it, but inside shared memory.
    int const slack = 1024 + (kRows - rows) * kSpan;
    int const clusters = std::min(ceil_div(call.n, rows), clusters_at_once(split));
    int64_t const k_bytes = int64_t(call.k) * kWidth;
    shape.tiles = ceil_div(call.n, rows);
    shape.blocks = int(ceil_div(k_bytes, int64_t(kSpans * kSpan)));
    shape.part = ceil_div(shape.blocks, split);
    int64_t const all = int64_t(ceil_div(shape.tiles, clusters)) * shape.part;
    int const wanted = 2 + kBytesInFlight / (clusters * split * kSpans * kSpan * rows);
    int const rest = shape.header_bytes + slack, most = (kSharedBytes - rest) / shape.stage_bytes;
    shape.stages = std::min({kMaxStages, most, wanted, int(std::clamp<int64_t>(all, kScaleWarps, kMaxStages))});
    // Where a call has a CTA on every multiprocessor, and shared memory has room for two, the next call's start is over
    // when this one ends. Where it leaves some free, two of the next one's would meet on those.
    int const of_half = (kHalfShared - rest) / shape.stage_bytes;
    bool const half = clusters * split == call.sm_count && of_half >= std::max(kScaleWarps, shape.stages - 1);
    if (half) shape.stages = std::min(shape.stages, of_half);
    int const shared_bytes = half ? rest + shape.stages * shape.stage_bytes : kSharedBytes;
    shape.box_spans = k_bytes % kSpan == 0 ? kSpans : 1;
    CUtensorMap map_a, map_b;
    if (!encode_spans(map_a, call.a, call.m, k_bytes, call.a_stride[0] * kWidth, kTokens, shape.box_spans,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B) ||
        !encode_spans(map_b, call.b, call.n, k_bytes, call.b_stride[1] * kWidth, rows, shape.box_spans,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B)) {
      return kNotImplementable;
    }
    return launch_cluster(call, kKernel, dim3(clusters * split), split, dim3(kThreads<kBlocks>), shared_bytes, own,
                          shape, map_a, map_b);
  }
};

}  // namespace cutegemm
