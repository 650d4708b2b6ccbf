// One panel times rows of s8 activations. The arithmetic, per output:
//
//   q4_0, q5_0, q8_0,  for each 32: acc = fma(float(sum), d * da, acc), sum of (code - bias) * a
//   iq4_nl, mxfp4
//   nvfp4             for each 16: acc = fma(float(sum), scale * da, acc), in the end times d
//   q4_1               then also:   acc = fma(m, scaled_sum, acc)
//   int4_zp, int8_zp   then also:   acc = fma(-(d * z), scaled_sum, acc)
//   q5_1               then also:   acc = fma(fma(16, d, m), scaled_sum, acc), the bias being 16
//   q2_k, q4_k, q5_k   for each 256: t = sum of scale * (sum of code * a),
//                                    u = sum of min * (sum of a),
//                                    acc = fma(fnma(float(u), dmin, float(t) * d), da, acc)
//   q3_k, q6_k, iq4_xs, for each 256: t = sum of scale * (sum of (code - bias) * a),
//   iq1 … iq3, tq                    acc = fma(float(t), d * da, acc)
//
// with every sum an exact int32 and acc in ascending K. Everything else here (tiles, slabs,
// widening) moves data and cannot change a bit: acc waits in `out` between slabs, and between the
// blocks of a slab in `Waiting`.
#pragma once

#include <type_traits>

#include "kernels/gemm_sums.h"

namespace invar::INVAR_ISA {

// Register tiles: rows x kTileVectors vectors of W columns. One broadcast of an activation quad
// serves all vectors, one load of codes all rows. Above so many rows a slab's codes are widened to
// bytes once instead of once per row tile: kWidenNibbles for the 4-bit formats, kWidenWide for
// those looked up for wide sums, kWidenHighBits for the others (0: never). Measured on Zen 3,
// widened against not: at M = 6 q5_0 159 and 138 GOPS, q6_k 176 and 160; at M = 8 q4_k 203 and 217,
// q4_0 163 and 176; at M = 5 iq4_nl 107 and 101, iq2_xs 102 and 87, at M = 4 107 and 103, 102
// and 97.
//   avx512: 32 registers: 4 x 2 sums and totals, 4 codes, masks and constants (6 x 2 would spill in
//           q6_k and is no faster); on widened codes 6 x 2. Unpacking a nibble is free there (its
//           ports are idle), so only five and six bit codes are widened.
//   avx2:   16 registers: 4 x 2 sums, 4 codes of a nibble pair, mask, broadcast, 2 products; on
//           widened codes 6 x 2 sums, 2 codes, broadcast, product.
//   portable: 16 of SSE2, 32 of NEON.
#if defined(INVAR_ISA_AVX512)
constexpr int kPackedRows = 4, kWideRows = 6, kTileVectors = 2;
constexpr int kWidenHighBits = 15, kWidenWide = 15, kWidenNibbles = 0;
#elif defined(INVAR_ISA_AVX2)
constexpr int kPackedRows = 4, kWideRows = 6, kTileVectors = 2;
constexpr int kWidenHighBits = 5, kWidenWide = 3, kWidenNibbles = 8;
#else
constexpr int kPackedRows = 4, kWideRows = 4, kTileVectors = 1;
constexpr int kWidenHighBits = 7, kWidenWide = 7, kWidenNibbles = 7;
#endif

// What is read next, on its way from DRAM while this is computed: more than the hardware prefetcher
// asks for, spread so evenly that requests never queue up. A lone row asks kAheadBytes ahead of
// what it reads (one to two KiB took a core of Zen 3 from 15 to 20 GB/s; 4 KiB and more was
// erratic). Larger tiles ask for their share of the next slab with every group: q4_k from memory at
// M = 4, 8, 16 rose from 45, 43, 54 to 57, 62, 64 % of the int8 peak (from L2: 63, 65, 65). What
// lies past the panel is the next one, or nothing: a prefetch does not fault.
constexpr int kAheadBytes = 2048;

struct Ahead {
  const uint8_t *next, *end;  // of the next slab: what nobody asked for yet
  int64_t share;
};

// With every group; `lone`: the tile reads `bytes` at p itself, once and in order.
template <bool lone, int bytes>
INVAR_INLINE void prefetch(Ahead& ahead, const uint8_t* p) {
  if constexpr (lone) {
    INVAR_UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + kAheadBytes + i, 0, 2);
  } else {
    const uint8_t* stop = ahead.next + ahead.share;
    if (stop > ahead.end) stop = ahead.end;
    for (; ahead.next < stop; ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
  }
}

// ---------------------------------------------------------------- tiles

// Where a tile of a 32-block format has its acc between the blocks of a slab: at places that the
// compiler knows. (In `out` they were pointers, a load each: 3 to 8 % slower on Zen 3.)
struct Waiting {
  static constexpr int kPlaces = kWideRows * kTileVectors;  // no less than a lone row's four
  static_assert(kPlaces >= 4);
  alignas(64) float acc[kPlaces * W];
};

// The 32-block formats and nvfp4, which has blocks of 16: `blocks` records from `record`. first: of
// all, so nothing is in `out` yet.
template <class F, bool widened, int R, int C>
INVAR_NOINLINE void tile_32(const uint8_t* record, const uint8_t* codes, int blocks, int vector,
                            const uint8_t* act, int64_t act_stride, SlabOffsets at, float* out,
                            int64_t out_stride, bool first, Waiting& waiting, Ahead& ahead) {
  using Record = typename F::Record;
  const Rows<R> rows(act, act_stride);
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++)
        store(waiting.acc + (r * C + c) * W,
              first ? zero() : load(out + r * out_stride + (vector + c) * W));
  }
  for (int b = 0; b < blocks; b++) {
    prefetch<R == 1 && !widened, Record::bytes>(ahead, record);
    VI sums[R][C];
    group_sums<F, widened>(sums, codes, 0, vector, rows, at.codes, at.starts);
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      const int column = (vector + c) * W;
      VF d = F::scale(record, column), m = zero();
      if constexpr (F::kMin) m = F::min(record, column);
      INVAR_UNROLL for (int r = 0; r < R; r++) {
        float* place = waiting.acc + (r * C + c) * W;
        VF acc = fma(to_float(group_total<F>(sums[r][c])), d * broadcast(rows.p[r] + at.scales),
                     load(place));
        if constexpr (F::kMin) acc = fma(m, broadcast(rows.p[r] + at.sums), acc);
        store(place, acc);
        asm("" ::: "memory");  // GCC would put those of a lone row aside first, on the stack
      }
    }
    record += Record::bytes;
    codes += widened ? Record::k / 4 * kQuadBytes : F::kGroupBytes;
    at.codes += Record::k, at.scales += 4, at.starts += 4, at.sums += 4;
  }
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++)
        store(out + r * out_stride + (vector + c) * W, load(waiting.acc + (r * C + c) * W));
  }
}

// The sums of activation codes that minimums of 16 values are multiplied by, made from a row's
// start values, which are -32 times the two parts of each: once for all columns of a panel. Those
// for minimums of 32 are in the row.
template <class F, int R>
struct SumsOf16 {
  int16_t of[R][kSlabK / 16];
  inline __attribute__((always_inline)) SumsOf16(const Rows<R>& rows, int64_t starts) {
    if constexpr (F::kMinPairs == 8) {
      for (int r = 0; r < R; r++) {
        for (int g = 0; g < kSlabK / 16; g += W) {
          VI sums = dot_pair(zero_i(), load_i(rows.p[r] + starts + 4 * g), set1_i(-1));
          store_s16(of[r] + g, shift_right_signed<5>(sums));
        }
      }
    }
  }
};

// Scales and minimums of 16 values, nibbles, take so many operations to unpack that many rows have
// it done once for all, like their codes (q2_k on Zen 3, M = 64: 53.5 to 60 % of the int8 peak).
// Bytes do not: q3_k to q6_k became up to 3 % slower.
template <class F>
constexpr bool kWidenScales = F::kMinPairs == 8;

struct WidenedScales {
  alignas(64) int32_t scales[kSlabK / 16][kPanelColumns];     // as F::scales
  alignas(64) int32_t min_pairs[kSlabK / 32][kPanelColumns];  // as F::min_pair
};

template <class F>
INVAR_NOINLINE void widen_scales(const uint8_t* record, WidenedScales& out) {
  for (int column = 0; column < kPanelColumns; column += W) {
    for (int i = 0; i < kSlabK / F::kGroup; i++)
      store_i(out.scales[i] + column, F::scales(record, i / F::kSums, i % F::kSums, column));
    for (int p = 0; p < F::kMinPairs; p++)
      store_i(out.min_pairs[p] + column, F::min_pair(record, p, column));
  }
}

template <class F, bool widened>
INVAR_INLINE VI read_scales(const uint8_t* record, const WidenedScales& unpacked, int g, int h,
                            int column) {
  if constexpr (widened && kWidenScales<F>)
    return load_i(unpacked.scales[g * F::kSums + h] + column);
  else
    return F::scales(record, g, h, column);
}
template <class F, bool widened>
INVAR_INLINE VI read_min_pair(const uint8_t* record, const WidenedScales& unpacked, int p,
                              int column) {
  if constexpr (widened && kWidenScales<F>)
    return load_i(unpacked.min_pairs[p] + column);
  else
    return F::min_pair(record, p, column);
}

// Per column, the sum of minimum times sum of codes; sums: of each row, int16 pairs.
template <class F, bool widened, int R>
INVAR_INLINE void min_totals(VI (&totals)[R], const uint8_t* record, const WidenedScales& unpacked,
                             int column, const uint8_t* const (&sums)[R]) {
  INVAR_UNROLL for (int r = 0; r < R; r++) totals[r] = zero_i();
  INVAR_UNROLL for (int p = 0; p < F::kMinPairs; p++) {
    VI pair = read_min_pair<F, widened>(record, unpacked, p, column);
    INVAR_UNROLL for (int r = 0; r < R; r++) totals[r] =
        dot_pair(totals[r], pair, set1_pair(sums[r] + 4 * p));
  }
}

// The K-quants: one record of 256.
template <class F, bool widened, int R, int C>
INVAR_NOINLINE void tile_256(const uint8_t* record, const uint8_t* codes,
                             const WidenedScales& unpacked, int vector, const uint8_t* act,
                             int64_t act_stride, SlabOffsets at, const SumsOf16<F, R>& sums_of_16,
                             float* out, int64_t out_stride, Ahead& ahead) {
  using Record = typename F::Record;
  const Rows<R> rows(act, act_stride);
  VI totals[R][C];
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++) totals[r][c] = zero_i();
  }
  constexpr int kGroups = kSlabK / (F::kGroup * F::kSums);
  for (int g = 0; g < kGroups; g++) {
    // In equal parts, header included: asking for the codes alone, a lone row of q4_k streamed
    // 15.9 GB/s, so 17.5 (Zen 3).
    constexpr int kPart = Record::bytes / kGroups;
    prefetch<R == 1 && !widened, kPart>(ahead, record + g * kPart);
    INVAR_UNROLL for (int h = 0; h < F::kSums; h++) {
      VI sums[R][C];
      group_sums<F, widened>(sums, codes, h, vector, rows, at.codes, at.starts);
      INVAR_UNROLL for (int c = 0; c < C; c++) {
        VI scale = read_scales<F, widened>(record, unpacked, g, h, (vector + c) * W);
        INVAR_UNROLL for (int r = 0; r < R; r++) totals[r][c] =
            group_scaled<F>(totals[r][c], sums[r][c], scale);
      }
      at.codes += F::kGroup, at.starts += F::kGroup / 4;
    }
    codes += widened ? F::kSums * F::kGroup / 4 * kQuadBytes : F::kGroupBytes;
  }
  if constexpr (F::kMin) {
    const uint8_t* min_sums[R];
    INVAR_UNROLL for (int r = 0; r < R; r++) min_sums[r] =
        F::kMinPairs == 8 ? (const uint8_t*)sums_of_16.of[r] : rows.p[r] + at.sums;
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      const int column = (vector + c) * W;
      VI mins[R];
      min_totals<F, widened>(mins, record, unpacked, column, min_sums);
      VF d = F::scale(record, column), dmin = F::min_scale(record, column);
      INVAR_UNROLL for (int r = 0; r < R; r++) {
        float* o = out + r * out_stride + column;
        VF sum = fnma(to_float(mins[r]), dmin, to_float(totals[r][c]) * d);
        store(o, fma(sum, broadcast(rows.p[r] + at.scales), load(o)));
      }
    }
  } else {
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      const int column = (vector + c) * W;
      VF d = F::scale(record, column);
      INVAR_UNROLL for (int r = 0; r < R; r++) {
        float* o = out + r * out_stride + column;
        VF scale = d * broadcast(rows.p[r] + at.scales);
        store(o, fma(to_float(totals[r][c]), scale, load(o)));
      }
    }
  }
}

// ---------------------------------------------------------------- slabs

template <class F>
INVAR_NOINLINE void widen(const uint8_t* group, int groups, uint8_t* out) {
  constexpr int kHalf = F::kGroup / 8;
  for (int g = 0; g < groups; g++, group += F::kGroupBytes) {
    INVAR_UNROLL for (int h = 0; h < F::kSums; h++, out += 2 * kHalf * kQuadBytes) {
      INVAR_UNROLL for (int j = 0; j < kHalf; j++) {
        for (int v = 0; v < kPanelVectors; v++) {
          CodePair q = F::pair(group, h, j, v);
          store_b(out + j * kQuadBytes + v * kVectorBytes, q.low);
          store_b(out + (j + kHalf) * kQuadBytes + v * kVectorBytes, q.high);
        }
      }
    }
  }
}

// One slab: `blocks` records of a 32-block format or one record of a K-quant, for all rows.
struct Slab {
  const uint8_t* record;
  const uint8_t* widened;
  const WidenedScales& scales;
  int blocks;
  const uint8_t* act;
  int64_t act_stride;
  SlabOffsets at;
  float* out;
  int64_t out_stride;
  bool first;
  Waiting& waiting;
  Ahead ahead;
};

// R rows of all columns. One row takes all vectors in one pass, to read the panel once and in
// order.
template <class F, bool widened, int R>
INVAR_INLINE void row_tile(Slab& s, int row) {
  constexpr int C = R == 1 ? (kPanelVectors < 4 ? kPanelVectors : 4) : kTileVectors;
  const uint8_t* act = s.act + row * s.act_stride;
  float* out = s.out + row * s.out_stride;
  const uint8_t* codes = widened ? s.widened : s.record + F::Record::codes;
  if constexpr (F::Record::k < 256) {
    for (int v = 0; v < kPanelVectors; v += C)
      tile_32<F, widened, R, C>(s.record, codes, s.blocks, v, act, s.act_stride, s.at, out,
                                s.out_stride, s.first, s.waiting, s.ahead);
  } else {
    const SumsOf16<F, R> sums_of_16(Rows<R>(act, s.act_stride), s.at.starts);
    for (int v = 0; v < kPanelVectors; v += C)
      tile_256<F, widened, R, C>(s.record, codes, s.scales, v, act, s.act_stride, s.at, sums_of_16,
                                 out, s.out_stride, s.ahead);
  }
}

// What is left after full tiles: by tiles of at most R rows.
template <class F, bool widened, int R>
INVAR_INLINE void last_rows(Slab& s, int row, int rows) {
  if (rows - row >= R) {
    row_tile<F, widened, R>(s, row);
    row += R;
  }
  if constexpr (R > 1) last_rows<F, widened, R - 1>(s, row, rows);
}

template <class F, bool widened>
INVAR_INLINE void all_rows(Slab& s, int rows) {
  // A K-quant's int32 totals and wide codes want registers too: larger tiles would spill more.
  constexpr int R = widened && F::Record::k < 256 && !F::kWide ? kWideRows : kPackedRows;
  constexpr int kLast = R > 4 ? 4 : R - 1;
  int row = 0;
  for (; row + R <= rows; row += R) {
    // Seven or eight rows in two tiles of up to four: 6 + 2 leave the second one waiting for loads
    // (q4_1, 32 rows on Zen 3: 2 % slower).
    if (R > 4 && rows - row > R && rows - row <= 2 * kLast) break;
    row_tile<F, widened, R>(s, row);
  }
  for (; row + kLast < rows; row += kLast) row_tile<F, widened, kLast>(s, row);
  last_rows<F, widened, kLast>(s, row, rows);
}

template <class F>
static void gemm_int(ActFormat act_format, const uint8_t* panel, int64_t k, const uint8_t* act,
                     int64_t act_stride, int rows, float* out, int64_t out_stride) {
  constexpr bool kBytes = std::is_same_v<F, FormatQ8_0> || std::is_same_v<F, FormatI8Z>;
  constexpr int kWidenRows = kBytes         ? 0
                             : F::kWide     ? kWidenWide
                             : F::kHighBits ? kWidenHighBits
                                            : kWidenNibbles;
  constexpr int64_t kSlabBytes = kSlabK / F::Record::k * F::Record::bytes;
  const ActLayout layout = act_layout(act_format, k);
  const int scale_bytes = kSlabK / F::Record::k * 4;
  const int start_bytes = F::Record::k == 32 ? 8 * 4 : 16 * 4;
  const int sum_bytes = F::Record::k == 32 ? 8 * 4 : 8 * 2;
  if (rows == 0) return;
  const int tiles =
      (rows + kWideRows - 1) / kWideRows * (kPanelVectors / kTileVectors);  // of a slab, at least
  alignas(64) uint8_t widened[kSlabK * kPanelColumns];
  WidenedScales scales;
  Waiting waiting;
  if constexpr (F::Record::k == 256) {
    for (int r = 0; r < rows; r++) memset(out + r * out_stride, 0, kPanelColumns * 4);
  }
  for (int64_t slab = 0; slab * kSlabK < k; slab++) {
    const int64_t left = (k - slab * kSlabK) / F::Record::k;
    Slab s{panel + slab * kSlabBytes,
           widened,
           scales,
           kSlabK / F::Record::k,
           act,
           act_stride,
           {},
           out,
           out_stride,
           slab == 0,
           waiting,
           {}};
    if (left < s.blocks) s.blocks = (int)left;
    s.ahead.next = s.record + s.blocks * F::Record::bytes;
    s.ahead.end = s.ahead.next + kSlabBytes;
    s.ahead.share = kSlabBytes / (tiles * s.blocks * (F::Record::k / F::kGroup));
    s.at = {slab * kSlabK, layout.scale_offset + slab * scale_bytes,
            layout.sum_offset + slab * start_bytes, layout.scaled_sum_offset + slab * sum_bytes};
    if constexpr (kWidenRows > 0) {
      if (rows > kWidenRows) {
        widen<F>(s.record + F::Record::codes, s.blocks * (F::Record::k / (F::kGroup * F::kSums)),
                 widened);
        if constexpr (F::Record::k == 256) {
          if constexpr (kWidenScales<F>) widen_scales<F>(s.record, scales);
        }
        all_rows<F, true>(s, rows);
        continue;
      }
    }
    all_rows<F, false>(s, rows);
  }
}

static void gemm_nvfp4(const uint8_t* panel, int64_t k, const uint8_t* act, int64_t act_stride,
                       int rows, float* out, int64_t out_stride) {
  gemm_int<FormatNVFP4>(ActFormat::q8_16, panel + kQuadBytes, k, act, act_stride, rows, out,
                        out_stride);
  for (int v = 0; v < kPanelColumns; v += W) {
    const VF scale = load((const float*)panel + v);
    for (int r = 0; r < rows; r++) {
      float* o = out + r * out_stride + v;
      store(o, load(o) * scale);
    }
  }
}

}  // namespace invar::INVAR_ISA
