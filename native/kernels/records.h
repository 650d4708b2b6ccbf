// Packed weight panels, byte by byte. A panel is 32 columns; inside it records follow each other,
// each covering kRecordK of K and whole cache lines, mxfp4 and int4_zp apart. [x] below is one byte
// per index unless a type is given; c is the column, t the place in a quad (4 neighbouring K).
//
//   f32    K x 1     float[32]
//   f16    K x 1     uint16[32]
//   bf16   K x 2     uint16[32][2], an odd K padded with zero
//   q4_0   K x 32    f16 d[32] | nibbles[4][c][t]: quad j low, quad j + 4 high      9 lines
//   q4_1   K x 32    f16 d[32] | f16 m[32] | nibbles as q4_0                       10 lines
//   q5_0   K x 32    f16 d[32] | high[c][t]: bit j is bit 4 of quad j | nibbles    11 lines
//   q5_1   K x 32    f16 d[32] | f16 m[32] | high as q5_0 | nibbles                12 lines
//   q8_0   K x 32    f16 d[32] | s8 codes[8][c][t]                                 17 lines
//   q2_k   K x 256   f16 d[32] | f16 dmin[32] | scales[8][c][2]: scale low, minimum high
//                    | groups[16] of { [c][t]: bits 2j, 2j + 1 of quad j }         42 lines
//   q3_k   K x 256   f16 d[32] | s8 scales[16][c] | groups[8] of
//                    [3][c][t]: quads 0, 1, 4 in bits 0 to 2, quads 2, 3, 6 in bits 3 to 5; in
//                    bits 6 and 7 the upper bits of quad 5, those of quad 7, and the lowest
//                    bits of both                                                  57 lines
//   q4_k   K x 256   f16 d[32] | f16 dmin[32] | scales[8][c] | mins[4][c][2]
//                    | nibbles[8] as q4_0                                          74 lines
//   q5_k   K x 256   f16 d[32] | f16 dmin[32] | scales[8][c] | mins[4][c][2]
//                    | groups[8] of { high as q5_0
//                      | nibbles[2][2][c][t]: quad j low, quad j + 2 high }        90 lines
//   q6_k   K x 256   f16 d[32] | s8 scales[16][c] | groups[16] of
//                    [3][c][t]: quads 0, 2, 1 in bits 0 to 5; in bits 6 and 7 of quad 3
//                    bits 2 and 3, 0 and 1, 4 and 5                               105 lines
//   iq4_nl K x 32    as q4_0, the nibbles being places in kIq4Values                9 lines
//   iq4_xs K x 256   f16 d[32] | s8 scales[8][c] | nibbles[8] as iq4_nl            69 lines
//   iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s
//          K x 256   as q3_k, its codes being places in kIq1Values and kIq2Values  57 lines
//   iq3_xxs, iq3_s
//          K x 256   f16 d[32] | s8 scales[8][c] | groups[8] of nibbles[2][2][c][t]: quad j low,
//                    quad j + 2 high, places in kIq3XxsValues, kIq3SValues         69 lines
//   tq1_0, tq2_0
//          K x 256   f16 d[32] | groups[16] as those of q2_k                       33 lines
//   mxfp4  K x 32    e[c] | nibbles as q4_0, places in kMxfp4Values                8.5 lines
//   int4_zp K x 32   f16 d[32] | z[c] | nibbles as q4_0                            9.5 lines
//   int8_zp K x 32   f16 d[32] | f16 z[32] | s8 codes[8][c][t]                     18 lines
//   int8   all K     float d[32] | s8 codes[K/4][c][t], K padded with zeros to quads
//   nvfp4  all K     float 128 d[32] | records of K x 16 { e4m3 scale[c] | nibbles[2][c][t]: quad j
//                    low, quad j + 2 high, places in kMxfp4Values }               4.5 lines each
//   fp8    K x 128   float 256 d[32] | e4m3 codes[128][c]; the last one may be short
#pragma once

#include "kernels/kernels.h"

namespace invar {

constexpr int kSlabK = 256;  // K covered at a time by the integer kernels: a K-quant record
constexpr int kQuadBytes = 4 * kPanelColumns;
constexpr int kHalfRow = 2 * kPanelColumns;  // a row of f16, one per column

// `k` values of each column in `bytes` bytes, out of 32 GGML blocks of `ggml_bytes`. The blocks
// (block_q4_0 ... block_q6_K):
// https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-common.h
//   q4_0 { f16 d; u8 qs[16] }                 q4_1 { f16 d, m; u8 qs[16] }
//   q5_0 { f16 d; u8 qh[4], qs[16] }          q5_1 { f16 d, m; u8 qh[4], qs[16] }
//   q8_0 { f16 d; s8 qs[32] }
//   q2_k { u8 scales[16], qs[64]; f16 d, dmin }
//   q3_k { u8 hmask[32], qs[64], scales[12]; f16 d }
//   q4_k { f16 d, dmin; u8 scales[12], qs[128] }
//   q5_k { f16 d, dmin; u8 scales[12], qh[32], qs[128] }
//   q6_k { u8 ql[128], qh[64]; s8 scales[16]; f16 d }
//   iq4_nl { f16 d; u8 qs[16] }
//   iq4_xs { f16 d; u16 scales_h; u8 scales_l[4], qs[128] }
//   mxfp4 { u8 e; u8 qs[16] }
//   tq2_0 { u8 qs[64]; f16 d }; iq1, iq2, iq3 and tq1_0: codebook_groups.h
// and two like them for groups of codes with a zero point z, d * (q - z): element i of the first
// half of 32 in the low nibbles, as in GGML's; d of a larger group is repeated.
//   int4_zp { f16 d; u8 z; u8 qs[16] }        int8_zp { f16 d; f16 z - 128; s8 q - 128 [32] }
// Rows of int8 and fp8 are one block, those of nvfp4 blocks behind a scale:
//   int8 { float d; s8 q[k] }                 fp8 { float d[ceil(k / 128)]; e4m3 q[k] }
//   nvfp4 { float d; { u8 scales[4]; u8 qs[32] } [k / 64] }: GGML's block_nvfp4, of four times 16
//     values; scales are e4m3 without a sign, 0x7f being 0; element i of the first 8 of 16 low
struct RecordQ4_0 {
  static constexpr int k = 32, ggml_bytes = 18, scale = 0, codes = kHalfRow,
                       bytes = codes + 4 * kQuadBytes;
};
struct RecordQ4_1 {
  static constexpr int k = 32, ggml_bytes = 20, scale = 0, min = kHalfRow, codes = 2 * kHalfRow,
                       bytes = codes + 4 * kQuadBytes;
};
struct RecordQ5_0 {
  static constexpr int k = 32, ggml_bytes = 22, scale = 0, high = kHalfRow,
                       codes = high + kQuadBytes, bytes = codes + 4 * kQuadBytes;
};
struct RecordQ5_1 {
  static constexpr int k = 32, ggml_bytes = 24, scale = 0, min = kHalfRow, high = 2 * kHalfRow,
                       codes = high + kQuadBytes, bytes = codes + 4 * kQuadBytes;
};
struct RecordQ8_0 {
  static constexpr int k = 32, ggml_bytes = 34, scale = 0, codes = kHalfRow,
                       bytes = codes + 8 * kQuadBytes;
};
struct RecordQ2_K {
  static constexpr int k = 256, ggml_bytes = 84, scale = 0, min_scale = kHalfRow,
                       scales = 2 * kHalfRow, codes = scales + 16 * kPanelColumns,
                       group_bytes = 2 * kQuadBytes, bytes = codes + 8 * group_bytes;
};
struct RecordQ3_K {
  static constexpr int k = 256, ggml_bytes = 110, scale = 0, scales = kHalfRow,
                       codes = scales + 16 * kPanelColumns, group_bytes = 3 * kQuadBytes,
                       bytes = codes + 8 * group_bytes;
};
struct RecordQ4_K {
  static constexpr int k = 256, ggml_bytes = 144, scale = 0, min_scale = kHalfRow,
                       scales = 2 * kHalfRow, mins = scales + 8 * kPanelColumns,
                       codes = mins + 8 * kPanelColumns, group_bytes = 4 * kQuadBytes,
                       bytes = codes + 8 * group_bytes;
};
struct RecordQ5_K {
  static constexpr int k = 256, ggml_bytes = 176, scale = 0, min_scale = kHalfRow,
                       scales = 2 * kHalfRow, mins = scales + 8 * kPanelColumns,
                       codes = mins + 8 * kPanelColumns, high = 0, low = kQuadBytes,
                       group_bytes = 5 * kQuadBytes, bytes = codes + 8 * group_bytes;
};
struct RecordQ6_K {
  static constexpr int k = 256, ggml_bytes = 210, scale = 0, scales = kHalfRow,
                       codes = scales + 16 * kPanelColumns, group_bytes = 3 * kQuadBytes,
                       bytes = codes + 16 * group_bytes;
};
struct RecordIQ4_NL : RecordQ4_0 {};
struct RecordIQ4_XS {
  static constexpr int k = 256, ggml_bytes = 136, scale = 0, scales = kHalfRow,
                       codes = scales + 8 * kPanelColumns, group_bytes = 4 * kQuadBytes,
                       bytes = codes + 8 * group_bytes;
};
// Blocks that a codebook or three-valued digits make smaller than their codes are.
struct RecordIQ1_S : RecordQ3_K {
  static constexpr int ggml_bytes = 50;
};
struct RecordIQ1_M : RecordQ3_K {
  static constexpr int ggml_bytes = 56;
};
struct RecordIQ2_XXS : RecordQ3_K {
  static constexpr int ggml_bytes = 66;
};
struct RecordIQ2_XS : RecordQ3_K {
  static constexpr int ggml_bytes = 74;
};
struct RecordIQ2_S : RecordQ3_K {
  static constexpr int ggml_bytes = 82;
};
struct RecordIQ3_XXS : RecordIQ4_XS {
  static constexpr int ggml_bytes = 98;
};
struct RecordIQ3_S : RecordIQ4_XS {
  static constexpr int ggml_bytes = 110;
};
struct RecordTQ2_0 {
  static constexpr int k = 256, ggml_bytes = 66, scale = 0, codes = kHalfRow,
                       group_bytes = 2 * kQuadBytes, bytes = codes + 8 * group_bytes;
};
struct RecordTQ1_0 : RecordTQ2_0 {
  static constexpr int ggml_bytes = 54;
};
struct RecordMXFP4 {
  static constexpr int k = 32, ggml_bytes = 17, scale = 0, codes = kPanelColumns,
                       bytes = codes + 4 * kQuadBytes;
};
struct RecordI4Z {
  static constexpr int k = 32, ggml_bytes = 19, scale = 0, zero = kHalfRow,
                       codes = zero + kPanelColumns, bytes = codes + 4 * kQuadBytes;
};
struct RecordI8Z {
  static constexpr int k = 32, ggml_bytes = 36, scale = 0, zero = kHalfRow, codes = 2 * kHalfRow,
                       bytes = codes + 8 * kQuadBytes;
};
struct RecordNVFP4 {
  static constexpr int k = 16, scale = 0, codes = kPanelColumns, bytes = codes + 2 * kQuadBytes;
};
constexpr int kNvfp4K = 64, kNvfp4Bytes = 36;  // of a GGML block
constexpr int kFp8K = 128;  // K that shares a scale: the blocks of DeepSeek's and Qwen's files
constexpr int kFp8Bytes = kQuadBytes + kFp8K * kPanelColumns;
static_assert(RecordQ4_0::bytes == 9 * 64 && RecordQ4_1::bytes == 10 * 64);
static_assert(RecordQ5_0::bytes == 11 * 64 && RecordQ5_1::bytes == 12 * 64);
static_assert(RecordQ8_0::bytes == 17 * 64);
static_assert(RecordQ2_K::bytes == 42 * 64 && RecordQ3_K::bytes == 57 * 64);
static_assert(RecordQ4_K::bytes == 74 * 64 && RecordQ5_K::bytes == 90 * 64);
static_assert(RecordQ6_K::bytes == 105 * 64);
static_assert(RecordIQ4_XS::bytes == 69 * 64 && RecordMXFP4::bytes == 17 * 32);
static_assert(RecordTQ2_0::bytes == 33 * 64 && RecordNVFP4::bytes == 9 * 32);
static_assert(RecordI4Z::bytes == 19 * 32 && RecordI8Z::bytes == 18 * 64);

// X(name, Suffix) for every format with a record: WeightFormat::name, RecordSuffix.
#define INVAR_RECORD_FORMATS(X) \
  X(q4_0, Q4_0)                 \
  X(q4_1, Q4_1)                 \
  X(q5_0, Q5_0)                 \
  X(q5_1, Q5_1)                 \
  X(q8_0, Q8_0)                 \
  X(q2_k, Q2_K)                 \
  X(q3_k, Q3_K)                 \
  X(q4_k, Q4_K)                 \
  X(q5_k, Q5_K)                 \
  X(q6_k, Q6_K)                 \
  X(iq4_nl, IQ4_NL)             \
  X(iq4_xs, IQ4_XS)             \
  X(mxfp4, MXFP4)               \
  X(iq1_s, IQ1_S)               \
  X(iq1_m, IQ1_M)               \
  X(iq2_xxs, IQ2_XXS)           \
  X(iq2_xs, IQ2_XS)             \
  X(iq2_s, IQ2_S)               \
  X(iq3_xxs, IQ3_XXS)           \
  X(iq3_s, IQ3_S)               \
  X(tq1_0, TQ1_0)               \
  X(tq2_0, TQ2_0)               \
  X(int4_zp, I4Z)               \
  X(int8_zp, I8Z)

// A GGML block: `k` values in `bytes` bytes. Rows of int8, fp8 and nvfp4 have
// bytes besides (scale_bytes).
struct GgmlBlock {
  int k, bytes;
};
constexpr GgmlBlock ggml_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32:
      return {1, 4};
    case WeightFormat::f16:
    case WeightFormat::bf16:
      return {1, 2};
    case WeightFormat::int8:
    case WeightFormat::fp8:
      return {1, 1};
    case WeightFormat::nvfp4:
      return {kNvfp4K, kNvfp4Bytes};
#define INVAR_BLOCK(name, Suffix) \
  case WeightFormat::name:        \
    return {Record##Suffix::k, Record##Suffix::ggml_bytes};
      INVAR_RECORD_FORMATS(INVAR_BLOCK)
#undef INVAR_BLOCK
    case WeightFormat::count:
      break;
  }
  return {1, 0};
}

// Scales that open a row of k values.
constexpr int64_t scale_bytes(WeightFormat format, int64_t k) {
  if (format == WeightFormat::int8 || format == WeightFormat::nvfp4) return 4;
  return format == WeightFormat::fp8 ? (k + kFp8K - 1) / kFp8K * 4 : 0;
}

// Scale and minimum of 32-block g of a q4_k or q5_k block, 6 bits each: the first four pairs lie in
// bytes g and g + 4, the others are put together from the nibbles of byte g + 4 and the top bits of
// g - 4 and g (get_scale_min_k4,
// https://github.com/ggml-org/ggml/blob/5136ed06fb4dfcea74d6e7e914fe4994017d30c2/src/ggml-quants.c).
struct ScaleMin {
  uint8_t scale, min;
};
constexpr ScaleMin scale_min_k4(const uint8_t* scales, int g) {
  if (g < 4) return {(uint8_t)(scales[g] & 63), (uint8_t)(scales[g + 4] & 63)};
  return {(uint8_t)((scales[g + 4] & 15) | (scales[g - 4] >> 6) << 4),
          (uint8_t)((scales[g + 4] >> 4) | (scales[g] >> 6) << 4)};
}
// Scale of 16-block g of a q3_k block: low nibbles in bytes 0-7, high pairs in bytes 8-11.
constexpr int scale_q3_k(const uint8_t* scales, int g) {
  return ((scales[g % 8] >> g / 8 * 4 & 15) | (scales[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32;
}
// Scale of 32-block g of an iq4_xs block: high pairs in bytes 2-3, low nibbles in bytes 4-7.
constexpr int scale_iq4_xs(const uint8_t* block, int g) {
  return ((block[4 + g / 2] >> g % 2 * 4 & 15) | (block[2 + g / 4] >> g % 4 * 2 & 3) << 4) - 32;
}

// A scale of nvfp4 without its sign, which does not count. All ones stands for 0, but with a sign
// for 480 (ggml_ue4m3_to_fp32,
// https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-impl.h).
constexpr uint8_t unsigned_e4m3(uint8_t code) { return code == 127 ? 0 : code & 127; }

// What the codes of iq4_nl and iq4_xs (kvalues_iq4nl of ggml-common.h) and of mxfp4 and nvfp4
// (kvalues_mxfp4: e2m1, doubled) stand for.
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace invar
