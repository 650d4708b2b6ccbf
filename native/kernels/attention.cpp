#include "kernels/attention_tile.h"

namespace invar::INVAR_ISA {

// ---------------------------------------------------------------- workspace

template <class P>
static Work<P> plan_work(uint8_t* base, int64_t rows, int64_t head_dim) {
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    uint8_t* p = base + used;
    used += (bytes + 63) / 64 * 64;
    return p;
  };
  using Operand = typename P::Operand;
  Work<P> w;
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

template <class P>
static int64_t workspace_bytes(int32_t max_tokens, int32_t group, int32_t head_dim) {
  alignas(64) uint8_t base[1];
  return plan_work<P>(base, int64_t(max_tokens) * group, head_dim).bytes;
}

// ---------------------------------------------------------------- an item

template <class P>
static void load_queries(const AttentionItem& item, const Work<P>& work) {
  const VF scale = set1(item.soft_cap > 0.0f ? item.scale : item.scale * kLog2E);
  const int64_t width = int64_t(item.group) * item.head_dim;
  for (int64_t t = 0; t < item.tokens; t++)
    for (int64_t i = 0; i < width; i += W)
      P::write_query(work.q + t * width + i, load(item.q + t * item.q_stride + i) * scale);
}

static void clear(State* state, float* o, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; r++) state[r] = {-kInfinity, 0.0f};
  for (int64_t i = 0; i < rows * head_dim; i += W) store(o + i, zero());
}

template <class P>
static void attend_tile(const AttentionItem& item, const Work<P>& work, int64_t start) {
  const int64_t low = first_key(item, item.first_position);
  const int64_t high = item.first_position + item.tokens;
  auto page_of = [&](int64_t token) {
    return item.pages.at(item.block_table[token / kPageTokens]) + item.offset_in_page;
  };
  const int64_t behind_tile = start + kTileTokens;
  const bool whole = behind_tile <= item.first_position + 1 && first_key(item, high - 1) <= start;
  Tile<P> tile{item, work, start, whole, {nullptr, nullptr}, {}};
  for (int n = 0; n < 2; n++) {
    const int64_t token = start + n * kPageTokens, next = token + kTileTokens;
    if (token < high && token + kPageTokens > low) tile.page[n] = page_of(token);
    tile.ahead[n] = next < high ? page_of(next) : tile.page[n];
  }
  // Query tokens whose keys [first_key, position] meet the tile: they lie next to each other.
  const int64_t first = larger<int64_t>(0, start - item.first_position);
  const int64_t behind = item.mask.last_query(behind_tile - 1) - item.first_position;
  const int64_t last = smaller<int64_t>(item.tokens, behind);
  attend(tile, first * item.group, last * item.group);
}

// Split `index` from identity, as far as the item sees it.
template <class P>
static void read_split(const AttentionItem& item, const Work<P>& work, int64_t index) {
  clear(work.split, work.split_o, int64_t(item.tokens) * item.group, item.head_dim);
  const int64_t split = index * kSplitTokens;
  const int64_t low = first_key(item, item.first_position) / kTileTokens * kTileTokens;
  const int64_t high = item.first_position + item.tokens;
  const int64_t to = smaller(split + kSplitTokens, high);
  for (int64_t start = larger(split, low); start < to; start += kTileTokens)
    attend_tile(item, work, start);
}

// total <- total + split, per row; a split in which a row saw nothing leaves it untouched.
template <class P>
static void merge_split(const AttentionItem& item, const Work<P>& work) {
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

template <class P>
static void divide(const AttentionItem& item, const Work<P>& work) {
  const int64_t head_dim = item.head_dim;
  for (int64_t t = 0; t < item.tokens; t++)
    for (int64_t h = 0; h < item.group; h++) {
      const int64_t row = t * item.group + h;
      const State total = work.total[row];
      float* out = item.out + t * item.out_stride + h * head_dim;
      float* o = work.total_o + row * head_dim;
      float sum = total.sum;
      if (item.sinks != nullptr) {
        const float sink = item.sinks[h] * kLog2E;
        const float new_max = sink > total.max ? sink : total.max;
        const float keep = exp2_one(total.max - new_max);
        sum = exp2_one(sink - new_max) + sum * keep;
        scale_floats(o, keep, head_dim);
      }
      for (int64_t i = 0; i < head_dim; i += W) store(out + i, load(o + i) / set1(sum));
    }
}

template <class P>
static Work<P> begin(const AttentionItem& item) {
  const int64_t rows = int64_t(item.tokens) * item.group;
  return plan_work<P>(static_cast<uint8_t*>(item.workspace), rows, item.head_dim);
}

template <class P>
static void run(const AttentionItem& item) {
  const Work<P> work = begin<P>(item);
  load_queries(item, work);
  clear(work.total, work.total_o, int64_t(item.tokens) * item.group, item.head_dim);
  const int64_t last_key = item.first_position + item.tokens - 1;
  for (int64_t split = first_key(item, item.first_position) / kSplitTokens;
       split <= last_key / kSplitTokens; split++) {
    read_split(item, work, split);
    merge_split(item, work);
  }
  divide(item, work);
}

// ---------------------------------------------------------------- an item in parts

// `work` with its split in a partial: o of all rows, then their states.
template <class P>
static Work<P> at_partial(const AttentionItem& item, Work<P> work, uint8_t* partial) {
  const int64_t rows = int64_t(item.tokens) * item.group;
  work.split_o = reinterpret_cast<float*>(partial);
  work.split = reinterpret_cast<State*>(work.split_o + rows * item.head_dim);
  return work;
}

template <class P>
static void run_split(const AttentionItem& item, int64_t split, uint8_t* partial) {
  const Work<P> work = at_partial(item, begin<P>(item), partial);
  load_queries(item, work);
  read_split(item, work, split);
}

template <class P>
static void merge(const AttentionItem& item, uint8_t* partials, int64_t splits) {
  const Work<P> work = begin<P>(item);
  const int64_t rows = int64_t(item.tokens) * item.group;
  clear(work.total, work.total_o, rows, item.head_dim);
  for (int64_t i = 0; i < splits; i++)
    merge_split(
        item, at_partial(item, work, partials + i * attention_partial_bytes(rows, item.head_dim)));
  divide(item, work);
}

template <class P>
constexpr AttentionKernels kKernels = {P::store_token, run<P>, workspace_bytes<P>, run_split<P>,
                                       merge<P>};

extern const AttentionKernels attention_kernels[] = {kKernels<PageBf16>, kKernels<PageF16>,
                                                     kKernels<PageI8>};
static_assert(PageBf16::kFormat == KVFormat(0) && PageF16::kFormat == KVFormat(1) &&
              PageI8::kFormat == KVFormat(2) && KVFormat(3) == KVFormat::count);

}  // namespace invar::INVAR_ISA
