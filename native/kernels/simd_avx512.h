// simd.h on AVX-512 (F, BW, VL, DQ, VNNI, BF16). Included by simd.h only.
#pragma once

#include <immintrin.h>

// GCC 12's own headers trip these once inlined: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace invar::INVAR_ISA {

constexpr int W = 16;
struct VF {
  __m512 v;
};
struct VI {
  __m512i v;
};
struct VB {
  __m512i v;
};
struct VM {
  __mmask16 v;
};

INVAR_INLINE __mmask16 lanes_below(int n) { return (__mmask16)((1u << n) - 1); }

// memory
INVAR_INLINE VF zero() { return {_mm512_setzero_ps()}; }
INVAR_INLINE VI zero_i() { return {_mm512_setzero_si512()}; }
INVAR_INLINE VF set1(float x) { return {_mm512_set1_ps(x)}; }
INVAR_INLINE VI set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
INVAR_INLINE VB set1_b(uint8_t x) { return {_mm512_set1_epi8((char)x)}; }
INVAR_INLINE VF load(const float* p) { return {_mm512_loadu_ps(p)}; }
INVAR_INLINE VI load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
INVAR_INLINE VB load_b(const void* p) { return {_mm512_loadu_si512(p)}; }
INVAR_INLINE void store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
INVAR_INLINE void store_i(void* p, VI a) { _mm512_storeu_si512(p, a.v); }
INVAR_INLINE void store_b(void* p, VB a) { _mm512_storeu_si512(p, a.v); }
INVAR_INLINE VF load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes_below(n), p)}; }
INVAR_INLINE VI load_i_n(const int32_t* p, int n) {
  return {_mm512_maskz_loadu_epi32(lanes_below(n), p)};
}
INVAR_INLINE void store_n(float* p, int n, VF a) { _mm512_mask_storeu_ps(p, lanes_below(n), a.v); }
INVAR_INLINE void store_i_n(int32_t* p, int n, VI a) {
  _mm512_mask_storeu_epi32(p, lanes_below(n), a.v);
}
// Lanes 0, 1, 2, ...
INVAR_INLINE VI iota() {
  return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

// floats
INVAR_INLINE VF add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
INVAR_INLINE VF sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
INVAR_INLINE VF mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
INVAR_INLINE VF div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
INVAR_INLINE VF sqrt(VF a) { return {_mm512_sqrt_ps(a.v)}; }
INVAR_INLINE VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INVAR_INLINE VF fnma(VF a, VF b, VF c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
INVAR_INLINE VF min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
INVAR_INLINE VF max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
INVAR_INLINE VF round(VF a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// Lane i = lane i + k of a, for i < k; the others are of no use.
template <int k>
INVAR_INLINE VF fold(VF a) {
  if constexpr (k == 8) return {_mm512_shuffle_f32x4(a.v, a.v, 0x0E)};
  if constexpr (k == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0x01)};
  return {k == 2 ? _mm512_permute_ps(a.v, 0x0E) : _mm512_permute_ps(a.v, 0x01)};
}
INVAR_INLINE float first_lane(VF a) { return _mm512_cvtss_f32(a.v); }

// integers
INVAR_INLINE VI add(VI a, VI b) { return {_mm512_add_epi32(a.v, b.v)}; }
INVAR_INLINE VI sub(VI a, VI b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INVAR_INLINE VI mul(VI a, VI b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
INVAR_INLINE VI min(VI a, VI b) { return {_mm512_min_epi32(a.v, b.v)}; }
INVAR_INLINE VI max(VI a, VI b) { return {_mm512_max_epi32(a.v, b.v)}; }
// The largest lane.
INVAR_INLINE int32_t max_lane(VI a) { return _mm512_reduce_max_epi32(a.v); }
INVAR_INLINE VI bit_and(VI a, VI b) { return {_mm512_and_si512(a.v, b.v)}; }
INVAR_INLINE VI bit_or(VI a, VI b) { return {_mm512_or_si512(a.v, b.v)}; }
INVAR_INLINE VI bit_xor(VI a, VI b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n>
INVAR_INLINE VI shift_left(VI a) {
  return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
INVAR_INLINE VI shift_right(VI a) {
  return {_mm512_srli_epi32(a.v, n)};
}
template <int n>
INVAR_INLINE VI shift_right_signed(VI a) {
  return {_mm512_srai_epi32(a.v, n)};
}

// between the two
INVAR_INLINE VI as_int(VF a) { return {_mm512_castps_si512(a.v)}; }
INVAR_INLINE VF as_float(VI a) { return {_mm512_castsi512_ps(a.v)}; }
INVAR_INLINE VI to_int(VF a) { return {_mm512_cvtps_epi32(a.v)}; }
INVAR_INLINE VF to_float(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }

// masks
INVAR_INLINE VM less(VF a, VF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
INVAR_INLINE VM less_equal(VF a, VF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
INVAR_INLINE VM equal(VF a, VF b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
INVAR_INLINE VM less(VI a, VI b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
INVAR_INLINE VM equal(VI a, VI b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
INVAR_INLINE VM first_n(int n) { return {lanes_below(n)}; }
INVAR_INLINE VM mask_and(VM a, VM b) { return {(__mmask16)(a.v & b.v)}; }
INVAR_INLINE VM mask_or(VM a, VM b) { return {(__mmask16)(a.v | b.v)}; }
// Bit i = lane i.
INVAR_INLINE uint32_t mask_bits(VM a) { return a.v; }
INVAR_INLINE VF select(VM m, VF yes, VF no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
INVAR_INLINE VI select(VM m, VI yes, VI no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }

// 16-bit floats
INVAR_INLINE VF load_f16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
INVAR_INLINE VF load_e4m3(const uint8_t* p) {
  const __m512i x =
      _mm512_cvtepu8_epi16(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000));
  const __m512i rest = _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16(0x3f80));
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_or_si512(sign, rest)))};
}
INVAR_INLINE void store_f16(void* p, VF a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
INVAR_INLINE VF load_bf16(const void* p) {
  __m256i x = _mm256_loadu_si256((const __m256i*)p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
// W values in the low halves of the lanes.
INVAR_INLINE VI to_bf16(VF a) { return {_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v))}; }
INVAR_INLINE void store_bf16(void* p, VF a) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
}
INVAR_INLINE VF dot_bf16(VF acc, VI a, VI b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
}

}  // namespace invar::INVAR_ISA
