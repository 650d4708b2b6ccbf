// One panel times rows of fp32 or bf16 activations. Per output: one fp32 accumulator over KC values
// of K in ascending order, by fma; then total = total + acc, the total starting at zero.
#pragma once

#include "kernels/gemm_int.h"

namespace invar::INVAR_ISA {

// Length of an fp32 chain: bounds the error by KC + K / KC roundings instead of K, and keeps a
// chunk of a bf16 panel (32 KiB) near L1. A format constant: it enters the numbers.
constexpr int kChunkK = 512;

// One step of K: one value for f32 and f16, a pair for bf16.
struct StepF32 {
  static constexpr int kK = 1, kWeightBytes = 4, kActBytes = 4, kRows = 6;
  using Weights = VF;
  INVAR_INLINE Weights weights(const uint8_t* p) { return load((const float*)p); }
  INVAR_INLINE VF step(VF acc, Weights w, const uint8_t* a) { return fma(w, broadcast(a), acc); }
};
struct StepF16 {
  static constexpr int kK = 1, kWeightBytes = 2, kActBytes = 4, kRows = 6;
  using Weights = VF;
  INVAR_INLINE Weights weights(const uint8_t* p) { return load_f16(p); }
  INVAR_INLINE VF step(VF acc, Weights w, const uint8_t* a) { return fma(w, broadcast(a), acc); }
};
struct StepBf16 {
  static constexpr int kK = 2, kWeightBytes = 4, kActBytes = 4;
  static constexpr int kRows = W == 16 ? 6 : 4;
  using Weights = VI;
  INVAR_INLINE Weights weights(const uint8_t* p) { return load_i(p); }
  INVAR_INLINE VF step(VF acc, Weights w, const uint8_t* a) {
    return dot_bf16(acc, w, set1_pair(a));
  }
};

template <class S, int R, int C>
INVAR_NOINLINE void tile_float(const uint8_t* weights, int steps, int vector, const uint8_t* act,
                               int64_t act_stride, float* out, int64_t out_stride) {
  constexpr int kStride = kPanelColumns * S::kWeightBytes;
  const Rows<R> rows(act, act_stride);
  VF acc[R][C];
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++) acc[r][c] = zero();
  }
  const uint8_t* w = weights + vector * W * S::kWeightBytes;
  for (int64_t i = 0; i < steps; i++, w += kStride) {
    typename S::Weights x[C];
    INVAR_UNROLL for (int c = 0; c < C; c++) x[c] = S::weights(w + c * W * S::kWeightBytes);
    INVAR_UNROLL for (int r = 0; r < R; r++) {
      INVAR_UNROLL for (int c = 0; c < C; c++) acc[r][c] =
          S::step(acc[r][c], x[c], rows.p[r] + i * S::kActBytes);
    }
  }
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      float* o = out + r * out_stride + (vector + c) * W;
      store(o, load(o) + acc[r][c]);
    }
  }
}

// Two fma pipes of latency 4 want at least 8 accumulators in flight: 6 x 2, 4 x 2, 2 x 4. Without
// AVX-512 a bf16 step also holds both halves of its weights and activations: 4 x 2 at most.
template <class S, int R>
INVAR_INLINE void row_tile_float(const uint8_t* weights, int steps, const uint8_t* act,
                                 int64_t act_stride, float* out, int64_t out_stride) {
  constexpr int C =
      R == 1 || (R == 2 && S::kRows > 4) ? (kPanelVectors < 4 ? kPanelVectors : 4) : kTileVectors;
  for (int v = 0; v < kPanelVectors; v += C)
    tile_float<S, R, C>(weights, steps, v, act, act_stride, out, out_stride);
}

template <class S>
static void gemm_float(const uint8_t* panel, int64_t k, const uint8_t* act, int64_t act_stride,
                       int rows, float* out, int64_t out_stride) {
  constexpr int kChunkSteps = kChunkK / S::kK;
  const int64_t steps = (k + S::kK - 1) / S::kK;
  for (int r = 0; r < rows; r++) memset(out + r * out_stride, 0, kPanelColumns * 4);
  for (int64_t first = 0; first < steps; first += kChunkSteps) {
    const int n = (int)(steps - first < kChunkSteps ? steps - first : kChunkSteps);
    const uint8_t* w = panel + first * kPanelColumns * S::kWeightBytes;
    const uint8_t* a = act + first * S::kActBytes;
    int r = 0;
    if constexpr (S::kRows == 6) {
      for (; r + 6 <= rows; r += 6)
        row_tile_float<S, 6>(w, n, a + r * act_stride, act_stride, out + r * out_stride,
                             out_stride);
    }
    for (; r + 4 <= rows; r += 4)
      row_tile_float<S, 4>(w, n, a + r * act_stride, act_stride, out + r * out_stride, out_stride);
    a += r * act_stride;
    float* o = out + r * out_stride;
    switch (rows - r) {
      case 1:
        row_tile_float<S, 1>(w, n, a, act_stride, o, out_stride);
        break;
      case 2:
        row_tile_float<S, 2>(w, n, a, act_stride, o, out_stride);
        break;
      case 3:
        row_tile_float<S, 3>(w, n, a, act_stride, o, out_stride);
        break;
      default:
        break;
    }
  }
}

}  // namespace invar::INVAR_ISA
