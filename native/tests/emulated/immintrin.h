// The AVX-512 intrinsics that simd_avx512.h and dot.h use, lane by lane in plain C++, after Intel's
// intrinsics guide (https://www.intel.com/content/www/us/en/docs/intrinsics-guide/): the AVX-512
// kernels can then be run, slowly, and held to the others on any CPU. Compile them with
//   -DINVAR_ISA=avx512 -DINVAR_ISA_AVX512=1 -Inative/tests/emulated     (and no -mavx512...)
// so that this file is found in place of the compiler's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __m128i {
  uint8_t b[16];
};
struct __m256i {
  uint8_t b[32];
};
struct __m512i {
  uint8_t b[64];
};
struct __m512 {
  float f[16];
};
struct __m512bh {
  __m512i v;
  explicit __m512bh(__m512i x) : v(x) {}
};
struct __m256bh {
  __m256i v;
  explicit operator __m256i() const { return v; }
};
using __mmask16 = uint16_t;

enum { _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_LE_OQ };
enum { _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8 };

namespace emulated {
template <class T, class V>
static inline T get(const V& v, int i) {
  T r;
  memcpy(&r, (const char*)&v + i * sizeof(T), sizeof(T));
  return r;
}
template <class T, class V>
static inline void set(V& v, int i, T x) {
  memcpy((char*)&v + i * sizeof(T), &x, sizeof(T));
}
// Lane i of a result from lanes i of the operands.
template <class R, class T, class F>
static inline R lanes(F f) {
  R r;
  for (int i = 0; i < (int)(sizeof(R) / sizeof(T)); i++) set<T>(r, i, (T)f(i));
  return r;
}
template <class F>
static inline __m512 ps(F f) {
  return lanes<__m512, float>(f);
}
template <class F>
static inline __m512i epi32(F f) {
  return lanes<__m512i, int32_t>(f);
}
template <class F>
static inline __m512i epi16(F f) {
  return lanes<__m512i, int16_t>(f);
}
template <class F>
static inline __m512i epi8(F f) {
  return lanes<__m512i, int8_t>(f);
}
static inline int32_t i32(const __m512i& a, int i) { return get<int32_t>(a, i); }
static inline uint32_t u32(const __m512i& a, int i) { return get<uint32_t>(a, i); }
static inline float half(uint16_t h) {
  int e = h >> 10 & 31, m = h & 1023;
  if (e == 31) {
    uint32_t bits = (uint32_t)(h & 0x8000) << 16 | 0x7f800000 | (uint32_t)m << 13;
    if (m) bits |= 0x400000;
    return get<float>(bits, 0);
  }
  float x = e ? std::ldexp((float)(1024 + m), e - 25) : std::ldexp((float)m, -24);
  return h & 0x8000 ? -x : x;
}
// Nearest-even; overflow to infinity, NaN keeps its sign and highest bits.
static inline uint16_t to_half(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  const uint16_t sign = b >> 16 & 0x8000;
  b &= 0x7fffffff;
  if (b > 0x7f800000) return sign | 0x7e00 | (b >> 13 & 0x3ff);
  if (b >= 0x477ff000) return sign | 0x7c00;
  memcpy(&x, &b, 4);
  if (b < 0x38800000) return sign | (uint16_t)std::nearbyint((double)x * (1 << 24));
  return sign | (uint16_t)((b - (112u << 23) + 0xfff + (b >> 13 & 1)) >> 13);
}
static inline uint16_t to_bf16(float x) {
  uint32_t u = get<uint32_t>(x, 0), magnitude = u & 0x7fffffff;
  if (magnitude < 0x800000) return (uint16_t)(u >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline float from_bf16(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  if ((u & 0x7f800000) == 0) u &= 0x80000000;
  return get<float>(u, 0);
}
}  // namespace emulated

#define INVAR_LANES(type, of, name, value, ...) \
  static inline type name(__VA_ARGS__) {        \
    using namespace emulated;                   \
    return of([&](int i) { return value; });    \
  }
#define INVAR_PS(name, value, ...) INVAR_LANES(__m512, ps, name, value, __VA_ARGS__)
#define INVAR_EPI32(name, value, ...) INVAR_LANES(__m512i, epi32, name, value, __VA_ARGS__)
#define INVAR_EPI16(name, value, ...) INVAR_LANES(__m512i, epi16, name, value, __VA_ARGS__)
#define INVAR_EPI8(name, value, ...) INVAR_LANES(__m512i, epi8, name, value, __VA_ARGS__)

INVAR_PS(_mm512_setzero_ps, (void(i), 0.0f), )
INVAR_PS(_mm512_set1_ps, (void(i), x), float x)
INVAR_PS(_mm512_loadu_ps, get<float>(*(const char (*)[64])p, i), const void* p)
INVAR_PS(_mm512_maskz_loadu_ps, (m >> i & 1 ? ((const float*)p)[i] : 0.0f), __mmask16 m,
         const void* p)
INVAR_PS(_mm512_add_ps, a.f[i] + b.f[i], __m512 a, __m512 b)
INVAR_PS(_mm512_sub_ps, a.f[i] - b.f[i], __m512 a, __m512 b)
INVAR_PS(_mm512_mul_ps, a.f[i] * b.f[i], __m512 a, __m512 b)
INVAR_PS(_mm512_div_ps, a.f[i] / b.f[i], __m512 a, __m512 b)
INVAR_PS(_mm512_sqrt_ps, std::sqrt(a.f[i]), __m512 a)
INVAR_PS(_mm512_fmadd_ps, std::fma(a.f[i], b.f[i], c.f[i]), __m512 a, __m512 b, __m512 c)
INVAR_PS(_mm512_fnmadd_ps, std::fma(-a.f[i], b.f[i], c.f[i]), __m512 a, __m512 b, __m512 c)
INVAR_PS(_mm512_min_ps, (a.f[i] < b.f[i] ? a.f[i] : b.f[i]), __m512 a, __m512 b)
INVAR_PS(_mm512_max_ps, (a.f[i] > b.f[i] ? a.f[i] : b.f[i]), __m512 a, __m512 b)
INVAR_PS(_mm512_shuffle_f32x4, (i < 8 ? a : b).f[(order >> i / 4 * 2 & 3) * 4 + i % 4], __m512 a,
         __m512 b, int order)
INVAR_PS(_mm512_permute_ps, a.f[i / 4 * 4 + (order >> i % 4 * 2 & 3)], __m512 a, int order)
INVAR_PS(_mm512_roundscale_ps, (void(mode), std::nearbyint(a.f[i])), __m512 a, int mode)
INVAR_PS(_mm512_mask_blend_ps, (m >> i & 1 ? b.f[i] : a.f[i]), __mmask16 m, __m512 a, __m512 b)
INVAR_PS(_mm512_castsi512_ps, get<float>(a, i), __m512i a)
INVAR_PS(_mm512_cvtepi32_ps, (float)i32(a, i), __m512i a)
INVAR_PS(_mm512_cvtph_ps, half(get<uint16_t>(a, i)), __m256i a)

INVAR_EPI32(_mm512_setzero_si512, (void(i), 0), )
INVAR_EPI32(_mm512_set1_epi32, (void(i), x), int32_t x)
INVAR_EPI32(_mm512_loadu_si512, get<int32_t>(*(const char (*)[64])p, i), const void* p)
INVAR_EPI32(_mm512_maskz_loadu_epi32, (m >> i & 1 ? ((const int32_t*)p)[i] : 0), __mmask16 m,
            const void* p)
INVAR_EPI32(_mm512_add_epi32, (int32_t)(u32(a, i) + u32(b, i)), __m512i a, __m512i b)
INVAR_EPI32(_mm512_sub_epi32, (int32_t)(u32(a, i) - u32(b, i)), __m512i a, __m512i b)
INVAR_EPI32(_mm512_mullo_epi32, (int32_t)(u32(a, i) * u32(b, i)), __m512i a, __m512i b)
INVAR_EPI32(_mm512_min_epi32, (i32(a, i) < i32(b, i) ? i32(a, i) : i32(b, i)), __m512i a, __m512i b)
INVAR_EPI32(_mm512_max_epi32, (i32(a, i) > i32(b, i) ? i32(a, i) : i32(b, i)), __m512i a, __m512i b)
static inline int _mm512_reduce_max_epi32(__m512i a) {
  int r = emulated::i32(a, 0);
  for (int i = 1; i < 16; i++) r = emulated::i32(a, i) > r ? emulated::i32(a, i) : r;
  return r;
}
static inline int _mm512_mask_reduce_add_epi32(__mmask16 m, __m512i a) {
  uint32_t r = 0;
  for (int i = 0; i < 16; i++) r += m >> i & 1 ? emulated::u32(a, i) : 0;
  return (int)r;
}
INVAR_EPI32(_mm512_and_si512, i32(a, i) & i32(b, i), __m512i a, __m512i b)
INVAR_EPI32(_mm512_or_si512, i32(a, i) | i32(b, i), __m512i a, __m512i b)
INVAR_EPI32(_mm512_xor_si512, i32(a, i) ^ i32(b, i), __m512i a, __m512i b)
INVAR_EPI32(_mm512_slli_epi32, (int32_t)(u32(a, i) << n), __m512i a, unsigned n)
INVAR_EPI32(_mm512_srli_epi32, (int32_t)(u32(a, i) >> n), __m512i a, unsigned n)
INVAR_EPI32(_mm512_srai_epi32, i32(a, i) >> n, __m512i a, unsigned n)
INVAR_EPI32(_mm512_castps_si512, get<int32_t>(a, i), __m512 a)
INVAR_EPI32(_mm512_cvtps_epi32, (int32_t)std::nearbyint(a.f[i]), __m512 a)
INVAR_EPI32(_mm512_mask_blend_epi32, (m >> i & 1 ? i32(b, i) : i32(a, i)), __mmask16 m, __m512i a,
            __m512i b)
INVAR_EPI32(_mm512_cvtepu16_epi32, get<uint16_t>(a, i), __m256i a)
INVAR_EPI32(_mm512_cvtepu8_epi32, get<uint8_t>(a, i), __m128i a)
INVAR_EPI32(_mm512_broadcast_i32x4, get<int32_t>(a, i % 4), __m128i a)
INVAR_EPI32(_mm512_cvtepi8_epi32, get<int8_t>(a, i), __m128i a)

INVAR_EPI16(_mm512_set1_epi16, (void(i), x), int x)
INVAR_EPI16(_mm512_slli_epi16, (get<uint16_t>(a, i) << n), __m512i a, unsigned n)
INVAR_EPI16(_mm512_srli_epi16, (get<uint16_t>(a, i) >> n), __m512i a, unsigned n)
INVAR_EPI16(_mm512_cvtepu8_epi16, get<uint8_t>(a, i), __m256i a)
INVAR_EPI8(_mm512_set1_epi8, (void(i), x), int x)
INVAR_EPI8(_mm512_shuffle_epi8, (b.b[i] & 128 ? 0 : a.b[i / 16 * 16 + b.b[i] % 16]), __m512i a,
           __m512i b)

static inline __m256i _mm256_castsi128_si256(__m128i a) {
  __m256i r{};
  memcpy(&r, &a, sizeof a);
  return r;
}
static inline __m256i _mm512_castsi512_si256(__m512i a) {
  __m256i r;
  memcpy(&r, &a, sizeof r);
  return r;
}
static inline __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h,
                                        int i, int j, int k, int l, int m, int n, int o, int p) {
  const int x[16] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
  return _mm512_loadu_si512(x);
}

static inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  using namespace emulated;
  return epi32([&](int i) {
    int sum = 0;
    for (int t = 0; t < 2; t++) sum += get<int16_t>(a, 2 * i + t) * get<int16_t>(b, 2 * i + t);
    return sum;
  });
}
static inline __m512i _mm512_dpwssd_epi32(__m512i acc, __m512i a, __m512i b) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
}
// a unsigned, b signed.
static inline __m512i _mm512_dpbusd_epi32(__m512i acc, __m512i a, __m512i b) {
  using namespace emulated;
  return epi32([&](int i) {
    int sum = i32(acc, i);
    for (int t = 0; t < 4; t++) sum += get<uint8_t>(a, 4 * i + t) * get<int8_t>(b, 4 * i + t);
    return sum;
  });
}
static inline __m512 _mm512_dpbf16_ps(__m512 acc, __m512bh a, __m512bh b) {
  using namespace emulated;
  return ps([&](int i) {
    float x = acc.f[i];
    for (int t = 1; t >= 0; t--)
      x = std::fma(from_bf16(get<uint16_t>(a.v, 2 * i + t)),
                   from_bf16(get<uint16_t>(b.v, 2 * i + t)), x);
    return x;
  });
}
static inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
  using namespace emulated;
  return {lanes<__m256i, uint16_t>([&](int i) { return to_bf16(a.f[i]); })};
}
static inline __m256i _mm512_cvtps_ph(__m512 a, int) {
  using namespace emulated;
  return lanes<__m256i, uint16_t>([&](int i) { return to_half(a.f[i]); });
}
static inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  using namespace emulated;
  return lanes<__m128i, int8_t>([&](int i) { return i32(a, i); });
}
static inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  using namespace emulated;
  return lanes<__m256i, int16_t>([&](int i) { return i32(a, i); });
}

static inline float _mm512_cvtss_f32(__m512 a) { return a.f[0]; }
static inline void _mm512_storeu_ps(void* p, __m512 a) { memcpy(p, &a, 64); }
static inline void _mm512_storeu_si512(void* p, __m512i a) { memcpy(p, &a, 64); }
static inline void _mm512_mask_storeu_ps(void* p, __mmask16 m, __m512 a) {
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) memcpy((float*)p + i, &a.f[i], 4);
}
static inline void _mm512_mask_storeu_epi32(void* p, __mmask16 m, __m512i a) {
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) memcpy((int32_t*)p + i, a.b + 4 * i, 4);
}
static inline __m256i _mm256_loadu_si256(const __m256i* p) {
  __m256i r;
  memcpy(&r, p, 32);
  return r;
}
static inline void _mm256_storeu_si256(__m256i* p, __m256i a) { memcpy(p, &a, 32); }
static inline __m128i _mm_loadu_si128(const __m128i* p) {
  __m128i r;
  memcpy(&r, p, 16);
  return r;
}
static inline void _mm_storeu_si128(__m128i* p, __m128i a) { memcpy(p, &a, 16); }

static inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  __mmask16 r = 0;
  for (int i = 0; i < 16; i++) {
    bool yes = predicate == _CMP_LT_OQ   ? a.f[i] < b.f[i]
               : predicate == _CMP_LE_OQ ? a.f[i] <= b.f[i]
                                         : a.f[i] == b.f[i];
    r |= (__mmask16)(yes << i);
  }
  return r;
}
static inline __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
  __mmask16 r = 0;
  for (int i = 0; i < 16; i++) r |= (__mmask16)((emulated::i32(a, i) < emulated::i32(b, i)) << i);
  return r;
}
static inline __mmask16 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b) {
  __mmask16 r = 0;
  for (int i = 0; i < 16; i++) r |= (__mmask16)((emulated::i32(a, i) == emulated::i32(b, i)) << i);
  return r;
}
