// The one implementation of each elementary function of the kernels: softmax, silu, gelu, soft cap
// and sampling all come through here, so an instruction set has no libm of its own.
#pragma once

#include "kernels/simd.h"

namespace invar::INVAR_ISA {

constexpr float kInfinity = __builtin_inff();

// 2^f - 1 = f * (c1 + c2 f + ... + c6 f^5) on [-1/2, 1/2]. Coefficients: Lawson's iteration for the
// smallest relative error of 1 + f q(f) (2.0e-9 in exact arithmetic), rounded to fp32 (1.6e-8). Six
// terms because five leave 7.5e-8, more than the rounding of the evaluation itself.
// 2^f by this polynomial in fp32 is within 1.32 * 2^-24 relative (all f in steps of 2^-21).
constexpr float kExp2[] = {0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f,
                           0x1.c6aee8p-5f,  0x1.ebfbdcp-3f,  0x1.62e430p-1f};
INVAR_INLINE VF exp2_quotient(VF f) {
  VF q = set1(kExp2[0]);
  for (int i = 1; i < 6; i++) q = fma(q, f, set1(kExp2[i]));
  return q;
}

// x + 1.5 * 2^23 rounds x to the nearest even integer n, |n| < 2^22, and holds n in its low bits.
constexpr float kRoundMagic = 0x1.8p23f;
constexpr int32_t kRoundMagicBits = 0x4b400000;

// x = n + f with n an integer, |f| <= 1/2; `power` = 2^n for -126 <= n <= 127, infinity for 128.
struct Exponent {
  VF f, power;
};
INVAR_INLINE VF power_of(VF shifted) {
  return as_float(shift_left<23>(as_int(shifted) + set1_i(127 - kRoundMagicBits)));
}
INVAR_INLINE Exponent split2(VF x) {
  VF shifted = x + set1(kRoundMagic);
  return {x - (shifted - set1(kRoundMagic)), power_of(shifted)};
}
// The same for x log2(e): the constant in two parts, so that f keeps its precision for large x.
INVAR_INLINE Exponent split_e(VF x) {
  VF shifted = fma(x, set1(0x1.715476p+0f), set1(kRoundMagic));
  VF n = shifted - set1(kRoundMagic);
  VF f = fma(x, set1(0x1.715476p+0f), neg(n));
  return {fma(x, set1(0x1.4ae0cp-26f), f), power_of(shifted)};
}

// 2^x of N vectors in place, for x <= 0 (softmax, sampling): exp2(0) is exactly 1, below 2^-126
// exactly 0, NaN stays NaN. Within 1.32 * 2^-24 relative.
//
// All vectors take each step before the next one: one after another their chains of 50 cycles fill
// the float scheduler (64 places on Zen 3) when it holds three of them, and units stand idle.
// Results below 2^-126 are denormal and flushed; from -126.5 on `power` is 2^-127, which is 0.
template <int N>
INVAR_INLINE void exp2_nonpositive(VF (&x)[N]) {
  Exponent e[N];
  VF y[N];
  INVAR_UNROLL for (int i = 0; i < N; i++) e[i] = split2(max(set1(-127.0f), x[i]));
  INVAR_UNROLL for (int i = 0; i < N; i++) y[i] = set1(kExp2[0]);
  INVAR_UNROLL for (int n = 1; n < 6; n++) INVAR_UNROLL for (int i = 0; i < N; i++) y[i] =
      fma(y[i], e[i].f, set1(kExp2[n]));
  INVAR_UNROLL for (int i = 0; i < N; i++) y[i] = fma(y[i], e[i].f, set1(1.0f));
  INVAR_UNROLL for (int i = 0; i < N; i++) x[i] = y[i] * e[i].power;
}
INVAR_INLINE VF exp2_nonpositive(VF x) {
  VF y[1] = {x};
  exp2_nonpositive(y);
  return y[0];
}

// e^x for x <= 0, within 1.5 * 2^-24 relative; 0 below 2^-126 = e^-87.33654.
INVAR_INLINE VF exp_nonpositive(VF x) {
  Exponent e = split_e(x);
  VF y = fma(exp2_quotient(e.f), e.f, set1(1.0f)) * e.power;
  return select(less(x, set1(-87.33654f)), zero(), y);
}

// e^x for every x; infinity from 88.38 (= 127.5 / log2(e)) on.
INVAR_INLINE VF exp(VF x) { return exp_nonpositive(min(set1(89.0f), x)); }

// x / (1 + e^-y), the common form of silu (y = x) and gelu (y = 2 u). Nothing cancels, and for
// large -y the quotient goes to zero through x / infinity.
INVAR_INLINE VF gate_by(VF x, VF y) { return x / (set1(1.0f) + exp(neg(y))); }

// Share of the normal distribution that lies past x >= 0: erfc(x / sqrt(2)) / 2 = e^(-x^2 / 2) g(t)
// with t = 1 / (1 + 0.33 x) and g a polynomial. Coefficients: Lawson's iteration for the smallest
// relative error on [0, 13.3], behind which the share is below 2^-126 (8.2e-9 in exact arithmetic,
// 3.5e-8 rounded to fp32; one term less leaves 5.7e-8). x^2 in two parts, so that e^(-x^2 / 2)
// keeps its precision for large x.
constexpr float kTail[] = {-0x1.b230e8p-6f, 0x1.36eeep-3f,  -0x1.517158p-2f, 0x1.33e63ep-2f,
                           -0x1.d25a58p-4f, 0x1.320d4ap-3f, 0x1.a42be6p-4f,  0x1.123b8cp-3f,
                           0x1.0d37ecp-3f,  0x1.f50e4ep-18f};
INVAR_INLINE VF normal_tail(VF x) {
  VF t = set1(1.0f) / fma(x, set1(0.33f), set1(1.0f));
  VF g = set1(kTail[0]);
  for (int i = 1; i < 10; i++) g = fma(g, t, set1(kTail[i]));
  VF square = x * x, rest = fma(x, x, neg(square));
  VF power = exp_nonpositive(square * set1(-0.5f));
  return g * fnma(power, rest * set1(0.5f), power);
}

// x times the share of the normal distribution that lies below x, arXiv 1606.08415 section 2. Where
// x is negative, the small share itself is what is computed, so that nothing cancels.
INVAR_INLINE VF gelu(VF x) {
  VF size = abs(x);
  return fnma(size, normal_tail(min(set1(20.0f), size)), max(zero(), x));
}

// tanh x = t / (t + 2) with t = e^(2|x|) - 1 = 2^n (2^f - 1) + (2^n - 1): relatively exact near
// zero too, where 1 - 2 / (e^2x + 1) cancels. Past |x| = 10 the quotient is 1 in fp32.
INVAR_INLINE VF tanh(VF x) {
  VF twice = min(set1(20.0f), abs(x) + abs(x));
  Exponent e = split_e(twice);
  VF t = fma(e.power, exp2_quotient(e.f) * e.f, e.power - set1(1.0f));
  VF y = t / (t + set1(2.0f));
  return as_float(as_int(y) | (as_int(x) & set1_i(INT32_MIN)));
}

}  // namespace invar::INVAR_ISA
