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

INVAR_INLINE uint64_t two_words_at(const uint8_t* p) {
  uint64_t words;
  memcpy(&words, p, 8);
  return words;
}
// Of quad rows j and j + 1.
INVAR_INLINE void put_two_words(uint8_t* quads, int j, int c, uint64_t words) {
  put_word(quads, j, c, (uint32_t)words);
  put_word(quads, j + 1, c, (uint32_t)(words >> 32));
}

// Field j of a byte in word f gets what field f of that byte had in word j; kBits a field.
template <int kBits, typename Word>
INVAR_INLINE void transpose(Word (&words)[8 / kBits]) {
  constexpr Word kEach = (Word)0x0101010101010101;
  INVAR_UNROLL for (int bits = 4; bits >= kBits; bits /= 2) {
    const int apart = bits / kBits;
    const Word low = kEach * (bits == 4 ? 0x0f : bits == 2 ? 0x33 : 0x55);
    INVAR_UNROLL for (int i = 0; i < 8 / kBits; i++) {
      if (i & apart) continue;
      const Word changed = (words[i] >> bits ^ words[i + apart]) & low;
      words[i] ^= changed << bits;
      words[i + apart] ^= changed;
    }
  }
}
// The bits of a mask change places with those `by` above them.
template <typename Word>
INVAR_INLINE Word swap_bits(Word x, int by, Word mask) {
  const Word changed = (x >> by ^ x) & mask;
  return x ^ changed ^ changed << by;
}
// Bit i of 32, which belongs to element i = quad i / 4, place i % 4, to bit i / 4 of byte i % 4. Of
// the five bits of i, 43210, that is 10432: 13240, 10243, 10423, 10432.
INVAR_INLINE uint32_t bits_by_place(uint32_t x) {
  x = swap_bits(x, 14, 0x0000ccccu);
  x = swap_bits(x, 7, 0x00aa00aau);
  x = swap_bits(x, 2, 0x0c0c0c0cu);
  return swap_bits(x, 1, 0x22222222u);
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
// The four quads of each 16-block, the two bits of quad j moved to bits 2j and 2j + 1.
struct TwoBitQuads {
  uint32_t of[16];
  inline __attribute__((always_inline)) explicit TwoBitQuads(const uint8_t* codes) {
    INVAR_UNROLL for (int run = 0; run < 4; run++) {
      uint32_t quads[4];
      INVAR_UNROLL for (int j = 0; j < 4; j++) quads[j] = word_at(codes + 16 * run + 4 * j);
      transpose<2>(quads);
      INVAR_UNROLL for (int e = 0; e < 4; e++) of[run / 2 * 8 + 2 * e + run % 2] = quads[e];
    }
  }
};
// In q3_k and q5_k, element e of 32-block g has bit g of byte e: bit j of word g is quad j's.
struct HighBits {
  uint32_t of[8];
  inline __attribute__((always_inline)) explicit HighBits(const uint8_t* bits) {
    INVAR_UNROLL for (int j = 0; j < 8; j++) of[j] = word_at(bits + 4 * j);
    transpose<1>(of);
  }
};

INVAR_INLINE uint32_t each_byte(uint32_t word, uint8_t mask) { return word & mask * 0x01010101u; }
// 32 codes of three bits: the two low ones as in TwoBitQuads, the third as in HighBits.
INVAR_INLINE void put_threes(uint8_t* group, int c, uint32_t low0, uint32_t low1, uint32_t high) {
  put_word(group, 0, c,
           each_byte(low0, 0x03) | each_byte(low0 >> 1, 0x18) | each_byte(low1 << 3, 0x40) |
               each_byte(high << 2, 0x84) | each_byte(high << 3, 0x20));
  put_word(group, 1, c,
           each_byte(low0 >> 2, 0x03) | each_byte(low0 >> 3, 0x18) | each_byte(low1 >> 1, 0x40) |
               each_byte(high << 1, 0x04) | each_byte(high << 2, 0x20) | each_byte(high, 0x80));
  put_word(group, 2, c,
           each_byte(low1, 0x03) | each_byte(low1 >> 1, 0x18) | each_byte(low1 << 4, 0x40) |
               each_byte(low1 << 1, 0x80) | each_byte(high >> 2, 0x04) |
               each_byte(high >> 1, 0x20));
}
// 16 codes of six bits: nibbles of quads 0 and 2 in the first word of `low`, of 1 and 3 in the
// second, and the two high bits as in TwoBitQuads.
INVAR_INLINE void put_sixes(uint8_t* group, int c, uint64_t low, uint32_t high) {
  const uint32_t even = (uint32_t)low, odd = (uint32_t)(low >> 32);
  put_word(group, 0, c, each_byte(even, 0x0f) | each_byte(high << 4, 0x30) | each_byte(odd, 0xc0));
  put_word(group, 1, c,
           each_byte(even >> 4, 0x0f) | each_byte(high, 0x30) | each_byte(odd << 2, 0xc0));
  put_word(group, 2, c, each_byte(odd, 0x0f) | each_byte(high << 2, 0x30) | each_byte(high, 0xc0));
}

INVAR_INLINE void pack_q2_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ2_K;
  put_half(record + R::scale, c, block + 80);
  put_half(record + R::min_scale, c, block + 82);
  const TwoBitQuads quads(block + 16);
  for (int g = 0; g < 16; g++) {
    record[R::scales + g / 2 * 2 * kPanelColumns + 2 * c + g % 2] = block[g];
    put_word(record + R::codes, g, c, quads.of[g]);
  }
}

INVAR_INLINE void pack_q3_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ3_K;
  put_half(record + R::scale, c, block + 108);
  for (int g = 0; g < 16; g++)
    record[R::scales + g * kPanelColumns + c] = (uint8_t)scale_q3_k(block + 96, g);
  const HighBits high(block);
  const TwoBitQuads low(block + 32);
  for (int g = 0; g < 8; g++)
    put_threes(record + R::codes + g * R::group_bytes, c, low.of[2 * g], low.of[2 * g + 1],
               high.of[g]);
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
    uint8_t* out = record + R::codes + g * R::group_bytes;
    for (int j = 0; j < 4; j += 2) {
      uint64_t quads[2] = {two_words_at(codes + 4 * j), two_words_at(codes + 16 + 4 * j)};
      transpose<4>(quads);
      put_two_words(out, j, c, quads[0]);
      put_two_words(out + R::group_bytes, j, c, quads[1]);
    }
  }
}

INVAR_INLINE void pack_q5_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ5_K;
  pack_scales_k4<R>(block, c, record);
  const HighBits high(block + 16);
  const uint8_t* codes = block + 48;
  for (int g = 0; g < 8; g += 2, codes += 32) {
    uint8_t* out = record + R::codes + g * R::group_bytes;
    for (int j = 0; j < 2; j++) put_word(out + j * R::group_bytes + R::high, 0, c, high.of[g + j]);
    for (int h = 0; h < 2; h++) {
      uint64_t quads[2] = {two_words_at(codes + 16 * h), two_words_at(codes + 16 * h + 8)};
      transpose<4>(quads);
      put_two_words(out + R::low, 2 * h, c, quads[0]);
      put_two_words(out + R::group_bytes + R::low, 2 * h, c, quads[1]);
    }
  }
}

INVAR_INLINE void pack_q6_k(const uint8_t* block, int c, uint8_t* record) {
  using R = RecordQ6_K;
  const uint8_t* scales = block + 192;
  put_half(record + R::scale, c, block + 208);
  // Element e of 128: its low bits are a nibble of byte e % 64, the lower one if e < 64; its high
  // bits lie as the codes of q2_k.
  const TwoBitQuads high(block + 128);
  for (int g = 0; g < 16; g++) record[R::scales + g * kPanelColumns + c] = scales[g];
  for (int run = 0; run < 8; run++) {
    uint64_t quads[2] = {two_words_at(block + 16 * run), two_words_at(block + 16 * run + 8)};
    transpose<4>(quads);
    const int g = run / 4 * 8 + run % 4;
    put_sixes(record + R::codes + g * R::group_bytes, c, quads[0], high.of[g]);
    put_sixes(record + R::codes + (g + 4) * R::group_bytes, c, quads[1], high.of[g + 4]);
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

// Fields of four bits, or bits, to a byte each.
INVAR_INLINE uint32_t spread_nibbles(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}
INVAR_INLINE uint32_t spread_bits(uint32_t x) { return ((x & 15) * 0x00204081) & 0x01010101; }

// 32-block g of codebook entries of eight weights.
template <class R>
INVAR_INLINE void pack_eights(const CodebookGroup& group, int g, int c, uint8_t* record) {
  uint8_t* out = record + R::codes + g * R::group_bytes;
  for (int h = 0; h < 2; h++) record[R::scales + (2 * g + h) * kPanelColumns + c] = group.scales[h];
  // Place t of quad j has field t of byte j, and goes to field j of byte t.
  uint64_t low = 0;
  for (int l = 0; l < 4; l++) low |= (uint64_t)group.entries[l] << 16 * l;
  low = swap_bits(low, 6, (uint64_t)0x00cc00cc00cc00cc);
  low = swap_bits(low, 12, (uint64_t)0x0000f0f00000f0f0);
  put_threes(out, c, (uint32_t)low, (uint32_t)(low >> 32), bits_by_place(group.upper));
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
  const TwoBitQuads quads(block);
  for (int g = 0; g < 16; g++) put_word(record + R::codes, g, c, quads.of[g]);
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
