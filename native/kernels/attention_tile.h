// One tile of 64 tokens for the rows of an item: logits, probabilities, and their sum over V.
//
// A row is one query head of one token, row = token * group + head; a register tile is up to six
// rows next to each other.
#pragma once

#include "kernels/attention.h"

namespace invar::INVAR_ISA {

static_assert(kTileTokens == 2 * kPageTokens, "a tile is two pages");
static_assert(kSplitTokens % kTileTokens == 0);
constexpr float kLog2E = 0x1.715476p+0f;

struct State {
  float max, sum;  // of 2^(s - max); the identity is (-infinity, 0) with o = 0
};

// Everything of an item, row = token * group + head.
template <class P>
struct Work {
  using Operand = typename P::Operand;
  Operand* q;        // [rows][head_dim]
  float* split_o;    // [rows][head_dim], of the split that is being read
  float* total_o;    // [rows][head_dim], of the splits before it
  State* split;      // [rows]
  State* total;      // [rows]
  float* scores;     // [kMaxTileRows][kTileTokens]
  Operand* weights;  // [kMaxTileRows][kTileTokens]
  int64_t bytes;
};

// Tokens [begin, end) of a tile.
struct Range {
  int begin, end;
};
constexpr Range kWholeTile = {0, kTileTokens};

template <class T>
INVAR_INLINE T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
INVAR_INLINE T larger(T a, T b) {
  return a > b ? a : b;
}
INVAR_INLINE int in_tile(int64_t token) {
  return token < 0 ? 0 : token > kTileTokens ? kTileTokens : int(token);
}

// The first key that the query at `position` sees.
INVAR_INLINE int64_t first_key(const AttentionItem& item, int64_t position) {
  return item.mask.first_key(position);
}

// What the register tiles of an item need to know of a tile. `page[i]` is null when no row of the
// item sees a token of it: its entry in the block table may not exist or be freed.
template <class P>
struct Tile {
  const AttentionItem& item;
  const Work<P>& work;
  int64_t start;  // position of its first token
  const uint8_t* page[2];
  const uint8_t* ahead[2];  // pages of the next tile, to be prefetched

  // What query token t of the item sees of it.
  Range seen(int64_t t) const {
    const int64_t position = item.first_position + t;
    return {in_tile(first_key(item, position) - start), in_tile(position + 1 - start)};
  }
  int64_t v_offset() const { return kPageTokens * P::kElementBytes * item.head_dim; }  // in a page
};

template <class P, int R, int G>
INVAR_NOINLINE void score_groups(const Tile<P>& tile, const typename P::Operand* const (&q)[R],
                                 int group) {
  const int64_t head_dim = tile.item.head_dim, half_bytes = head_dim * 16 * P::kElementBytes;
  const uint8_t *k[G], *ahead[G];
  INVAR_UNROLL for (int g = 0; g < G; g++) {
    k[g] = tile.page[(group + g) / 2] + (group + g) % 2 * half_bytes;
    ahead[g] = tile.ahead[(group + g) / 2] + (group + g) % 2 * half_bytes;
  }
  Lanes16 acc[R][G];
  INVAR_UNROLL for (int r = 0; r < R; r++) INVAR_UNROLL for (int g = 0; g < G; g++) acc[r][g] =
      set1_16(0.0f);
  dot_steps<P, R, G>(acc, q, k, kStepBytes<P>, int(head_dim / P::kStep), ahead);
  INVAR_UNROLL for (int g = 0; g < G; g++) {
    if constexpr (P::kScaled) {
      const int64_t lane = (group + g) % 2 * kHalfTokens;
      const Lanes16 scale = load16(P::k_scales(tile.page[(group + g) / 2], head_dim) + lane);
      prefetch(tile.ahead[(group + g) / 2] + 2 * tile.v_offset() + lane * 4);
      INVAR_UNROLL for (int r = 0; r < R; r++) acc[r][g] = mul(acc[r][g], scale);
    }
    INVAR_UNROLL for (int r = 0; r < R; r++)
        store16(tile.work.scores + r * kTileTokens + (group + g) * 16, acc[r][g]);
  }
}

// Logits of some tokens, in whole groups of 16; what lies outside is not read later.
template <class P, int R>
INVAR_INLINE void score(const Tile<P>& tile, int64_t row, Range tokens) {
  constexpr int G = tile_groups(R);
  const typename P::Operand* q[R];
  for (int r = 0; r < R; r++) q[r] = tile.work.q + (row + r) * tile.item.head_dim;
  int group = tokens.begin / 16;
  const int last = (tokens.end + 15) / 16;
  for (; group + G <= last; group += G) score_groups<P, R, G>(tile, q, group);
  if constexpr (G > 1)
    for (; group < last; group++) score_groups<P, R, 1>(tile, q, group);
}

// Soft cap and mask of one row, in place; only where there is something to do.
INVAR_INLINE void prepare_scores(const AttentionItem& item, float* scores, Range seen) {
  const bool masked = seen.begin > 0 || seen.end < kTileTokens;
  if (!masked && !(item.soft_cap > 0.0f)) return;
  const VF cap = set1(item.soft_cap), scaled = set1(item.soft_cap * kLog2E);
  for (int i = 0; i < kTileTokens; i += W) {
    VF s = load(scores + i);
    if (item.soft_cap > 0.0f) s = scaled * tanh(s / cap);
    const VI token = iota() + set1_i(i);
    const VM visible = mask_and(less(set1_i(seen.begin - 1), token), less(token, set1_i(seen.end)));
    store(scores + i, select(visible, s, set1(-kInfinity)));
  }
}

INVAR_INLINE float exp2_one(float x) {
  alignas(64) float y[W];
  store(y, exp2_nonpositive(set1(x)));
  return y[0];
}

INVAR_INLINE void scale_floats(float* x, float factor, int64_t n) {
  const VF f = set1(factor);
  for (int64_t i = 0; i < n; i += W) store(x + i, load(x + i) * f);
}

// A value for each row of a register tile, in whole vectors.
struct alignas(64) RowValues {
  float v[16] = {};
};

// The running maxima of R rows take in those of a tile; bit r: row r has seen something. A row that
// has not keeps its (m, l, o).
template <class P, int R>
INVAR_INLINE unsigned raise_maxima(const Tile<P>& tile, int64_t row, const RowValues& tile_max) {
  const int64_t head_dim = tile.item.head_dim;
  State* state = tile.work.split + row;
  RowValues old_max, new_max, factor;
  for (int r = 0; r < R; r++) {
    old_max.v[r] = state[r].max;
    new_max.v[r] = tile_max.v[r] > state[r].max ? tile_max.v[r] : state[r].max;
  }
  for (int r = 0; r < R; r += W)
    store(factor.v + r, exp2_nonpositive(load(old_max.v + r) - load(new_max.v + r)));
  unsigned live = 0;
  for (int r = 0; r < R; r++) {
    if (new_max.v[r] == -kInfinity) continue;
    live |= 1u << r;
    // Where the maximum stands, the factor is exactly 1: leaving it out changes no bit.
    if (new_max.v[r] == old_max.v[r]) continue;
    state[r].max = new_max.v[r];
    state[r].sum *= factor.v[r];
    scale_floats(tile.work.split_o + (row + r) * head_dim, factor.v[r], head_dim);
  }
  return live;
}

// 2^(logit - max) of group g of a tile, and what weighs V: the same, or times the scale of V where
// it has one. A token that is not seen has a probability of zero, and whatever scale.
template <class P>
INVAR_INLINE Lanes16 probabilities(const Tile<P>& tile, int g, const float* scores, VF max,
                                   typename P::Operand* weights) {
  Lanes16 p = load16(scores + g * 16), weight;
  for (int i = 0; i < Lanes16::N; i++) weight.v[i] = p.v[i] = exp2_nonpositive(p.v[i] - max);
  if constexpr (P::kScaled) {
    const float* scales = P::v_scales(tile.page[g / 2], tile.item.head_dim) + g % 2 * kHalfTokens;
    const VF none = zero();
    for (int i = 0; i < Lanes16::N; i++)
      weight.v[i] = select(less(none, p.v[i]), p.v[i] * load(scales + i * W), none);
  }
  for (int i = 0; i < Lanes16::N; i++) P::write_probability(weights + g * 16 + i * W, weight.v[i]);
  return p;
}

// Logits -> probabilities of R rows, tokens that a row does not see selected to nothing; bit r of
// the result: row r goes on to V. Groups of 16 that it does not see would be zeros: they are left
// out, and not read later.
template <class P, int R>
INVAR_INLINE unsigned soften(const Tile<P>& tile, int64_t row, const Range (&seen)[R]) {
  const Work<P>& work = tile.work;
  RowValues tile_max;
  for (int r = 0; r < R; r++) {
    float* scores = work.scores + r * kTileTokens;
    prepare_scores(tile.item, scores, seen[r]);
    const int first = seen[r].begin / 16, last = (seen[r].end + 15) / 16;
    Lanes16 most = load16(scores + first * 16);
    for (int g = first + 1; g < last; g++) most = max(most, load16(scores + g * 16));
    tile_max.v[r] = max16(most);
  }
  if constexpr (P::kScaled) {
    for (int n = 0; n < 2; n++)
      for (int line = 2; line < 4; line++)
        prefetch(tile.ahead[n] + 2 * tile.v_offset() + line * 64);
  }
  const unsigned live = raise_maxima<P, R>(tile, row, tile_max);
  for (int r = 0; r < R; r++) {
    const VF m = set1(work.split[row + r].max);
    const float* scores = work.scores + r * kTileTokens;
    typename P::Operand* weights = work.weights + r * kTileTokens;
    const int first = seen[r].begin / 16, last = (seen[r].end + 15) / 16;
    Lanes16 p[4];
    if (first == 0 && last == 4) {
      for (int g = 0; g < 4; g++) p[g] = probabilities(tile, g, scores, m, weights);
    } else {
      for (int g = 0; g < 4; g++) {
        p[g] = set1_16(0.0f);
        if (first <= g && g < last) p[g] = probabilities(tile, g, scores, m, weights);
      }
    }
    const float sum = sum16(add(add(p[0], p[1]), add(p[2], p[3])));
    if (live >> r & 1) work.split[row + r].sum += sum;
  }
  return live;
}

// o[r] += p[r] . V over some tokens, dimensions of G groups from `dim` on.
template <class P, int R, int G>
INVAR_NOINLINE void weigh_groups(const Tile<P>& tile, float* const (&o)[R],
                                 const typename P::Operand* const (&p)[R], int dim, Range tokens) {
  constexpr int kStep = P::kStep, kPageSteps = kPageTokens / kStep;
  constexpr int kGroupBytes = kPageTokens * 16 * P::kElementBytes;  // of 16 dimensions of a page
  const int64_t head_dim = tile.item.head_dim, v = tile.v_offset();
  const int64_t step_bytes = head_dim * kStep * P::kElementBytes;
  Lanes16 acc[R][G];
  INVAR_UNROLL for (int r = 0; r < R; r++) INVAR_UNROLL for (int g = 0; g < G; g++) acc[r][g] =
      load16(o[r] + dim + g * 16);
  for (int n = tokens.begin / kPageTokens; n * kPageTokens < tokens.end; n++) {
    const int from = larger(tokens.begin, n * kPageTokens);
    const int to = smaller(tokens.end, (n + 1) * kPageTokens);
    const uint8_t* ahead[G];
    INVAR_UNROLL for (int g = 0; g < G; g++) {
      // The parts of the next tile's V, in the order of the calls that fetch them.
      const int64_t part = dim / 8 + n * G + g, parts = head_dim / 16;
      ahead[g] = part < parts ? tile.ahead[0] + v + part * kGroupBytes
                              : tile.ahead[1] + v + (part - parts) * kGroupBytes;
    }
    const int first = (from + kStep - 1) / kStep, last = to / kStep;
    const uint8_t* b[G];
    INVAR_UNROLL for (int g = 0; g < G; g++) b[g] = tile.page[n] + v +
                                                    (first - n * kPageSteps) * step_bytes +
                                                    (dim + g * 16) * kStep * P::kElementBytes;
    const typename P::Operand* a[R];
    INVAR_UNROLL for (int r = 0; r < R; r++) a[r] = p[r] + first * kStep;
    if constexpr (kStep == 2)
      if (from % 2 != 0) dot_half_pair<P, R, G>(acc, a, b, step_bytes, -1, true, ahead);
    dot_steps<P, R, G>(acc, a, b, step_bytes, last - first, ahead);
    if constexpr (kStep == 2)
      if (to % 2 != 0) dot_half_pair<P, R, G>(acc, a, b, step_bytes, last - first, false, ahead);
  }
  INVAR_UNROLL for (int r = 0; r < R; r++) INVAR_UNROLL for (int g = 0; g < G; g++)
      store16(o[r] + dim + g * 16, acc[r][g]);
}

// R rows that all see these tokens. `row` counts from the start of the item, `slot` from that of
// the register tile.
template <class P, int R>
INVAR_NOINLINE void weigh_rows(const Tile<P>& tile, int64_t row, int slot, Range tokens) {
  constexpr int G = tile_groups(R);
  const int head_dim = tile.item.head_dim;
  float* o[R];
  const typename P::Operand* p[R];
  for (int r = 0; r < R; r++) {
    o[r] = tile.work.split_o + (row + r) * head_dim;
    p[r] = tile.work.weights + (slot + r) * kTileTokens;
  }
  int dim = 0;
  for (; dim + 16 * G <= head_dim; dim += 16 * G) weigh_groups<P, R, G>(tile, o, p, dim, tokens);
  if constexpr (G > 1)
    for (; dim < head_dim; dim += 16) weigh_groups<P, R, 1>(tile, o, p, dim, tokens);
}

template <class P>
static void weigh(const Tile<P>& tile, int rows, int64_t row, int slot, Range tokens) {
  switch (rows) {
    case 1:
      return weigh_rows<P, 1>(tile, row, slot, tokens);
    case 2:
      return weigh_rows<P, 2>(tile, row, slot, tokens);
    case 3:
      return weigh_rows<P, 3>(tile, row, slot, tokens);
    case 4:
      return weigh_rows<P, 4>(tile, row, slot, tokens);
    case 5:
      return weigh_rows<P, 5>(tile, row, slot, tokens);
    default:
      return weigh_rows<P, kMaxTileRows>(tile, row, slot, tokens);
  }
}

// Rows of different tokens see different tokens, one more or less each. The pairs that all of them
// see are weighed together; before and behind these, the heads of a token go on by themselves. So a
// row meets its pairs in ascending order, and nothing else.
template <class P, int R>
INVAR_INLINE void weigh_edges(const Tile<P>& tile, int64_t row, const Range (&seen)[R],
                              Range shared) {
  auto by_token = [&](auto part) {
    for (int r = 0, next; r < R; r = next) {
      for (next = r + 1;
           next < R && seen[next].end == seen[r].end && seen[next].begin == seen[r].begin;)
        next++;
      const Range tokens = part(seen[r]);
      if (tokens.begin < tokens.end) weigh(tile, next - r, row + r, r, tokens);
    }
  };
  constexpr int kWhole = ~(P::kStep - 1);
  const Range pairs = {(shared.begin + P::kStep - 1) & kWhole, shared.end & kWhole};
  if (pairs.begin >= pairs.end) return by_token([](Range all) { return all; });
  by_token([&](Range all) { return Range{all.begin, pairs.begin}; });
  weigh_rows<P, R>(tile, row, 0, pairs);
  by_token([&](Range all) { return Range{pairs.end, all.end}; });
}

// R rows, each of which sees something of the tile. What a row does not see enters no arithmetic
// but as a selected zero, so its bits depend on its own range only.
template <class P, int R>
INVAR_NOINLINE void attend_rows(const Tile<P>& tile, int64_t row) {
  const int64_t group = tile.item.group;
  Range seen[R], any = {kTileTokens, 0}, shared = kWholeTile;
  for (int64_t r = 0, t = row / group, head = row % group; r < R; r++) {
    seen[r] = tile.seen(t);
    any = {smaller(any.begin, seen[r].begin), larger(any.end, seen[r].end)};
    shared = {larger(shared.begin, seen[r].begin), smaller(shared.end, seen[r].end)};
    if (++head == group) t++, head = 0;
  }
  score<P, R>(tile, row, any);
  const unsigned live = soften<P, R>(tile, row, seen);
  if (live != (1u << R) - 1) {
    // A row may see tokens and still have nothing: all its logits overflowed to -infinity. The
    // others go on alone.
    for (int r = 0; r < R; r++)
      if (live >> r & 1) weigh_rows<P, 1>(tile, row + r, r, seen[r]);
  } else if (any.begin == shared.begin && any.end == shared.end) {
    weigh_rows<P, R>(tile, row, 0, shared);
  } else {
    weigh_edges<P, R>(tile, row, seen, shared);
  }
}

// Six rows at a time; seven or eight go as four and the rest, since a tile of one or two rows is
// bound by its loads.
template <class P>
static void attend(const Tile<P>& tile, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row, rows; row < last_row; row += rows) {
    const int64_t left = last_row - row;
    rows = left <= kMaxTileRows ? left : left <= kMaxTileRows + 2 ? 4 : kMaxTileRows;
    switch (rows) {
      case 1:
        attend_rows<P, 1>(tile, row);
        break;
      case 2:
        attend_rows<P, 2>(tile, row);
        break;
      case 3:
        attend_rows<P, 3>(tile, row);
        break;
      case 4:
        attend_rows<P, 4>(tile, row);
        break;
      case 5:
        attend_rows<P, 5>(tile, row);
        break;
      default:
        attend_rows<P, kMaxTileRows>(tile, row);
    }
  }
}

}  // namespace invar::INVAR_ISA
