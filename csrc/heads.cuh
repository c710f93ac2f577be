// Kernels over the heads of tokens: RMSNorm or none, a rotation or none, then back to where the head was or into a
// paged cache. rope.cu and kv_cache.cu have the ops.
//
// A head is cut into items of two chunks of 8 values, one item or two for each of the 1 to 32 lanes that have the head:
// first what is rotated, 8 pairs an item, then what is not. The two chunks of an item lie half of the rotated values
// apart, where all chunks are whole or the pairs are NEOX's (i, i + r / 2), and otherwise side by side, for GPT-J's
// (2 i, 2 i + 1). So no pair is shared by two threads.
//
// For many tokens all of it is to be bound by memory, and a thread has the same values of two heads, for which it takes
// angles and weights once. For few it is bound by what comes after one another, from the end of the kernel before to
// its own: what can be worked out is there before, everything is asked for at once, and the angles as soon as the
// position that finds them is there.
#pragma once
#include <numeric>

#include "rows.cuh"
#include "vector.cuh"

namespace cutegemm {

constexpr int kMostHeadSize = 1000;  // 64 items, wherever the rotated values lie
constexpr int kHeadThreads = 128, kMostHeadThreads = 256;
constexpr float kE5m2Max = 57344.f;
constexpr uint2 kNoIndex = {~0u, ~0u};  // -1

// To the compiler x may be anything from here on, so that it is worked out before what follows. Returns some of its
// bits.
template <class X>
__device__ __forceinline__ unsigned settled(X& x) {
  if constexpr (std::is_same_v<X, bool>) {
    unsigned word = x;
    x = settled(word) != 0;
    return word;
  } else if constexpr (std::is_same_v<X, float>) {
    asm volatile("" : "+f"(x));
    return __float_as_uint(x);
  } else if constexpr (sizeof(X) == 8) {
    auto bits = (uint64_t)x;
    asm volatile("" : "+l"(bits));
    x = (X)bits;
    return unsigned(bits);
  } else {
    static_assert(sizeof(X) == 4);
    asm volatile("" : "+r"(x));
    return unsigned(x);
  }
}

// p + n * stride, in one instruction where the bytes of a stride are less than 2^32.
template <class P>
__device__ __forceinline__ P* ahead(P* p, uint32_t n, int64_t stride) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  return reinterpret_cast<P*>(reinterpret_cast<Byte*>(p) + uint64_t(n) * uint32_t(stride * sizeof(P)));
}

// The heads of tokens in memory. wide: all of them start at a multiple of a chunk's alignment.
template <class T>
struct HeadsOf {
  T* data;
  int64_t token_stride, head_stride;
  int32_t heads, size;
  bool wide;
};

// Positions or slots, int32 or int64. `load` asks for one and `value` looks at what has come: a kernel first asks for
// all that it needs.
struct Indices {
  const void* data;
  bool is_long;

  __device__ __forceinline__ const char* at(int64_t i) const {
    return static_cast<const char*>(data) + (is_long ? 8 * i : 4 * i);
  }
  __device__ __forceinline__ uint2 load(const char* at) const {
    uint2 word = kNoIndex;
    if (is_long) {
      word = *reinterpret_cast<const uint2*>(at);
    } else {
      word.x = *reinterpret_cast<const uint32_t*>(at);
    }
    return word;
  }
  __device__ __forceinline__ uint2 load(int64_t i) const { return load(at(i)); }
  __device__ __forceinline__ int64_t value(uint2 word) const {
    return is_long ? int64_t(uint64_t(word.y) << 32 | word.x) : int64_t(int32_t(word.x));
  }
};

// The angles. Pair i of a token is rotated by the table's row of its position, whose first half has the cosines and
// whose second half has the sines; M-RoPE has three rows of positions, and sections of pairs that take each.
struct Rotation {
  const void* table;  // null: nothing is rotated
  Indices positions;
  int64_t table_stride, length, position_stride;  // the last is of M-RoPE's rows
  int32_t dtype;                                  // of the table
  int32_t offset, pairs;                          // the first rotated value, and how many pairs
  int32_t section_end[2];                         // of pairs; the first is at least `pairs` where there is one row
  bool neox, wide;
  float sign;  // of the angle
};

struct HeadNorm {
  const void* weight[2];  // of q, of k; null: 1
  int32_t dtype[2];
  bool wide[2];
  int32_t size;
  float eps, offset, one_over_size;
};

struct Slots {
  Indices given;
  int64_t count, end;  // of slots that are given, and of those that a cache has
  uint32_t block_size;
  int32_t block_shift;  // of a block_size that is a power of two; negative of others
};

// Where a slot is. Not valid: it is negative, or the cache does not reach so far.
struct Slot {
  bool valid;
  uint32_t block, of_block;

  __device__ __forceinline__ Slot(const Slots& slots, uint2 word) {
    const int64_t slot = slots.given.value(word);
    valid = uint64_t(slot) < uint64_t(slots.end);
    if (slots.block_shift >= 0) {  // a division has some 35 instructions, each of which waits for the one before
      block = uint32_t(slot) >> slots.block_shift, of_block = uint32_t(slot) & (slots.block_size - 1);
    } else {
      block = uint32_t(slot) / slots.block_size, of_block = uint32_t(slot) % slots.block_size;
    }
  }
};

// A paged cache of keys or of values. Value d of a head is at (d >> run_shift) * run_stride + d % (1 << run_shift):
// runs are of 16 bytes in v1's keys and of one value in its values. Where a head is contiguous, run_stride is 0.
struct CacheOf {
  void* data;
  int64_t block_stride, token_stride, head_stride, run_stride;
  int32_t run_shift;
  bool wide;
  const float* scale;  // of the tensor or of a head: FP8 is value / scale
  int32_t scale_stride;
  float* scale_cache;  // takes the scale of each token and head, which is computed; or null
  int64_t scale_strides[3];

  __device__ __forceinline__ int64_t at(int d) const {
    return run_stride == 0 ? d : (d >> run_shift) * run_stride + (d & ((1 << run_shift) - 1));
  }
  __host__ __device__ __forceinline__ bool lies_apart() const { return run_stride != 0 && run_shift == 0; }
  __device__ __forceinline__ float given_scale(int head) const { return scale ? scale[head * scale_stride] : 1.f; }
  __device__ __forceinline__ float* scale_at(const Slot& slot, int head) const {
    return scale_cache + slot.block * scale_strides[0] + slot.of_block * scale_strides[1] + head * scale_strides[2];
  }
  template <class C>
  __device__ __forceinline__ C* head_at(const Slot& slot, int head) const {
    return static_cast<C*>(data) + slot.block * block_stride + slot.of_block * token_stride + head * head_stride;
  }
};

enum class Into : int32_t { kPlace, kCache, kFp8Cache };

// Where an item's two chunks begin, and how many values they have.
struct Item {
  int begin[2], n[2];
  bool rotated;

  __device__ __forceinline__ Item(int t, int size, int offset, int pairs, bool neox) {
    const int of_rotated = (pairs + kChunk - 1) / kChunk;
    rotated = t < of_rotated;
    if (rotated) {
      const int first = neox ? kChunk * t : 2 * kChunk * t, left = (neox ? pairs : 2 * pairs) - first;
      begin[0] = offset + first, begin[1] = begin[0] + (neox ? pairs : kChunk);
      n[0] = min(left, kChunk), n[1] = min(neox ? left : left - kChunk, kChunk);
      return;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // the chunks before what is rotated, then those after
      const int s = 2 * (t - of_rotated) + j, before = (offset + kChunk - 1) / kChunk;
      const int end = s < before ? offset : size;
      begin[j] = s < before ? s * kChunk : offset + 2 * pairs + (s - before) * kChunk;
      n[j] = min(end - begin[j], kChunk);
    }
  }
};

inline int items_of(int size, int offset, int pairs) {
  const int rest = (offset + kChunk - 1) / kChunk + (size - offset - 2 * pairs + kChunk - 1) / kChunk;
  return (pairs + kChunk - 1) / kChunk + (rest + 1) / 2;
}

// cos and sin of an item's 8 pairs, with the sign of the angle.
struct Angles {
  float cosine[kChunk], sine[kChunk];
  unsigned known = 0;  // a bit for each pair that has a position in the table

  // One by one, by a position for each pair.
  template <class W>
  __device__ __forceinline__ void load(const Rotation& r, uint32_t token, int first) {
    const auto* const table = static_cast<const W*>(r.table);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int at = first + i;
      if (at >= r.pairs) continue;
      const int row = at < r.section_end[0] ? 0 : at < r.section_end[1] ? 1 : 2;
      const int64_t position = r.positions.value(r.positions.load(row * r.position_stride + token));
      if (position < 0 || position >= r.length) continue;
      const W* const from = table + position * r.table_stride + at;
      cosine[i] = float(from[0]), sine[i] = r.sign * float(from[r.pairs]);
      known |= 1u << i;
    }
  }
};

// The same of a whole item as they are loaded, for one position: four of the chunk with the first values of NEOX's
// pairs, or of the first of GPT-J's chunks, and four after these or of the second.
struct LoadedAngles {
  const char* from;                  // the first cosine of position 0
  uint32_t second, to_sines, a_row;  // bytes
  uint4 word[4];                     // cos, cos, sin, sin; of a table in 16 bits the first two words of each

  __device__ __forceinline__ void find(const Rotation& r, uint32_t first) {
    const uint32_t size = r.dtype == CUTEGEMM_FP32 ? 4 : 2;
    from = static_cast<const char*>(r.table) + size * (r.neox ? first : first / 2);
    second = size * (r.neox ? 4 : r.pairs / 2), to_sines = size * r.pairs, a_row = size * uint32_t(r.table_stride);
  }

  template <class W>
  __device__ __forceinline__ void load(uint32_t position) {
    const char* const row = from + uint64_t(position) * a_row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* const at = row + (i % 2 * second + (i < 2 ? 0 : to_sines));
      if constexpr (sizeof(W) == 4) {
        word[i] = *reinterpret_cast<const uint4*>(at);
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(at);
        word[i].x = two.x, word[i].y = two.y;
      }
    }
  }

  template <class W>
  __device__ __forceinline__ Angles as(float sign) const {
    Angles angles;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const to = (i < 2 ? angles.cosine : angles.sine) + i % 2 * 4;
      if constexpr (sizeof(W) == 4) {
        to[0] = __uint_as_float(word[i].x), to[1] = __uint_as_float(word[i].y);
        to[2] = __uint_as_float(word[i].z), to[3] = __uint_as_float(word[i].w);
      } else {
        const Chunk<W> chunk = {{word[i].x, word[i].y}};
        const float2 a = pair(chunk, 0), b = pair(chunk, 1);
        to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) angles.sine[i] *= sign;
    return angles;
  }
};

// kAll: all pairs have angles. The order of the roundings is the same in every kernel.
template <bool kAll, class T>
__device__ __forceinline__ void rotate(Chunk<T> (&x)[2], const Angles& angles, bool neox) {
  const auto turn = [&](float& a, float& b, int i) {
    if (!kAll && (angles.known >> i & 1) == 0) return;
    const float c = angles.cosine[i], s = angles.sine[i];
    const float turned = __fmaf_rn(a, c, -__fmul_rn(b, s));
    b = __fmaf_rn(b, c, __fmul_rn(a, s));
    a = turned;
  };
  const auto over_pairs = [&](auto turn_two) {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      float2 a = pair(x[0], i), b = pair(x[1], i);
      turn_two(a, b, i);
      set_pair(x[0], i, a), set_pair(x[1], i, b);
    }
  };
  if (neox) {
    over_pairs([&](float2& a, float2& b, int i) { turn(a.x, b.x, 2 * i), turn(a.y, b.y, 2 * i + 1); });
  } else {
    over_pairs([&](float2& a, float2& b, int i) { turn(a.x, a.y, i), turn(b.x, b.y, kChunk / 2 + i); });
  }
}

// Into the L2: the 32 bytes with p, or n values from p on but what is less than 16 bytes on each side.
__device__ __forceinline__ void prefetch_sector(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
template <class C>
__device__ __forceinline__ void prefetch_values(const C* p, uint32_t n) {
#if __CUDA_ARCH__ >= 900
  const uint64_t begin = (reinterpret_cast<uint64_t>(p) + 15) & ~uint64_t(15);
  const uint64_t end = reinterpret_cast<uint64_t>(p + n) & ~uint64_t(15);
  if (begin < end) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(uint32_t(end - begin)));
#endif
}

// Value i of a chunk.
template <class C>
__device__ __forceinline__ void store_value(C* to, const Chunk<C>& chunk, int i) {
  if constexpr (sizeof(C) == 4) *reinterpret_cast<uint32_t*>(to) = chunk.word[i];
  if constexpr (sizeof(C) == 2) *reinterpret_cast<uint16_t*>(to) = uint16_t(chunk.word[i / 2] >> i % 2 * 16);
  if constexpr (sizeof(C) == 1) *reinterpret_cast<uint8_t*>(to) = uint8_t(chunk.word[i / 4] >> i % 4 * 8);
}
template <class C>
__device__ __forceinline__ void store_apart(C* to, int64_t stride, const Chunk<C>& chunk) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) store_value(to + i * stride, chunk, i);
}

// A chunk of what a cache holds, into it. The head is contiguous, or its runs have whole chunks, or values lie apart.
template <class C>
__device__ __forceinline__ void store_cached(C* head, const CacheOf& cache, const Chunk<C>& chunk, int begin, int n,
                                             bool wide) {
  if (cache.run_stride == 0 || (wide && n >= kChunk && 1 << cache.run_shift >= kChunk)) {
    store_chunk<false>(head + cache.at(begin), chunk, n, wide);
  } else if (cache.lies_apart() && n >= kChunk) {
    store_apart(head + begin * cache.run_stride, cache.run_stride, chunk);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < n) store_value(head + cache.at(begin + i), chunk, i);
    }
  }
}

template <class T>
struct HeadsCall {
  HeadsOf<T> source[3];  // of q, k, v; those without data are left out
  uint32_t tokens, cached_tokens;
  int32_t groups[3];  // of heads, of which a thread has one each; its heads are as many apart
  int32_t lane_shift, items;
  HeadNorm norm;
  Rotation rotation;
  Slots slots;
  CacheOf cache[2];  // of k, of v
  bool e5m2, computes_scales;
  bool prefetches;  // sectors that are only written in part: else they are read, one by one, when they leave the L2
  bool halves;      // all heads that are normed are two equal halves of 8, 16, 32 .. values, which items take

  // In the order in which rms_norm adds: chunk c of a head, and pairs of chunks that differ in one bit of c, first 16,
  // then 8, 4, 2 and 1, then 64 and 32. Sum i is of chunk lane + i * lanes; or of chunk i of an item whose chunks lie
  // half a head apart, so that the lane is bits of c, too.
  template <int kHeads, int kSums>
  __device__ __forceinline__ static void rstd_of(const HeadNorm& norm, int lanes, float (&sums)[kHeads][kSums],
                                                 float (&rstd)[kHeads]) {
    const bool short_heads = norm.size <= 32 * kChunk;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (short_heads) sums[h][0] += sums[h][1], sums[h][1] = 0.f;
    }
    for (int i = lanes >> 1; i > 0; i >>= 1) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sums[h][0] += __shfl_xor_sync(~0u, sums[h][0], i);
      if constexpr (kHeads == 1) {
        if (short_heads) continue;
#pragma unroll
        for (int j = 1; j < kSums; ++j) sums[0][j] += __shfl_xor_sync(~0u, sums[0][j], i);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float squares = sums[h][0];
      if (kHeads == 1)
        squares = kSums == 4 ? (sums[h][0] + sums[h][2]) + (sums[h][1] + sums[h][3]) : squares + sums[h][1];
      rstd[h] = rsqrtf(squares * norm.one_over_size + norm.eps);
    }
  }

  __device__ __forceinline__ unsigned over_lanes(unsigned amax) const {
    for (int i = 1 << lane_shift >> 1; i > 0; i >>= 1) amax = max(amax, __shfl_xor_sync(~0u, amax, i));
    return amax;
  }

  __device__ __forceinline__ float scale_of(unsigned amax) const {
    Quantization to{};
    to.largest = e5m2 ? kE5m2Max : kE4m3Max;
    to.reciprocal = e5m2 ? 1.f / kE5m2Max : 1.f / kE4m3Max;
    return to.scale_of(amax);
  }
};

template <class T>
__device__ __noinline__ Chunk<uint8_t> rare_fp8_codes(Chunk<T> chunk, float scale, bool e5m2) {
  if (!e5m2) return codes<__nv_fp8_e4m3>(chunk, AnyDivisor(scale));
  return is_usual(scale) ? codes<__nv_fp8_e5m2>(chunk, Divisor(scale)) : codes<__nv_fp8_e5m2>(chunk, AnyDivisor(scale));
}
// Calls f with a function that makes codes of chunks. Those in e4m3 with a common scale are made in line.
template <class T, class F>
__device__ __forceinline__ void with_fp8_codes(float scale, const CommonDivisor<T>& divide, bool e5m2, F f) {
  if (is_usual(scale) && !e5m2) {
    f([&](const Chunk<T>& chunk) { return codes<__nv_fp8_e4m3>(chunk, divide); });
  } else {
    f([&](const Chunk<T>& chunk) { return rare_fp8_codes(chunk, scale, e5m2); });
  }
}

template <class T>
__device__ __forceinline__ float sum_of_squares(const Chunk<T>& chunk) {
  float2 squares{};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 value = pair(chunk, i);
    squares.x += value.x * value.x, squares.y += value.y * value.y;
  }
  return squares.x + squares.y;
}

// Weights of a chunk are from the function that load is called with: of T or of float.
template <class T, int kHeads, class F>
__device__ __forceinline__ void norm_chunks(Chunk<T>* const (&chunks)[kHeads], const float (&rstd)[kHeads],
                                            int32_t dtype, float offset, F load) {
  float2 weight[kChunk / 2];
  const auto take = [&](const auto& chunk) {
#pragma unroll
    for (int c = 0; c < kChunk / 2; ++c) weight[c] = pair(chunk, c);
  };
  if (dtype == dtype_of<T>) {
    take(load(T()));
  } else if (dtype == CUTEGEMM_FP32) {
    take(load(float()));
  } else {
#pragma unroll
    for (int c = 0; c < kChunk / 2; ++c) weight[c] = {1.f, 1.f};
  }
  if (offset != 0.f && dtype != CUTEGEMM_NONE) {
#pragma unroll
    for (int c = 0; c < kChunk / 2; ++c) weight[c].x += offset, weight[c].y += offset;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int c = 0; c < kChunk / 2; ++c) {
      const float2 value = pair(*chunks[h], c);
      set_pair(*chunks[h], c, {value.x * rstd[h] * weight[c].x, value.y * rstd[h] * weight[c].y});
    }
  }
}

// Whose head a group of lanes has, of all heads of a token: q's, then k's, then v's. v is neither normed nor rotated; q
// goes back to its place, and so does k if there is no cache.
template <class T>
struct Place {
  int lane, kind, head;
  uint32_t token;
  bool cached, exists;  // where not, threads stay for the shuffles

  __device__ __forceinline__ Place(const HeadsCall<T>& call, bool has_cache) {
    lane = threadIdx.x & ((1 << call.lane_shift) - 1);
    head = (blockIdx.y * blockDim.x + threadIdx.x) >> call.lane_shift;
    token = blockIdx.x * blockDim.y + threadIdx.y;
    const int before_k = call.groups[0], before_v = before_k + call.groups[1];
    kind = (head >= before_k) + (head >= before_v);
    head -= kind == 0 ? 0 : kind == 1 ? before_k : before_v;
    cached = has_cache && kind > 0;
    exists = head < call.groups[kind] && token < (cached ? call.cached_tokens : call.tokens);
  }
};

// A head of any size, dtype and alignment.
template <class T, bool kNorm, Into kInto, int kItems>
__global__ void __launch_bounds__(kHeadThreads) heads_kernel(const __grid_constant__ HeadsCall<T> call) {
  const Place<T> place(call, kInto != Into::kPlace);
  const int kind = place.kind, lanes = 1 << call.lane_shift;
  const HeadsOf<T>& from = call.source[kind];
  const Rotation& rotation = call.rotation;
  const bool exists = place.exists, cached = place.cached;
  T* const data = from.data + int64_t(place.token) * from.token_stride + int64_t(place.head) * from.head_stride;
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int t = place.lane + i * lanes;
      f(kind < 2 ? Item(t, from.size, rotation.offset, rotation.pairs, rotation.neox) : Item(t, from.size, 0, 0, true),
        i, t);
    }
  };
  const auto is_wide = [](bool wide, const Item& item, int j) { return wide && item.begin[j] % kChunk == 0; };
  wait_for_previous_kernel();

  const uint2 given_slot = cached && exists ? call.slots.given.load(place.token) : kNoIndex;
  Chunk<T> x[kItems][2];
  each([&](const Item& item, int i, int) {
    const bool needed = exists && (kNorm || cached || item.rotated);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[i][j] = load_chunk<false>(data + item.begin[j], needed ? item.n[j] : 0, is_wide(from.wide, item, j));
    }
  });
  launch_next_kernel();

  if constexpr (kNorm) {
    float sums[1][2 * kItems], rstd[1];
#pragma unroll
    for (int i = 0; i < 2 * kItems; ++i) {
      const int begin = (place.lane + i * lanes) * kChunk, n = min(from.size - begin, kChunk);
      sums[0][i] =
          sum_of_squares(call.halves ? x[i / 2][i % 2] : load_chunk<false>(data + begin, exists ? n : 0, from.wide));
    }
    call.rstd_of(call.norm, lanes, sums, rstd);
    if (kind < 2) {
      each([&](const Item& item, int i, int) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool wide = is_wide(call.norm.wide[kind], item, j);
          norm_chunks({&x[i][j]}, rstd, call.norm.dtype[kind], call.norm.offset, [&](auto w) {
            const auto* const weight = static_cast<const decltype(w)*>(call.norm.weight[kind]);
            return load_chunk<false>(weight + item.begin[j], exists ? item.n[j] : 0, wide);
          });
        }
      });
    }
  }

  if (rotation.table && exists && kind < 2) {
    each([&](const Item& item, int i, int t) {
      if (!item.rotated) return;
      Angles angles;
      if (rotation.dtype == CUTEGEMM_FP32) {
        angles.load<float>(rotation, place.token, t * kChunk);
      } else {
        angles.load<T>(rotation, place.token, t * kChunk);
      }
      rotate<false>(x[i], angles, rotation.neox);
    });
  }

  unsigned amax = 0;
  if (kInto == Into::kFp8Cache && call.computes_scales) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) amax = max(amax, amax_of(x[i]));
    amax = call.over_lanes(amax);
  }
  if (!cached && exists) {
    each([&](const Item& item, int i, int) {
      if (!kNorm && !item.rotated) return;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        store_chunk<false>(data + item.begin[j], x[i][j], item.n[j], is_wide(from.wide, item, j));
      }
    });
  }
  if constexpr (kInto != Into::kPlace) {
    const Slot slot(call.slots, given_slot);
    if (!cached || !slot.valid) return;
    using C = std::conditional_t<kInto == Into::kCache, T, uint8_t>;
    const CacheOf& cache = call.cache[kind == 2];
    C* const to = cache.head_at<C>(slot, place.head);
    const auto write = [&](auto code) {
      each([&](const Item& item, int i, int) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          store_cached(to, cache, code(x[i][j]), item.begin[j], item.n[j], is_wide(cache.wide, item, j));
        }
      });
    };
    if constexpr (kInto == Into::kCache) {
      write([](const Chunk<T>& chunk) { return chunk; });
    } else {
      const float scale = cache.scale_cache ? call.scale_of(amax) : cache.given_scale(place.head);
      with_fp8_codes<T>(scale, CommonDivisor<T>(scale), call.e5m2, write);
      if (cache.scale_cache && place.lane == 0) *cache.scale_at(slot, place.head) = scale;
    }
  }
}

enum class Work : int32_t { kNone, kTurn, kNormAndTurn };

// The same where all heads are of one size, whole aligned chunks of which pairs are, and no stride but that of blocks
// is long: so a lane has one item, which is cut in halves for GPT-J, too. A thread has one head, and asks for all it
// needs at once. Or, where there are many, it has two that lie `groups` apart, and uses what they share for both.
template <class T, Work kWork, Into kInto, int kHeads>
__global__ void __launch_bounds__(kHeads == 1 ? kHeadThreads : kMostHeadThreads, kHeads == 1 ? 5 : 4)
    whole_heads_kernel(const __grid_constant__ HeadsCall<T> call) {
  constexpr bool kTurn = kWork != Work::kNone, kNorm = kWork == Work::kNormAndTurn;
  constexpr bool kCached = kInto != Into::kPlace, kFp8 = kInto == Into::kFp8Cache, kAtOnce = kHeads == 1;
  using C = std::conditional_t<kFp8, uint8_t, T>;
  // All addresses and constants of a thread with one head, which are half of its instructions, are there before it
  // waits for the kernel before: it does so under a condition, always true, of all that is kept.
  unsigned kept = call.tokens;
  const auto keep = [&](auto&... x) {
    if constexpr (kAtOnce) ((kept |= settled(x)), ...);
  };

  const Place<T> place(call, kCached);
  const int kind = place.kind;
  const HeadsOf<T>& from = call.source[kind];
  Rotation rotation = call.rotation;
  bool cached = place.cached, exists = place.exists && place.lane < call.items;
  const int rest = place.lane - (rotation.pairs >> 3);  // from 0 on for what is not rotated
  uint32_t begin[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = (2 * rest + j) * kChunk;
    begin[j] = rest < 0 ? rotation.offset + kChunk * place.lane + j * rotation.pairs
                        : at + (at < rotation.offset ? 0 : 2 * rotation.pairs);
    if (place.lane >= call.items) begin[j] = 0;
  }
  const auto head = [&](int h) { return place.head + h * call.groups[kind]; };
  T* data = ahead(from.data, place.token, from.token_stride);
  uint32_t in_row[kHeads][2];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int j = 0; j < 2; ++j) in_row[h][j] = uint32_t(head(h)) * uint32_t(from.head_stride) + begin[j];
  }
  keep(data, in_row[0][0], in_row[0][1], begin[0], begin[1], cached, exists);

  const char* position_at = rotation.positions.at(place.token);
  LoadedAngles loaded;
  const auto find_angles = [&] { loaded.find(rotation, kChunk * place.lane); };
  if (kTurn && kAtOnce) {
    find_angles();
    keep(position_at, loaded.from, loaded.second, loaded.to_sines, loaded.a_row);
    keep(rotation.dtype, rotation.neox, rotation.length, rotation.sign);
  }

  HeadNorm norm = call.norm;
  int32_t lanes = 1 << call.lane_shift, weight_dtype = kind < 2 ? call.norm.dtype[kind] : CUTEGEMM_NONE;
  bool halves = call.halves;
  const T* weight_at = nullptr;
  if (kNorm && kAtOnce) {
    if (kind < 2) weight_at = static_cast<const T*>(call.norm.weight[kind]);
    keep(weight_at, weight_dtype, lanes, halves, norm.size, norm.one_over_size, norm.eps, norm.offset);
  }

  const CacheOf& cache = call.cache[kind == 2];
  Slots slots = call.slots;
  const char* slot_at = slots.given.at(place.token);
  const float* scale_at = nullptr;
  bool e5m2 = call.e5m2, computes_scales = call.computes_scales;
  C* to;  // the head in block 0, then where its slot is
  uint32_t in_head[2], block_stride, token_stride, apart;
  const auto find_cache = [&] {
    if (kFp8 && cache.scale) scale_at = cache.scale + place.head * cache.scale_stride;
    to = static_cast<C*>(cache.data) + uint32_t(place.head) * uint32_t(cache.head_stride);
    block_stride = uint32_t(cache.block_stride), token_stride = uint32_t(cache.token_stride);
    apart = cache.lies_apart() ? uint32_t(cache.run_stride) : 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) in_head[j] = uint32_t(cache.at(begin[j]));
  };
  if (kCached && kAtOnce) {
    find_cache();
    keep(slot_at, slots.end, slots.block_size, slots.block_shift);
    keep(to, in_head[0], in_head[1], block_stride, token_stride, apart);
    if (kFp8) keep(scale_at, e5m2, computes_scales);
  }
  if (!kAtOnce || kept != 0) wait_for_previous_kernel();
  // Before the loads: the few blocks of the next kernel take little from them, and have their addresses earlier (RoPE
  // of 64 tokens: 1.7 us, and not 2.1).
  if (kAtOnce) launch_next_kernel();

  uint2 given_position = kNoIndex, given_slot = kNoIndex;
  [[maybe_unused]] float scale = 1.f;
  if (kTurn && rest < 0 && exists && kind < 2 && rotation.table) given_position = rotation.positions.load(position_at);
  if (kCached && exists && cached) {
    given_slot = slots.given.load(slot_at);
    if (kFp8 && kAtOnce) scale = scale_at ? *scale_at : 1.f;
    if (kFp8 && !kAtOnce) scale = cache.given_scale(head(0));
  }
  Chunk<T> x[kHeads][2];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool needed = exists && (kWork != Work::kTurn || cached || rest < 0);
      x[h][j] = load_chunk<true>(data + in_row[h][j], needed ? kChunk : 0, true);
    }
  }
  [[maybe_unused]] Chunk<T> weight[2];
  if (kNorm && kAtOnce && weight_dtype == dtype_of<T>) {
#pragma unroll
    for (int j = 0; j < 2; ++j) weight[j] = load_chunk<true>(weight_at + begin[j], kChunk, true);
  }
  const int64_t position = rotation.positions.value(given_position);
  const bool turned = kTurn && uint64_t(position) < uint64_t(rotation.length);
  const auto load_angles = [&](auto w) { loaded.load<decltype(w)>(uint32_t(position)); };
  const auto with_table = [&](auto f) { rotation.dtype == CUTEGEMM_FP32 ? f(float()) : f(T()); };
  if (kAtOnce && turned) with_table(load_angles);
  if (!kAtOnce) launch_next_kernel();

  if (kNorm && __any_sync(~0u, kind < 2)) {
    float sums[kHeads][2], rstd[kHeads];
    const auto sum_chunks = [&](auto chunk) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[h][j] = sum_of_squares(chunk(h, j));
      }
    };
    if (halves) {
      sum_chunks([&](int h, int j) { return x[h][j]; });
    } else {
      sum_chunks([&](int h, int j) {
        const uint32_t first = (place.lane + j * lanes) * kChunk;
        const T* const again = data + (in_row[h][0] - begin[0] + first);
        return load_chunk<true>(again, place.exists && first < uint32_t(from.size) ? kChunk : 0, true);
      });
    }
    call.rstd_of(norm, lanes, sums, rstd);
    if (kind < 2) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Chunk<T>* chunks[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) chunks[h] = &x[h][j];
        norm_chunks(chunks, rstd, weight_dtype, norm.offset, [&](auto w) {
          if constexpr (kAtOnce && std::is_same_v<decltype(w), T>) return weight[j];
          return load_chunk<true>(static_cast<const decltype(w)*>(call.norm.weight[kind]) + begin[j], kChunk, true);
        });
      }
    }
  }

  // While the angles are on their way:
  const Slot slot(slots, given_slot);
  const auto find_slot = [&] { to += uint64_t(slot.block) * block_stride + slot.of_block * token_stride; };
  CommonDivisor<T> divide(scale);
  if (kCached && kAtOnce) {
    find_slot();
    settled(to);
    if (call.prefetches && exists && slot.valid) {
      if (apart && place.lane == 0) {
        prefetch_values(to - slot.of_block, (from.size - 1) * apart + slots.block_size);
      } else if (!apart) {
#pragma unroll
        for (int j = 0; j < 2; ++j) prefetch_sector(to + in_head[j]);
      }
    }
  }
  if (turned) {
    with_table([&](auto w) {
      if (!kAtOnce) find_angles(), load_angles(w);
      const Angles angles = loaded.as<decltype(w)>(kWork == Work::kTurn ? rotation.sign : 1.f);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) rotate<true>(x[h], angles, rotation.neox);
    });
  }

  unsigned amax[kHeads] = {};
  if (kFp8 && computes_scales) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) amax[h] = call.over_lanes(amax_of(x[h]));
  }
  if (!cached) {
    if (exists && (kWork != Work::kTurn || rest < 0)) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int j = 0; j < 2; ++j) store_chunk<true>(data + in_row[h][j], x[h][j], kChunk, true);
      }
    }
  } else if (kCached && slot.valid) {
    if (!kAtOnce) find_cache(), find_slot();
    const auto write = [&](int h, auto code) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Chunk<C> chunk = code(x[h][j]);
        C* const chunk_to = to + (h * uint32_t(call.groups[kind]) * uint32_t(cache.head_stride) + in_head[j]);
        if (apart) {
          store_apart(chunk_to, apart, chunk);
        } else {
          store_chunk<true>(chunk_to, chunk, kChunk, true);
        }
      }
    };
    const auto write_all = [&](auto code) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) write(h, code);
    };
    if constexpr (!kFp8) {
      write_all([](const Chunk<T>& chunk) { return chunk; });
    } else if (!cache.scale_cache && (kAtOnce || cache.scale_stride == 0)) {
      with_fp8_codes<T>(scale, divide, e5m2, write_all);
    } else {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h > 0) scale = cache.given_scale(head(h));
        if (cache.scale_cache) {
          scale = call.scale_of(amax[h]);
          if (place.lane == 0) *cache.scale_at(slot, head(h)) = scale;
        }
        with_fp8_codes<T>(scale, CommonDivisor<T>(scale), e5m2, [&](auto code) { write(h, code); });
      }
    }
  }
}

// Keys and values into v1's cache, where a block's tokens lie side by side for each value, or for each 16 bytes of a
// key. So 16 neighbouring threads have the same values of 16 tokens, and what they store lies together. blockIdx has
// the tokens, the head of the keys or of the values, and a part of it; there is one part if scales are computed.
template <class T, bool kFp8>
__global__ void __launch_bounds__(kHeadThreads) write_v1(const __grid_constant__ HeadsCall<T> call) {
  using C = std::conditional_t<kFp8, uint8_t, T>;
  constexpr int kTokens = 16, kOfThread = 2 * kChunk;
  __shared__ unsigned amax_of_token[kTokens];
  const bool both = call.source[1].heads > 0 && call.source[2].heads > 0;
  const int which = both ? 1 + blockIdx.y % 2 : call.source[1].heads > 0 ? 1 : 2;
  const int head = both ? blockIdx.y / 2 : blockIdx.y, of_block = threadIdx.x % kTokens;
  const HeadsOf<T>& from = call.source[which];
  const CacheOf& cache = call.cache[which - 1];
  const int64_t token = int64_t(blockIdx.x) * kTokens + of_block;
  const bool exists = token < call.slots.count;
  const T* const data = from.data + token * from.token_stride + int64_t(head) * from.head_stride;
  const auto each = [&](auto f) {
    const int threads = blockIdx.z * blockDim.x + threadIdx.x, step = gridDim.z * blockDim.x / kTokens * kOfThread;
    for (int begin = threads / kTokens * kOfThread; begin < from.size; begin += step) {
      Chunk<T> x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int n = exists ? min(from.size - begin - j * kChunk, kChunk) : 0;
        x[j] = load_chunk<false, T>(data + begin + j * kChunk, n, from.wide);
      }
      f(x, begin);
    }
  };
  wait_for_previous_kernel();

  const uint2 given_slot = exists ? call.slots.given.load(token) : kNoIndex;
  float scale = kFp8 ? cache.given_scale(head) : 1.f;
  if (kFp8 && cache.scale_cache) {
    if (threadIdx.x < kTokens) amax_of_token[of_block] = 0;
    __syncthreads();
    unsigned amax = 0;
    each([&](const Chunk<T>(&x)[2], int) { amax = max(amax, amax_of(x)); });
    atomicMax(&amax_of_token[of_block], amax);
    __syncthreads();
    scale = call.scale_of(amax_of_token[of_block]);
    const Slot slot(call.slots, given_slot);
    if (threadIdx.x < kTokens && slot.valid) *cache.scale_at(slot, head) = scale;
  }
  each([&](const Chunk<T>(&x)[2], int begin) {
    const Slot slot(call.slots, given_slot);
    if (!slot.valid) return;
    C* const to = cache.head_at<C>(slot, head);
    const auto write = [&](auto code) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = begin + j * kChunk;
        store_cached(to, cache, code(x[j]), at, min(from.size - at, kChunk), cache.wide);
      }
    };
    if constexpr (kFp8) {
      with_fp8_codes<T>(scale, CommonDivisor<T>(scale), call.e5m2, write);
    } else {
      write([](const Chunk<T>& chunk) { return chunk; });
    }
  });
  launch_next_kernel();
}

// The other way: values of a cache as the rows (slot, head), zeros where there is no slot. A thread has a chunk.
template <class T, class C, bool kE5m2>
__global__ void __launch_bounds__(kHeadThreads)
    gather_heads(const __grid_constant__ Slots slots, const __grid_constant__ CacheOf cache, int heads, int size,
                 T* out) {
  const int chunks = (size + kChunk - 1) / kChunk, of_token = blockIdx.y * kHeadThreads + threadIdx.x;
  const int64_t token = blockIdx.x;
  const int head = of_token / chunks, begin = of_token % chunks * kChunk, n = min(size - begin, kChunk);
  wait_for_previous_kernel();
  launch_next_kernel();
  if (head >= heads) return;
  const Slot slot(slots, slots.given.load(token));
  Chunk<C> cached{};
  float scale = 1.f;
  if (slot.valid) {
    const C* const from = cache.head_at<C>(slot, head);
    if (cache.wide && n == kChunk && (cache.run_stride == 0 || 1 << cache.run_shift >= kChunk)) {
      cached = load_chunk<true>(from + cache.at(begin), n, true);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (i >= n) continue;
        using Bits =
            std::conditional_t<sizeof(C) == 4, uint32_t, std::conditional_t<sizeof(C) == 2, uint16_t, uint8_t>>;
        constexpr int kOfWord = 4 / sizeof(C);
        const Bits bits = *reinterpret_cast<const Bits*>(from + cache.at(begin + i));
        cached.word[i / kOfWord] |= uint32_t(bits) << i % kOfWord * 8 * sizeof(C);
      }
    }
    scale = cache.scale_cache ? *cache.scale_at(slot, head) : cache.given_scale(head);
  }
  Chunk<T> chunk;
  if constexpr (std::is_same_v<T, C>) {
    chunk = cached;  // every bit, also of a NaN
  } else {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      float2 value;
      if constexpr (sizeof(C) == 1) {
        const auto two = __nv_fp8x2_storage_t(cached.word[i / 2] >> i % 2 * 16);
        value = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, kE5m2 ? __NV_E5M2 : __NV_E4M3)));
        value.x *= scale, value.y *= scale;
      } else {
        value = pair(cached, i);
      }
      set_pair(chunk, i, value);
    }
  }
  store_chunk<false>(out + (token * heads + head) * size + begin, chunk, n, size % kChunk == 0);
}

// Calls of both kernels: the cut is that of the largest head.
template <Into kInto, class T>
void run_heads(const char* op, HeadsCall<T> call, int64_t tokens, bool norm, cudaStream_t stream) {
  Rotation& rotation = call.rotation;
  int items = 1, heads = 0, size = 0;
  const auto is_short = [](int64_t elements) { return elements >= 0 && elements < int64_t(1) << 29; };
  bool even = true;
  bool whole = rotation.offset % kChunk == 0 && rotation.pairs % kChunk == 0 && is_short(rotation.table_stride) &&
               (!rotation.table || (rotation.wide && rotation.section_end[0] >= rotation.pairs));
  for (int i = 0; i < 3; ++i) {
    const HeadsOf<T>& of = call.source[i];
    if (of.heads == 0) continue;
    items = std::max(items, items_of(of.size, i < 2 ? rotation.offset : 0, i < 2 ? rotation.pairs : 0));
    whole = whole && of.wide && of.size % (2 * kChunk) == 0 && (heads == 0 || size == of.size) &&
            is_short(of.token_stride) && is_short(of.heads * of.head_stride);
    even = even && of.heads % 2 == 0;
    heads += of.heads, size = of.size;
    if (norm && i < 2 && call.norm.dtype[i] != CUTEGEMM_NONE) whole = whole && call.norm.wide[i];
    if (kInto != Into::kPlace && i > 0) {
      const CacheOf& cache = call.cache[i - 1];
      whole = whole && (cache.wide || cache.lies_apart()) &&
              (cache.run_stride == 0 || cache.run_shift == 0 || 1 << cache.run_shift >= kChunk) &&
              is_short(cache.block_stride) && is_short(cache.token_stride * call.slots.block_size) &&
              is_short(of.heads * cache.head_stride) && is_short(size * cache.run_stride);
    }
  }
  if (heads == 0 || tokens == 0) return;
  CG_CHECK(tokens < int64_t(1) << 31, op, ": there are ", tokens, " tokens; there must be less than 2**31");
  whole = whole && items <= 32;
  if (whole && !rotation.table) rotation.pairs = size / 2;  // heads are cut into halves, too
  call.halves = rotation.offset == 0 && (whole || rotation.neox);
  for (int i = 0; i < 2; ++i) {
    const int half = call.source[i].size / 2;
    if (call.source[i].heads == 0) continue;
    call.halves = call.halves && rotation.pairs == half && half % kChunk == 0 && (half & (half - 1)) == 0;
  }
  int shift = 0;
  while (shift < 5 && 1 << shift < items) ++shift;

  // Two heads a thread where that is enough for all multiprocessors.
  const bool two = whole && even && sizeof(T) == 2 && size <= 32 * kChunk && tokens * heads << shift >= 1 << 19;
  int groups = 0;
  for (int i = 0; i < 3; ++i) groups += call.groups[i] = call.source[i].heads / (two ? 2 : 1);
  call.tokens = uint32_t(tokens), call.cached_tokens = uint32_t(std::min(tokens, call.slots.count));
  call.items = items, call.lane_shift = shift;
  // A block has whole warps: of a part of a token, of a token or, where its heads are few, of several. Warps of keys
  // that are normed, rotated and quantized take longer than others; in small blocks fewer wait for them. In v1's layout
  // values are stored one by one, by as many multiprocessors as there can be.
  const bool turned = norm || rotation.table;
  const bool apart = kInto != Into::kPlace && call.source[2].heads > 0 && call.cache[1].lies_apart();
  const int64_t most_of_one = apart ? 32 : turned ? 64 : kHeadThreads;
  const int64_t most_of_two = turned && kInto != Into::kPlace ? 96 : kMostHeadThreads;
  const int64_t most = two ? most_of_two : most_of_one, threads = int64_t(groups) << shift;
  const int64_t element = kInto == Into::kFp8Cache ? 1 : sizeof(T);
  call.prefetches = apart && tokens >= 16 && call.cache[1].run_stride * element <= 64;
  const int64_t parts = (threads + most - 1) / most;
  int64_t width = ((threads + parts - 1) / parts + 31) / 32 * 32, height = 1;
  if (const int64_t together = 32 / std::gcd(threads, int64_t(32)); two && threads * together <= most) {
    width = threads, height = together;
    while (2 * width * height <= std::min<int64_t>(most, kHeadThreads)) height *= 2;
  }
  const dim3 blocks(unsigned((tokens + height - 1) / height), unsigned(parts));
  const dim3 block = {unsigned(width), unsigned(height), 1};
  const auto run = [&](auto kernel) { launch(op, kernel, blocks, block, stream, call); };
  const auto run_whole = [&](auto work) {
    constexpr Work kWork = decltype(work)::value;
    if constexpr (sizeof(T) == 2) {
      if (two) return run(whole_heads_kernel<T, kWork, kInto, 2>);
    }
    run(whole_heads_kernel<T, kWork, kInto, 1>);
  };
  if (whole) {
    if (norm) return run_whole(std::integral_constant<Work, Work::kNormAndTurn>());
    if constexpr (kInto != Into::kPlace) {
      if (!rotation.table) return run_whole(std::integral_constant<Work, Work::kNone>());
    }
    return run_whole(std::integral_constant<Work, Work::kTurn>());
  }
  if (norm) return items > 32 ? run(heads_kernel<T, true, kInto, 2>) : run(heads_kernel<T, true, kInto, 1>);
  items > 32 ? run(heads_kernel<T, false, kInto, 2>) : run(heads_kernel<T, false, kInto, 1>);
}

template <bool kFp8, class T>
void run_v1(const char* op, const HeadsCall<T>& call, cudaStream_t stream) {
  const int64_t tiles = (call.slots.count + 15) / 16;
  const int heads = call.source[1].heads + call.source[2].heads,
            size = std::max(call.source[1].size, call.source[2].size);
  if (tiles == 0 || heads == 0) return;
  const bool few = !call.computes_scales && tiles * heads < 1024;  // a warp each, for all multiprocessors to have some
  const dim3 blocks(unsigned(tiles), unsigned(heads), few ? unsigned(std::max(size + 31, 32) / 32) : 1u);
  launch(op, write_v1<T, kFp8>, blocks, dim3(few ? 32 : kHeadThreads), stream, call);
}

}  // namespace cutegemm
