// Programmatic dependent launch, from inside of a kernel. A kernel that is launched so may start while the one before
// it on the stream still runs.
#pragma once

namespace cutegemm {

// Waits until the kernel before this one has finished and its writes can be seen. Nothing that it may read or write
// must be touched before.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may come to multiprocessors that have room for it, where it waits in turn.
__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace cutegemm
