// The SIMD vocabulary of the kernels. A kernel is written once over W lanes; each instruction set
// gives every operation below the same meaning, so one kernel gives the same bits on all of them.
//
//   VF  W floats        VI  W int32 (also: W pairs of bf16 or int16)
//   VM  W booleans      VB  4 W bytes, lane i = bytes [4 i, 4 i + 4)
//
//   W = 16 (avx512), 8 (avx2), 4 (portable: GCC/Clang vector extensions; runs anywhere)
//
// Everything lives in invar::INVAR_ISA and is static and always inlined: the linker can never
// pick the AVX-512 copy of an inline function for the AVX2 kernels.
//
// Meanings that are not obvious:
//   min(a, b) = a < b ? a : b and max(a, b) = a > b ? a : b: the second operand if one is NaN.
//   to_int: nearest-even, |x| < 2^31.  to_float: nearest-even.
//   fma(a, b, c) = a * b + c and fnma(a, b, c) = c - a * b, one rounding.
//   dot_bf16(acc, a, b): fma with the odd (high) elements, then with the even ones; this is what
//     vdpbf16ps does. Denormals are flushed by MXCSR, which the runtime sets in every thread.
//   to bf16: nearest-even; denormals become signed zeros, NaN stays NaN (vcvtneps2bf16).
//   to f16: nearest-even; from 65,520 on infinity, subnormal halves stay, NaN stays NaN
//   (vcvtps2ph).
//   load_e4m3: W bytes of e4m3fn divided by 256: a half that has the code's exponent as it is, so
//     that its subnormals are those of the code. What stands for NaN is 480 / 256.
//   ..._n(p, n): lanes [0, n) only, 0 <= n <= W; loads give zero elsewhere, memory past n is not
//     touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef INVAR_ISA
#error "compile kernels with INVAR_ISA=portable|avx2|avx512"
#endif

#define INVAR_INLINE static inline __attribute__((always_inline))
#define INVAR_NOINLINE static __attribute__((noinline))
// A register tile is a function of its own, with its loops unrolled: inlined into its callers or
// unrolled late, GCC allocates its registers badly.
#define INVAR_UNROLL _Pragma("GCC unroll 16")

#if defined(INVAR_ISA_AVX512)
#include "kernels/simd_avx512.h"
#elif defined(INVAR_ISA_AVX2)
#include "kernels/simd_avx2.h"
#else
#include "kernels/simd_portable.h"
#endif

namespace invar::INVAR_ISA {

INVAR_INLINE VF operator+(VF a, VF b) { return add(a, b); }
INVAR_INLINE VF operator-(VF a, VF b) { return sub(a, b); }
INVAR_INLINE VF operator*(VF a, VF b) { return mul(a, b); }
INVAR_INLINE VF operator/(VF a, VF b) { return div(a, b); }
INVAR_INLINE VI operator+(VI a, VI b) { return add(a, b); }
INVAR_INLINE VI operator-(VI a, VI b) { return sub(a, b); }
INVAR_INLINE VI operator&(VI a, VI b) { return bit_and(a, b); }
INVAR_INLINE VI operator|(VI a, VI b) { return bit_or(a, b); }
INVAR_INLINE VI operator^(VI a, VI b) { return bit_xor(a, b); }

INVAR_INLINE VF neg(VF a) { return as_float(as_int(a) ^ set1_i(INT32_MIN)); }
INVAR_INLINE VF abs(VF a) { return as_float(as_int(a) & set1_i(INT32_MAX)); }

// 2^n, -126 <= n <= 127.
INVAR_INLINE VF pow2(VI n) { return as_float(shift_left<23>(n + set1_i(127))); }
// x * 2^n for such n: the power is exact, so there is one rounding.
INVAR_INLINE VF scale_pow2(VF x, VI n) { return x * pow2(n); }

// W bf16 values <-> W floats.
INVAR_INLINE VF round_bf16(VF a) { return as_float(shift_left<16>(to_bf16(a))); }
// Lane i: bf16(even[i]) in the low half, bf16(odd[i]) in the high half.
INVAR_INLINE VI pair_bf16(VF even, VF odd) { return to_bf16(even) | shift_left<16>(to_bf16(odd)); }
// Two neighbouring bf16 (or int16) values in every lane.
INVAR_INLINE VI set1_pair(const void* p) {
  int32_t bits;
  memcpy(&bits, p, 4);
  return set1_i(bits);
}

// Sixteen lanes on every instruction set: the unit of sums and maxima over a row, whose tree is
// fixed (lane i with i + 8, then + 4, + 2, + 1).
struct Lanes16 {
  static constexpr int N = 16 / W;
  VF v[N];
};

INVAR_INLINE Lanes16 set1_16(float x) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::N; i++) r.v[i] = set1(x);
  return r;
}
INVAR_INLINE Lanes16 load16(const float* p) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::N; i++) r.v[i] = load(p + i * W);
  return r;
}
// Lanes [0, n), 0 <= n <= 16; `rest` elsewhere.
INVAR_INLINE Lanes16 load16_n(const float* p, int n, float rest) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::N; i++) {
    int m = n - i * W;
    m = m < 0 ? 0 : m > W ? W : m;
    r.v[i] = m == 0 ? set1(rest) : select(first_n(m), load_n(p + i * W, m), set1(rest));
  }
  return r;
}
INVAR_INLINE void store16(float* p, const Lanes16& a) {
  for (int i = 0; i < Lanes16::N; i++) store(p + i * W, a.v[i]);
}
INVAR_INLINE void store16_n(float* p, int n, const Lanes16& a) {
  for (int i = 0; i < Lanes16::N; i++) {
    int m = n - i * W;
    if (m > 0) store_n(p + i * W, m > W ? W : m, a.v[i]);
  }
}
INVAR_INLINE Lanes16 add(const Lanes16& a, const Lanes16& b) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::N; i++) r.v[i] = add(a.v[i], b.v[i]);
  return r;
}
INVAR_INLINE Lanes16 mul(const Lanes16& a, const Lanes16& b) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::N; i++) r.v[i] = mul(a.v[i], b.v[i]);
  return r;
}
INVAR_INLINE Lanes16 fma(const Lanes16& a, const Lanes16& b, const Lanes16& c) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::N; i++) r.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
INVAR_INLINE Lanes16 max(const Lanes16& a, const Lanes16& b) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::N; i++) r.v[i] = max(a.v[i], b.v[i]);
  return r;
}
// The fixed tree over 16 lanes, by shuffles: fold<k> brings lane i + k to lane i.
template <class Join>
INVAR_INLINE float reduce16(const Lanes16& a, Join join) {
  constexpr int N = Lanes16::N;
  VF x[N];
  for (int i = 0; i < N; i++) x[i] = a.v[i];
  for (int half = N / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] = join(x[i], x[i + half]);
  if constexpr (W > 8) x[0] = join(x[0], fold<8>(x[0]));
  if constexpr (W > 4) x[0] = join(x[0], fold<4>(x[0]));
  x[0] = join(x[0], fold<2>(x[0]));
  return first_lane(join(x[0], fold<1>(x[0])));
}
INVAR_INLINE float sum16(const Lanes16& a) {
  return reduce16(a, [](VF x, VF y) { return add(x, y); });
}
INVAR_INLINE float max16(const Lanes16& a) {
  return reduce16(a, [](VF x, VF y) { return max(x, y); });
}

}  // namespace invar::INVAR_ISA
