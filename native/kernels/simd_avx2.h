// simd.h on AVX2 + FMA + F16C. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace invar::INVAR_ISA {

constexpr int W = 8;
struct VF {
  __m256 v;
};
struct VI {
  __m256i v;
};
struct VB {
  __m256i v;
};
struct VM {
  __m256 v;
};

alignas(64) static const int32_t kLaneMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                  0,  0,  0,  0,  0,  0,  0,  0};
INVAR_INLINE __m256i lanes_below(int n) {
  return _mm256_loadu_si256((const __m256i*)(kLaneMask + 8 - n));
}

// memory
INVAR_INLINE VF zero() { return {_mm256_setzero_ps()}; }
INVAR_INLINE VI zero_i() { return {_mm256_setzero_si256()}; }
INVAR_INLINE VF set1(float x) { return {_mm256_set1_ps(x)}; }
INVAR_INLINE VI set1_i(int32_t x) { return {_mm256_set1_epi32(x)}; }
INVAR_INLINE VB set1_b(uint8_t x) { return {_mm256_set1_epi8((char)x)}; }
INVAR_INLINE VF load(const float* p) { return {_mm256_loadu_ps(p)}; }
INVAR_INLINE VI load_i(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
INVAR_INLINE VB load_b(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
INVAR_INLINE void store(float* p, VF a) { _mm256_storeu_ps(p, a.v); }
INVAR_INLINE void store_i(void* p, VI a) { _mm256_storeu_si256((__m256i*)p, a.v); }
INVAR_INLINE void store_b(void* p, VB a) { _mm256_storeu_si256((__m256i*)p, a.v); }
INVAR_INLINE VF load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lanes_below(n))}; }
INVAR_INLINE VI load_i_n(const int32_t* p, int n) {
  return {_mm256_maskload_epi32((const int*)p, lanes_below(n))};
}
INVAR_INLINE void store_n(float* p, int n, VF a) { _mm256_maskstore_ps(p, lanes_below(n), a.v); }
INVAR_INLINE void store_i_n(int32_t* p, int n, VI a) {
  _mm256_maskstore_epi32((int*)p, lanes_below(n), a.v);
}
// Lanes 0, 1, 2, ...
INVAR_INLINE VI iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }

// floats
INVAR_INLINE VF add(VF a, VF b) { return {_mm256_add_ps(a.v, b.v)}; }
INVAR_INLINE VF sub(VF a, VF b) { return {_mm256_sub_ps(a.v, b.v)}; }
INVAR_INLINE VF mul(VF a, VF b) { return {_mm256_mul_ps(a.v, b.v)}; }
INVAR_INLINE VF div(VF a, VF b) { return {_mm256_div_ps(a.v, b.v)}; }
INVAR_INLINE VF sqrt(VF a) { return {_mm256_sqrt_ps(a.v)}; }
INVAR_INLINE VF fma(VF a, VF b, VF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
INVAR_INLINE VF fnma(VF a, VF b, VF c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
INVAR_INLINE VF min(VF a, VF b) { return {_mm256_min_ps(a.v, b.v)}; }
INVAR_INLINE VF max(VF a, VF b) { return {_mm256_max_ps(a.v, b.v)}; }
INVAR_INLINE VF round(VF a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// Lane i = lane i + k of a, for i < k; the others are of no use.
template <int k>
INVAR_INLINE VF fold(VF a) {
  if constexpr (k == 4) return {_mm256_castps128_ps256(_mm256_extractf128_ps(a.v, 1))};
  return {k == 2 ? _mm256_permute_ps(a.v, 0x0E) : _mm256_movehdup_ps(a.v)};
}
INVAR_INLINE float first_lane(VF a) { return _mm256_cvtss_f32(a.v); }

// integers
INVAR_INLINE VI add(VI a, VI b) { return {_mm256_add_epi32(a.v, b.v)}; }
INVAR_INLINE VI sub(VI a, VI b) { return {_mm256_sub_epi32(a.v, b.v)}; }
INVAR_INLINE VI mul(VI a, VI b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
INVAR_INLINE VI min(VI a, VI b) { return {_mm256_min_epi32(a.v, b.v)}; }
INVAR_INLINE VI max(VI a, VI b) { return {_mm256_max_epi32(a.v, b.v)}; }
// The largest lane.
INVAR_INLINE int32_t max_lane(VI a) {
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
INVAR_INLINE VI bit_and(VI a, VI b) { return {_mm256_and_si256(a.v, b.v)}; }
INVAR_INLINE VI bit_or(VI a, VI b) { return {_mm256_or_si256(a.v, b.v)}; }
INVAR_INLINE VI bit_xor(VI a, VI b) { return {_mm256_xor_si256(a.v, b.v)}; }
template <int n>
INVAR_INLINE VI shift_left(VI a) {
  return {_mm256_slli_epi32(a.v, n)};
}
template <int n>
INVAR_INLINE VI shift_right(VI a) {
  return {_mm256_srli_epi32(a.v, n)};
}
template <int n>
INVAR_INLINE VI shift_right_signed(VI a) {
  return {_mm256_srai_epi32(a.v, n)};
}

// between the two
INVAR_INLINE VI as_int(VF a) { return {_mm256_castps_si256(a.v)}; }
INVAR_INLINE VF as_float(VI a) { return {_mm256_castsi256_ps(a.v)}; }
INVAR_INLINE VI to_int(VF a) { return {_mm256_cvtps_epi32(a.v)}; }
INVAR_INLINE VF to_float(VI a) { return {_mm256_cvtepi32_ps(a.v)}; }

// masks
INVAR_INLINE VM less(VF a, VF b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
INVAR_INLINE VM less_equal(VF a, VF b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
INVAR_INLINE VM equal(VF a, VF b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
INVAR_INLINE VM less(VI a, VI b) { return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.v, a.v))}; }
INVAR_INLINE VM equal(VI a, VI b) { return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.v, b.v))}; }
INVAR_INLINE VM first_n(int n) { return {_mm256_castsi256_ps(lanes_below(n))}; }
INVAR_INLINE VM mask_and(VM a, VM b) { return {_mm256_and_ps(a.v, b.v)}; }
INVAR_INLINE VM mask_or(VM a, VM b) { return {_mm256_or_ps(a.v, b.v)}; }
// Bit i = lane i.
INVAR_INLINE uint32_t mask_bits(VM a) { return (uint32_t)_mm256_movemask_ps(a.v); }
INVAR_INLINE VF select(VM m, VF yes, VF no) { return {_mm256_blendv_ps(no.v, yes.v, m.v)}; }
INVAR_INLINE VI select(VM m, VI yes, VI no) {
  return as_int(select(m, as_float(yes), as_float(no)));
}

// 16-bit floats
INVAR_INLINE VF load_f16(const void* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))};
}
INVAR_INLINE VF load_e4m3(const uint8_t* p) {
  const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
  return {_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((int16_t)0xbfff)))};
}
INVAR_INLINE void store_f16(void* p, VF a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
INVAR_INLINE VF load_bf16(const void* p) {
  return as_float(shift_left<16>({_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p))}));
}
// W values in the low halves of the lanes.
INVAR_INLINE VI to_bf16(VF a) {
  VI x = as_int(a), magnitude = bit_and(x, set1_i(INT32_MAX));
  VI rounded = add(x, add(set1_i(0x7fff), bit_and(shift_right<16>(x), set1_i(1))));
  rounded = select(less(set1_i(0x7f800000), magnitude), bit_or(x, set1_i(0x400000)), rounded);
  rounded = select(less(magnitude, set1_i(0x800000)), bit_and(x, set1_i(INT32_MIN)), rounded);
  return shift_right<16>(rounded);
}
INVAR_INLINE void store_bf16(void* p, VF a) {
  __m256i x = to_bf16(a).v;
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
INVAR_INLINE VF dot_bf16(VF acc, VI a, VI b) {
  const VI high = set1_i((int32_t)0xffff0000);
  acc = fma(as_float(bit_and(a, high)), as_float(bit_and(b, high)), acc);
  return fma(as_float(shift_left<16>(a)), as_float(shift_left<16>(b)), acc);
}

}  // namespace invar::INVAR_ISA
