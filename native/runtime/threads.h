// The process's one pool of threads, how they wait, and the floating-point state of a region.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace invar {

// How long a waiter spins before it sleeps. A phase of a decode step takes 5 to 50 microseconds and
// a futex wake-up about as long again; longer spinning only hurts others when a machine is shared.
constexpr std::chrono::microseconds kSpinTime{40};

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins, then sleeps, until `value` differs from `old`.
template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  const auto limit = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < limit);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// Denormals flushed, rounding to nearest, exceptions masked; the old state returns on destruction.
// Every thread that computes holds one, the caller's too: a tile's bits may not depend on who ran
// it.
class FloatState {
 public:
  FloatState();
  ~FloatState();
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
  uint64_t saved_;
};

class ThreadPool {
 public:
  // The pool of this process; a forked child gets a pool of its own (threads do not survive fork).
  static ThreadPool& instance();

  // Runs body(thread) for thread in [0, threads), thread 0 being the caller, inside FloatState.
  // One region at a time: others wait. Rethrows the first exception of any thread after all ended.
  template <class Body>
  void run(int threads, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(
        threads, [](void* context, int thread) { (*static_cast<Plain*>(context))(thread); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Starts workers so that a region of `threads` needs no new ones.
  void reserve(int threads);

 private:
  using Body = void (*)(void* context, int thread);
  struct alignas(64) Worker {
    std::atomic<uint32_t> regions{0};  // advanced by the caller: one more region to run
  };

  void run(int threads, Body body, void* context);
  void reserve_locked(int threads);
  void work(Worker& worker, int thread);
  void call(int thread) noexcept;

  std::mutex region_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Body body_ = nullptr;
  void* context_ = nullptr;
  std::mutex error_lock_;
  std::exception_ptr error_;
  alignas(64) std::atomic<int32_t> running_{0};
};

}  // namespace invar
