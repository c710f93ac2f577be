// What a kernel file is: a shared object that computes d = epilogue(a @ b) and exports the functions below. It knows
// neither torch nor Python; whoever generated it (the CUTLASS emitter, a template of ours, the CuTe DSL), dispatch.cpp
// opens it by name and calls it through this header alone.
#pragma once
#include <stdint.h>

#define CUTEGEMM_ABI 4

#ifdef __cplusplus
extern "C" {
#endif

enum cutegemm_dtype {
  CUTEGEMM_NONE = 0,
  CUTEGEMM_FP32 = 1,
  CUTEGEMM_BF16 = 2,
  CUTEGEMM_FP16 = 3,
  CUTEGEMM_E4M3 = 4,
  CUTEGEMM_E5M2 = 5,
  CUTEGEMM_INT8 = 6,
  CUTEGEMM_INT32 = 7,
  CUTEGEMM_E8M0 = 8,  // 2**(byte - 127); 255 is NaN
  CUTEGEMM_INT4 = 9,  // codes of a weight, in the layout of packing.py's W4Weight
};

// An operand that varies along one side of d: a scale for each row, a bias for each column. Of the integer ones the
// type is fixed, INT32; of the others a call says it.
typedef struct cutegemm_vector {
  const void* data;      // null: the operand is absent (a scale of one; a bias, a zero point, a sum of zero)
  int32_t dtype;         // FP32, BF16 or FP16; INT32; of scales for blocks of k FP32 or E8M0
  int32_t group;         // of scales for blocks of k: so many rows (or columns) share one, 1 or 128; of others 0
  int64_t stride;        // elements from one row (or column, or group of them) to the next; 0: one serves them all
  int64_t block_stride;  // of scales for blocks of k: elements from one block of 128 to the next
} cutegemm_vector;

// An operand of d's shape.
typedef struct cutegemm_matrix {
  const void* data;  // null: zero
  int32_t dtype;     // FP32, BF16 or FP16
  int64_t stride[2];
} cutegemm_matrix;

// What the codes q of an INT4 weight stand for: (q - zero) * scale, or q * scale + zero, by groups of a row's columns.
typedef struct cutegemm_groups {
  const void* scales;  // (ceil(n / 64) * 4, groups, 16), as W4Weight has them
  const void* zeros;   // the same; null: every zero is 8
  int32_t dtype;       // of both: FP32, BF16 or FP16
  int32_t size;        // columns of a group; the last one may be shorter
  int32_t minimum;     // 1: zeros are minima, which are added
} cutegemm_groups;

// What becomes of d before it is stored, besides the epilogue. n is of b, also where d has half as many columns.
typedef struct cutegemm_output {
  int32_t gated;  // 1: d is (m, n / 2), silu(x) * y of the epilogue's results x in column j and y in column j + n / 2
  float* scale;   // of a d that is E4M3: takes a fresh scale for every 128 columns of a row
  int64_t scale_stride[2];
  int32_t power_of_two;  // 1: scales are rounded up to powers of two
} cutegemm_output;

// Launch options of one kernel file; a plan chooses them with the kernel. Zero always means the kernel's default.
typedef struct cutegemm_options {
  int32_t split;     // how many parts k is cut into
  int32_t swizzle;   // width, in tiles, of the band that rasterization walks through for reuse in L2
  int32_t raster;    // 0: along m or n as the kernel likes, 1: along m first, 2: along n first
  int32_t prefetch;  // KB of b that a CTA asks into L2 before it waits for the kernel ahead of it
  int32_t rows;      // of b^T in a tile, where a kernel leaves that open
  int32_t no_chain;  // 1: launch without programmatic dependent launch
} cutegemm_options;

typedef struct cutegemm_call {
  int32_t m, n, k;
  int32_t a_dtype, b_dtype, d_dtype;
  const void* a;                                  // (m, k)
  const void* b;                                  // (k, n); of INT4 W4Weight's packed
  void* d;                                        // (m, n), or what output says
  int64_t a_stride[2], b_stride[2], d_stride[2];  // in elements, for the two dimensions as written above
  cutegemm_vector scale_a, scale_b, bias;         // along m, n, n
  cutegemm_vector zero_point_a, sum_b;            // along m, n; for an INT8 product, and integers
  cutegemm_groups groups;                         // of an INT4 b, which has no strides
  cutegemm_matrix residual;
  cutegemm_output output;
  cutegemm_options options;
  int32_t sm_count;  // of the current device
  void* workspace;   // cutegemm_workspace() bytes, 256-byte aligned, uninitialized
  void* stream;      // cudaStream_t of the current device
} cutegemm_call;

// The kernel's name, as in variants.py, and the CUTEGEMM_ABI it was built with.
const char* cutegemm_name(void);
int32_t cutegemm_abi(void);

// Loads the device code on the current device and sets its attributes: once a device, outside of the hot path.
int32_t cutegemm_prepare(void);

// Bytes of workspace that this call needs.
int64_t cutegemm_workspace(const cutegemm_call* call);

// Enqueues the kernel. Returns 0, or a code for cutegemm_error(); when it fails nothing was written.
int32_t cutegemm_launch(const cutegemm_call* call);
const char* cutegemm_error(int32_t code);

#ifdef __cplusplus
}
#endif
