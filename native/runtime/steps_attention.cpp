#include "runtime/steps_attention.h"

#include <algorithm>

namespace invar {

int64_t AttentionStep::scratch_bytes() const {
  const int64_t workspace = (workspace_bytes + 63) / 64 * 64;
  if (act.data == nullptr) return workspace;
  return workspace + result_bytes();
}

int64_t AttentionStep::items(const Execution& e, int64_t) const {
  return e.query_chunks * kv_heads;
}

void AttentionStep::run(const Execution& e, const Worker& w, int64_t item) const {
  // Backwards: the last chunk of a prompt sees the most keys, and the longest items go first.
  run_chunk(e, w, e.query_chunks - 1 - item / kv_heads, item % kv_heads);
}

void AttentionStep::run_chunk(const Execution& e, const Worker& w, int64_t chunk,
                              int64_t kv_head) const {
  const CacheGroup& cache = e.groups[group];
  const int32_t sequence = e.query_sequence[chunk];
  const int64_t row = e.query_first_row[chunk];
  const int64_t columns = heads / kv_heads * head_dim;
  AttentionItem item{};
  item.tokens = static_cast<int32_t>(
      std::min<int64_t>(kQueryChunk, e.batch->query_start[sequence + 1] - row));
  item.q = q.row(row) + kv_head * columns;
  item.q_stride = q.stride_floats();
  item.group = static_cast<int32_t>(heads / kv_heads);
  item.head_dim = head_dim;
  item.first_position = e.token_position[row];
  item.window = cache.window;
  item.scale = scale;
  item.soft_cap = soft_cap;
  item.pages = cache.pages;
  item.block_table = e.batch->block_tables[group].row(sequence);
  item.offset_in_page = layer_offset + kv_head * kv_head_bytes(head_dim);
  item.workspace = w.scratch;
  if (act.data == nullptr) {
    item.out = out.row(row) + kv_head * columns;
    item.out_stride = out.stride_floats();
    e.kernels->attention->run(item);
    return;
  }
  uint8_t* result = w.scratch + (workspace_bytes + 63) / 64 * 64;
  item.out = reinterpret_cast<float*>(result);
  item.out_stride = columns;
  e.kernels->attention->run(item);
  for (int64_t t = 0; t < item.tokens; ++t) {
    e.kernels->linear->quantize_columns(act.format, act.layout, item.out + t * columns,
                                        kv_head * columns, columns, act.row(row + t));
  }
}

}  // namespace invar
