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

#include "kernels/formats.h"

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

// ---------------------------------------------------------------- activations and sums

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

// Where the sums of a row's activation codes lie that minimums are multiplied by, int16 pairs: in
// the row for minimums of 32 values; those of 16 are made from its start values, which are -32
// times the two parts of each.
template <class F, int R>
struct MinSums {
  const uint8_t* p[R];
  int16_t made[R][kSlabK / 16];
  inline __attribute__((always_inline)) MinSums(const Rows<R>& rows, const SlabOffsets& at) {
    for (int r = 0; r < R; r++) {
      if constexpr (F::kMinPairs == 4) {
        p[r] = rows.p[r] + at.sums;
      } else {
        for (int g = 0; g < kSlabK / 16; g += W) {
          VI sums = dot_pair(zero_i(), load_i(rows.p[r] + at.starts + 4 * g), set1_i(-1));
          store_s16(made[r] + g, shift_right_signed<5>(sums));
        }
        p[r] = (const uint8_t*)made[r];
      }
    }
  }
};

// Per column, the sum of minimum times sum of codes.
template <class F, int R>
INVAR_INLINE void min_totals(VI (&totals)[R], const uint8_t* record, int column,
                             const MinSums<F, R>& sums) {
  INVAR_UNROLL for (int r = 0; r < R; r++) totals[r] = zero_i();
  INVAR_UNROLL for (int p = 0; p < F::kMinPairs; p++) {
    VI pair = F::min_pair(record, p, column);
    INVAR_UNROLL for (int r = 0; r < R; r++) totals[r] =
        dot_pair(totals[r], pair, set1_pair(sums.p[r] + 4 * p));
  }
}

// The K-quants: one record of 256.
template <class F, bool widened, int R, int C>
INVAR_NOINLINE void tile_256(const uint8_t* record, const uint8_t* codes, int vector,
                             const uint8_t* act, int64_t act_stride, SlabOffsets at, float* out,
                             int64_t out_stride, Ahead& ahead) {
  using Record = typename F::Record;
  const Rows<R> rows(act, act_stride);
  VI totals[R][C];
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    INVAR_UNROLL for (int c = 0; c < C; c++) totals[r][c] = zero_i();
  }
  const SlabOffsets slab = at;
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
        VI scale = F::scales(record, g, h, (vector + c) * W);
        INVAR_UNROLL for (int r = 0; r < R; r++) totals[r][c] =
            group_scaled<F>(totals[r][c], sums[r][c], scale);
      }
      at.codes += F::kGroup, at.starts += F::kGroup / 4;
    }
    codes += widened ? F::kSums * F::kGroup / 4 * kQuadBytes : F::kGroupBytes;
  }
  if constexpr (F::kMin) {
    const MinSums<F, R> min_sums(rows, slab);
    INVAR_UNROLL for (int c = 0; c < C; c++) {
      const int column = (vector + c) * W;
      VI mins[R];
      min_totals(mins, record, column, min_sums);
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

template <class F, bool widened, int R, int C>
INVAR_INLINE void tile(Slab& s, int row, int vector) {
  const uint8_t* act = s.act + row * s.act_stride;
  float* out = s.out + row * s.out_stride;
  const uint8_t* codes = widened ? s.widened : s.record + F::Record::codes;
  if constexpr (F::Record::k < 256)
    tile_32<F, widened, R, C>(s.record, codes, s.blocks, vector, act, s.act_stride, s.at, out,
                              s.out_stride, s.first, s.waiting, s.ahead);
  else
    tile_256<F, widened, R, C>(s.record, codes, vector, act, s.act_stride, s.at, out, s.out_stride,
                               s.ahead);
}

// R rows of all columns. One row takes all vectors in one pass, to read the panel once and in
// order.
template <class F, bool widened, int R>
INVAR_INLINE void row_tile(Slab& s, int row) {
  constexpr int C = R == 1 ? (kPanelVectors < 4 ? kPanelVectors : 4) : kTileVectors;
  for (int v = 0; v < kPanelVectors; v += C) tile<F, widened, R, C>(s, row, v);
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
  Waiting waiting;
  if constexpr (F::Record::k == 256) {
    for (int r = 0; r < rows; r++) memset(out + r * out_stride, 0, kPanelColumns * 4);
  }
  for (int64_t slab = 0; slab * kSlabK < k; slab++) {
    const int64_t left = (k - slab * kSlabK) / F::Record::k;
    Slab s{panel + slab * kSlabBytes,
           widened,
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
