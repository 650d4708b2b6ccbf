#include "runtime/unpack.h"

#include <algorithm>

namespace invar {
namespace {

constexpr int kBlock = 32;    // of K
constexpr int kColumns = 32;  // of n at a time: the codes of a block stay in L1, and stores are 32

// Four times the nibble of an AWQ word that column 0 … 7 is in.
constexpr int kAwqShift[8] = {0, 16, 4, 20, 8, 24, 12, 28};

// Codes of `count` columns from `first` on, all at place `at` of K.
void codes_at(const PackedCodes& p, int64_t at, int64_t first, int count, uint8_t* codes) {
  const uint32_t mask = p.bits == 4 ? 15 : 255;
  const int64_t per = 32 / p.bits;
  const int shift = static_cast<int>(at % per) * p.bits;
  if (p.layout == CodeOrder::gptq) {
    const uint32_t* words = p.words + at / per * p.n + first;
    for (int c = 0; c < count; ++c) codes[c] = static_cast<uint8_t>(words[c] >> shift & mask);
  } else if (p.layout == CodeOrder::awq) {
    const uint32_t* words = p.words + at * (p.n / 8) + first / 8;
    for (int c = 0; c < count; ++c) {
      codes[c] = static_cast<uint8_t>(words[c / 8] >> kAwqShift[c % 8] & 15);
    }
  } else {
    const int64_t stride = p.k / per;
    const uint32_t* words = p.words + first * stride + at / per;
    for (int c = 0; c < count; ++c) {
      codes[c] = static_cast<uint8_t>(words[c * stride] >> shift & mask);
    }
  }
}

}  // namespace

void unpack_rows(const PackedCodes& p, int64_t first, int64_t last, const BlockRows& out) {
  uint8_t codes[kBlock][kColumns] = {};
  for (int64_t n = first; n < last; n += kColumns) {
    const int count = static_cast<int>(std::min<int64_t>(kColumns, last - n));
    for (int64_t block = 0; block < p.k / kBlock; ++block) {
      for (int i = 0; i < kBlock; ++i) {
        const int64_t at = block * kBlock + i;
        codes_at(p, p.order != nullptr ? p.order[at] : at, n, count, codes[i]);
      }
      uint8_t* to = out.data + n * out.row_bytes + block * out.block_bytes + out.header;
      const int bytes = p.bits == 4 ? kBlock / 2 : kBlock;
      for (int i = 0; i < bytes; ++i) {
        for (int c = 0; c < kColumns; ++c) {
          codes[i][c] = static_cast<uint8_t>(
              p.bits == 4 ? codes[i][c] | codes[i + kBlock / 2][c] << 4 : codes[i][c] ^ 0x80);
        }
      }
      for (int c = 0; c < count; ++c) {
        for (int i = 0; i < bytes; ++i) to[c * out.row_bytes + i] = codes[i][c];
      }
    }
  }
}

}  // namespace invar
