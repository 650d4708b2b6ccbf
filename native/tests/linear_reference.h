// What the tests of linear kernels share: weight formats written down a second time, one element at
// a time and without SIMD; the arithmetic of gemm in scalars; random weights and activations.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "kernel_test.h"

namespace linear_reference {

using namespace invar;

struct Bytes {  // 64-byte aligned
  uint8_t* p;
  size_t size;
  explicit Bytes(size_t n, int fill = 0) : size((n + 64) / 64 * 64) {
    p = (uint8_t*)std::aligned_alloc(64, size);
    memset(p, fill, size);
  }
  ~Bytes() { std::free(p); }
  Bytes(const Bytes&) = delete;
};

// ---------------------------------------------------------------- formats

// Formats that are multiplied in fp32 or bf16; of one row with a scale; of rows of codes.
inline bool is_float(WeightFormat f) { return f <= WeightFormat::bf16 || f == WeightFormat::fp8; }
inline bool is_row(WeightFormat f) { return f == WeightFormat::int8; }
inline int64_t block_k(WeightFormat f) {
  return is_float(f) || is_row(f) ? 1 : act_format_of(f) == ActFormat::q8_32 ? 32 : 256;
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
    default:
      return {};
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

// Element i of row of k whose scales stand at its beginning.
inline Element element_of_row(WeightFormat f, const uint8_t* row, int64_t k, int64_t i) {
  if (f == WeightFormat::int8) return {float_at(row), 1, (float)(int8_t)row[4 + i]};
  return {float_at(row + i / 128 * 4), 1, e4m3(row[(k + 127) / 128 * 4 + i])};
}

// Element i of a GGML row, from the format's description.
inline Element element(WeightFormat f, const uint8_t* row, int64_t k, int64_t i) {
  if (is_row(f) || f == WeightFormat::fp8) return element_of_row(f, row, k, i);
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
    default:
      return {0, -1};
  }
}

// ---------------------------------------------------------------- the contract in scalars

inline float code_of(const uint8_t* act, int64_t i) { return (float)(int8_t)act[i]; }

inline float reference_32(WeightFormat f, const uint8_t* row, const uint8_t* act, int64_t k) {
  const ActLayout layout = act_layout(ActFormat::q8_32, k);
  float acc = 0;
  for (int64_t b = 0; b < k / 32; b++) {
    const Element first = element(f, row, k, 32 * b);
    const float bias = f == WeightFormat::q5_1 ? 16 : 0;
    float sum = 0;  // of integers below 2^24: exact
    for (int64_t i = 32 * b; i < 32 * b + 32; i++)
      sum += (element(f, row, k, i).code - bias) * code_of(act, i);
    const float da = ((const float*)(act + layout.scale_offset))[b];
    acc = std::fma(sum, first.d * da, acc);
    if (first.min == 0) continue;
    const float scaled_sum = ((const float*)(act + layout.scaled_sum_offset))[b];
    acc = std::fma(std::fma(bias, first.d, first.m), scaled_sum, acc);
  }
  return acc;
}

inline float reference_256(WeightFormat f, const uint8_t* row, const uint8_t* act, int64_t k) {
  const ActLayout layout = act_layout(ActFormat::q8_256, k);
  float acc = 0;
  for (int64_t b = 0; b < k / 256; b++) {
    const Element first = element(f, row, k, 256 * b);
    int64_t t = 0, u = 0;
    for (int64_t i = 256 * b; i < 256 * b + 256; i++) {
      const Element e = element(f, row, k, i);
      t += e.scale * (int64_t)(e.code * code_of(act, i));
      u += e.min * (int64_t)code_of(act, i);
    }
    const float da = ((const float*)(act + layout.scale_offset))[b];
    if (halves_of(f).m < 0)
      acc = std::fma((float)t, first.d * da, acc);
    else
      acc = std::fma(std::fma((float)u, first.m, (float)t * first.d), da, acc);
  }
  return acc;
}

inline float reference_float(WeightFormat f, const uint8_t* row, const uint8_t* act, int64_t k) {
  float total = 0;
  const int64_t chunk = f == WeightFormat::fp8 ? 128 : 512;
  for (int64_t first = 0; first < k; first += chunk) {
    float acc = 0;
    for (int64_t i = first; i < k && i < first + chunk; i++) {
      int64_t at = i;  // of a bf16 pair, the odd element comes first
      float a;
      if (f == WeightFormat::bf16) {
        at = i ^ 1;
        if (at >= k) at = i;
        uint32_t bits = (uint32_t)((const uint16_t*)act)[at] << 16;
        memcpy(&a, &bits, 4);
      } else {
        a = ((const float*)act)[at];
      }
      acc = std::fma(element(f, row, k, at).code, a, acc);
    }
    total =
        f == WeightFormat::fp8 ? std::fma(acc, element(f, row, k, first).d, total) : total + acc;
  }
  return total;
}

inline float reference_row(WeightFormat f, const uint8_t* row, const uint8_t* act, int64_t k) {
  const ActLayout layout = act_layout(ActFormat::q8_row, k);
  int64_t sum = 0;
  for (int64_t i = 0; i < k; i++) sum += (int64_t)(element(f, row, k, i).code * code_of(act, i));
  return (float)sum * (float_at(row) * float_at(act + layout.scale_offset));
}

// One output as kernels.h and gemm_int.h define it, to the bit.
inline float reference(WeightFormat f, const uint8_t* row, const uint8_t* act, int64_t k) {
  if (is_float(f)) return reference_float(f, row, act, k);
  if (is_row(f)) return reference_row(f, row, act, k);
  return block_k(f) == 32 ? reference_32(f, row, act, k) : reference_256(f, row, act, k);
}

// ---------------------------------------------------------------- data

// Random codes; scales that are small, of both signs, subnormal ones among them. Extreme: blocks of
// one byte, which are codes at their ends.
inline void random_rows(WeightFormat f, Bytes& rows, int64_t n, int64_t k, std::mt19937& rng,
                        bool extreme) {
  std::normal_distribution<float> normal;
  if (is_row(f) || f == WeightFormat::fp8) {
    const int64_t row_bytes = row_bytes_ggml(f, k), scales = row_bytes - k;
    for (int64_t i = 0; i < n * row_bytes; i++) {
      uint8_t code = (uint8_t)(extreme ? (rng() % 2 ? 0x80 : 0x7e) : rng());
      rows.p[i] = (code & 127) == 127 && !is_row(f) ? 1 : code;
    }
    for (int64_t r = 0; r < n; r++) {
      for (int64_t s = 0; s < scales; s += 4) {
        const float x = rng() % 16 == 0 ? 0 : normal(rng) / 64;
        memcpy(rows.p + r * row_bytes + s, &x, 4);
      }
    }
    return;
  }
  auto half = [&] {
    if (rng() % 16 == 0) return (uint16_t)(rng() & 0x83ff);
    return (uint16_t)((rng() & 0x8000) | (0x1800 + rng() % 0x1400));
  };
  const int64_t bytes = row_bytes_ggml(f, block_k(f));
  for (int64_t b = 0; b < n * k / block_k(f); b++) {
    uint8_t* p = rows.p + b * bytes;
    const float x = normal(rng);
    if (f == WeightFormat::f32) memcpy(p, &x, 4);
    if (f == WeightFormat::bf16) memcpy(p, (const uint8_t*)&x + 2, 2);
    if (f == WeightFormat::f32 || f == WeightFormat::bf16) continue;
    for (int64_t i = 0; i < bytes; i++) p[i] = (uint8_t)rng();
    if (extreme) memset(p, rng() % 2 ? 0xff : rng() % 2 ? 0x80 : 0, (size_t)bytes);
    if (f == WeightFormat::mxfp4) {  // 2^-28 to 2^3, and some zeros
      p[0] = (uint8_t)(rng() % 16 == 0 ? rng() % 2 : 100 + rng() % 32);
      continue;
    }
    const uint16_t d = half(), m = half();
    const Halves at = halves_of(f);
    memcpy(p + at.d, &d, 2);
    if (f == WeightFormat::int4_zp) p[2] %= 17;
    if (f == WeightFormat::int8_zp) p[3] = 0x50 + p[3] % 8;  // 32 to 4,064
    if (at.m >= 0) memcpy(p + at.m, &m, 2);
  }
}

inline std::vector<float> random_x(int64_t n, std::mt19937& rng, bool extreme) {
  std::normal_distribution<float> normal;
  std::vector<float> x((size_t)n);
  for (auto& v : x) v = extreme ? (rng() % 2 ? 1.0f : -1.0f) : normal(rng);
  if (extreme)
    for (size_t i = 0; i < x.size(); i++)
      if (i / 96 % 3 == 0) x[i] = 1.0f;
  return x;
}

// What an activation row says x is, in double.
inline std::vector<double> activation_values(ActFormat f, const uint8_t* row, int64_t k) {
  const ActLayout layout = act_layout(f, k);
  std::vector<double> r((size_t)k);
  for (int64_t i = 0; i < k; i++) {
    if (f == ActFormat::f32) {
      r[(size_t)i] = ((const float*)row)[i];
    } else if (f == ActFormat::bf16) {
      uint32_t bits = (uint32_t)((const uint16_t*)row)[i] << 16;
      float x;
      memcpy(&x, &bits, 4);
      r[(size_t)i] = x;
    } else {
      const int64_t block = f == ActFormat::q8_32 ? 32 : f == ActFormat::q8_256 ? 256 : k;
      r[(size_t)i] =
          (double)code_of(row, i) * ((const float*)(row + layout.scale_offset))[i / block];
    }
  }
  return r;
}

}  // namespace linear_reference
