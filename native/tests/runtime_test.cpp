// Threads, memory and the pieces of the plan executor that need no model.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_test.h"
#include "runtime/buffers.h"
#include "runtime/cpu.h"
#include "runtime/machine.h"
#include "runtime/memory.h"
#include "runtime/plan.h"
#include "runtime/threads.h"

namespace {

using namespace invar;
using kernel_test::check;

void test_every_thread_runs_once_per_region() {
  for (int threads : {1, 2, 3, 7, 2}) {
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> runs(threads);
      ThreadPool::instance().run(threads, [&](int thread) { runs[thread].fetch_add(1); });
      for (auto& count : runs) {
        if (!check(count.load() == 1, "a region runs once on every thread")) return;
      }
    }
  }
}

void test_an_exception_reaches_the_caller() {
  std::string what;
  try {
    ThreadPool::instance().run(3, [](int thread) {
      if (thread == 2) throw std::runtime_error("from thread 2");
    });
  } catch (const std::runtime_error& error) {
    what = error.what();
  }
  check(what == "from thread 2", "the caller sees the exception of a worker");
  std::atomic<int> runs{0};
  ThreadPool::instance().run(3, [&](int) { runs.fetch_add(1); });
  check(runs.load() == 3, "the pool lives on after an exception");
}

void test_denormals_are_flushed_everywhere() {
  volatile float tiny = std::numeric_limits<float>::min();
  volatile float half = 0.5f;
  std::atomic<int> flushed{0};
  ThreadPool::instance().run(3, [&](int) { flushed += tiny * half == 0.0f; });
  check(flushed.load() == 3, "denormals are flushed in every thread of a region");
  check(tiny * half != 0.0f, "the caller's own state returns afterwards");
}

void test_a_forked_child_has_a_pool() {
  ThreadPool::instance().reserve(3);
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> runs{0};
    ThreadPool::instance().run(3, [&](int) { runs.fetch_add(1); });
    _exit(runs.load() == 3 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  check(status == 0, "a forked child computes with threads of its own");
}

void test_memory() {
  const Memory memory(3 << 20);
  check(reinterpret_cast<uintptr_t>(memory.data()) % (2 << 20) == 0, "memory starts on 2 MiB");
  bool zero = true;
  for (int64_t i = 0; i < memory.bytes(); i += 64) zero &= memory.data()[i] == 0;
  check(zero, "memory is zero");
  int refused = 0;
  for (int64_t length : {int64_t{1}, std::numeric_limits<int64_t>::max()}) {
    try {
      memory.range(memory.bytes(), length);
    } catch (const std::out_of_range&) {
      ++refused;
    }
  }
  check(refused == 2, "a range behind the end is refused");
}

// Pieces of a row have the bytes of the whole row.
void test_quantised_columns(const Kernels& kernels, ActFormat format) {
  constexpr int64_t kColumns = 1024;
  std::vector<float> x(kColumns);
  for (int64_t i = 0; i < kColumns; ++i) x[i] = static_cast<float>((i * 37 % 101) - 50) / 7;
  const ActLayout layout = act_layout(format, kColumns);
  const Memory whole(layout.row_bytes), pieces(layout.row_bytes);
  kernels.linear->quantize(format, x.data(), kColumns, whole.data());
  for (int64_t first = 0, width = 256; first < kColumns; first += width) {
    kernels.linear->quantize_columns(format, layout, x.data() + first, first, width, pieces.data());
  }
  check(std::memcmp(whole.data(), pieces.data(), layout.row_bytes) == 0,
        "a row quantised in pieces, format " + std::to_string(static_cast<int>(format)));
}

// Counts how often every item ran, and that no phase begins before the one before has ended.
class CountingStep : public Step {
 public:
  CountingStep(int64_t count, std::atomic<int64_t>& finished, int64_t before)
      : runs_(count), finished_(finished), before_(before) {}
  int64_t items(const Execution&, int64_t) const override {
    return static_cast<int64_t>(runs_.size());
  }
  void run(const Execution&, const Worker&, int64_t item) const override {
    if (finished_.load() < before_) early_.store(true);
    runs_[item].fetch_add(1);
    finished_.fetch_add(1);
  }
  const char* kind() const override { return "counting"; }
  bool correct(int times) const {
    for (auto& runs : runs_) {
      if (runs.load() != times) return false;
    }
    return !early_.load();
  }

 private:
  mutable std::vector<std::atomic<int>> runs_;
  mutable std::atomic<bool> early_{false};
  std::atomic<int64_t>& finished_;
  int64_t before_;
};

class ThrowingStep : public Step {
 public:
  int64_t items(const Execution&, int64_t) const override { return 5; }
  void run(const Execution&, const Worker&, int64_t item) const override {
    if (item == 3) throw std::runtime_error("item 3");
  }
  const char* kind() const override { return "throwing"; }
};

void test_phases() {
  for (int threads : {1, 2, 5}) {
    const Memory scratch(threads * 128);
    Plan plan(kernels(), {4, 1, 10, 10, threads, 64, 64}, scratch.data());
    std::atomic<int64_t> finished{0};
    std::vector<const CountingStep*> steps;
    int64_t before = 0;
    for (int64_t count : {3, 1, 0, 17, 0, 0, 1, 64, 2, 0}) {
      auto step = std::make_unique<CountingStep>(count, finished, before);
      before += count;
      steps.push_back(step.get());
      plan.add(std::move(step));
    }
    const BatchView empty{};
    for (int round = 1; round <= 50; ++round) {
      finished.store(0);
      plan.run(empty);
      for (const CountingStep* step : steps) {
        if (!check(step->correct(round), "every item once, phases in order")) return;
      }
    }
    plan.add(std::make_unique<ThrowingStep>());
    bool thrown = false;
    try {
      plan.run(empty);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    check(thrown, "an item's exception reaches the caller of the step");
  }
}

void test_instruction_sets() {
  std::string message;
  try {
    kernels_for("sse9");
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  check(message.find("portable") != std::string::npos, "an unknown set names the known ones");
  for (const std::string& isa : available_isas()) {
    for (ActFormat format :
         {ActFormat::f32, ActFormat::bf16, ActFormat::q8_32, ActFormat::q8_256}) {
      test_quantised_columns(kernels_for(isa), format);
    }
  }
}

// An integer product takes a quarter of an fp32 one's bits and at most two instructions; a limit
// that lost its loop to the optimiser would be off by far more than these factors.
void test_peaks() {
#if defined(INVAR_X86)
  if (!__builtin_cpu_supports("fma")) return;
  double int8 = 0, bf16 = 0;
  for (int round = 0; round < 10; ++round) {  // the best of ten: others may hold the core
    int8 = std::max(int8, int8_peak_gops(1, 0.01));
    bf16 = std::max(bf16, bf16_peak_gflops(1, 0.01));
  }
  check(bf16 > 0 && int8 > bf16 && int8 < 8 * bf16, "int8 and bf16 peaks");
#endif
}

}  // namespace

int main() {
  test_every_thread_runs_once_per_region();
  test_an_exception_reaches_the_caller();
  test_denormals_are_flushed_everywhere();
  test_a_forked_child_has_a_pool();
  test_memory();
  test_phases();
  test_instruction_sets();
  test_peaks();
  return kernel_test::finish("runtime_test");
}
