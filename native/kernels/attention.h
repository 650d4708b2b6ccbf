// Attention over pages: register tiles of (query row x 16 lanes) over bf16 pairs.
//
// A row is one query head of one token. Two products share one inner loop, `dot_pairs`:
//   QK  lanes are 16 tokens of a page half, a step is a pair of head dimensions
//   PV  lanes are 16 head dimensions, a step is a pair of tokens
// The left operand (q, or the probabilities) is broadcast, the right one streams from the page.
#pragma once

#include "kernels/kernels.h"
#include "kernels/math.h"

#define INVAR_LAMBDA_INLINE __attribute__((always_inline))

namespace invar::INVAR_ISA {

// A left operand: bf16 values as the instruction set wants to broadcast them. AVX-512 takes a pair
// in one dword; elsewhere a pair is two fp32 broadcasts, so the values are widened once, when they
// are written, and a broadcast is a plain load.
#if defined(INVAR_ISA_AVX512)
using Operand = uint16_t;
INVAR_INLINE void store_operand(Operand* p, VF a) { store_bf16(p, a); }
INVAR_INLINE void store_probability(Operand* p, VF a) { store_bf16(p, a); }
#else
using Operand = float;
INVAR_INLINE void store_operand(Operand* p, VF a) { store(p, round_bf16(a)); }
// A value of exp2_nonpositive is zero, normal or NaN, so the rare cases of to_bf16 fall away.
INVAR_INLINE void store_probability(Operand* p, VF a) {
  const VI bits = as_int(a);
  const VI rounded = bits + set1_i(0x7fff) + (shift_right<16>(bits) & set1_i(1));
  store(p, as_float(rounded & set1_i((int32_t)0xffff0000)));
}
#endif

// Rows per register tile, and 16-lane groups beside each other for a given number of rows.
// AVX2, 16 registers: 6 rows x 2 vectors = 12 accumulators + 2 of K or V + mask + broadcast, and
// two fmas a cycle at latency 4 need 8 chains: hence 4 groups for one row, 2 for two or three.
// AVX-512, 32 registers: 6 x 4 = 24 accumulators + 4; vdpbf16ps has latency 6 (kernels.md, 0).
constexpr int kMaxTileRows = 6;
#if defined(INVAR_ISA_AVX512)
constexpr int tile_groups(int /*rows*/) { return 4; }
#else
constexpr int tile_groups(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

// acc += a * b in the register of acc. Spelled out on AVX2 because the tile needs all 16 registers:
// left alone, GCC 12 writes some fmas over an operand and carries their sums through the stack,
// which makes the loop wait for a store every step (46 against 60 GFLOP/s).
INVAR_INLINE void accumulate(VF& acc, VF a, VF b) {
#if defined(INVAR_ISA_AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.v) : "x"(a.v), "x"(b.v));
#else
  acc = fma(a, b, acc);
#endif
}

// The right operand of one group: step k lies at data + k * stride. Step k also prefetches the line
// at ahead + k * stride, the same place in the next tile: pages lie anywhere, so the hardware finds
// no stream across them, and one line a step keeps memory busy without filling the miss buffers.
struct Stream {
  const uint8_t* data;
  const uint8_t* ahead;
};
INVAR_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// acc[r][g] += pairs [0, steps) of a[r] . b[g].
// Odd element first, then the even one: dot_bf16 of simd.h, with the right operand split once for
// all rows.
template <int R, int G>
INVAR_INLINE void dot_pairs(Lanes16 (&acc)[R][G], const Operand* const (&a)[R],
                            const Stream (&b)[G], int64_t stride, int steps) {
  constexpr int N = Lanes16::N;
#if defined(INVAR_ISA_AVX512)
  for (int k = 0; k < steps; k++)
    for (int g = 0; g < G; g++) {
      prefetch(b[g].ahead + k * stride);
      const VI v = load_i(b[g].data + k * stride);
      for (int r = 0; r < R; r++)
        acc[r][g].v[0] = dot_bf16(acc[r][g].v[0], v, set1_pair(a[r] + 2 * k));
    }
  static_assert(N == 1);
#else
  const VI high = set1_i((int32_t)0xffff0000);
  auto right = [&](int k, int odd, int g, int i) INVAR_LAMBDA_INLINE {
    const VI raw = load_i(b[g].data + k * stride + i * W * 4);
    return as_float(odd ? raw & high : shift_left<16>(raw));
  };
  for (int k = 0; k < steps; k++) {
    for (int g = 0; g < G; g++) prefetch(b[g].ahead + k * stride);
    for (int odd = 1; odd >= 0; odd--) {
      if constexpr (R < G * N) {  // hold the fewer operands in registers, pass the others by
        VF x[R];
        for (int r = 0; r < R; r++) x[r] = set1(a[r][2 * k + odd]);
        for (int g = 0; g < G; g++)
          for (int i = 0; i < N; i++) {
            const VF v = right(k, odd, g, i);
            for (int r = 0; r < R; r++) accumulate(acc[r][g].v[i], x[r], v);
          }
      } else {
        VF v[G][N];
        for (int g = 0; g < G; g++)
          for (int i = 0; i < N; i++) v[g][i] = right(k, odd, g, i);
        for (int r = 0; r < R; r++) {
          const VF x = set1(a[r][2 * k + odd]);
          for (int g = 0; g < G; g++)
            for (int i = 0; i < N; i++) accumulate(acc[r][g].v[i], x, v[g][i]);
        }
      }
    }
  }
#endif
}

// One step in which only one token of the pair is visible: the other half of V is selected to
// zero, whatever it holds, and meets a probability of zero.
template <int R, int G>
INVAR_INLINE void dot_half_pair(Lanes16 (&acc)[R][G], const Operand* const (&a)[R],
                                const Stream (&b)[G], bool odd) {
  alignas(64) int32_t kept[G][16];
  const VI keep = set1_i(odd ? (int32_t)0xffff0000 : 0xffff);
  Stream masked[G];
  for (int g = 0; g < G; g++) {
    for (int i = 0; i < 16; i += W) store_i(kept[g] + i, load_i(b[g].data + i * 4) & keep);
    masked[g] = {reinterpret_cast<const uint8_t*>(kept[g]), b[g].ahead};
  }
  dot_pairs<R, G>(acc, a, masked, 0, 1);
}

}  // namespace invar::INVAR_ISA
