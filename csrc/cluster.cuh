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
__device__ __forceinline__ void store_remote(uint32_t remote, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t remote, int32_t value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t remote, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(x), "f"(y) : "memory");
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
