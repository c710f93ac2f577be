// Values of a weight of four or eight bits, exactly, as the A operand of an MMA with elements of 16 bits.
#pragma once
#include <stdint.h>

namespace cutegemm {

// What a weight has: codes in the layout of packing.py's W4Weight, or values in rows along k.
struct Int4 {};
struct E4m3 {};
struct Int8 {};

template <bool kBf16>
__device__ __forceinline__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (kBf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}
// (x & mask) | bits
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// A lane's 16 x 16 of the weight, of rows lane / 4 and lane / 4 + 8, as the MMA's operand.
template <class Weight, bool kBf16>
struct Values;

template <bool kBf16>
struct Values<Int4, kBf16> {
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
      a[i] = fma_pairs<kBf16>(lower, kLower, zeros.lower);
      a[i + 1] = fma_pairs<kBf16>(upper, kUpper, zeros.upper);
    }
  }

  // In BF16, code * scale + offset in one step, over a power of two that is another one for lower and upper rows: 2^53
  // and 2^49. Bits that stay where they are, are code * 2^-133 and code * 2^-129, and are multiplied with scale * 2^80.
  // So a scale must be less than 2^47, and values lose bits if it is less than 2^-73.
  static constexpr uint32_t kScaled = 0x67806780;  // 2^80
  static __device__ __forceinline__ constexpr uint32_t scaled_minus_eight(int upper) {
    return upper ? 0xa880a880 : 0xa680a680;
  }
  static __device__ __forceinline__ constexpr uint32_t scaled_one(int upper) { return upper ? 0x27002700 : 0x25002500; }
  static __device__ __forceinline__ constexpr float scaled_by(int upper) { return upper ? 0x1p49f : 0x1p53f; }
  static __device__ __forceinline__ void make_scaled(uint32_t (&a)[4], uint32_t word, uint32_t const (&scale)[2],
                                                     uint32_t const (&offset)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2, word >>= 8) {
      a[i] = fma_pairs<true>(word & 0x000f000f, scale[0], offset[0]);
      a[i + 1] = fma_pairs<true>(word & 0x00f000f0, scale[1], offset[1]);
    }
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

// Of values: four neighbours of a row, as two pairs.
//
// Bits of E4M3, moved to where the other type has its exponent, are the value times a power of two, also if it is
// subnormal. The two NaNs become 480, with their sign; a row that has one becomes NaN in the end.
template <bool kBf16>
struct Values<E4m3, kBf16> {
  static constexpr float kFactor = kBf16 ? 1.f : 256.f;  // FP16 leaves the power to the sums

  // Bits 7, 15, 23 and 31 of what is returned are set if one of four values is a NaN: only in a byte with seven ones,
  // or above one with eight, does an addition of 1 change bit 7.
  static constexpr uint32_t kNan = 0x80808080;
  static __device__ __forceinline__ uint32_t nans(uint32_t four) { return four ^ four + 0x01010101; }

  static __device__ __forceinline__ void make(uint32_t& a, uint32_t& b, uint32_t four) {
    a = pair(sign_extended<0x9180>(four)), b = pair(sign_extended<0xb3a2>(four));
  }
  static __device__ __forceinline__ uint32_t pair(uint32_t extended) {
    constexpr uint32_t kMinusZero = 0x80008000, kPower = 0x7b807b80;  // 2^120
    if constexpr (kBf16) {
      return fma_pairs<true>(extended << 4 & 0x87f087f0, kPower, kMinusZero);
    } else {
      return extended << 7 & 0xbf80bf80;
    }
  }
  // Two bytes as numbers of 16 bits.
  template <int kSelector>
  static __device__ __forceinline__ uint32_t sign_extended(uint32_t four) {
    uint32_t two;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(two) : "r"(four), "n"(kSelector));
    return two;
  }
};

template <bool kBf16>
struct Values<Int8, kBf16> {
  static constexpr float kFactor = 1.f;

  static __device__ __forceinline__ void make(uint32_t& a, uint32_t& b, uint32_t four) {
    if constexpr (!kBf16) four ^= 0x80808080;  // x + 128
    a = pair(__byte_perm(four, kMagic, 0x4140)), b = pair(__byte_perm(four, kMagic, 0x4342));
  }
  static __device__ __forceinline__ uint32_t pair(uint32_t lower_bytes) {
    if constexpr (kBf16) {  // seven bits after 128, less 128, and once more if the sign is set
      constexpr uint32_t k128 = 0x43004300, kMinusOne = 0xbf80bf80;
      return fma_pairs<true>(masked_or(lower_bytes, 0x00800080, k128), kMinusOne,
                             masked_or(lower_bytes, 0x007f007f, k128));
    } else {
      constexpr uint32_t kOne = 0x3c003c00, kMinus1152 = 0xe480e480;
      return fma_pairs<false>(lower_bytes, kOne, kMinus1152);
    }
  }

 private:
  static constexpr uint32_t kMagic = kBf16 ? 0 : 0x64646464;  // the upper bytes: 1024 in FP16
};

}  // namespace cutegemm
