// Linear kernels: gemm of every instruction set this CPU has, against the arithmetic of the numeric
// contract in scalars to the bit, and against the exact product within its error bound.
#include <algorithm>

#include "linear_reference.h"

using namespace kernel_test;
using namespace linear_reference;

namespace {

constexpr int kFormats = (int)WeightFormat::count;

constexpr int kRows = 65;
constexpr int kCheckedRows[] = {0, 1, 64};

// One weight matrix, its panels, and rows of activations whose padding is NaN.
struct Case {
  WeightFormat format;
  int64_t k, n, row_bytes, panels, panel_stride, act_stride;
  Bytes rows, packed, act;
  bool extreme;

  Case(const Isa& isa, WeightFormat f, int64_t k, int64_t n, bool extreme, std::mt19937& rng)
      : format(f),
        k(k),
        n(n),
        row_bytes(row_bytes_ggml(f, k)),
        panels((n + 31) / 32),
        panel_stride(panel_bytes(f, k)),
        act_stride(act_layout(act_format_of(f), k).row_bytes + 64),
        rows((size_t)(row_bytes * n)),
        packed((size_t)(panel_stride * panels)),
        act((size_t)(act_stride * kRows), 0xff),
        extreme(extreme) {
    random_rows(f, rows, n, k, rng, extreme);
    isa.linear->pack(f, rows.p, n, k, 0, panels, packed.p);
    for (int r = 0; r < kRows; r++) {
      std::vector<float> x = random_x(k, rng, extreme);
      isa.linear->quantize(act_format_of(f), x.data(), k, act_row(r));
    }
  }
  uint8_t* act_row(int r) const { return act.p + r * act_stride; }
  std::string name() const {
    return std::string(name_of(format)) + " k=" + std::to_string(k) + " n=" + std::to_string(n) +
           (extreme ? " extreme" : "");
  }
};

// Exact products of a row and, per column, the size that its error is measured by: sum |w a|, where
// w counts by its parts.
struct Exact {
  std::vector<double> value, size;
};
Exact exact_row(const Case& t, int r) {
  const std::vector<double> a = activation_values(act_format_of(t.format), t.act_row(r), t.k);
  Exact exact{std::vector<double>((size_t)t.n), std::vector<double>((size_t)t.n)};
  for (int64_t c = 0; c < t.n; c++) {
    for (int64_t i = 0; i < t.k; i++) {
      const Element e = element(t.format, t.rows.p + c * t.row_bytes, t.k, i);
      // q5_1 moves 16 d from its codes to its minimum.
      const double moved = t.format == WeightFormat::q5_1 ? 32 * std::fabs((double)e.d) : 0;
      exact.value[(size_t)c] += e.value() * a[(size_t)i];
      exact.size[(size_t)c] +=
          (std::fabs(e.product()) + std::fabs(e.offset()) + moved) * std::fabs(a[(size_t)i]);
    }
  }
  return exact;
}

// Each fp32 rounding is eps/2 of a partial sum no larger than sum |w a|; roundings in a chain: per
// 32-block, or 16 of nvfp4, 5 (d * da, fma, and for a minimum scaled_sum, q5_1's sum and fma), per
// 256 at most 6, else per K two within a chunk of 512 and one per chunk.
double tolerance(const Case& t) {
  double chain = is_float(t.format) ? 2.0 * std::min<int64_t>(t.k, 512) + (double)t.k / 512 + 2
                 : is_row(t.format) ? 4.0
                 : block_k(t.format) < 256 ? 5.0 * (double)(t.k / block_k(t.format)) + 5
                                           : 6.0 * (double)t.k / 256 + 6;
  return chain * kEps;
}

// Outputs [count, panels * 32] of rows start, start + 1, ...
std::vector<float> run(const Isa& isa, const Case& t, int start, int count) {
  const int64_t width = t.panels * 32, stride = width + 16;
  std::vector<float> out((size_t)(stride * (count + 2)), -12345.0f), result;
  float* o = out.data() + stride;
  for (int64_t p = 0; p < t.panels; p++)
    isa.linear->gemm(t.format, t.packed.p + p * t.panel_stride, t.k, t.act_row(start), t.act_stride,
                     count, o + p * 32, stride);
  bool guards = true;
  for (int64_t i = 0; i < (int64_t)out.size(); i++) {
    const int64_t r = i / stride - 1, c = i % stride;
    if (r < 0 || r >= count || c >= width) guards &= out[(size_t)i] == -12345.0f;
  }
  check(guards, "gemm wrote outside its rows: " + t.name() + " " + isa.name);
  for (int r = 0; r < count; r++)
    result.insert(result.end(), o + r * stride, o + r * stride + width);
  return result;
}

void test_reference(const Case& t, const std::vector<float>& found) {
  const int64_t width = t.panels * 32;
  for (int r : kCheckedRows) {
    const Exact exact = exact_row(t, r);
    int bits = 0, wrong = 0, zero = 0, twice = 0, shifted = 0;
    for (int64_t c = 0; c < t.n; c++) {
      const float got = found[(size_t)(r * width + c)];
      const float want = reference(t.format, t.rows.p + c * t.row_bytes, t.act_row(r), t.k);
      bits += !same_bits(&got, &want, 1);
      const double bound = tolerance(t) * exact.size[(size_t)c], w = exact.value[(size_t)c];
      wrong += !(std::fabs(got - w) <= bound);
      zero += std::fabs(w) > bound;
      twice += std::fabs(2 * (double)got - w) > bound;
      shifted += std::fabs(found[(size_t)(r * width + (c + 1) % t.n)] - w) > bound;
    }
    const std::string where = t.name() + " row " + std::to_string(r) + ": columns ";
    check(bits == 0, "gemm differs from the contract: " + where + std::to_string(bits));
    check(wrong == 0, "gemm: outside the tolerance: " + where + std::to_string(wrong));
    check(t.n < 8 || t.extreme || std::min({zero, twice, shifted}) > t.n * 3 / 4,
          "the tolerance accepts zeroed, doubled or shifted outputs: " + where +
              std::to_string(std::min({zero, twice, shifted})));
  }
}

void test_gemm(const std::vector<Isa>& isas, WeightFormat f, int64_t k, int64_t n, bool extreme,
               std::mt19937& rng) {
  const Case t(isas[0], f, k, n, extreme, rng);
  const int64_t width = t.panels * 32;
  const std::vector<float> all = run(isas[0], t, 0, kRows);
  test_reference(t, all);
  for (const Isa& isa : isas) {
    for (int count : {65, 1, 2, 3, 4, 5, 6, 7, 16, 64}) {
      for (int start : {0, 1}) {
        if (start + count > kRows) continue;
        const std::vector<float> part = run(isa, t, start, count);
        check(same_bits(part.data(), all.data() + start * width, part.size()),
              "gemm bits differ from portable with 65 rows: " + t.name() + " " + isa.name +
                  " rows=" + std::to_string(count) + " start=" + std::to_string(start));
      }
    }
  }
}

}  // namespace

int main() {
  flush_denormals();
  std::mt19937 rng(1);
  std::vector<Isa> isas = instruction_sets();
  for (int i = 0; i < kFormats; i++) {
    const auto f = (WeightFormat)i;
    const std::vector<int64_t> lengths =
        is_float(f) || is_row(f) ? std::vector<int64_t>{1, 2, 3, 31, 32, 511, 512, 513, 1100}
        : block_k(f) == 32       ? std::vector<int64_t>{32, 64, 224, 256, 288, 576, 2048}
        : block_k(f) == 16       ? std::vector<int64_t>{64, 192, 256, 320, 576, 2048}
                                 : std::vector<int64_t>{256, 512, 2048};
    for (int64_t k : lengths) test_gemm(isas, f, k, 35, false, rng);
    for (int64_t n : {1, 31, 32, 64}) test_gemm(isas, f, 512, n, false, rng);
    test_gemm(isas, f, 512, 64, true, rng);
    printf("%s done\n", name_of(f));
  }
  return finish("linear_test");
}
