// What every launcher shares: the exported functions of kernel_abi.h, the refusals they return, and the launch itself.
// A kernel file ends with
//
//   CUTEGEMM_KERNEL_FILE("its_name", Implementation)
//
// where Implementation is a type, in any namespace, with
//
//   static int32_t prepare();
//   static int64_t workspace(const cutegemm_call& call);
//   static int32_t launch(const cutegemm_call& call);
#pragma once
#include <cuda_runtime.h>

#include "chain.cuh"
#include "kernel_abi.h"

namespace cutegemm {

// Positive codes are cudaError_t.
enum Refusal : int32_t {
  kWrongTypes = -1,
  kMisaligned = -2,
  kWrongLayout = -3,
  kWrongSize = -4,
  kWrongOptions = -5,
  kNoWorkspace = -6,
  kNotImplementable = -7,
};

inline const char* error_text(int32_t code) {
  switch (code) {
    case kWrongTypes:
      return "the types of the operands, the output, the scales or the bias are not those of this kernel";
    case kMisaligned:
      return "an operand's address or stride is not a multiple of the 16 bytes that this kernel reads at once";
    case kWrongLayout:
      return "an operand's strides are not those of the layout that this kernel reads";
    case kWrongSize:
      return "m, n or k is negative, or not a size that this kernel takes";
    case kWrongOptions:
      return "the launch options ask for something that this kernel does not do";
    case kNoWorkspace:
      return "this call needs a workspace, and its address is null or not a multiple of 256 bytes";
    case kNotImplementable:
      return "CUTLASS, or the driver's tensor maps, cannot describe this problem";
    default:
      return code >= 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown code of a kernel file";
  }
}

// Launches on call.stream, in clusters along x; with a cluster of 0 in the way that devices before 9.0 know, without
// clusters or programmatic dependent launch. Otherwise, and unless call.options.no_chain, the kernel may start while
// the one before it on the stream still runs, and must call wait_for_previous_kernel() before it touches anything that
// one may read or write. Returns 0 or the cudaError_t, which it also clears, so that nobody else mistakes it for
// theirs.
template <class... Parameters, class... Arguments>
int32_t launch_cluster(const cutegemm_call& call, void (*kernel)(Parameters...), dim3 grid, int cluster, dim3 block,
                       size_t shared_bytes, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(call.stream);
  config.attrs = attributes;
  config.numAttrs = cluster == 0 ? 0 : call.options.no_chain ? 1 : 2;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

template <class... Parameters, class... Arguments>
int32_t launch_kernel(const cutegemm_call& call, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                      size_t shared_bytes, const Arguments&... arguments) {
  return launch_cluster(call, kernel, grid, 1, block, shared_bytes, arguments...);
}

// For prepare(): with lazy loading, a kernel's code reaches the device at its first launch, which is too late inside a
// graph capture. Asking for its attributes brings it there.
template <class Kernel>
int32_t load_kernel(Kernel* kernel, int shared_bytes = 0) {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status == cudaSuccess && shared_bytes > 48 * 1024) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

}  // namespace cutegemm

#define CUTEGEMM_EXPORT extern "C" __attribute__((visibility("default")))

#define CUTEGEMM_KERNEL_FILE(NAME, ...)                                                                           \
  CUTEGEMM_EXPORT const char* cutegemm_name(void) { return NAME; }                                                \
  CUTEGEMM_EXPORT int32_t cutegemm_abi(void) { return CUTEGEMM_ABI; }                                             \
  CUTEGEMM_EXPORT int32_t cutegemm_prepare(void) { return __VA_ARGS__::prepare(); }                               \
  CUTEGEMM_EXPORT int64_t cutegemm_workspace(const cutegemm_call* call) { return __VA_ARGS__::workspace(*call); } \
  CUTEGEMM_EXPORT int32_t cutegemm_launch(const cutegemm_call* call) { return __VA_ARGS__::launch(*call); }       \
  CUTEGEMM_EXPORT const char* cutegemm_error(int32_t code) { return cutegemm::error_text(code); }
