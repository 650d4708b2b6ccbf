// Throughput of the attention kernel on one core: GFLOPS of a causal prompt (4 head_dim flops per
// query head and visible key) beside the machine's fp32 FMA peak, and GB/s of K and V in decode
// over a cache far larger than L3, beside the memory's read rate.
// Usage: attention_bench [isa] [bf16 | fp16 | int8]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/cpu.h"
#include "runtime/machine.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

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

struct Shape {
  int32_t group, head_dim;
};

// Sequences of `length` tokens whose pages lie in random order in one arena.
class Cache {
 public:
  Cache(const Kernels& kernels, KVFormat format, Shape shape, int64_t sequences, int64_t length)
      : kernels_(kernels.attention_over(format)), shape_(shape), length_(length) {
    const int64_t pages = (length + kPageTokens - 1) / kPageTokens;
    map_ = {nullptr, 0, kv_head_bytes(format, shape.head_dim), (int32_t)(sequences * pages)};
    map_.slab_bytes = map_.page_bytes * map_.pages_per_slab;
    arena_ = std::make_unique<Memory>(map_.slab_bytes);
    map_.arena = arena_->data();
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> k((size_t)shape.head_dim), v(k);
    for (int64_t slot = 0; slot < kPageTokens; slot++) {
      for (auto& x : k) x = normal(random);
      for (auto& x : v) x = normal(random);
      kernels_.store(k.data(), v.data(), shape.head_dim, (int32_t)slot, map_.arena);
    }
    for (int32_t p = 1; p < map_.pages_per_slab; p++)
      memcpy(map_.at(p), map_.arena, (size_t)map_.page_bytes);
    for (int64_t s = 0; s < sequences; s++) {
      tables_.emplace_back();
      for (int64_t p = 0; p < pages; p++) tables_.back().push_back((int32_t)(s * pages + p));
    }
    std::vector<int32_t> all((size_t)map_.pages_per_slab);
    for (size_t i = 0; i < all.size(); i++) all[i] = (int32_t)i;
    std::shuffle(all.begin(), all.end(), random);
    for (auto& table : tables_)
      for (auto& page : table) page = all[(size_t)page];
    q_.resize((size_t)(64 * shape.group * shape.head_dim));
    for (auto& x : q_) x = normal(random);
    out_.resize(q_.size());
    workspace_ =
        std::make_unique<Memory>(kernels_.workspace_bytes(64, shape.group, shape.head_dim));
  }

  void run(size_t sequence, int64_t from, int64_t to) {
    AttentionItem item{};
    item.q_stride = item.out_stride = (int64_t)shape_.group * shape_.head_dim;
    item.q = q_.data();
    item.out = out_.data();
    item.tokens = (int32_t)(to - from);
    item.group = shape_.group;
    item.head_dim = shape_.head_dim;
    item.first_position = from;
    item.scale = 0.125f;
    item.pages = map_;
    item.block_table = tables_[sequence].data();
    item.workspace = workspace_->data();
    kernels_.run(item);
  }
  void prompt(int64_t chunk) {
    for (int64_t t = 0; t < length_; t += chunk) run(0, t, std::min(length_, t + chunk));
  }
  void decode() {
    for (size_t s = 0; s < tables_.size(); s++) run(s, length_ - 1, length_);
  }
  double bytes() const { return (double)map_.slab_bytes; }

 private:
  const AttentionKernels& kernels_;
  Shape shape_;
  int64_t length_;
  std::unique_ptr<Memory> arena_, workspace_;
  PageMap map_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<float> q_, out_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string isa = argc > 1 ? argv[1] : "avx2", wanted = argc > 2 ? argv[2] : "bf16";
  const Kernels& kernels = kernels_for(isa);
  int format = 0;
  while (format < (int)KVFormat::count && wanted != kKVFormatNames[format]) format++;
  if (format == (int)KVFormat::count) return printf("no such format: %s\n", wanted.c_str()), 1;
  const FloatState state;
  printf("%s over %s; fp32 peak %.0f GFLOPS\n", isa.c_str(), wanted.c_str(),
         fp32_peak_gflops(1, 0.3));
  const Memory stream(192 << 20);
  memset(stream.data(), 1, (size_t)stream.bytes());
  printf("memory read: %.1f GB/s\n%-10s", read_rate_gbs(stream, 1, 0.5), "");
  for (int n : {128, 512, 4096}) printf("  prompt %4d GFLOPS", n);
  printf("  decode in L2");
  for (int n : {64, 160, 1024, 8192}) printf("  decode %4d GB/s (us)", n);
  printf("\n");
  for (Shape s : {Shape{1, 64}, Shape{3, 64}, Shape{4, 64}, Shape{8, 64}, Shape{1, 128},
                  Shape{4, 128}, Shape{4, 256}}) {
    printf("g%d d%-6d", s.group, s.head_dim);
    for (int64_t n : {128, 512, 4096}) {
      Cache cache(kernels, KVFormat(format), s, 1, n);
      const double t = best_time([&] { cache.prompt(32); }, 0.2);
      printf("  %18.1f", 4.0 * s.head_dim * s.group * (double)n * (double)(n + 1) / 2 / t / 1e9);
    }
    {
      Cache cache(kernels, KVFormat(format), s, 1, (256 << 10) / (s.head_dim * 4));
      const double t = best_time([&] { cache.decode(); }, 0.2);
      printf("  %12.1f", cache.bytes() / t / 1e9);
    }
    for (int64_t n : {64, 160, 1024, 8192}) {
      const int64_t page = kv_head_bytes(KVFormat(format), s.head_dim) * ((n + 31) / 32);
      const int64_t sequences = (128 << 20) / page;
      Cache cache(kernels, KVFormat(format), s, sequences, n);
      const double t = best_time([&] { cache.decode(); }, 0.4);
      printf("  %12.1f %8.2f", cache.bytes() / t / 1e9, t / (double)sequences * 1e6);
    }
    printf("\n");
    fflush(stdout);
  }
}
