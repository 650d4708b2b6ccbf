#include "runtime/plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace invar {

Plan::Plan(const Kernels& kernels, const PlanLimits& limits, uint8_t* scratch)
    : limits_(limits), scratch_(scratch) {
  const size_t tokens = static_cast<size_t>(limits.max_tokens);
  execution_.kernels = &kernels;
  execution_.threads = limits.threads;
  execution_.token_ids.resize(tokens);
  execution_.token_sequence.resize(tokens);
  execution_.token_position.resize(tokens);
  execution_.masks.resize(tokens);
  execution_.partials =
      scratch + limits.threads * (limits.scratch_bytes + limits.sampling_scratch_bytes);
  execution_.counters = std::make_unique<std::atomic<int32_t>[]>(max_split_items(limits.threads));
  samples_.resize(tokens);
  ThreadPool::instance().reserve(limits.threads);
}

int64_t Plan::add_cache_group(const CacheGroup& group) {
  const PageMap& pages = group.pages;
  if (pages.page_bytes <= 0 || pages.pages_per_slab <= 0 ||
      pages.page_bytes * pages.pages_per_slab > pages.slab_bytes) {
    throw std::invalid_argument("cache group: " + std::to_string(pages.pages_per_slab) +
                                " pages of " + std::to_string(pages.page_bytes) +
                                " bytes do not fit a slab of " + std::to_string(pages.slab_bytes) +
                                " bytes");
  }
  if (execution_.groups.size() == kMaxCacheGroups) {
    throw std::invalid_argument("a plan has at most " + std::to_string(kMaxCacheGroups) +
                                " cache groups");
  }
  execution_.groups.push_back(group);
  execution_.units.emplace_back();
  execution_.units.back().reserve(limits_.max_tokens + limits_.partials);
  return static_cast<int64_t>(execution_.groups.size()) - 1;
}

void Plan::add(std::unique_ptr<Step> step) {
  if (step->scratch_bytes() > limits_.scratch_bytes) {
    throw std::invalid_argument(
        std::string(step->kind()) + " step: needs " + std::to_string(step->scratch_bytes()) +
        " bytes of scratch per thread, planned are " + std::to_string(limits_.scratch_bytes));
  }
  times_.push_back({step->kind()});
  (in_head_ ? head_ : body_).push_back(std::move(step));
}

void Plan::run(const BatchView& batch) {
  const std::lock_guard<std::mutex> guard(running_);
  check(batch);
  prepare(batch);
  failed_.store(false, std::memory_order_relaxed);
  if (profile_) phase_start_ = std::chrono::steady_clock::now();
  start_phase(0, nullptr);
  ThreadPool::instance().run(limits_.threads, [this](int thread) { run_thread(thread); });
  execution_.batch = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  std::copy_n(batch.result.token_ids, batch.logit_count, samples_.begin());
  sample_count_ = batch.logit_count;
}

uint32_t Plan::phase_count() const {
  const int64_t tiles = (execution_.batch->logit_count + kHeadRows - 1) / kHeadRows;
  return static_cast<uint32_t>(body_.size() + tiles * head_.size());
}

Plan::Phase Plan::phase_at(uint32_t index) const {
  if (index < body_.size()) return {body_[index].get(), execution_.rows, 0};
  const int64_t in_head = static_cast<int64_t>(index - body_.size());
  const int64_t tile = in_head / static_cast<int64_t>(head_.size());
  const int64_t first = tile * kHeadRows;
  return {head_[in_head % static_cast<int64_t>(head_.size())].get(),
          std::min(kHeadRows, execution_.batch->logit_count - first), first};
}

// Opens the first phase from `first` on that has items to share, or the end. The caller alone may
// do this: before the region (`worker` null), or as the one who finished the last item of the phase
// before. That one also runs the phases of a single item that follow, such as the norms of a lone
// sequence: nobody could help, and a handover costs as much as they do.
void Plan::start_phase(uint32_t first, Worker* worker) {
  uint32_t next = first;
  for (; next < phase_count(); ++next) {
    const Phase phase = phase_at(next);
    const int64_t items = phase.step->items(execution_, phase.rows);
    if (items > 1 || (items == 1 && worker == nullptr)) break;
    if (items == 0) continue;
    run_item(phase, *worker, 0);
    if (profile_) record_time(next);
  }
  done_.store(0, std::memory_order_relaxed);
  // The ticket last: from then on others may run this phase and all that follow, and a late store
  // to `current_` would take it backwards under a thread that waits for it to advance.
  current_.store(next, std::memory_order_release);
  ticket_.store(uint64_t{next} << 32, std::memory_order_release);
  current_.notify_all();
}

void Plan::run_thread(int thread) {
  Worker worker;
  worker.scratch = scratch_ + thread * (limits_.scratch_bytes + limits_.sampling_scratch_bytes);
  worker.sampling_scratch = worker.scratch + limits_.scratch_bytes;
  const uint32_t end = phase_count();
  for (;;) {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    const uint32_t index = static_cast<uint32_t>(ticket >> 32);
    if (index >= end) return;
    const Phase phase = phase_at(index);
    const int64_t items = phase.step->items(execution_, phase.rows);
    const int64_t item = static_cast<int64_t>(ticket & 0xFFFFFFFF);
    if (item >= items) {
      wait_while(current_, index);
      continue;
    }
    run_item(phase, worker, item);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == items) {
      if (profile_) record_time(index);
      start_phase(index + 1, &worker);
    }
  }
}

void Plan::run_item(const Phase& phase, Worker& worker, int64_t item) {
  worker.rows = phase.rows;
  worker.first_logit = phase.first_logit;
  std::atomic_ref(*progress_).fetch_add(1, std::memory_order_relaxed);
  if (failed_.load(std::memory_order_relaxed)) return;  // the step is lost: only finish it
  try {
    phase.step->run(execution_, worker, item);
  } catch (...) {
    const std::lock_guard<std::mutex> guard(error_lock_);
    if (!error_) error_ = std::current_exception();
    failed_.store(true, std::memory_order_relaxed);
  }
}

// Among body and head, the head's steps following the body's.
size_t Plan::step_index(uint32_t phase) const {
  if (phase < body_.size()) return phase;
  return body_.size() + (phase - body_.size()) % head_.size();
}

void Plan::record_time(uint32_t phase) {
  const auto now = std::chrono::steady_clock::now();
  StepTime& time = times_[step_index(phase)];
  ++time.calls;
  time.nanoseconds +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(now - phase_start_).count();
  phase_start_ = now;
}

std::vector<StepTime> Plan::profile() const { return times_; }

void Plan::clear_pages(int64_t group, const int32_t* pages, int64_t count) const {
  const CacheGroup& cache = execution_.groups.at(group);
  for (int64_t i = 0; i < count; ++i) {
    std::memset(page_at(cache, pages[i]), 0xFF, cache.pages.page_bytes);
  }
}

void Plan::copy_pages(int64_t group, const int32_t* sources, const int32_t* targets,
                      int64_t count) const {
  const CacheGroup& cache = execution_.groups.at(group);
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* source = page_at(cache, sources[i]);
    std::memcpy(page_at(cache, targets[i]), source, cache.pages.page_bytes);
  }
}

void Plan::read_pages(int64_t group, const int32_t* pages, int64_t count, uint8_t* target) const {
  const CacheGroup& cache = execution_.groups.at(group);
  const int64_t bytes = cache.pages.page_bytes;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(target + i * bytes, page_at(cache, pages[i]), bytes);
  }
}

void Plan::write_pages(int64_t group, const int32_t* pages, int64_t count,
                       const uint8_t* source) const {
  const CacheGroup& cache = execution_.groups.at(group);
  const int64_t bytes = cache.pages.page_bytes;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(page_at(cache, pages[i]), source + i * bytes, bytes);
  }
}

uint8_t* Plan::page_at(const CacheGroup& group, int32_t page) const {
  if (page < 0 || page >= group.page_count) {
    throw std::invalid_argument("page " + std::to_string(page) + " is not one of the " +
                                std::to_string(group.page_count) + " of its group");
  }
  return group.pages.at(page);
}

}  // namespace invar
