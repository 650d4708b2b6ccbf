// fp32 values of a GGML row: the formulas of ggml-quants.c (dequantize_row_*), operation by
// operation in fp32, so that the result is equal to the bit.
// https://github.com/ggml-org/ggml/blob/5136ed06fb4dfcea74d6e7e914fe4994017d30c2/src/ggml-quants.c
#pragma once

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

INVAR_INLINE void dequantize_q4_k(const uint8_t* block, float* out) {
  const float d = half_at(block), dmin = half_at(block + 2);
  const uint8_t* codes = block + 16;
  for (int g = 0; g < 8; g++) {
    ScaleMin sm = scale_min_q4_k(block + 4, g);
    const float scale = d * (float)sm.scale, min = dmin * (float)sm.min;
    for (int i = 0; i < 32; i++) {
      int q = codes[g / 2 * 32 + i] >> g % 2 * 4 & 15;
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

static void dequantize_row(WeightFormat format, const uint8_t* row, int64_t k, float* out) {
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
      case WeightFormat::q4_0: {
        const float d = half_at(row);
        for (int i = 0; i < 16; i++) {
          out[i] = (float)((row[2 + i] & 15) - 8) * d;
          out[i + 16] = (float)((row[2 + i] >> 4) - 8) * d;
        }
        break;
      }
      case WeightFormat::q4_1: {
        const float d = half_at(row), m = half_at(row + 2);
        for (int i = 0; i < 16; i++) {
          out[i] = (float)(row[4 + i] & 15) * d + m;
          out[i + 16] = (float)(row[4 + i] >> 4) * d + m;
        }
        break;
      }
      case WeightFormat::q5_0: {
        const float d = half_at(row);
        uint32_t high;
        memcpy(&high, row + 2, 4);
        for (int i = 0; i < 16; i++) {
          int low_code = (row[6 + i] & 15) | (int)(high >> i & 1) << 4;
          int high_code = row[6 + i] >> 4 | (int)(high >> (i + 16) & 1) << 4;
          out[i] = (float)(low_code - 16) * d;
          out[i + 16] = (float)(high_code - 16) * d;
        }
        break;
      }
      case WeightFormat::q8_0: {
        const float d = half_at(row);
        for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)row[2 + i] * d;
        break;
      }
      case WeightFormat::q4_k:
        dequantize_q4_k(row, out);
        break;
      case WeightFormat::q6_k:
        dequantize_q6_k(row, out);
        break;
      case WeightFormat::count:
        break;
    }
  }
}

}  // namespace invar::INVAR_ISA
