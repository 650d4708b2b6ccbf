// Weight formats written down a second time, one element at a time and without SIMD.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/codebooks.h"
#include "kernels/kernels.h"

namespace linear_reference {

using namespace invar;

// Formats that are multiplied in fp32 or bf16; of one row with a scale; of rows of codes.
inline bool is_float(WeightFormat f) { return f <= WeightFormat::bf16 || f == WeightFormat::fp8; }
inline bool is_row(WeightFormat f) { return f == WeightFormat::int8; }
inline int64_t block_of(ActFormat f) {
  return f == ActFormat::q8_16 ? 16 : f == ActFormat::q8_32 ? 32 : 256;
}
// Of exact sums, with a scale of activations each.
inline int64_t block_k(WeightFormat f) {
  return is_float(f) || is_row(f) ? 1 : block_of(act_format_of(f));
}
// Floats at the beginning of a row.
inline bool has_row_scales(WeightFormat f) {
  return is_row(f) || f == WeightFormat::fp8 || f == WeightFormat::nvfp4;
}
inline const char* name_of(WeightFormat f) { return kWeightFormatNames[(int)f]; }

inline float half_value(const uint8_t* p) {
  int h = p[0] | p[1] << 8, e = h >> 10 & 31, m = h & 1023;
  float x = std::ldexp((float)(e ? 1024 + m : m), e ? e - 25 : -24);
  return h & 0x8000 ? -x : x;
}

// A weight: d * scale * code + m * min. Formats without sub-scales have scale and min 1.
struct Element {
  float d;
  int scale;
  float code;  // an integer but in the float formats
  float m = 0;
  int min = 0;
  double product() const { return (double)d * scale * code; }
  double offset() const { return (double)m * min; }
  double value() const { return product() + offset(); }
};

inline int nibble(const uint8_t* q, int64_t i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }
inline int bit(const uint8_t* p, int64_t i) { return p[i / 8] >> (i % 8) & 1; }

// Scale (first) or minimum g of the 12 bytes of q4_k and q5_k: two rows of six bits, and in the
// third row the low nibbles of the later four, whose top bits are in the first two rows.
inline int six_bits(const uint8_t* s, int g, bool minimum) {
  const uint8_t* row = minimum ? s + 4 : s;
  if (g < 4) return row[g] & 63;
  return (minimum ? s[g + 4] >> 4 : s[g + 4] & 15) + 16 * (row[g - 4] >> 6);
}

constexpr int kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// OCP e2m1: sign, two bits of exponent (bias 1), one of mantissa; twice its value.
inline int twice_e2m1(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const int magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return code & 8 ? -magnitude : magnitude;
}

// Signs of IQ2 and IQ3 in words of seven bits: the eighth makes the number of negatives even.
inline bool even_sign(uint32_t seven, int i) {
  int negatives = 0;
  for (int b = 0; b < 7; b++) negatives += seven >> b & 1;
  return i < 7 ? seven >> i & 1 : negatives % 2 == 1;
}
inline uint32_t word(const uint8_t* p, int bytes) {
  uint32_t x = 0;
  for (int b = 0; b < bytes; b++) x |= (uint32_t)p[b] << 8 * b;
  return x;
}
// Value i of an entry of a codebook: of eight in three values, of four in eight values.
inline int iq1_value(uint16_t entry, int i) { return (entry >> 2 * i & 3) - 1; }
inline int iq2_value(uint16_t entry, int i) {
  return 8 + 17 * (entry >> 2 * i & 3) + (entry >> 2 * i & 2) / 2;
}
inline int iq3_xxs_value(uint16_t entry, int i) {
  const int place = entry >> 4 * i & 15;
  return place == 7 ? 62 : 4 + 8 * place;
}
inline int iq3_s_value(uint16_t entry, int i) { return 1 + 2 * (entry >> 4 * i & 15); }

// Element i of a block of IQ1, IQ2 or IQ3; the product of scale and code is what ggml computes.
inline Element element_of_codebook(WeightFormat f, const uint8_t* p, int i) {
  const int g = i / 32, l = i % 32, eighth = l / 8, fourth = l / 4, half = l / 16, at = i % 8;
  const float d = half_value(p);
  switch (f) {
    case WeightFormat::iq1_s: {
      const uint32_t high = word(p + 34 + 2 * g, 2);
      const uint16_t entry = kGridIQ1[p[2 + 4 * g + eighth] + 256 * (high >> (3 * eighth) & 7)];
      const float delta = high >> 15 ? -0.125f : 0.125f;
      return {d, (int)(2 * (high >> 12 & 7) + 1), (float)iq1_value(entry, at) + delta};
    }
    case WeightFormat::iq1_m: {
      const int nibble = p[32 + 2 * g + eighth / 2] >> (4 * (eighth % 2)) & 15;
      const uint16_t entry = kGridIQ1[p[4 * g + eighth] + 256 * (nibble & 7)];
      const uint32_t scales = word(p + 48 + g / 2 * 2, 2) >> (6 * (g % 2) + 3 * half);
      uint8_t halves[2] = {};
      for (int n = 0; n < 4; n++) halves[n / 2] |= (p[49 + 2 * n] >> 4) << (4 * (n % 2));
      return {half_value(halves), (int)(2 * (scales & 7) + 1),
              (float)iq1_value(entry, at) + (nibble & 8 ? -0.125f : 0.125f)};
    }
    case WeightFormat::iq2_xxs: {
      const uint8_t* q = p + 2 + 8 * g;
      const uint32_t signs = word(q + 4, 4);
      const int value = iq2_value(kGridIQ2_XXS[q[eighth]], at);
      return {d / 8, (int)(2 * (signs >> 28) + 1),
              (float)(even_sign(signs >> (7 * eighth) & 127, at) ? -value : value)};
    }
    case WeightFormat::iq2_xs: {
      const uint32_t both = word(p + 2 + 2 * (i / 8), 2);
      const int value = iq2_value(kGridIQ2_XS[both & 511], at);
      const int scale = half ? p[66 + g] >> 4 : p[66 + g] & 15;
      return {d / 8, 2 * scale + 1, (float)(even_sign(both >> 9, at) ? -value : value)};
    }
    case WeightFormat::iq2_s: {
      const int high = p[66 + g] >> (2 * eighth) & 3;
      const int value = iq2_value(kGridIQ2_S[p[2 + i / 8] + 256 * high], at);
      const int scale = half ? p[74 + g] >> 4 : p[74 + g] & 15;
      return {d / 8, 2 * scale + 1, (float)(bit(p + 34, i) ? -value : value)};
    }
    case WeightFormat::iq3_xxs: {
      const uint32_t signs = word(p + 66 + 4 * g, 4);
      const int value = iq3_xxs_value(kGridIQ3_XXS[p[2 + i / 4]], i % 4);
      return {d / 4, (int)(2 * (signs >> 28) + 1),
              (float)(even_sign(signs >> (7 * eighth) & 127, at) ? -value : value)};
    }
    default: {  // iq3_s
      const int high = p[66 + g] >> fourth & 1;
      const int value = iq3_s_value(kGridIQ3_S[p[2 + i / 4] + 256 * high], i % 4);
      const int scale = g % 2 ? p[106 + g / 2] >> 4 : p[106 + g / 2] & 15;
      return {d, 2 * scale + 1, (float)(bit(p + 74, i) ? -value : value)};
    }
  }
}

// Digit i of tq1_0: of a byte b, the whole part of 3 * (3^n b / 256 modulo 1). 160 are those of the
// first 32 bytes, 80 of 16 bytes, 16 of four.
inline int digit(const uint8_t* p, int i) {
  const int bytes = i < 160 ? 32 : i < 240 ? 16 : 4;
  const int at = i < 160 ? i : i < 240 ? i - 160 : i - 240;
  int b = p[(i < 160 ? 0 : i < 240 ? 32 : 48) + at % bytes];
  for (int n = 0; n < at / bytes; n++) b = b * 3 % 256;
  return b * 3 / 256;
}

// Element i of 256 of a K-quant's block.
inline Element element_256(WeightFormat f, const uint8_t* p, int i) {
  const int half = i / 128, quarter = i % 128 / 32, l = i % 32, g16 = i / 16, g32 = i / 32;
  switch (f) {
    case WeightFormat::q2_k: {
      int code = p[16 + 32 * half + l] >> (2 * quarter) & 3;
      return {half_value(p + 80), p[g16] & 15, (float)code, -half_value(p + 82), p[g16] >> 4};
    }
    case WeightFormat::q3_k: {
      int code = (p[32 + 32 * half + l] >> (2 * quarter) & 3) + 4 * (p[l] >> g32 & 1) - 4;
      int low = g16 < 8 ? p[96 + g16] & 15 : p[96 + g16 - 8] >> 4;
      int high = p[104 + g16 % 4] >> (2 * (g16 / 4)) & 3;
      return {half_value(p + 108), low + 16 * high - 32, (float)code};
    }
    case WeightFormat::q4_k:
    case WeightFormat::q5_k: {
      const uint8_t* codes = p + (f == WeightFormat::q5_k ? 48 : 16) + g32 / 2 * 32;
      int code = g32 % 2 ? codes[l] >> 4 : codes[l] & 15;
      if (f == WeightFormat::q5_k) code += 16 * (p[16 + l] >> g32 & 1);
      return {half_value(p), six_bits(p + 4, g32, false), (float)code, -half_value(p + 2),
              six_bits(p + 4, g32, true)};
    }
    case WeightFormat::q6_k: {
      int low = p[half * 64 + l + 32 * (quarter & 1)];
      int code =
          (quarter < 2 ? low & 15 : low >> 4) + 16 * (p[128 + 32 * half + l] >> (2 * quarter) & 3);
      return {half_value(p + 208), (int8_t)p[192 + g16], (float)(code - 32)};
    }
    case WeightFormat::iq4_xs: {
      int low = g32 % 2 ? p[4 + g32 / 2] >> 4 : p[4 + g32 / 2] & 15;
      int high = (p[2] | p[3] << 8) >> (2 * g32) & 3;
      return {half_value(p), low + 16 * high - 32, (float)kIq4[nibble(p + 8 + 16 * g32, l)]};
    }
    case WeightFormat::tq1_0:
      return {half_value(p + 52), 1, (float)(digit(p, i) - 1)};
    case WeightFormat::tq2_0:
      return {half_value(p + 64), 1, (float)((p[32 * half + l] >> (2 * quarter) & 3) - 1)};
    default:
      return element_of_codebook(f, p, i);
  }
}

// OCP e4m3fn.
inline float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float x =
      std::ldexp((float)(exponent ? 8 + mantissa : mantissa), std::max(exponent, 1) - 10);
  return code & 128 ? -x : x;
}
inline float float_at(const uint8_t* p) {
  float x;
  memcpy(&x, p, 4);
  return x;
}

// nvfp4: the scale of 16, its sign cleared; 0x7f is 0, 0xff is 480.
inline float nvfp4_scale(const uint8_t* row, int64_t i) {
  const uint8_t code = row[4 + i / 64 * 36 + i % 64 / 16];
  return code == 0x7f ? 0 : e4m3(code & 127);
}
inline int nvfp4_code(const uint8_t* row, int64_t i) {
  const uint8_t both = row[4 + i / 64 * 36 + 4 + i % 64 / 16 * 8 + i % 8];
  return twice_e2m1(i % 16 < 8 ? both & 15 : both >> 4);
}

// Element i of row of k whose scales stand at its beginning.
inline Element element_of_row(WeightFormat f, const uint8_t* row, int64_t k, int64_t i) {
  if (f == WeightFormat::int8) return {float_at(row), 1, (float)(int8_t)row[4 + i]};
  if (f == WeightFormat::nvfp4)
    return {float_at(row), 1, nvfp4_scale(row, i) / 2 * (float)nvfp4_code(row, i)};
  return {float_at(row + i / 128 * 4), 1, e4m3(row[(k + 127) / 128 * 4 + i])};
}

// Element i of a GGML row, from the format's description.
inline Element element(WeightFormat f, const uint8_t* row, int64_t k, int64_t i) {
  if (has_row_scales(f)) return element_of_row(f, row, k, i);
  const uint8_t* p = row + row_bytes_ggml(f, i / block_k(f) * block_k(f));
  const int64_t e = i % block_k(f);
  float x;
  switch (f) {
    case WeightFormat::f32:
      memcpy(&x, p, 4);
      return {1, 1, x};
    case WeightFormat::f16:
      return {1, 1, half_value(p)};
    case WeightFormat::bf16: {
      uint32_t bits = (uint32_t)(p[0] | p[1] << 8) << 16;
      memcpy(&x, &bits, 4);
      return {1, 1, x};
    }
    case WeightFormat::q4_0:
      return {half_value(p), 1, (float)(nibble(p + 2, e) - 8)};
    case WeightFormat::q4_1:
      return {half_value(p), 1, (float)nibble(p + 4, e), half_value(p + 2), 1};
    case WeightFormat::q5_0:
      return {half_value(p), 1, (float)(nibble(p + 6, e) + 16 * bit(p + 2, e) - 16)};
    case WeightFormat::q5_1:
      return {half_value(p), 1, (float)(nibble(p + 8, e) + 16 * bit(p + 4, e)), half_value(p + 2),
              1};
    case WeightFormat::q8_0:
      return {half_value(p), 1, (float)(int8_t)p[2 + e]};
    case WeightFormat::iq4_nl:
      return {half_value(p), 1, (float)kIq4[nibble(p + 2, e)]};
    case WeightFormat::int4_zp: {
      const float d = half_value(p);
      return {d, 1, (float)nibble(p + 3, e), -(d * (float)p[2]), 1};
    }
    case WeightFormat::int8_zp: {
      const float d = half_value(p);
      return {d, 1, (float)(int8_t)p[4 + e], -(d * half_value(p + 2)), 1};
    }
    case WeightFormat::mxfp4:  // a denormal scale is zero
      return {p[0] < 2 ? 0 : std::ldexp(1.0f, p[0] - 128), 1, (float)twice_e2m1(nibble(p + 1, e))};
    default:
      return element_256(f, p, (int)e);
  }
}

// Where a block keeps its fp16 numbers: byte offsets of d and of its minimum's scale, or -1.
struct Halves {
  int d, m;
};
inline Halves halves_of(WeightFormat f) {
  switch (f) {
    case WeightFormat::q4_1:
    case WeightFormat::q5_1:
    case WeightFormat::q4_k:
    case WeightFormat::q5_k:
      return {0, 2};
    case WeightFormat::q2_k:
      return {80, 82};
    case WeightFormat::q3_k:
      return {108, -1};
    case WeightFormat::q6_k:
      return {208, -1};
    case WeightFormat::tq1_0:
      return {52, -1};
    case WeightFormat::tq2_0:
      return {64, -1};
    default:
      return {0, -1};
  }
}

}  // namespace linear_reference
