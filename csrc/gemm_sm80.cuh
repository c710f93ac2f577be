// The GEMM with a weight of four or eight bits for sm_80 and above: d = Formula(x @ w^T), with x of 16 bits.
//
// A value of the weight is exact in BF16 and FP16 without its scale, and with it is not. So MMAs multiply unscaled
// values, and scales go to their FP32 sums, group by group. The weight is the MMA's 16 x 16 side, and tokens its side
// of 8, so that a tile may have few of them:
//  - W4Weight is packed so that a lane's 64 columns of a strip of 16 rows are 16 bytes, and pairs of codes already
//  stand
//    in the halves of registers. Of a raw weight of eight bits a lane takes 16 neighbours of a row. That is another
//    order along k than the MMA's, and x is read in the same one.
//  - A CTA's warps are teams. Each team takes its own blocks of 128 k of the tile, through a ring of cp.async stages
//    that no other team waits for. What a lane needs of the weight it copies itself; only x is shared, within a team.
//    For few tokens a team is a warp, and x stays in registers for all the strips. The teams' sums are added in the
//    end.
//  - Tiles may have fewer rows than kRows, so that there is one for every multiprocessor. Where that is not enough,
//    options.split CTAs take parts of k, and a second kernel adds their sums, in order.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernel_file.cuh"
#include "scale_rows.cuh"
#include "vector.cuh"

namespace cutegemm {

// What a weight has: codes in the layout of packing.py's W4Weight, or values in rows along k.
struct Int4 {};
struct E4m3 {};
struct Int8 {};

namespace sm80 {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStrip = 16;   // rows of the weight in an MMA
constexpr int kBlock = 128;  // k of a stage
constexpr int kLoad = 64;    // k of a lane's 16 bytes of codes, or of four lanes' of values
constexpr int kMaxStages = 8;
constexpr int kXRow = kBlock * 2, kChunk = 16;  // bytes of a token in a stage, and of a copy
constexpr int kSlot = kStrip * 4;               // bytes of a strip's scales of a group, at most: FP32
constexpr int kBytesInFlight = 48 << 10;        // of the weight, of a CTA
constexpr int kSumThreads = 128;

// A tile of kRows of the weight and kTokens of x, as the emitted Variant declares it: see variants.py's Sm80.
template <class Variant>
struct Tile : Variant {
  using Variant::kRows, Variant::kTokens, Variant::kStep, Variant::kMinimum;
  static constexpr bool kInt4 = std::is_same_v<typename Variant::Weight, Int4>;
  static constexpr bool kBf16 = std::is_same_v<typename Variant::Element, __nv_bfloat16>;
  // A warp has kStrips x kWide MMAs.
  static constexpr int kTokenWarps = kTokens > 64 ? 2 : 1, kWide = kTokens / 8 / kTokenWarps;
  static constexpr int kRowWarps = kWide > 4 ? kRows / 32 : kWide > 2 ? 2 : kRows / 64;
  static constexpr int kStrips = kRows / kStrip / kRowWarps;
  static constexpr int kTeamWarps = kRowWarps * kTokenWarps, kTeamThreads = 32 * kTeamWarps;
  static constexpr int kTeams = kWarps / kTeamWarps;                   // at most
  static constexpr bool kOpenRows = kWide <= 4;                        // whether a tile may have fewer than kRows
  static constexpr int kPiece = kWide <= 4 ? kStep : kInt4 ? 16 : 32;  // k that x is in registers for
  static constexpr int kChains = kWide == 1 ? 2 : 1;                   // independent sums for each of d
  static constexpr int kSteps = kBlock / kStep;
  static constexpr int kResident = kWide <= 2 ? 2 : 1;  // CTAs of a multiprocessor
  static constexpr int kX = kTokens * kXRow;
  static constexpr int kStripBytes = kStrip * kBlock / (kInt4 ? 2 : 1);
  static constexpr int kCopies = kStripBytes / (32 * kChunk);  // of a lane, of a strip
  static constexpr int kScaleBytes = kInt4 ? kSteps * kSlot : 0;
  static constexpr int kPitch = kRows + 4;  // of sums in shared memory, free of bank conflicts
  static constexpr int kSums = kTokens * kPitch;
  // Two stages of so many teams fit every device from sm_80 on.
  static constexpr int kLeastTeams = std::max(1, kRows / kTeamThreads);
  static_assert(2 * kLeastTeams * (kX + kRows / kStrip * (kStripBytes + 2 * kScaleBytes)) <= 99 * 1024);
  static_assert(kRows == 64 || kRows == 128);
  static_assert(kTokens == 8 || (kTokens % 16 == 0 && kTokens <= 64) || kTokens == 96 || kTokens == 128);
  static_assert(kInt4 ? kStep == 32 || kStep == 64 || kStep == 128 : kStep == 128 && !kMinimum);
};

// What the host decides.
struct Shape {
  int32_t strips, all_strips;  // of a tile, and of the weight as it is packed
  int32_t row_tiles, token_tiles;
  int32_t band;                 // that many token tiles are walked together along the weight
  int32_t split, blocks, part;  // k: its parts, and blocks of it all and of a part
  int32_t teams, stages, stage_bytes;
  int32_t group_shift;  // log2 of the columns of a group, or 31
  int32_t by_chunks;    // whether a weight in rows may be read by 16 bytes
  int32_t groups;       // of a row
  int64_t pitch;        // of a token's sums in the workspace
};

// Memory

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, of which those past `bytes` are not read and become 0.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Until all but the last `pending` groups are there.
__device__ __forceinline__ void wait_for_copies(int pending) {
  switch (pending) {
    case 0:
      return wait_for_copies<0>();
    case 1:
      return wait_for_copies<1>();
    case 2:
      return wait_for_copies<2>();
    case 3:
      return wait_for_copies<3>();
    case 4:
      return wait_for_copies<4>();
    case 5:
      return wait_for_copies<5>();
    default:
      return wait_for_copies<kMaxStages - 2>();
  }
}

__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t from, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from));
}

// Of the chunk of eight k in a stage's x. Neither eight tokens' one chunk nor two tokens' four meet in a bank.
__device__ __forceinline__ int x_offset(int token, int chunk) { return token * kXRow + (chunk ^ token % 8) * kChunk; }

// Arithmetic

template <bool kBf16>
__device__ __forceinline__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (kBf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}
// (x & mask) | bits
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// first: c is 0 so far, and not read.
template <bool kBf16>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             bool first) {
  const float before[] = {first ? 0.f : c[0], first ? 0.f : c[1], first ? 0.f : c[2], first ? 0.f : c[3]};
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(before[0]), "f"(before[1]),
          "f"(before[2]), "f"(before[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(before[0]), "f"(before[1]),
          "f"(before[2]), "f"(before[3]));
  }
}

// A lane's 16 x 16 of the weight, of rows lane / 4 and lane / 4 + 8, as the MMA's operand.
template <class Weight, bool kBf16>
struct Values;

template <bool kBf16>
struct Values<Int4, kBf16> {
  // Codes are the last bits of 128 in BF16 and of 1024 in FP16. There the upper row's are the next four bits, of 64.
  static constexpr uint32_t kMagic = kBf16 ? 0x43004300 : 0x64006400;
  static constexpr uint32_t kOne = kBf16 ? 0x3f803f80 : 0x3c003c00, kSixteenth = 0x2c002c00;

  // Less the magic number and a zero.
  static __device__ __forceinline__ void offsets(uint32_t (&offset)[2], int zero, int upper_zero) {
    offset[0] = (kBf16 ? 0xc300c300u : 0xe400e400u) + zero * 0x00010001u;
    offset[1] = kBf16 ? 0xc300c300u + upper_zero * 0x00010001u : 0xd400d400u + upper_zero * 0x00100010u;
  }
  static __device__ __forceinline__ void make(uint32_t (&a)[4], uint32_t codes, const uint32_t (&offset)[2]) {
    constexpr uint32_t kMask = 0x000f000f;
    if constexpr (kBf16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = fma_pairs<true>(masked_or(codes >> 4 * i, kMask, kMagic), kOne, offset[i % 2]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i += 2, codes >>= 8) {
        a[i] = fma_pairs<false>(masked_or(codes, kMask, kMagic), kOne, offset[0]);
        a[i + 1] = fma_pairs<false>(masked_or(codes, kMask << 4, kMagic), kSixteenth, offset[1]);
      }
    }
  }
};

// Of values: four neighbours of a row, as two pairs.
//
// Bits of E4M3, moved to where the other type has its exponent, are the value times a power of two, also if it is
// subnormal. The two NaNs become 480, with their sign.
template <bool kBf16>
struct Values<E4m3, kBf16> {
  static constexpr float kScale = kBf16 ? 1.f : 256.f;  // FP16 leaves the power to the sums

  static __device__ __forceinline__ void make(uint32_t& a, uint32_t& b, uint32_t four) {
    a = pair(__byte_perm(four, 0, 0x1404)), b = pair(__byte_perm(four, 0, 0x3424));
  }
  static __device__ __forceinline__ uint32_t pair(uint32_t upper_bytes) {
    constexpr uint32_t kSign = 0x80008000, kPower = 0x7b807b80;  // -0 and 2^120
    if constexpr (kBf16) {
      return fma_pairs<true>(masked_or(upper_bytes, kSign, upper_bytes >> 4 & 0x07f007f0), kPower, kSign);
    } else {
      return masked_or(upper_bytes, kSign, upper_bytes >> 1 & 0x3f803f80);
    }
  }
};

template <bool kBf16>
struct Values<Int8, kBf16> {
  static constexpr float kScale = 1.f;

  static __device__ __forceinline__ void make(uint32_t& a, uint32_t& b, uint32_t four) {
    if constexpr (!kBf16) four ^= 0x80808080;  // x + 128
    a = pair(__byte_perm(four, kMagic, 0x4140)), b = pair(__byte_perm(four, kMagic, 0x4342));
  }
  static __device__ __forceinline__ uint32_t pair(uint32_t lower_bytes) {
    if constexpr (kBf16) {  // seven bits after 128, less 128, and once more if the sign is set
      constexpr uint32_t k128 = 0x43004300, kMinusOne = 0xbf80bf80;
      return fma_pairs<true>(masked_or(lower_bytes, 0x00800080, k128), kMinusOne,
                             masked_or(lower_bytes, 0x007f007f, k128));
    } else {
      constexpr uint32_t kOne = 0x3c003c00, kMinus1152 = 0xe480e480;
      return fma_pairs<false>(lower_bytes, kOne, kMinus1152);
    }
  }

 private:
  static constexpr uint32_t kMagic = kBf16 ? 0 : 0x64646464;  // the upper bytes: 1024 in FP16
};

}  // namespace sm80

template <class Variant>
__global__ void __launch_bounds__(sm80::kThreads, sm80::Tile<Variant>::kResident)
    sm80_kernel(const __grid_constant__ cutegemm_call call, const __grid_constant__ sm80::Shape shape) {
  using namespace sm80;
  using T = Tile<Variant>;
  using Formula = typename Variant::Formula;
  using Values = sm80::Values<typename Variant::Weight, T::kBf16>;
  constexpr int kWide = T::kWide, kTokens = T::kTokens;

  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
  const int team = warp / T::kTeamWarps, member = int(threadIdx.x) % T::kTeamThreads;
  const int row_warp = warp % T::kRowWarps, token_warp = warp % T::kTeamWarps / T::kRowWarps;
  const int line = lane / 4, place = lane % 4;  // of the lane in an MMA

  const int in_band = shape.band * shape.row_tiles, band0 = int(blockIdx.x) / in_band * shape.band;
  const int band = min(shape.band, shape.token_tiles - band0), tile = int(blockIdx.x) % in_band;
  const int token0 = (band0 + tile % band) * kTokens, strip0 = tile / band * shape.strips;
  const int tokens = call.m - token0;  // from here on, perhaps more than this tile has
  const int first = int(blockIdx.y) * shape.part, last = min(shape.blocks, first + shape.part);

  // A warp has every kRowWarps-th strip. In tiles that are always whole those past the weight are its last once more.
  const int strips = min(shape.strips, shape.all_strips - strip0);
  const auto strip_of = [&](int s) { return s * T::kRowWarps + row_warp; };
  const auto has_strip = [&](int s) { return !T::kOpenRows || strip_of(s) < strips; };

  // Where a lane's copies of a strip come from, and how many of the 16 bytes there are.
  const int loads = (call.k - 1) / kLoad + 1;
  const auto source = [&](int strip, int block, int copy, int lane) {
    const uint8_t* const weight = static_cast<const uint8_t*>(call.b);
    strip = strip0 + (T::kOpenRows ? strip : min(strip, strips - 1));
    if constexpr (T::kInt4) {
      const int load = strip * loads + block * (kBlock / kLoad);
      return weight + int64_t(load) * (32 * kChunk) + copy * (32 * kChunk) + lane * kChunk;
    } else {
      const int row = min(strip * kStrip + copy % 2 * 8 + lane / 4, call.n - 1);
      return weight + row * call.b_stride[1] + block * kBlock + copy / 2 * kLoad + lane % 4 * kChunk;
    }
  };
  const auto bytes_of = [&](int block, int copy, int lane) {
    if constexpr (T::kInt4) return block * (kBlock / kLoad) + copy < loads ? kChunk : 0;
    return max(0, min(kChunk, call.k - block * kBlock - copy / 2 * kLoad - lane % 4 * kChunk));
  };

  launch_next_kernel();
  if (!call.options.no_chain && call.options.prefetch > 0) {
    const int of_block = strips * T::kCopies * 32;  // copies, of which so many are of one line of a cache:
    constexpr int kOfLine = T::kInt4 ? 8 : 4;
    const int ahead = min(call.options.prefetch * 1024 / (of_block * kChunk), last - first);
    for (int i = int(threadIdx.x) * kOfLine; i < of_block * ahead; i += int(blockDim.x) * kOfLine) {
      const int copy = i % of_block / 32;
      const int block = first + i / of_block;
      if (bytes_of(block, copy % T::kCopies, i % 32) > 0) {
        prefetch_line(source(copy / T::kCopies, block, copy % T::kCopies, i % 32));
      }
    }
  }
  wait_for_previous_kernel();

  // A stage has x, the strips of the weight, and, of codes, each strip's scales and perhaps zeros for every step.
  const int ring = team * shape.stages * shape.stage_bytes;
  const int scales_at = T::kX + shape.strips * T::kStripBytes, zeros_at = scales_at + shape.strips * T::kScaleBytes;
  const uint32_t base = shared_address(shared);
  const bool has_zeros = T::kInt4 && call.groups.zeros, fp32 = call.groups.dtype == CUTEGEMM_FP32;

  constexpr int kChunks = kXRow / kChunk, kTokensAtOnce = T::kTeamThreads / kChunks;
  const int x_token = member / kChunks, x_chunk = member % kChunks;
  const uint8_t* const x_from =
      static_cast<const uint8_t*>(call.a) + ((token0 + x_token) * call.a_stride[0] + x_chunk * 8) * 2;
  const int64_t x_step = kTokensAtOnce * call.a_stride[0] * 2;
  const int x_to = x_offset(x_token, x_chunk);
  const int width = fp32 ? 2 : 1;  // log2 of a scale's bytes, and of the chunks of a strip's scales of a group
  const auto start_copies = [&](int stage, int block) {
    const uint32_t to = base + stage;
    const int left = call.k - block * kBlock, x_left = left - x_chunk * 8;
    const auto copy_x = [&](int bytes) {
      const uint8_t* from = x_from + int64_t(block) * kXRow;
#pragma unroll
      for (int i = 0; i < kTokens; i += kTokensAtOnce, from += x_step) {
        copy_chunk((to + x_to ^ i % 8 * kChunk) + i * kXRow, from, i < tokens - x_token ? bytes : 0);
      }
    };
    if (x_left > 0 && x_left < 8) {  // apart, since it takes several instructions more
      copy_x(x_left * 2);
    } else {
      copy_x(x_left > 0 ? kChunk : 0);
    }
    const auto for_each_copy = [&](auto&& f) {
#pragma unroll
      for (int s = 0; s < T::kStrips; ++s) {
        if (!has_strip(s)) break;
#pragma unroll
        for (int copy = 0; copy < T::kCopies; ++copy) {
          // Warps that have the same strip for other tokens share its copies.
          if (T::kTokenWarps > 1 && copy * T::kTokenWarps / T::kCopies != token_warp) continue;
          f(T::kX + strip_of(s) * T::kStripBytes + (copy * 32 + lane) * kChunk, source(strip_of(s), block, copy, lane),
            bytes_of(block, copy, lane));
        }
      }
    };
    if (T::kInt4 || (shape.by_chunks && left < kBlock)) {
      for_each_copy([&](int at, const uint8_t* from, int bytes) { copy_chunk(to + at, from, bytes); });
    } else if (shape.by_chunks) {
      for_each_copy([&](int at, const uint8_t* from, int) { copy_chunk(to + at, from, kChunk); });
    } else {
      for_each_copy([&](int at, const uint8_t* from, int bytes) {
#pragma unroll 1
        for (int i = 0; i < kChunk; ++i) shared[stage + at + i] = i < bytes ? from[i] : 0;
      });
    }
    if constexpr (T::kInt4) {
#pragma unroll 1
      for (int i = member; i < shape.strips * T::kSteps << width; i += T::kTeamThreads) {
        const int slot = i >> width, chunk = i & (1 << width) - 1;
        const int k = block * kBlock + slot % T::kSteps * T::kStep;
        const int strip = strip0 + min(slot / T::kSteps, strips - 1),
                  of = strip * shape.groups + (k >> shape.group_shift);
        const int64_t from = ((int64_t(of) << width) + chunk) * kChunk;
        const uint32_t at = to + slot * kSlot + chunk * kChunk;
        const int bytes = k < call.k ? kChunk : 0;
        copy_chunk(at + scales_at, static_cast<const uint8_t*>(call.groups.scales) + from, bytes);
        if (has_zeros) copy_chunk(at + zeros_at, static_cast<const uint8_t*>(call.groups.zeros) + from, bytes);
      }
    }
  };

  // Scales, or zeros, of a lane's two rows: of FP32 the word, of the others its half in which the row's is.
  const int row_at = (line << width) / 4 * 4, next_row_at = row_at + (8 << width);
  const uint32_t half = fp32 ? 0x3210 : line % 2 ? 0x3244 : 0x1044;
  const bool fp16 = call.groups.dtype == CUTEGEMM_FP16;
  const auto read_slot = [&](int at, float (&of_rows)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(shared + at + (i ? next_row_at : row_at));
      const uint32_t bits = __byte_perm(word, 0, half);
      of_rows[i] = fp16 ? __high2float(reinterpret_cast<const __half2&>(bits)) : __uint_as_float(bits);
    }
  };

  // x of kPiece k: of every 16 k and 8 tokens a lane's part of the MMA's operand. All k are at a fixed distance from
  // the lane's own place, but for the swizzle.
  const int x_place =
      token_warp * kWide * 8 * kXRow + (!T::kInt4    ? x_offset(line, 2 * place)
                                        : kWide == 1 ? x_offset(lane % 8, lane / 8)
                                                     : x_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  using X = uint32_t[T::kPiece / 16][kWide][2];
  const auto load_x = [&](int stage, int k, X& x) {
    const auto at = [&](int k) { return (stage + x_place ^ k * 2 % 128) + k * 2 / 128 * 128; };
#pragma unroll
    for (int i = 0; i < T::kPiece / 16; i += T::kInt4 && kWide > 1 ? 1 : 2) {
      if constexpr (!T::kInt4) {
        // A lane's 16 k of 64 are two chunks of x, side by side.
        const int chunk = (k + i * 16) / kLoad * kLoad + (k + i * 16) % kLoad / 32 * 8;
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          const uint4 v = *reinterpret_cast<const uint4*>(shared + at(chunk) + j * 8 * kXRow);
          x[i][j][0] = v.x, x[i][j][1] = v.y, x[i + 1][j][0] = v.z, x[i + 1][j][1] = v.w;
        }
      } else if constexpr (kWide == 1) {
        load_matrices(base + at(k + i * 16), x[i][0][0], x[i][0][1], x[i + 1][0][0], x[i + 1][0][1]);
      } else {
#pragma unroll
        for (int j = 0; j < kWide; j += 2) {
          load_matrices(base + at(k + i * 16) + j * 8 * kXRow, x[i][j][0], x[i][j][1], x[i][j + 1][0], x[i][j + 1][1]);
        }
      }
    }
  };

  float total[T::kStrips][kWide][4] = {};
  const auto multiply = [&](int stage, [[maybe_unused]] float lane_scale) {
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const int k0 = step * T::kStep;
      float part[T::kStrips][T::kChains][kWide][4], x_sums[kWide][4];
      uint32_t offset[T::kStrips][2];
      uint4 words[T::kStrips][T::kCopies / 2];
#pragma unroll
      for (int k = k0; k < k0 + T::kStep; k += T::kPiece) {
        X x;
        load_x(stage, k, x);
        if constexpr (T::kMinimum) {
          constexpr uint32_t kOne = Values::kOne, kOnes[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
          for (int i = 0; i < T::kPiece / 16; ++i) {
#pragma unroll
            for (int j = 0; j < kWide; ++j) multiply_add<T::kBf16>(x_sums[j], kOnes, x[i][j], k + i == k0);
          }
        }
#pragma unroll
        for (int s = 0; s < T::kStrips; ++s) {
          if (!has_strip(s)) break;
          const int slot = (strip_of(s) * T::kSteps + step) * kSlot;
          if constexpr (T::kInt4) {
            if (k == k0) {
              Values::offsets(offset[s], T::kMinimum ? 0 : 8, T::kMinimum ? 0 : 8);
              if (has_zeros && !T::kMinimum) {
                float zeros[2];
                read_slot(stage + zeros_at + slot, zeros);
                Values::offsets(offset[s], int(zeros[0]), int(zeros[1]));
              }
            }
          }
#pragma unroll
          for (int i = 0; i < T::kPiece / 16; ++i) {
            const int at_k = k + i * 16, load = at_k / kLoad, word = at_k % kLoad / 16;
            if (word == 0 || at_k == k0) {
#pragma unroll
              for (int half = 0; half < T::kCopies / 2; ++half) {
                const int copy = load * (T::kCopies / 2) + half;
                words[s][half] = *reinterpret_cast<const uint4*>(shared + stage + T::kX + strip_of(s) * T::kStripBytes +
                                                                 (copy * 32 + lane) * kChunk);
              }
            }
            const auto word_of = [&](const uint4& of) {
              return word == 0 ? of.x : word == 1 ? of.y : word == 2 ? of.z : of.w;
            };
            uint32_t a[4];
            if constexpr (T::kInt4) {
              Values::make(a, word_of(words[s][0]), offset[s]);
            } else {
              Values::make(a[0], a[2], word_of(words[s][0]));
              Values::make(a[1], a[3], word_of(words[s][1]));
            }
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
              multiply_add<T::kBf16>(part[s][i % T::kChains][j], a, x[i][j], k == k0 && i < T::kChains);
            }
          }
          if (k + T::kPiece == k0 + T::kStep) {
            float scale[2], minimum[2];
            if constexpr (T::kInt4) {
              read_slot(stage + scales_at + slot, scale);
              if constexpr (T::kMinimum) read_slot(stage + zeros_at + slot, minimum);
            } else {
              scale[0] = scale[1] = __shfl_sync(~0u, lane_scale, s);
            }
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                float sum = part[s][0][j][e];
                if constexpr (T::kChains > 1) sum += part[s][1][j][e];
                float& of = total[s][j][e];
                of = __fmaf_rn(sum, scale[e / 2], of);
                if constexpr (T::kMinimum) of = __fmaf_rn(x_sums[j][e], minimum[e / 2], of);
              }
            }
          }
        }
      }
    }
  };

  // Of values: a lane holds the scale of its warp's strip of that number, for one block of k ahead.
  const bool block_scales = !T::kInt4 && call.scale_b.group == kBlock;
  const auto scale_of = [&]([[maybe_unused]] int block) {
    if constexpr (T::kInt4) {
      return 0.f;
    } else {
      const int strip = min(strip0 + strip_of(min(lane, T::kStrips - 1)), shape.all_strips - 1);
      const bool has = block_scales && block < last;
      return Values::kScale * (has ? load_scale(call.scale_b, strip * kStrip / kBlock, block) : 1.f);
    }
  };

  int block = first + team, stage = ring, next = ring;
  const int ring_end = ring + shape.stages * shape.stage_bytes;
  const auto after = [&](int stage) {
    stage += shape.stage_bytes;
    return stage == ring_end ? ring : stage;
  };
  const auto start_next = [&](int block) {
    if (block < last) start_copies(next, block);
    commit_copies();
    next = after(next);
  };
  for (int i = 0; i < shape.stages - 1; ++i) start_next(block + i * shape.teams);
  float scale = scale_of(block);
  for (; block < last; block += shape.teams) {
    wait_for_copies(shape.stages - 2);
    if constexpr (T::kTeamWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(T::kTeamThreads) : "memory");
    }
    start_next(block + (shape.stages - 1) * shape.teams);
    const float next_scale = scale_of(block + shape.teams);
    multiply(stage, scale);
    scale = next_scale;
    stage = after(stage);
  }
  wait_for_copies<0>();
  __syncthreads();

  // Sums of teams as [team][token][row], so that neighbouring threads have neighbouring rows, which are columns of d.
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int s = 0; s < T::kStrips; ++s) {
    if (!has_strip(s)) break;
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = (token_warp * kWide + j) * 8 + place * 2 + e % 2,
                  row = strip_of(s) * kStrip + e / 2 * 8 + line;
        sums[team * T::kSums + token * T::kPitch + row] = total[s][j][e];
      }
    }
  }
  __syncthreads();
  const int row = int(threadIdx.x) % T::kRows, n = strip0 * kStrip + row, tokens_at_once = int(blockDim.x) / T::kRows;
  if (row >= shape.strips * kStrip || n >= call.n) return;
  const auto for_each_sum = [&](auto&& f) {
    for (int token = int(threadIdx.x) / T::kRows; token < min(kTokens, tokens); token += tokens_at_once) {
      float sum = 0.f;
      for (int i = 0; i < shape.teams; ++i) sum += sums[i * T::kSums + token * T::kPitch + row];
      f(token0 + token, sum);
    }
  };
  if (shape.split > 1) {
    float* const to = static_cast<float*>(call.workspace) + int64_t(blockIdx.y) * call.m * shape.pitch + n;
    for_each_sum([&](int m, float sum) { to[m * shape.pitch] = sum; });
  } else {
    const typename Formula::Column column = Formula::column(call, n);
    with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
      for_each_sum([&](int m, float sum) {
        sum = Formula::apply(sum, Formula::row(call, m), column, Formula::element(call, m, n));
        store(d + m * call.d_stride[0] + n * call.d_stride[1], sum);
      });
    });
  }
}

// Adds the sums of parts of k, in order. A thread makes four neighbours of a row.
template <class Formula>
__global__ void __launch_bounds__(sm80::kSumThreads)
    sm80_sum(const __grid_constant__ cutegemm_call call, const __grid_constant__ sm80::Shape shape) {
  launch_next_kernel();
  const int64_t i = int64_t(blockIdx.x) * sm80::kSumThreads + threadIdx.x, fours = shape.pitch / 4;
  const int m = int(i / fours), n = int(i % fours) * 4;
  wait_for_previous_kernel();
  if (m >= call.m) return;
  const float4* part = static_cast<const float4*>(call.workspace) + i;
  float sum[4] = {};
#pragma unroll 4
  for (int p = 0; p < shape.split; ++p, part += call.m * fours) {
    const float4 v = *part;
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
  const typename Formula::Row row = Formula::row(call, m);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (n + j >= call.n) return;
    const float y = Formula::apply(sum[j], row, Formula::column(call, n + j), Formula::element(call, m, n + j));
    store_from_float(call.d, call.d_dtype, m * call.d_stride[0] + (n + j) * call.d_stride[1], y);
  }
}

template <class Variant>
struct Sm80 {
  using T = sm80::Tile<Variant>;
  static constexpr auto* kKernel = &sm80_kernel<Variant>;
  static constexpr auto* kSum = &sm80_sum<typename Variant::Formula>;

  static int32_t prepare() {
    const int32_t status = load_kernel(kKernel, attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    return status ? status : load_kernel(kSum);
  }

  static int64_t workspace(const cutegemm_call& call) {
    if (call.m < 1 || call.n < 1 || call.k < 1) return 0;
    const sm80::Shape shape = tiles(call);
    return shape.split > 1 ? int64_t(sizeof(float)) * shape.split * call.m * shape.pitch : 0;
  }

  static int32_t launch(const cutegemm_call& call) {
    using namespace sm80;
    const cutegemm_groups& groups = call.groups;
    if (call.a_dtype != (T::kBf16 ? CUTEGEMM_BF16 : CUTEGEMM_FP16) || call.b_dtype != kWeightType) return kWrongTypes;
    if (!is_float(call.d_dtype) || !is_vector(call.bias)) return kWrongTypes;
    if (call.residual.data && !is_float(call.residual.dtype)) return kWrongTypes;
    if (call.scale_b.group ? !is_scale(call.scale_b, kBlock) : !is_vector(call.scale_b)) return kWrongTypes;
    if (T::kInt4 && !is_float(groups.dtype)) return kWrongTypes;
    if (call.m < 1 || call.n < 1 || call.k < 1) return kWrongSize;
    if (call.output.gated || call.options.split < 0) return kWrongOptions;
    if (call.a_stride[1] != 1 || (!T::kInt4 && call.b_stride[0] != 1)) return kWrongLayout;
    if (!aligned(call.a, call.m > 1 ? call.a_stride[0] * 2 : 0)) return kMisaligned;
    const int rows = call.options.rows;
    if (rows && (rows < kStrip || rows > T::kRows || rows % kStrip != 0 || (!T::kOpenRows && rows != T::kRows))) {
      return kWrongOptions;
    }
    Shape shape = tiles(call);
    const int64_t tiles_of_d = int64_t(shape.row_tiles) * shape.token_tiles, ctas = tiles_of_d * shape.split;
    if (tiles_of_d > INT32_MAX || shape.split > 65535) return kWrongSize;
    if (shape.split > 1 && (!call.workspace || reinterpret_cast<uintptr_t>(call.workspace) % 256 != 0)) {
      return kNoWorkspace;
    }
    if constexpr (T::kInt4) {
      const bool one = groups.size >= call.k;
      if (bool(groups.minimum) != T::kMinimum || groups.size < 1 ||
          (!one && (groups.size % T::kStep != 0 || (groups.size & (groups.size - 1)) != 0))) {
        return kWrongOptions;
      }
      if (T::kMinimum && !groups.zeros) return kWrongTypes;
      if (!aligned(call.b, 0) || !aligned(groups.scales, 0) || !aligned(groups.zeros, 0)) return kMisaligned;
      shape.group_shift = 31;
      for (int shift = 0; !one && shape.group_shift == 31; ++shift) {
        if (1 << shift == groups.size) shape.group_shift = shift;
      }
      shape.groups = (call.k - 1) / groups.size + 1;
    }
    shape.by_chunks = aligned(call.b, call.b_stride[1]);

    // As many stages as k or HBM's latency want, where two CTAs, of this call or of the next, fit a multiprocessor if
    // it can be.
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const int half = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 - 1024;
    const int of_weight = shape.strips * T::kStripBytes;
    shape.stage_bytes = T::kX + of_weight + (groups.zeros ? 2 : 1) * shape.strips * T::kScaleBytes;
    shape.stage_bytes = (shape.stage_bytes + 127) / 128 * 128;
    for (shape.teams = T::kTeams; shape.teams > T::kLeastTeams && shape.teams * shape.stage_bytes * 2 > most;) {
      shape.teams /= 2;
    }
    const int of_stage = shape.teams * shape.stage_bytes, of_team = (shape.part - 1) / shape.teams + 1;
    const int wanted = std::clamp(std::min(of_team + 1, 1 + kBytesInFlight / (shape.teams * of_weight)), 2, kMaxStages);
    const int enough = std::min(wanted, ctas > call.sm_count ? 2 : 3);
    shape.stages = std::min(wanted, (T::kResident > 1 && half / of_stage >= enough ? half : most) / of_stage);
    const int bytes = std::max(shape.stages * of_stage, shape.teams * T::kSums * int(sizeof(float)));

    const dim3 grid(unsigned(tiles_of_d), shape.split), block(shape.teams * T::kTeamThreads);
    const int cluster = attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
    const int32_t status = launch_cluster(call, kKernel, grid, cluster, block, bytes, call, shape);
    if (status || shape.split == 1) return status;
    const int64_t threads = call.m * shape.pitch / 4;
    return launch_cluster(call, kSum, dim3(unsigned((threads - 1) / kSumThreads + 1)), cluster, dim3(kSumThreads), 0,
                          call, shape);
  }

 private:
  static constexpr int32_t kWeightType = T::kInt4                                         ? CUTEGEMM_INT4
                                         : std::is_same_v<typename Variant::Weight, E4m3> ? CUTEGEMM_E4M3
                                                                                          : CUTEGEMM_INT8;

  static bool is_float(int32_t dtype) {
    return dtype == CUTEGEMM_FP32 || dtype == CUTEGEMM_BF16 || dtype == CUTEGEMM_FP16;
  }
  static bool is_vector(const cutegemm_vector& v) { return !v.data || is_float(v.dtype); }
  static bool aligned(const void* data, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
  }
  static int attribute(cudaDeviceAttr of) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, of, device);
    return value;
  }

  // How d and k are cut.
  static sm80::Shape tiles(const cutegemm_call& call) {
    using namespace sm80;
    Shape shape = {};
    shape.all_strips = T::kInt4 ? (call.n - 1) / 64 * 4 + 4 : (call.n - 1) / kStrip + 1;
    shape.token_tiles = (call.m - 1) / T::kTokens + 1;
    shape.band = std::min(shape.token_tiles, call.options.swizzle > 0 ? call.options.swizzle : 1024 / T::kTokens);
    shape.blocks = (call.k - 1) / kBlock + 1;
    shape.pitch = (int64_t(call.n) + 3) / 4 * 4;
    const int strips = (call.n - 1) / kStrip + 1;
    const auto cut = [&](int strips_of_tile, int split) {
      shape.strips = strips_of_tile;
      shape.row_tiles = (strips - 1) / strips_of_tile + 1;
      shape.part = (shape.blocks - 1) / split + 1;
      shape.split = (shape.blocks - 1) / shape.part + 1;
    };
    // By what they cost in ns, roughly, on an H200: a block's bytes or its MMAs, a CTA's start, and the second kernel.
    int best_strips = T::kRows / kStrip, best_split = 1;
    double least = 1e30;
    for (int of_tile = T::kRows / kStrip; of_tile > 0; --of_tile) {
      if (call.options.rows ? of_tile != call.options.rows / kStrip : !T::kOpenRows && of_tile < T::kRows / kStrip) {
        continue;
      }
      for (int split = 1; split <= 8; split *= 2) {
        if (call.options.split ? split > 1 : split > 1 && shape.blocks < split * T::kTeams) continue;
        cut(of_tile, call.options.split ? call.options.split : split);
        const double ctas = double(shape.row_tiles) * shape.token_tiles * shape.split;
        const double waves = std::ceil(ctas / call.sm_count);
        const double bytes = of_tile * T::kStripBytes / 32. + std::min(call.m, T::kTokens) * kXRow / 45.;
        const double cost = waves * shape.part * std::max(bytes, of_tile * T::kTokens * 0.95) +
                            std::ceil(waves / T::kResident) * 1000 +
                            (shape.split > 1 ? 1500 + 8e-3 / 3 * shape.split * call.m * call.n : 0);
        if (cost < least) least = cost, best_strips = of_tile, best_split = shape.split;
      }
    }
    cut(best_strips, best_split);
    return shape;
  }
};

}  // namespace cutegemm
