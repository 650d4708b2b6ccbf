#include "runtime/plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace invar {

Plan::Plan(const Kernels& kernels, const PlanLimits& limits, uint8_t* scratch)
    : limits_(limits), scratch_(scratch) {
  const size_t tokens = static_cast<size_t>(limits.max_tokens);
  execution_.kernels = &kernels;
  execution_.token_ids.resize(tokens);
  execution_.token_sequence.resize(tokens);
  execution_.token_position.resize(tokens);
  execution_.masks.resize(tokens);
  // A chunk holds at least one token.
  execution_.query_sequence.resize(tokens);
  execution_.query_first_row.resize(tokens);
  samples_.resize(tokens);
  ThreadPool::instance().reserve(limits.threads);
}

int64_t Plan::add_cache_group(const CacheGroup& group) {
  const PageMap& pages = group.pages;
  if (pages.page_bytes <= 0 || pages.pages_per_slab <= 0 ||
      pages.page_bytes * pages.pages_per_slab > pages.slab_bytes) {
    throw std::invalid_argument("cache group: " + std::to_string(pages.pages_per_slab) +
                                " pages of " + std::to_string(pages.page_bytes) +
                                " bytes do not fit a slab of " +
                                std::to_string(pages.slab_bytes) + " bytes");
  }
  if (execution_.groups.size() == kMaxCacheGroups) {
    throw std::invalid_argument("a plan has at most " + std::to_string(kMaxCacheGroups) +
                                " cache groups");
  }
  execution_.groups.push_back(group);
  return static_cast<int64_t>(execution_.groups.size()) - 1;
}

void Plan::add(std::unique_ptr<Step> step) {
  if (step->scratch_bytes() > limits_.scratch_bytes) {
    throw std::invalid_argument(std::string(step->kind()) + " step: needs " +
                                std::to_string(step->scratch_bytes()) +
                                " bytes of scratch per thread, planned are " +
                                std::to_string(limits_.scratch_bytes));
  }
  (in_head_ ? head_ : body_).push_back(std::move(step));
}

void Plan::run(const BatchView& batch) {
  const std::lock_guard<std::mutex> guard(running_);
  check(batch);
  prepare(batch);
  failed_.store(false, std::memory_order_relaxed);
  barrier_.reset(limits_.threads);
  for (Counter& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
  ThreadPool::instance().run(limits_.threads, [this](int thread) { run_thread(thread); });
  execution_.batch = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  std::copy_n(batch.result.token_ids, batch.logit_count, samples_.begin());
  sample_count_ = batch.logit_count;
}

void Plan::run_thread(int thread) {
  Worker worker;
  worker.index = thread;
  worker.count = limits_.threads;
  worker.progress = &progress_;
  worker.scratch =
      scratch_ + thread * (limits_.scratch_bytes + limits_.sampling_scratch_bytes);
  worker.sampling_scratch = worker.scratch + limits_.scratch_bytes;
  uint32_t phase = 0;
  worker.rows = execution_.rows;
  for (const auto& step : body_) run_step(*step, worker, phase++);
  const int64_t logits = execution_.batch->logit_count;
  for (int64_t first = 0; first < logits; first += kHeadRows) {
    worker.first_logit = first;
    worker.rows = std::min(kHeadRows, logits - first);
    for (const auto& step : head_) run_step(*step, worker, phase++);
  }
}

void Plan::run_step(const Step& step, Worker& worker, uint32_t phase) {
  const auto start = profile_ ? std::chrono::steady_clock::now()
                              : std::chrono::steady_clock::time_point{};
  worker.next_item = &counters_[phase % 3].value;
  // Everyone here has left phase p - 2, whose counter phase p + 1 takes up.
  if (worker.index == 0) counters_[(phase + 1) % 3].value.store(0, std::memory_order_relaxed);
  if (!failed_.load(std::memory_order_relaxed)) {
    try {
      step.run(execution_, worker);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(error_lock_);
      if (!error_) error_ = std::current_exception();
      failed_.store(true, std::memory_order_relaxed);
    }
  }
  barrier_.arrive_and_wait();
  if (profile_ && worker.index == 0) {
    const auto spent = std::chrono::steady_clock::now() - start;
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
    for (StepTime& time : times_) {
      if (time.kind != step.kind()) continue;
      ++time.calls;
      time.nanoseconds += ns;
      return;
    }
    times_.push_back({step.kind(), 1, ns});
  }
}

std::vector<StepTime> Plan::profile() const { return times_; }

void Plan::clear_pages(int64_t group, const int32_t* pages, int64_t count) const {
  const CacheGroup& cache = execution_.groups.at(group);
  for (int64_t i = 0; i < count; ++i) {
    if (pages[i] < 0 || pages[i] >= cache.page_count) {
      throw std::invalid_argument("page " + std::to_string(pages[i]) + " is not one of the " +
                                  std::to_string(cache.page_count) + " of its group");
    }
    std::memset(cache.pages.at(pages[i]), 0xFF, cache.pages.page_bytes);
  }
}

}  // namespace invar
