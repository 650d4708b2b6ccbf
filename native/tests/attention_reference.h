// What K and V of a token stand for once they are stored, by format: the contract in plain C++.
#pragma once

#include "tests/kernel_test.h"

namespace kernel_test {

inline float to_bf16(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  b = (b + 0x7fff + (b >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &b, 4);
  return x;
}

// The nearest half, ties to even; infinity from 65,520 on.
inline double to_half(float x) {
  if (!std::isfinite(x) || std::fabs(x) >= 65520.0f) return std::copysign(HUGE_VAL, x);
  const int exponent = x == 0 ? -14 : std::max(-14, std::ilogb(x));
  const double ulp = std::ldexp(1.0, exponent - 10);
  return std::nearbyint(x / ulp) * ulp;
}

// The scale of s8 codes over a block, as activations have it.
inline float code_scale(const float* x, int64_t n, float* factor) {
  float largest = 0;
  for (int64_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
  const float scale = largest * (1.0f / 127.0f);
  *factor = scale >= std::numeric_limits<float>::min() ? 127.0f / largest : 0;
  return *factor == 0 ? 0 : scale;
}

// Finite values [n] of K or V of a token and head, as they are read again.
inline std::vector<double> stored(invar::KVFormat format, const float* x, int64_t n) {
  float factor, scale = code_scale(x, n, &factor);
  std::vector<double> values(n);
  for (int64_t i = 0; i < n; i++) {
    if (format == invar::KVFormat::bf16) values[i] = to_bf16(x[i]);
    if (format == invar::KVFormat::fp16) values[i] = to_half(x[i]);
    if (format == invar::KVFormat::int8) values[i] = std::nearbyint(x[i] * factor) * double(scale);
  }
  return values;
}

// A scaled query as it meets them.
inline double operand(invar::KVFormat format, float q) {
  return format == invar::KVFormat::bf16 ? to_bf16(q) : q;
}

}  // namespace kernel_test
