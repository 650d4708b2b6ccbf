// The K formats and IQ4 made of plain weights when a model is loaded. A sub-block's codes follow
// from its scale (and minimum), so these are searched: each candidate scale gives codes, the codes
// give the scale and minimum of least weighted square error, and the best of all is kept. Then the
// scales themselves get codes, those of several that err least, and the weights are coded anew by
// what the scales have become. How far the search goes, and that large weights count for more, is
// as in llama.cpp for files made without an importance matrix (make_qkx2_quants, make_qx_quants):
// https://github.com/ggml-org/ggml/blob/5136ed06fb4dfcea74d6e7e914fe4994017d30c2/src/ggml-quants.c
#pragma once

#include "kernels/dequantize.h"
#include "kernels/encode.h"

namespace invar::INVAR_ISA {

// A sum has so many parts on every ISA, and they are added up in one order.
constexpr int kSumParts = 16, kSumVectors = kSumParts / W;
struct Sum {
  VF part[kSumVectors];
  Sum() {
    for (int i = 0; i < kSumVectors; i++) part[i] = zero();
  }
  void add_term(int vector, VF term) {
    part[vector % kSumVectors] = add(part[vector % kSumVectors], term);
  }
  float total() const {
    float left[kSumParts];
    for (int i = 0; i < kSumVectors; i++) store(left + i * W, part[i]);
    for (int n = kSumParts / 2; n > 0; n /= 2)
      for (int i = 0; i < n; i++) left[i] += left[i + n];
    return left[0];
  }
};

INVAR_INLINE VF held(VF x, VF least, VF most) { return min(max(x, least), most); }
INVAR_INLINE float rounded_within(float x, float least, float most) {
  const float held = x < least ? least : x > most ? most : x;
  return (held + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23, which leaves no fraction
}
INVAR_INLINE float stored_half(float x, uint8_t* p) {
  put_half_of(x, p);
  return half_at(p);
}
INVAR_INLINE VF magnitude(VF x) { return max(x, sub(zero(), x)); }

// N weights of one scale, and what their errors count for.
template <int N>
struct Part {
  static constexpr int kVectors = N / W;
  VF x[kVectors], weight[kVectors];
  explicit Part(const float* from) {
    Sum squares;
    for (int v = 0; v < kVectors; v++) {
      x[v] = load(from + v * W);
      squares.add_term(v, mul(x[v], x[v]));
    }
    const VF typical = set1(__builtin_sqrtf(squares.total() / (float)N));
    for (int v = 0; v < kVectors; v++) weight[v] = add(typical, magnitude(x[v]));
  }
};

// ------------------------------------------------------------------------- scale and minimum

// x ~ scale * code - minimum, minimum >= 0.
struct Shifted {
  float scale, minimum;
};

// Codes 0 … highest. Candidates map the range of x to highest + first, + first + 0.1, …
template <int N>
INVAR_NOINLINE Shifted fit_shifted(const Part<N>& part, const float* x, float highest, float first,
                                   int candidates) {
  float least = 0, most = x[0];
  for (int i = 0; i < N; i++) least = x[i] < least ? x[i] : least, most = x[i] > most ? x[i] : most;
  if (!(most > least)) return {0, -least};
  Sum weights, values;
  for (int v = 0; v < part.kVectors; v++) {
    weights.add_term(v, part.weight[v]);
    values.add_term(v, mul(part.weight[v], part.x[v]));
  }
  const float w = weights.total(), wx = values.total();
  Shifted best{(most - least) / highest, -least};
  float best_gain = -1;  // what the square error is less by than that of zeros
  for (int c = 0; c < candidates; c++) {
    const VF inverse = set1((highest + (first + 0.1f * (float)c)) / (most - least));
    Sum codes, squares, products;
    for (int v = 0; v < part.kVectors; v++) {
      const VF scaled = mul(sub(part.x[v], set1(least)), inverse);
      const VF code = round(held(scaled, zero(), set1(highest)));
      const VF weighted = mul(part.weight[v], code);
      codes.add_term(v, weighted);
      squares.add_term(v, mul(weighted, code));
      products.add_term(v, mul(weighted, part.x[v]));
    }
    const float wq = codes.total(), wqq = squares.total(), wqx = products.total();
    const float determinant = w * wqq - wq * wq;
    if (!(determinant > 0)) continue;
    float scale = (w * wqx - wx * wq) / determinant;
    float offset = (wqq * wx - wq * wqx) / determinant;
    if (offset > 0) scale = wqx / wqq, offset = 0;
    const float gain = scale * wqx + offset * wx;
    if (gain > best_gain) best_gain = gain, best = {scale, -offset};
  }
  return best;
}

// Of the codes that weights get under a scale and a minimum.
template <int N>
INVAR_INLINE float error_shifted(const Part<N>& part, float scale, float minimum, float highest) {
  const VF inverse = set1(inverse_of(scale)), depth = set1(minimum);
  Sum errors;
  for (int v = 0; v < part.kVectors; v++) {
    const VF raised = add(part.x[v], depth);
    const VF code = round(held(mul(raised, inverse), zero(), set1(highest)));
    const VF error = sub(raised, mul(code, set1(scale)));
    errors.add_term(v, mul(part.weight[v], mul(error, error)));
  }
  return errors.total();
}

// A block of 256 as parts of N; d and dmin as the format stores them.
template <int N>
struct ShiftedBlock {
  uint8_t scales[256 / N], minimums[256 / N], codes[256];

  ShiftedBlock(const float* x, float highest, float first, int candidates, float highest_scale,
               uint8_t* stored_d, uint8_t* stored_dmin) {
    Shifted fits[256 / N];
    float largest = 0, deepest = 0;
    for (int p = 0; p < 256 / N; p++) {
      const Part<N> part(x + p * N);
      fits[p] = fit_shifted<N>(part, x + p * N, highest, first, candidates);
      largest = fits[p].scale > largest ? fits[p].scale : largest;
      deepest = fits[p].minimum > deepest ? fits[p].minimum : deepest;
    }
    const float d = stored_half(largest / highest_scale, stored_d);
    const float dmin = stored_half(deepest / highest_scale, stored_dmin);
    for (int p = 0; p < 256 / N; p++) {
      const float s = rounded_within(fits[p].scale * inverse_of(d), 0, highest_scale);
      const float m = rounded_within(fits[p].minimum * inverse_of(dmin), 0, highest_scale);
      put_part(x, p, d, dmin, s, m, highest, highest_scale);
    }
  }

  // With the codes of scale and minimum, among those next to s and m, that err least.
  void put_part(const float* x, int p, float d, float dmin, float s, float m, float highest,
                float highest_scale) {
    const Part<N> part(x + p * N);
    float least = error_shifted(part, d * s, dmin * m, highest);
    float best_s = s, best_m = m;
    for (float near_s = s - 1; near_s <= s + 1; near_s++) {
      for (float near_m = m - 1; near_m <= m + 1; near_m++) {
        if (near_s < 0 || near_m < 0 || near_s > highest_scale || near_m > highest_scale) continue;
        const float error = error_shifted(part, d * near_s, dmin * near_m, highest);
        if (error < least) least = error, best_s = near_s, best_m = near_m;
      }
    }
    scales[p] = (uint8_t)best_s, minimums[p] = (uint8_t)best_m;
    const float inverse = inverse_of(d * best_s), depth = dmin * best_m;
    for (int i = p * N; i < p * N + N; i++)
      codes[i] = (uint8_t)rounded_within((x[i] + depth) * inverse, 0, highest);
  }
};

// Codes of 2 bits: element i has those from 2 (i % 128 / 32) on of byte i / 128 * 32 + i % 32.
INVAR_INLINE void put_two_bits(const uint8_t* codes, uint8_t* out) {
  for (int h = 0; h < 2; h++) {
    for (int i = 0; i < 32; i++) {
      const uint8_t* c = codes + h * 128 + i;
      out[h * 32 + i] = (uint8_t)((c[0] & 3) | (c[32] & 3) << 2 | (c[64] & 3) << 4 | c[96] << 6);
    }
  }
}
// Bit g of byte i is that of element 32 g + i.
INVAR_INLINE void put_bits(const uint8_t* codes, int bit, uint8_t* out) {
  for (int i = 0; i < 32; i++) {
    int byte = 0;
    for (int g = 0; g < 8; g++) byte |= (codes[32 * g + i] >> bit & 1) << g;
    out[i] = (uint8_t)byte;
  }
}
// Elements i and i + n of each 2 n, low and high nibble of a byte.
template <int n>
INVAR_INLINE void put_nibbles(const uint8_t* codes, uint8_t* out, int count) {
  for (int g = 0; g < count; g += 2 * n)
    for (int i = 0; i < n; i++)
      out[g / 2 + i] = (uint8_t)((codes[g + i] & 15) | codes[g + n + i] << 4);
}

static void encode_q2_k(const float* x, uint8_t* block) {
  const ShiftedBlock<16> made(x, 3, -0.5f, 16, 15, block + 80, block + 82);
  for (int p = 0; p < 16; p++) block[p] = (uint8_t)(made.scales[p] | made.minimums[p] << 4);
  put_two_bits(made.codes, block + 16);
}
// Six bits each: see scale_min_k4.
INVAR_INLINE void put_scales_k4(const uint8_t* scales, const uint8_t* minimums, uint8_t* out) {
  for (int i = 0; i < 4; i++) {
    out[i] = (uint8_t)(scales[i] | (scales[i + 4] >> 4) << 6);
    out[i + 4] = (uint8_t)(minimums[i] | (minimums[i + 4] >> 4) << 6);
    out[i + 8] = (uint8_t)((scales[i + 4] & 15) | minimums[i + 4] << 4);
  }
}
static void encode_q4_k(const float* x, uint8_t* block) {
  const ShiftedBlock<32> made(x, 15, -1, 21, 63, block, block + 2);
  put_scales_k4(made.scales, made.minimums, block + 4);
  put_nibbles<32>(made.codes, block + 16, 256);
}
static void encode_q5_k(const float* x, uint8_t* block) {
  const ShiftedBlock<32> made(x, 31, -0.5f, 16, 63, block, block + 2);
  put_scales_k4(made.scales, made.minimums, block + 4);
  put_bits(made.codes, 4, block + 16);
  put_nibbles<32>(made.codes, block + 48, 256);
}

// -------------------------------------------------------------------------------- scale alone

// Whole numbers lowest … -lowest - 1.
struct Whole {
  float lowest;
  VF operator()(VF x) const { return round(held(x, set1(lowest), set1(-lowest - 1))); }
  float code(float x) const { return rounded_within(x, lowest, -lowest - 1); }
};
// The values of IQ4; of two that are equally near the lower one.
struct Iq4Value {
  VF operator()(VF x) const {
    VF value = set1(kIq4Values[0]);
    for (int i = 1; i < 16; i++)
      value = select(less(set1(middle(i)), x), set1(kIq4Values[i]), value);
    return value;
  }
  uint8_t code(float x) const {
    int code = 0;
    for (int i = 1; i < 16; i++) code += x > middle(i);
    return (uint8_t)code;
  }
  static float middle(int i) { return 0.5f * (float)(kIq4Values[i - 1] + kIq4Values[i]); }
};

// x ~ scale * value, the value of greatest magnitude being `outer` (negative) or near it; value_of
// is the nearest one. Candidates map the extreme of x to outer + step * (-reach … reach).
template <int N, class ValueOf>
INVAR_NOINLINE float fit_signed(const Part<N>& part, const float* x, float outer, float step,
                                int reach, const ValueOf& value_of) {
  const float extreme = extreme_of<N>(x);
  if (extreme == 0) return 0;
  float best = extreme / outer, best_gain = -1;
  for (int c = -reach; c <= reach; c++) {
    const VF inverse = set1((outer + step * (float)c) / extreme);
    Sum squares, products;
    for (int v = 0; v < part.kVectors; v++) {
      const VF value = value_of(mul(part.x[v], inverse));
      const VF weighted = mul(part.weight[v], value);
      squares.add_term(v, mul(weighted, value));
      products.add_term(v, mul(weighted, part.x[v]));
    }
    const float wqq = squares.total(), wqx = products.total();
    if (!(wqq > 0)) continue;
    const float gain = wqx * (wqx / wqq);
    if (gain > best_gain) best_gain = gain, best = wqx / wqq;
  }
  return best;
}

template <int N, class ValueOf>
INVAR_INLINE float error_signed(const Part<N>& part, float scale, const ValueOf& value_of) {
  const VF inverse = set1(inverse_of(scale));
  Sum errors;
  for (int v = 0; v < part.kVectors; v++) {
    const VF error = sub(part.x[v], mul(value_of(mul(part.x[v], inverse)), set1(scale)));
    errors.add_term(v, mul(part.weight[v], mul(error, error)));
  }
  return errors.total();
}

// A block of 256 as parts of N, whose scales are whole numbers lowest_scale … -lowest_scale - 1.
template <int N>
struct SignedBlock {
  float scales[256 / N];
  float d;

  template <class ValueOf>
  SignedBlock(const float* x, float outer, float step, int reach, const ValueOf& value_of,
              float lowest_scale, uint8_t* stored_d) {
    for (int p = 0; p < 256 / N; p++) {
      const Part<N> part(x + p * N);
      scales[p] = fit_signed<N>(part, x + p * N, outer, step, reach, value_of);
    }
    d = stored_half(extreme_of<256 / N>(scales) / lowest_scale, stored_d);
    const Whole whole{lowest_scale};
    for (int p = 0; p < 256 / N; p++) {
      const Part<N> part(x + p * N);
      const float s = whole.code(scales[p] * inverse_of(d));
      float least = error_signed(part, d * s, value_of);
      scales[p] = s;
      for (float near = s - 1; near <= s + 1; near++) {  // the one next to it that errs least
        if (near < lowest_scale || near > -lowest_scale - 1) continue;
        const float error = error_signed(part, d * near, value_of);
        if (error < least) least = error, scales[p] = near;
      }
    }
  }
  float inverse(int i) const { return inverse_of(d * scales[i / N]); }
};

static void encode_q3_k(const float* x, uint8_t* block) {
  const Whole whole{-4};
  const SignedBlock<16> made(x, -4, 0.1f, 9, whole, -32, block + 108);
  uint8_t codes[256], six_bits[16];
  for (int i = 0; i < 256; i++) codes[i] = (uint8_t)(whole.code(x[i] * made.inverse(i)) + 4);
  for (int p = 0; p < 16; p++) six_bits[p] = (uint8_t)(made.scales[p] + 32);
  put_bits(codes, 2, block);
  put_two_bits(codes, block + 32);
  put_nibbles<8>(six_bits, block + 96, 16);
  for (int i = 0; i < 4; i++)
    block[104 + i] = (uint8_t)(six_bits[i] >> 4 | six_bits[i + 4] >> 4 << 2 |
                               six_bits[i + 8] >> 4 << 4 | six_bits[i + 12] >> 4 << 6);
}
static void encode_q6_k(const float* x, uint8_t* block) {
  const Whole whole{-32};
  const SignedBlock<16> made(x, -32, 0.1f, 9, whole, -128, block + 208);
  uint8_t codes[256], high[256];
  for (int i = 0; i < 256; i++) codes[i] = (uint8_t)(whole.code(x[i] * made.inverse(i)) + 32);
  for (int i = 0; i < 256; i++) high[i] = codes[i] >> 4;
  put_nibbles<64>(codes, block, 256);
  put_two_bits(high, block + 128);
  for (int p = 0; p < 16; p++) block[192 + p] = (uint8_t)(int8_t)made.scales[p];
}
static void encode_iq4_nl(const float* x, uint8_t* block) {
  const Iq4Value iq4;
  const Part<32> part(x);
  const float scale = fit_signed<32>(part, x, kIq4Values[0], 1, 7, iq4);
  const float inverse = inverse_of(stored_half(scale, block));
  uint8_t codes[32];
  for (int i = 0; i < 32; i++) codes[i] = iq4.code(x[i] * inverse);
  put_nibbles<16>(codes, block + 2, 32);
}
static void encode_iq4_xs(const float* x, uint8_t* block) {
  const Iq4Value iq4;
  const SignedBlock<32> made(x, kIq4Values[0], 1, 7, iq4, -32, block);
  uint8_t codes[256], six_bits[8];
  for (int i = 0; i < 256; i++) codes[i] = iq4.code(x[i] * made.inverse(i));
  for (int p = 0; p < 8; p++) six_bits[p] = (uint8_t)(made.scales[p] + 32);
  uint16_t high = 0;
  for (int p = 0; p < 8; p++) high |= (uint16_t)(six_bits[p] >> 4 << 2 * p);
  memcpy(block + 2, &high, 2);
  put_nibbles<1>(six_bits, block + 4, 8);
  put_nibbles<16>(codes, block + 8, 256);
}

}  // namespace invar::INVAR_ISA
