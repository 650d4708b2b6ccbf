// One GGML block into column c of a record (records.h), a quad of four codes at a time: a quad is
// one 32-bit word, so that packing is a transposition of words.
#pragma once

#include "kernels/codebook_groups.h"
#include "kernels/records.h"
#include "kernels/simd.h"

namespace invar::INVAR_ISA {

INVAR_INLINE uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return word;
}
INVAR_INLINE void put_half(uint8_t* row, int c, const uint8_t* half) {
  memcpy(row + 2 * c, half, 2);
}
// Word j of quad row j, for column c.
INVAR_INLINE void put_word(uint8_t* quads, int j, int c, uint32_t word) {
  memcpy(quads + j * kQuadBytes + 4 * c, &word, 4);
}

// Bits 0, 4, 8, ... 28 gathered into one byte.
INVAR_INLINE uint32_t every_fourth_bit(uint32_t x) {
  x &= 0x11111111;
  x = (x | x >> 3) & 0x03030303;
  x = (x | x >> 6) & 0x000f000f;
  return (x | x >> 12) & 0xff;
}
// Bit i of 32, which belongs to element i = quad i / 4, place i % 4, to bit i / 4 of byte i % 4.
INVAR_INLINE uint32_t bits_by_place(uint32_t x) {
  return every_fourth_bit(x) | every_fourth_bit(x >> 1) << 8 | every_fourth_bit(x >> 2) << 16 |
         every_fourth_bit(x >> 3) << 24;
}

// GGML keeps element i of the first half of a 32-block and of the second in one byte, as the record
// does.
INVAR_INLINE void pack_nibbles(const uint8_t* codes, int c, uint8_t* quads) {
  for (int j = 0; j < 4; j++) put_word(quads, j, c, word_at(codes + 4 * j));
}

INVAR_INLINE void pack_q4_0(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + RecordQ4_0::scale, c, block);
  pack_nibbles(block + 2, c, record + RecordQ4_0::codes);
}
INVAR_INLINE void pack_q4_1(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + RecordQ4_1::scale, c, block);
  put_half(record + RecordQ4_1::min, c, block + 2);
  pack_nibbles(block + 4, c, record + RecordQ4_1::codes);
}
INVAR_INLINE void pack_q5_0(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + RecordQ5_0::scale, c, block);
  put_word(record + RecordQ5_0::high, 0, c, bits_by_place(word_at(block + 2)));
  pack_nibbles(block + 6, c, record + RecordQ5_0::codes);
}
INVAR_INLINE void pack_q5_1(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + RecordQ5_1::scale, c, block);
  put_half(record + RecordQ5_1::min, c, block + 2);
  put_word(record + RecordQ5_1::high, 0, c, bits_by_place(word_at(block + 4)));
  pack_nibbles(block + 8, c, record + RecordQ5_1::codes);
}
INVAR_INLINE void pack_q8_0(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + RecordQ8_0::scale, c, block);
  for (int j = 0; j < 8; j++)
    put_word(record + RecordQ8_0::codes, j, c, word_at(block + 2 + 4 * j));
}

// In q2_k and q3_k, element e of each 128 has two bits of byte e % 32, those from 2 (e / 32) on.
// The four quads of 16-block g, the two bits of quad j moved to bits 2j and 2j + 1.
INVAR_INLINE uint32_t two_bit_quads(const uint8_t* codes, int g) {
  const uint8_t* p = codes + g / 8 * 32 + g % 2 * 16;
  uint32_t quads = 0;
  for (int j = 0; j < 4; j++) quads |= (word_at(p + 4 * j) >> g % 8 / 2 * 2 & 0x03030303) << 2 * j;
  return quads;
}

INVAR_INLINE void pack_q2_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ2_K;
  put_half(record + R::scale, c, block + 80);
  put_half(record + R::min_scale, c, block + 82);
  for (int g = 0; g < 16; g++) {
    record[R::scales + g / 2 * 2 * kPanelColumns + 2 * c + g % 2] = block[g];
    put_word(record + R::codes, g, c, two_bit_quads(block + 16, g));
  }
}

INVAR_INLINE void pack_q3_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ3_K;
  put_half(record + R::scale, c, block + 108);
  for (int g = 0; g < 16; g++)
    record[R::scales + g * kPanelColumns + c] = (uint8_t)scale_q3_k(block + 96, g);
  for (int g = 0; g < 8; g++) {
    // The high bit of element e of 32-block g is bit g of byte e.
    uint32_t high = 0;
    for (int j = 0; j < 8; j++) high |= (word_at(block + 4 * j) >> g & 0x01010101) << j;
    uint8_t* out = record + R::codes + g * R::group_bytes;
    put_word(out + R::high, 0, c, high);
    for (int h = 0; h < 2; h++) put_word(out + R::low, h, c, two_bit_quads(block + 32, 2 * g + h));
  }
}

template <class R>
INVAR_INLINE void pack_scales_k4(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + R::scale, c, block);
  put_half(record + R::min_scale, c, block + 2);
  for (int g = 0; g < 8; g++) {
    ScaleMin sm = scale_min_k4(block + 4, g);
    record[R::scales + g * kPanelColumns + c] = sm.scale;
    record[R::mins + g / 2 * 2 * kPanelColumns + 2 * c + g % 2] = sm.min;
  }
}

// In q4_k and q5_k, a byte holds element i of two neighbouring 32-blocks.
INVAR_INLINE void pack_q4_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ4_K;
  pack_scales_k4<R>(block, c, record);
  const uint8_t* codes = block + 16;
  for (int g = 0; g < 8; g += 2, codes += 32) {
    for (int j = 0; j < 4; j++) {
      uint32_t a = word_at(codes + 4 * j), b = word_at(codes + 16 + 4 * j);
      uint8_t* out = record + R::codes + g * R::group_bytes;
      put_word(out, j, c, (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4);
      put_word(out + R::group_bytes, j, c, (a >> 4 & 0x0f0f0f0f) | (b & 0xf0f0f0f0));
    }
  }
}

INVAR_INLINE void pack_q5_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ5_K;
  pack_scales_k4<R>(block, c, record);
  for (int g = 0; g < 8; g++) {
    const uint8_t *high = block + 16, *codes = block + 48 + g / 2 * 32;
    uint32_t fifth = 0, low[8];
    for (int j = 0; j < 8; j++) {
      fifth |= (word_at(high + 4 * j) >> g & 0x01010101) << j;
      low[j] = word_at(codes + 4 * j) >> g % 2 * 4 & 0x0f0f0f0f;
    }
    uint8_t* out = record + R::codes + g * R::group_bytes;
    put_word(out + R::high, 0, c, fifth);
    for (int j = 0; j < 4; j++) {
      const int quad = j / 2 * 4 + j % 2;
      put_word(out + R::low, j, c, low[quad] | low[quad + 2] << 4);
    }
  }
}

INVAR_INLINE void pack_q6_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ6_K;
  const uint8_t *low = block, *high = block + 128, *scales = block + 192;
  put_half(record + R::scale, c, block + 208);
  for (int g = 0; g < 16; g++) {
    record[R::scales + g * kPanelColumns + c] = scales[g];
    // Element e of 128: its low bits are a nibble of byte e % 64, the lower one if e < 64; its
    // high bits are 2 (e / 32) of byte e % 32.
    int half = g / 8, e = g % 8 * 16;
    const uint8_t* nibbles = low + half * 64 + e % 64;
    const uint8_t* bits = high + half * 32 + e % 32;
    int nibble_shift = e / 64 * 4, bit_shift = e / 32 * 2;
    uint32_t lo[4], hi = 0;
    for (int j = 0; j < 4; j++) {
      lo[j] = word_at(nibbles + 4 * j) >> nibble_shift & 0x0f0f0f0f;
      hi |= (word_at(bits + 4 * j) >> bit_shift & 0x03030303) << 2 * j;
    }
    uint8_t* out = record + R::codes + g * R::group_bytes;
    put_word(out + R::high, 0, c, hi);
    put_word(out + R::low, 0, c, lo[0] | lo[2] << 4);
    put_word(out + R::low, 1, c, lo[1] | lo[3] << 4);
  }
}

INVAR_INLINE void pack_iq4_nl(const uint8_t* block, int c, uint8_t* record) {
  pack_q4_0(block, c, record);
}

INVAR_INLINE void pack_iq4_xs(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordIQ4_XS;
  put_half(record + R::scale, c, block);
  for (int g = 0; g < 8; g++) {
    record[R::scales + g * kPanelColumns + c] = (uint8_t)scale_iq4_xs(block, g);
    pack_nibbles(block + 8 + 16 * g, c, record + R::codes + g * R::group_bytes);
  }
}

INVAR_INLINE void pack_mxfp4(const uint8_t* block, int c, uint8_t* record) {
  record[RecordMXFP4::scale + c] = block[0];
  pack_nibbles(block + 1, c, record + RecordMXFP4::codes);
}

// Fields of two bits, or of four, to a byte each.
INVAR_INLINE uint32_t spread_pairs(uint32_t x) {
  x = (x | x << 12) & 0x000f000f;
  return (x | x << 6) & 0x03030303;
}
INVAR_INLINE uint32_t spread_nibbles(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}
INVAR_INLINE uint32_t spread_bits(uint32_t x) { return ((x & 15) * 0x00204081) & 0x01010101; }

// 32-block g of codebook entries of eight weights.
template <class R>
INVAR_INLINE void pack_eights(const CodebookGroup& group, int g, int c, uint8_t* record) {
  uint8_t* out = record + R::codes + g * R::group_bytes;
  put_word(out + R::high, 0, c, bits_by_place(group.upper));
  for (int h = 0; h < 2; h++) {
    record[R::scales + (2 * g + h) * kPanelColumns + c] = group.scales[h];
    const uint32_t first = group.entries[2 * h], second = group.entries[2 * h + 1];
    put_word(out + R::low, h, c,
             spread_pairs(first & 255) | spread_pairs(first >> 8) << 2 |
                 spread_pairs(second & 255) << 4 | spread_pairs(second >> 8) << 6);
  }
}
// Of entries of four weights: a quad each.
template <class R>
INVAR_INLINE void pack_fours(const CodebookGroup& group, int g, int c, uint8_t* record) {
  uint8_t* out = record + R::codes + g * R::group_bytes;
  record[R::scales + g * kPanelColumns + c] = group.scales[0];
  uint32_t quads[8];
  for (int j = 0; j < 8; j++)
    quads[j] = spread_nibbles(group.entries[j]) | spread_bits(group.upper >> 4 * j) << 3;
  for (int j = 0; j < 4; j++) {
    const int quad = j / 2 * 4 + j % 2;
    put_word(out, j, c, quads[quad] | quads[quad + 2] << 4);
  }
}

#define INVAR_PACK_CODEBOOK(name, Suffix, pack_group)                                             \
  INVAR_INLINE void pack_##name(const uint8_t* block, int c, uint8_t* record) {                   \
    put_half(record + Record##Suffix::scale, c, block);                                           \
    for (int g = 0; g < 8; g++) pack_group<Record##Suffix>(group_##name(block, g), g, c, record); \
  }
INVAR_PACK_CODEBOOK(iq1_s, IQ1_S, pack_eights)
INVAR_PACK_CODEBOOK(iq2_xxs, IQ2_XXS, pack_eights)
INVAR_PACK_CODEBOOK(iq2_xs, IQ2_XS, pack_eights)
INVAR_PACK_CODEBOOK(iq2_s, IQ2_S, pack_eights)
INVAR_PACK_CODEBOOK(iq3_xxs, IQ3_XXS, pack_fours)
INVAR_PACK_CODEBOOK(iq3_s, IQ3_S, pack_fours)
#undef INVAR_PACK_CODEBOOK
INVAR_INLINE void pack_iq1_m(const uint8_t* block, int c, uint8_t* record) {
  const uint16_t d = half_iq1_m(block);
  memcpy(record + RecordIQ1_M::scale + 2 * c, &d, 2);
  for (int g = 0; g < 8; g++) pack_eights<RecordIQ1_M>(group_iq1_m(block, g), g, c, record);
}

INVAR_INLINE void pack_tq1_0(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordTQ1_0;
  uint8_t digits[256];
  digits_tq1_0(block, digits);
  put_half(record + R::scale, c, block + 52);
  for (int g = 0; g < 16; g++) {
    uint32_t quads = 0;
    for (int j = 0; j < 4; j++) quads |= word_at(digits + 16 * g + 4 * j) << 2 * j;
    put_word(record + R::codes, g, c, quads);
  }
}
INVAR_INLINE void pack_tq2_0(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordTQ2_0;
  put_half(record + R::scale, c, block + 64);
  for (int g = 0; g < 16; g++) put_word(record + R::codes, g, c, two_bit_quads(block, g));
}

INVAR_INLINE void pack_int4_zp(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + RecordI4Z::scale, c, block);
  record[RecordI4Z::zero + c] = block[2];
  pack_nibbles(block + 3, c, record + RecordI4Z::codes);
}
INVAR_INLINE void pack_int8_zp(const uint8_t* block, int c, uint8_t* record) {
  put_half(record + RecordI8Z::scale, c, block);
  put_half(record + RecordI8Z::zero, c, block + 2);
  for (int j = 0; j < 8; j++) put_word(record + RecordI8Z::codes, j, c, word_at(block + 4 + 4 * j));
}

}  // namespace invar::INVAR_ISA
