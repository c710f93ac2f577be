// The GEMM with a weight of four or eight bits for sm_80 and above: d = Formula(x @ w^T), with x of 16 bits.
//
// A value of the weight is exact in BF16 and FP16 without its scale, and with it is not. So MMAs multiply unscaled
// values, and scales go to their FP32 sums, group by group. Or values are rounded to 16 bits (kRounded), as those of a
// weight of 16 bits would be, where scales have x's type: then MMAs add over all of k, and a warp has registers for
// twice as many tokens, so that half as many values are made for each MMA. The weight is the MMA's 16 x 16 side, and
// tokens its side of 8, so that a tile may have few of them:
//  - W4Weight is packed so that a lane's 64 columns of a strip of 16 rows are 16 bytes, and pairs of codes already
//    stand in the halves of registers. Of a raw weight of eight bits a lane takes 16 neighbours of a row. That is
//    another order along k than the MMA's, and x is read in the same one.
//  - A CTA's warps are teams. Each team takes its own blocks of 128 k of the tile, through a ring of cp.async stages
//    that no other team waits for. For few tokens a team is a warp. The teams' sums are added in the end.
//  - A warp has at most 64 rows and 32 tokens: x stays in registers for all of its strips, so that only one strip has
//    unscaled sums. With 32 rows and 64 tokens it would read 1.5 times as many bytes of shared memory, which can bring
//    about as much as the MMAs then take. Of rounded values it has 64 rows and 64 tokens; then a CTA has four warps,
//    and two of them share a multiprocessor, so that one's start and end run beside the other's MMAs (6 % for 64
//    tokens).
//  - Tiles may have fewer rows than kRows, so that there is one for every multiprocessor. Where that is not enough,
//    options.split CTAs take parts of k, and a second kernel adds their sums, in order.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernel_file.cuh"
#include "scale_rows.cuh"
#include "vector.cuh"
#include "weight_values.cuh"

namespace cutegemm {

namespace sm80 {

constexpr int kStrip = 16;   // rows of the weight in an MMA
constexpr int kBlock = 128;  // k of a stage
constexpr int kLoad = 64;    // k of a lane's 16 bytes of codes, or of four lanes' of values
constexpr int kMaxStages = 8;
constexpr int kXRow = kBlock * 2, kChunk = 16;  // bytes of a token in a stage, and of a copy
constexpr int kSlot = kStrip * 4;               // bytes of a strip's scales of a group, at most: FP32
constexpr int kSumThreads = 128;

// A tile of kRows of the weight and kTokens of x, as the emitted Variant declares it: see variants.py's Sm80.
template <class Variant>
struct Tile : Variant {
  using Variant::kRows, Variant::kTokens, Variant::kStep, Variant::kMinimum, Variant::kRounded;
  static constexpr bool kInt4 = std::is_same_v<typename Variant::Weight, Int4>;
  static constexpr bool kBf16 = std::is_same_v<typename Variant::Element, __nv_bfloat16>;
  static constexpr int kWarps = kRounded && kTokens == 64 ? 4 : 8, kThreads = 32 * kWarps;
  // A warp has kStrips x kWide MMAs.
  static constexpr int kTokenWarps = std::max(1, kTokens / (kRounded ? 64 : 32)), kWide = kTokens / 8 / kTokenWarps;
  static constexpr int kRowWarps = std::max(kWide > 2 ? 2 : 1, kRows / 64), kStrips = kRows / kStrip / kRowWarps;
  static constexpr int kTeamWarps = kRowWarps * kTokenWarps, kTeamThreads = 32 * kTeamWarps;
  static constexpr int kTeams = kWarps / kTeamWarps;              // at most
  static constexpr bool kFew = kInt4 && kWide <= 2 && !kRounded;  // a path of its own
  // Strips whose MMAs are side by side there, for what fits 128 registers.
  static constexpr int kTogether = std::max(1, 4 / kWide);
  static constexpr int kChains = kWide == 1 ? 2 : 1;  // independent sums for each of d
  static constexpr int kSteps = kBlock / kStep;
  static constexpr int kBytesInFlight = (kFew ? 64 : 48) << 10;  // of the weight, of a CTA
  static constexpr bool kNans = std::is_same_v<typename Variant::Weight, E4m3>;
  // CTAs of a multiprocessor; NaNs take registers.
  static constexpr int kResident = !kNans && (kRounded || kWide <= 2) ? 2 : 1;
  static constexpr int kX = kTokens * kXRow;
  static constexpr int kStripBytes = kStrip * kBlock / (kInt4 ? 2 : 1);
  static constexpr int kCopies = kStripBytes / (32 * kChunk);  // of a lane, of a strip
  static constexpr int kScaleBytes = kInt4 ? kSteps * kSlot : 0;
  // A stage has of codes the scales of each strip for every step, the strips, perhaps zeros like the scales, and x.
  static constexpr int kStripsAt = kRows / kStrip * kScaleBytes;
  static constexpr int kPitch = kRows + 4;  // of sums in shared memory, free of bank conflicts
  // Two stages of a team fit every device from sm_80 on.
  static_assert(2 * (kX + kRows / kStrip * (kStripBytes + 2 * kScaleBytes)) <= 99 * 1024);
  static_assert(kRows == 64 || kRows == 128 || kRows == 256);
  static_assert(kTokens == 8 || kTokens == 16 || kTokens == 32 || kTokens == 64 || kTokens == 128);
  static_assert(!kRounded || (kInt4 && kWide >= 4 && kTokenWarps == 1));
  static_assert(kInt4 ? kStep == 32 || kStep == 64 || kStep == 128 : kStep == 128 && !kMinimum);
};

// What the host decides.
struct Shape {
  int32_t strips, all_strips;  // of a tile, and of the weight as it is packed
  int32_t row_tiles, token_tiles;
  int32_t band;                 // that many token tiles are walked together along the weight
  int32_t split, blocks, part;  // k: its parts, and blocks of it all and of a part
  int32_t teams, stages, stage_bytes;
  int32_t ahead;           // blocks from the one that a team multiplies to the one that it starts to copy
  int32_t zeros_at, x_at;  // in a stage
  int32_t team_bytes;      // of shared memory, for its stages and in the end for its sums
  int32_t row_shift;       // log2 of the threads along rows in the end
  int32_t group_shift;     // log2 of the columns of a group, or 31
  int32_t by_chunks;       // whether a weight in rows may be read by 16 bytes
  int32_t loads;           // of codes: a row's kLoads
  int64_t strip_bytes;     // of codes: all k of a strip
  int64_t x_bytes;         // from one token to the next
  int32_t groups;          // of a row
  int64_t pitch;           // of a token's sums in the workspace
};

// Attributes of the current device, which are asked for once.
struct Device {
  int block_bytes, multiprocessor_bytes, major;  // shared memory, at most; compute capability
};
inline const Device& current_device() {
  static const std::vector<Device> devices = [] {
    int count = 0;
    cudaGetDeviceCount(&count);
    std::vector<Device> all(std::max(count, 1));
    for (int i = 0; i < count; ++i) {
      cudaDeviceGetAttribute(&all[i].block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, i);
      cudaDeviceGetAttribute(&all[i].multiprocessor_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, i);
      cudaDeviceGetAttribute(&all[i].major, cudaDevAttrComputeCapabilityMajor, i);
    }
    return all;
  }();
  int device = 0;
  cudaGetDevice(&device);
  return devices[device];
}

// Memory

// Made once: volatile, since the compiler would rather make it again in every loop, from a slow special register.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  uint32_t address;
  asm volatile("mov.b32 %0, %1;" : "=r"(address) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))));
  return address;
}
// Read again where that takes fewer registers than what was made of it before.
__device__ __forceinline__ int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
__device__ __forceinline__ uint32_t load_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}
__device__ __forceinline__ uint32_t load_half(uint32_t from) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(from));
  return half;
}
__device__ __forceinline__ uint32_t twice(uint32_t lower) { return __byte_perm(lower, 0, 0x1010); }
__device__ __forceinline__ uint4 load_words(uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from));
  return words;
}

__device__ __forceinline__ uint4 load_two_words(uint32_t from) {
  uint4 words = {};
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from));
  return words;
}

// 16 bytes, of which those past `bytes` are not read and become 0; nothing unless wanted, which takes no branch.
// compute-sanitizer's memcheck takes each for a read of 16 bytes, also at the end of an allocation.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, int bytes, bool wanted = true) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
      "}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(int(wanted))
      : "memory");
}
// All 16 bytes, if wanted.
__device__ __forceinline__ void copy_whole_chunk(uint32_t to, const void* from, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}" ::"r"(to),
      "l"(from), "r"(int(wanted))
      : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Until all but the last `pending` groups, kLow to kHigh, are there. Halving takes three branches; a switch would
// become an indirect one, which takes longer.
template <int kLow = 0, int kHigh = kMaxStages - 1>
__device__ __forceinline__ void wait_for_copies(int pending) {
  if constexpr (kLow == kHigh) {
    wait_for_copies<kLow>();
  } else {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (pending <= kMiddle) {
      wait_for_copies<kLow, kMiddle>(pending);
    } else {
      wait_for_copies<kMiddle + 1, kHigh>(pending);
    }
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

// a * b: compute capability 8 has no product of pairs in BF16 but FMAs.
template <bool kBf16>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  return fma_pairs<kBf16>(a, b, 0x80008000);
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

}  // namespace sm80

template <class Variant>
__global__ void __launch_bounds__(sm80::Tile<Variant>::kThreads, sm80::Tile<Variant>::kResident)
    sm80_kernel(const __grid_constant__ cutegemm_call call, const __grid_constant__ sm80::Shape shape) {
  using namespace sm80;
  using T = Tile<Variant>;
  using Formula = typename Variant::Formula;
  using Values = cutegemm::Values<typename Variant::Weight, T::kBf16>;
  constexpr int kWide = T::kWide, kTokens = T::kTokens;

  launch_next_kernel();
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
  const int team = warp / T::kTeamWarps, member = int(threadIdx.x) % T::kTeamThreads;
  // Of an odd number of strips the first row warp has more. A multiprocessor's quarter runs every fourth warp, so that
  // each gets such warps and others.
  const int token_warp = warp % T::kTokenWarps, turn = T::kTeamWarps <= 4 ? warp / 4 : 0;
  const int row_warp = (warp % T::kTeamWarps / T::kTokenWarps + turn) % T::kRowWarps;
  const int line = lane / 4, place = lane % 4;  // of the lane in an MMA

  // Few tokens: the tiles of the same rows come one after the other, which takes no division.
  int token0, strip0;
  if constexpr (T::kFew) {
    token0 = int(blockIdx.x) * kTokens, strip0 = int(blockIdx.y) * shape.strips;
  } else {
    const int in_band = shape.band * shape.row_tiles, band0 = int(blockIdx.x) / in_band * shape.band;
    const int band = min(shape.band, shape.token_tiles - band0), tile = int(blockIdx.x) % in_band;
    token0 = (band0 + tile % band) * kTokens, strip0 = tile / band * shape.strips;
  }
  const int tokens = call.m - token0;  // from here on, perhaps more than this tile has
  const int first = int(blockIdx.z) * shape.part, last = min(shape.blocks, first + shape.part);

  // A warp has every kRowWarps-th strip.
  const int strips = min(shape.strips, shape.all_strips - strip0);
  const auto strip_of = [&](int s) { return s * T::kRowWarps + row_warp; };
  const auto has_strip = [&](int s) { return strip_of(s) < strips; };

  // Where a lane's copies of a strip come from, and how many of the 16 bytes there are.
  const auto source = [&](int strip, int block, int copy, int lane) {
    const uint8_t* const weight = static_cast<const uint8_t*>(call.b);
    strip += strip0;
    if constexpr (T::kInt4) {
      return weight + ((block * T::kCopies + copy) * 32 + lane) * kChunk + strip * shape.strip_bytes;
    } else {
      const int row = min(strip * kStrip + copy % 2 * 8 + lane / 4, call.n - 1);
      return weight + row * call.b_stride[1] + block * kBlock + copy / 2 * kLoad + lane % 4 * kChunk;
    }
  };
  const auto bytes_of = [&](int block, int copy, int lane) {
    if constexpr (T::kInt4) return block * (kBlock / kLoad) + copy < shape.loads ? kChunk : 0;
    return max(0, min(kChunk, call.k - block * kBlock - copy / 2 * kLoad - lane % 4 * kChunk));
  };

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

  const uint32_t base = shared_address(shared), ring = base + team * shape.team_bytes;
  const uint32_t ring_end = ring + shape.stages * shape.stage_bytes;
  const bool has_zeros = T::kInt4 && call.groups.zeros, fp32 = call.groups.dtype == CUTEGEMM_FP32;

  constexpr int kChunks = kXRow / kChunk, kTokensAtOnce = T::kTeamThreads / kChunks;
  const int x_token = member / kChunks, x_chunk = member % kChunks;
  const uint8_t* const x_from =
      static_cast<const uint8_t*>(call.a) + ((token0 + x_token) * call.a_stride[0] + x_chunk * 8) * 2;
  const int64_t x_step = kTokensAtOnce * call.a_stride[0] * 2;
  const int x_to = shape.x_at + x_offset(x_token, x_chunk);
  // log2 of a scale's bytes, and of the chunks of a strip's scales of a group.
  const int width = !T::kRounded && fp32 ? 2 : 1;
  const auto start_copies = [&](uint32_t to, int block) {
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
#pragma unroll
        for (int i = 0; i < (T::kCopies - 1) / T::kTokenWarps + 1; ++i) {
          // Warps that have the same strip for other tokens share its copies.
          const int copy = i * T::kTokenWarps + token_warp;
          if (T::kTokenWarps > T::kCopies && copy >= T::kCopies) break;
          f(T::kStripsAt + strip_of(s) * T::kStripBytes + (copy * 32 + lane) * kChunk,
            source(strip_of(s), block, copy, lane), bytes_of(block, copy, lane), has_strip(s));
        }
      }
    };
    if (T::kInt4 || (shape.by_chunks && left < kBlock)) {
      for_each_copy(
          [&](int at, const uint8_t* from, int bytes, bool wanted) { copy_chunk(to + at, from, bytes, wanted); });
    } else if (shape.by_chunks) {
      for_each_copy([&](int at, const uint8_t* from, int, bool wanted) { copy_chunk(to + at, from, kChunk, wanted); });
    } else {
      for_each_copy([&](int at, const uint8_t* from, int bytes, bool wanted) {
#pragma unroll 1
        for (int i = 0; wanted && i < kChunk; ++i) shared[to - base + at + i] = i < bytes ? from[i] : 0;
      });
    }
    if constexpr (T::kInt4) {
#pragma unroll 1
      for (int i = member; i < strips * T::kSteps << width; i += T::kTeamThreads) {
        const int slot = i >> width, chunk = i & (1 << width) - 1;
        const int k = block * kBlock + slot % T::kSteps * T::kStep;
        const int of = (strip0 + slot / T::kSteps) * shape.groups + (k >> shape.group_shift);
        const int64_t from = int64_t(of) * (kChunk << width) + chunk * kChunk;
        const uint32_t at = to + slot * kSlot + chunk * kChunk;
        const int bytes = k < call.k ? kChunk : 0;
        copy_chunk(at, static_cast<const uint8_t*>(call.groups.scales) + from, bytes);
        if (has_zeros) copy_chunk(at + shape.zeros_at, static_cast<const uint8_t*>(call.groups.zeros) + from, bytes);
      }
    }
  };

  // Scales, or zeros, of a lane's two rows: of FP32 the word, of the others its half in which the row's is.
  const int row_at = (line << width) / 4 * 4, next_row_at = row_at + (8 << width);
  const uint32_t half = fp32 ? 0x3210 : line % 2 ? 0x3244 : 0x1044;
  const bool fp16 = call.groups.dtype == CUTEGEMM_FP16;
  const auto read_slot = [&](uint32_t at, float (&of_rows)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = load_word(at + (i ? next_row_at : row_at));
      const uint32_t bits = __byte_perm(word, 0, half);
      of_rows[i] = fp16 ? __high2float(reinterpret_cast<const __half2&>(bits)) : __uint_as_float(bits);
    }
  };

  // x of a step: of every 16 k and 8 tokens a lane's part of the MMA's operand. All k are at a fixed distance from the
  // lane's own place, but for the swizzle.
  // Few tokens are read where there are some, and of others the last: sums of different tokens never meet.
  const int there = T::kFew ? tokens - 1 : kTokens - 1;
  const int x_place = shape.x_at + token_warp * kWide * 8 * kXRow +
                      (!T::kInt4    ? x_offset(line, 2 * place)
                       : kWide == 1 ? x_offset(min(lane % 8, there), lane / 8)
                                    : x_offset(min(lane / 16 * 8 + lane % 8, there), lane / 8 % 2));
  using X = uint32_t[T::kStep / 16][kWide][2];
  // x of 16 k, for more than eight tokens.
  const auto load_x_of = [&](uint32_t stage, int k, uint32_t (&x)[kWide][2]) {
    const uint32_t at = (stage + x_place ^ k * 2 % 128) + k * 2 / 128 * 128;
#pragma unroll
    for (int j = 0; j < kWide; j += 2) load_matrices(at + j * 8 * kXRow, x[j][0], x[j][1], x[j + 1][0], x[j + 1][1]);
  };
  const auto load_x = [&](uint32_t stage, int k0, X& x) {
    const auto at = [&](int k) { return (stage + x_place ^ k * 2 % 128) + k * 2 / 128 * 128; };
#pragma unroll
    for (int i = 0; i < T::kStep / 16; i += T::kInt4 && kWide > 1 ? 1 : 2) {
      const int k = k0 + i * 16;
      if constexpr (!T::kInt4) {
        // A lane's 16 k of 64 are two chunks of x, side by side.
        const int chunk = k / kLoad * kLoad + k % kLoad / 32 * 8;
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          const uint4 v = load_words(at(chunk) + j * 8 * kXRow);
          x[i][j][0] = v.x, x[i][j][1] = v.y, x[i + 1][j][0] = v.z, x[i + 1][j][1] = v.w;
        }
      } else if constexpr (kWide == 1) {
        load_matrices(at(k), x[i][0][0], x[i][0][1], x[i + 1][0][0], x[i + 1][0][1]);
      } else {
        load_x_of(stage, k, x[i]);
      }
    }
  };

  const auto sync_team = [&] {
    if constexpr (T::kTeamWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(T::kTeamThreads) : "memory");
    }
  };

  // Where there are registers for it, what the end needs of memory is there before.
  constexpr bool kEarly = T::kFew && kWide == 1;
  typename Formula::Column column = {};
  const auto prepare_end = [&] {
    const int row = int(threadIdx.x) & (1 << shape.row_shift) - 1, n = strip0 * kStrip + row;
    if (row < shape.strips * kStrip && n < call.n && shape.split == 1) column = Formula::column(call, n);
  };

  float total[T::kStrips][kWide][4] = {};
  [[maybe_unused]] uint32_t nans[T::kStrips][2] = {};  // of the lane's k, see Values::nans
  const auto multiply = [&](auto whole, uint32_t stage, X& x, [[maybe_unused]] float lane_scale) {
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const int k0 = step * T::kStep;
      if (step > 0) load_x(stage, k0, x);
      [[maybe_unused]] float x_sums[kWide][4];
      if constexpr (T::kMinimum) {
        constexpr uint32_t kOne = T::kBf16 ? 0x3f803f80 : 0x3c003c00, kOnes[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
        for (int i = 0; i < T::kStep / 16; ++i) {
#pragma unroll
          for (int j = 0; j < kWide; ++j) multiply_add<T::kBf16>(x_sums[j], kOnes, x[i][j], i == 0);
        }
      }
#pragma unroll
      for (int s = 0; s < T::kStrips; ++s) {
        if (!whole && !has_strip(s)) break;
        const uint32_t slot = stage + (strip_of(s) * T::kSteps + step) * kSlot;
        float zero[2] = {T::kMinimum ? 0.f : 8.f, T::kMinimum ? 0.f : 8.f};
        if (!whole && has_zeros && !T::kMinimum) read_slot(slot + shape.zeros_at, zero);
        float part[T::kChains][kWide][4];
        uint4 words[T::kCopies / 2];
#pragma unroll
        for (int i = 0; i < T::kStep / 16; ++i) {
          const int k = k0 + i * 16, load = k / kLoad, word = k % kLoad / 16;
          if (word == 0 || i == 0) {
#pragma unroll
            for (int half = 0; half < T::kCopies / 2; ++half) {
              const int copy = load * (T::kCopies / 2) + half;
              words[half] =
                  load_words(stage + T::kStripsAt + strip_of(s) * T::kStripBytes + (copy * 32 + lane) * kChunk);
            }
          }
          const auto word_of = [&](const uint4& of) {
            return word == 0 ? of.x : word == 1 ? of.y : word == 2 ? of.z : of.w;
          };
          uint32_t a[4];
          if constexpr (T::kInt4) {
            Values::make(a, word_of(words[0]), Values::zeros(zero[0], zero[1]));
          } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const uint32_t four = word_of(words[half]);
              Values::make(a[half], a[half + 2], four);
              if constexpr (T::kNans) nans[s][half] |= Values::nans(four);
            }
          }
#pragma unroll
          for (int j = 0; j < kWide; ++j) {
            multiply_add<T::kBf16>(part[i % T::kChains][j], a, x[i][j], i < T::kChains);
          }
        }
        float scale[2];
        [[maybe_unused]] float minimum[2];
        if constexpr (T::kInt4) {
          read_slot(slot, scale);
          if constexpr (T::kMinimum) read_slot(slot + shape.zeros_at, minimum);
          scale[0] *= Values::kFactor, scale[1] *= Values::kFactor;
        } else {
          scale[0] = scale[1] = __shfl_sync(~0u, lane_scale, s);
        }
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float sum = part[0][j][e];
            if constexpr (T::kChains > 1) sum += part[1][j][e];
            float& of = total[s][j][e];
            of = __fmaf_rn(sum, scale[e / 2], of);
            if constexpr (T::kMinimum) of = __fmaf_rn(x_sums[j][e], minimum[e / 2], of);
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
      return Values::kFactor * (has ? load_scale(call.scale_b, strip * kStrip / kBlock, block) : 1.f);
    }
  };

  // Few tokens, or rounded values: kMine strips of the warp. Of few tokens all strips stay in step, so that their MMAs
  // are side by side: one after the other on the same sums takes 33 cycles. fused: see Values::make_scaled.
  [[maybe_unused]] const auto run = [&](auto mine, auto fused) {
    constexpr int kMine = decltype(mine)::value, kSteps = T::kSteps, kStripStep = T::kRowWarps * T::kStripBytes;
    constexpr bool kFused = decltype(fused)::value;
    using Codes = cutegemm::Values<Int4, T::kBf16>;
    int block = first + team;
    uint32_t stage = ring;  // where the next block is copied to; after that the oldest one, which is multiplied

    const uint8_t* from = source(row_warp, block, 0, lane);
    const uint32_t strips_to = T::kStripsAt + row_warp * T::kStripBytes + lane * kChunk;
    // Of x eight threads copy 128 bytes of a token, a whole line, and then the next.
    constexpr int kAtOnce = T::kTeamThreads / 8, kLine = 8 * kChunk;
    const int copied_token = member / 8, x_tokens = min(tokens, kTokens);
    const uint32_t line_to = shape.x_at + x_offset(copied_token, member % 8);
    const uint8_t* of_x = static_cast<const uint8_t*>(call.a) + (token0 + copied_token) * shape.x_bytes +
                          int64_t(block) * kXRow + member % 8 * kChunk;
    // Of scales a thread copies the 16 bytes `chunk` of a slot, and of every slots_at_once-th after it.
    const int slot = member >> width, chunk = member & (1 << width) - 1;
    const int slot_bytes = kChunk << width, slot_k = slot % kSteps * T::kStep;
    const int64_t slot_at = int64_t(strip0 + slot / kSteps) * shape.groups * slot_bytes + chunk * kChunk;
    const auto start_next = [&](int copied) {
      if (copied < last) {
        const bool second = copied * T::kCopies + 1 < shape.loads;
#pragma unroll
        for (int s = 0; s < kMine; ++s) {
          const uint8_t* const of_strip = from + s * T::kRowWarps * shape.strip_bytes;
          copy_whole_chunk(stage + strips_to + s * kStripStep, of_strip, true);
          copy_whole_chunk(stage + strips_to + s * kStripStep + 32 * kChunk, of_strip + 32 * kChunk, second);
        }
        int64_t scale_at = slot_at + int64_t((copied * kBlock + slot_k) >> shape.group_shift) * slot_bytes;
        if constexpr (kSteps == 1 || T::kRounded) {  // each has one at most
          static_assert(!T::kRounded || T::kRows / kStrip * kSteps * 2 <= T::kTeamThreads);
          const uint32_t to = stage + slot * kSlot + chunk * kChunk;
          const bool wanted = slot < strips * kSteps;
          const auto copy = [&](uint32_t to, const void* of) {
            const uint8_t* const from = static_cast<const uint8_t*>(of) + scale_at;
            if constexpr (kSteps == 1) {
              copy_whole_chunk(to, from, wanted);
            } else {  // behind k zeros, since x is 0 there, and what is multiplied by it must be finite
              copy_chunk(to, from, copied * kBlock + slot_k < call.k ? kChunk : 0, wanted);
            }
          };
          copy(to, call.groups.scales);
          if (has_zeros) copy(to + shape.zeros_at, call.groups.zeros);
        } else {
          const int slots_at_once = T::kTeamThreads >> width;
#pragma unroll 1
          for (int i = slot; i < strips * kSteps; i += slots_at_once) {
            const int bytes = copied * kBlock + slot_k < call.k ? kChunk : 0;
            const uint32_t to = stage + i * kSlot + chunk * kChunk;
            copy_chunk(to, static_cast<const uint8_t*>(call.groups.scales) + scale_at, bytes);
            if (has_zeros)
              copy_chunk(to + shape.zeros_at, static_cast<const uint8_t*>(call.groups.zeros) + scale_at, bytes);
            scale_at += int64_t(slots_at_once / kSteps) * shape.groups * slot_bytes;
          }
        }
        const auto copy_x = [&](auto&& copy) {
#pragma unroll
          for (int i = 0; i < kTokens; i += kAtOnce) {
            if (i == kAtOnce && tokens <= kAtOnce) break;
            const uint32_t to = (stage + line_to ^ i % 8 * kChunk) + i * kXRow;
            const uint8_t* const from = of_x + i * shape.x_bytes;
            const bool wanted = i + copied_token < x_tokens;
            copy(to, from, 0, wanted), copy(to + kLine, from + kLine, 1, wanted);
          }
        };
        const int left = call.k - copied * kBlock;
        if (left >= kBlock) {
          copy_x([](uint32_t to, const uint8_t* from, int, bool wanted) { copy_whole_chunk(to, from, wanted); });
        } else {
          copy_x([&](uint32_t to, const uint8_t* from, int line, bool wanted) {
            copy_chunk(to, from, max(0, min(kChunk, (left - line * 64 - member % 8 * 8) * 2)), wanted);
          });
        }
      }
      commit_copies();
      from += shape.teams * T::kStripBytes, of_x += shape.teams * kXRow;
      stage += shape.stage_bytes;
      if (stage == ring_end) stage -= shape.stages * shape.stage_bytes;
    };

    constexpr int kStep = T::kStep;
    const auto multiply_block = [&] {
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        const int k0 = step * kStep;
        constexpr int kChains = kMine * kWide <= 2 ? 2 : 1;  // independent sums for each of d
        X x;
        if constexpr (kStep % kLoad == 0) {
          load_x(stage + k0 * 2, 0, x);
        } else {
          load_x(stage, k0, x);
        }
        constexpr uint32_t kOne = T::kBf16 ? 0x3f803f80 : 0x3c003c00, ones[4] = {kOne, kOne, kOne, kOne};
        [[maybe_unused]] float x_sums[kChains][kWide][4];
#pragma unroll
        for (int s0 = 0; s0 < kMine; s0 += T::kTogether) {
          constexpr int kMost = std::max(1, std::min(kMine, T::kTogether));
          uint4 words[kMost];
          float scale[kMost][2], part[kMost][kChains][kWide][4];
          const auto slot_of = [&](int s) { return stage + (strip_of(s0 + s) * kSteps + step) * kSlot; };
#pragma unroll
          for (int s = 0; kEarly && s < kMost && s0 + s < kMine; ++s) read_slot(slot_of(s), scale[s]);
          typename Codes::Zeros zeros[kMost];
#pragma unroll
          for (int s = 0; s < kMost && s0 + s < kMine; ++s) {
            float zero[2] = {T::kMinimum ? 0.f : 8.f, T::kMinimum ? 0.f : 8.f};
            if (!T::kMinimum && has_zeros) read_slot(slot_of(s) + shape.zeros_at, zero);
            zeros[s] = Codes::zeros(zero[0], zero[1]);
          }
#pragma unroll
          for (int i = 0; i < kStep / 16; ++i) {
            const int word = i * 16 % kLoad / 16, chain = i % kChains;
            if (word == 0) {
#pragma unroll
              for (int s = 0; s < kMost && s0 + s < kMine; ++s) {
                const uint32_t at = stage + strips_to + (s0 + s) * kStripStep;
                if constexpr (kStep % kLoad == 0) {
                  words[s] = load_words(at + (k0 + i * 16) / kLoad * 32 * kChunk);
                } else {
                  words[s] = load_two_words(at + k0 / kLoad * 32 * kChunk + k0 % kLoad / 4);
                }
              }
            }
            if (T::kMinimum && s0 == 0) {
#pragma unroll
              for (int j = 0; j < kWide; ++j) {
                multiply_add<T::kBf16>(x_sums[chain][j], ones, x[i][j], i < kChains);
              }
            }
#pragma unroll
            for (int s = 0; s < kMost && s0 + s < kMine; ++s) {
              uint32_t a[4];
              Codes::make(a,
                          word == 0   ? words[s].x
                          : word == 1 ? words[s].y
                          : word == 2 ? words[s].z
                                      : words[s].w,
                          zeros[s]);
#pragma unroll
              for (int j = 0; j < kWide; ++j) {
                multiply_add<T::kBf16>(part[s][chain][j], a, x[i][j], i < kChains);
              }
            }
          }
          if (T::kMinimum && s0 == 0 && kChains > 1) {
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
#pragma unroll
              for (int e = 0; e < 2; ++e) x_sums[0][j][e] += x_sums[kChains - 1][j][e];
            }
          }
#pragma unroll
          for (int s = 0; s < kMost && s0 + s < kMine; ++s) {
            if constexpr (!kEarly) read_slot(slot_of(s), scale[s]);
            [[maybe_unused]] float minimum[2];
            if constexpr (T::kMinimum) read_slot(slot_of(s) + shape.zeros_at, minimum);
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                float sum = part[s][0][j][e];
                if constexpr (kChains > 1) sum += part[s][kChains - 1][j][e];
                float& of = total[s0 + s][j][e];
                of = __fmaf_rn(sum, Codes::kFactor * scale[s][e / 2], of);
                if constexpr (T::kMinimum) of = __fmaf_rn(x_sums[0][j][e % 2], minimum[e / 2], of);
              }
            }
          }
        }
      }
    };

    [[maybe_unused]] const auto multiply_rounded = [&] {
      constexpr int kOwn = std::max(1, kMine);
      uint32_t scale[kOwn][2], offset[kOwn][2];
      typename Codes::Zeros zeros[kOwn];
      const auto take_scales = [&](int step) {
#pragma unroll
        for (int s = 0; s < kMine; ++s) {
          const uint32_t at = stage + (strip_of(s) * kSteps + step) * kSlot + line * 2;
          const auto minima_or_zeros = [&](int half) { return twice(load_half(at + shape.zeros_at + half * 16)); };
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t own = twice(load_half(at + half * 16));
            if constexpr (kFused) {
              scale[s][half] = multiply_pair<T::kBf16>(own, Codes::kScaled);
              offset[s][half] = T::kMinimum ? multiply_pair<T::kBf16>(minima_or_zeros(half), Codes::scaled_one(half))
                                            : multiply_pair<T::kBf16>(own, Codes::scaled_minus_eight(half));
            } else {
              scale[s][half] = Codes::kFactor == 1.f ? own : multiply_pair<T::kBf16>(own, Codes::twice(Codes::kFactor));
              if constexpr (T::kMinimum) offset[s][half] = minima_or_zeros(half);
            }
          }
          if constexpr (!kFused) {
            zeros[s] = T::kMinimum ? Codes::zeros(0.f, 0.f) : Codes::zeros(8.f, 8.f);
            if (!T::kMinimum && has_zeros) {
              const auto none = Codes::zeros(0.f, 0.f);
              const uint32_t factor = Codes::twice(-1.f / Codes::kFactor);
              zeros[s] = {fma_pairs<T::kBf16>(minima_or_zeros(0), factor, none.lower),
                          fma_pairs<T::kBf16>(minima_or_zeros(1), factor, none.upper)};
            }
          }
        }
      };
      if constexpr (T::kStep == kBlock) take_scales(0);
#pragma unroll 1  // or there is more code than a multiprocessor's cache of instructions has room for
      for (int load = 0; load < kBlock / kLoad; ++load) {
        uint32_t x[2][kWide][2];
        uint4 words[kOwn];
        const uint32_t x_at = stage + load * 128;
        load_x_of(x_at, 0, x[0]);
#pragma unroll
        for (int s = 0; s < kMine; ++s) words[s] = load_words(stage + strips_to + s * kStripStep + load * 32 * kChunk);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          if (T::kStep < kBlock && word * 16 % T::kStep == 0) take_scales((load * kLoad + word * 16) / T::kStep);
          if (word < 3) load_x_of(x_at, (word + 1) * 16, x[(word + 1) % 2]);
#pragma unroll
          for (int s = 0; s < kMine; ++s) {
            const uint32_t own = word == 0 ? words[s].x : word == 1 ? words[s].y : word == 2 ? words[s].z : words[s].w;
            uint32_t a[4];
            if constexpr (kFused) {
              Codes::make_scaled(a, own, scale[s], offset[s]);
            } else {
              Codes::make(a, own, zeros[s]);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                a[i] = T::kMinimum ? fma_pairs<T::kBf16>(a[i], scale[s][i % 2], offset[s][i % 2])
                                   : multiply_pair<T::kBf16>(a[i], scale[s][i % 2]);
              }
            }
#pragma unroll
            for (int j = 0; j < kWide; ++j) multiply_add<T::kBf16>(total[s][j], a, x[word % 2][j], false);
          }
        }
      }
    };

    for (int i = 0; i < shape.ahead; i += shape.teams) start_next(block + i);
    if constexpr (kEarly) prepare_end();
    for (; block < last; block += shape.teams) {
      if constexpr (T::kTeamWarps == 1) {
        __syncwarp();
        start_next(block + shape.ahead);
        wait_for_copies(shape.stages - 1);
        __syncwarp();
      } else {
        wait_for_copies(shape.stages - 2);
        sync_team();
        start_next(block + shape.ahead);
      }
      if constexpr (T::kRounded) {
        multiply_rounded();
      } else {
        multiply_block();
      }
    }
    if constexpr (kFused) {
#pragma unroll
      for (int s = 0; s < T::kStrips; ++s) {
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) total[s][j][e] *= Codes::scaled_by(e / 2);
        }
      }
    }
  };

  if constexpr (T::kFew || T::kRounded) {
    const int mine = (strips - row_warp + T::kRowWarps - 1) / T::kRowWarps;
    const auto run_mine = [&](auto fused) {
      if (mine >= 4) {
        run(std::integral_constant<int, 4>(), fused);
      } else if (mine == 3) {
        run(std::integral_constant<int, 3>(), fused);
      } else if (mine == 2) {
        run(std::integral_constant<int, 2>(), fused);
      } else if (T::kRowWarps == 1 || mine == 1) {
        run(std::integral_constant<int, 1>(), fused);
      } else if constexpr (T::kRowWarps > 1) {
        run(std::integral_constant<int, 0>(), fused);
      }
    };
    if constexpr (T::kRounded && T::kBf16) {
      if (T::kMinimum || !has_zeros) {
        run_mine(std::true_type());
      } else {
        run_mine(std::false_type());
      }
    } else {
      run_mine(std::false_type());
    }
  } else {
    int block = first + team;
    uint32_t stage = ring, next = ring;
    const auto after = [&](uint32_t stage) {
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
    // Apart where there are registers for it: a strip's values are made beside another's MMAs if no branch is
    // between them.
    const bool whole =
        T::kInt4 && kWide == 4 && T::kStep > 32 && has_strip(T::kStrips - 1) && (T::kMinimum || !has_zeros);
    for (; block < last; block += shape.teams) {
      wait_for_copies(shape.stages - 2);
      sync_team();
      X x;
      load_x(stage, 0, x);  // which takes about as long as to start copies
      start_next(block + (shape.stages - 1) * shape.teams);
      const float next_scale = scale_of(block + shape.teams);
      if (whole) {
        multiply(std::true_type(), stage, x, scale);
      } else {
        multiply(std::false_type(), stage, x, scale);
      }
      scale = next_scale;
      stage = after(stage);
    }
  }
  if constexpr (T::kNans) {  // four lanes have a row's k
#pragma unroll
    for (int s = 0; s < T::kStrips; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t found = nans[s][half];
        found |= __shfl_xor_sync(~0u, found, 1), found |= __shfl_xor_sync(~0u, found, 2);
        if (!(found & Values::kNan)) continue;
#pragma unroll
        for (int j = 0; j < kWide; ++j) total[s][j][2 * half] = total[s][j][2 * half + 1] = __int_as_float(0x7fffffff);
      }
    }
  }

  // Sums of teams as [team][token][row], so that neighbouring threads have neighbouring rows, which are columns
  // of d. A team puts them where its own stages were.
  if constexpr (!kEarly) prepare_end();
  sync_team();
  float* const sums = reinterpret_cast<float*>(shared);
  const int thread = thread_index(), team_sums = shape.team_bytes / 4;
#pragma unroll
  for (int s = 0; s < T::kStrips; ++s) {
    if (!has_strip(s)) break;
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = (token_warp * kWide + j) * 8 + thread % 4 * 2 + e % 2,
                  row = strip_of(s) * kStrip + e / 2 * 8 + thread % 32 / 4;
        if (!T::kFew || token < tokens)
          sums[thread / T::kTeamThreads * team_sums + token * T::kPitch + row] = total[s][j][e];
      }
    }
  }
  const int rows_at_once = 1 << shape.row_shift, first_row = thread & rows_at_once - 1;
  const int end_token = thread >> shape.row_shift, tokens_at_once = int(blockDim.x) >> shape.row_shift;
  __syncthreads();
  for (int row = first_row; row < shape.strips * kStrip; row += rows_at_once) {
    const int n = strip0 * kStrip + row;
    if (n >= call.n) return;
    if (row != first_row && shape.split == 1) column = Formula::column(call, n);
    const auto for_each_sum = [&](auto&& f) {
      constexpr int kTogether = kTokens >= 32 ? 4 : 1;  // whose loads are on their way together
      const int end = min(kTokens, tokens);
      for (int token = end_token; token < end; token += kTogether * tokens_at_once) {
        float sum[kTogether] = {};
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const int at = min(token + j * tokens_at_once, end - 1) * T::kPitch + row;
#pragma unroll
          for (int i = 0; i < T::kTeams; ++i) {
            if (i < shape.teams) sum[j] += sums[i * team_sums + at];
          }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (token + j * tokens_at_once < end) f(token0 + token + j * tokens_at_once, sum[j]);
        }
      }
    };
    if (shape.split > 1) {
      float* const to = static_cast<float*>(call.workspace) + int64_t(blockIdx.z) * call.m * shape.pitch + n;
      for_each_sum([&](int m, float sum) { to[m * shape.pitch] = sum; });
    } else {
      with_float_pointer(call.d, call.d_dtype, [&](auto* d) {
        for_each_sum([&](int m, float sum) {
          sum = Formula::apply(sum, Formula::row(call, m), column, Formula::element(call, m, n));
          store(d + m * call.d_stride[0] + n * call.d_stride[1], sum);
        });
      });
    }
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
    const int32_t status = load_kernel(kKernel, sm80::current_device().block_bytes);
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
    if (T::kInt4 && (T::kRounded ? groups.dtype != call.a_dtype : !is_float(groups.dtype))) return kWrongTypes;
    if (call.m < 1 || call.n < 1 || call.k < 1) return kWrongSize;
    if (call.output.gated || call.options.split < 0) return kWrongOptions;
    if (call.a_stride[1] != 1 || (!T::kInt4 && call.b_stride[0] != 1)) return kWrongLayout;
    if (!aligned(call.a, call.m > 1 ? call.a_stride[0] * 2 : 0)) return kMisaligned;
    const int rows = call.options.rows;
    if (rows && (rows < kStrip || rows > T::kRows || rows % kStrip != 0)) {
      return kWrongOptions;
    }
    Shape shape = tiles(call);
    const int64_t tiles_of_d = int64_t(shape.row_tiles) * shape.token_tiles, ctas = tiles_of_d * shape.split;
    if (tiles_of_d > INT32_MAX || shape.split > 65535) return kWrongSize;
    if (T::kFew && shape.row_tiles > 65535) return kWrongSize;
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
    shape.x_bytes = call.a_stride[0] * 2;
    shape.loads = (call.k - 1) / kLoad + 1, shape.strip_bytes = int64_t(shape.loads) * (32 * kChunk);
    shape.by_chunks = aligned(call.b, call.b_stride[1]);

    // As many stages as k or HBM's latency want, where two CTAs, of this call or of the next, fit a multiprocessor if
    // it can be.
    const Device& device = current_device();
    const int most = device.block_bytes, half = device.multiprocessor_bytes / 2 - 1024;
    const auto lines = [](int bytes) { return (bytes + 127) / 128 * 128; };
    const int of_weight = shape.strips * T::kStripBytes, x_tokens = T::kFew ? std::min(call.m, T::kTokens) : T::kTokens;
    shape.zeros_at = T::kStripsAt + of_weight;
    shape.x_at = lines(shape.zeros_at + (groups.zeros ? shape.strips * T::kScaleBytes : 0));
    shape.stage_bytes = shape.x_at + x_tokens * kXRow;
    for (shape.teams = T::kTeams; shape.teams > 1 && shape.teams * shape.stage_bytes * 2 > most;) {
      shape.teams /= 2;
    }
    const int of_stage = shape.teams * shape.stage_bytes, of_team = (shape.part - 1) / shape.teams + 1;
    const int all = T::kFew && T::kTeamWarps == 1 ? of_team : of_team + 1;
    const int wanted = std::clamp(std::min(all, 1 + T::kBytesInFlight / (shape.teams * of_weight)), 2, kMaxStages);
    const int enough = std::min(wanted, ctas > call.sm_count ? 2 : 3);
    shape.stages = std::min(wanted, (T::kResident > 1 && half / of_stage >= enough ? half : most) / of_stage);
    shape.ahead = (shape.stages - 1) * shape.teams;
    shape.team_bytes = std::max(shape.stages * shape.stage_bytes, lines(x_tokens * T::kPitch * int(sizeof(float))));
    const int threads = shape.teams * T::kTeamThreads;
    for (shape.row_shift = 4; 1 << shape.row_shift < std::min(shape.strips * kStrip, threads);) ++shape.row_shift;
    int bytes = shape.teams * shape.team_bytes;
    // CTAs that run for long, one for each multiprocessor: with more than half of its shared memory no two meet on one.
    if (ctas <= call.sm_count && of_team > 16 && half < most) bytes = std::max(bytes, half + 1);

    const dim3 grid =
        T::kFew ? dim3(shape.token_tiles, shape.row_tiles, shape.split) : dim3(unsigned(tiles_of_d), 1, shape.split);
    const dim3 block(threads);
    const int cluster = device.major >= 9 ? 1 : 0;
    const int32_t status = launch_cluster(call, kKernel, grid, cluster, block, bytes, call, shape);
    if (status || shape.split == 1) return status;
    const int64_t fours = call.m * shape.pitch / 4;
    return launch_cluster(call, kSum, dim3(unsigned((fours - 1) / kSumThreads + 1)), cluster, dim3(kSumThreads), 0,
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
    // By what they cost in ns, roughly, on an H200: a block's bytes or its MMAs, a CTA's start, and the second
    // kernel.
    int best_strips = T::kRows / kStrip, best_split = 1;
    double least = 1e30;
    for (int of_tile = T::kRows / kStrip; of_tile > 0; --of_tile) {
      if (call.options.rows && of_tile != call.options.rows / kStrip) continue;
      for (int split = 1; split <= 8; split *= 2) {
        if (call.options.split ? split > 1 : split > 1 && shape.blocks < split * T::kTeams) continue;
        cut(of_tile, call.options.split ? call.options.split : split);
        const double ctas = double(shape.row_tiles) * shape.token_tiles * shape.split;
        const double waves = std::ceil(ctas / call.sm_count);
        const double x_rate = T::kRounded && T::kTokens == 32 ? 75. : 45.;
        const double bytes = of_tile * T::kStripBytes / 32. + std::min(call.m, T::kTokens) * kXRow / x_rate;
        // Two CTAs with rounded values take turns on a multiprocessor, and one alone, with half of its warps, is
        // slower.
        const double pairs = std::floor(ctas / (2 * call.sm_count)), left = ctas - pairs * 2 * call.sm_count;
        const double of_left = left == 0 ? 0 : left <= call.sm_count ? 1.5 : 2;
        const double turns = T::kRounded ? 2 * pairs + of_left : waves;
        const double cost = turns * shape.part * std::max(bytes, of_tile * T::kTokens * (T::kWarps == 4 ? 1.5 : 0.95)) +
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
