// FP8 (e4m3) quantization. The bits are those of the reference in quantize.py: amax is exact, both divisions are IEEE
// (this file must not be compiled with fast math), and the cast rounds to nearest even.
#include <cuda_fp8.h>

#include <algorithm>

#include "torch_op.h"

namespace cutegemm {
namespace {

constexpr float kE4m3Max = 448.f;
constexpr float kAmaxFloor = 0x1p-40f;
constexpr int kMaxThreads = 512;
constexpr int64_t kSpan = 8192;  // elements that a block takes at a time when all of x has one scale
constexpr int64_t kMaxGrid = (int64_t(1) << 31) - 1;

template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T value[V];
};

template <class T, int V>
__device__ __forceinline__ Pack<T, V> load(const T* p) {
  return *reinterpret_cast<const Pack<T, V>*>(p);
}

// The bits of nonnegative floats are ordered as the floats are. NaN and Inf count as zero.
template <class T>
__device__ __forceinline__ unsigned finite_magnitude(T x) {
  const unsigned bits = __float_as_uint(static_cast<float>(x)) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

// Saturates, so that Inf becomes 448; NaN becomes 0x7f.
__device__ __forceinline__ uint8_t to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

// This thread's share of n elements, read V at a time.
template <class T, int V>
__device__ __forceinline__ unsigned amax_of(const T* x, int64_t n) {
  unsigned amax = 0;
  const int64_t whole = n / V * V;
  for (int64_t i = int64_t(threadIdx.x) * V; i < whole; i += int64_t(blockDim.x) * V) {
    const Pack<T, V> pack = load<T, V>(x + i);
#pragma unroll
    for (int j = 0; j < V; ++j) amax = max(amax, finite_magnitude(pack.value[j]));
  }
  for (int64_t i = whole + threadIdx.x; i < n; i += blockDim.x) amax = max(amax, finite_magnitude(x[i]));
  return amax;
}

template <class T, int V>
__device__ __forceinline__ void quantize(const T* x, int64_t n, float scale, uint8_t* q) {
  const int64_t whole = n / V * V;
  for (int64_t i = int64_t(threadIdx.x) * V; i < whole; i += int64_t(blockDim.x) * V) {
    const Pack<T, V> pack = load<T, V>(x + i);
    Pack<uint8_t, V> codes;
#pragma unroll
    for (int j = 0; j < V; ++j) codes.value[j] = to_e4m3(__fdiv_rn(static_cast<float>(pack.value[j]), scale));
    *reinterpret_cast<Pack<uint8_t, V>*>(q + i) = codes;
  }
  for (int64_t i = whole + threadIdx.x; i < n; i += blockDim.x)
    q[i] = to_e4m3(__fdiv_rn(static_cast<float>(x[i]), scale));
}

// Every thread of the block gets the largest value; blocks are of whole warps.
__device__ __forceinline__ unsigned block_max(unsigned value) {
  __shared__ unsigned of_warp[kMaxThreads / 32];
  value = __reduce_max_sync(~0u, value);
  __syncthreads();  // the threads have read what an earlier call left here
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  return __reduce_max_sync(~0u, lane < blockDim.x / 32 ? of_warp[lane] : 0u);
}

__device__ __forceinline__ float scale_of(unsigned amax) {
  return __fdiv_rn(fmaxf(__uint_as_float(amax), kAmaxFloor), kE4m3Max);
}

// One block a row at a time. given: the scales, or null.
template <class T, int V>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_rows(const T* x, Rows rows, const float* given, float* scales, uint8_t* q) {
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const T* from = x + row * rows.stride;
    const float scale = given ? given[row] : scale_of(block_max(amax_of<T, V>(from, rows.size)));
    if (threadIdx.x == 0) scales[row] = scale;
    quantize<T, V>(from, rows.size, scale, q + row * rows.size);
  }
}

// Calls f(row, first column, number of columns) for this block's spans.
template <class F>
__device__ __forceinline__ void for_spans(const Rows& rows, F f) {
  const int64_t spans = (rows.size + kSpan - 1) / kSpan;
  for (int64_t i = blockIdx.x; i < rows.count * spans; i += gridDim.x) {
    const int64_t row = i / spans, column = (i - row * spans) * kSpan;
    f(row, column, min(kSpan, rows.size - column));
  }
}

// amax must be zero before. A maximum does not depend on the order in which the blocks come.
template <class T, int V>
__global__ void __launch_bounds__(kMaxThreads) amax_of_tensor(const T* x, Rows rows, unsigned* amax) {
  unsigned mine = 0;
  for_spans(rows, [&](int64_t row, int64_t column, int64_t n) {
    mine = max(mine, amax_of<T, V>(x + row * rows.stride + column, n));
  });
  mine = block_max(mine);
  if (threadIdx.x == 0) atomicMax(amax, mine);
}

template <class T, int V>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_tensor(const T* x, Rows rows, const float* given, const unsigned* amax, float* scale_out, uint8_t* q) {
  const float scale = given ? *given : scale_of(*amax);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_out = scale;
  for_spans(rows, [&](int64_t row, int64_t column, int64_t n) {
    quantize<T, V>(x + row * rows.stride + column, n, scale, q + row * rows.size + column);
  });
}

template <class T, int V>
void run_rows(const T* x, Rows rows, const float* given, float* scales, uint8_t* q, const DeviceOf& device) {
  if (rows.count == 0) return;
  const int64_t threads = std::clamp<int64_t>((rows.size / V + 31) / 32 * 32, 32, kMaxThreads);
  launch("quantize_fp8", quantize_rows<T, V>, std::min(rows.count, kMaxGrid), static_cast<int>(threads), device.stream,
         x, rows, given, scales, q);
}

template <class T, int V>
void run_tensor(const T* x, Rows rows, const float* given, unsigned* amax, float* scale, uint8_t* q,
                const DeviceOf& device) {
  const int64_t spans = rows.count * ((rows.size + kSpan - 1) / kSpan);
  const int64_t grid = std::clamp<int64_t>(spans, 1, int64_t(device.sm_count()) * 4);
  if (!given) {
    check_cuda("quantize_fp8", cudaMemsetAsync(amax, 0, sizeof(unsigned), device.stream));
    launch("quantize_fp8", amax_of_tensor<T, V>, grid, kMaxThreads, device.stream, x, rows, amax);
  }
  launch("quantize_fp8", quantize_tensor<T, V>, grid, kMaxThreads, device.stream, x, rows, given, amax, scale, q);
}

bool is_one_a_row(const Tensor& scale, const std::vector<int64_t>& leading, int64_t rows) {
  const Sizes sizes = scale.sizes();
  const std::vector<int64_t> shape(sizes.begin(), sizes.end());
  std::vector<int64_t> column = leading;
  column.push_back(1);
  using Shape = std::vector<int64_t>;
  return shape == leading || shape == column || shape == Shape{rows} || shape == Shape{rows, 1} ||
         shape == Shape{1, rows};
}

std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, const std::optional<Tensor>& scale,
                                        const std::string& granularity) {
  const bool per_tensor = granularity == "tensor";
  CG_CHECK(per_tensor || granularity == "token" || granularity == "channel", "quantize_fp8: granularity is '",
           granularity, "'; it must be 'tensor', 'token' or 'channel'");
  const ScalarType dtype = x.scalar_type();
  CG_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float,
           "quantize_fp8: x is ", text(dtype), "; it must be torch.bfloat16, torch.float16 or torch.float32");
  CG_CHECK(x.dim() > 0, "quantize_fp8: x has no dimension; it must have at least one");
  std::vector<int64_t> leading(x.sizes().begin(), x.sizes().end() - 1);
  if (scale) {
    CG_CHECK(scale->scalar_type() == ScalarType::Float, "quantize_fp8: scale is ", text(scale->scalar_type()),
             "; it must be torch.float32");
    CG_CHECK(same_device(*scale, x), "quantize_fp8: scale is on ", text_of_device(*scale),
             "; it must be on the device of x, ", text_of_device(x));
    int64_t rows = 1;
    for (int64_t size : leading) rows *= size;
    if (per_tensor) {
      CG_CHECK(scale->numel() == 1, "quantize_fp8: scale is ", text(scale->sizes()),
               "; for granularity 'tensor' it must have one element");
    } else {
      CG_CHECK(is_one_a_row(*scale, leading, rows), "quantize_fp8: scale is ", text(scale->sizes()),
               "; for granularity '", granularity, "' it must have one element for each row of x, which is ",
               text(x.sizes()));
    }
  }

  const DeviceOf device(x);
  std::optional<Rows> in_place = as_rows(x);
  const Tensor source = in_place ? x : torch::stable::contiguous(x);
  Rows rows = in_place ? *in_place : *as_rows(source);
  const Tensor given = !scale || scale->is_contiguous() ? scale.value_or(x) : torch::stable::contiguous(*scale);
  if (per_tensor) {
    leading.clear();
    if (rows.stride == rows.size) rows = {1, rows.count * rows.size, rows.count * rows.size};
  } else if (granularity == "token") {
    leading.push_back(1);
  }
  const Tensor q = empty(x.sizes(), ScalarType::Float8_e4m3fn, x);
  const Tensor scales = empty(leading, ScalarType::Float, x);
  const Tensor amax = per_tensor && !scale ? empty(leading, ScalarType::Int, x) : scales;

  with_float_type(source, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    constexpr int V = 8;
    const auto* from = static_cast<const T*>(source.data_ptr());
    const auto* given_data = scale ? static_cast<const float*>(given.data_ptr()) : nullptr;
    auto* to = static_cast<uint8_t*>(q.data_ptr());
    auto* scale_data = static_cast<float*>(scales.data_ptr());
    auto* amax_data = static_cast<unsigned*>(amax.data_ptr());
    // Every row of x must start at 16 bytes and every row of q at 8.
    const bool wide = reinterpret_cast<uintptr_t>(from) % 16 == 0 &&
                      (rows.count == 1 || (rows.size % V == 0 && rows.stride * sizeof(T) % 16 == 0));
    if (per_tensor) {
      (wide ? run_tensor<T, V> : run_tensor<T, 1>)(from, rows, given_data, amax_data, scale_data, to, device);
    } else {
      (wide ? run_rows<T, V> : run_rows<T, 1>)(from, rows, given_data, scale_data, to, device);
    }
  });
  return {q, scales};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) { m.impl("quantize_fp8", TORCH_BOX(&quantize_fp8)); }

}  // namespace cutegemm
