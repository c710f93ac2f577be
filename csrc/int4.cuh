// Values of the four-bit codes of packing.py's W4Weight, exactly, as the A operand of an MMA with 16-bit elements.
#pragma once
#include <stdint.h>

namespace cutegemm {

template <bool kBf16>
struct Int4Values {
  // Values are (code - zero) / kFactor.
  //
  // The codes of a lane's upper rows lie four bits above those of the lower ones, and a shift takes two cycles of a
  // pipe that is short: so their bits stay where they are. As a BF16, 0x00f0 & bits is code * 2^-129, a subnormal
  // number or in the first binade after them, which fma multiplies by at most 2^127.
  static constexpr float kFactor = kBf16 ? 4.f : 1.f;

  // What is added for a zero of the lower rows (0 to 7 of a strip's 16) and of the upper ones.
  struct Zeros {
    uint32_t lower, upper;
  };
  static __device__ __forceinline__ Zeros zeros(float lower, float upper) {
    if constexpr (kBf16) {
      return {twice(-0.25f * lower - 32.f), twice(-0.25f * upper)};
    } else {
      return {twice(-1024.f - lower), twice(-64.f - upper)};
    }
  }

  // The four registers of A for a lane's word.
  static __device__ __forceinline__ void make(uint32_t (&a)[4], uint32_t word, Zeros const& zeros) {
    constexpr uint32_t kMagic = kBf16 ? 0x43004300 : 0x64006400;  // 128 and 1024: a code is their last bits
    constexpr uint32_t kLower = kBf16 ? 0x3e803e80 : 0x3c003c00;  // 1 / 4 and 1
    constexpr uint32_t kUpper = kBf16 ? 0x7f007f00 : 0x2c002c00;  // 2^127 and 1 / 16
#pragma unroll
    for (int i = 0; i < 4; i += 2, word >>= 8) {
      uint32_t lower, upper;
      asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(lower) : "r"(word), "n"(kMagic));
      asm("lop3.b32 %0, %1, 0x00f000f0, %2, 0xea;" : "=r"(upper) : "r"(word), "n"(kBf16 ? 0 : kMagic));
      a[i] = fma(lower, kLower, zeros.lower);
      a[i + 1] = fma(upper, kUpper, zeros.upper);
    }
  }

  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    if constexpr (kBf16) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    }
    return d;
  }
  // x, which must be exact in 16 bits, in both halves.
  static __device__ __forceinline__ uint32_t twice(float x) {
    uint32_t d;
    if constexpr (kBf16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(x));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(x));
    }
    return d;
  }
};

}  // namespace cutegemm
