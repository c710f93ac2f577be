// Quantization to FP8 and INT8: see quantize.py, whose bits these kernels have. So both divisions are IEEE's, this file
// must not be compiled with fast math, and a maximum does not depend on the order of its values.
#include "row_op.cuh"

namespace cutegemm {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = 128;  // rows and columns that have one scale with granularity "block"

// Spans of rows, which are dealt to as many blocks as keep the memory busy, 4 chunks of each thread at a time.
struct Spans {
  static constexpr int kChunks = 4, kStep = kThreads * kChunk;
  int64_t a_row, count;

  Spans(int64_t rows, int64_t size) : a_row((size + kStep * kChunks - 1) / (kStep * kChunks)), count(rows * a_row) {}
  int64_t blocks(const DeviceOf& device) const { return std::min<int64_t>(count, device.sm_count() * 4); }

  // Calls f(chunks), with zeros after the end of a row.
  template <class T, class F>
  __device__ __forceinline__ void each(const RowsOf<const T>& x, int64_t size, F f) const {
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
      const int64_t row = a_row == 1 ? i : i / a_row;
      const int64_t column = (i - row * a_row) * kStep * kChunks + threadIdx.x * kChunk;
      const int left = int(min(size - column, int64_t(1) << 30));
      Chunk<T> held[kChunks];
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        held[j] = load_chunk<false>(x.at(row, column + j * kStep), left - j * kStep, x.wide);
      }
      f(held);
    }
  }
};

// The largest magnitude of what a block has seen into amax[block].
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_of_spans(const __grid_constant__ Spans spans, RowsOf<const T> x, int64_t size, unsigned* amax) {
  wait_for_previous_kernel();
  unsigned mine = 0;
  spans.each(x, size, [&](const auto& chunks) { mine = max(mine, amax_of(chunks)); });
  launch_next_kernel();
  mine = max_of_row(mine);
  if (threadIdx.x == 0) amax[blockIdx.x] = mine;
}

// A block takes one 128 x 128 of (matrices of) `height` rows.
template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_blocks(RowsOf<const T> x, int64_t height, int64_t size, int64_t down, int64_t across, Quantization to) {
  wait_for_previous_kernel();
  constexpr int kAcross = kBlock / kChunk, kRowsAtOnce = kThreads / kAcross, kHeld = kBlock / kRowsAtOnce;
  const int64_t block = blockIdx.x, matrix = block / across / down, i = block / across % down;
  const int64_t column = block % across * kBlock + threadIdx.x % kAcross * kChunk;
  const int n = int(min(size - column, int64_t(kChunk)));
  const int64_t first = i * kBlock + threadIdx.x / kAcross;  // row, in the matrix
  Chunk<T> held[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int64_t row = first + j * kRowsAtOnce;
    held[j] = load_chunk<false>(x.at(matrix * height + row, column), row < height ? n : 0, x.wide);
  }
  launch_next_kernel();
  const float scale = to.given ? to.given[block] : to.scale_of(max_of_row(amax_of(held)));
  if (threadIdx.x == 0) to.scale[block] = scale;
  const CommonDivisor<T> divide(scale);
  const bool common = are_common({scale}, to.int8);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int64_t row = first + j * kRowsAtOnce;
    store_chunk<false>(to.q + (matrix * height + row) * size + column,
                       common ? codes<__nv_fp8_e4m3>(held[j], divide) : rare_codes(held[j], scale, to.int8),
                       row < height ? n : 0, to.q_wide);
  }
}

template <class T>
void run_tensor(const char* op, const Input& x, Codes& codes, const DeviceOf& device) {
  Rows rows = x.rows;
  const int64_t all = rows.count * rows.size;
  if (rows.stride == rows.size || all == 0) rows = {1, all, all};
  codes.to.q_stride = rows.size;
  codes.to.q_wide = rows.count <= 1 || rows.size % kChunk == 0;
  const auto from = rows_of<const T>(x.tensor.data_ptr(), rows.stride, rows.count);
  Tensor amax;
  if (codes.to.scales == Scales::kOfTensor) {
    if (rows.count == 1 && rows.size <= 32768) {
      codes.to.scales = Scales::kOfToken;  // one block holds it: one launch
    } else {
      const Spans spans(rows.count, rows.size);
      const int64_t blocks = spans.blocks(device);
      amax = empty({blocks}, ScalarType::Int, x.tensor);
      codes.to.amax = static_cast<const unsigned*>(amax.data_ptr());
      codes.to.amax_count = int(blocks);
      launch(op, amax_of_spans<T>, grid(op, blocks), dim3(kThreads), device.stream, spans, from, rows.size,
             static_cast<unsigned*>(amax.data_ptr()));
    }
  }
  run_rows<false, T>(op, Plain<T>{from}, rows.count, rows.size, Norm{}, RowsOf<T>{}, codes.to, device.stream);
}

std::tuple<Tensor, Tensor> quantize(const CodesOf& how, const Tensor& x) {
  const DeviceOf device(x);
  const Input source(x);
  const int64_t count = source.rows.count, size = source.rows.size;
  Codes codes(how, x, size);
  with_float_type(x, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    const auto from = source.of<T>();
    if (how.granularity == "tensor") {
      run_tensor<T>(how.op, source, codes, device);
    } else if (how.granularity == "block") {
      const int64_t height = x.sizes()[x.dim() - 2];
      const int64_t down = (height + kBlock - 1) / kBlock, across = (size + kBlock - 1) / kBlock;
      if (x.numel() == 0) return;
      launch(how.op, quantize_blocks<T>, grid(how.op, count / height * down * across), dim3(kThreads), device.stream,
             from, height, size, down, across, codes.to);
    } else {
      run_rows<false, T>(how.op, Plain<T>{from}, count, size, Norm{}, RowsOf<T>{}, codes.to, device.stream);
    }
  });
  return {codes.q, codes.scale};
}

std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, const OptionalTensor& scale, const std::string& granularity,
                                        int64_t group_size, const OptionalTensor& scale_ub, bool column_major_scale,
                                        bool power_of_two_scale) {
  constexpr auto* op = "quantize_fp8";
  check_floats(op, "x", x);
  CG_CHECK(granularity != "block" || x.dim() > 1, op, ": x is ", text(x.sizes()),
           "; for granularity 'block' it must have two dimensions or more");
  const CodesOf how = {
      op, ScalarType::Float8_e4m3fn, scale, granularity, group_size, scale_ub, column_major_scale, power_of_two_scale};
  how.check(x, x.sizes().back(), {"tensor", "token", "channel", "group", "block"});
  return quantize(how, x);
}

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& x, const OptionalTensor& scale, const std::string& granularity) {
  constexpr auto* op = "quantize_int8";
  check_floats(op, "x", x);
  const CodesOf how = {op, ScalarType::Char, scale, granularity, kBlock, {}, true, false};
  how.check(x, x.sizes().back(), {"tensor", "token", "channel"});
  return quantize(how, x);
}

// --- with a zero point ---

// Floats as integers of the same order.
__device__ __forceinline__ int ordered(float x) {
  const int bits = __float_as_int(x);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
__device__ __forceinline__ float from_ordered(int bits) { return __int_as_float(bits >= 0 ? bits : bits ^ 0x7fffffff); }

// The smallest and the largest finite value, as `ordered`, and zero among them.
struct Range {
  int low = 0, high = 0;
};

__device__ __forceinline__ void include(Range& range, float x) {
  if (fabsf(x) < INFINITY) range.low = min(range.low, ordered(x)), range.high = max(range.high, ordered(x));
}

// What is after the n values is zero, which is in the range anyway.
template <class T>
__device__ __forceinline__ void include(Range& range, const Chunk<T>& chunk) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 x = pair(chunk, i);
    include(range, x.x);
    include(range, x.y);
  }
}

__device__ __forceinline__ Range range_of_row(Range range) {
  range.low = __reduce_min_sync(~0u, range.low), range.high = __reduce_max_sync(~0u, range.high);
  __shared__ Range of_warp[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = range;
  __syncthreads();
  const Range mine = of_warp[threadIdx.x % (kThreads / 32)];
  return {__reduce_min_sync(~0u, mine.low), __reduce_max_sync(~0u, mine.high)};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    range_of_spans(const __grid_constant__ Spans spans, RowsOf<const T> x, int64_t size, Range* range) {
  wait_for_previous_kernel();
  Range mine;
  spans.each(x, size, [&](const auto& chunks) {
    for (const Chunk<T>& chunk : chunks) include(mine, chunk);
  });
  launch_next_kernel();
  mine = range_of_row(mine);
  if (threadIdx.x == 0) range[blockIdx.x] = mine;
}

// A block a row. ranges: the tensor's is that of all of them, or null for each row's own. given: scale and zero point,
// or null.
template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_asymmetric(RowsOf<const T> x, int64_t size, const Range* ranges, int range_count, const float* given_scale,
                        const int* given_zero, bool per_tensor, RowsOf<uint8_t> q, float* scales, int* zeros) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const int64_t row = blockIdx.x, at = per_tensor ? 0 : row;
  const auto each = [&](auto f) {
    for (int64_t column = threadIdx.x * kChunk; column < size; column += kThreads * kChunk) {
      const int n = int(min(size - column, int64_t(kChunk)));
      f(load_chunk<false>(x.at(row, column), n, x.wide), column, n);
    }
  };
  float scale;
  int zero;
  if (given_scale) {
    scale = given_scale[at], zero = given_zero[at];
  } else {
    Range range;
    if (per_tensor) {
      for (int i = threadIdx.x; i < range_count; i += kThreads) {
        range.low = min(range.low, ranges[i].low), range.high = max(range.high, ranges[i].high);
      }
    } else {
      each([&](const Chunk<T>& chunk, int64_t, int) { include(range, chunk); });
    }
    range = range_of_row(range);
    const float low = from_ordered(range.low), high = from_ordered(range.high);
    scale = fmaxf(__fsub_rn(__fdiv_rn(high, 255.f), __fdiv_rn(low, 255.f)), kAmaxFloor);
    zero = __float2int_rn(-128.f - __fdiv_rn(low, scale));
  }
  if (threadIdx.x == 0 && at == row) scales[at] = scale, zeros[at] = zero;
  const AnyDivisor divide(scale);
  const auto shifted = [&](float x) {
    const float code = rintf(divide(x)) + float(zero);
    return code == code ? code : float(zero);
  };
  each([&](const Chunk<T>& chunk, int64_t column, int n) {
    store_chunk<false>(q.at(row, column), codes<int8_t>(chunk, shifted), n, q.wide);
  });
}

std::tuple<Tensor, Tensor, Tensor> quantize_int8_asymmetric(const Tensor& x, const OptionalTensor& scale,
                                                            const OptionalTensor& zero_point,
                                                            const std::string& granularity) {
  constexpr auto* op = "quantize_int8_asymmetric";
  check_floats(op, "x", x);
  const CodesOf how = {op, ScalarType::Char, scale, granularity, kBlock, {}, true, false};
  how.check(x, x.sizes().back(), {"tensor", "token"});
  CG_CHECK(scale.has_value() == zero_point.has_value(), op,
           ": one of scale and zero_point is given; both must be, or neither");
  if (zero_point) {
    CG_CHECK(scalar_type(*zero_point) == ScalarType::Int, op, ": zero_point is ", text(scalar_type(*zero_point)),
             "; it must be torch.int32");
    check_device(op, "zero_point", *zero_point, x);
    CG_CHECK(shape_of(*zero_point) == shape_of(*scale), op, ": zero_point is ", text(zero_point->sizes()),
             "; it must be the shape of scale, ", text(scale->sizes()));
  }
  const DeviceOf device(x);
  const Input source(x);
  const int64_t count = source.rows.count, size = source.rows.size;
  const Codes codes(how, x, size);
  const Tensor zeros = empty(codes.scale.sizes(), ScalarType::Int, x);
  const Tensor given_zero =
      !zero_point || zero_point->is_contiguous() ? zero_point.value_or(x) : torch::stable::contiguous(*zero_point);
  const bool per_tensor = granularity == "tensor";
  const Spans spans(count, size);
  const int64_t ranges = per_tensor && !scale ? spans.blocks(device) : 0;
  const Tensor range = empty({ranges * 2}, ScalarType::Int, x);
  auto* const range_data = static_cast<Range*>(range.data_ptr());
  with_float_type(x, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    const auto from = source.of<T>();
    if (ranges > 0) {
      launch(op, range_of_spans<T>, grid(op, ranges), dim3(kThreads), device.stream, spans, from, size, range_data);
    }
    const int64_t blocks = count == 0 && per_tensor ? 1 : count;  // which has its scale even where it is empty
    if (blocks == 0) return;
    launch(op, quantize_asymmetric<T>, grid(op, blocks), dim3(kThreads), device.stream, from, count == 0 ? 0 : size,
           range_data, int(ranges), scale ? codes.to.given : nullptr,
           scale ? static_cast<const int*>(given_zero.data_ptr()) : nullptr, per_tensor,
           rows_of<uint8_t>(codes.to.q, size, count), codes.to.scale, static_cast<int*>(zeros.data_ptr()));
  });
  return {codes.q, codes.scale, zeros};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) {
  m.impl("quantize_fp8", TORCH_BOX(&quantize_fp8));
  m.impl("quantize_int8", TORCH_BOX(&quantize_int8));
  m.impl("quantize_int8_asymmetric", TORCH_BOX(&quantize_int8_asymmetric));
}

}  // namespace cutegemm
