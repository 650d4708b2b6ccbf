// What a native step may read while it runs, and the interface of a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/attention_units.h"
#include "runtime/batch.h"

namespace invar {

// Pages of one cache group as the plan knows them.
struct CacheGroup {
  PageMap pages;
  int64_t page_count;  // in the arena
  int32_t kv_heads;
  int32_t head_dim;
  AttentionMask mask;
  KVFormat kv_format;

  int64_t head_bytes() const { return kv_head_bytes(kv_format, head_dim); }  // of a page
};

// Limits and tables of a plan, and the step that runs now. Written by Plan::prepare on the calling
// thread, read by all threads.
struct Execution {
  const Kernels* kernels;
  int threads = 1;
  std::vector<CacheGroup> groups;

  const BatchView* batch = nullptr;
  int64_t rows = 0;                // tokens that belong to a sequence; padding lies behind them
  std::vector<int32_t> token_ids;  // [max_tokens], feedback resolved
  std::vector<int32_t> token_sequence;               // [max_tokens]
  std::vector<int32_t> token_position;               // [max_tokens], in the KV cache
  std::vector<const uint32_t*> masks;                // [max_tokens], of the logit rows
  std::vector<std::vector<AttentionUnit>> units;     // per cache group, longest first
  uint8_t* partials = nullptr;                       // of splits that are units of their own
  std::unique_ptr<std::atomic<int32_t>[]> counters;  // of finished splits; zero between phases
};

// What one thread knows while it runs items of a phase.
struct Worker {
  int64_t rows = 0;            // of the part that runs: the step's tokens or the tile's logit rows
  int64_t first_logit = 0;     // of the tile, in the batch's logit_rows
  uint8_t* scratch = nullptr;  // Plan's scratch_bytes, 64-byte aligned
  uint8_t* sampling_scratch = nullptr;  // zero between uses
};

// Items per thread of a phase that could be cut anyhow. One would do on an idle machine; when a
// thread is held up, the others take over what it has not begun.
constexpr int64_t kItemsPerThread = 4;

// One phase of a plan: independent items of work. The next phase starts when all are done.
class Step {
 public:
  virtual ~Step() = default;
  // How many items `rows` rows make; depends on nothing that changes while the phase runs.
  virtual int64_t items(const Execution& execution, int64_t rows) const = 0;
  virtual void run(const Execution& execution, const Worker& worker, int64_t item) const = 0;
  virtual int64_t scratch_bytes() const { return 0; }  // of Worker::scratch
  virtual const char* kind() const = 0;                // for profiles
};

// Whether row r may start another item's rows: tokens 2i and 2i + 1 of a page lie interleaved in
// V, so that one thread writes both. Returns r or r + 1.
inline int64_t pair_boundary(const Execution& e, int64_t r) {
  const bool splits_pair = r > 0 && r < e.rows && e.token_sequence[r] == e.token_sequence[r - 1] &&
                           e.token_position[r] % 2 == 1;
  return splits_pair ? r + 1 : r;
}

}  // namespace invar
