// The scale of a block of values that become s8 codes: activations, and K and V of a token.
#pragma once

#include "kernels/simd.h"

namespace invar::INVAR_ISA {

// The largest |x| as float bits: among magnitudes bits order as numbers, NaN above infinity, and
// an integer maximum is the same in any order.
INVAR_INLINE int32_t max_magnitude(const float* x, int count) {
  VI m = zero_i();
  for (int i = 0; i < count; i += W) m = max(m, as_int(load(x + i)) & set1_i(INT32_MAX));
  return max_lane(m);
}

// The block's scale, and the factor that makes codes.
INVAR_INLINE float block_scale(int32_t magnitude, float* factor) {
  constexpr int32_t kInfinity = 0x7f800000, kNan = 0x7fc00000, kSmallestNormal = 0x00800000;
  float max = __builtin_bit_cast(float, magnitude);
  *factor = 0;
  if (magnitude >= kInfinity) return __builtin_bit_cast(float, kNan);
  float scale = max * (1.0f / 127.0f);
  if (__builtin_bit_cast(int32_t, scale) < kSmallestNormal) return 0;
  *factor = 127.0f / max;
  return scale;
}

}  // namespace invar::INVAR_ISA
