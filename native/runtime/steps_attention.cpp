#include "runtime/steps_attention.h"

#include <algorithm>

namespace invar {

int64_t AttentionStep::scratch_bytes() const {
  const int64_t workspace = (workspace_bytes + 63) / 64 * 64;
  if (act.data == nullptr) return workspace;
  return workspace + result_bytes();
}

int64_t AttentionStep::items(const Execution& e, int64_t) const {
  return static_cast<int64_t>(e.units[group].size()) * kv_heads;
}

AttentionItem AttentionStep::item_of(const Execution& e, const Worker& w, const AttentionUnit& unit,
                                     int64_t kv_head) const {
  const CacheGroup& cache = e.groups[group];
  AttentionItem item{};
  item.tokens = unit.tokens;
  item.q = q.row(unit.first_row) + kv_head * columns();
  item.q_stride = q.stride_floats();
  item.group = static_cast<int32_t>(heads / kv_heads);
  item.head_dim = head_dim;
  item.first_position = e.token_position[unit.first_row];
  item.mask = cache.mask;
  item.scale = scale;
  item.soft_cap = soft_cap;
  item.sinks = sinks == nullptr ? nullptr : sinks + kv_head * item.group;
  item.pages = cache.pages;
  item.block_table = e.batch->block_tables[group].row(unit.sequence);
  item.offset_in_page = layer_offset + kv_head * cache.head_bytes();
  item.workspace = w.scratch;
  if (act.data == nullptr) {
    item.out = out.row(unit.first_row) + kv_head * columns();
    item.out_stride = out.stride_floats();
  } else {
    item.out = reinterpret_cast<float*>(w.scratch + (workspace_bytes + 63) / 64 * 64);
    item.out_stride = columns();
  }
  return item;
}

void AttentionStep::run(const Execution& e, const Worker& w, int64_t index) const {
  const AttentionUnit& unit = e.units[group][index / kv_heads];
  const int64_t kv_head = index % kv_heads;
  const AttentionItem item = item_of(e, w, unit, kv_head);
  const AttentionKernels& kernels = e.kernels->attention_over(e.groups[group].kv_format);
  if (unit.splits == 0) {
    kernels.run(item);
  } else {
    const int64_t one = attention_partial_bytes(item.group, head_dim);
    const int64_t all = attention_partial_bytes(int64_t{item.group} * item.tokens, head_dim);
    uint8_t* partials = e.partials + (unit.partial + kv_head * unit.splits * unit.tokens) * one;
    const int64_t first = item.mask.first_key(item.first_position) / kSplitTokens;
    kernels.run_split(item, first + unit.split, partials + unit.split * all);
    std::atomic<int32_t>& finished = e.counters[unit.counter + kv_head];
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < unit.splits) return;
    finished.store(0, std::memory_order_relaxed);
    kernels.merge(item, partials, unit.splits);
  }
  if (act.data == nullptr) return;
  for (int64_t t = 0; t < item.tokens; ++t) {
    e.kernels->linear->quantize_columns(act.format, act.layout, item.out + t * columns(),
                                        kv_head * columns(), columns(),
                                        act.row(unit.first_row + t));
  }
}

}  // namespace invar
