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
  bool whole;     // every row of the item sees all of it
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

// The running maxima of R rows take in those of a tile; bit r: row r has seen something. A row that
// has not keeps its (m, l, o).
template <class P, int R>
INVAR_INLINE unsigned raise_maxima(const Tile<P>& tile, int64_t row, const float (&tile_max)[R]) {
  const int64_t head_dim = tile.item.head_dim;
  State* state = tile.work.split + row;
  unsigned live = 0;
  for (int r = 0; r < R; r++) {
    // Where the maximum stands the factor is exactly 1: leaving it out changes no bit, and after
    // the first tiles it nearly always stands.
    if (tile_max[r] > state[r].max) {
      const float factor = exp2_one(state[r].max - tile_max[r]);
      state[r].max = tile_max[r];
      state[r].sum *= factor;
      scale_floats(tile.work.split_o + (row + r) * head_dim, factor, head_dim);
    }
    if (state[r].max != -kInfinity) live |= 1u << r;
  }
  return live;
}

// Groups of 16 tokens whose probabilities are found together: four vectors keep the float units
// busy (exp2_nonpositive) and leave registers to its constants.
constexpr int kSoftGroups = W / 4;

// 2^(logit - max) of N groups from g on, and what weighs V: the same, or times the scale of V where
// it has one. A token that is not seen has a probability of zero, and whatever scale.
template <class P, int N>
INVAR_INLINE void probabilities(const Tile<P>& tile, int g, const float* scores, VF max,
                                typename P::Operand* weights, Lanes16* sums) {
  constexpr int V = N * Lanes16::N;
  scores += g * 16, weights += g * 16;
  VF p[V];
  INVAR_UNROLL for (int i = 0; i < V; i++) p[i] = load(scores + i * W) - max;
  exp2_nonpositive(p);
  INVAR_UNROLL for (int i = 0; i < V; i++) sums[i / Lanes16::N].v[i % Lanes16::N] = p[i];
  if constexpr (P::kScaled) {
    const VF none = zero();
    for (int i = 0; i < V; i++) {
      const int token = g * 16 + i * W;
      const float* scale = P::v_scales(tile.page[token / kPageTokens], tile.item.head_dim);
      p[i] = select(less(none, p[i]), p[i] * load(scale + token % kPageTokens), none);
    }
  }
  INVAR_UNROLL for (int i = 0; i < V; i++) P::write_probability(weights + i * W, p[i]);
}

// Logits -> probabilities of R rows, tokens that a row does not see selected to nothing; bit r of
// the result: row r goes on to V. Groups of 16 that it does not see would be zeros: they are left
// out, and not read later.
template <class P, int R>
INVAR_INLINE unsigned soften(const Tile<P>& tile, int64_t row, const Range (&seen)[R]) {
  const Work<P>& work = tile.work;
  Lanes16 most[R];  // reduced apart from the loop, so that the trees of all rows overlap
  for (int r = 0; r < R; r++) {
    float* scores = work.scores + r * kTileTokens;
    prepare_scores(tile.item, scores, seen[r]);
    const int first = seen[r].begin / 16, last = (seen[r].end + 15) / 16;
    most[r] = load16(scores + first * 16);
    for (int g = first + 1; g < last; g++) most[r] = max(most[r], load16(scores + g * 16));
  }
  float tile_max[R];
  INVAR_UNROLL for (int r = 0; r < R; r++) tile_max[r] = max16(most[r]);
  if constexpr (P::kScaled) {
    for (int n = 0; n < 2; n++)
      for (int line = 2; line < 4; line++)
        prefetch(tile.ahead[n] + 2 * tile.v_offset() + line * 64);
  }
  const unsigned live = raise_maxima<P, R>(tile, row, tile_max);
  Lanes16 sums[R];
  for (int r = 0; r < R; r++) {
    const VF m = set1(work.split[row + r].max);
    const float* scores = work.scores + r * kTileTokens;
    typename P::Operand* weights = work.weights + r * kTileTokens;
    const int first = seen[r].begin / 16, last = (seen[r].end + 15) / 16;
    Lanes16 p[4];
    if (first == 0 && last == 4) {
      INVAR_UNROLL for (int g = 0; g < 4; g += kSoftGroups)
          probabilities<P, kSoftGroups>(tile, g, scores, m, weights, p + g);
    } else {
      for (int g = 0; g < 4; g++) {
        p[g] = set1_16(0.0f);
        if (first <= g && g < last) probabilities<P, 1>(tile, g, scores, m, weights, p + g);
      }
    }
    sums[r] = add(add(p[0], p[1]), add(p[2], p[3]));
  }
  INVAR_UNROLL for (int r = 0; r < R; r++) {
    const float sum = sum16(sums[r]);
    if (live >> r & 1) work.split[row + r].sum += sum;
  }
  return live;
}

// Tokens of a page that are weighed: whole steps, and at either end of them perhaps half a pair.
struct PageSteps {
  const uint8_t* v;  // of the first whole step
  int64_t token;     // of the tile, where that one begins
  int steps;
  bool half_before, half_behind;
};
// Of a tile: pages [first, last), and V of the pages that the next tile has in their places.
struct TileSteps {
  PageSteps pages[2];
  int first, last;
  const uint8_t* ahead[2];
};

template <class P>
INVAR_INLINE PageSteps page_steps(const Tile<P>& tile, int n, Range tokens) {
  constexpr int kStep = P::kStep;
  const int from = larger(tokens.begin, n * kPageTokens);
  const int to = smaller(tokens.end, (n + 1) * kPageTokens);
  const int first = (from + kStep - 1) / kStep, last = to / kStep;
  const int64_t skipped = int64_t(first * kStep - n * kPageTokens) * tile.item.head_dim;
  const uint8_t* v = tile.page[n] + tile.v_offset() + skipped * P::kElementBytes;
  return {v, first * kStep, last - first, from % kStep != 0, to % kStep != 0};
}

// o[r] += p[r] . V over these steps, dimensions of G groups from `dim` on; rows of o lie head_dim
// apart, those of p kTileTokens.
template <class P, int R, int G>
INVAR_NOINLINE void weigh_groups(const TileSteps& tile, int64_t head_dim, float* o,
                                 const typename P::Operand* p, int64_t dim) {
  constexpr int kStep = P::kStep;
  constexpr int kGroupBytes = kPageTokens * 16 * P::kElementBytes;  // of 16 dimensions of a page
  const int64_t step_bytes = head_dim * kStep * P::kElementBytes;
  o += dim;
  Lanes16 acc[R][G];
  INVAR_UNROLL for (int r = 0; r < R; r++) INVAR_UNROLL for (int g = 0; g < G; g++) acc[r][g] =
      load16(o + r * head_dim + g * 16);
  for (int n = tile.first; n < tile.last; n++) {
    const PageSteps& page = tile.pages[n];
    const uint8_t *ahead[G], *b[G];
    INVAR_UNROLL for (int g = 0; g < G; g++) {
      // The parts of the next tile's V, in the order of the calls that fetch them.
      const int64_t part = dim / 8 + n * G + g, parts = head_dim / 16;
      ahead[g] = part < parts ? tile.ahead[0] + part * kGroupBytes
                              : tile.ahead[1] + (part - parts) * kGroupBytes;
      b[g] = page.v + (dim + g * 16) * kStep * P::kElementBytes;
    }
    const typename P::Operand* a[R];
    INVAR_UNROLL for (int r = 0; r < R; r++) a[r] = p + r * kTileTokens + page.token;
    if constexpr (kStep == 2)
      if (page.half_before) dot_half_pair<P, R, G>(acc, a, b, step_bytes, -1, true, ahead);
    dot_steps<P, R, G>(acc, a, b, step_bytes, page.steps, ahead);
    if constexpr (kStep == 2)
      if (page.half_behind) dot_half_pair<P, R, G>(acc, a, b, step_bytes, page.steps, false, ahead);
  }
  INVAR_UNROLL for (int r = 0; r < R; r++) INVAR_UNROLL for (int g = 0; g < G; g++)
      store16(o + r * head_dim + g * 16, acc[r][g]);
}

// R rows that all see these tokens. `row` counts from the start of the item, `slot` from that of
// the register tile.
template <class P, int R>
INVAR_NOINLINE void weigh_rows(const Tile<P>& tile, int64_t row, int slot, Range tokens) {
  constexpr int G = tile_groups(R);
  const int64_t head_dim = tile.item.head_dim;
  float* o = tile.work.split_o + row * head_dim;
  const typename P::Operand* p = tile.work.weights + slot * kTileTokens;
  TileSteps steps;
  steps.first = tokens.begin / kPageTokens;
  steps.last = (tokens.end + kPageTokens - 1) / kPageTokens;
  for (int n = steps.first; n < steps.last; n++) steps.pages[n] = page_steps(tile, n, tokens);
  for (int n = 0; n < 2; n++) steps.ahead[n] = tile.ahead[n] + tile.v_offset();
  int64_t dim = 0;
  for (; dim + 16 * G <= head_dim; dim += 16 * G) weigh_groups<P, R, G>(steps, head_dim, o, p, dim);
  if constexpr (G > 1)
    for (; dim < head_dim; dim += 16) weigh_groups<P, R, 1>(steps, head_dim, o, p, dim);
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
    seen[r] = tile.whole ? kWholeTile : tile.seen(t);
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
