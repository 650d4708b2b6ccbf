#include "runtime/attention_units.h"

#include "runtime/execution.h"

namespace invar {
namespace {

// Where the keys of a unit lie.
struct Keys {
  int64_t begin, end;
  int64_t splits() const { return (end - 1) / kSplitTokens - begin / kSplitTokens + 1; }
  // How many of them are in their split number i.
  int64_t in_split(int64_t i) const {
    const int64_t start = (begin / kSplitTokens + i) * kSplitTokens;
    return std::min(end, start + kSplitTokens) - std::max(begin, start);
  }
};

Keys keys_of(const BatchView& b, const AttentionUnit& unit, const AttentionMask& mask) {
  const int64_t behind = b.query_start[unit.sequence + 1] - unit.first_row;
  const int64_t position = b.kv_len[unit.sequence] - behind;
  return {mask.first_key(position), position + unit.tokens};
}

void place_chunks(const BatchView& b, const AttentionMask& mask,
                  std::vector<AttentionUnit>& units) {
  for (int32_t s = 0; s < b.sequences; ++s) {
    const int32_t last = b.query_start[s + 1];
    for (int32_t r = b.query_start[s]; r < last; r += kQueryChunk) {
      AttentionUnit unit{};
      unit.sequence = s;
      unit.first_row = r;
      unit.tokens = std::min<int32_t>(kQueryChunk, last - r);
      const Keys keys = keys_of(b, unit, mask);
      unit.cost = unit.tokens * (keys.end - keys.begin);
      units.push_back(unit);
    }
  }
}

}  // namespace

int64_t max_split_items(int threads) { return threads > 1 ? threads * kItemsPerThread : 0; }

int64_t max_partials(int threads, int64_t max_length) {
  const int64_t splits = (max_length + kSplitTokens - 1) / kSplitTokens;
  return splits > 1 ? max_split_items(threads) * splits : 0;
}

void place_units(const BatchView& b, int64_t kv_heads, const AttentionMask& mask, int threads,
                 int64_t partials, std::vector<AttentionUnit>& units) {
  units.clear();
  place_chunks(b, mask, units);
  int64_t total = 0, used = 0;
  for (const AttentionUnit& unit : units) total += unit.cost * kv_heads;
  int32_t counters = 0;
  for (size_t i = 0, chunks = units.size(); i < chunks; ++i) {
    AttentionUnit unit = units[i];
    const Keys keys = keys_of(b, unit, mask);
    const int64_t wanted = kv_heads * keys.splits() * unit.tokens;
    if (unit.cost * max_split_items(threads) <= total) continue;
    if (keys.splits() < 2 || wanted > partials - used) continue;
    unit.splits = static_cast<int32_t>(keys.splits());
    unit.partial = used;
    unit.counter = counters;
    used += wanted;
    counters += static_cast<int32_t>(kv_heads);
    for (; unit.split < unit.splits; ++unit.split) {
      unit.cost = unit.tokens * keys.in_split(unit.split);
      if (unit.split == 0) {
        units[i] = unit;
      } else {
        units.push_back(unit);
      }
    }
  }
  // The longest first, so that the last to finish has a short one.
  std::sort(units.begin(), units.end(), [](const AttentionUnit& a, const AttentionUnit& c) {
    return a.cost != c.cost ? a.cost > c.cost : a.first_row < c.first_row;
  });
}

}  // namespace invar
