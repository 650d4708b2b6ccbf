// Throughput of the linear kernels on one core: GOPS (2 x multiply-adds) with weights in L2 and
// with weights streamed from memory, beside the machine's own int8 peak (a loop of vpmaddubsw +
// vpaddw), GB/s of weights streamed at one row, quantising and packing. Usage: linear_bench [isa]
// [format]
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/kernels.h"

using namespace invar;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Best of many short runs: a shared machine only ever adds time.
template <class F>
double best_time(F f, double budget_s) {
  double best = 1e9, end = now() + budget_s;
  do {
    double t = now();
    f();
    t = now() - t;
    if (t < best) best = t;
  } while (now() < end);
  return best;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) double int8_peak_gops() {
  const int n = 20000;
  double t = best_time(
      [&] {
        for (int i = 0; i < n; i++)
          asm volatile(
#define STEP(tmp, sum) \
  "vpmaddubsw %%ymm14,%%ymm15,%%ymm" #tmp "\n vpaddw %%ymm" #tmp ",%%ymm" #sum ",%%ymm" #sum "\n"
              STEP(8, 0) STEP(9, 1) STEP(10, 2) STEP(11, 3) STEP(8, 4) STEP(9, 5) STEP(10, 6)
                  STEP(11, 7)
#undef STEP
                      ::
                          : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                            "xmm9", "xmm10", "xmm11");
      },
      0.2);
  return 8.0 * n * 64 / t / 1e9;
}
#endif

uint8_t* memory(size_t bytes) {
  void* p =
      mmap(nullptr, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  p = (void*)(((size_t)p + (2 << 20) - 1) & ~(size_t)((2 << 20) - 1));
  madvise(p, bytes, MADV_HUGEPAGE);
  memset(p, 0, bytes);
  return (uint8_t*)p;
}

}  // namespace

int main(int argc, char** argv) {
  const LinearKernels* kernels = &portable::linear_kernels;
  std::string isa = argc > 1 ? argv[1] : "avx2", only = argc > 2 ? argv[2] : "";
  double peak = 0;
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
  if (isa == "avx2") kernels = &avx2::linear_kernels;
  if (isa == "avx512") kernels = &avx512::linear_kernels;
  peak = int8_peak_gops();
#endif
  printf("%s; int8 peak (vpmaddubsw + vpaddw): %.0f GOPS\n", isa.c_str(), peak);
  const int64_t k = 2048;
  const int counts[] = {1, 2, 4, 6, 8, 16, 32, 64, 512};
  const size_t stream_bytes = 192u << 20;
  uint8_t* stream = memory(stream_bytes);
  double read = best_time(
      [&] {
        uint64_t sum[8] = {};
        const uint64_t* p = (const uint64_t*)stream;
        for (size_t i = 0; i < stream_bytes / 8; i += 8)
          for (int lane = 0; lane < 8; lane++) sum[lane] ^= p[i + (size_t)lane];
        asm volatile("" ::"m"(sum));
      },
      0.5);
  printf("memory read: %.1f GB/s\n%-6s", (double)stream_bytes / read / 1e9, "");
  for (int m : counts) printf("     M=%-5d", m);
  printf("  stream GB/s  quantise GB/s  pack GB/s\n");
  std::mt19937 rng(1);
  for (int fi = 0; fi < (int)WeightFormat::count; fi++) {
    if (!only.empty() && only != kWeightFormatNames[fi]) continue;
    auto f = (WeightFormat)fi;
    const ActFormat af = act_format_of(f);
    const int64_t stride = act_layout(af, k).row_bytes, pb = panel_bytes(f, k);
    std::vector<float> x((size_t)k), out(512 * 32);
    for (auto& v : x) v = (float)(rng() % 2001) / 1000 - 1;
    uint8_t* act = (uint8_t*)std::aligned_alloc(64, (size_t)(stride * 512));
    for (int r = 0; r < 512; r++) kernels->quantize(af, x.data(), k, act + r * stride);
    // Small bytes everywhere: finite scales in every format.
    for (size_t i = 0; i < stream_bytes; i++) stream[i] = (uint8_t)(i * 29) & 0x3b;
    printf("%-6s", kWeightFormatNames[fi]);
    for (int m : counts) {
      // 128 KiB of panels stay in L2
      const int64_t panels = pb * 2 > (128 << 10) ? 2 : (128 << 10) / pb;
      double t = best_time(
          [&] {
            for (int64_t p = 0; p < panels; p++)
              kernels->gemm(f, stream + p * pb, k, act, stride, m, out.data(), 32);
          },
          0.15);
      double gops = 2.0 * m * 32 * k * panels / t / 1e9;
      printf("  %5.0f %2.0f%%", gops, peak > 0 ? 100 * gops / peak : 0.0);
    }
    // Another part of memory every time: the L3 never holds the next one.
    std::string streamed;
    double rate = 0;
    for (int m : counts) {
      if (m > 64) break;
      const int64_t all = stream_bytes / pb, part = m <= 8 ? all / 2 : all / 8;
      int64_t at = 0;
      double t = best_time(
          [&] {
            for (int64_t p = 0; p < part; p++, at = (at + 1) % all)
              kernels->gemm(f, stream + at * pb, k, act, stride, m, out.data(), 32);
          },
          0.3);
      double gops = 2.0 * m * 32 * k * part / t / 1e9;
      char text[32];
      snprintf(text, sizeof text, "  %5.0f %2.0f%%", gops, peak > 0 ? 100 * gops / peak : 0.0);
      streamed += text;
      if (m == 1) rate = part * pb / t / 1e9;
    }
    double q = best_time(
        [&] {
          for (int i = 0; i < 64; i++) kernels->quantize(af, x.data(), k, act);
        },
        0.05);
    const int64_t row_bytes = row_bytes_ggml(f, k), n = (32 << 20) / row_bytes / 32 * 32;
    uint8_t* rows = memory(32 << 20);
    double pack = best_time([&] { kernels->pack(f, rows, n, k, 0, n / 32, stream); }, 0.3);
    munmap(rows, 32 << 20);
    printf("  %10.1f  %12.1f  %9.2f\n stream%s\n", rate, 64 * k * 4 / q / 1e9,
           n * row_bytes / pack / 1e9, streamed.c_str());
    std::free(act);
  }
}
