// One panel times rows of fp32 or bf16 activations. Per output: one fp32 accumulator over KC values
// of K in ascending order, by fma; then total = total + acc, the total starting at zero. For fp8,
// KC is a record's 128 and its scales count: total = fma(acc, d, total).
#pragma once

#include "kernels/gemm_int.h"

namespace invar::INVAR_ISA {

// Length of an fp32 chain: bounds the error by KC + K / KC roundings instead of K, and keeps a
// chunk of a bf16 panel (32 KiB) near L1. A format constant: it enters the numbers.
constexpr int kChunkK = 512;

// One step of K: one value for f32 and f16, a pair for bf16. A step has kParts parts, in each of
// which every sum advances once: step(sum, weights(p, part), act(p, part)).
struct StepF32 {
  static constexpr int kK = 1, kParts = 1;
  static constexpr int kWeightBytes = 4, kActBytes = 4;
  using Lanes = VF;
  INVAR_INLINE VF weights(const uint8_t* p, int) { return load((const float*)p); }
  INVAR_INLINE VF act(const uint8_t* p, int) { return broadcast(p); }
  INVAR_INLINE VF step(VF acc, VF w, VF a) { return fma(w, a, acc); }
};
struct StepF16 : StepF32 {
  static constexpr int kWeightBytes = 2;
  INVAR_INLINE VF weights(const uint8_t* p, int) { return load_f16(p); }
};
// Values of e4m3 divided by 256, which the scale of their record makes up for.
struct StepFp8 : StepF32 {
  static constexpr int kWeightBytes = 1;
  INVAR_INLINE VF weights(const uint8_t* p, int) { return load_e4m3(p); }
};
#if defined(INVAR_ISA_AVX512)
struct StepBf16 {
  static constexpr int kK = 2, kParts = 1;
  static constexpr int kWeightBytes = 4, kActBytes = 4;
  using Lanes = VI;
  INVAR_INLINE VI weights(const uint8_t* p, int) { return load_i(p); }
  INVAR_INLINE VI act(const uint8_t* p, int) { return set1_pair(p); }
  INVAR_INLINE VF step(VF acc, VI w, VI a) { return dot_bf16(acc, w, a); }
};
#else
// dot_bf16 in two parts, odd elements then even ones, on activations that are widened already.
struct StepBf16 {
  static constexpr int kK = 2, kParts = 2;
  static constexpr int kWeightBytes = 4, kActBytes = 8;
  using Lanes = VF;
  INVAR_INLINE VF weights(const uint8_t* p, int part) {
    return part == 0 ? odd(p) : as_float(shift_left<16>(load_i(p)));
  }
  INVAR_INLINE VF act(const uint8_t* p, int part) { return broadcast(p + (part == 0 ? 4 : 0)); }
#if defined(INVAR_ISA_AVX2)
  // 6 x 2 sums, 2 weights, an activation: fifteen of sixteen registers. GCC 12 finds no such
  // allocation (a third of the speed was lost to the stack), so the two instructions it must not
  // take apart are written out: a mask from memory, and an fma that stays in its register.
  INVAR_INLINE VF odd(const uint8_t* p) {
    alignas(32) static const uint32_t kOdd[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
    VI pairs = load_i(p);
    asm("vpand %1, %0, %0" : "+x"(pairs.v) : "m"(*(const __m256i*)kOdd));
    return as_float(pairs);
  }
  INVAR_INLINE VF step(VF acc, VF w, VF a) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(acc.v) : "x"(w.v), "x"(a.v));
    return acc;
  }
#else
  INVAR_INLINE VF odd(const uint8_t* p) {
    return as_float(bit_and(load_i(p), set1_i((int32_t)0xffff0000)));
  }
  INVAR_INLINE VF step(VF acc, VF w, VF a) { return fma(w, a, acc); }
#endif
};
#endif

template <class S, int R, int C>
INVAR_NOINLINE void tile_float(const uint8_t* weights, int steps, int vector, const uint8_t* act,
                               int64_t act_stride, float* out, int64_t out_stride,
                               const float* scales) {
  constexpr int kStride = kPanelColumns * S::kWeightBytes;
  const Rows<R> rows(act, act_stride);
  VF acc[R][C];
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++) acc[r][c] = zero();
  }
  const uint8_t* w = weights + vector * W * S::kWeightBytes;
  for (int64_t i = 0; i < steps; i++, w += kStride) {
    if (R <= 4 && vector == 0) {
      INVAR_UNROLL for (int b = 0; b < kStride; b += 64)
          __builtin_prefetch(w + kAheadBytes + b, 0, 2);
    }
    INVAR_UNROLL for (int part = 0; part < S::kParts; part++) {
      // Weights are loaded once per part: kept for the second, they would push sums to the stack.
      if constexpr (S::kParts > 1) asm volatile("" : "+r"(w));
      typename S::Lanes x[C];
      INVAR_UNROLL for (int c = 0; c < C; c++) x[c] = S::weights(w + c * W * S::kWeightBytes, part);
      INVAR_UNROLL for (int r = 0; r < R; r++) {
        const typename S::Lanes a = S::act(rows.p[r] + i * S::kActBytes, part);
        INVAR_UNROLL for (int c = 0; c < C; c++) acc[r][c] = S::step(acc[r][c], x[c], a);
      }
    }
  }
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      float* o = out + r * out_stride + (vector + c) * W;
      if constexpr (std::is_same_v<S, StepFp8>)
        store(o, fma(acc[r][c], load(scales + (vector + c) * W), load(o)));
      else
        store(o, load(o) + acc[r][c]);
    }
  }
}

// Two fma pipes of latency 4 want at least 8 accumulators in flight: 6 x 2, 4 x 2, 2 x 4.
template <class S, int R>
INVAR_INLINE void row_tile_float(const uint8_t* weights, int steps, const uint8_t* act,
                                 int64_t act_stride, float* out, int64_t out_stride,
                                 const float* scales) {
  constexpr int C = R <= 2 ? (kPanelVectors < 4 ? kPanelVectors : 4) : kTileVectors;
  for (int v = 0; v < kPanelVectors; v += C)
    tile_float<S, R, C>(weights, steps, v, act, act_stride, out, out_stride, scales);
}

// One chunk of K for all rows; scales: of its columns, where the format has them.
template <class S>
static void chunk_float(const uint8_t* weights, int steps, const uint8_t* act, int64_t act_stride,
                        int rows, float* out, int64_t out_stride, const float* scales = nullptr) {
  int r = 0;
  for (; r + 6 <= rows; r += 6)
    row_tile_float<S, 6>(weights, steps, act + r * act_stride, act_stride, out + r * out_stride,
                         out_stride, scales);
  for (; r + 4 <= rows; r += 4)
    row_tile_float<S, 4>(weights, steps, act + r * act_stride, act_stride, out + r * out_stride,
                         out_stride, scales);
  act += r * act_stride;
  out += r * out_stride;
  switch (rows - r) {
    case 1:
      return row_tile_float<S, 1>(weights, steps, act, act_stride, out, out_stride, scales);
    case 2:
      return row_tile_float<S, 2>(weights, steps, act, act_stride, out, out_stride, scales);
    case 3:
      return row_tile_float<S, 3>(weights, steps, act, act_stride, out, out_stride, scales);
    default:
      return;
  }
}

template <class S>
static void gemm_float(const uint8_t* panel, int64_t k, const uint8_t* act, int64_t act_stride,
                       int rows, float* out, int64_t out_stride) {
  constexpr int kChunkSteps = kChunkK / S::kK;
  if constexpr (S::kParts == 2) act += act_layout(ActFormat::bf16, k).widened_offset;
  const int64_t steps = (k + S::kK - 1) / S::kK;
  for (int r = 0; r < rows; r++) memset(out + r * out_stride, 0, kPanelColumns * 4);
  for (int64_t first = 0; first < steps; first += kChunkSteps) {
    const int n = (int)(steps - first < kChunkSteps ? steps - first : kChunkSteps);
    const uint8_t* w = panel + first * kPanelColumns * S::kWeightBytes;
    const uint8_t* a = act + first * S::kActBytes;
    chunk_float<S>(w, n, a, act_stride, rows, out, out_stride);
  }
}

static void gemm_fp8(const uint8_t* panel, int64_t k, const uint8_t* act, int64_t act_stride,
                     int rows, float* out, int64_t out_stride) {
  for (int r = 0; r < rows; r++) memset(out + r * out_stride, 0, kPanelColumns * 4);
  for (int64_t first = 0; first < k; first += kFp8K, panel += kFp8Bytes) {
    const int n = (int)(k - first < kFp8K ? k - first : kFp8K);
    chunk_float<StepFp8>(panel + kQuadBytes, n, act + first * 4, act_stride, rows, out, out_stride,
                         (const float*)panel);
  }
}

}  // namespace invar::INVAR_ISA
