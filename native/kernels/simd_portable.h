// simd.h in GCC/Clang vector extensions: the twin that runs on any CPU. Included by simd.h only.
#pragma once

#include <cstdint>

namespace invar::INVAR_ISA {

constexpr int W = 4;  // SSE2 and NEON registers; vectors of 32 bytes have no ABI without AVX
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
struct VF {
  f32x4 v;
};
struct VI {
  i32x4 v;
};
struct VB {
  u8x16 v;
};
struct VM {
  i32x4 v;
};  // 0 or -1

template <typename To, typename From>
INVAR_INLINE To reinterpret(From a) {
  To r;
  memcpy(&r, &a, sizeof r);
  return r;
}
template <typename V>
INVAR_INLINE V load_bytes(const void* p, size_t bytes = sizeof(V)) {
  V r{};
  memcpy(&r, p, bytes);
  return r;
}

// memory
INVAR_INLINE VF zero() { return {f32x4{}}; }
INVAR_INLINE VI zero_i() { return {i32x4{}}; }
INVAR_INLINE VF set1(float x) { return {f32x4{x, x, x, x}}; }
INVAR_INLINE VI set1_i(int32_t x) { return {i32x4{x, x, x, x}}; }
INVAR_INLINE VB set1_b(uint8_t x) { return {u8x16{} + x}; }
INVAR_INLINE VF load(const float* p) { return load_bytes<VF>(p); }
INVAR_INLINE VI load_i(const void* p) { return load_bytes<VI>(p); }
INVAR_INLINE VB load_b(const void* p) { return load_bytes<VB>(p); }
INVAR_INLINE void store(float* p, VF a) { memcpy(p, &a, sizeof a); }
INVAR_INLINE void store_i(void* p, VI a) { memcpy(p, &a, sizeof a); }
INVAR_INLINE void store_b(void* p, VB a) { memcpy(p, &a, sizeof a); }
INVAR_INLINE VF load_n(const float* p, int n) { return load_bytes<VF>(p, 4 * (size_t)n); }
INVAR_INLINE VI load_i_n(const int32_t* p, int n) { return load_bytes<VI>(p, 4 * (size_t)n); }
INVAR_INLINE void store_n(float* p, int n, VF a) { memcpy(p, &a, 4 * (size_t)n); }
INVAR_INLINE void store_i_n(int32_t* p, int n, VI a) { memcpy(p, &a, 4 * (size_t)n); }
// Lanes 0, 1, 2, ...
INVAR_INLINE VI iota() { return {i32x4{0, 1, 2, 3}}; }

// floats
INVAR_INLINE VF add(VF a, VF b) { return {a.v + b.v}; }
INVAR_INLINE VF sub(VF a, VF b) { return {a.v - b.v}; }
INVAR_INLINE VF mul(VF a, VF b) { return {a.v * b.v}; }
INVAR_INLINE VF div(VF a, VF b) { return {a.v / b.v}; }
INVAR_INLINE VF sqrt(VF a) {
  for (int i = 0; i < W; i++) a.v[i] = __builtin_sqrtf(a.v[i]);
  return a;
}
INVAR_INLINE VF fma(VF a, VF b, VF c) {
  for (int i = 0; i < W; i++) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}
INVAR_INLINE VF fnma(VF a, VF b, VF c) {
  for (int i = 0; i < W; i++) c.v[i] = __builtin_fmaf(-a.v[i], b.v[i], c.v[i]);
  return c;
}
INVAR_INLINE VF min(VF a, VF b) { return {a.v < b.v ? a.v : b.v}; }
INVAR_INLINE VF max(VF a, VF b) { return {a.v > b.v ? a.v : b.v}; }
INVAR_INLINE VF round(VF a) {
  for (int i = 0; i < W; i++) a.v[i] = __builtin_rintf(a.v[i]);
  return a;
}

// Lane i = lane i + k of a, for i < k; the others are of no use.
template <int k>
INVAR_INLINE VF fold(VF a) {
  for (int i = 0; i < k; i++) a.v[i] = a.v[i + k];
  return a;
}
INVAR_INLINE float first_lane(VF a) { return a.v[0]; }

// integers; unsigned inside, so that wrapping is defined
INVAR_INLINE u32x4 bits(VI a) { return reinterpret<u32x4>(a.v); }
INVAR_INLINE VI from_bits(u32x4 a) { return {reinterpret<i32x4>(a)}; }
INVAR_INLINE VI add(VI a, VI b) { return from_bits(bits(a) + bits(b)); }
INVAR_INLINE VI sub(VI a, VI b) { return from_bits(bits(a) - bits(b)); }
INVAR_INLINE VI mul(VI a, VI b) { return from_bits(bits(a) * bits(b)); }
INVAR_INLINE VI min(VI a, VI b) { return {a.v < b.v ? a.v : b.v}; }
INVAR_INLINE VI max(VI a, VI b) { return {a.v > b.v ? a.v : b.v}; }
// The largest lane.
INVAR_INLINE int32_t max_lane(VI a) {
  int32_t r = a.v[0];
  for (int i = 1; i < W; i++) r = a.v[i] > r ? a.v[i] : r;
  return r;
}
INVAR_INLINE VI bit_and(VI a, VI b) { return {a.v & b.v}; }
INVAR_INLINE VI bit_or(VI a, VI b) { return {a.v | b.v}; }
INVAR_INLINE VI bit_xor(VI a, VI b) { return {a.v ^ b.v}; }
template <int n>
INVAR_INLINE VI shift_left(VI a) {
  return from_bits(bits(a) << n);
}
template <int n>
INVAR_INLINE VI shift_right(VI a) {
  return from_bits(bits(a) >> n);
}
template <int n>
INVAR_INLINE VI shift_right_signed(VI a) {
  return {a.v >> n};
}

// between the two
INVAR_INLINE VI as_int(VF a) { return {reinterpret<i32x4>(a.v)}; }
INVAR_INLINE VF as_float(VI a) { return {reinterpret<f32x4>(a.v)}; }
INVAR_INLINE VI to_int(VF a) {
  VI r;
  for (int i = 0; i < W; i++) r.v[i] = (int32_t)__builtin_rintf(a.v[i]);
  return r;
}
INVAR_INLINE VF to_float(VI a) { return {__builtin_convertvector(a.v, f32x4)}; }

// masks
INVAR_INLINE VM less(VF a, VF b) { return {a.v < b.v}; }
INVAR_INLINE VM less_equal(VF a, VF b) { return {a.v <= b.v}; }
INVAR_INLINE VM equal(VF a, VF b) { return {a.v == b.v}; }
INVAR_INLINE VM less(VI a, VI b) { return {a.v < b.v}; }
INVAR_INLINE VM equal(VI a, VI b) { return {a.v == b.v}; }
INVAR_INLINE VM first_n(int n) { return {iota().v < set1_i(n).v}; }
INVAR_INLINE VM mask_and(VM a, VM b) { return {a.v & b.v}; }
INVAR_INLINE VM mask_or(VM a, VM b) { return {a.v | b.v}; }
// Bit i = lane i.
INVAR_INLINE uint32_t mask_bits(VM a) {
  uint32_t r = 0;
  for (int i = 0; i < W; i++) r |= (uint32_t)(a.v[i] & 1) << i;
  return r;
}
INVAR_INLINE VF select(VM m, VF yes, VF no) { return {m.v ? yes.v : no.v}; }
INVAR_INLINE VI select(VM m, VI yes, VI no) { return {m.v ? yes.v : no.v}; }

// 16-bit floats
INVAR_INLINE VI load_u16(const void* p) {
  uint16_t x[W];
  memcpy(x, p, sizeof x);
  VI r;
  for (int i = 0; i < W; i++) r.v[i] = x[i];
  return r;
}
// A subnormal half is a normal float, so it is built from an integer: shifting it into place and
// multiplying would pass through a subnormal float, which is flushed.
INVAR_INLINE VF load_f16(const void* p) {
  VI x = load_u16(p), magnitude = bit_and(x, set1_i(0x7fff));
  VI shifted = shift_left<13>(magnitude);
  VI r = add(shifted, set1_i(112 << 23));
  r = select(less(magnitude, set1_i(0x400)), as_int(mul(to_float(magnitude), set1(0x1p-24f))), r);
  r = select(less(set1_i(0x7bff), magnitude), bit_or(shifted, set1_i(0x7f800000)), r);
  r = select(less(set1_i(0x7c00), magnitude), bit_or(r, set1_i(0x400000)), r);
  return as_float(bit_or(r, shift_left<16>(bit_and(x, set1_i(0x8000)))));
}
INVAR_INLINE VF load_e4m3(const uint8_t* p) {
  VI x;
  for (int i = 0; i < W; i++) x.v[i] = p[i];
  const VI magnitude = bit_and(x, set1_i(0x7f));
  VI r = add(shift_left<20>(magnitude), set1_i(112 << 23));
  r = select(less(magnitude, set1_i(8)), as_int(mul(to_float(magnitude), set1(0x1p-17f))), r);
  return as_float(bit_or(r, shift_left<24>(bit_and(x, set1_i(0x80)))));
}
// A subnormal half is an integer times 2^-24, which rounds as integers do.
INVAR_INLINE void store_f16(void* p, VF a) {
  VI x = as_int(a), magnitude = bit_and(x, set1_i(INT32_MAX));
  VI even = add(set1_i(0xfff), bit_and(shift_right<13>(magnitude), set1_i(1)));
  VI r = shift_right<13>(add(sub(magnitude, set1_i(112 << 23)), even));
  r = select(less(magnitude, set1_i(0x38800000)),
             to_int(mul(as_float(min(magnitude, set1_i(0x38800000))), set1(0x1p24f))), r);
  r = select(less(set1_i(0x477fefff), magnitude), set1_i(0x7c00), r);
  VI nan = bit_or(set1_i(0x7e00), bit_and(shift_right<13>(magnitude), set1_i(0x3ff)));
  r = select(less(set1_i(0x7f800000), magnitude), nan, r);
  r = bit_or(r, bit_and(shift_right<16>(x), set1_i(0x8000)));
  uint16_t halves[W];
  for (int i = 0; i < W; i++) halves[i] = (uint16_t)r.v[i];
  memcpy(p, halves, sizeof halves);
}
INVAR_INLINE VF load_bf16(const void* p) { return as_float(shift_left<16>(load_u16(p))); }
// W values in the low halves of the lanes.
INVAR_INLINE VI to_bf16(VF a) {
  VI x = as_int(a), magnitude = bit_and(x, set1_i(INT32_MAX));
  VI rounded = add(x, add(set1_i(0x7fff), bit_and(shift_right<16>(x), set1_i(1))));
  rounded = select(less(set1_i(0x7f800000), magnitude), bit_or(x, set1_i(0x400000)), rounded);
  rounded = select(less(magnitude, set1_i(0x800000)), bit_and(x, set1_i(INT32_MIN)), rounded);
  return shift_right<16>(rounded);
}
INVAR_INLINE void store_bf16(void* p, VF a) {
  VI x = to_bf16(a);
  uint16_t r[W];
  for (int i = 0; i < W; i++) r[i] = (uint16_t)x.v[i];
  memcpy(p, r, sizeof r);
}
INVAR_INLINE VF dot_bf16(VF acc, VI a, VI b) {
  const VI high = set1_i((int32_t)0xffff0000);
  acc = fma(as_float(bit_and(a, high)), as_float(bit_and(b, high)), acc);
  return fma(as_float(shift_left<16>(a)), as_float(shift_left<16>(b)), acc);
}

}  // namespace invar::INVAR_ISA
