// Columns in another order, or as they are, in rows that begin at multiples of 16 bytes: see gather.py.
#include <algorithm>

#include "chain.cuh"
#include "torch_op.h"

namespace cutegemm {
namespace {

constexpr int kThreads = 256, kPiece = 8;  // kPiece: elements in 16 bytes

// A thread makes pieces. An index past k gives 0, and nothing is written past k.
__global__ void gather_kernel(uint16_t* out, int64_t pitch, const uint16_t* x, int64_t row_stride,
                              int64_t column_stride, const int32_t* permutation, int64_t permutation_stride, int64_t m,
                              int64_t k) {
  launch_next_kernel();
  wait_for_previous_kernel();
  const int64_t pieces = pitch / kPiece;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < m * pieces; i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / pieces, first = i % pieces * kPiece;
    alignas(16) uint16_t piece[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      int64_t column = first + j;
      if (permutation && column < k) column = permutation[column * permutation_stride];
      piece[j] = column >= 0 && column < k ? x[row * row_stride + column * column_stride] : 0;
    }
    uint16_t* const to = out + row * pitch + first;
    if (first + kPiece <= k) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(piece);
    } else {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if (first + j < k) to[j] = piece[j];
      }
    }
  }
}

Tensor gather_columns(const Tensor& x, const std::optional<Tensor>& permutation) {
  constexpr auto* op = "gather_columns";
  const ScalarType dtype = scalar_type(x);
  CG_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op, ": x is ", text(dtype),
           "; it must be torch.bfloat16 or torch.float16");
  CG_CHECK(x.dim() == 2, op, ": x is ", text(x.sizes()), "; it must have two dimensions");
  const int64_t m = x.size(0), k = x.size(1);
  if (permutation) {
    CG_CHECK(scalar_type(*permutation) == ScalarType::Int, op, ": permutation is ", text(scalar_type(*permutation)),
             "; it must be torch.int32");
    CG_CHECK(permutation->dim() == 1 && permutation->size(0) == k, op, ": permutation is ", text(permutation->sizes()),
             "; it must be [", k, "], as a row of x");
    CG_CHECK(same_device(*permutation, x), op, ": permutation is on ", text_of_device(*permutation),
             "; it must be on the device of x, ", text_of_device(x));
  }
  const DeviceOf device(x);
  const int64_t pieces = (k + kPiece - 1) / kPiece;
  const int64_t sizes[2] = {m, k}, strides[2] = {pieces * kPiece, 1};
  const Tensor out = empty_strided(Sizes(sizes, 2), Sizes(strides, 2), dtype, x);
  if (m == 0 || k == 0) return out;
  const int64_t blocks = std::min<int64_t>((m * pieces + kThreads - 1) / kThreads, device.sm_count() * 8);
  launch(op, gather_kernel, grid(op, blocks), dim3(kThreads), device.stream, static_cast<uint16_t*>(out.data_ptr()),
         strides[0], static_cast<const uint16_t*>(x.data_ptr()), x.stride(0), x.stride(1),
         permutation ? static_cast<const int32_t*>(permutation->data_ptr()) : nullptr,
         permutation ? permutation->stride(0) : int64_t(0), m, k);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) { m.impl("gather_columns", TORCH_BOX(&gather_columns)); }

}  // namespace cutegemm
