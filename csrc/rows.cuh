// Kernels over the rows of a tensor: a source of values, an RMSNorm or none, then the values, their codes, or both.
//
// All of it is to be bound by memory. So a row is read once and held in registers, in the tensor's own type, between
// the reductions; loads and stores take 16 bytes, and all loads of a thread are on their way before the first is
// needed; and whatever a call decides is decided outside of the loops over values: at 4.2 TB/s a multiprocessor has
// time for 20 instructions for each value that it reads in 16 bits and writes in 8. Whatever is fused gives the bits of
// the ops it fuses, since every value that a tensor would have held is rounded as that tensor would have rounded it.
//
// A thread has chunks of 8 neighbours, a warp those of 256, one after the other. How a row is cut depends on its length
// alone, where something is reduced over it: its bits do not depend on how many others there are.
#pragma once
#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "chain.cuh"
#include "fp8_scale.cuh"
#include "torch_op.h"

namespace cutegemm {

constexpr int kChunk = 8, kOfWarp = 32 * kChunk;
constexpr float kInt8Max = 127.f;
constexpr uint32_t kInf = 0x7f800000u;

// As words: of an array of a 16-bit class the compiler makes eight loads of two bytes.
template <class T>
struct alignas(sizeof(T) * kChunk < 16 ? sizeof(T) * kChunk : 16) Chunk {
  uint32_t word[sizeof(T) * kChunk / 4];
};

template <class T>
constexpr int32_t dtype_of = std::is_same_v<T, float>    ? CUTEGEMM_FP32
                             : std::is_same_v<T, __half> ? CUTEGEMM_FP16
                                                         : CUTEGEMM_BF16;

// Values 2 i and 2 i + 1.
__device__ __forceinline__ float2 pair(const Chunk<__nv_bfloat16>& chunk, int i) {
  return {__uint_as_float(chunk.word[i] << 16), __uint_as_float(chunk.word[i] & 0xffff0000u)};
}
__device__ __forceinline__ float2 pair(const Chunk<__half>& chunk, int i) {
  return __half22float2(reinterpret_cast<const __half2&>(chunk.word[i]));
}
__device__ __forceinline__ float2 pair(const Chunk<float>& chunk, int i) {
  return {__uint_as_float(chunk.word[2 * i]), __uint_as_float(chunk.word[2 * i + 1])};
}

__device__ __forceinline__ void set_pair(Chunk<__nv_bfloat16>& chunk, int i, float2 x) {
  reinterpret_cast<__nv_bfloat162&>(chunk.word[i]) = __float22bfloat162_rn(x);
}
__device__ __forceinline__ void set_pair(Chunk<__half>& chunk, int i, float2 x) {
  reinterpret_cast<__half2&>(chunk.word[i]) = __float22half2_rn(x);
}
__device__ __forceinline__ void set_pair(Chunk<float>& chunk, int i, float2 x) {
  chunk.word[2 * i] = __float_as_uint(x.x), chunk.word[2 * i + 1] = __float_as_uint(x.y);
}

// The n values at `from`, and zeros after them. wide: chunks lie at multiples of their alignment. kWhole: they do, and
// n is no part of a chunk; so much less is to be decided that kernels are made for it.
template <bool kWhole, class T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* from, int n, bool wide) {
  Chunk<T> chunk{};
  if (kWhole ? n > 0 : wide && n >= kChunk) {
    if constexpr (sizeof(T) == 1) {
      reinterpret_cast<uint2&>(chunk) = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < int(sizeof(T)) / 2; ++i) {
        reinterpret_cast<uint4*>(&chunk)[i] = reinterpret_cast<const uint4*>(from)[i];
      }
    }
  } else if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i >= n) continue;
      if constexpr (sizeof(T) == 4) chunk.word[i] = reinterpret_cast<const uint32_t*>(from)[i];
      if constexpr (sizeof(T) == 2) {
        chunk.word[i / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(from)[i]) << i % 2 * 16;
      }
    }
  }
  return chunk;
}

template <bool kWhole, class T>
__device__ __forceinline__ void store_chunk(T* to, const Chunk<T>& chunk, int n, bool wide) {
  if (kWhole ? n > 0 : wide && n >= kChunk) {
    if constexpr (sizeof(T) == 1) {
      *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2&>(chunk);
    } else {
#pragma unroll
      for (int i = 0; i < int(sizeof(T)) / 2; ++i) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(&chunk)[i];
      }
    }
  } else if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i >= n) continue;
      if constexpr (sizeof(T) == 4) reinterpret_cast<uint32_t*>(to)[i] = chunk.word[i];
      if constexpr (sizeof(T) == 2) reinterpret_cast<uint16_t*>(to)[i] = uint16_t(chunk.word[i / 2] >> i % 2 * 16);
      if constexpr (sizeof(T) == 1) reinterpret_cast<uint8_t*>(to)[i] = uint8_t(chunk.word[i / 4] >> i % 4 * 8);
    }
  }
}

// Rows in memory. wide: all of them start at a multiple of a chunk's alignment.
template <class T>
struct RowsOf {
  T* data;
  int64_t stride;
  bool wide;

  __device__ __forceinline__ T* at(uint32_t row, int64_t column) const {
    int64_t offset = int64_t(row) * stride + column;
    asm("" : "+l"(offset));  // or the compiler multiplies again for each chunk that comes after
    return data + offset;
  }
};

template <class T>
RowsOf<T> rows_of(const void* data, int64_t stride, int64_t count) {
  constexpr size_t align = alignof(Chunk<std::remove_const_t<T>>);
  const bool wide = reinterpret_cast<uintptr_t>(data) % align == 0 && (count <= 1 || stride * sizeof(T) % align == 0);
  return {static_cast<T*>(const_cast<void*>(data)), stride, wide};
}

// Sources. `load` asks for what a chunk is made of, `make` makes chunks of that, and `keep` may store one; `again`
// gives one afterwards.
template <class T>
struct Plain {
  struct Loaded {
    Chunk<T> x;
  };
  RowsOf<const T> x;

  bool wide() const { return x.wide; }
  template <bool kWhole>
  __device__ __forceinline__ Loaded load(uint32_t row, int64_t column, int after, int n) const {
    return {load_chunk<kWhole>(x.at(row, column) + after, n, x.wide)};
  }
  template <int kCount>
  __device__ __forceinline__ void make(Loaded (&from)[kCount], Chunk<T> (&chunks)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) chunks[i] = from[i].x;
  }
  template <bool kWhole>
  __device__ __forceinline__ void keep(const Chunk<T>&, uint32_t, int64_t, int, int) const {}
  __device__ __forceinline__ Chunk<T> again(uint32_t row, int64_t column, int n) const {
    return load<false>(row, column, 0, n).x;
  }
};

// x + residual, rounded, which also goes to sum; that may be where residual is.
template <class T>
struct Sum {
  struct Loaded {
    Chunk<T> x, residual;
  };
  RowsOf<const T> x, residual;
  RowsOf<T> sum;

  bool wide() const { return x.wide && residual.wide && sum.wide; }
  template <bool kWhole>
  __device__ __forceinline__ Loaded load(uint32_t row, int64_t column, int after, int n) const {
    return {load_chunk<kWhole>(x.at(row, column) + after, n, x.wide),
            load_chunk<kWhole>(residual.at(row, column) + after, n, residual.wide)};
  }
  template <int kCount>
  __device__ __forceinline__ void make(Loaded (&from)[kCount], Chunk<T> (&chunks)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) {
        const float2 a = pair(from[i].x, j), b = pair(from[i].residual, j);
        set_pair(chunks[i], j, {a.x + b.x, a.y + b.y});
      }
    }
  }
  template <bool kWhole>
  __device__ __forceinline__ void keep(const Chunk<T>& chunk, uint32_t row, int64_t column, int after, int n) const {
    store_chunk<kWhole>(sum.at(row, column) + after, chunk, n, sum.wide);
  }
  __device__ __forceinline__ Chunk<T> again(uint32_t row, int64_t column, int n) const {
    return load_chunk<false, T>(sum.at(row, column), n, sum.wide);
  }
};

// x * rsqrt(mean(x * x) + eps) * (weight + offset); dtype NONE: the weight is 1.
struct Norm {
  const void* weight;
  int32_t dtype;  // FP32, or that of x
  bool wide;
  float offset, eps, one_over_size;

  template <bool kWhole, class W>
  __device__ __forceinline__ Chunk<W> load(int64_t column, int after, int n) const {
    return load_chunk<kWhole>(static_cast<const W*>(weight) + column + after, n, wide);
  }

  template <bool kOffset, class T, class W>
  __device__ __forceinline__ void scale(Chunk<T>& chunk, float rstd, const Chunk<W>& by) const {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 x = pair(chunk, i);
      float2 w = pair(by, i);
      if (kOffset) w = {w.x + offset, w.y + offset};
      set_pair(chunk, i, {x.x * rstd * w.x, x.y * rstd * w.y});
    }
  }
  template <class T>
  __device__ __forceinline__ void scale(Chunk<T>& chunk, float rstd) const {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 x = pair(chunk, i);
      set_pair(chunk, i, {x.x * rstd, x.y * rstd});
    }
  }
};

enum class Scales : int32_t { kNone, kGiven, kOfTensor, kOfToken, kOfGroup };

// How values become codes. The scale of (row, group) is at row * stride[0] + group * stride[1].
struct Quantization {
  Scales scales;                                // kNone: there are no codes
  bool q_wide, int8, power_of_two, is_special;  // special: it has a bound or is a power of two
  int32_t group_shift;                          // of groups of 64 or 128, 6 or 7; 0: a row has one scale
  int32_t amax_count;
  float largest, reciprocal;  // code, and 1 over it
  uint8_t* q;
  int64_t q_stride;
  const float* given;    // for kGiven
  const unsigned* amax;  // for kOfTensor: amax_count of them, and the tensor's is their largest
  const float* bound;    // of amax, or null
  float* scale;          // what is returned
  int64_t given_stride[2], stride[2];

  // amax is in the range where divided() holds.
  __device__ __forceinline__ float scale_of(unsigned amax_bits) const {
    float value = __uint_as_float(amax_bits);
    if (is_special && bound) value = fminf(value, *bound);
    value = fmaxf(value, kAmaxFloor);
    const float exact = divided(value, largest, reciprocal);
    return is_special && power_of_two ? power_of_two_above(exact) : exact;
  }
};

// Divisors, all of which have the bits of IEEE's division. This one is that.
struct AnyDivisor {
  float by;

  __device__ __forceinline__ explicit AnyDivisor(float by) : by(by) {}
  __device__ __forceinline__ float operator()(float x) const { return __fdiv_rn(x, by); }
};

// The others take a product with the reciprocal, where that is far from the ends of the numbers.
__device__ __forceinline__ bool is_usual(float by) { return by >= 0x1p-80f && by <= 0x1p80f; }

// 1 / x, as __frcp_rn has it, which has the range to check besides.
__device__ __forceinline__ float reciprocal_of(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return __fmaf_rn(__fmaf_rn(-reciprocal, x, 1.f), reciprocal, reciprocal);
}

// With one step of Newton (Markstein).
struct Divisor {
  float by, reciprocal;

  __device__ __forceinline__ explicit Divisor(float by) : by(by), reciprocal(reciprocal_of(by)) {}
  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = x * reciprocal;
    const float corrected = __fmaf_rn(__fmaf_rn(-quotient, by, x), reciprocal, quotient);
    // Beyond a million every code saturates, and Inf must not become NaN; the step takes the sign from a zero.
    return fabsf(quotient) < 1e6f && quotient != 0.f ? corrected : quotient;
  }
};

// For e4m3 codes of 16-bit values, in two instructions: the reciprocal is the sum of its first 13 bits, whose product
// with a value is exact, and of the rest. That rounds as the division does wherever a code depends on it:
// test_division_rounds_as_ieee tries every value near the middle of two codes. The first part is less than the
// reciprocal, so the second is positive: signs of zeros stay, and so does Inf.
struct ShortDivisor {
  float high, low;

  __device__ __forceinline__ explicit ShortDivisor(float by) {
    const float reciprocal = reciprocal_of(by);
    high = __uint_as_float((__float_as_uint(reciprocal) - 1) & 0xfffff800u);
    low = __fmaf_rn(-high, by, 1.f) * reciprocal;
  }
  __device__ __forceinline__ float operator()(float x) const { return __fmaf_rn(x, low, x * high); }
};

// Four codes in a word: e4m3 saturates, so that Inf becomes 448, and NaN becomes 0x7f.
__device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d, __nv_fp8_e4m3) {
  const auto low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  const auto high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3);
  return low | uint32_t(high) << 16;
}
// e5m2 does the same.
__device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d, __nv_fp8_e5m2) {
  const auto low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E5M2);
  const auto high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E5M2);
  return low | uint32_t(high) << 16;
}
// int8 saturates too, and NaN becomes 0.
__device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d, int8_t) {
  uint32_t word;
  asm("{\n"
      ".reg .b32 high;\n"
      "cvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n"
      "}"
      : "=r"(word)
      : "r"(__float2int_rn(a)), "r"(__float2int_rn(b)), "r"(__float2int_rn(c)), "r"(__float2int_rn(d)));
  return word;
}

template <class Code, class T, class By>
__device__ __forceinline__ Chunk<uint8_t> codes(const Chunk<T>& chunk, const By& divide) {
  Chunk<uint8_t> result;
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    const float2 a = pair(chunk, 2 * i), b = pair(chunk, 2 * i + 1);
    result.word[i] = four_codes(divide(a.x), divide(a.y), divide(b.x), divide(b.y), Code());
  }
  return result;
}

// Codes of the common kind, e4m3 with scales that are_common, are made by this one:
template <class T>
using CommonDivisor = std::conditional_t<sizeof(T) == 2, ShortDivisor, Divisor>;

template <int kCount>
__device__ __forceinline__ bool are_common(const float (&scales)[kCount], bool int8) {
  bool common = !int8;
#pragma unroll
  for (int i = 0; i < kCount; ++i) common &= is_usual(scales[i]);
  return common;
}

// And the others here, out of line: in line they would be half of each kernel.
template <class T>
__device__ __noinline__ Chunk<uint8_t> rare_codes(Chunk<T> chunk, float scale, bool int8) {
  if (!int8) return codes<__nv_fp8_e4m3>(chunk, AnyDivisor(scale));
  return is_usual(scale) ? codes<int8_t>(chunk, Divisor(scale)) : codes<int8_t>(chunk, AnyDivisor(scale));
}

// The largest magnitude, as bits, which are ordered as nonnegative floats are. NaN does not count.
__device__ __forceinline__ unsigned largest(const Chunk<__nv_bfloat16>& chunk) {
  __nv_bfloat162 most{};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    most = __hmax2(most, __habs2(reinterpret_cast<const __nv_bfloat162&>(chunk.word[i])));
  }
  return uint32_t(__bfloat16_as_ushort(__hmax(most.x, most.y))) << 16;
}
__device__ __forceinline__ unsigned largest(const Chunk<__half>& chunk) {
  __half2 most{};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    most = __hmax2(most, __habs2(reinterpret_cast<const __half2&>(chunk.word[i])));
  }
  return __float_as_uint(__half2float(__hmax(most.x, most.y)));
}
__device__ __forceinline__ unsigned largest(const Chunk<float>& chunk) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) most = fmaxf(most, fabsf(__uint_as_float(chunk.word[i])));
  return __float_as_uint(most);
}

// The same of what is finite. Out of line as rare_codes is.
template <class T>
__device__ __noinline__ unsigned largest_finite(Chunk<T> chunk) {
  unsigned amax = 0;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 x = pair(chunk, i);
    if (fabsf(x.x) < INFINITY) amax = max(amax, __float_as_uint(fabsf(x.x)));
    if (fabsf(x.y) < INFINITY) amax = max(amax, __float_as_uint(fabsf(x.y)));
  }
  return amax;
}

// Of each chunk what is the largest of its finite magnitudes.
template <class T, int kCount>
__device__ __forceinline__ void amax_of(const Chunk<T> (&chunks)[kCount], unsigned (&amax)[kCount]) {
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) most = max(most, amax[i] = largest(chunks[i]));
  if (most < kInf) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax[i] = largest_finite(chunks[i]);
}
template <class T, int kCount>
__device__ __forceinline__ unsigned amax_of(const Chunk<T> (&chunks)[kCount]) {
  unsigned of_chunk[kCount], amax = 0;
  amax_of(chunks, of_chunk);
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = max(amax, of_chunk[i]);
  return amax;
}

// Reductions over the threads of a row: one warp, or all warps of the block. Every thread gets the result.
template <class V, class F>
__device__ __forceinline__ V over_row(V value, F over_warp) {
  value = over_warp(value);
  if (blockDim.x == 32) return value;
  __shared__ V of_warp[32];
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  return over_warp(lane < blockDim.x / 32 ? of_warp[lane] : V(0));
}

__device__ __forceinline__ float sum_of_row(float value) {
  return over_row(value, [](float sum) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    return sum;
  });
}
__device__ __forceinline__ unsigned max_of_row(unsigned value) {
  return over_row(value, [](unsigned most) { return __reduce_max_sync(~0u, most); });
}

// What a kernel writes besides the values, if those are written.
enum class Write : int32_t { kNoCodes, kCodes, kCodesOfRow, kCodesOfGroups };  // kCodes: of scales that there are

// Whether something is reduced over a row, which so belongs to one block.
template <bool kNorm, Write kWrite>
constexpr bool is_whole_row = kNorm || kWrite == Write::kCodesOfRow;

// The most threads that Cut takes for so many chunks a thread, and the blocks that a multiprocessor is to hold of them:
// 1024 threads with 64 registers where 4 chunks are held, which is enough for their loads to hide each other's latency,
// and 1536 with 40 where little is held besides them. kLittle: nothing is computed before there are codes.
template <int kChunks, bool kLittle>
struct Bounds {
  static constexpr int kThreads = kChunks == 0 ? 1024 : kChunks == 1 ? 256 : kChunks == 2 ? 128 : 512;
  static constexpr int kWanted = kLittle ? 1536 : kChunks == 1 ? 1280 : 1024;
  static constexpr int kBlocks = kChunks == 8 ? 1 : kWanted / kThreads;
};

// Of a row of `size`; gridDim.x blocks share it where nothing is reduced over all of it. A block has blockDim.y rows if
// one warp is enough for a row. chunks: of a thread. kChunks: the same, of whole ones that are loads and stores of 16
// bytes everywhere; 0: any row and any weight (FP32's are too many registers), since a row is not held but loaded again
// for each step. kFull: no thread has fewer. For the same cut all give the same bits.
template <class T, class Source, bool kNorm, Write kWrite, int kChunks, bool kFull>
__global__ void __launch_bounds__(Bounds<kChunks, !kNorm && std::is_same_v<Source, Plain<T>>>::kThreads,
                                  Bounds<kChunks, !kNorm && std::is_same_v<Source, Plain<T>>>::kBlocks)
    row_kernel(const __grid_constant__ Source source, uint32_t rows, int64_t size, int chunks,
               const __grid_constant__ Norm norm, RowsOf<T> out, const __grid_constant__ Quantization to) {
  const uint32_t row = (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // whole warps, and no block that has them reduces over more than a warp
  constexpr bool kWhole = kChunks > 0;
  constexpr int kHeld = kChunks ? kChunks : 1;
  // A row that is held by one block has at most 32768 values.
  using Column = std::conditional_t<kWhole && is_whole_row<kNorm, kWrite>, int, int64_t>;
  if (kChunks) chunks = kChunks;
  Column begin = Column(threadIdx.x / 32) * (chunks * kOfWarp) + threadIdx.x % 32 * kChunk;
  if constexpr (sizeof(Column) == 8) begin += int64_t(blockIdx.x) * blockDim.x * chunks * kChunk;

  // Calls f(column, how many values there are from there on) for the chunks that are held at a time.
  Chunk<T> held[kHeld];
  const auto each = [&](auto f) {
    for (int i = 0; i < chunks; i += kHeld) {
      const Column column = begin + i * kOfWarp;
      // Of a long row less than there are: twice as many, which interleaved gates take, must be an int too.
      f(column, sizeof(Column) == 4 ? int(size) - int(column) : int(min(size - column, int64_t(1) << 29)));
    }
  };
  const auto for_held = [&](int n, auto f) {  // f(i, where chunk i is after the first, how many values it has)
#pragma unroll
    for (int i = 0; i < kHeld; ++i) f(i, i * kOfWarp, kFull ? kChunk : n - i * kOfWarp);
  };

  constexpr bool kEarlyWeight = kNorm && kChunks && kChunks <= 4;  // 16 registers
  Chunk<T> weight[kEarlyWeight ? kHeld : 1];
  const auto first = [&](Column column, int n) {
    typename Source::Loaded loaded[kHeld];
    for_held(n, [&](int i, int after, int m) { loaded[i] = source.template load<kWhole>(row, column, after, m); });
    if constexpr (kEarlyWeight) {
      if (norm.dtype == dtype_of<T>) {
        for_held(n, [&](int i, int after, int m) { weight[i] = norm.template load<kWhole, T>(column, after, m); });
      }
    }
    // Not before: the next kernel's blocks would take the turns of these loads (64 rows of 4096: 3.7 us, and not 1.8).
    launch_next_kernel();
    source.make(loaded, held);
    for_held(n, [&](int i, int after, int m) { source.template keep<kWhole>(held[i], row, column, after, m); });
  };
  float rstd = 1.f;
  const auto normalize = [&](Column column, int n) {
    if (norm.dtype == CUTEGEMM_NONE) {
      for_held(n, [&](int i, int, int) { norm.scale(held[i], rstd); });
    } else if (norm.dtype == dtype_of<T>) {
      const auto scale = [&](auto offset) {
        for_held(n, [&](int i, int after, int m) {
          if constexpr (kEarlyWeight) {
            norm.scale<decltype(offset)::value>(held[i], rstd, weight[i]);
          } else {
            norm.scale<decltype(offset)::value>(held[i], rstd, norm.template load<kWhole, T>(column, after, m));
          }
        });
      };
      norm.offset == 0.f ? scale(std::false_type()) : scale(std::true_type());
    } else if constexpr (kChunks == 0) {
      norm.scale<true>(held[0], rstd, norm.template load<false, float>(column, 0, n));
    }
  };
  const auto again = [&](Column column, int n) {
    if constexpr (kChunks == 0) {
      held[0] = source.again(row, column, n);
      if constexpr (kNorm) normalize(column, n);
    }
  };

  wait_for_previous_kernel();
  float scale = 0.f;
  unsigned amax = 0;
  if constexpr (kWrite == Write::kCodes) {  // loaded before the row is
    if (to.scales == Scales::kGiven) {
      scale = to.given[int64_t(row) * to.given_stride[0]];
    } else {
      for (int i = threadIdx.x; i < to.amax_count; i += blockDim.x) amax = max(amax, to.amax[i]);
    }
  }
  if constexpr (kNorm) {
    float2 squares{};
    each([&](Column column, int n) {
      first(column, n);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int j = 0; j < kChunk / 2; ++j) {
          const float2 x = pair(held[i], j);
          squares.x += x.x * x.x, squares.y += x.y * x.y;
        }
      }
    });
    rstd = rsqrtf(sum_of_row(squares.x + squares.y) * norm.one_over_size + norm.eps);
    if constexpr (kChunks) each(normalize);
  } else if constexpr (kChunks) {
    each(first);
  }

  if constexpr (kWrite == Write::kCodesOfRow) {
    each([&](Column column, int n) {
      again(column, n);
      amax = max(amax, amax_of(held));
    });
  }
  constexpr bool kOneScale = kWrite == Write::kCodes || kWrite == Write::kCodesOfRow;
  if constexpr (kOneScale) {
    if (kWrite == Write::kCodesOfRow || to.scales == Scales::kOfTensor) scale = to.scale_of(max_of_row(amax));
    if (begin == 0 && (kWrite == Write::kCodesOfRow || to.stride[0] != 0 || row == 0)) {
      to.scale[int64_t(row) * to.stride[0]] = scale;
    }
  }

  each([&](Column column, int n) {
    again(column, n);
    if (kWrite == Write::kNoCodes || out.data) {
      for_held(
          n, [&](int i, int after, int m) { store_chunk<kWhole>(out.at(row, column) + after, held[i], m, out.wide); });
    }
    uint8_t* const q = to.q + int64_t(row) * to.q_stride + column;
    const auto write = [&](auto code) {
      for_held(n, [&](int i, int after, int m) { store_chunk<kWhole>(q + after, code(i), m, to.q_wide); });
    };
    if constexpr (kOneScale) {
      if (are_common({scale}, to.int8)) {
        const CommonDivisor<T> divide(scale);
        write([&](int i) { return codes<__nv_fp8_e4m3>(held[i], divide); });
      } else {
        write([&](int i) { return rare_codes(held[i], scale, to.int8); });
      }
    } else if constexpr (kWrite == Write::kCodesOfGroups) {
      unsigned amax[kHeld];
      amax_of(held, amax);
      if (to.group_shift == 7) {
        for_held(n, [&](int i, int, int) { amax[i] = max(amax[i], __shfl_xor_sync(~0u, amax[i], 8)); });
      }
#pragma unroll
      for (int lanes = 4; lanes > 0; lanes /= 2) {
        for_held(n, [&](int i, int, int) { amax[i] = max(amax[i], __shfl_xor_sync(~0u, amax[i], lanes)); });
      }
      float scales[kHeld];
      for_held(n, [&](int i, int, int) { scales[i] = to.scale_of(amax[i]); });
      // Of chunk 0; those of the others are `next` apart.
      const auto of_group = [&](auto* data, const int64_t (&stride)[2]) {
        return data + int64_t(row) * stride[0] + (column >> to.group_shift) * stride[1];
      };
      if (to.scales == Scales::kGiven) {
        const float* const given = of_group(to.given, to.given_stride);
        const int64_t next = (kOfWarp >> to.group_shift) * to.given_stride[1];
        for_held(n, [&](int i, int, int m) {
          if (m > 0) scales[i] = given[i * next];
        });
      }
      if (threadIdx.x % (1u << to.group_shift >> 3) == 0) {
        float* const scale = of_group(to.scale, to.stride);
        const int64_t next = (kOfWarp >> to.group_shift) * to.stride[1];
        for_held(n, [&](int i, int, int m) {
          if (m > 0) scale[i * next] = scales[i];
        });
      }
      if (are_common(scales, false)) {
        write([&](int i) { return codes<__nv_fp8_e4m3>(held[i], CommonDivisor<T>(scales[i])); });
      } else {
        write([&](int i) { return rare_codes(held[i], scales[i], false); });
      }
    }
  });
}

// The cut of rows of `size`.
struct Cut {
  int threads, rows_a_block, chunks;
  int64_t parts;
  bool held;  // or it is too long

  Cut(int64_t rows, int64_t size, bool whole_row) : rows_a_block(1), parts(1), held(true) {
    const int64_t all = std::max<int64_t>(1, (size + kChunk - 1) / kChunk);
    int most;
    if (whole_row) {
      held = all <= 4096;
      chunks = all <= 128 ? 1 : all <= 256 ? 2 : all <= 2048 ? 4 : held ? 8 : int((all + 1023) / 1024);
      most = 1024;
    } else if (rows * size < 1 << 22) {
      chunks = 1, most = 256;  // to be spread over all multiprocessors
    } else {
      chunks = 2, most = 128;  // for less to be done for each of many
    }
    threads = int(std::min<int64_t>(most, ((all + chunks - 1) / chunks + 31) / 32 * 32));
    if (!whole_row) parts = (all + threads * chunks - 1) / (threads * chunks);
    if (threads == 32 && parts == 1) rows_a_block = 4;
  }
};

template <bool kNorm, class T, class Source>
void run_rows(const char* op, const Source& source, int64_t rows, int64_t size, const Norm& norm, const RowsOf<T>& out,
              const Quantization& to, cudaStream_t stream) {
  // The tensor's scale is there even where the tensor is empty.
  const bool one_scale = to.scales != Scales::kNone && to.group_shift == 0 && to.stride[0] == 0;
  if (rows == 0 && !one_scale) return;
  if (rows == 0) rows = 1, size = 0;
  const Cut cut(rows, size, kNorm || to.scales == Scales::kOfToken);
  const bool whole = size % kChunk == 0 && source.wide() && (!out.data || out.wide) &&
                     (to.scales == Scales::kNone || to.q_wide) &&
                     (norm.dtype == CUTEGEMM_NONE || (norm.wide && norm.dtype == dtype_of<T>));
  constexpr int64_t kMost = 65535;  // of a grid, in y and z
  const int64_t blocks = (rows + cut.rows_a_block - 1) / cut.rows_a_block, z = (blocks + kMost - 1) / kMost;
  const int64_t y = (blocks + z - 1) / z;
  CG_CHECK(z <= kMost && y * z * cut.rows_a_block < int64_t(1) << 32, op, ": x has ", rows,
           " rows, more than one launch takes");
  const auto run = [&](auto write, auto chunks, auto full) {
    launch(op, row_kernel<T, Source, kNorm, decltype(write)::value, decltype(chunks)::value, decltype(full)::value>,
           dim3(unsigned(cut.parts), unsigned(y), unsigned(z)), dim3(cut.threads, cut.rows_a_block), stream, source,
           uint32_t(rows), size, cut.chunks, norm, out, to);
  };
  const auto with_chunks = [&](auto write) {
    if constexpr (sizeof(T) == 2) {
      const int chunks = whole && cut.held ? cut.chunks : 0;
      if (chunks == 1) return run(write, std::integral_constant<int, 1>{}, std::false_type{});
      if (chunks == 2) return run(write, std::integral_constant<int, 2>{}, std::false_type{});
      if constexpr (is_whole_row<kNorm, decltype(write)::value>) {
        if (chunks == 4 && size % (4 * kOfWarp) == 0) {
          return run(write, std::integral_constant<int, 4>{}, std::true_type{});
        }
        if (chunks == 4) return run(write, std::integral_constant<int, 4>{}, std::false_type{});
        if (chunks == 8) return run(write, std::integral_constant<int, 8>{}, std::false_type{});
      }
    }
    run(write, std::integral_constant<int, 0>{}, std::false_type{});
  };
  if (to.group_shift) return with_chunks(std::integral_constant<Write, Write::kCodesOfGroups>{});
  if (to.scales == Scales::kOfToken) return with_chunks(std::integral_constant<Write, Write::kCodesOfRow>{});
  if (to.scales != Scales::kNone) return with_chunks(std::integral_constant<Write, Write::kCodes>{});
  if constexpr (kNorm || !std::is_same_v<Source, Plain<T>>) {  // which would be a copy
    with_chunks(std::integral_constant<Write, Write::kNoCodes>{});
  }
}

}  // namespace cutegemm
