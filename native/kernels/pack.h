// GGML rows to panels: read 32 rows side by side, write one record after the other.
#pragma once

#include "kernels/pack_blocks.h"

namespace invar::INVAR_ISA {

template <typename Record, void (*pack_block)(const uint8_t* block, int c, uint8_t* record)>
static void pack_records(const uint8_t* rows, int64_t row_bytes, int columns, int64_t k,
                         uint8_t* out) {
  for (int64_t b = 0; b < k / Record::k; b++, out += Record::bytes) {
    if (columns < kPanelColumns) memset(out, 0, Record::bytes);
    for (int c = 0; c < columns; c++)
      pack_block(rows + c * row_bytes + b * Record::ggml_bytes, c, out);
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

// The same of bytes, eight of a row in a register.
static void pack_bytes(const uint8_t* rows, int64_t row_bytes, int columns, int64_t items,
                       uint8_t* out) {
  int64_t first = 0;
  for (; first + 8 <= items; first += 8) {
    uint64_t eights[kPanelColumns] = {};
    for (int c = 0; c < columns; c++) eights[c] = two_words_at(rows + c * row_bytes + first);
    for (int i = 0; i < 8; i++)
      for (int c = 0; c < kPanelColumns; c++)
        out[(first + i) * kPanelColumns + c] = (uint8_t)(eights[c] >> 8 * i);
  }
  pack_items<uint8_t>(rows + first, row_bytes, columns, items - first, out + first * kPanelColumns);
}

static void pack_bf16(const uint8_t* rows, int64_t row_bytes, int columns, int64_t k,
                      uint8_t* out) {
  pack_items<uint32_t>(rows, row_bytes, columns, k / 2, out);
  if (k % 2 == 0) return;
  uint8_t* last = out + k / 2 * kQuadBytes;
  memset(last, 0, kQuadBytes);
  for (int c = 0; c < columns; c++) memcpy(last + 4 * c, rows + c * row_bytes + (k - 1) * 2, 2);
}

static void pack_int8(const uint8_t* rows, int64_t row_bytes, int columns, int64_t k,
                      uint8_t* out) {
  memset(out, 0, kQuadBytes);
  for (int c = 0; c < columns; c++) memcpy(out + 4 * c, rows + c * row_bytes, 4);
  out += kQuadBytes;
  pack_items<uint32_t>(rows + 4, row_bytes, columns, k / 4, out);
  if (k % 4 == 0) return;
  uint8_t* last = out + k / 4 * kQuadBytes;
  memset(last, 0, kQuadBytes);
  for (int c = 0; c < columns; c++)
    memcpy(last + 4 * c, rows + c * row_bytes + 4 + k / 4 * 4, (size_t)(k % 4));
}

static void pack_fp8(const uint8_t* rows, int64_t row_bytes, int columns, int64_t k, uint8_t* out) {
  const uint8_t* codes = rows + scale_bytes(WeightFormat::fp8, k);
  for (int64_t first = 0; first < k; first += kFp8K, out += kFp8Bytes) {
    memset(out, 0, kFp8Bytes);
    for (int c = 0; c < columns; c++) {
      float scale;
      memcpy(&scale, rows + c * row_bytes + first / kFp8K * 4, 4);
      scale *= 256;
      memcpy(out + 4 * c, &scale, 4);
    }
    pack_bytes(codes + first, row_bytes, columns, k - first < kFp8K ? k - first : kFp8K,
               out + kQuadBytes);
  }
}

static void pack_nvfp4(const uint8_t* rows, int64_t row_bytes, int columns, int64_t k,
                       uint8_t* out) {
  memset(out, 0, (size_t)panel_bytes(WeightFormat::nvfp4, k));
  for (int c = 0; c < columns; c++) {
    const uint8_t* row = rows + c * row_bytes;
    float scale;
    memcpy(&scale, row, 4);
    scale *= 128;  // codes count half units, and scales are divided by 256
    memcpy(out + 4 * c, &scale, 4);
    uint8_t* record = out + kQuadBytes;
    for (int64_t b = 0; b < k / 16; b++, record += RecordNVFP4::bytes) {
      const uint8_t *block = row + 4 + b / 4 * kNvfp4Bytes, *codes = block + 4 + b % 4 * 8;
      record[RecordNVFP4::scale + c] = unsigned_e4m3(block[b % 4]);
      for (int j = 0; j < 2; j++)
        put_word(record + RecordNVFP4::codes, j, c, word_at(codes + 4 * j));
    }
  }
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
      case WeightFormat::int8:
        pack_int8(from, row_bytes, columns, k, to);
        break;
      case WeightFormat::nvfp4:
        pack_nvfp4(from, row_bytes, columns, k, to);
        break;
      case WeightFormat::fp8:
        pack_fp8(from, row_bytes, columns, k, to);
        break;
#define INVAR_PACK(name, Suffix)                                                \
  case WeightFormat::name:                                                      \
    pack_records<Record##Suffix, pack_##name>(from, row_bytes, columns, k, to); \
    break;
        INVAR_RECORD_FORMATS(INVAR_PACK)
#undef INVAR_PACK
      case WeightFormat::count:
        break;
    }
  }
}

}  // namespace invar::INVAR_ISA
