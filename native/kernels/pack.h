// GGML rows to panels of records (records.h). A quad of four codes is one 32-bit word, so packing
// is a transposition of words: read 32 rows side by side, write one record.
#pragma once

#include <type_traits>

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

template <WeightFormat format>
INVAR_INLINE void pack_block(const uint8_t* block, int c, uint8_t* record) {
  if constexpr (format == WeightFormat::q4_0 || format == WeightFormat::q4_1 ||
                format == WeightFormat::q5_0) {
    // GGML keeps element i of the first half and of the second in one byte, as the record does.
    using R = std::conditional_t<
        format == WeightFormat::q4_0, RecordQ4_0,
        std::conditional_t<format == WeightFormat::q4_1, RecordQ4_1, RecordQ5_0>>;
    const uint8_t* codes = block + 2;
    put_half(record + R::scale, c, block);
    if constexpr (format == WeightFormat::q4_1) {
      put_half(record + R::min, c, block + 2);
      codes += 2;
    }
    if constexpr (format == WeightFormat::q5_0) {
      uint32_t high = word_at(block + 2);  // bit i: element i = quad i / 4, place i % 4
      put_word(record + R::high, 0, c,
               every_fourth_bit(high) | every_fourth_bit(high >> 1) << 8 |
                   every_fourth_bit(high >> 2) << 16 | every_fourth_bit(high >> 3) << 24);
      codes += 4;
    }
    for (int j = 0; j < 4; j++) put_word(record + R::codes, j, c, word_at(codes + 4 * j));
  } else if constexpr (format == WeightFormat::q8_0) {
    put_half(record + RecordQ8_0::scale, c, block);
    for (int j = 0; j < 8; j++)
      put_word(record + RecordQ8_0::codes, j, c, word_at(block + 2 + 4 * j));
  } else if constexpr (format == WeightFormat::q4_k) {
    using R = RecordQ4_K;
    put_half(record + R::scale, c, block);
    put_half(record + R::min_scale, c, block + 2);
    for (int g = 0; g < 8; g++) {
      ScaleMin sm = scale_min_q4_k(block + 4, g);
      record[R::scales + g * kPanelColumns + c] = sm.scale;
      record[R::mins + g / 2 * 2 * kPanelColumns + 2 * c + g % 2] = sm.min;
    }
    // GGML keeps element i of two neighbouring 32-blocks in one byte; a record, quads j and j + 4
    // of one 32-block.
    const uint8_t* codes = block + 16;
    for (int g = 0; g < 8; g += 2, codes += 32) {
      for (int j = 0; j < 4; j++) {
        uint32_t a = word_at(codes + 4 * j), b = word_at(codes + 16 + 4 * j);
        uint8_t* out = record + R::codes + g * R::group_bytes;
        put_word(out, j, c, (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4);
        put_word(out + R::group_bytes, j, c, (a >> 4 & 0x0f0f0f0f) | (b & 0xf0f0f0f0));
      }
    }
  } else if constexpr (format == WeightFormat::q6_k) {
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
}

template <WeightFormat format, typename Record>
static void pack_records(const uint8_t* rows, int64_t row_bytes, int columns, int64_t k,
                         uint8_t* out) {
  constexpr GgmlBlock block = ggml_block(format);
  static_assert(block.k == Record::k);
  for (int64_t b = 0; b < k / block.k; b++, out += Record::bytes) {
    if (columns < kPanelColumns) memset(out, 0, Record::bytes);
    for (int c = 0; c < columns; c++)
      pack_block<format>(rows + c * row_bytes + b * block.bytes, c, out);
  }
}

// Items of `Item` type: item i of column c goes to out[i][c]. Eight at a time, so that a row's
// cache line is used while it is there.
template <typename Item>
static void pack_items(const uint8_t* rows, int64_t row_bytes, int columns, int64_t items,
                       uint8_t* out) {
  constexpr int64_t kStep = 8;
  constexpr int size = sizeof(Item);
  if (columns < kPanelColumns) memset(out, 0, items * kPanelColumns * size);
  for (int64_t first = 0; first < items; first += kStep) {
    int64_t last = first + kStep < items ? first + kStep : items;
    for (int c = 0; c < columns; c++)
      for (int64_t i = first; i < last; i++)
        memcpy(out + (i * kPanelColumns + c) * size, rows + c * row_bytes + i * size, size);
  }
}

static void pack_bf16(const uint8_t* rows, int64_t row_bytes, int columns, int64_t k,
                      uint8_t* out) {
  pack_items<uint32_t>(rows, row_bytes, columns, k / 2, out);
  if (k % 2 == 0) return;
  uint8_t* last = out + k / 2 * kQuadBytes;
  memset(last, 0, kQuadBytes);
  for (int c = 0; c < columns; c++) memcpy(last + 4 * c, rows + c * row_bytes + (k - 1) * 2, 2);
}

// `rows` is the whole matrix; `out` is where panel `first` begins.
static void pack(WeightFormat format, const uint8_t* rows, int64_t n, int64_t k, int64_t first,
                 int64_t last, uint8_t* out) {
  const int64_t row_bytes = row_bytes_ggml(format, k), bytes = panel_bytes(format, k);
  for (int64_t p = first; p < last; p++) {
    const uint8_t* from = rows + p * kPanelColumns * row_bytes;
    uint8_t* to = out + (p - first) * bytes;
    int64_t left = n - p * kPanelColumns;
    int columns = left < kPanelColumns ? (int)left : kPanelColumns;
    switch (format) {
      case WeightFormat::f32:
        pack_items<uint32_t>(from, row_bytes, columns, k, to);
        break;
      case WeightFormat::f16:
        pack_items<uint16_t>(from, row_bytes, columns, k, to);
        break;
      case WeightFormat::bf16:
        pack_bf16(from, row_bytes, columns, k, to);
        break;
#define INVAR_PACK(name, Record)                                               \
  case WeightFormat::name:                                                     \
    pack_records<WeightFormat::name, Record>(from, row_bytes, columns, k, to); \
    break;
        INVAR_PACK(q4_0, RecordQ4_0)
        INVAR_PACK(q4_1, RecordQ4_1)
        INVAR_PACK(q5_0, RecordQ5_0)
        INVAR_PACK(q8_0, RecordQ8_0)
        INVAR_PACK(q4_k, RecordQ4_K)
        INVAR_PACK(q6_k, RecordQ6_K)
#undef INVAR_PACK
      case WeightFormat::count:
        break;
    }
  }
}

}  // namespace invar::INVAR_ISA
