// The kernel for what no fast one takes: any m, n and k, any strides, addresses aligned to no more than an element.
//
//   d[m, n] = Formula(sum_k a[m, k] b[k, n])
//
// in float32, rounded once; INT8's sums in int32, exactly. A block makes 64 x 64 of d and walks through k in order, 64
// at a time, so a row's bits depend on nothing but the row. It loads the next tiles into registers while it multiplies
// the present ones from shared memory. A tile lies in shared memory as it does in global memory, k fastest or not, and
// ldmatrix transposes it where it must; so loads are coalesced, and as wide as alignment allows, for every layout.
// FP8 and INT8 become FP16, exactly, on the way to shared memory.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "kernel_file.cuh"
#include "scale_rows.cuh"
#include "vector.cuh"

namespace cutegemm::any {

constexpr int kTile = 64;
constexpr int kThreads = 128;                         // four warps, each for 32 x 32 of d
constexpr int kPerThread = kTile * kTile / kThreads;  // elements of a tile that one thread moves
constexpr int kPitch = kTile + 8;                     // from one line of a tile to the next, free of bank conflicts
constexpr int kBand = 16;                             // tiles along m that neighbouring blocks share, for reuse in L2
static_assert(kThreads == 2 * kTile);

// a, or b transposed: rows (m or n) by k.
struct Operand {
  const void* data;
  int64_t row_stride, k_stride;  // in elements, 0 along a dimension of size one
  int32_t rows;
  int32_t dtype;
  bool k_inner;   // memory is denser along k than along the rows
  int32_t width;  // how many elements one load takes: 8, 4, 2 or 1
};

struct Problem {
  Operand a, b;
  int32_t k;
  void* d;
  int64_t d_stride[2];
  int32_t d_dtype;
  bool n_inner;  // d is denser along n than along m
};

template <int kBytes>
__device__ __forceinline__ void read(const void* from, uint32_t* words) {
  if constexpr (kBytes == 16) {
    const uint4 v = *static_cast<const uint4*>(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kBytes == 8) {
    const uint2 v = *static_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else if constexpr (kBytes == 4) {
    words[0] = *static_cast<const uint32_t*>(from);
  } else if constexpr (kBytes == 2) {
    words[0] = *static_cast<const uint16_t*>(from);
  } else {
    words[0] = *static_cast<const uint8_t*>(from);
  }
}

template <int kBytes>
__device__ __forceinline__ void write(void* to, const uint32_t* words) {
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = words[0];
  } else {
    *static_cast<uint16_t*>(to) = words[0];
  }
}

// Two FP8 values, in the low half of x, as two FP16 values.
__device__ __forceinline__ uint32_t fp16x2_from_fp8x2(uint32_t x, bool e5m2) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(x), e5m2 ? __NV_E5M2 : __NV_E4M3);
  return h.x | uint32_t(h.y) << 16;
}

// The same for two INT8 values: 0x6400 is 1024, whose last bits count ones, and with the sign bit flipped x is x + 128.
__device__ __forceinline__ uint32_t fp16x2_from_int8x2(uint32_t x) {
  const uint32_t shifted = __byte_perm(x ^ 0x8080, 0x64646464, 0x4140);
  const __half2 y = __hsub2(reinterpret_cast<const __half2&>(shifted), __float2half2_rn(1024 + 128));
  return reinterpret_cast<const uint32_t&>(y);
}

// Brings one operand's tiles to shared memory. Threads stand side by side along the inner dimension, each with
// `width` elements; together they cover 2 * width lines in one pass, and the tile in kPerThread / width passes.
template <class T>
class Stager {
 public:
  __device__ __forceinline__ Stager(const Operand& operand, int first_row, int k)
      : width_(operand.width), k_inner_(operand.k_inner), e5m2_(operand.dtype == CUTEGEMM_E5M2) {
    const int threads = kTile / width_;  // along a line
    const int inner = int(threadIdx.x) % threads * width_;
    const int outer = int(threadIdx.x) / threads;
    const int row = k_inner_ ? outer : inner;
    const int depth = k_inner_ ? inner : outer;
    next_ = static_cast<const T*>(operand.data) + (int64_t(first_row) + row) * operand.row_stride +
            depth * operand.k_stride;
    pass_ = (k_inner_ ? operand.row_stride : operand.k_stride) * 2 * width_;
    tile_ = operand.k_stride * kTile;
    rows_left_ = operand.rows - first_row - row;
    k_left_ = k - depth;
    place_ = outer * kPitch + inner;
  }

  // Starts loading the next tile, with zeros for what lies outside of the operand.
  __device__ __forceinline__ void fetch() {
    if (width_ == 8) {
      fetch<8>();
    } else if (width_ == 4) {
      fetch<4>();
    } else if (width_ == 2) {
      fetch<2>();
    } else {
      fetch<1>();
    }
    next_ += tile_;
    k_left_ -= kTile;
  }

  __device__ __forceinline__ void put(uint16_t* tile) const {
    if (width_ == 8) {
      put<8>(tile);
    } else if (width_ == 4) {
      put<4>(tile);
    } else if (width_ == 2) {
      put<2>(tile);
    } else {
      put<1>(tile);
    }
  }

 private:
  template <int kWidth>
  static constexpr int kWords = kWidth * sizeof(T) > 4 ? kWidth * sizeof(T) / 4 : 1;

  // `width` divides the size of the inner dimension, so a load is inside or outside as a whole.
  template <int kWidth>
  __device__ __forceinline__ void fetch() {
    const int inner_left = k_inner_ ? k_left_ : rows_left_;
    const int lines_left = inner_left <= 0 ? 0 : k_inner_ ? rows_left_ : k_left_;
    const T* from = next_;
#pragma unroll
    for (int i = 0; i < kPerThread / kWidth; ++i, from += pass_) {
      uint32_t* words = words_ + i * kWords<kWidth>;
#pragma unroll
      for (int j = 0; j < kWords<kWidth>; ++j) words[j] = 0;
      if (i * 2 * kWidth < lines_left) read<kWidth * sizeof(T)>(from, words);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void put(uint16_t* tile) const {
#pragma unroll
    for (int i = 0; i < kPerThread / kWidth; ++i) {
      const uint32_t* words = words_ + i * kWords<kWidth>;
      uint16_t* to = tile + place_ + i * 2 * kWidth * kPitch;
      if constexpr (sizeof(T) == 2) {
        write<2 * kWidth>(to, words);
      } else {
        uint32_t wide[(kWidth + 1) / 2];
#pragma unroll
        for (int j = 0; j < (kWidth + 1) / 2; ++j) {
          const uint32_t pair = words[j / 2] >> j % 2 * 16;
          if constexpr (std::is_same_v<T, int8_t>) {
            wide[j] = fp16x2_from_int8x2(pair);
          } else {
            wide[j] = fp16x2_from_fp8x2(pair, e5m2_);
          }
        }
        write<2 * kWidth>(to, wide);
      }
    }
  }

  int width_;
  bool k_inner_, e5m2_;
  const T* next_;           // this thread's first load of the next tile
  int64_t pass_, tile_;     // elements from one load to the next, and from one tile to the next
  int rows_left_, k_left_;  // from next_ to the operand's ends
  int place_;               // of the first load in the tile
  uint32_t words_[kPerThread];
};

// Where lane reads its line of the four 8 x 8 matrices of a fragment: bit 0 of a matrix's number moves it by 8 rows,
// bit 1 by 8 along k. That is a's order for m16n8k16; for b, matrices 0 and 2 are one fragment, 1 and 3 the next.
template <bool kKInner>
__host__ __device__ constexpr int fragment_place(int row, int k, int lane) {
  row += lane / 8 % 2 * 8;
  k += lane / 16 * 8;
  return kKInner ? (row + lane % 8) * kPitch + k : (k + lane % 8) * kPitch + row;
}

template <bool kTranspose>
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], const uint16_t* line) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(line));
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  }
}

template <bool kBf16>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <bool kBf16, bool kAInner, bool kBInner>
__device__ __forceinline__ void multiply_tiles(float (&c)[2][4][4], const uint16_t* a_tile, const uint16_t* b_tile,
                                               int row, int column, int lane) {
  a_tile += fragment_place<kAInner>(row, 0, lane);
  b_tile += fragment_place<kBInner>(column, 0, lane);
#pragma unroll
  for (int k = 0; k < kTile; k += 16) {
    uint32_t a[2][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices<!kAInner>(a[i], a_tile + fragment_place<kAInner>(16 * i, k, 0));
      load_matrices<!kBInner>(b[i], b_tile + fragment_place<kBInner>(16 * i, k, 0));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply_add<kBf16>(c[i][j], a[i], b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
    }
  }
}

// Blocks on a multiprocessor. Registers hold INT8's sums twice, and those that are scaled.
template <class T, bool kScaled>
constexpr int kResident = std::is_same_v<T, int8_t> || kScaled ? 2 : 3;

// kScaled: each 128 k, of FP8, have scales of their own.
template <class T, bool kScaled, class Formula>
__global__ void __launch_bounds__(kThreads, kResident<T, kScaled>)
    gemm_any(const __grid_constant__ Problem problem, const __grid_constant__ cutegemm_call call) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>, kInt8 = std::is_same_v<T, int8_t>;
  constexpr int kTileSize = kTile * kPitch;
  __shared__ __align__(16) uint16_t tiles[2][2][kTileSize];
  __shared__ typename Formula::Row row_operands[kTile];
  __shared__ typename Formula::Column column_operands[kTile];

  wait_for_previous_kernel();

  const int m = problem.a.rows, n = problem.b.rows, k = problem.k;
  const int m_tiles = (m - 1) / kTile + 1, n_tiles = (n - 1) / kTile + 1;
  const int band = int(blockIdx.x / (unsigned(kBand) * n_tiles));
  const int in_band = int(blockIdx.x - unsigned(band) * kBand * n_tiles);
  const int band_width = min(kBand, m_tiles - band * kBand);
  const int first_row = (band * kBand + in_band % band_width) * kTile;
  const int first_column = in_band / band_width * kTile;
  const int rows = m - first_row, columns = n - first_column;  // of d from here on, perhaps more than this tile has

  const int t = threadIdx.x;
  if (t < kTile) {
    row_operands[t] = Formula::row(call, min(first_row + t, m - 1));
  } else {
    column_operands[t - kTile] = Formula::column(call, min(first_column + t - kTile, n - 1));
  }

  // Of the rows and columns of this tile: of this block of k, and of the next.
  __shared__ float scales[kScaled ? 2 : 1][2 * kTile];
  const auto put_scales = [&](int block) {
    scales[block % 2][t] =
        t < kTile ? load_scale(call.scale_a, min(first_row + t, m - 1), block)
                  : load_scale(call.scale_b, min(first_column + t - kTile, n - 1) / call.scale_b.group, block);
  };

  Stager<T> a(problem.a, first_row, k), b(problem.b, first_column, k);
  const int lane = t % 32, warp_row = t / 32 % 2 * 32, warp_column = t / 64 * 32;
  std::conditional_t<kInt8, int32_t, float> sum[2][4][4] = {};
  const int steps = k / kTile + (k % kTile != 0);
  if (steps > 0) {
    a.fetch(), b.fetch();
    a.put(tiles[0][0]), b.put(tiles[0][1]);
    if constexpr (kScaled) put_scales(0);
  }
  [[maybe_unused]] float part[2][4][4] = {};
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    const bool more = step + 1 < steps;
    if (more) a.fetch(), b.fetch();
    const uint16_t *a_tile = tiles[step % 2][0], *b_tile = tiles[step % 2][1];
    const auto add_product_to = [&](float (&c)[2][4][4]) {
      if (problem.a.k_inner) {
        if (problem.b.k_inner) {
          multiply_tiles<kBf16, true, true>(c, a_tile, b_tile, warp_row, warp_column, lane);
        } else {
          multiply_tiles<kBf16, true, false>(c, a_tile, b_tile, warp_row, warp_column, lane);
        }
      } else {
        if (problem.b.k_inner) {
          multiply_tiles<kBf16, false, true>(c, a_tile, b_tile, warp_row, warp_column, lane);
        } else {
          multiply_tiles<kBf16, false, false>(c, a_tile, b_tile, warp_row, warp_column, lane);
        }
      }
    };
    if constexpr (kInt8) {  // float32 has 24 bits: enough for the sums of a tile, which are up to 2**20, not of all k
      add_product_to(part);
#pragma unroll
      for (int i = 0; i < 2 * 4 * 4; ++i) {
        sum[i / 16][i / 4 % 4][i % 4] += int32_t(part[i / 16][i / 4 % 4][i % 4]);
        part[i / 16][i / 4 % 4][i % 4] = 0;
      }
    } else if constexpr (kScaled) {
      constexpr int kSteps = 128 / kTile;  // of a block
      add_product_to(part);
      if (step % kSteps == kSteps - 1 || !more) {
        const float *of_rows = scales[step / kSteps % 2], *of_columns = of_rows + kTile;
#pragma unroll
        for (int i = 0; i < 2 * 4 * 4; ++i) {
          const int row = warp_row + i / 16 * 16 + i / 2 % 2 * 8 + lane / 4;
          const int column = warp_column + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
          float& value = sum[i / 16][i / 4 % 4][i % 4];
          value = __fmaf_rn(part[i / 16][i / 4 % 4][i % 4], of_rows[row] * of_columns[column], value);
          part[i / 16][i / 4 % 4][i % 4] = 0;
        }
        if (more) put_scales(step / kSteps + 1);
      }
    } else {
      add_product_to(sum);
    }
    if (more) a.put(tiles[(step + 1) % 2][0]), b.put(tiles[(step + 1) % 2][1]);
    __syncthreads();
  }

  // Through shared memory, so that neighbouring threads write neighbouring elements of d in either layout.
  float* out = reinterpret_cast<float*>(tiles);
  static_assert(sizeof(tiles) >= kTile * kPitch * sizeof(float));
  const int row_pitch = problem.n_inner ? kPitch : 1, column_pitch = problem.n_inner ? 1 : kPitch;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = warp_row + 16 * i + lane / 4 + e / 2 * 8;
        const int column = warp_column + 8 * j + lane % 4 * 2 + e % 2;
        const auto element =
            Formula::element(call, first_row + min(row, rows - 1), first_column + min(column, columns - 1));
        out[row * row_pitch + column * column_pitch] =
            Formula::apply(sum[i][j][e], row_operands[row], column_operands[column], element);
      }
    }
  }
  __syncthreads();
  const int inner = t % kTile;
#pragma unroll 4
  for (int outer = t / kTile; outer < kTile; outer += kThreads / kTile) {
    const int row = problem.n_inner ? outer : inner, column = problem.n_inner ? inner : outer;
    if (row < rows && column < columns) {
      const int64_t i =
          (int64_t(first_row) + row) * problem.d_stride[0] + (int64_t(first_column) + column) * problem.d_stride[1];
      store_from_float(problem.d, problem.d_dtype, i, out[outer * kPitch + inner]);
    }
  }
}

// Whether memory is denser along the second dimension than along the first. One element, or a stride of zero, says
// nothing about where the next element lies.
inline bool second_is_inner(int64_t first_stride, int32_t first_size, int64_t second_stride, int32_t second_size) {
  const bool first_counts = first_size > 1 && first_stride > 0, second_counts = second_size > 1 && second_stride > 0;
  return first_counts && second_counts ? second_stride <= first_stride : !first_counts;
}

template <class T>
Operand operand(const void* data, int32_t dtype, int32_t rows, int64_t row_stride, int32_t k, int64_t k_stride) {
  Operand x = {};
  x.data = data;
  x.dtype = dtype;
  x.rows = rows;
  x.row_stride = rows > 1 ? row_stride : 0;
  x.k_stride = k > 1 ? k_stride : 0;
  x.k_inner = second_is_inner(row_stride, rows, k_stride, k);
  const int64_t inner_stride = x.k_inner ? x.k_stride : x.row_stride,
                outer_stride = x.k_inner ? x.row_stride : x.k_stride;
  const int32_t inner_size = x.k_inner ? k : rows;
  const auto fits = [&](int32_t width) {
    return inner_stride == 1 && inner_size % width == 0 && outer_stride % width == 0 &&
           reinterpret_cast<uintptr_t>(data) % (width * sizeof(T)) == 0;
  };
  for (x.width = 8; x.width > 1 && !fits(x.width);) x.width /= 2;
  return x;
}

inline bool is_float(int32_t dtype) {
  return dtype == CUTEGEMM_FP32 || dtype == CUTEGEMM_BF16 || dtype == CUTEGEMM_FP16;
}

inline bool is_vector(const cutegemm_vector& v) { return !v.data || is_float(v.dtype); }

// T is the type of both operands, where __nv_fp8_storage_t stands for E4M3 and E5M2, each operand its own.
template <class T, bool kScaled, class Formula>
struct AnyShape {
  static constexpr auto* kKernel = &gemm_any<T, kScaled, Formula>;

  static int32_t prepare() { return load_kernel(kKernel); }

  static int64_t workspace(const cutegemm_call&) { return 0; }

  static int32_t launch(const cutegemm_call& call) {
    if (!takes(call.a_dtype) || !takes(call.b_dtype) || !is_float(call.d_dtype)) return kWrongTypes;
    if (!is_vector(call.bias)) return kWrongTypes;
    if (kScaled
            ? call.k > 0 && !(is_scale(call.scale_a, 1) && (is_scale(call.scale_b, 1) || is_scale(call.scale_b, 128)))
            : !is_vector(call.scale_a) || !is_vector(call.scale_b)) {
      return kWrongTypes;
    }
    if (call.m < 0 || call.n < 0 || call.k < 0) return kWrongSize;
    if (call.options.split > 1) return kWrongOptions;
    if (call.m == 0 || call.n == 0) return 0;
    const int64_t blocks = (int64_t(call.m - 1) / kTile + 1) * (int64_t(call.n - 1) / kTile + 1);
    if (blocks > INT32_MAX) return kWrongSize;
    Problem problem = {};
    problem.a = operand<T>(call.a, call.a_dtype, call.m, call.a_stride[0], call.k, call.a_stride[1]);
    problem.b = operand<T>(call.b, call.b_dtype, call.n, call.b_stride[1], call.k, call.b_stride[0]);
    problem.k = call.k;
    problem.d = call.d;
    problem.d_stride[0] = call.d_stride[0];
    problem.d_stride[1] = call.d_stride[1];
    problem.d_dtype = call.d_dtype;
    problem.n_inner = second_is_inner(call.d_stride[0], call.m, call.d_stride[1], call.n);
    return launch_kernel(call, kKernel, dim3(unsigned(blocks)), dim3(kThreads), 0, problem, call);
  }

 private:
  static bool takes(int32_t dtype) {
    if (std::is_same_v<T, int8_t>) return dtype == CUTEGEMM_INT8;
    if (sizeof(T) == 1) return dtype == CUTEGEMM_E4M3 || dtype == CUTEGEMM_E5M2;
    return dtype == (std::is_same_v<T, __nv_bfloat16> ? CUTEGEMM_BF16 : CUTEGEMM_FP16);
  }
};

}  // namespace cutegemm::any
