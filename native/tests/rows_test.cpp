// Row kernels of every instruction set, against double references and each other to the bit.
#include <functional>

#include "tests/kernel_test.h"

using namespace invar;
using namespace kernel_test;

namespace {

using Row = std::vector<double>;

// max |got - want| <= units * 2^-24 * (|want| + floor), element by element.
bool close(const float* got, const Row& want, double units, double floor) {
  for (size_t i = 0; i < want.size(); i++) {
    const double bound = units * kEps * (std::fabs(want[i]) + floor) + 1e-37;
    if (!(std::fabs(got[i] - want[i]) <= bound)) return false;
  }
  return true;
}

// A tolerance that lets a wrong output through proves nothing.
void check_mutations(const std::vector<float>& got, const Row& want, double units, double floor,
                     const std::string& what) {
  if (got.size() < 2) return;
  std::vector<float> zeroed(got.size()), doubled(got), shifted(got);
  for (float& x : doubled) x *= 2;
  for (size_t i = 0; i < got.size(); i++) shifted[i] = got[(i + 1) % got.size()];
  check(!close(zeroed.data(), want, units, floor), what + ": a zeroed output passes");
  check(!close(doubled.data(), want, units, floor), what + ": a doubled output passes");
  check(!close(shifted.data(), want, units, floor), what + ": a shifted output passes");
}

struct Case {
  std::string name;
  double units, floor;  // tolerance
  std::function<void(const RowKernels&, const float* a, const float* b, int64_t n, float* out)> run;
  std::function<Row(const float* a, const float* b, int64_t n)> reference;
};

Row map(const float* a, const float* b, int64_t n, double (*f)(double, double)) {
  Row r(n);
  for (int64_t i = 0; i < n; i++) r[i] = f(a[i], b[i]);
  return r;
}

std::vector<Case> cases() {
  return {
      // rounding of the sum (tree: log n), of 1/sqrt and of two products
      {"rms_norm", 8, 0,
       [](auto& k, auto* a, auto* b, int64_t n, float* out) { k.rms_norm(a, b, 1e-5f, n, out); },
       [](auto* a, auto* b, int64_t n) {
         double s = 0;
         for (int64_t i = 0; i < n; i++) s += double(a[i]) * a[i];
         Row r(n);
         for (int64_t i = 0; i < n; i++) r[i] = a[i] / std::sqrt(s / n + 1e-5f) * b[i];
         return r;
       }},
      // of the mean, of the variance and of 1/sqrt; the bias, here the weights once more, may
      // cancel,
      // and the mean's rounding counts by its size over the deviation, a few in rows of three
      {"layer_norm", 8, 8,
       [](auto& k, auto* a, auto* b, int64_t n, float* out) {
         k.layer_norm(a, b, b, 1e-5f, n, out);
       },
       [](auto* a, auto* b, int64_t n) {
         double sum = 0, squares = 0;
         for (int64_t i = 0; i < n; i++) sum += a[i];
         for (int64_t i = 0; i < n; i++) squares += std::pow(a[i] - sum / n, 2);
         Row r(n);
         for (int64_t i = 0; i < n; i++)
           r[i] = (a[i] - sum / n) / std::sqrt(squares / n + 1e-5f) * b[i] + b[i];
         return r;
       }},
      {"add", 1, 0, [](auto& k, auto* a, auto* b, int64_t n, float* out) { k.add(a, b, n, out); },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double y) { return x + y; });
       }},
      {"scale", 1, 0,
       [](auto& k, auto* a, auto*, int64_t n, float* out) { k.scale(a, 0.37f, n, out); },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double) { return x * 0.37f; });
       }},
      // exp, 1 + exp, quotient, product
      {"silu", 8, 0,
       [](auto& k, auto* a, auto* b, int64_t n, float* out) {
         k.gated(Activation::silu, a, b, n, out);
       },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double y) { return x / (1 + std::exp(-x)) * y; });
       }},
      // the argument of exp carries a few roundings times its size, up to 40 here
      {"gelu_tanh", 200, 0,
       [](auto& k, auto* a, auto* b, int64_t n, float* out) {
         k.gated(Activation::gelu_tanh, a, b, n, out);
       },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double y) {
           const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
           return x * y / (1 + std::exp(-2 * u));  // = x (1 + tanh u) / 2 without cancelling
         });
       }},
      // exp, a polynomial of ten terms, quotients; where x is positive, little of it is taken away
      {"gelu", 12, 0,
       [](auto& k, auto* a, auto* b, int64_t n, float* out) {
         k.gated(Activation::gelu, a, b, n, out);
       },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n,
                    [](double x, double y) { return x * std::erfc(-x / std::sqrt(2.0)) / 2 * y; });
       }},
      {"gelu alone", 12, 0,
       [](auto& k, auto* a, auto*, int64_t n, float* out) {
         k.activate(Activation::gelu, a, n, out);
       },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n,
                    [](double x, double) { return x * std::erfc(-x / std::sqrt(2.0)) / 2; });
       }},
      {"gelu_tanh alone", 200, 0,
       [](auto& k, auto* a, auto*, int64_t n, float* out) {
         k.activate(Activation::gelu_tanh, a, n, out);
       },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double) {
           const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
           return x / (1 + std::exp(-2 * u));
         });
       }},
      // quotient, exp - 1, quotient, product
      {"soft_cap", 8, 0,
       [](auto& k, auto* a, auto*, int64_t n, float* out) { k.soft_cap(a, 1.5f, n, out); },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double) { return 1.5 * std::tanh(x / 1.5); });
       }},
      // one rounding, of a sum that may cancel
      {"add_scaled", 1, 0,
       [](auto& k, auto* a, auto* b, int64_t n, float* out) { k.add_scaled(a, 0.37f, b, n, out); },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double y) { return x * 0.37f + y; });
       }},
      {"sigmoid", 8, 0,
       [](auto& k, auto* a, auto*, int64_t n, float* out) { k.sigmoid(a, n, out); },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double) { return 1 / (1 + std::exp(-x)); });
       }},
      // exp, a tree of sums, quotient
      {"softmax", 12, 0,
       [](auto& k, auto* a, auto*, int64_t n, float* out) { k.softmax(a, n, out); },
       [](auto* a, auto*, int64_t n) {
         Row r(n);
         double sum = 0;
         for (int64_t i = 0; i < n; i++) sum += r[i] = std::exp(double(a[i]));
         for (double& x : r) x /= sum;
         return r;
       }},
      // the argument of exp carries a rounding times its size, up to 10 here
      {"swiglu_oai", 24, 0,
       [](auto& k, auto* a, auto* b, int64_t n, float* out) {
         k.gated(Activation::swiglu_oai, a, b, n, out);
       },
       [](auto* a, auto* b, int64_t n) {
         return map(a, b, n, [](double x, double y) {
           const double g = std::min(x, 7.0), u = std::clamp(y, -7.0, 7.0);
           return g / (1 + std::exp(-1.702f * g)) * (u + 1);
         });
       }},
  };
}

void sweep(const std::vector<Isa>& isas) {
  std::mt19937 random(1);
  std::vector<int64_t> lengths;
  for (int64_t n = 1; n <= 132; n++) lengths.push_back(n);
  for (int64_t n : {191, 192, 576, 1536, 2048, 2055}) lengths.push_back(n);
  for (const Case& c : cases())
    for (int64_t n : lengths)
      for (int misalign : {0, 1, 3}) {
        const auto va = normal(random, n, 1.5f), vb = normal(random, n);
        Guarded a(n, misalign), b(n, 2 * misalign);
        for (int64_t i = 0; i < n; i++) a[i] = va[i], b[i] = vb[i];
        const Row want = c.reference(va.data(), vb.data(), n);
        std::vector<float> first;
        for (const Isa& isa : isas) {
          const std::string what = c.name + " " + isa.name + " n=" + std::to_string(n);
          Guarded out(n, misalign + 1);
          c.run(*isa.rows, a.data(), b.data(), n, out.data());
          check(close(out.data(), want, c.units, c.floor), what + ": value");
          check(out.intact() && a.intact() && b.intact(), what + ": wrote outside");
          const std::vector<float> got(out.data(), out.data() + n);
          if (first.empty()) {
            first = got;
            check_mutations(got, want, c.units, c.floor, what);
          }
          check(same_bits(got.data(), first.data(), n), what + ": bits differ from portable");
          Guarded in_place(n, misalign);
          for (int64_t i = 0; i < n; i++) in_place[i] = va[i];
          c.run(*isa.rows, in_place.data(), b.data(), n, in_place.data());
          check(same_bits(in_place.data(), first.data(), n), what + ": in place");
        }
        // A tail is the padded row: sums see zeros, elements see nothing of their neighbours.
        if (c.name != "rms_norm" && c.name != "layer_norm" && c.name != "softmax") {
          std::vector<float> pa(va), pb(vb), out(n + 64);
          pa.resize(n + 64), pb.resize(n + 64);
          c.run(*isas[0].rows, pa.data(), pb.data(), n + 64, out.data());
          check(same_bits(out.data(), first.data(), n), c.name + ": tail differs from padded");
        }
      }
}

void extremes(const std::vector<Isa>& isas) {
  const std::vector<float> x = {0.0f,  -0.0f,  1e-30f, -1e-30f, 20.0f, -20.0f, 87.0f, -87.0f,
                                88.5f, -88.5f, 100.0f, -100.0f, 1e30f, -1e30f, kInf,  kNaN,
                                1e-3f, -1e-3f, 0.34f,  -0.35f,  5.0f,  -5.0f,  126.f, -127.f};
  const std::vector<float> one(x.size(), 1.0f);
  std::vector<float> first[4];
  for (const Isa& isa : isas) {
    std::vector<float> out[4];
    for (auto& o : out) o.resize(x.size());
    isa.rows->gated(Activation::silu, x.data(), one.data(), x.size(), out[0].data());
    isa.rows->gated(Activation::gelu_tanh, x.data(), one.data(), x.size(), out[1].data());
    isa.rows->soft_cap(x.data(), 30.0f, x.size(), out[2].data());
    isa.rows->activate(Activation::gelu, x.data(), x.size(), out[3].data());
    for (size_t i = 0; i < x.size(); i++) {
      const std::string what = std::string(isa.name) + " at " + std::to_string(x[i]);
      if (std::isnan(x[i])) {
        for (auto& o : out) check(std::isnan(o[i]), "NaN lost " + what);
        continue;
      }
      const double v = x[i], silu = v < -88 ? 0 : v / (1 + std::exp(-v));
      const double cap = 30 * std::tanh(v / 30);
      check(out[0][i] == silu || std::fabs(out[0][i] - silu) <= 8 * kEps * std::fabs(silu) + 1e-36,
            "silu " + what);
      check(std::fabs(out[2][i] - cap) <= 8 * kEps * std::fabs(cap), "soft_cap " + what);
      for (int gelu : {1, 3}) {
        if (std::isinf(v) && gelu == 3) continue;
        check(v < 6 || out[gelu][i] == x[i], "gelu of a large value is itself " + what);
        check(v > -20 || out[gelu][i] == 0, "gelu of a very negative value is zero " + what);
      }
      const double exact = v * std::erfc(-v / std::sqrt(2.0)) / 2;
      check(
          std::fabs(v) > 12 || std::fabs(out[3][i] - exact) <= 6 * kEps * std::fabs(exact) + 1e-37,
          "gelu " + what);
    }
    for (int i = 0; i < 4; i++) {
      if (isa.rows == isas[0].rows) first[i] = out[i];
      for (size_t j = 0; j < x.size(); j++)
        check(std::isnan(out[i][j]) || same_bits(&out[i][j], &first[i][j], 1), "extremes: bits");
    }
  }
}

void rope(const std::vector<Isa>& isas) {
  std::mt19937 random(2);
  for (RopeStyle style : {RopeStyle::interleaved, RopeStyle::half})
    for (int64_t dim : {16, 20, 64, 80, 128})
      for (int64_t pairs : {dim / 2, dim / 4})
        for (int64_t position : {0, 1, 77, 131071}) {
          std::vector<double> inv_freq(pairs);
          for (int64_t i = 0; i < pairs; i++)
            inv_freq[i] = std::pow(10000.0, -double(i) / double(pairs));
          const auto x = normal(random, dim);
          std::vector<float> first;
          for (const Isa& isa : isas) {
            const std::string what = std::string("rope ") + isa.name +
                                     (style == RopeStyle::half ? " half" : " interleaved") +
                                     " dim=" + std::to_string(dim);
            Guarded table(2 * pairs, 1), head(dim, 3);
            for (int64_t i = 0; i < dim; i++) head[i] = x[i];
            isa.rows->rope_table(position, inv_freq.data(), 1.25, pairs, table.data());
            isa.rows->rope(style, table.data(), pairs, dim, head.data());
            for (int64_t i = 0; i < pairs; i++) {
              const bool half = style == RopeStyle::half;
              const int64_t ia = half ? i : 2 * i, ib = half ? i + pairs : 2 * i + 1;
              const double t = position * inv_freq[i], a = x[ia], b = x[ib];
              const double c = std::cos(t) * 1.25, s = std::sin(t) * 1.25;
              const double bound = 4 * kEps * 1.25 * (std::fabs(a) + std::fabs(b));
              check(std::fabs(head[ia] - (a * c - b * s)) <= bound, what + ": first of a pair");
              check(std::fabs(head[ib] - (b * c + a * s)) <= bound, what + ": second of a pair");
              check(position == 0 || std::fabs(a) < 0.1 || std::fabs(head[ia] - a) > bound,
                    what + ": no rotation passes");
            }
            for (int64_t i = 2 * pairs; i < dim; i++)
              check(head[i] == x[i], what + ": rotated too much");
            check(table.intact() && head.intact(), what + ": wrote outside");
            if (first.empty()) first.assign(head.data(), head.data() + dim);
            check(same_bits(head.data(), first.data(), dim), what + ": bits differ");
          }
        }
}

}  // namespace

int main() {
  flush_denormals();
  const auto isas = instruction_sets();
  sweep(isas);
  extremes(isas);
  rope(isas);
  return finish("rows_test");
}
