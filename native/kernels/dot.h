// Exact integer dot products of weight codes and s8 activation codes: lane i is column i, a VB
// holds a quad (4 neighbouring K) of each column, and the same quad of one activation row is
// broadcast.
//
// Narrow sums are for codes u8 <= 63, over one group of a format. On AVX2 they stay in two int16
// per column (K % 4 in {0, 1} and {2, 3}) until the group ends, because vpmaddubsw + vpaddw is
// twice as fast as widening at every quad. vpmaddubsw cannot saturate (63 * 127 * 2 = 16,002),
// vpaddw wraps, so only the final value of each half must fit in int16; with the bias b subtracted
// it does:
//
//   format      codes - b    K per half   largest half
//   q4_0        -8 .. 7      16           16,256
//   q4_1, q4_k   0 .. 15     16           30,480
//   q5_0, q5_1  -16 .. 15    16           32,512
//   mxfp4       -12 .. 12    16           24,384    (the bias is 16)
//   q2_k         0 .. 3      8             3,048
//   q3_k        -32 .. 24    8            32,512    (codes times 8)
//   q5_k         0 .. 31     8            31,496
//   q6_k        -32 .. 31    8            32,512
//   iq1_*        -9 .. 9     8             9,144
//   iq3_xxs     -31 .. 31    8            31,496
//   iq3_s       -15 .. 15    8            15,240
//   tq*_0        -1 .. 2     8             2,032
//
// So the bias enters as the initial value, -b * (the half's sum of activation codes), which the
// quantiser stores: "starts", two int16 per group, of -8 * sum (q8_32) or -32 * sum (q8_256). A
// format's own bias is kStarts times that. AVX-512 and portable sums are int32 from the start.
//
// Wide sums are for s8 weights (q8_0, iq4_nl, iq4_xs, iq2_*), where two int16 products, or the sum
// of a group, can overflow int16.
#pragma once

#include "kernels/simd.h"

namespace invar::INVAR_ISA {

// Exact sums of the codes with K % 4 in {0, 1} and in {2, 3}.
struct HalfSums {
  int32_t first, second;
};

#if defined(INVAR_ISA_AVX512)

// Of sums whose lane i holds K % 4 = i % 4.
INVAR_INLINE HalfSums half_sums(VI a) {
  return {_mm512_mask_reduce_add_epi32(0x3333, a.v), _mm512_mask_reduce_add_epi32(0xcccc, a.v)};
}
// (bytes >> n) & mask, n < 0 shifts left; the mask must clear what crosses a byte. n is a constant
// once the caller's loop is unrolled.
INVAR_INLINE VB bits_at(VB a, int n, int mask) {
  __m512i x = n >= 0 ? _mm512_srli_epi16(a.v, n) : _mm512_slli_epi16(a.v, -n);
  return {_mm512_and_si512(x, _mm512_set1_epi8((char)mask))};
}
INVAR_INLINE VB bit_or(VB a, VB b) { return {_mm512_or_si512(a.v, b.v)}; }
// Entries of a table of 16 bytes at places below 16.
INVAR_INLINE VB lookup(const void* table, VB places) {
  __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return {_mm512_shuffle_epi8(bytes, places.v)};
}
// A byte per lane.
INVAR_INLINE VI load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))};
}
INVAR_INLINE VI load_s8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))};
}
// acc + a.low * b.low + a.high * b.high, int16 pairs.
INVAR_INLINE VI dot_pair(VI acc, VI a, VI b) { return {_mm512_dpwssd_epi32(acc.v, a.v, b.v)}; }
INVAR_INLINE VI load_u8_pairs(const uint8_t* p) {
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p))};
}
INVAR_INLINE void store_s8(int8_t* p, VI a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v));
}
INVAR_INLINE void store_s16(int16_t* p, VI a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v));
}

template <int kStarts>
INVAR_INLINE VI narrow_start(VI starts) {
  return {_mm512_madd_epi16(starts.v, _mm512_set1_epi16(kStarts))};
}
INVAR_INLINE VI narrow_step(VI sum, VB codes, VI quad) {
  return {_mm512_dpbusd_epi32(sum.v, codes.v, quad.v)};
}
INVAR_INLINE VI narrow_total(VI sum) { return sum; }
// A group's scale per column, from signed bytes, in the form narrow_scaled wants.
INVAR_INLINE VI load_scales(const uint8_t* p) { return load_s8(p); }
INVAR_INLINE VI unit_scales() { return set1_i(1); }
// The same from pairs of bytes per column: the low nibbles of the first or of the second bytes.
INVAR_INLINE VI load_nibble_scales(const uint8_t* pairs, int second) {
  VI both = load_u8_pairs(pairs);
  return bit_and(second ? shift_right<16>(both) : both, set1_i(15));
}
INVAR_INLINE VI narrow_scaled(VI total, VI sum, VI scales) { return add(total, mul(sum, scales)); }

struct WideCodes {
  VB v;
};
INVAR_INLINE WideCodes wide_codes(VB s8) {
  return {{_mm512_xor_si512(s8.v, _mm512_set1_epi8((char)0x80))}};
}
template <int kStarts>
INVAR_INLINE VI wide_start(VI starts) {
  return narrow_start<kStarts>(starts);
}
INVAR_INLINE VI wide_step(VI sum, WideCodes codes, VI quad) {
  return narrow_step(sum, codes.v, quad);
}
// By a group's scales per column, int32.
INVAR_INLINE VI wide_scaled(VI total, VI sum, VI scales) { return add(total, mul(sum, scales)); }

#elif defined(INVAR_ISA_AVX2)

INVAR_INLINE HalfSums half_sums(VI a) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  const int64_t both = _mm_cvtsi128_si64(_mm_hadd_epi32(x, x));
  return {(int32_t)both, (int32_t)(both >> 32)};
}
INVAR_INLINE VB bits_at(VB a, int n, int mask) {
  __m256i x = n >= 0 ? _mm256_srli_epi16(a.v, n) : _mm256_slli_epi16(a.v, -n);
  return {_mm256_and_si256(x, _mm256_set1_epi8((char)mask))};
}
INVAR_INLINE VB bit_or(VB a, VB b) { return {_mm256_or_si256(a.v, b.v)}; }
INVAR_INLINE VB lookup(const void* table, VB places) {
  __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(bytes, places.v)};
}
INVAR_INLINE VI load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))};
}
INVAR_INLINE VI load_s8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))};
}
INVAR_INLINE VI dot_pair(VI acc, VI a, VI b) { return add(acc, {_mm256_madd_epi16(a.v, b.v)}); }
INVAR_INLINE VI load_u8_pairs(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p))};
}
INVAR_INLINE void store_s8(int8_t* p, VI a) {
  __m128i x = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(x, x));
}
INVAR_INLINE void store_s16(int16_t* p, VI a) {
  __m128i low = _mm256_castsi256_si128(a.v), high = _mm256_extracti128_si256(a.v, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(low, high));
}

template <int kStarts>
INVAR_INLINE VI narrow_start(VI starts) {
  static_assert(kStarts == 1 || kStarts == 2);
  return kStarts == 1 ? starts : VI{_mm256_add_epi16(starts.v, starts.v)};
}
// GCC would reassociate the additions of a group into a tree whose leaves, all the products, do not
// fit in registers; an empty asm keeps a sum where it is and emits nothing.
INVAR_INLINE VI in_register(VI sum) {
  asm("" : "+x"(sum.v));
  return sum;
}
INVAR_INLINE VI narrow_step(VI sum, VB codes, VI quad) {
  return in_register({_mm256_add_epi16(sum.v, _mm256_maddubs_epi16(codes.v, quad.v))});
}
INVAR_INLINE VI narrow_total(VI sum) { return {_mm256_madd_epi16(sum.v, _mm256_set1_epi16(1))}; }
// The scale stands in both int16 halves: vpmaddwd then adds and scales at once.
INVAR_INLINE VI load_scales(const uint8_t* p) {
  const __m256i to_high_bytes =
      _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5,
                       -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
  int64_t bytes;
  memcpy(&bytes, p, 8);
  return {_mm256_srai_epi16(_mm256_shuffle_epi8(_mm256_set1_epi64x(bytes), to_high_bytes), 8)};
}
INVAR_INLINE VI unit_scales() { return {_mm256_set1_epi16(1)}; }
INVAR_INLINE VI load_nibble_scales(const uint8_t* pairs, int second) {
  const __m256i first_bytes =
      _mm256_setr_epi8(0, -1, 0, -1, 2, -1, 2, -1, 4, -1, 4, -1, 6, -1, 6, -1, 8, -1, 8, -1, 10, -1,
                       10, -1, 12, -1, 12, -1, 14, -1, 14, -1);
  const __m256i which = second ? _mm256_add_epi16(first_bytes, _mm256_set1_epi16(1)) : first_bytes;
  __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)pairs));
  return {_mm256_and_si256(_mm256_shuffle_epi8(bytes, which), _mm256_set1_epi16(15))};
}
// In its register: GCC would keep the product of a group's first sum until that of its second.
INVAR_INLINE VI narrow_scaled(VI total, VI sum, VI scales) {
  return in_register(dot_pair(total, sum, scales));
}

// |w| as u8 (128 fits) times the activation with w's sign: 128 * 127 * 2 = 32,512 per int16. Three
// of four operations want one of two ports, which bounds it at 41 % of the narrow rate on Zen 3.
// Tried there as loops of assembler with the fold, preparation not counted: this 37 %, codes and
// activations as int16 37 to 38 %, the sign by vpshufb 34 %, by vpxor 32 %, codes as two nibbles 30
// %.
struct WideCodes {
  VB magnitude, sign;
};
INVAR_INLINE WideCodes wide_codes(VB s8) { return {{_mm256_abs_epi8(s8.v)}, s8}; }
template <int>
INVAR_INLINE VI wide_start(VI) {
  return zero_i();
}
INVAR_INLINE VI wide_step(VI sum, WideCodes codes, VI quad) {
  __m256i x = _mm256_maddubs_epi16(codes.magnitude.v, _mm256_sign_epi8(quad.v, codes.sign.v));
  return in_register(add(sum, {_mm256_madd_epi16(x, _mm256_set1_epi16(1))}));
}
// In its register, as narrow_scaled.
INVAR_INLINE VI wide_scaled(VI total, VI sum, VI scales) {
  return in_register(add(total, mul(sum, scales)));
}

#else

INVAR_INLINE HalfSums half_sums(VI a) { return {a.v[0] + a.v[1], a.v[2] + a.v[3]}; }
INVAR_INLINE VB bits_at(VB a, int n, int mask) {
  u8x16 x = n >= 0 ? a.v >> n : a.v << -n;
  return {x & set1_b((uint8_t)mask).v};
}
INVAR_INLINE VB bit_or(VB a, VB b) { return {a.v | b.v}; }
INVAR_INLINE VB lookup(const void* table, VB places) {
  VB r;
  for (int i = 0; i < 4 * W; i++) r.v[i] = ((const uint8_t*)table)[places.v[i]];
  return r;
}
INVAR_INLINE VI load_u8(const uint8_t* p) {
  VI r;
  for (int i = 0; i < W; i++) r.v[i] = p[i];
  return r;
}
INVAR_INLINE VI load_s8(const uint8_t* p) {
  VI r;
  for (int i = 0; i < W; i++) r.v[i] = (int8_t)p[i];
  return r;
}
INVAR_INLINE VI low_half(VI a) { return shift_right_signed<16>(shift_left<16>(a)); }
INVAR_INLINE VI high_half(VI a) { return shift_right_signed<16>(a); }
INVAR_INLINE VI dot_pair(VI acc, VI a, VI b) {
  return add(acc, add(mul(low_half(a), low_half(b)), mul(high_half(a), high_half(b))));
}
INVAR_INLINE VI load_u8_pairs(const uint8_t* p) {
  VI r;
  for (int i = 0; i < W; i++) r.v[i] = p[2 * i] | p[2 * i + 1] << 16;
  return r;
}
INVAR_INLINE void store_s8(int8_t* p, VI a) {
  for (int i = 0; i < W; i++) p[i] = (int8_t)a.v[i];
}
INVAR_INLINE void store_s16(int16_t* p, VI a) {
  for (int i = 0; i < W; i++) p[i] = (int16_t)a.v[i];
}

template <int kStarts>
INVAR_INLINE VI narrow_start(VI starts) {
  return mul(add(low_half(starts), high_half(starts)), set1_i(kStarts));
}
// Bytes 2 i and 2 i + 1 of a register as int16 lanes.
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
INVAR_INLINE i16x8 even_s8(u8x16 a) { return reinterpret<i16x8>(reinterpret<u16x8>(a) << 8) >> 8; }
INVAR_INLINE i16x8 odd_s8(u8x16 a) { return reinterpret<i16x8>(a) >> 8; }
// Two products per int16, at most 128 * 127 * 2 = 32,512, then both int16 of a column.
INVAR_INLINE VI add_products(VI sum, i16x8 even, i16x8 odd, VI quad) {
  u8x16 a = reinterpret<u8x16>(quad.v);
  VI pairs = {reinterpret<i32x4>(even * even_s8(a) + odd * odd_s8(a))};
  return add(sum, add(low_half(pairs), high_half(pairs)));
}
INVAR_INLINE VI narrow_step(VI sum, VB codes, VI quad) {
  u16x8 w = reinterpret<u16x8>(codes.v);
  return add_products(sum, reinterpret<i16x8>(w & 255), reinterpret<i16x8>(w >> 8), quad);
}
INVAR_INLINE VI narrow_total(VI sum) { return sum; }
INVAR_INLINE VI load_scales(const uint8_t* p) { return load_s8(p); }
INVAR_INLINE VI unit_scales() { return set1_i(1); }
INVAR_INLINE VI load_nibble_scales(const uint8_t* pairs, int second) {
  VI both = load_u8_pairs(pairs);
  return bit_and(second ? shift_right<16>(both) : both, set1_i(15));
}
INVAR_INLINE VI narrow_scaled(VI total, VI sum, VI scales) { return add(total, mul(sum, scales)); }

struct WideCodes {
  VB v;
};
INVAR_INLINE WideCodes wide_codes(VB s8) { return {s8}; }
template <int>
INVAR_INLINE VI wide_start(VI) {
  return zero_i();
}
INVAR_INLINE VI wide_step(VI sum, WideCodes codes, VI quad) {
  return add_products(sum, even_s8(codes.v.v), odd_s8(codes.v.v), quad);
}
INVAR_INLINE VI wide_scaled(VI total, VI sum, VI scales) { return add(total, mul(sum, scales)); }

#endif

INVAR_INLINE VB low_nibbles(VB a) { return bits_at(a, 0, 15); }
INVAR_INLINE VB high_nibbles(VB a) { return bits_at(a, 4, 15); }

}  // namespace invar::INVAR_ISA
