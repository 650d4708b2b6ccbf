// What AVX2 allows the integer kernels at many rows: loops on registers alone of the operations
// that a register tile makes of a group of widened codes (gemm_int.h), in percent of the rate of
// the products alone. What is not of a single output is left out, and so are loads: codes, scales
// of columns, totals that wait in memory. Usage: ceiling_bench
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace {

constexpr int kOutputs = 8;    // of a tile: 4 rows x 2 vectors
constexpr int kRounds = 4000;  // some tens of microseconds: less than a disturbance lasts
constexpr int kTurns = 1000;

#define ON_AVX2 __attribute__((target("avx2,fma")))
#define ON_AVX2_INLINE inline __attribute__((always_inline, target("avx2,fma")))

// One instruction each, neither computed once for all rounds nor put together differently.
#define OPERATION(name, Vector, instruction)                                 \
  ON_AVX2_INLINE Vector name(Vector a, Vector b) {                           \
    Vector result;                                                           \
    asm volatile(instruction " %2, %1, %0" : "=x"(result) : "x"(a), "x"(b)); \
    return result;                                                           \
  }
OPERATION(products_of_bytes, __m256i, "vpmaddubsw")
OPERATION(add_halves, __m256i, "vpaddw")
OPERATION(scaled_halves, __m256i, "vpmaddwd")
OPERATION(add_words, __m256i, "vpaddd")
OPERATION(multiply, __m256, "vmulps")
ON_AVX2_INLINE __m256 to_float(__m256i a) {
  __m256 result;
  asm volatile("vcvtdq2ps %1, %0" : "=x"(result) : "x"(a));
  return result;
}
// acc + a * b.
ON_AVX2_INLINE __m256 fma(__m256 acc, __m256 a, __m256 b) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}

struct Mix {
  int products;     // of a group
  bool start;       // the bias enters as the sum's first value
  bool total;       // vpmaddwd by a scale, vpaddd to a total; else vpmaddwd, conversion, fma
  int min_pairs;    // vpmaddwd and vpaddd of minimums, in four groups
  bool scaled_min;  // another fma
};

template <Mix mix>
ON_AVX2 void groups() {
  const __m256i codes = _mm256_set1_epi8(3), quad = _mm256_set1_epi8(5);
  const __m256 d = _mm256_set1_ps(1.0f);
  __m256i totals[2] = {codes, codes};
  for (int round = 0; round < kRounds; round += 4) {
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
      __m256i sums[kOutputs];
#pragma GCC unroll 8
      for (int j = 0; j < mix.products; j++) {
#pragma GCC unroll 8
        for (int i = 0; i < kOutputs; i++) {
          const __m256i product = products_of_bytes(codes, quad);
          if (j == 0 && !mix.start)
            sums[i] = product;
          else
            sums[i] = add_halves(j == 0 ? quad : sums[i], product);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kOutputs; i++) {
        const __m256i pairs = scaled_halves(sums[i], quad);
        if (mix.total) {
          totals[i % 2] = add_words(totals[i % 2], pairs);
        } else {
          __m256 acc = fma(d, to_float(pairs), multiply(d, d));
          if (mix.scaled_min) acc = fma(acc, d, d);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < mix.min_pairs * kOutputs; i++)
      totals[i % 2] = add_words(totals[i % 2], scaled_halves(codes, quad));
  }
}

ON_AVX2 void products() {
  const __m256i codes = _mm256_set1_epi8(3), quad = _mm256_set1_epi8(5);
  __m256i sums[12];
  for (auto& sum : sums) sum = codes;
  for (int round = 0; round < kRounds; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sums[i] = add_halves(sums[i], products_of_bytes(codes, quad));
  }
}

double seconds(void (*f)()) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best of many turns of both: a shared machine only ever adds time.
void report(const char* name, void (*f)(), int products_of_group) {
  double best = 1e9, best_alone = 1e9;
  for (int turn = 0; turn < kTurns; turn++) {
    best_alone = std::min(best_alone, seconds(products) / (12.0 * kRounds));
    best = std::min(best, seconds(f) / (double(products_of_group) * kOutputs * kRounds));
  }
  printf("%-20s %4.1f %% of %.0f GOPS\n", name, 100 * best_alone / best, 64e-9 / best_alone);
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    printf("ceiling_bench needs AVX2\n");
    return 1;
  }
  report("Q4_0, Q5_0, MXFP4", groups<Mix{8, true, false, 0, false}>, 8);
  report("Q4_1", groups<Mix{8, false, false, 0, true}>, 8);
  report("Q5_1", groups<Mix{8, true, false, 0, true}>, 8);
  report("Q4_K", groups<Mix{8, false, true, 2, false}>, 8);
  report("Q5_K", groups<Mix{4, false, true, 1, false}>, 4);
  report("Q3_K, Q6_K", groups<Mix{4, true, true, 0, false}>, 4);
  report("Q2_K", groups<Mix{4, false, true, 2, false}>, 4);
}
