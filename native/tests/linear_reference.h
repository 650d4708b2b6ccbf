// What the tests of linear kernels share beside the formats: the arithmetic of gemm in scalars;
// random weights and activations.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "format_reference.h"
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
  // iq1 has values of whole eighths; iq3_xxs has even ones, which are halved.
  const float per_unit = f == WeightFormat::iq1_s || f == WeightFormat::iq1_m ? 8.0f
                         : f == WeightFormat::iq3_xxs                         ? 0.5f
                                                                              : 1.0f;
  float acc = 0;
  for (int64_t b = 0; b < k / 256; b++) {
    const Element first = element(f, row, k, 256 * b);
    int64_t t = 0, u = 0;
    for (int64_t i = 256 * b; i < 256 * b + 256; i++) {
      const Element e = element(f, row, k, i);
      t += e.scale * (int64_t)(e.code * per_unit * code_of(act, i));
      u += e.min * (int64_t)code_of(act, i);
    }
    const float da = ((const float*)(act + layout.scale_offset))[b];
    if (halves_of(f).m < 0)
      acc = std::fma((float)t, first.d / per_unit * da, acc);
    else
      acc = std::fma(std::fma((float)u, first.m, (float)t * first.d), da, acc);
  }
  return acc;
}

inline float reference_nvfp4(const uint8_t* row, const uint8_t* act, int64_t k) {
  const ActLayout layout = act_layout(ActFormat::q8_16, k);
  float acc = 0;
  for (int64_t b = 0; b < k / 16; b++) {
    int sum = 0;
    for (int64_t i = 16 * b; i < 16 * b + 16; i++) sum += nvfp4_code(row, i) * (int8_t)act[i];
    const float da = ((const float*)(act + layout.scale_offset))[b];
    acc = std::fma((float)sum, nvfp4_scale(row, 16 * b) / 256 * da, acc);
  }
  return acc * (float_at(row) * 128);
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
  if (f == WeightFormat::nvfp4) return reference_nvfp4(row, act, k);
  return block_k(f) == 32 ? reference_32(f, row, act, k) : reference_256(f, row, act, k);
}

// ---------------------------------------------------------------- data

// Random codes; scales that are small, of both signs, subnormal ones among them. Extreme: blocks of
// one byte, which are codes at their ends.
inline void random_rows(WeightFormat f, Bytes& rows, int64_t n, int64_t k, std::mt19937& rng,
                        bool extreme) {
  std::normal_distribution<float> normal;
  if (has_row_scales(f)) {
    const int64_t row_bytes = row_bytes_ggml(f, k),
                  scales = row_bytes_ggml(f, 0) + (f == WeightFormat::fp8 ? row_bytes - k : 0);
    for (int64_t i = 0; i < n * row_bytes; i++) {
      uint8_t code = (uint8_t)(extreme ? (rng() % 2 ? 0x80 : 0x7e) : rng());
      rows.p[i] = (code & 127) == 127 && f == WeightFormat::fp8 ? 1 : code;
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
    if (f == WeightFormat::iq1_m)
      for (int n = 0; n < 4; n++)
        p[49 + 2 * n] = (uint8_t)((p[49 + 2 * n] & 15) | (d >> 4 * n & 15) << 4);
    else
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
      const int64_t block = f == ActFormat::q8_row ? k : block_of(f);
      r[(size_t)i] =
          (double)code_of(row, i) * ((const float*)(row + layout.scale_offset))[i / block];
    }
  }
  return r;
}

}  // namespace linear_reference
