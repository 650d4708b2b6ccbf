// Attention over pages, one item per (unit, KV head).
#pragma once

#include <cstdint>

#include "runtime/buffers.h"
#include "runtime/execution.h"

namespace invar {

class AttentionStep : public Step {
 public:
  Matrix q;
  Matrix out;       // data null: `act` takes the result
  Activations act;  // data null: `out` takes the result
  int64_t group;
  int64_t layer_offset;  // of the layer's first head in a page
  int64_t heads;
  float scale;
  float soft_cap;      // 0: none
  const float* sinks;  // [heads] or null
  int32_t head_dim, kv_heads;
  int64_t workspace_bytes;  // of the kernel for kQueryChunk tokens

  int64_t items(const Execution& execution, int64_t rows) const override;
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  int64_t scratch_bytes() const override;
  const char* kind() const override { return "attention"; }

 private:
  int64_t columns() const { return heads / kv_heads * head_dim; }  // of a KV head
  int64_t result_bytes() const { return kQueryChunk * columns() * 4; }
  AttentionItem item_of(const Execution& execution, const Worker& worker, const AttentionUnit& unit,
                        int64_t kv_head) const;
};

}  // namespace invar
