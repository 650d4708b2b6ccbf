// A plan: native steps over pre-planned buffers, recorded once and replayed for every batch.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/batch.h"
#include "runtime/execution.h"
#include "runtime/threads.h"

namespace invar {

// Logit rows go through the head in tiles of this many, so that the logits buffer does not grow
// with the number of requests.
constexpr int64_t kHeadRows = 64;

struct PlanLimits {
  int64_t max_tokens;      // per step
  int64_t max_sequences;   // per step
  int64_t embedding_rows;  // token ids that have an embedding
  int64_t vocab;           // ids that can be sampled
  int threads;
  int64_t scratch_bytes;           // per thread, a multiple of 64
  int64_t sampling_scratch_bytes;  // per thread, a multiple of 64
  int64_t partials = 0;            // of attention (runtime/attention_units.h)
  int64_t partial_bytes = 0;       // of one of them, a multiple of 64

  int64_t all_scratch_bytes() const {
    return threads * (scratch_bytes + sampling_scratch_bytes) + partials * partial_bytes;
  }
};

struct StepTime {
  const char* kind;
  int64_t calls = 0;
  int64_t nanoseconds = 0;  // from the end of the phase before to its own end
};

class Plan {
 public:
  // `scratch`: all_scratch_bytes(), 64-byte aligned and zero.
  Plan(const Kernels& kernels, const PlanLimits& limits, uint8_t* scratch);

  // Pages of a cache group; returns its number. Throws std::invalid_argument if slab and page sizes
  // do not fit together.
  int64_t add_cache_group(const CacheGroup& group);

  // Appends a step to the body or, after begin_head, to the head. Throws std::invalid_argument if
  // it wants more scratch than was planned.
  void add(std::unique_ptr<Step> step);
  void begin_head() { in_head_ = true; }
  bool in_head() const { return in_head_; }
  // Refuses batches with a position past the first `count`: a step has no more to read.
  void limit_positions(int64_t count) { positions_ = std::min(positions_, count); }

  // Runs one batch on all threads, body once, head per tile of logit rows. Throws
  // std::invalid_argument for a batch that does not fit the plan (nothing has run then).
  void run(const BatchView& batch);

  // Fills pages with NaN: bf16 and fp32 alike read it as such.
  void clear_pages(int64_t group, const int32_t* pages, int64_t count) const;

  // Copies whole pages one to one; no page is both read and written. Throws std::invalid_argument
  // for a page that does not exist.
  void copy_pages(int64_t group, const int32_t* sources, const int32_t* targets,
                  int64_t count) const;

  // Whole pages of a group out to `target`, or in from `source`, one after another. Throws
  // std::invalid_argument for a page that does not exist.
  void read_pages(int64_t group, const int32_t* pages, int64_t count, uint8_t* target) const;
  void write_pages(int64_t group, const int32_t* pages, int64_t count, const uint8_t* source) const;

  void set_profile(bool on) { profile_ = on; }
  // Of every step, body first, since profiling was switched on; a step without items is not called.
  std::vector<StepTime> profile() const;

  // Advanced per item of work. Standing still while a step runs means a hang.
  uint64_t progress() const { return std::atomic_ref(*progress_).load(std::memory_order_relaxed); }
  // Counts in `progress` from now on, which may be memory that other processes see: 8-byte aligned,
  // in a cache line of its own, and alive as long as the plan. Not while a step runs.
  void count_in(uint64_t* progress) { progress_ = progress; }
  const Kernels& kernels() const { return *execution_.kernels; }
  const PlanLimits& limits() const { return limits_; }
  const CacheGroup& cache_group(int64_t group) const { return execution_.groups.at(group); }

 private:
  void check(const BatchView& batch) const;
  uint8_t* page_at(const CacheGroup& group, int32_t page) const;
  void check_sequence(const BatchView& batch, int64_t sequence) const;
  void check_sampling(const BatchView& batch) const;
  void prepare(const BatchView& batch);
  void place_tokens(const BatchView& batch);

  // Phase p of a step: a step of the body, or of the head for one tile of logit rows.
  struct Phase {
    const Step* step;
    int64_t rows;
    int64_t first_logit;
  };
  Phase phase_at(uint32_t index) const;
  uint32_t phase_count() const;
  void start_phase(uint32_t first, Worker* worker);
  void run_thread(int thread);
  void run_item(const Phase& phase, Worker& worker, int64_t item);
  size_t step_index(uint32_t phase) const;
  void record_time(uint32_t phase);

  PlanLimits limits_;
  uint8_t* scratch_;
  Execution execution_;
  std::vector<std::unique_ptr<Step>> body_, head_;
  bool in_head_ = false;
  int64_t positions_ = INT64_MAX;
  bool profile_ = false;
  std::vector<int32_t> samples_;  // of the previous step, for feedback
  int64_t sample_count_ = 0;

  std::mutex running_;
  // Threads do not meet at barriers: the next phase starts when all items of this one are done, so
  // that a thread which the system holds up between two items holds nobody up. `ticket_` is the
  // phase in the upper half and its next item in the lower; whoever takes a number runs that item,
  // also one who slept through phases. `current_` is what threads without an item wait for.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> current_{0};
  alignas(64) uint64_t own_progress_ = 0;
  alignas(64) uint64_t* progress_ = &own_progress_;
  std::atomic<bool> failed_{false};
  std::mutex error_lock_;
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point phase_start_;  // of the current phase, in profiles
  std::vector<StepTime> times_;                        // per step, body first
};

}  // namespace invar
