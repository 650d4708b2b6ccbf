// Attention over pages: register tiles of (query row x 16 lanes).
//
// A row is one query head of one token. Two products share one inner loop, `dot_steps`:
//   QK  lanes are 16 tokens of a page half, steps go along the head dimensions
//   PV  lanes are 16 head dimensions, steps go along the tokens
// The left operand (q, or the probabilities) is broadcast, the right one streams from the page.
#pragma once

#include "kernels/attention_pages.h"
#include "kernels/math.h"

namespace invar::INVAR_ISA {

// Rows per register tile, and 16-lane groups beside each other for a given number of rows.
// AVX2, 16 registers: 6 rows x 2 vectors = 12 accumulators + 2 of K or V + mask + broadcast, and
// two fmas a cycle at latency 4 need 8 chains: hence 4 groups for one row, 2 for two. Three rows of
// 2 groups would need 17 registers; their 6 chains still outrun memory (8 cycles a line).
// AVX-512, 32 registers: 6 x 4 = 24 accumulators + 4; vdpbf16ps has latency 6.
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

// Pages lie anywhere, so the hardware finds no stream from one to the next. The steps of a tile
// prefetch the next one, a line for every line they read: that keeps memory busy without filling
// the miss buffers.
INVAR_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// Bytes of a step, 16 lanes.
template <class P>
constexpr int kStepBytes = 16 * P::kStep * P::kElementBytes;

// Steps of a line: they go together, so that a narrow format has no more turns of the loop and no
// more questions about prefetching than a wide one.
template <class P>
constexpr int kLineSteps = 64 / kStepBytes<P>;

// acc[r][g] += element e of step k of a[r] . b[g]; the right operand is widened once for all rows.
template <class P, int R, int G>
INVAR_INLINE void add_element(Lanes16 (&acc)[R][G], const float* const (&a)[R],
                              const uint8_t* const (&b)[G], int k, int e, int64_t offset) {
  constexpr int N = Lanes16::N;
  constexpr bool kTight = R * G * N + (R < G * N ? R : N) + 1 > 14;
  const int at = P::kStep * k + e;
  if constexpr (R < G * N) {  // hold the fewer operands in registers, pass the others by
    VF x[R];
    INVAR_UNROLL for (int r = 0; r < R; r++) x[r] = set1(a[r][at]);
    INVAR_UNROLL for (int g = 0; g < G; g++) INVAR_UNROLL for (int i = 0; i < N; i++) {
      const VF v = P::template lanes<kTight>(b[g] + offset, e, i);
      INVAR_UNROLL for (int r = 0; r < R; r++) accumulate(acc[r][g].v[i], x[r], v);
    }
  } else {
    VF v[G][N];
    INVAR_UNROLL for (int g = 0; g < G; g++) INVAR_UNROLL for (int i = 0; i < N; i++) v[g][i] =
        P::template lanes<kTight>(b[g] + offset, e, i);
    INVAR_UNROLL for (int r = 0; r < R; r++) INVAR_UNROLL for (int g = 0; g < G; g++)
        accumulate_row(acc[r][g], &a[r][at], v[g]);
  }
}

// Step k. Of a pair the odd element comes first, as in dot_bf16 of simd.h.
template <class P, int R, int G>
INVAR_INLINE void dot_step(Lanes16 (&acc)[R][G], const typename P::Operand* const (&a)[R],
                           const uint8_t* const (&b)[G], int64_t stride, int k) {
  if constexpr (P::kPairProducts) {
    INVAR_UNROLL for (int g = 0; g < G; g++) {
      const VI v = load_i(b[g] + k * stride);
      INVAR_UNROLL for (int r = 0; r < R; r++) acc[r][g].v[0] =
          dot_bf16(acc[r][g].v[0], v, set1_pair(a[r] + 2 * k));
    }
  } else {
    if constexpr (P::kStep == 2) add_element<P, R, G>(acc, a, b, k, 1, k * stride);
    add_element<P, R, G>(acc, a, b, k, 0, k * stride);
  }
}

// acc[r][g] += steps [0, steps) of a[r] . b[g], where step k of b[g] lies at b[g] + k * stride.
template <class P, int R, int G>
INVAR_INLINE void dot_steps(Lanes16 (&acc)[R][G], const typename P::Operand* const (&a)[R],
                            const uint8_t* const (&b)[G], int64_t stride, int steps,
                            const uint8_t* const (&ahead)[G]) {
  constexpr int L = kLineSteps<P>;
  int k = 0;
  for (; k + L <= steps; k += L) {
    INVAR_UNROLL for (int g = 0; g < G; g++) prefetch(ahead[g] + k * kStepBytes<P>);
    INVAR_UNROLL for (int i = 0; i < L; i++) dot_step<P, R, G>(acc, a, b, stride, k + i);
  }
  if constexpr (L > 1)
    for (; k < steps; k++) dot_step<P, R, G>(acc, a, b, stride, k);
}

// Step k alone, of which only the odd or the even token is visible: the other half of V is selected
// to zero, whatever it holds, and meets a probability of zero.
template <class P, int R, int G>
INVAR_INLINE void dot_half_pair(Lanes16 (&acc)[R][G], const typename P::Operand* const (&a)[R],
                                const uint8_t* const (&b)[G], int64_t stride, int k, bool odd,
                                const uint8_t* const (&ahead)[G]) {
  alignas(64) int32_t kept[G][16];
  const VI keep = set1_i(odd ? (int32_t)0xffff0000 : 0xffff);
  const uint8_t* masked[G];
  INVAR_UNROLL for (int g = 0; g < G; g++) {
    INVAR_UNROLL for (int i = 0; i < 16; i += W)
        store_i(kept[g] + i, load_i(b[g] + k * stride + i * 4) & keep);
    masked[g] = reinterpret_cast<const uint8_t*>(kept[g]);
  }
  const typename P::Operand* at[R];
  INVAR_UNROLL for (int r = 0; r < R; r++) at[r] = a[r] + 2 * k;
  dot_steps<P, R, G>(acc, at, masked, 0, 1, ahead);
}

}  // namespace invar::INVAR_ISA
