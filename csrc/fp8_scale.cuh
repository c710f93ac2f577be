// How a scale is made of the largest value, and a code of a value and its scale: as quantize.py has it, to the bit.
#pragma once
#include <stdint.h>

namespace cutegemm {

constexpr float kE4m3Max = 448.f;
constexpr float kAmaxFloor = 0x1p-40f;  // quantize.py says why

// x / by with the bits of IEEE's division (Markstein), in three instructions. inverse: 1 / by, rounded to nearest. It
// holds where nothing under- or overflows on the way.
__device__ __forceinline__ float divided(float x, float by, float inverse) {
  const float quotient = x * inverse;
  return __fmaf_rn(__fmaf_rn(-quotient, by, x), inverse, quotient);
}

// Of a scale: the next one up, or itself.
__device__ __forceinline__ float power_of_two_above(float scale) {
  return __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
}

}  // namespace cutegemm
