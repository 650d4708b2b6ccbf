#include "kernels/rows.h"

namespace invar::INVAR_ISA {

// Folds sixteen elements after sixteen into the accumulators: fold(lanes, accumulator). Lanes past
// the end hold `rest`.
template <typename F>
INVAR_INLINE float sum_row(const float* x, int64_t n, float rest, F fold) {
  constexpr int kChains = kSquareAccumulators;
  Lanes16 acc[kChains];
  for (Lanes16& a : acc) a = set1_16(0.0f);
  int64_t i = 0;
  for (; i + 16 * kChains <= n; i += 16 * kChains)
    for (int c = 0; c < kChains; c++) acc[c] = fold(load16(x + i + 16 * c), acc[c]);
  for (int c = 0; i < n; i += 16, c++)
    acc[c] = fold(load16_n(x + i, n - i < 16 ? int(n - i) : 16, rest), acc[c]);
  return sum16(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

float sum_of_squares(const float* x, int64_t n) {
  return sum_row(x, n, 0.0f, [](const Lanes16& v, const Lanes16& sum) INVAR_LAMBDA_INLINE {
    return fma(v, v, sum);
  });
}

static void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const float mean = sum_of_squares(x, n) / float(n);
  const VF inverse = set1(1.0f / __builtin_sqrtf(mean + eps));
  map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE {
    return load(x + i) * inverse * load(weight + i);
  });
}

static void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                       float* out) {
  const auto plain = [](const Lanes16& v, const Lanes16& sum)
                         INVAR_LAMBDA_INLINE { return add(sum, v); };
  const float mean = sum_row(x, n, 0.0f, plain) / float(n);
  const VF center = set1(mean);
  // Lanes past the end hold the mean, which is no distance from it.
  const auto squares = [&](Lanes16 v, const Lanes16& sum) INVAR_LAMBDA_INLINE {
    for (VF& lanes : v.v) lanes = lanes - center;
    return fma(v, v, sum);
  };
  const float variance = sum_row(x, n, mean, squares) / float(n);
  const VF inverse = set1(1.0f / __builtin_sqrtf(variance + eps));
  map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE {
    return fma((load(x + i) - center) * inverse, load(weight + i), load(bias + i));
  });
}

static void add_rows(const float* a, const float* b, int64_t n, float* out) {
  map_row(n, out,
          [&](auto load, int64_t i) INVAR_LAMBDA_INLINE { return load(a + i) + load(b + i); });
}

static void scale_row(const float* x, float factor, int64_t n, float* out) {
  const VF f = set1(factor);
  map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE { return load(x + i) * f; });
}

// 2 u of gelu's tanh form: gelu(x) = x (1 + tanh u) / 2 = x / (1 + e^-2u) with
// u = sqrt(2 / pi) (x + 0.044715 x^3), arXiv 1606.08415 section 2.
INVAR_INLINE VF gelu_argument(VF x) {
  constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  VF inner = fma(x * x, set1(kTwiceRoot * 0.044715f), set1(kTwiceRoot));
  return x * inner;
}

// A call of f with the function that an activation is; swiglu_oai is none of one factor alone.
template <typename F>
INVAR_INLINE void with_function(Activation activation, F f) {
  if (activation == Activation::silu) {
    f([](VF x) INVAR_LAMBDA_INLINE { return gate_by(x, x); });
  } else if (activation == Activation::gelu_tanh) {
    f([](VF x) INVAR_LAMBDA_INLINE { return gate_by(x, gelu_argument(x)); });
  } else {
    f([](VF x) INVAR_LAMBDA_INLINE { return gelu(x); });
  }
}

static void activate(Activation activation, const float* x, int64_t n, float* out) {
  with_function(activation, [&](auto function) INVAR_LAMBDA_INLINE {
    map_row(n, out,
            [&](auto load, int64_t i) INVAR_LAMBDA_INLINE { return function(load(x + i)); });
  });
}

static void gated(Activation activation, const float* gate, const float* up, int64_t n,
                  float* out) {
  if (activation != Activation::swiglu_oai) {
    with_function(activation, [&](auto function) INVAR_LAMBDA_INLINE {
      map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE {
        return function(load(gate + i)) * load(up + i);
      });
    });
  } else {
    // `GptOssExperts` in
    // https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py
    const VF limit = set1(7.0f), alpha = set1(1.702f), one = set1(1.0f);
    map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE {
      VF g = min(limit, load(gate + i));
      VF u = max(neg(limit), min(limit, load(up + i)));
      return gate_by(g, g * alpha) * (u + one);
    });
  }
}

static void soft_cap(const float* x, float cap, int64_t n, float* out) {
  const VF c = set1(cap);
  map_row(n, out,
          [&](auto load, int64_t i) INVAR_LAMBDA_INLINE { return c * tanh(load(x + i) / c); });
}

static void add_scaled(const float* x, float factor, const float* y, int64_t n, float* out) {
  const VF f = set1(factor);
  map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE {
    return fma(load(x + i), f, load(y + i));
  });
}

static void sigmoid(const float* x, int64_t n, float* out) {
  map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE {
    return gate_by(set1(1.0f), load(x + i));
  });
}

// The sum: each of 16 lanes in ascending order, then the tree.
static void softmax(const float* x, int64_t n, float* out) {
  const auto count = [&](int64_t i) { return n - i < 16 ? int(n - i) : 16; };
  Lanes16 most = set1_16(-kInfinity), sum = set1_16(0.0f);
  for (int64_t i = 0; i < n; i += 16) most = max(load16_n(x + i, count(i), -kInfinity), most);
  const VF highest = set1(max16(most));
  for (int64_t i = 0; i < n; i += 16) {
    Lanes16 e = load16_n(x + i, count(i), -kInfinity);
    for (VF& v : e.v) v = exp_nonpositive(v - highest);
    sum = add(sum, e);
    store16_n(out + i, count(i), e);
  }
  const VF total = set1(sum16(sum));
  map_row(n, out, [&](auto load, int64_t i) INVAR_LAMBDA_INLINE { return load(out + i) / total; });
}

// The one place with libm in it: double sin and cos, correctly rounded to fp32 but for ties, and
// shared by all instruction sets of a process.
static void rope_table(int64_t position, const double* inv_freq, double magnitude, int64_t pairs,
                       float* out) {
  for (int64_t i = 0; i < pairs; i++) {
    const double angle = double(position) * inv_freq[i];
    out[i] = float(__builtin_cos(angle) * magnitude);
    out[pairs + i] = float(__builtin_sin(angle) * magnitude);
  }
}

// (a, b) -> (a cos - b sin, b cos + a sin): two products, then one addition each. Left unfused so
// that the plain loop, which the compiler vectorises, is the definition.
static void rope(RopeStyle style, const float* table, int64_t pairs, int64_t /*dim*/, float* head) {
  const float* cos = table;
  const float* sin = table + pairs;
  if (style == RopeStyle::interleaved) {
    for (int64_t i = 0; i < pairs; i++) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cos[i] - b * sin[i];
      head[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  } else {
    float* second = head + pairs;
    for (int64_t i = 0; i < pairs; i++) {
      const float a = head[i], b = second[i];
      head[i] = a * cos[i] - b * sin[i];
      second[i] = b * cos[i] + a * sin[i];
    }
  }
}

extern const RowKernels row_kernels = {rms_norm, layer_norm, add_rows,   scale_row,
                                       gated,    activate,   soft_cap,   add_scaled,
                                       sigmoid,  softmax,    rope_table, rope};

}  // namespace invar::INVAR_ISA
