#include "runtime/threads.h"

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace invar {
namespace {

constexpr int kMaxThreads = 1024;  // a number above it is a mistake, not a machine

#if defined(__x86_64__)
// All exceptions masked (0x1F80), round to nearest, flush-to-zero (bit 15), denormals-are-zero (6).
constexpr uint32_t kControl = 0x1F80 | 0x8000 | 0x0040;
#endif

}  // namespace

FloatState::FloatState() {
#if defined(__x86_64__)
  saved_ = _mm_getcsr();
  _mm_setcsr(kControl);
#elif defined(__aarch64__)
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24));  // FZ, round to nearest
#endif
}

FloatState::~FloatState() {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<uint32_t>(saved_));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(saved_));
#endif
}

ThreadPool& ThreadPool::instance() {
  // Never destroyed: workers may still sleep in it when the process exits.
  static std::mutex lock;
  static ThreadPool* pool = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> guard(lock);
  if (pool == nullptr || owner != getpid()) {
    pool = new ThreadPool;  // after a fork the parent's pool stays behind, its threads are gone
    owner = getpid();
  }
  return *pool;
}

void ThreadPool::reserve(int threads) {
  const std::lock_guard<std::mutex> guard(region_);
  reserve_locked(threads);
}

void ThreadPool::reserve_locked(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("threads: " + std::to_string(threads) + " is not in [1, " +
                                std::to_string(kMaxThreads) + "]");
  }
  while (static_cast<int>(workers_.size()) + 1 < threads) {
    auto worker = std::make_unique<Worker>();
    const int thread = static_cast<int>(workers_.size()) + 1;
    std::thread([this, w = worker.get(), thread] { work(*w, thread); }).detach();
    workers_.push_back(std::move(worker));
  }
}

void ThreadPool::run(int threads, Body body, void* context) {
  const std::lock_guard<std::mutex> guard(region_);
  reserve_locked(threads);
  body_ = body;
  context_ = context;
  error_ = nullptr;
  running_.store(threads - 1, std::memory_order_relaxed);
  for (int i = 0; i < threads - 1; ++i) {
    workers_[i]->regions.fetch_add(1, std::memory_order_release);
    workers_[i]->regions.notify_one();
  }
  {
    const FloatState state;
    call(0);
  }
  for (;;) {
    const int32_t running = running_.load(std::memory_order_acquire);
    if (running == 0) break;
    wait_while(running_, running);
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::work(Worker& worker, int thread) {
  const FloatState state;
  for (uint32_t done = 0;; ++done) {
    wait_while(worker.regions, done);
    call(thread);
    running_.fetch_sub(1, std::memory_order_acq_rel);
    running_.notify_one();
  }
}

void ThreadPool::call(int thread) noexcept {
  try {
    body_(context_, thread);
  } catch (...) {
    const std::lock_guard<std::mutex> guard(error_lock_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace invar
