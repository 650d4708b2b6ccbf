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
// two fmas a cycle at latency 4 need 8 chains: hence 4 groups for one row, 2 for two. Three rows of
// 2 groups would need 17 registers; their 6 chains still outrun memory (8 cycles a line).
// AVX-512, 32 registers: 6 x 4 = 24 accumulators + 4; vdpbf16ps has latency 6 (kernels.md, 0).
constexpr int kMaxTileRows = 6;
#if defined(INVAR_ISA_AVX512)
constexpr int tile_groups(int /*rows*/) { return 4; }
#else
constexpr int tile_groups(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

// Spelled out on AVX2 because the tiles need all 16 registers: left alone, GCC 12 writes some fmas
// over an operand, keeps two broadcasts at a time and carries sums through the stack, which makes
// the loop wait for a store every step (60 against 97 GFLOP/s).
//
// acc += a * b in the register of acc.
INVAR_INLINE void accumulate(VF& acc, VF a, VF b) {
#if defined(INVAR_ISA_AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.v) : "x"(a.v), "x"(b.v));
#else
  acc = fma(a, b, acc);
#endif
}
// One row of a step, 16 lanes: acc += *a * b.
INVAR_INLINE void accumulate_row(Lanes16& acc, const float* a, const VF (&b)[Lanes16::N]) {
#if defined(INVAR_ISA_AVX2)
  __m256 x;
  asm("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
      : "+x"(acc.v[0].v), "+x"(acc.v[1].v), "=&x"(x)
      : "m"(*a), "x"(b[0].v), "x"(b[1].v));
#else
  for (int i = 0; i < Lanes16::N; i++) acc.v[i] = fma(set1(*a), b[i], acc.v[i]);
#endif
}

#if defined(INVAR_ISA_AVX2)
alignas(32) static const uint32_t kOddMask[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
#endif

// The odd elements of pairs, as fp32. Also spelled out: GCC 12 would load the pairs once and keep
// them for the even elements too, in registers that the accumulators need. `kTight`: not even the
// mask has a register.
template <bool kTight>
INVAR_INLINE VF odd_elements(const uint8_t* pairs) {
#if defined(INVAR_ISA_AVX2)
  __m256 r;
  const __m256i& raw = *reinterpret_cast<const __m256i*>(pairs);
  if constexpr (kTight)
    asm("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=&x"(r) : "m"(raw), "m"(kOddMask));
  else
    asm("vpand %1, %2, %0" : "=x"(r) : "m"(raw), "x"(set1_i((int32_t)0xffff0000).v));
  return {r};
#else
  return as_float(load_i(pairs) & set1_i((int32_t)0xffff0000));
#endif
}
INVAR_INLINE VF even_elements(const uint8_t* pairs) {
  return as_float(shift_left<16>(load_i(pairs)));
}

// Pages lie anywhere, so the hardware finds no stream from one to the next. The steps of a tile
// prefetch the next one, in the order of its addresses, a line for every line they read: that keeps
// memory busy without filling the miss buffers.
INVAR_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// acc[r][g] += pairs [0, steps) of a[r] . b[g], where step k of b[g] lies at b[g] + k * stride.
// Odd element first, then the even one: dot_bf16 of simd.h, with the right operand split once for
// all rows.
template <int R, int G>
INVAR_INLINE void dot_pairs(Lanes16 (&acc)[R][G], const Operand* const (&a)[R],
                            const uint8_t* const (&b)[G], int64_t stride, int steps,
                            const uint8_t* ahead) {
#if defined(INVAR_ISA_AVX512)
  for (int k = 0; k < steps; k++) INVAR_UNROLL for (int g = 0; g < G; g++) {
      prefetch(ahead + (k * G + g) * 64);
      const VI v = load_i(b[g] + k * stride);
      INVAR_UNROLL for (int r = 0; r < R; r++) acc[r][g].v[0] =
          dot_bf16(acc[r][g].v[0], v, set1_pair(a[r] + 2 * k));
    }
#else
  constexpr int N = Lanes16::N;
  static_assert(R < G * N || G == 1);
  constexpr bool kTight = R * G * N + (R < G * N ? R : N) + 1 > 14;
  auto right = [&](int k, int odd, int g, int i) INVAR_LAMBDA_INLINE {
    const uint8_t* p = b[g] + k * stride + i * W * 4;
    return odd ? odd_elements<kTight>(p) : even_elements(p);
  };
  for (int k = 0; k < steps; k++) {
    INVAR_UNROLL for (int g = 0; g < G; g++) prefetch(ahead + (k * G + g) * 64);
    INVAR_UNROLL for (int odd = 1; odd >= 0; odd--) {
      if constexpr (R < G * N) {  // hold the fewer operands in registers, pass the others by
        VF x[R];
        INVAR_UNROLL for (int r = 0; r < R; r++) x[r] = set1(a[r][2 * k + odd]);
        INVAR_UNROLL for (int g = 0; g < G; g++) INVAR_UNROLL for (int i = 0; i < N; i++) {
          const VF v = right(k, odd, g, i);
          INVAR_UNROLL for (int r = 0; r < R; r++) accumulate(acc[r][g].v[i], x[r], v);
        }
      } else {
        VF v[N];
        INVAR_UNROLL for (int i = 0; i < N; i++) v[i] = right(k, odd, 0, i);
        INVAR_UNROLL for (int r = 0; r < R; r++) accumulate_row(acc[r][0], &a[r][2 * k + odd], v);
      }
    }
  }
#endif
}

// One step in which only one token of the pair is visible: the other half of V is selected to
// zero, whatever it holds, and meets a probability of zero.
template <int R, int G>
INVAR_INLINE void dot_half_pair(Lanes16 (&acc)[R][G], const Operand* const (&a)[R],
                                const uint8_t* const (&b)[G], bool odd, const uint8_t* ahead) {
  alignas(64) int32_t kept[G][16];
  const VI keep = set1_i(odd ? (int32_t)0xffff0000 : 0xffff);
  const uint8_t* masked[G];
  INVAR_UNROLL for (int g = 0; g < G; g++) {
    INVAR_UNROLL for (int i = 0; i < 16; i += W) store_i(kept[g] + i, load_i(b[g] + i * 4) & keep);
    masked[g] = reinterpret_cast<const uint8_t*>(kept[g]);
  }
  dot_pairs<R, G>(acc, a, masked, 0, 1, ahead);
}

}  // namespace invar::INVAR_ISA
