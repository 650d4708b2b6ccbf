// One panel of int8 weights with a scale per column times rows of s8 activations with a scale per
// row: out = float(sum over all K of code * a) * (d * da), the sum an exact int32 (K < 66,000: in
// AVX-512 form codes are up to 255 and start at -128 times the sum of a).
#pragma once

#include "kernels/gemm_int.h"

namespace invar::INVAR_ISA {

// Sums of a register tile stay where they are from the first K to the last, with nothing else in
// the loop. avx512: 6 x 2 sums, 2 codes, a broadcast. avx2: 4 x 2 sums, 2 codes and 2 magnitudes,
// a broadcast, a product, the ones of vpmaddwd. portable: one vector of columns, as elsewhere.
#if defined(INVAR_ISA_AVX512)
constexpr int kInt8Rows = 6;
INVAR_INLINE VI row_start(const uint8_t* start) { return set1_pair(start); }
#else
constexpr int kInt8Rows = 4;
INVAR_INLINE VI row_start(const uint8_t*) { return zero_i(); }
#endif

template <int R, int C>
INVAR_NOINLINE void tile_row(const uint8_t* panel, int64_t quads, int vector, const uint8_t* act,
                             int64_t act_stride, const ActLayout& layout, float* out,
                             int64_t out_stride) {
  const Rows<R> rows(act, act_stride);
  VI sums[R][C];
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    const VI start = row_start(rows.p[r] + layout.sum_offset);
    INVAR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = start;
  }
  const uint8_t* codes = panel + kQuadBytes + vector * kVectorBytes;
  for (int64_t j = 0; j < quads; j++, codes += kQuadBytes) {
    if constexpr (R <= 2) {
      INVAR_UNROLL for (int b = 0; b < C * kVectorBytes; b += 64)
          __builtin_prefetch(codes + kAheadBytes + b, 0, 2);
    }
    WideCodes q[C];
    INVAR_UNROLL for (int c = 0; c < C; c++) q[c] = wide_codes(load_b(codes + c * kVectorBytes));
    INVAR_UNROLL for (int r = 0; r < R; r++) {
      const VI a = set1_pair(rows.p[r] + 4 * j);
      INVAR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = wide_step(sums[r][c], q[c], a);
    }
  }
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    const VF scale = broadcast(rows.p[r] + layout.scale_offset);
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      const int column = (vector + c) * W;
      store(out + r * out_stride + column,
            to_float(sums[r][c]) * (load((const float*)panel + column) * scale));
    }
  }
}

template <int R>
INVAR_INLINE void row_tile_int8(const uint8_t* panel, int64_t quads, const uint8_t* act,
                                int64_t act_stride, const ActLayout& layout, float* out,
                                int64_t out_stride) {
  constexpr int C = R <= 2 ? (kPanelVectors < 4 ? kPanelVectors : 4) : kTileVectors;
  for (int v = 0; v < kPanelVectors; v += C)
    tile_row<R, C>(panel, quads, v, act, act_stride, layout, out, out_stride);
}

template <int R>
INVAR_INLINE void last_rows_int8(const uint8_t* panel, int64_t quads, const uint8_t* act,
                                 int64_t act_stride, int rows, const ActLayout& layout, float* out,
                                 int64_t out_stride) {
  if (rows >= R)
    row_tile_int8<R>(panel, quads, act, act_stride, layout, out, out_stride);
  else if constexpr (R > 1)
    last_rows_int8<R - 1>(panel, quads, act, act_stride, rows, layout, out, out_stride);
}

static void gemm_int8(const uint8_t* panel, int64_t k, const uint8_t* act, int64_t act_stride,
                      int rows, float* out, int64_t out_stride) {
  const ActLayout layout = act_layout(ActFormat::q8_row, k);
  const int64_t quads = (k + 3) / 4;
  for (; rows > 0; rows -= kInt8Rows, act += kInt8Rows * act_stride, out += kInt8Rows * out_stride)
    last_rows_int8<kInt8Rows>(panel, quads, act, act_stride, rows, layout, out, out_stride);
}

}  // namespace invar::INVAR_ISA
