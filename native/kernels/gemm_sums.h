// Sums of a register tile over one group of codes: the products of a panel's columns and of rows of
// s8 activations (gemm_int.h).
#pragma once

#include "kernels/formats.h"

namespace invar::INVAR_ISA {

// Where a slab's parts lie in an activation row.
struct SlabOffsets {
  int64_t codes, scales, starts, sums;
};

template <int R>
struct Rows {
  const uint8_t* p[R];
  inline __attribute__((always_inline)) Rows(const uint8_t* first, int64_t stride) {
    INVAR_UNROLL for (int r = 0; r < R; r++) p[r] = first + r * stride;
  }
};

// Codes as they are packed, or widened to a byte each: [quad][column][place].
template <class F, bool widened>
INVAR_INLINE CodePair read_pair(const uint8_t* group, int h, int j, int vector) {
  if constexpr (!widened) return F::pair(group, h, j, vector);
  constexpr int kHalf = F::kGroup / 8;
  const uint8_t* p = group + h * 2 * kHalf * kQuadBytes + vector * kVectorBytes;
  return {load_b(p + j * kQuadBytes), load_b(p + (j + kHalf) * kQuadBytes)};
}

// sums[r][c] of sum h of a group of s8 codes.
template <class F, bool widened, int R, int C>
INVAR_INLINE void wide_sums(VI (&sums)[R][C], const uint8_t* group, int h, int vector,
                            const Rows<R>& rows, int64_t codes, int64_t starts) {
  constexpr int kHalf = F::kGroup / 8;
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    VI start;
    if constexpr (F::Record::k == 32) {
      start = wide_start<128 / 8>(set1_pair(rows.p[r] + starts));
    } else {
      start = wide_start<128 / 32>(set1_pair(rows.p[r] + starts));
      if constexpr (F::kGroup == 32)  // of two times 16 codes
        start = start + wide_start<128 / 32>(set1_pair(rows.p[r] + starts + 4));
    }
    INVAR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = start;
  }
  INVAR_UNROLL for (int j = 0; j < 2 * kHalf; j++) {
    // The two halves of a pair are unpacked apart, each right before its use: kept from the first
    // to the second they would not fit in registers.
    asm("" : "+r"(group));
    WideCodes q[C];
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      CodePair pair = read_pair<F, widened>(group, h, j % kHalf, vector + c);
      q[c] = wide_codes(j < kHalf ? pair.low : pair.high);
    }
    INVAR_UNROLL for (int r = 0; r < R; r++) {
      VI a = set1_pair(rows.p[r] + codes + 4 * j);
      INVAR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = wide_step(sums[r][c], q[c], a);
    }
  }
}

// sums[r][c] of sum h of a group of codes below 64.
template <class F, bool widened, int R, int C>
INVAR_INLINE void narrow_sums(VI (&sums)[R][C], const uint8_t* group, int h, int vector,
                              const Rows<R>& rows, int64_t codes, int64_t starts) {
  constexpr int kHalf = F::kGroup / 8;
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    VI start = zero_i();
    if constexpr (F::kStarts > 0) start = narrow_start<F::kStarts>(set1_pair(rows.p[r] + starts));
    INVAR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = start;
  }
  INVAR_UNROLL for (int j = 0; j < kHalf; j++) {
    if constexpr (R == 1 && F::kHighBits && !widened) {
      // A lone row needs a code once: unpacked right before its use, with the high bits read again
      // for every pair, it leaves registers to the sums (M = 1, 2 to 8 % faster on Zen 3). Larger
      // tiles lose more by the loads than by what they put on the stack.
      asm("" : "+r"(group));
      const VI low = set1_pair(rows.p[0] + codes + 4 * j);
      const VI high = set1_pair(rows.p[0] + codes + 4 * (j + kHalf));
      INVAR_UNROLL for (int c = 0; c < C; c++) {
        const CodePair q = read_pair<F, widened>(group, h, j, vector + c);
        sums[0][c] = narrow_step(narrow_step(sums[0][c], q.low, low), q.high, high);
      }
      continue;
    }
    CodePair q[C];
    INVAR_UNROLL for (int c = 0; c < C; c++) q[c] = read_pair<F, widened>(group, h, j, vector + c);
    INVAR_UNROLL for (int r = 0; r < R; r++) {
      VI a = set1_pair(rows.p[r] + codes + 4 * j);
      INVAR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = narrow_step(sums[r][c], q[c].low, a);
    }
    INVAR_UNROLL for (int r = 0; r < R; r++) {
      VI a = set1_pair(rows.p[r] + codes + 4 * (j + kHalf));
      INVAR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = narrow_step(sums[r][c], q[c].high, a);
    }
  }
}

// sums[r][c] of sum h of a group, before group_total / group_scaled.
template <class F, bool widened, int R, int C>
INVAR_INLINE void group_sums(VI (&sums)[R][C], const uint8_t* group, int h, int vector,
                             const Rows<R>& rows, int64_t codes, int64_t starts) {
  if constexpr (F::kWide) {
    wide_sums<F, widened>(sums, group, h, vector, rows, codes, starts);
  } else {
    narrow_sums<F, widened>(sums, group, h, vector, rows, codes, starts);
  }
}
template <class F>
INVAR_INLINE VI group_total(VI sum) {
  if constexpr (F::kWide) return sum;
  return narrow_total(sum);
}
template <class F>
INVAR_INLINE VI group_scaled(VI total, VI sum, VI scales) {
  if constexpr (F::kWide) return wide_scaled(total, sum, scales);
  return narrow_scaled(total, sum, scales);
}

INVAR_INLINE VF broadcast(const uint8_t* p) {
  float x;
  memcpy(&x, p, 4);
  return set1(x);
}

}  // namespace invar::INVAR_ISA
