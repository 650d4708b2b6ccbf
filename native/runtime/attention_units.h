// How the attention of a step is shared out: units of query tokens, for each KV head an item.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/batch.h"

namespace invar {

// Query tokens of one unit: enough to share every K and V load, few enough that a prompt of 512
// tokens makes items for many threads.
constexpr int64_t kQueryChunk = 32;

// Query tokens of one sequence and the keys they meet. Where there are few, every split of the keys
// is a unit; whoever finishes the last one merges all. That moves who computes, never what.
struct AttentionUnit {
  int32_t sequence, first_row, tokens;
  int32_t splits = 0;   // among which the keys are shared out; 0: all keys are in this unit
  int32_t split = 0;    // of these units, which one
  int32_t counter = 0;  // of finished splits, for the first KV head
  int64_t partial = 0;  // the first of KV head 0; [kv_heads, splits, tokens] of them
  int64_t cost;         // query tokens times keys
};

// Items of more than a 1 / max_split_items(threads) of a phase are split: so many there are at
// most.
int64_t max_split_items(int threads);
// Results of a split for one query token and KV head: enough for all items of one token.
int64_t max_partials(int threads, int64_t max_length);

// The units of a batch in one cache group, longest first. `units` has room for a unit per token
// and `partials`; while these last, items of several tokens are split too.
void place_units(const BatchView& batch, int64_t kv_heads, const AttentionMask& mask, int threads,
                 int64_t partials, std::vector<AttentionUnit>& units);

}  // namespace invar
