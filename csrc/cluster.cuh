// What CTAs of a cluster tell each other through distributed shared memory.
#pragma once
#include <stdint.h>

#include <cute/arch/util.hpp>

namespace cutegemm {

// Of what lies at p in every CTA, that of CTA `rank`.
template <class T>
__device__ __forceinline__ uint32_t remote_address(T* p, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(cute::cast_smem_ptr_to_uint(p)), "r"(rank));
  return remote;
}
// Copies shared memory to another CTA, whose barrier counts the bytes as they come: 16 or a multiple of it. It reads
// what was written before a fence_view_async_shared(). Stores of threads took 2 cycles for each thread's 8 bytes.
__device__ __forceinline__ void copy_to_remote(uint32_t remote, uint32_t remote_barrier, const void* from, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(remote),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes), "r"(remote_barrier)
      : "memory");
}
// An arrival at a barrier of the cluster publishes the stores before it, and the wait sees them.
__device__ __forceinline__ void arrive_at(uint64_t& barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_address(&barrier, rank))
               : "memory");
}
__device__ __forceinline__ void wait_cluster(uint64_t& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(cute::cast_smem_ptr_to_uint(&barrier)),
      "r"(phase)
      : "memory");
}

}  // namespace cutegemm
