#include "kernels/attention.h"

namespace invar::INVAR_ISA {

static_assert(kTileTokens == 2 * kPageTokens, "a tile is two pages");
static_assert(kSplitTokens % kTileTokens == 0);
constexpr float kLog2E = 0x1.715476p+0f;

// ---------------------------------------------------------------- workspace

struct State {
  float max, sum;  // of 2^(s - max); the identity is (-infinity, 0) with o = 0
};

// Everything of an item, row = token * group + head.
struct Work {
  Operand* q;        // [rows][head_dim]
  float* split_o;    // [rows][head_dim], of the split that is being read
  float* total_o;    // [rows][head_dim], of the splits before it
  State* split;      // [rows]
  State* total;      // [rows]
  float* scores;     // [kMaxTileRows][kTileTokens]
  Operand* weights;  // [kMaxTileRows][kTileTokens]
  int64_t bytes;
};

static Work plan_work(uint8_t* base, int64_t rows, int64_t head_dim) {
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    uint8_t* p = base + used;
    used += (bytes + 63) / 64 * 64;
    return p;
  };
  Work w;
  w.q = reinterpret_cast<Operand*>(take(rows * head_dim * int64_t(sizeof(Operand))));
  w.split_o = reinterpret_cast<float*>(take(rows * head_dim * 4));
  w.total_o = reinterpret_cast<float*>(take(rows * head_dim * 4));
  w.split = reinterpret_cast<State*>(take(rows * int64_t(sizeof(State))));
  w.total = reinterpret_cast<State*>(take(rows * int64_t(sizeof(State))));
  w.scores = reinterpret_cast<float*>(take(kMaxTileRows * kTileTokens * 4));
  w.weights =
      reinterpret_cast<Operand*>(take(kMaxTileRows * kTileTokens * int64_t(sizeof(Operand))));
  w.bytes = used;
  return w;
}

static int64_t workspace_bytes(int32_t max_tokens, int32_t group, int32_t head_dim) {
  alignas(64) uint8_t base[1];
  return plan_work(base, int64_t(max_tokens) * group, head_dim).bytes;
}

// ---------------------------------------------------------------- store

static void store_token(const float* k, const float* v, int32_t head_dim, int32_t slot,
                        uint8_t* page) {
  uint16_t* k_half = reinterpret_cast<uint16_t*>(page) + (slot / 16) * head_dim * 16;
  uint16_t* k_lane = k_half + (slot % 16) * 2;
  uint16_t* v_pair = reinterpret_cast<uint16_t*>(page) + kPageTokens * head_dim +
                     (slot / 2) * head_dim * 2 + slot % 2;
  for (int32_t d = 0; d < head_dim; d += 16) {
    uint16_t k16[16], v16[16];
    for (int i = 0; i < 16; i += W) {
      store_bf16(k16 + i, load(k + d + i));
      store_bf16(v16 + i, load(v + d + i));
    }
    for (int i = 0; i < 16; i += 2) memcpy(k_lane + (d + i) / 2 * 32, k16 + i, 4);
    for (int i = 0; i < 16; i++) v_pair[(d + i) * 2] = v16[i];
  }
}

// ---------------------------------------------------------------- one tile of 64 tokens

// What the register tiles of an item need to know of a tile. `page[i]` is null when no row of the
// item sees a token of it: its entry in the block table may not exist or be freed.
struct Tile {
  const AttentionItem& item;
  const Work& work;
  const uint8_t* page[2];
  const uint8_t* ahead[2];  // pages of the next tile, to be prefetched
};

template <int R, int G>
INVAR_INLINE void score_groups(const Tile& tile, const Operand* const (&q)[R], int group) {
  const int64_t head_dim = tile.item.head_dim;
  Stream k[G];
  for (int g = 0; g < G; g++) {
    const int n = (group + g) / 2;
    const int64_t half = (group + g) % 2 * head_dim * 32;
    k[g] = {tile.page[n] + half, tile.ahead[n] + half};
  }
  Lanes16 acc[R][G];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) acc[r][g] = set1_16(0.0f);
  dot_pairs<R, G>(acc, q, k, 64, int(head_dim / 2));
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++)
      store16(tile.work.scores + r * kTileTokens + (group + g) * 16, acc[r][g]);
}

// Logits of tokens [begin, end), in whole groups of 16; what lies outside is not read later.
template <int R>
INVAR_INLINE void score(const Tile& tile, int64_t row, int begin, int end) {
  constexpr int G = tile_groups(R);
  const Operand* q[R];
  for (int r = 0; r < R; r++) q[r] = tile.work.q + (row + r) * tile.item.head_dim;
  int group = begin / 16;
  const int last = (end + 15) / 16;
  for (; group + G <= last; group += G) score_groups<R, G>(tile, q, group);
  if constexpr (G > 1)
    for (; group < last; group++) score_groups<R, 1>(tile, q, group);
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

// The 16-lane trees of R rows, level by level: the same sums as sum16 and max16, with R chains of
// dependent steps beside each other instead of one after another.
template <int R, typename Join>
INVAR_INLINE void join16(float (&x)[R][16], Join join) {
  for (int half = 8; half > 0; half /= 2)
    for (int r = 0; r < R; r++)
      for (int i = 0; i < half; i++) x[r][i] = join(x[r][i], x[r][i + half]);
}

// A row of 64 values, 16-lane group g in part[g].
struct Row64 {
  Lanes16 part[4];
};
INVAR_INLINE Row64 load64(const float* p) {
  return {{load16(p), load16(p + 16), load16(p + 32), load16(p + 48)}};
}

// Soft cap and mask of one row, in place; only where there is something to do.
INVAR_INLINE void prepare_scores(const AttentionItem& item, float* scores, int begin, int end) {
  const bool masked = begin > 0 || end < kTileTokens;
  if (!masked && !(item.soft_cap > 0.0f)) return;
  const VF cap = set1(item.soft_cap), scaled = set1(item.soft_cap * kLog2E);
  for (int i = 0; i < kTileTokens; i += W) {
    VF s = load(scores + i);
    if (item.soft_cap > 0.0f) s = scaled * tanh(s / cap);
    const VI token = iota() + set1_i(i);
    const VM seen = mask_and(less(set1_i(begin - 1), token), less(token, set1_i(end)));
    store(scores + i, select(seen, s, set1(-kInfinity)));
  }
}

// The running maximum of a row takes in that of a tile. False when the row has seen nothing yet:
// then neither (m, l) nor o changes.
INVAR_INLINE bool raise_maximum(State& state, float tile_max, float* o, int64_t head_dim) {
  const float new_max = tile_max > state.max ? tile_max : state.max;
  if (new_max == -kInfinity) return false;
  // Where the maximum stands, the factor would be exactly 1: leaving it out changes no bit.
  if (new_max != state.max) {
    const float factor = exp2_one(state.max - new_max);
    state.sum *= factor;
    scale_floats(o, factor, head_dim);
    state.max = new_max;
  }
  return true;
}

// Logits -> probabilities of R rows, tokens outside [begin, end) selected to nothing; bit r of the
// result: row r goes on to V.
template <int R>
INVAR_INLINE unsigned soften(const Tile& tile, int64_t row, int begin, int end,
                             float* const (&o)[R]) {
  const Work& work = tile.work;
  alignas(64) float lanes[R][16];
  for (int r = 0; r < R; r++) {
    float* scores = work.scores + r * kTileTokens;
    prepare_scores(tile.item, scores, begin, end);
    const Row64 s = load64(scores);
    store16(lanes[r], max(max(s.part[0], s.part[1]), max(s.part[2], s.part[3])));
  }
  join16<R>(lanes, [](float a, float b) { return a > b ? a : b; });
  unsigned live = 0;
  for (int r = 0; r < R; r++)
    live |= unsigned(raise_maximum(work.split[row + r], lanes[r][0], o[r], tile.item.head_dim))
            << r;
  for (int r = 0; r < R; r++) {
    const VF m = set1(work.split[row + r].max);
    Row64 p = load64(work.scores + r * kTileTokens);
    for (int g = 0; g < 4; g++)
      for (int i = 0; i < Lanes16::N; i++) {
        p.part[g].v[i] = exp2_nonpositive(p.part[g].v[i] - m);
        store_probability(work.weights + r * kTileTokens + g * 16 + i * W, p.part[g].v[i]);
      }
    store16(lanes[r], add(add(p.part[0], p.part[1]), add(p.part[2], p.part[3])));
  }
  join16<R>(lanes, [](float a, float b) { return a + b; });
  for (int r = 0; r < R; r++)
    if (live >> r & 1) work.split[row + r].sum += lanes[r][0];
  return live;
}

// o[r] += p[r] . V over tokens [begin, end), dimensions of G groups from `dim` on.
template <int R, int G>
INVAR_INLINE void weigh_groups(const Tile& tile, float* const (&o)[R], const Operand* const (&p)[R],
                               int dim, int begin, int end) {
  const int64_t head_dim = tile.item.head_dim;
  const int64_t pair_bytes = head_dim * 4;
  Lanes16 acc[R][G];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) acc[r][g] = load16(o[r] + dim + g * 16);
  constexpr int kPagePairs = kPageTokens / 2;
  for (int n = begin / kPageTokens; n * kPageTokens < end; n++) {
    const int from = begin > n * kPageTokens ? begin : n * kPageTokens;
    const int to = end < (n + 1) * kPageTokens ? end : (n + 1) * kPageTokens;
    const int64_t v = kPageTokens * head_dim * 2 + dim * 4;  // within the page
    auto at = [&](int pair, Stream(&b)[G], const Operand*(&a)[R]) {
      for (int g = 0; g < G; g++) {
        const int64_t offset = v + (pair - n * kPagePairs) * pair_bytes + g * 64;
        b[g] = {tile.page[n] + offset, tile.ahead[n] + offset};
      }
      for (int r = 0; r < R; r++) a[r] = p[r] + pair * 2;
    };
    Stream b[G];
    const Operand* a[R];
    if (from % 2 != 0) {
      at(from / 2, b, a);
      dot_half_pair<R, G>(acc, a, b, true);
    }
    const int first = (from + 1) / 2, last = to / 2;
    at(first, b, a);
    dot_pairs<R, G>(acc, a, b, pair_bytes, last - first);
    if (to % 2 != 0) {
      at(last, b, a);
      dot_half_pair<R, G>(acc, a, b, false);
    }
  }
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) store16(o[r] + dim + g * 16, acc[r][g]);
}

template <int R>
INVAR_INLINE void weigh(const Tile& tile, float* const (&o)[R], const Operand* const (&p)[R],
                        int begin, int end) {
  constexpr int G = tile_groups(R);
  const int head_dim = tile.item.head_dim;
  int dim = 0;
  for (; dim + 16 * G <= head_dim; dim += 16 * G) weigh_groups<R, G>(tile, o, p, dim, begin, end);
  if constexpr (G > 1)
    for (; dim < head_dim; dim += 16) weigh_groups<R, 1>(tile, o, p, dim, begin, end);
}

// R rows that all see the tokens [begin, end) of the tile. Masked tokens enter no arithmetic but
// as a selected zero, so a row's bits depend on its own range only.
template <int R>
static __attribute__((noinline)) void attend_rows(const Tile& tile, int64_t row, int begin,
                                                  int end) {
  const Work& work = tile.work;
  score<R>(tile, row, begin, end);
  float* o[R];
  const Operand* p[R];
  for (int r = 0; r < R; r++) {
    o[r] = work.split_o + (row + r) * tile.item.head_dim;
    p[r] = work.weights + r * kTileTokens;
  }
  const unsigned live = soften<R>(tile, row, begin, end, o);
  if (live == (1u << R) - 1) {
    weigh<R>(tile, o, p, begin, end);
    return;
  }
  // A row may see tokens and still have nothing: all its logits overflowed to -infinity. The others
  // go on alone.
  for (int r = 0; r < R; r++) {
    if ((live >> r & 1) == 0) continue;
    float* o1[1] = {o[r]};
    const Operand* p1[1] = {p[r]};
    weigh<1>(tile, o1, p1, begin, end);
  }
}

// Six rows at a time; seven or eight go as four and the rest, since a tile of one or two rows is
// bound by its loads.
static void attend(const Tile& tile, int64_t first_row, int64_t last_row, int begin, int end) {
  for (int64_t row = first_row, rows; row < last_row; row += rows) {
    const int64_t left = last_row - row;
    rows = left <= kMaxTileRows ? left : left <= kMaxTileRows + 2 ? 4 : kMaxTileRows;
    switch (rows) {
      case 1:
        attend_rows<1>(tile, row, begin, end);
        break;
      case 2:
        attend_rows<2>(tile, row, begin, end);
        break;
      case 3:
        attend_rows<3>(tile, row, begin, end);
        break;
      case 4:
        attend_rows<4>(tile, row, begin, end);
        break;
      case 5:
        attend_rows<5>(tile, row, begin, end);
        break;
      default:
        attend_rows<kMaxTileRows>(tile, row, begin, end);
    }
  }
}

// ---------------------------------------------------------------- an item

INVAR_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INVAR_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The first key that the query at `position` sees.
INVAR_INLINE int64_t first_key(const AttentionItem& item, int64_t position) {
  return item.window > 0 ? larger(0, position - item.window + 1) : 0;
}

static void load_queries(const AttentionItem& item, const Work& work) {
  const VF scale = set1(item.soft_cap > 0.0f ? item.scale : item.scale * kLog2E);
  const int64_t width = int64_t(item.group) * item.head_dim;
  for (int64_t t = 0; t < item.tokens; t++)
    for (int64_t i = 0; i < width; i += W)
      store_operand(work.q + t * width + i, load(item.q + t * item.q_stride + i) * scale);
}

static void clear(State* state, float* o, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; r++) state[r] = {-kInfinity, 0.0f};
  for (int64_t i = 0; i < rows * head_dim; i += W) store(o + i, zero());
}

// Rows that see the whole tile share register tiles across tokens; a token at an edge (the
// diagonal, the end of a window) shares them among the heads of its group only.
static void attend_tile(const AttentionItem& item, const Work& work, int64_t start) {
  const int64_t low = first_key(item, item.first_position);
  const int64_t high = item.first_position + item.tokens;
  auto page_of = [&](int64_t token) {
    return item.pages.at(item.block_table[token / kPageTokens]) + item.offset_in_page;
  };
  Tile tile{item, work, {nullptr, nullptr}, {}};
  for (int n = 0; n < 2; n++) {
    const int64_t token = start + n * kPageTokens, next = token + kTileTokens;
    if (token < high && token + kPageTokens > low) tile.page[n] = page_of(token);
    tile.ahead[n] = next < high ? page_of(next) : tile.page[n];
  }
  int64_t t = 0;
  while (t < item.tokens) {
    const int64_t position = item.first_position + t;
    const int64_t begin = larger(0, first_key(item, position) - start);
    const int64_t end = smaller(kTileTokens, position + 1 - start);
    int64_t next = t + 1;
    if (begin == 0 && end == kTileTokens) {
      const int64_t full_until =
          item.window > 0 ? smaller(item.tokens, start + item.window - item.first_position)
                          : item.tokens;
      next = larger(next, full_until);
    }
    if (begin < end) attend(tile, t * item.group, next * item.group, int(begin), int(end));
    t = next;
  }
}

// total <- total + split, per row; a split in which a row saw nothing leaves it untouched.
static void merge_split(const AttentionItem& item, const Work& work) {
  const int64_t head_dim = item.head_dim;
  for (int64_t r = 0; r < int64_t(item.tokens) * item.group; r++) {
    const State& split = work.split[r];
    State& total = work.total[r];
    if (split.max == -kInfinity) continue;
    const float new_max = split.max > total.max ? split.max : total.max;
    const float keep = exp2_one(total.max - new_max), take = exp2_one(split.max - new_max);
    total = {new_max, split.sum * take + total.sum * keep};
    float* into = work.total_o + r * head_dim;
    const float* from = work.split_o + r * head_dim;
    for (int64_t i = 0; i < head_dim; i += W)
      store(into + i, fma(load(from + i), set1(take), load(into + i) * set1(keep)));
  }
}

static void run(const AttentionItem& item) {
  const int64_t rows = int64_t(item.tokens) * item.group, head_dim = item.head_dim;
  const Work work = plan_work(static_cast<uint8_t*>(item.workspace), rows, head_dim);
  load_queries(item, work);
  clear(work.total, work.total_o, rows, head_dim);
  const int64_t low = first_key(item, item.first_position);
  const int64_t high = item.first_position + item.tokens;
  for (int64_t split = low / kSplitTokens * kSplitTokens; split < high; split += kSplitTokens) {
    clear(work.split, work.split_o, rows, head_dim);
    const int64_t from = larger(split, low / kTileTokens * kTileTokens);
    const int64_t to = smaller(split + kSplitTokens, high);
    for (int64_t start = from; start < to; start += kTileTokens) attend_tile(item, work, start);
    merge_split(item, work);
  }
  for (int64_t t = 0; t < item.tokens; t++)
    for (int64_t h = 0; h < item.group; h++) {
      const int64_t row = t * item.group + h;
      const VF sum = set1(work.total[row].sum);
      float* out = item.out + t * item.out_stride + h * head_dim;
      for (int64_t i = 0; i < head_dim; i += W)
        store(out + i, load(work.total_o + row * head_dim + i) / sum);
    }
}

extern const AttentionKernels attention_kernels = {store_token, run, workspace_bytes};

}  // namespace invar::INVAR_ISA
