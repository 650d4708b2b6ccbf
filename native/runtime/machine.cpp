#include "runtime/machine.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "runtime/memory.h"
#include "runtime/threads.h"

namespace invar {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps a result alive without storing it anywhere that matters.
void consume(uint64_t value) {
  static std::atomic<uint64_t> sink{0};
  sink.fetch_xor(value, std::memory_order_relaxed);
}

constexpr int kRounds = 4096;  // between two looks at the clock, about 10 microseconds

#if defined(INVAR_X86)
// One round: 12 independent chains, enough for any latency at two instructions a cycle. Sums of 16
// bits: kernels widen them once per block only.
__attribute__((target("avx2"))) void avx2_rounds() {
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-2);
  __m256i sums[12] = {};
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
      __m256i x = a;
      asm volatile("" : "+x"(x));  // the product is taken anew every time
      sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(x, b));
    }
  }
  for (const __m256i& sum : sums) consume(static_cast<uint64_t>(_mm256_extract_epi64(sum, 0)));
}
constexpr double kAvx2Operations = 2.0 * 32 * 12 * kRounds;

__attribute__((target("avx512f,avx512bw,avx512vnni"))) void avx512_rounds() {
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
  __m512i sums[12] = {};
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
      asm volatile("" : "+v"(sums[i]));
    }
  }
  for (const __m512i& sum : sums) {
    uint64_t words[8];
    _mm512_storeu_si512(words, sum);
    consume(words[0]);
  }
}
constexpr double kAvx512Operations = 2.0 * 64 * 12 * kRounds;
#endif

uint64_t read_all(const uint8_t* data, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    uint64_t words[8];
    std::memcpy(words, data + i, 64);
    for (int j = 0; j < 8; ++j) sums[j] ^= words[j];
  }
  uint64_t all = 0;
  for (uint64_t sum : sums) all ^= sum;
  return all;
}

}  // namespace

double int8_peak_gops([[maybe_unused]] int threads, [[maybe_unused]] double seconds) {
#if defined(INVAR_X86)
  void (*rounds)() = nullptr;
  double operations = 0;
  if (__builtin_cpu_supports("avx512vnni")) {
    rounds = avx512_rounds;
    operations = kAvx512Operations;
  } else if (__builtin_cpu_supports("avx2")) {
    rounds = avx2_rounds;
    operations = kAvx2Operations;
  }
  if (rounds == nullptr) return 0;
  std::atomic<int64_t> done{0};
  const auto start = Clock::now();
  ThreadPool::instance().run(threads, [&](int) {
    while (seconds_since(start) < seconds) {
      rounds();
      done.fetch_add(1, std::memory_order_relaxed);
    }
  });
  return static_cast<double>(done.load()) * operations / seconds_since(start) / 1e9;
#else
  return 0;
#endif
}

double read_rate_gbs(int threads, int64_t bytes, double seconds) {
  const Memory memory(bytes);
  std::memset(memory.data(), 1, static_cast<size_t>(bytes));
  const int64_t share = bytes / threads / 64 * 64;
  std::atomic<int64_t> read{0};
  const auto start = Clock::now();
  ThreadPool::instance().run(threads, [&](int thread) {
    // Shares are walked in pieces, so that a thread that was held up does not stretch the run.
    constexpr int64_t kPiece = int64_t{8} << 20;
    for (int64_t at = 0; seconds_since(start) < seconds; at += kPiece) {
      if (at >= share) at = 0;
      const int64_t length = at + kPiece <= share ? kPiece : share - at;
      consume(read_all(memory.data() + thread * share + at, length));
      read.fetch_add(length, std::memory_order_relaxed);
    }
  });
  return static_cast<double>(read.load()) / seconds_since(start) / 1e9;
}

}  // namespace invar
