// Tensor maps, and what kernels do with TMA and barriers by hand. CUTLASS has the barriers.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace cutegemm {

// A tensor of kRank dimensions, the first contiguous, by boxes. pitches: bytes from one to the next along the others.
// What lies outside reads as zero, and is not written.
template <int kRank>
bool encode(CUtensorMap& map, CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[kRank],
            const cuuint64_t (&pitches)[kRank - 1], const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle,
            CUtensorMapL2promotion promotion) {
  static PFN_cuTensorMapEncodeTiled_v12000 const encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  cuuint32_t ones[kRank];
  for (auto& one : ones) one = 1;
  return encoder &&
         encoder(&map, type, kRank, const_cast<void*>(data), sizes, pitches, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A matrix whose rows are contiguous, by boxes of box_bytes (128, 64 or 32) of each of box_rows rows, which lie in
// shared memory in the order that wgmma and stmatrix want (swizzled).
inline bool encode_rows(CUtensorMap& map, CUtensorMapDataType type, int bytes, const void* data, int64_t rows,
                        int64_t columns, int64_t pitch, int box_rows, int box_bytes = 128) {
  CUtensorMapSwizzle const swizzle = box_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode<2>(map, type, data, {cuuint64_t(columns), cuuint64_t(rows)}, {cuuint64_t(pitch * bytes)},
                   {cuuint32_t(box_bytes / bytes), cuuint32_t(box_rows)}, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// A matrix of FP32 whose rows are contiguous, by boxes of `box` elements of one row, as they are.
inline bool encode_row(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int64_t pitch, int box) {
  return encode<2>(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data, {cuuint64_t(columns), cuuint64_t(rows)},
                   {cuuint64_t(pitch * 4)}, {cuuint32_t(box), 1}, CU_TENSOR_MAP_SWIZZLE_NONE,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

// Boxes of a map, at (column, row). The loads tell a barrier of this CTA; with a mask, those of all its CTAs, at
// the same address in each.
__device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t to, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t to, uint32_t barrier, int column, int row,
                                          uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}
__device__ __forceinline__ void store_rows(const CUtensorMap& map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what all but the last kLast stored may be written again in shared memory.
template <int kLast>
__device__ __forceinline__ void wait_until_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLast) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, from the registers in which an MMA leaves its sums.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// How long L2 keeps what a load brings.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t read_often() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace cutegemm
