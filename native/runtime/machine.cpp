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
// Loops over independent chains: enough of them for two instructions of latency 6 a cycle, few
// enough for the registers. The empty asm keeps each step in the loop and its sum in a register.
constexpr int kChains = 12;

// Sums of 16 bits: kernels widen them once per block only. Products first, then sums, as kernels
// do: Zen 3 at 3.2 GHz runs 354 GOPS of it, and 335 of products and sums in turn.
constexpr int kAvx2Int8Chains = 6;
__attribute__((target("avx2"))) void avx2_int8_rounds() {
  const __m256i b = _mm256_set1_epi8(-2);
  __m256i a = _mm256_set1_epi8(3), sums[kAvx2Int8Chains] = {}, products[kAvx2Int8Chains];
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 6
    for (int i = 0; i < kAvx2Int8Chains; ++i) {
      asm volatile("" : "+x"(a));  // the product is taken anew every time
      products[i] = _mm256_maddubs_epi16(a, b);
      asm volatile("" : "+x"(products[i]));
    }
#pragma GCC unroll 6
    for (int i = 0; i < kAvx2Int8Chains; ++i) {
      sums[i] = _mm256_add_epi16(sums[i], products[i]);
      asm volatile("" : "+x"(sums[i]));
    }
  }
}
constexpr double kAvx2Int8Operations = 2.0 * 32 * kAvx2Int8Chains * kRounds;

__attribute__((target("avx512f,avx512bw,avx512vnni"))) void avx512_int8_rounds() {
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
  __m512i sums[kChains] = {};
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
      asm volatile("" : "+v"(sums[i]));
    }
  }
}
constexpr double kAvx512Int8Operations = 2.0 * 64 * kChains * kRounds;

// Without bf16 hardware a pair is two fp32 fmas, so the fma rate is the bf16 rate.
__attribute__((target("avx2,fma"))) void avx2_fma_rounds() {
  const __m256 a = _mm256_set1_ps(3), b = _mm256_set1_ps(-2);
  __m256 sums[kChains] = {};
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
      asm volatile("" : "+x"(sums[i]));
    }
  }
}
constexpr double kAvx2FmaOperations = 2.0 * 8 * kChains * kRounds;

__attribute__((target("avx512f"))) void avx512_fma_rounds() {
  const __m512 a = _mm512_set1_ps(3), b = _mm512_set1_ps(-2);
  __m512 sums[kChains] = {};
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
      asm volatile("" : "+v"(sums[i]));
    }
  }
}
constexpr double kAvx512FmaOperations = 2.0 * 16 * kChains * kRounds;

__attribute__((target("avx512f,avx512bf16"))) void avx512_bf16_rounds() {
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x4040), b = (__m512bh)_mm512_set1_epi16(0x4000);
  __m512 sums[kChains] = {};
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
      asm volatile("" : "+v"(sums[i]));
    }
  }
}
constexpr double kAvx512Bf16Operations = 2.0 * 32 * kChains * kRounds;

// 10^9 operations per second of `threads` threads that all repeat `rounds`.
double rate_gops(void (*rounds)(), double operations, int threads, double seconds) {
  std::atomic<int64_t> done{0};
  const auto start = Clock::now();
  ThreadPool::instance().run(threads, [&](int) {
    while (seconds_since(start) < seconds) {
      rounds();
      done.fetch_add(1, std::memory_order_relaxed);
    }
  });
  return static_cast<double>(done.load()) * operations / seconds_since(start) / 1e9;
}
#endif

// Reads two places in turn and asks for both 2 KiB ahead. One core of Zen 3 took 24 GB/s so, 19
// from one place, 16 without asking; two cores 41, 36 and 29 (19, 15, 12 and 29, 26, 22 in an hour
// when others took a share). More places or more ahead: no more.
uint64_t read_all(const uint8_t* data, int64_t bytes) {
  constexpr int64_t kLine = 64, kAhead = 2048;
  const int64_t half = bytes / 2 / kLine * kLine;
  uint64_t sums[8] = {};
  const auto read_line = [&sums](const uint8_t* line) {
    __builtin_prefetch(line + kAhead);
    uint64_t words[8];
    std::memcpy(words, line, sizeof words);
    for (int j = 0; j < 8; ++j) sums[j] ^= words[j];
  };
  for (int64_t i = 0; i < half; i += kLine) {
    read_line(data + i);
    read_line(data + half + i);
  }
  uint64_t all = 0;
  for (uint64_t sum : sums) all ^= sum;
  return all;
}

}  // namespace

double int8_peak_gops([[maybe_unused]] int threads, [[maybe_unused]] double seconds) {
#if defined(INVAR_X86)
  if (__builtin_cpu_supports("avx512vnni")) {
    return rate_gops(avx512_int8_rounds, kAvx512Int8Operations, threads, seconds);
  }
  if (__builtin_cpu_supports("avx2")) {
    return rate_gops(avx2_int8_rounds, kAvx2Int8Operations, threads, seconds);
  }
#endif
  return 0;
}

double bf16_peak_gflops([[maybe_unused]] int threads, [[maybe_unused]] double seconds) {
#if defined(INVAR_X86)
  if (__builtin_cpu_supports("avx512bf16")) {
    return rate_gops(avx512_bf16_rounds, kAvx512Bf16Operations, threads, seconds);
  }
  if (__builtin_cpu_supports("fma")) {
    return rate_gops(avx2_fma_rounds, kAvx2FmaOperations, threads, seconds);
  }
#endif
  return 0;
}

double fp32_peak_gflops([[maybe_unused]] int threads, [[maybe_unused]] double seconds) {
#if defined(INVAR_X86)
  if (__builtin_cpu_supports("avx512f")) {
    return rate_gops(avx512_fma_rounds, kAvx512FmaOperations, threads, seconds);
  }
  if (__builtin_cpu_supports("fma")) {
    return rate_gops(avx2_fma_rounds, kAvx2FmaOperations, threads, seconds);
  }
#endif
  return 0;
}

double read_rate_gbs(const Memory& memory, int threads, double seconds) {
  const int64_t share = memory.bytes() / threads / 64 * 64;
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
