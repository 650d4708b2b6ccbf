// Weights brought to another format when a model is loaded: fp32 rows to rows as in records.h. The
// 32-blocks round as ggml's quantize_row_*_ref, operation by operation in fp32:
// https://github.com/ggml-org/ggml/blob/5136ed06fb4dfcea74d6e7e914fe4994017d30c2/src/ggml-quants.c
// int8 has one scale for a row, max|x| / 127, and fp8 one, max|x| / 448 (its largest value).
#pragma once

#include "kernels/records.h"
#include "kernels/simd.h"

namespace invar::INVAR_ISA {

INVAR_INLINE void put_half_of(float x, uint8_t* p) {
  float lanes[W] = {x};
  uint16_t halves[W];
  store_f16(halves, load(lanes));
  memcpy(p, halves, 2);
}

// The value of greatest magnitude, the first of equal ones.
template <int N>
INVAR_INLINE float extreme_of(const float* x) {
  float extreme = x[0];
  for (int i = 1; i < N; i++)
    if (__builtin_fabsf(x[i]) > __builtin_fabsf(extreme)) extreme = x[i];
  return extreme;
}
INVAR_INLINE float largest_magnitude(const float* x, int64_t k) {
  float largest = 0;
  for (int64_t i = 0; i < k; i++)
    largest = __builtin_fabsf(x[i]) > largest ? __builtin_fabsf(x[i]) : largest;
  return largest;
}
INVAR_INLINE float inverse_of(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }
// Truncated, within [0, highest].
INVAR_INLINE int truncated(float x, int highest) {
  const int code = (int)x;
  return code < 0 ? 0 : code > highest ? highest : code;
}

// Codes of 32 values as nibbles, with their fifth bits if there is a place for them.
INVAR_INLINE void put_codes(const float* x, float inverse, float offset, float add, int highest,
                            uint8_t* fifth, uint8_t* nibbles) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; i++) {
    const int low = truncated((x[i] - offset) * inverse + add, highest);
    const int high = truncated((x[i + 16] - offset) * inverse + add, highest);
    nibbles[i] = (uint8_t)((low & 15) | (high & 15) << 4);
    bits |= (uint32_t)(low >> 4) << i | (uint32_t)(high >> 4) << (i + 16);
  }
  if (fifth) memcpy(fifth, &bits, 4);
}

template <int kBits>  // q4_0, q5_0
INVAR_INLINE void encode_signed(const float* x, uint8_t* block) {
  constexpr int half = 1 << (kBits - 1);
  const float scale = extreme_of<32>(x) / -(float)half;
  put_half_of(scale, block);
  put_codes(x, inverse_of(scale), 0, (float)half + 0.5f, 2 * half - 1, kBits == 5 ? block + 2 : 0,
            block + (kBits == 5 ? 6 : 2));
}
template <int kBits>  // q4_1, q5_1
INVAR_INLINE void encode_with_minimum(const float* x, uint8_t* block) {
  constexpr int highest = (1 << kBits) - 1;
  float least = x[0], most = x[0];
  for (int i = 1; i < 32; i++) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
  }
  const float scale = (most - least) / (float)highest;
  put_half_of(scale, block);
  put_half_of(least, block + 2);
  put_codes(x, inverse_of(scale), least, 0.5f, highest, kBits == 5 ? block + 4 : 0,
            block + (kBits == 5 ? 8 : 4));
}
INVAR_INLINE void encode_q8_0(const float* x, uint8_t* block) {
  const float scale = largest_magnitude(x, 32) / 127.0f, inverse = inverse_of(scale);
  put_half_of(scale, block);
  for (int i = 0; i < 32; i++) {  // half away from zero
    const float v = x[i] * inverse;
    const float whole = (float)(int)v;
    block[2 + i] = (uint8_t)((int)v + (v - whole >= 0.5f) - (v - whole <= -0.5f));
  }
}

static void encode_int8(const float* x, int64_t k, uint8_t* row) {
  const float scale = largest_magnitude(x, k) / 127.0f, inverse = inverse_of(scale);
  memcpy(row, &scale, 4);
  for (int64_t i = 0; i < k; i++) row[4 + i] = (uint8_t)(int)__builtin_rintf(x[i] * inverse);
}

// Nearest, ties to even; |x| <= 448.
INVAR_INLINE uint8_t to_e4m3(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), magnitude = bits & 0x7fffffff;
  const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
  if (magnitude < 0x3c800000)  // 2^-6: multiples of 2^-9
    return (uint8_t)(sign | (int)__builtin_rintf(__builtin_fabsf(x) * 512.0f));
  const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
  const uint32_t code = (rounded >> 20) - (120 << 3);
  return (uint8_t)(sign | (code < 0x7e ? code : 0x7e));
}

static void encode_fp8(const float* x, int64_t k, uint8_t* row) {
  const float scale = largest_magnitude(x, k) / 448.0f, inverse = inverse_of(scale);
  uint8_t* codes = row + scale_bytes(WeightFormat::fp8, k);
  for (int64_t i = 0; i < k; i += kFp8K) memcpy(row + i / kFp8K * 4, &scale, 4);
  for (int64_t i = 0; i < k; i++) codes[i] = to_e4m3(x[i] * inverse);
}

}  // namespace invar::INVAR_ISA
