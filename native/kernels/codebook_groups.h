// How iq1, iq2, iq3 and tq1 blocks say what their weights are, in one form for packing and lookup.
// The blocks and the order of bits in them (dequantize_row_iq*, dequantize_row_tq1_0):
// https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-quants.c
#pragma once

#include <cstring>

#include "kernels/codebooks.h"
#include "kernels/kernels.h"

namespace invar {

// 32 weights: entries of a codebook (four of eight weights, or eight of four), the bits that choose
// the second half of the value table (element i: bit i), and a scale for each 16.
struct CodebookGroup {
  uint16_t entries[8];
  uint32_t upper;
  uint8_t scales[2];
};

// What places stand for, the upper half of a table being for weights whose bit is set. iq1 is eight
// times place - 1 + 1/8 or - 1/8; iq3_xxs is half of its codebook's values, which are all even.
constexpr int8_t kIq1Values[8] = {-7, 1, 9, 0, -9, -1, 7, 0};
constexpr int8_t kIq2Values[8] = {8, 25, 43, 0, -8, -25, -43, 0};
constexpr int8_t kIq3XxsValues[16] = {2,  6,  10,  14,  18,  22,  26,  31,
                                      -2, -6, -10, -14, -18, -22, -26, -31};
constexpr int8_t kIq3SValues[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

constexpr uint32_t word_of(const uint8_t* p) {
  return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24;
}
constexpr uint32_t short_of(const uint8_t* p) { return p[0] | (uint32_t)p[1] << 8; }

// Of eight signs, seven are stored: their number is even. A byte here for each seven of `sevens`.
constexpr uint32_t with_eighth_signs(uint32_t sevens) {
  uint32_t odd = sevens ^ sevens >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return sevens | (odd & 0x01010101) << 7;
}
constexpr uint32_t thirty_two_signs(uint32_t sevens) {
  return with_eighth_signs((sevens & 0x7f) | (sevens << 1 & 0x7f00) | (sevens << 2 & 0x7f0000) |
                           (sevens << 3 & 0x7f000000));
}
// Scales of four bits, or three, are stored as s and count as 2 s + 1.
constexpr uint8_t odd_scale(uint32_t s) { return (uint8_t)(2 * s + 1); }

// iq1_s { f16 d; u8 qs[32]; u16 qh[8] }
constexpr CodebookGroup group_iq1_s(const uint8_t* block, int g) {
  const uint32_t high = short_of(block + 34 + 2 * g);
  CodebookGroup group{};
  for (int l = 0; l < 4; l++)
    group.entries[l] = kGridIQ1[block[2 + 4 * g + l] | (high >> 3 * l & 7) << 8];
  group.upper = high & 0x8000 ? 0xffffffffu : 0;
  group.scales[0] = group.scales[1] = odd_scale(high >> 12 & 7);
  return group;
}

// iq1_m { u8 qs[32], qh[16]; u16 scales[4] }: d is the high nibbles of the scales.
constexpr CodebookGroup group_iq1_m(const uint8_t* block, int g) {
  const uint8_t* high = block + 32 + 2 * g;
  CodebookGroup group{};
  for (int l = 0; l < 4; l++) {
    const uint32_t nibble = high[l / 2] >> l % 2 * 4;
    group.entries[l] = kGridIQ1[block[4 * g + l] | (nibble & 7) << 8];
    if (nibble & 8) group.upper |= 0xffu << 8 * l;
  }
  const uint32_t scales = short_of(block + 48 + g / 2 * 2) >> g % 2 * 6;
  group.scales[0] = odd_scale(scales & 7);
  group.scales[1] = odd_scale(scales >> 3 & 7);
  return group;
}
constexpr uint16_t half_iq1_m(const uint8_t* block) {
  const uint8_t* s = block + 48;
  return (uint16_t)(s[1] >> 4 | (s[3] & 0xf0) | (s[5] & 0xf0) << 4 | (s[7] & 0xf0) << 8);
}

// iq2_xxs { f16 d; { u8 indices[4]; u32 signs and, on top, the scale } [8] }
constexpr CodebookGroup group_iq2_xxs(const uint8_t* block, int g) {
  const uint8_t* p = block + 2 + 8 * g;
  const uint32_t word = word_of(p + 4);
  CodebookGroup group{};
  for (int l = 0; l < 4; l++) group.entries[l] = kGridIQ2_XXS[p[l]];
  group.upper = thirty_two_signs(word);
  group.scales[0] = group.scales[1] = odd_scale(word >> 28);
  return group;
}

// iq2_xs { f16 d; u16 qs[32]: index, signs; u8 scales[8] }
constexpr CodebookGroup group_iq2_xs(const uint8_t* block, int g) {
  CodebookGroup group{};
  for (int l = 0; l < 4; l++) {
    const uint32_t both = short_of(block + 2 + 8 * g + 2 * l);
    group.entries[l] = kGridIQ2_XS[both & 511];
    group.upper |= both >> 9 << 8 * l;
  }
  group.upper = with_eighth_signs(group.upper);
  group.scales[0] = odd_scale(block[66 + g] & 15);
  group.scales[1] = odd_scale(block[66 + g] >> 4);
  return group;
}

// iq2_s { f16 d; u8 qs[32], signs[32], qh[8], scales[8] }
constexpr CodebookGroup group_iq2_s(const uint8_t* block, int g) {
  CodebookGroup group{};
  for (int l = 0; l < 4; l++)
    group.entries[l] = kGridIQ2_S[block[2 + 4 * g + l] | (block[66 + g] >> 2 * l & 3) << 8];
  group.upper = word_of(block + 34 + 4 * g);
  group.scales[0] = odd_scale(block[74 + g] & 15);
  group.scales[1] = odd_scale(block[74 + g] >> 4);
  return group;
}

// iq3_xxs { f16 d; u8 qs[64]; u32 signs and, on top, scales [8] }
constexpr CodebookGroup group_iq3_xxs(const uint8_t* block, int g) {
  const uint32_t word = word_of(block + 66 + 4 * g);
  CodebookGroup group{};
  for (int l = 0; l < 8; l++) group.entries[l] = kGridIQ3_XXS[block[2 + 8 * g + l]];
  group.upper = thirty_two_signs(word);
  group.scales[0] = group.scales[1] = odd_scale(word >> 28);
  return group;
}

// iq3_s { f16 d; u8 qs[64], qh[8], signs[32], scales[4] }
constexpr CodebookGroup group_iq3_s(const uint8_t* block, int g) {
  CodebookGroup group{};
  for (int l = 0; l < 8; l++)
    group.entries[l] = kGridIQ3_S[block[2 + 8 * g + l] | (block[66 + g] >> l & 1) << 8];
  group.upper = word_of(block + 74 + 4 * g);
  group.scales[0] = group.scales[1] = odd_scale(block[106 + g / 2] >> g % 2 * 4 & 15);
  return group;
}

// The three-valued digits of tq1_0 { u8 qs[48], qh[4]; f16 d }: a byte is a fraction of 243 rounded
// up to 256ths, so that the highest digit of three times it is the next one. Of the first 32 bytes
// five digits each, then of 16, then four of 4; digit n of all bytes of a run before digit n + 1.
constexpr void digits_tq1_0(const uint8_t* block, uint8_t* digits) {
  constexpr struct {
    int at, bytes, digits;
  } kRuns[] = {{0, 32, 5}, {32, 16, 5}, {48, 4, 4}};
  for (const auto& run : kRuns) {
    int power = 1;
    for (int n = 0; n < run.digits; n++, power *= 3, digits += run.bytes)
      for (int i = 0; i < run.bytes; i++)
        digits[i] = (uint8_t)((uint8_t)(block[run.at + i] * power) * 3 >> 8);
  }
}

}  // namespace invar
