// What a page of K and V holds, for each of its formats: how the values of a token are written, and
// the sixteen lanes that one step of a product reads.
//
//           K of 16 tokens, a half          V                         behind V
//   bf16    [head_dim / 2][16 tokens][2]    [16 pairs][head_dim][2]
//   fp16    [head_dim][16 tokens]           [32 tokens][head_dim]
//   int8    [head_dim][16 tokens]           [32 tokens][head_dim]     float scale of K [32], of V
//   [32]
//
// A step of bf16 is a pair, because that is what AVX-512 multiplies; elsewhere it is one element.
#pragma once

#include "kernels/block_scale.h"
#include "kernels/dot.h"
#include "kernels/kernels.h"

namespace invar::INVAR_ISA {

constexpr int kHalfTokens = 16;  // tokens beside each other in K: the lanes of QK

struct PageBf16 {
  static constexpr KVFormat kFormat = KVFormat::bf16;
  static constexpr int kElementBytes = 2;
  static constexpr int kStep = 2;  // elements
  static constexpr bool kScaled = false;

  // The left operand, q or the probabilities: bf16 values as the instruction set wants to broadcast
  // them. AVX-512 takes a pair in one dword; elsewhere a pair is two fp32 broadcasts, so the values
  // are widened once, when they are written, and a broadcast is a plain load.
#if defined(INVAR_ISA_AVX512)
  using Operand = uint16_t;
  static constexpr bool kPairProducts = true;
  INVAR_INLINE void write_query(Operand* p, VF a) { store_bf16(p, a); }
  INVAR_INLINE void write_probability(Operand* p, VF a) { store_bf16(p, a); }
#else
  using Operand = float;
  static constexpr bool kPairProducts = false;
  INVAR_INLINE void write_query(Operand* p, VF a) { store(p, round_bf16(a)); }
  // A value of exp2_nonpositive is zero, normal or NaN, so the rare cases of to_bf16 fall away.
  INVAR_INLINE void write_probability(Operand* p, VF a) {
    const VI bits = as_int(a);
    const VI rounded = bits + set1_i(0x7fff) + (shift_right<16>(bits) & set1_i(1));
    store(p, as_float(rounded & set1_i((int32_t)0xffff0000)));
  }
#endif

  // Vector i of element 0 or 1 of the pairs at p. On AVX2 odd elements are spelled out: GCC 12
  // would load the pairs once and keep them for the even elements too, in registers that the
  // accumulators need. `kTight`: not even the mask has a register.
  template <bool kTight>
  INVAR_INLINE VF lanes(const uint8_t* p, int element, int i) {
    p += i * W * 4;
    if (element == 0) return as_float(shift_left<16>(load_i(p)));
#if defined(INVAR_ISA_AVX2)
    __m256 r;
    const __m256i& raw = *reinterpret_cast<const __m256i*>(p);
    if constexpr (kTight)
      asm("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=&x"(r) : "m"(raw), "m"(kOddMask));
    else
      asm("vpand %1, %2, %0" : "=x"(r) : "m"(raw), "x"(set1_i((int32_t)0xffff0000).v));
    return {r};
#else
    return as_float(load_i(p) & set1_i((int32_t)0xffff0000));
#endif
  }

  static void store_token(const float* k, const float* v, int32_t head_dim, int32_t slot,
                          uint8_t* page) {
    uint16_t* k_half = reinterpret_cast<uint16_t*>(page) + slot / kHalfTokens * head_dim * 16;
    uint16_t* k_lane = k_half + (slot % kHalfTokens) * 2;
    uint16_t* v_pair = reinterpret_cast<uint16_t*>(page) + kPageTokens * head_dim +
                       (slot / 2) * head_dim * 2 + slot % 2;
    for (int32_t d = 0; d < head_dim; d += 16) {
      uint16_t k16[16], v16[16];
      for (int i = 0; i < 16; i += W) {
        store_bf16(k16 + i, load(k + d + i));
        store_bf16(v16 + i, load(v + d + i));
      }
      for (int i = 0; i < 16; i += 2) memcpy(k_lane + (d + i) / 2 * 32, k16 + i, 4);
      for (int i = 0; i < 16; i++) v_pair[(d + i) * 2] = v16[i];
    }
  }

 private:
#if defined(INVAR_ISA_AVX2)
  alignas(32) static constexpr uint32_t kOddMask[8] = {0xffff0000, 0xffff0000, 0xffff0000,
                                                       0xffff0000, 0xffff0000, 0xffff0000,
                                                       0xffff0000, 0xffff0000};
#endif
};

// Formats that are multiplied in fp32, as they are widened: the left operand is not rounded.
template <class Element>
struct PageOfElements {
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kStep = 1;
  using Operand = float;
  static constexpr bool kPairProducts = false;
  INVAR_INLINE void write_query(Operand* p, VF a) { store(p, a); }
  INVAR_INLINE void write_probability(Operand* p, VF a) { store(p, a); }

  // Where K [head_dim] of a token goes, kHalfTokens apart, and V [head_dim].
  static Element* k_at(uint8_t* page, int32_t head_dim, int32_t slot) {
    return reinterpret_cast<Element*>(page) + slot / kHalfTokens * head_dim * kHalfTokens +
           slot % kHalfTokens;
  }
  static Element* v_at(uint8_t* page, int32_t head_dim, int32_t slot) {
    return reinterpret_cast<Element*>(page) + (kPageTokens + slot) * head_dim;
  }
};

// To the nearest half, ties to even; beyond 65,504 an infinity, as everywhere in the field.
struct PageF16 : PageOfElements<uint16_t> {
  static constexpr KVFormat kFormat = KVFormat::fp16;
  static constexpr bool kScaled = false;

  template <bool>
  INVAR_INLINE VF lanes(const uint8_t* p, int, int i) {
    return load_f16(p + i * W * 2);
  }
  static void store_token(const float* k, const float* v, int32_t head_dim, int32_t slot,
                          uint8_t* page) {
    uint16_t *k_to = k_at(page, head_dim, slot), *v_to = v_at(page, head_dim, slot);
    for (int32_t d = 0; d < head_dim; d += W) {
      uint16_t half[W];
      store_f16(half, load(k + d));
      for (int i = 0; i < W; i++) k_to[(d + i) * kHalfTokens] = half[i];
      store_f16(v_to + d, load(v + d));
    }
  }
};

// Codes of -127 … 127 with one scale for K and one for V of a token, as activations have them.
struct PageI8 : PageOfElements<int8_t> {
  static constexpr KVFormat kFormat = KVFormat::int8;
  static constexpr bool kScaled = true;

  template <bool>
  INVAR_INLINE VF lanes(const uint8_t* p, int, int i) {
    return to_float(load_s8(p + i * W));
  }
  static float* k_scales(uint8_t* page, int64_t head_dim) {
    return reinterpret_cast<float*>(page + 2 * kPageTokens * head_dim);
  }
  static const float* k_scales(const uint8_t* page, int64_t head_dim) {
    return reinterpret_cast<const float*>(page + 2 * kPageTokens * head_dim);
  }
  static const float* v_scales(const uint8_t* page, int64_t head_dim) {
    return k_scales(page, head_dim) + kPageTokens;
  }

  static void store_token(const float* k, const float* v, int32_t head_dim, int32_t slot,
                          uint8_t* page) {
    int8_t *k_to = k_at(page, head_dim, slot), *v_to = v_at(page, head_dim, slot);
    float k_factor, v_factor;
    float* scale = k_scales(page, head_dim) + slot;
    scale[0] = block_scale(max_magnitude(k, head_dim), &k_factor);
    scale[kPageTokens] = block_scale(max_magnitude(v, head_dim), &v_factor);
    for (int32_t d = 0; d < head_dim; d += W) {
      int8_t codes[W];
      write_codes(codes, k + d, k_factor);
      for (int i = 0; i < W; i++) k_to[(d + i) * kHalfTokens] = codes[i];
      write_codes(v_to + d, v + d, v_factor);
    }
  }

 private:
  // A factor of zero makes zeros whatever x holds.
  INVAR_INLINE void write_codes(int8_t* to, const float* x, float factor) {
    store_s8(to, factor == 0 ? zero_i() : to_int(load(x) * set1(factor)));
  }
};

}  // namespace invar::INVAR_ISA
