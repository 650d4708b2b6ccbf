// How the integer formats unpack: a pair of quads of codes out of a packed record.
#pragma once

#include "kernels/dot.h"
#include "kernels/records.h"

namespace invar::INVAR_ISA {

constexpr int kPanelVectors = kPanelColumns / W;
constexpr int kVectorBytes = 4 * W;  // of a quad row

// Pair j of a group: quads j and j + kGroup / 8.
struct CodePair {
  VB low, high;
};

INVAR_INLINE CodePair nibble_pair(const uint8_t* p) {
  VB raw = load_b(p);
  return {low_nibbles(raw), high_nibbles(raw)};
}

// kGroup: K of one exact sum; kGroupBytes: from one group's codes to the next; kStarts: the bias of
// the codes, in units of the start values of dot.h.
struct FormatQ4_0 {
  using Record = RecordQ4_0;
  static constexpr int kGroup = 32, kStarts = 1, kGroupBytes = Record::bytes;
  static constexpr bool kMin = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int j, int vector) {
    return nibble_pair(group + j * kQuadBytes + vector * kVectorBytes);
  }
};
struct FormatQ4_1 {
  using Record = RecordQ4_1;
  static constexpr int kGroup = 32, kStarts = 0, kGroupBytes = Record::bytes;
  static constexpr bool kMin = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int j, int vector) {
    return FormatQ4_0::pair(group, j, vector);
  }
};
struct FormatQ5_0 {
  using Record = RecordQ5_0;
  static constexpr int kGroup = 32, kStarts = 2, kGroupBytes = Record::bytes;
  static constexpr bool kMin = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int j, int vector) {
    CodePair q = FormatQ4_0::pair(group, j, vector);
    VB bits = load_b(group + Record::high - Record::codes + vector * kVectorBytes);
    return {bit_or(q.low, bits_at(bits, j - 4, 16)), bit_or(q.high, bits_at(bits, j, 16))};
  }
};
struct FormatQ8_0 {
  using Record = RecordQ8_0;  // already bytes, and signed: tile_q8_0
  static constexpr int kGroup = 32;
};
struct FormatQ4_K {
  using Record = RecordQ4_K;
  static constexpr int kGroup = 32, kStarts = 0, kGroupBytes = Record::group_bytes;
  static constexpr bool kMin = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int j, int vector) {
    return FormatQ4_0::pair(group, j, vector);
  }
};
struct FormatQ6_K {
  using Record = RecordQ6_K;
  static constexpr int kGroup = 16, kStarts = 1, kGroupBytes = Record::group_bytes;
  static constexpr bool kMin = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int j, int vector) {
    const uint8_t* p = group + vector * kVectorBytes;
    CodePair q = nibble_pair(p + Record::low + j * kQuadBytes);
    VB bits = load_b(p + Record::high);
    return {bit_or(q.low, bits_at(bits, 2 * j - 4, 48)), bit_or(q.high, bits_at(bits, 2 * j, 48))};
  }
};

}  // namespace invar::INVAR_ISA
