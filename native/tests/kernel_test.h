// What the tests of kernels share: named checks, the instruction sets of this CPU, guarded memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/kernels.h"

namespace kernel_test {

inline int failures = 0;

inline bool check(bool ok, const std::string& what) {
  if (!ok && ++failures <= 40) printf("FAILED: %s\n", what.c_str());
  return ok;
}

inline int finish(const char* name) {
  printf("%s: %s (%d failed)\n", name, failures ? "FAILED" : "ok", failures);
  return failures != 0;
}

inline const float kNaN = std::numeric_limits<float>::quiet_NaN();
inline const float kInf = std::numeric_limits<float>::infinity();
constexpr double kEps = 1.0 / (1 << 24);  // half an ulp of fp32 at 1
constexpr double kBf16Eps = 1.0 / 256;    // half an ulp of bf16 at 1

// The numeric contract holds with denormals flushed, as in every thread of the runtime.
inline void flush_denormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

struct Isa {
  const char* name;
  const invar::LinearKernels* linear;
  const invar::RowKernels* rows;
  const invar::AttentionKernels* attention;  // [KVFormat]
  const invar::SamplingKernels* sampling;
};

inline std::vector<Isa> instruction_sets() {
  using namespace invar;
#define INVAR_TABLES(isa) \
  {#isa, &isa::linear_kernels, &isa::row_kernels, isa::attention_kernels, &isa::sampling_kernels}
  std::vector<Isa> r = {INVAR_TABLES(portable)};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    r.push_back(INVAR_TABLES(avx2));
  else
    printf("skipped: avx2 (not on this CPU)\n");
#if defined(INVAR_EMULATED)  // the avx512 objects were built over tests/emulated
  const bool avx512 = true;
#else
  const bool avx512 = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#endif
  if (avx512)
    r.push_back(INVAR_TABLES(avx512));
  else
    printf("skipped: avx512 (not on this CPU)\n");
#endif
#undef INVAR_TABLES
  return r;
}

// n floats at `misalign` floats past a 64-byte boundary, guard bytes on both sides.
class Guarded {
 public:
  explicit Guarded(size_t n, int misalign = 0, float fill = kNaN) : n_(n), bytes_(n * 4 + 512) {
    memset(bytes_.data(), 0xA5, bytes_.size());
    const auto base = (reinterpret_cast<uintptr_t>(bytes_.data()) + 64 + 63) / 64 * 64;
    data_ = reinterpret_cast<float*>(base + 4 * size_t(misalign));
    for (size_t i = 0; i < n; i++) data_[i] = fill;
  }
  float* data() { return data_; }
  float& operator[](size_t i) { return data_[i]; }
  bool intact() const {
    const uint8_t* first = reinterpret_cast<const uint8_t*>(data_);
    for (const uint8_t& b : bytes_)
      if ((&b < first || &b >= first + 4 * n_) && b != 0xA5) return false;
    return true;
  }

 private:
  size_t n_;
  std::vector<uint8_t> bytes_;
  float* data_;
};

// Bits, not values: NaN equals the same NaN, +0 differs from -0.
inline bool same_bits(const float* a, const float* b, size_t n) {
  return n == 0 || memcmp(a, b, n * 4) == 0;
}

inline std::vector<float> normal(std::mt19937& random, size_t n, float sigma = 1.0f) {
  std::normal_distribution<float> d(0, sigma);
  std::vector<float> x(n);
  for (float& v : x) v = d(random);
  return x;
}

}  // namespace kernel_test
