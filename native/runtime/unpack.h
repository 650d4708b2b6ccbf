// Codes in 32-bit words, as quantised checkpoints store them, to rows of blocks (records.h).
// Nothing is computed: bits move.
#pragma once

#include <cstdint>

namespace invar {

// How checkpoints put codes of a weight [n, k] into 32-bit words, the low bits first.
enum class CodeOrder : int {
  gptq,  // [k / per, n], a word along K
  awq,   // [k, n / 8], a word along n, its nibbles columns 0 2 4 6 1 3 5 7
  rows,  // [n, k / per], a word along K
};

struct PackedCodes {
  const uint32_t* words;
  CodeOrder layout;
  int bits;              // 4 or 8
  int64_t n, k;          // k: whole blocks of 32
  const int32_t* order;  // place in K of each column of the rows, or null: its own
};

// Where a block's codes go: `header` bytes behind its beginning.
struct BlockRows {
  uint8_t* data;
  int64_t row_bytes, block_bytes, header;
};

// Codes of rows [first, last): a byte each, less 128, or, of 4 bits, nibbles as GGML has them.
void unpack_rows(const PackedCodes& codes, int64_t first, int64_t last, const BlockRows& out);

}  // namespace invar
