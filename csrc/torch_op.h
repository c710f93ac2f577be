// What every op library needs of torch, on its stable ABI alone: checks that are sentences, the device and stream of a
// tensor, outputs, and the view of a tensor as rows. Included by .cu and by .cpp files.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernel_abi.h"

// A RuntimeError whose text is the arguments after the condition. STD_TORCH_CHECK would put function, file and line in
// front, and the sentences are to be those of the Python reference.
#define CG_CHECK(condition, ...)                     \
  do {                                               \
    if (!(condition)) ::cutegemm::fail(__VA_ARGS__); \
  } while (0)

namespace cutegemm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

template <class... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  throw std::runtime_error(text.str());
}

// Takes an error off the CUDA runtime too, so that nobody's later check finds it.
inline void check_cuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail(op, ": CUDA failed: ", cudaGetErrorString(error));
}

// Torch's numbers of dtypes are part of its serialization format and do not change. Its own conversions of them (those
// of Tensor::scalar_type() and of arguments of ops) throw where a dtype is younger than the torch we build for.
inline ScalarType scalar_type(const Tensor& x) {
  int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &number));
  return ScalarType(number);
}

// An op's argument, by number.
using OptionalDtype = std::optional<int32_t>;

inline ScalarType scalar_type(const OptionalDtype& number, ScalarType otherwise) {
  return number ? ScalarType(*number) : otherwise;
}

// Values as Python prints them, for the sentences.
inline std::string text(Sizes sizes) {
  std::string s = "[";
  for (size_t i = 0; i < sizes.size(); ++i) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + "]";
}

inline std::string text(ScalarType dtype) {
  static constexpr std::pair<ScalarType, const char*> names[] = {
      {ScalarType::Float, "float32"},
      {ScalarType::BFloat16, "bfloat16"},
      {ScalarType::Half, "float16"},
      {ScalarType::Double, "float64"},
      {ScalarType::Float8_e4m3fn, "float8_e4m3fn"},
      {ScalarType::Float8_e5m2, "float8_e5m2"},
      {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz"},
      {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz"},
      {ScalarType::Float8_e8m0fnu, "float8_e8m0fnu"},
      {ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2"},
      {ScalarType::Char, "int8"},
      {ScalarType::Short, "int16"},
      {ScalarType::Int, "int32"},
      {ScalarType::Long, "int64"},
      {ScalarType::Byte, "uint8"},
      {ScalarType::UInt16, "uint16"},
      {ScalarType::UInt32, "uint32"},
      {ScalarType::UInt64, "uint64"},
      {ScalarType::Bool, "bool"},
      {ScalarType::ComplexHalf, "complex32"},
      {ScalarType::ComplexFloat, "complex64"},
      {ScalarType::ComplexDouble, "complex128"},
  };
  for (const auto& [value, name] : names) {
    if (value == dtype) return std::string("torch.") + name;
  }
  return torch::headeronly::toString(dtype);
}

inline std::string text_of_device(const Tensor& x) {
  if (x.is_cuda()) return "cuda:" + std::to_string(x.get_device_index());
  return x.is_cpu() ? "cpu" : "another device";
}

inline bool same_device(const Tensor& x, const Tensor& y) {
  return x.is_cuda() == y.is_cuda() && x.is_cpu() == y.is_cpu() && x.get_device_index() == y.get_device_index();
}

// The dtype as kernel files know it; CUTEGEMM_NONE for those that they don't.
inline int32_t kernel_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return CUTEGEMM_FP32;
    case ScalarType::BFloat16:
      return CUTEGEMM_BF16;
    case ScalarType::Half:
      return CUTEGEMM_FP16;
    case ScalarType::Float8_e4m3fn:
      return CUTEGEMM_E4M3;
    case ScalarType::Float8_e5m2:
      return CUTEGEMM_E5M2;
    case ScalarType::Char:
      return CUTEGEMM_INT8;
    case ScalarType::Int:
      return CUTEGEMM_INT32;
    default:
      return CUTEGEMM_NONE;
  }
}

// Calls f with a null pointer of x's element type, for float32, BF16 and FP16 (which the caller has checked).
template <class F>
void with_float_type(const Tensor& x, F f) {
  switch (scalar_type(x)) {
    case ScalarType::Float:
      return f(static_cast<const float*>(nullptr));
    case ScalarType::BFloat16:
      return f(static_cast<const __nv_bfloat16*>(nullptr));
    case ScalarType::Half:
      return f(static_cast<const __half*>(nullptr));
    default:
      fail("no kernel for ", text(scalar_type(x)));
  }
}

// Makes x's device the current one while it lives; stream is torch's current stream there.
struct __attribute__((visibility("hidden"))) DeviceOf {  // as torch's guard is
  explicit DeviceOf(const Tensor& x) : index(x.get_device_index()), guard_(index) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &current));
    stream = static_cast<cudaStream_t>(current);
  }

  int sm_count() const {
    int count = 0;
    check_cuda("cutegemm", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index));
    return count;
  }

  int32_t index;
  cudaStream_t stream;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// Uninitialized tensors on x's device.
inline Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype, const Tensor& x) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), int32_t(dtype),
                                                  device_type, x.get_device_index(), &made));
  return Tensor(made);
}

inline std::vector<int64_t> contiguous_strides(Sizes sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return strides;
}

inline Tensor empty(Sizes sizes, ScalarType dtype, const Tensor& x) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, x);
}

// Whether writing out would change x: only where that is plain to see, since views may interleave without touching.
inline bool is_in_memory_of(const Tensor& out, const Tensor& x) {
  struct Span {
    uintptr_t begin, end;
    bool dense;
  };
  const auto span = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data_ptr());
    return Span{begin, begin + uintptr_t(last + 1) * t.element_size(), last + 1 == t.numel()};
  };
  if (out.numel() == 0 || x.numel() == 0) return false;
  const Span a = span(out), b = span(x);
  if (a.begin >= b.end || b.begin >= a.end) return false;
  return a.begin == b.begin || (a.dense && a.begin <= b.begin) || (b.dense && b.begin <= a.begin);
}

// A tensor as rows of its last dimension, whose stride is one: row i starts i * stride elements after the first.
struct Rows {
  int64_t count, size, stride;
};

// Nothing where the leading dimensions can't be seen as one, or the last has another stride.
inline std::optional<Rows> as_rows(const Tensor& x) {
  const Sizes sizes = x.sizes(), strides = x.strides();
  const size_t last = sizes.size() - 1;
  if (sizes[last] > 1 && strides[last] != 1) return {};
  Rows rows{1, sizes[last], sizes[last]};
  for (size_t i = last; i-- > 0;) {
    if (sizes[i] == 1) continue;  // its stride means nothing
    if (rows.count == 1) rows.stride = strides[i];
    if (strides[i] != rows.count * rows.stride && x.numel() > 0) return {};
    rows.count *= sizes[i];
  }
  return rows;
}

// Whether kernels may start while the one before them on the stream still runs. library.py sets it, in every library.
inline std::atomic<bool> chain_launches = true;

#ifdef __CUDACC__
inline dim3 grid(const char* op, int64_t blocks) {
  CG_CHECK(blocks < int64_t(1) << 31, op, ": x takes ", blocks, " blocks, more than one launch has");
  return dim3(unsigned(blocks));
}

// A launch whose failure is an error here and now, and not that of whoever asks CUDA next. The kernel must wait for the
// one before it (chain.cuh).
template <class... Params, class... Args>
void launch(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream,
            const Args&... args) {
  cudaLaunchAttribute chain{};
  chain.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chain.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &chain;
  config.numAttrs = chain_launches.load(std::memory_order_relaxed) ? 1 : 0;
  check_cuda(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}
#endif

}  // namespace cutegemm

extern "C" __attribute__((visibility("default"), used)) inline void cutegemm_chain(int32_t on) {
  cutegemm::chain_launches.store(on != 0, std::memory_order_relaxed);
}
