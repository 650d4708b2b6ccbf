// fp32 values of a GGML row: the formulas of ggml-quants.c (dequantize_row_*), operation by
// operation in fp32, so that the result is equal to the bit.
// https://github.com/ggml-org/ggml/blob/5136ed06fb4dfcea74d6e7e914fe4994017d30c2/src/ggml-quants.c
#pragma once

#include "kernels/codebook_groups.h"
#include "kernels/records.h"
#include "kernels/simd.h"

namespace invar::INVAR_ISA {

INVAR_INLINE float half_at(const uint8_t* p) {
  uint16_t halves[W] = {};
  memcpy(halves, p, 2);
  float r[W];
  store(r, load_f16(halves));
  return r[0];
}

INVAR_INLINE void dequantize_q4_0(const uint8_t* block, float* out) {
  const float d = half_at(block);
  for (int i = 0; i < 16; i++) {
    out[i] = (float)((block[2 + i] & 15) - 8) * d;
    out[i + 16] = (float)((block[2 + i] >> 4) - 8) * d;
  }
}

INVAR_INLINE void dequantize_q4_1(const uint8_t* block, float* out) {
  const float d = half_at(block), m = half_at(block + 2);
  for (int i = 0; i < 16; i++) {
    out[i] = (float)(block[4 + i] & 15) * d + m;
    out[i + 16] = (float)(block[4 + i] >> 4) * d + m;
  }
}

// Code i of a 32-block whose fifth bits stand before its nibbles.
INVAR_INLINE int five_bit_code(const uint8_t* fifth, int i) {
  const uint8_t nibbles = fifth[4 + i % 16];
  return (i < 16 ? nibbles & 15 : nibbles >> 4) | (fifth[i / 8] >> i % 8 & 1) << 4;
}

INVAR_INLINE void dequantize_q5_0(const uint8_t* block, float* out) {
  const float d = half_at(block);
  for (int i = 0; i < 32; i++) out[i] = (float)(five_bit_code(block + 2, i) - 16) * d;
}

INVAR_INLINE void dequantize_q5_1(const uint8_t* block, float* out) {
  const float d = half_at(block), m = half_at(block + 2);
  for (int i = 0; i < 32; i++) out[i] = (float)five_bit_code(block + 4, i) * d + m;
}

INVAR_INLINE void dequantize_q8_0(const uint8_t* block, float* out) {
  const float d = half_at(block);
  for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)block[2 + i] * d;
}

// Element i of 256 has two bits of one byte of 64.
INVAR_INLINE int two_bit_code(const uint8_t* codes, int i) {
  return codes[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

INVAR_INLINE void dequantize_q2_k(const uint8_t* block, float* out) {
  const float d = half_at(block + 80), dmin = half_at(block + 82);
  for (int i = 0; i < 256; i++) {
    const uint8_t both = block[i / 16];
    out[i] =
        d * (float)(both & 15) * (float)two_bit_code(block + 16, i) - dmin * (float)(both >> 4);
  }
}

INVAR_INLINE void dequantize_q3_k(const uint8_t* block, float* out) {
  const float d = half_at(block + 108);
  for (int i = 0; i < 256; i++) {
    const int high = block[i % 32] >> i / 32 & 1;
    out[i] = d * (float)scale_q3_k(block + 96, i / 16) *
             (float)(two_bit_code(block + 32, i) + 4 * high - 4);
  }
}

INVAR_INLINE void dequantize_q4_k(const uint8_t* block, float* out) {
  const float d = half_at(block), dmin = half_at(block + 2);
  const uint8_t* codes = block + 16;
  for (int g = 0; g < 8; g++) {
    ScaleMin sm = scale_min_k4(block + 4, g);
    const float scale = d * (float)sm.scale, min = dmin * (float)sm.min;
    for (int i = 0; i < 32; i++) {
      int q = codes[g / 2 * 32 + i] >> g % 2 * 4 & 15;
      out[g * 32 + i] = scale * (float)q - min;
    }
  }
}

INVAR_INLINE void dequantize_q5_k(const uint8_t* block, float* out) {
  const float d = half_at(block), dmin = half_at(block + 2);
  const uint8_t *high = block + 16, *codes = block + 48;
  for (int g = 0; g < 8; g++) {
    ScaleMin sm = scale_min_k4(block + 4, g);
    const float scale = d * (float)sm.scale, min = dmin * (float)sm.min;
    for (int i = 0; i < 32; i++) {
      int q = (codes[g / 2 * 32 + i] >> g % 2 * 4 & 15) | (high[i] >> g & 1) << 4;
      out[g * 32 + i] = scale * (float)q - min;
    }
  }
}

INVAR_INLINE void dequantize_q6_k(const uint8_t* block, float* out) {
  const uint8_t *low = block, *high = block + 128;
  const int8_t* scales = (const int8_t*)block + 192;
  const float d = half_at(block + 208);
  for (int i = 0; i < 256; i++) {
    int half = i / 128, e = i % 128;
    int q = (low[half * 64 + e % 64] >> e / 64 * 4 & 15) |
            (high[half * 32 + e % 32] >> e / 32 * 2 & 3) << 4;
    out[i] = d * (float)scales[i / 16] * (float)(q - 32);
  }
}

// 32 codes of four bits, d times their places in a table.
INVAR_INLINE void dequantize_table(float d, const int8_t* values, const uint8_t* codes,
                                   float* out) {
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)values[codes[i] & 15];
    out[i + 16] = d * (float)values[codes[i] >> 4];
  }
}

INVAR_INLINE void dequantize_iq4_nl(const uint8_t* block, float* out) {
  dequantize_table(half_at(block), kIq4Values, block + 2, out);
}

INVAR_INLINE void dequantize_iq4_xs(const uint8_t* block, float* out) {
  const float d = half_at(block);
  for (int g = 0; g < 8; g++)
    dequantize_table(d * (float)scale_iq4_xs(block, g), kIq4Values, block + 8 + 16 * g,
                     out + 32 * g);
}

// 2^(e - 128), flushed to zero where it is denormal (e < 2).
INVAR_INLINE void dequantize_mxfp4(const uint8_t* block, float* out) {
  const uint32_t exponent = block[0] < 1 ? 0 : block[0] - 1u;
  dequantize_table(__builtin_bit_cast(float, exponent << 23), kMxfp4Values, block + 1, out);
}

// 32 weights of a codebook, `width` in an entry, d times their scale times their values. All
// products are exact: no order of theirs makes a difference.
INVAR_INLINE void dequantize_group(const CodebookGroup& group, float d, int width,
                                   const int8_t* values, float* out) {
  const int bits = 16 / width, upper = 1 << (width == 8 ? 2 : 3);
  for (int i = 0; i < 32; i++) {
    int place = group.entries[i / width] >> i % width * bits & ((1 << bits) - 1);
    if (group.upper >> i & 1) place += upper;
    out[i] = d * (float)group.scales[i / 16] * (float)values[place];
  }
}

// The part of d that a scale of one stands for, as in gemm.
#define INVAR_DEQUANTIZE_CODEBOOK(name, d, width, values)                          \
  INVAR_INLINE void dequantize_##name(const uint8_t* block, float* out) {          \
    const float unit = d;                                                          \
    for (int g = 0; g < 8; g++)                                                    \
      dequantize_group(group_##name(block, g), unit, width, values, out + 32 * g); \
  }
INVAR_INLINE float half_of_iq1_m(const uint8_t* block) {
  const uint16_t d = half_iq1_m(block);
  uint8_t bytes[2];
  memcpy(bytes, &d, 2);
  return half_at(bytes);
}
INVAR_DEQUANTIZE_CODEBOOK(iq1_s, half_at(block) * 0.125f, 8, kIq1Values)
INVAR_DEQUANTIZE_CODEBOOK(iq1_m, half_of_iq1_m(block) * 0.125f, 8, kIq1Values)
INVAR_DEQUANTIZE_CODEBOOK(iq2_xxs, half_at(block) * 0.125f, 8, kIq2Values)
INVAR_DEQUANTIZE_CODEBOOK(iq2_xs, half_at(block) * 0.125f, 8, kIq2Values)
INVAR_DEQUANTIZE_CODEBOOK(iq2_s, half_at(block) * 0.125f, 8, kIq2Values)
INVAR_DEQUANTIZE_CODEBOOK(iq3_xxs, half_at(block) * 0.5f, 4, kIq3XxsValues)
INVAR_DEQUANTIZE_CODEBOOK(iq3_s, half_at(block), 4, kIq3SValues)
#undef INVAR_DEQUANTIZE_CODEBOOK

INVAR_INLINE void dequantize_tq1_0(const uint8_t* block, float* out) {
  const float d = half_at(block + 52);
  uint8_t digits[256];
  digits_tq1_0(block, digits);
  for (int i = 0; i < 256; i++) out[i] = (float)(digits[i] - 1) * d;
}
INVAR_INLINE void dequantize_tq2_0(const uint8_t* block, float* out) {
  const float d = half_at(block + 64);
  for (int i = 0; i < 256; i++) out[i] = (float)(two_bit_code(block, i) - 1) * d;
}

// Nibbles with a zero point.
INVAR_INLINE void dequantize_int4_zp(const uint8_t* block, float* out) {
  const float d = half_at(block);
  for (int i = 0; i < 16; i++) {
    out[i] = (float)((block[3 + i] & 15) - block[2]) * d;
    out[i + 16] = (float)((block[3 + i] >> 4) - block[2]) * d;
  }
}

INVAR_INLINE void dequantize_int8_zp(const uint8_t* block, float* out) {
  const float d = half_at(block), zero = half_at(block + 2);
  for (int i = 0; i < 32; i++) out[i] = ((float)(int8_t)block[4 + i] - zero) * d;
}

// OCP e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones is NaN.
INVAR_INLINE float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float x = exponent == 0 ? (float)mantissa * 0x1p-9f
                          : __builtin_bit_cast(float, (exponent + 120) << 23 | mantissa << 20);
  if ((code & 127) == 127) x = __builtin_bit_cast(float, 0x7fc00000);
  return code & 128 ? -x : x;
}

static void dequantize_nvfp4(const uint8_t* row, int64_t k, float* out) {
  float d;
  memcpy(&d, row, 4);
  row += 4;
  for (int64_t b = 0; b < k / 16; b++, out += 16) {
    const uint8_t *block = row + b / 4 * kNvfp4Bytes, *codes = block + 4 + b % 4 * 8;
    const uint8_t code = unsigned_e4m3(block[b % 4]);
    // 127 is 480 here: e4m3() would call it NaN.
    const float scale = 0.5f * (code == 127 ? 480.0f : e4m3(code));
    for (int i = 0; i < 8; i++) {
      out[i] = scale * (float)kMxfp4Values[codes[i] & 15] * d;
      out[i + 8] = scale * (float)kMxfp4Values[codes[i] >> 4] * d;
    }
  }
}

static void dequantize_int8(const uint8_t* row, int64_t k, float* out) {
  float d;
  memcpy(&d, row, 4);
  for (int64_t i = 0; i < k; i++) out[i] = (float)(int8_t)row[4 + i] * d;
}

static void dequantize_fp8(const uint8_t* row, int64_t k, float* out) {
  const uint8_t* codes = row + scale_bytes(WeightFormat::fp8, k);
  for (int64_t i = 0; i < k; i++) {
    float d;
    memcpy(&d, row + i / kFp8K * 4, 4);
    out[i] = e4m3(codes[i]) * d;
  }
}

static void dequantize_row(WeightFormat format, const uint8_t* row, int64_t k, float* out) {
  if (format == WeightFormat::int8) return dequantize_int8(row, k, out);
  if (format == WeightFormat::fp8) return dequantize_fp8(row, k, out);
  if (format == WeightFormat::nvfp4) return dequantize_nvfp4(row, k, out);
  const GgmlBlock block = ggml_block(format);
  for (int64_t b = 0; b < k / block.k; b++, row += block.bytes, out += block.k) {
    switch (format) {
      case WeightFormat::f32:
        memcpy(out, row, 4);
        break;
      case WeightFormat::f16:
        *out = half_at(row);
        break;
      case WeightFormat::bf16: {
        uint32_t bits = (uint32_t)row[0] << 16 | (uint32_t)row[1] << 24;
        memcpy(out, &bits, 4);
        break;
      }
#define INVAR_DEQUANTIZE(name, Suffix) \
  case WeightFormat::name:             \
    dequantize_##name(row, out);       \
    break;
        INVAR_RECORD_FORMATS(INVAR_DEQUANTIZE)
#undef INVAR_DEQUANTIZE
      case WeightFormat::int8:
      case WeightFormat::fp8:
      case WeightFormat::nvfp4:
      case WeightFormat::count:
        break;
    }
  }
}

}  // namespace invar::INVAR_ISA
