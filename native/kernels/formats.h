// How the integer formats unpack: a pair of quads of codes out of a packed record.
#pragma once

#include "kernels/codebook_groups.h"
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

// Fifth bits of quads j and k: bits j and k of a byte.
INVAR_INLINE CodePair with_fifth_bits(CodePair q, VB bits, int j, int k) {
  return {bit_or(q.low, bits_at(bits, j - 4, 16)), bit_or(q.high, bits_at(bits, k - 4, 16))};
}

// kGroup: K of one exact sum; kSums: how many of them one group of packed codes holds, kGroupBytes
// from one such group to the next; kStarts: the bias of the codes, in units of the start values of
// dot.h; kHighBits: codes take more than a nibble's mask and shift to unpack; kWide: they are s8,
// for wide sums.
//
// pair(group, h, j, vector): pair j of sum h, its quads j and j + kGroup / 8.
// scale(record, column): fp32 scales of W columns; min(...), or min_scale(...) and pairs of integer
// minimums; K-quants also scales(record, g, h, column) of a sum.
template <class R>
struct Block32 {
  using Record = R;
  static constexpr int kGroup = 32, kSums = 1, kGroupBytes = R::bytes;
  static constexpr bool kWide = false;
  INVAR_INLINE VF scale(const uint8_t* record, int column) {
    return load_f16(record + R::scale + 2 * column);
  }
};
struct FormatQ4_0 : Block32<RecordQ4_0> {
  static constexpr int kStarts = 1;
  static constexpr bool kMin = false, kHighBits = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int, int j, int vector) {
    return nibble_pair(group + j * kQuadBytes + vector * kVectorBytes);
  }
};
struct FormatQ4_1 : Block32<RecordQ4_1> {
  static constexpr int kStarts = 0;
  static constexpr bool kMin = true, kHighBits = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return FormatQ4_0::pair(group, h, j, vector);
  }
  INVAR_INLINE VF min(const uint8_t* record, int column) {
    return load_f16(record + Record::min + 2 * column);
  }
};
struct FormatQ5_0 : Block32<RecordQ5_0> {
  static constexpr int kStarts = 2;
  static constexpr bool kMin = false, kHighBits = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    VB bits = load_b(group + Record::high - Record::codes + vector * kVectorBytes);
    return with_fifth_bits(FormatQ4_0::pair(group, h, j, vector), bits, j, j + 4);
  }
};
// code * d + m = (code - 16) * d + (m + 16 d): codes that fit in narrow sums, at no cost per row.
struct FormatQ5_1 : Block32<RecordQ5_1> {
  static constexpr int kStarts = 2;
  static constexpr bool kMin = true, kHighBits = true;
  static_assert(Record::codes - Record::high == RecordQ5_0::codes - RecordQ5_0::high);
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return FormatQ5_0::pair(group, h, j, vector);
  }
  INVAR_INLINE VF min(const uint8_t* record, int column) {
    return fma(set1(16), scale(record, column), load_f16(record + Record::min + 2 * column));
  }
};
struct FormatQ8_0 : Block32<RecordQ8_0> {  // bytes as they are
  static constexpr bool kMin = false, kHighBits = false, kWide = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int, int j, int vector) {
    const uint8_t* p = group + j * kQuadBytes + vector * kVectorBytes;
    return {load_b(p), load_b(p + 4 * kQuadBytes)};
  }
};
struct FormatIQ4_NL : Block32<RecordIQ4_NL> {
  static constexpr bool kMin = false, kHighBits = true, kWide = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int, int j, int vector) {
    CodePair q = nibble_pair(group + j * kQuadBytes + vector * kVectorBytes);
    return {lookup(kIq4Values, q.low), lookup(kIq4Values, q.high)};
  }
};
// Twice e2m1 plus the bias of 16: codes for narrow sums. Scales are 2^(e - 128), of which e < 2 are
// denormal: zero.
constexpr uint8_t kMxfp4Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
struct FormatMXFP4 : Block32<RecordMXFP4> {
  static constexpr int kStarts = 2;
  static constexpr bool kMin = false, kHighBits = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int, int j, int vector) {
    CodePair q = nibble_pair(group + j * kQuadBytes + vector * kVectorBytes);
    return {lookup(kMxfp4Codes, q.low), lookup(kMxfp4Codes, q.high)};
  }
  INVAR_INLINE VF scale(const uint8_t* record, int column) {
    VI exponent = max(load_u8(record + Record::scale + column), set1_i(1)) - set1_i(1);
    return as_float(shift_left<23>(exponent));
  }
};

// Scales are divided by 256, which the column's own scale makes up for.
struct FormatNVFP4 {
  using Record = RecordNVFP4;
  static constexpr int kGroup = 16, kSums = 1, kGroupBytes = Record::bytes, kStarts = 2;
  static constexpr bool kMin = false, kHighBits = true, kWide = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return FormatMXFP4::pair(group, h, j, vector);
  }
  INVAR_INLINE VF scale(const uint8_t* record, int column) {
    return load_e4m3(record + Record::scale + column);
  }
};

// d * (q - z) = q * d - z * d, both products exact in fp32.
struct FormatI4Z : Block32<RecordI4Z> {
  static constexpr int kStarts = 0;
  static constexpr bool kMin = true, kHighBits = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return FormatQ4_0::pair(group, h, j, vector);
  }
  INVAR_INLINE VF min(const uint8_t* record, int column) {
    return neg(scale(record, column) * to_float(load_u8(record + Record::zero + column)));
  }
};
struct FormatI8Z : Block32<RecordI8Z> {
  static constexpr bool kMin = true, kHighBits = false, kWide = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return FormatQ8_0::pair(group, h, j, vector);
  }
  INVAR_INLINE VF min(const uint8_t* record, int column) {
    return neg(scale(record, column) * load_f16(record + Record::zero + 2 * column));
  }
};

template <class R, int group, int sums>
struct Block256 {
  using Record = R;
  static constexpr int kGroup = group, kSums = sums, kGroupBytes = R::group_bytes, kMinPairs = 0;
  static constexpr bool kWide = false;
  INVAR_INLINE VF scale(const uint8_t* record, int column) {
    return load_f16(record + R::scale + 2 * column);
  }
  INVAR_INLINE VF min_scale(const uint8_t* record, int column) {
    return load_f16(record + R::min_scale + 2 * column);
  }
};
// Scales and minimums belong to 16 values, a byte for both.
struct FormatQ2_K : Block256<RecordQ2_K, 16, 2> {
  static constexpr int kStarts = 0, kMinPairs = 8;
  static constexpr bool kMin = true, kHighBits = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    VB raw = load_b(group + h * kQuadBytes + vector * kVectorBytes);
    return {bits_at(raw, 2 * j, 3), bits_at(raw, 2 * j + 4, 3)};
  }
  INVAR_INLINE const uint8_t* scale_pairs(const uint8_t* record, int p, int column) {
    return record + Record::scales + p * 2 * kPanelColumns + 2 * column;
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int h, int column) {
    return load_nibble_scales(scale_pairs(record, g, column), h);
  }
  INVAR_INLINE VI min_pair(const uint8_t* record, int p, int column) {
    return shift_right<4>(load_u8_pairs(scale_pairs(record, p, column))) & set1_i(0x000f000f);
  }
};
// Codes of three bits, of 32 values in three quad rows, from bit `at` of a byte on. A byte holds
// two of them, and what is left of three bytes two more: half the operations that two bits and a
// third one apart take to unpack.
template <int at>
INVAR_INLINE CodePair three_bit_pair(const uint8_t* group, int h, int j, int vector) {
  const uint8_t* p = group + vector * kVectorBytes;
  asm("" : "+r"(p));  // bytes kept from pair to pair would leave too few registers to sums
  if (2 * h + j < 3) {
    VB raw = load_b(p + (2 * h + j) * kQuadBytes);
    return {bits_at(raw, -at, 7 << at), bits_at(raw, 3 - at, 7 << at)};
  }
  VB lowest = load_b(p + 2 * kQuadBytes);
  return {
      bit_or(bits_at(load_b(p), 5 - at, 6 << at), bits_at(lowest, 6 - at, 1 << at)),
      bit_or(bits_at(load_b(p + kQuadBytes), 5 - at, 6 << at), bits_at(lowest, 7 - at, 1 << at))};
}
// Codes times eight: minus 32, the bias that the start values hold, they are 8 * (code - 4).
struct FormatQ3_K : Block256<RecordQ3_K, 16, 2> {
  static constexpr int kStarts = 1;
  static constexpr bool kMin = false, kHighBits = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return three_bit_pair<3>(group, h, j, vector);
  }
  INVAR_INLINE VF scale(const uint8_t* record, int column) {
    return Block256::scale(record, column) * set1(0.125f);
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int h, int column) {
    return load_scales(record + Record::scales + (2 * g + h) * kPanelColumns + column);
  }
};
struct FormatQ4_K : Block256<RecordQ4_K, 32, 1> {
  static constexpr int kStarts = 0, kMinPairs = 4;
  static constexpr bool kMin = true, kHighBits = false;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return FormatQ4_0::pair(group, h, j, vector);
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int, int column) {
    return load_scales(record + Record::scales + g * kPanelColumns + column);
  }
  INVAR_INLINE VI min_pair(const uint8_t* record, int p, int column) {
    return load_u8_pairs(record + Record::mins + p * 2 * kPanelColumns + 2 * column);
  }
};
// Two sums per scale: 16 codes of five bits fit in narrow sums as they are, 32 would not.
struct FormatQ5_K : Block256<RecordQ5_K, 16, 2> {
  static constexpr int kStarts = 0, kMinPairs = 4;
  static constexpr bool kMin = true, kHighBits = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    const uint8_t* p = group + vector * kVectorBytes;
    const int quad = 4 * h + j;
    return with_fifth_bits(nibble_pair(p + Record::low + (2 * h + j) * kQuadBytes),
                           load_b(p + Record::high), quad, quad + 2);
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int, int column) {
    return load_scales(record + Record::scales + g * kPanelColumns + column);
  }
  INVAR_INLINE VI min_pair(const uint8_t* record, int p, int column) {
    return load_u8_pairs(record + Record::mins + p * 2 * kPanelColumns + 2 * column);
  }
};
struct FormatQ6_K : Block256<RecordQ6_K, 16, 1> {
  static constexpr int kStarts = 1;
  static constexpr bool kMin = false, kHighBits = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int, int j, int vector) {
    const uint8_t* p = group + vector * kVectorBytes;
    VB first = load_b(p), second = load_b(p + kQuadBytes);
    if (j == 0) return {bits_at(first, 0, 63), bits_at(second, 0, 63)};
    VB third = load_b(p + 2 * kQuadBytes);
    VB fourth = bit_or(bits_at(third, 0, 3 << 6),
                       bit_or(bits_at(first, 2, 3 << 4), bits_at(second, 4, 3 << 2)));
    return {bits_at(third, 0, 63), bits_at(fourth, 2, 255)};  // nothing there to cross a byte
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int, int column) {
    return load_scales(record + Record::scales + g * kPanelColumns + column);
  }
};
struct FormatIQ4_XS : Block256<RecordIQ4_XS, 32, 1> {
  static constexpr bool kMin = false, kHighBits = true, kWide = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    return FormatIQ4_NL::pair(group, h, j, vector);
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int, int column) {
    return load_s8(record + Record::scales + g * kPanelColumns + column);
  }
};

// Values for lookup(), with the bias of 32 that the start values hold or, for wide sums, without.
template <int n>
struct CodeTable {
  uint8_t codes[16] = {};
  constexpr CodeTable(const int8_t (&values)[n], int bias) {
    for (int i = 0; i < n; i++) codes[i] = (uint8_t)(values[i] + bias);
  }
};
template <int n>
INVAR_INLINE CodePair lookup_pair(const CodeTable<n>& table, CodePair places) {
  return {lookup(table.codes, places.low), lookup(table.codes, places.high)};
}

// Codes of three bits, laid out as those of q3_k, are places in a table of eight. One instance
// serves all blocks that are packed so: they differ in what they are packed from.
struct Places8 : Block256<RecordQ3_K, 16, 2> {
  static constexpr bool kMin = false, kHighBits = true;
  INVAR_INLINE CodePair places(const uint8_t* group, int h, int j, int vector) {
    return three_bit_pair<0>(group, h, j, vector);
  }
  INVAR_INLINE VF scale(const uint8_t* record, int column) {
    return Block256::scale(record, column) * set1(0.125f);
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int h, int column) {
    return FormatQ3_K::scales(record, g, h, column);
  }
};
struct FormatIQ1 : Places8 {
  static constexpr int kStarts = 1;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    static constexpr CodeTable<8> kTable(kIq1Values, 32);
    return lookup_pair(kTable, places(group, h, j, vector));
  }
};
using FormatIQ1_S = FormatIQ1;
using FormatIQ1_M = FormatIQ1;
// 43 is too much for the narrow sums of 16.
struct FormatIQ2 : Places8 {
  static constexpr bool kWide = true;
  INVAR_INLINE VI scales(const uint8_t* record, int g, int h, int column) {
    return load_s8(record + Record::scales + (2 * g + h) * kPanelColumns + column);
  }
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    static constexpr CodeTable<8> kTable(kIq2Values, 0);
    return lookup_pair(kTable, places(group, h, j, vector));
  }
};
using FormatIQ2_XXS = FormatIQ2;
using FormatIQ2_XS = FormatIQ2;
using FormatIQ2_S = FormatIQ2;

template <class R>
struct Places16 : Block256<R, 16, 2> {
  static constexpr int kStarts = 1;
  static constexpr bool kMin = false, kHighBits = true;
  INVAR_INLINE CodePair places(const uint8_t* group, int h, int j, int vector) {
    return nibble_pair(group + (2 * h + j) * kQuadBytes + vector * kVectorBytes);
  }
  INVAR_INLINE VI scales(const uint8_t* record, int g, int, int column) {
    return load_scales(record + R::scales + g * kPanelColumns + column);
  }
};
struct FormatIQ3_XXS : Places16<RecordIQ3_XXS> {
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    static constexpr CodeTable<16> kTable(kIq3XxsValues, 32);
    return lookup_pair(kTable, places(group, h, j, vector));
  }
  INVAR_INLINE VF scale(const uint8_t* record, int column) {
    return Block256::scale(record, column) * set1(0.5f);
  }
};
struct FormatIQ3_S : Places16<RecordIQ3_S> {
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    static constexpr CodeTable<16> kTable(kIq3SValues, 32);
    return lookup_pair(kTable, places(group, h, j, vector));
  }
};

// Codes q for q - 1: of three values, but tq2_0 has room for a fourth.
struct FormatTQ : Block256<RecordTQ2_0, 16, 2> {
  static constexpr int kStarts = 1;
  static constexpr bool kMin = false, kHighBits = true;
  INVAR_INLINE CodePair pair(const uint8_t* group, int h, int j, int vector) {
    static constexpr CodeTable<4> kTable({-1, 0, 1, 2}, 32);
    return lookup_pair(kTable, FormatQ2_K::pair(group, h, j, vector));
  }
  INVAR_INLINE VI scales(const uint8_t*, int, int, int) { return unit_scales(); }
};
using FormatTQ1_0 = FormatTQ;
using FormatTQ2_0 = FormatTQ;

}  // namespace invar::INVAR_ISA
