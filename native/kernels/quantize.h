// Activations: one fp32 row to the parts of ActLayout. Also dequantisation of a weight row.
//
//   q8_32   int8 codes[k] | float scale[k/32]  | int16 start[k/32][2] | float scaled_sum[k/32]
//   q8_256  int8 codes[k] | float scale[k/256] | int16 start[k/16][2] | int16 sum[k/32]
//
// start: -8 times (q8_32) or -32 times (q8_256) the sums of the codes with K % 4 in {0, 1} and in
// {2, 3}: the values at which dot.h starts its sums. At most 8 * 127 * 16 and 32 * 127 * 8.
// A block whose scale would be denormal (max|x| below about 1.5e-36) is zero. A block with an
// infinity or a NaN gets the scale NaN and codes 0: its outputs are NaN, nothing traps.
#pragma once

#include "kernels/dot.h"
#include "kernels/records.h"

namespace invar::INVAR_ISA {

// The largest |x| as float bits: among magnitudes bits order as numbers, NaN above infinity, and
// an integer maximum is the same in any order.
INVAR_INLINE int32_t max_magnitude(const float* x, int count) {
  VI m = zero_i();
  for (int i = 0; i < count; i += W) m = max(m, as_int(load(x + i)) & set1_i(INT32_MAX));
  int32_t lanes[W], r = 0;
  store_i(lanes, m);
  for (int i = 0; i < W; i++) r = lanes[i] > r ? lanes[i] : r;
  return r;
}

// The block's scale, and the factor that makes codes.
INVAR_INLINE float block_scale(int32_t magnitude, float* factor) {
  constexpr int32_t kInfinity = 0x7f800000, kNan = 0x7fc00000, kSmallestNormal = 0x00800000;
  float max = __builtin_bit_cast(float, magnitude);
  *factor = 0;
  if (magnitude >= kInfinity) return __builtin_bit_cast(float, kNan);
  float scale = max * (1.0f / 127.0f);
  if (__builtin_bit_cast(int32_t, scale) < kSmallestNormal) return 0;
  *factor = 127.0f / max;
  return scale;
}

struct HalfSums {
  int32_t first, second;
};
// Codes of `count` values (a multiple of 16); a factor of zero makes zeros whatever x holds.
INVAR_INLINE HalfSums write_codes(const float* x, int count, float factor, int8_t* codes) {
  if (factor == 0) {
    memset(codes, 0, (size_t)count);
    return {0, 0};
  }
  VI sum = zero_i();
  for (int i = 0; i < count; i += W) {
    VI q = to_int(load(x + i) * set1(factor));
    store_s8(codes + i, q);
    sum = sum + q;
  }
  int32_t lanes[W];  // lane i holds K with K % 4 = i % 4
  store_i(lanes, sum);
  HalfSums r{0, 0};
  for (int i = 0; i < W; i += 4) {
    r.first += lanes[i] + lanes[i + 1];
    r.second += lanes[i + 2] + lanes[i + 3];
  }
  return r;
}

static void quantize_q8_32(const float* x, int64_t k, uint8_t* out) {
  const ActLayout layout = act_layout(ActFormat::q8_32, k);
  float* scales = (float*)(out + layout.scale_offset);
  int16_t* starts = (int16_t*)(out + layout.sum_offset);
  float* scaled_sums = (float*)(out + layout.scaled_sum_offset);
  for (int64_t b = 0; b < k / 32; b++) {
    float factor, scale = block_scale(max_magnitude(x + b * 32, 32), &factor);
    HalfSums sums = write_codes(x + b * 32, 32, factor, (int8_t*)out + b * 32);
    scales[b] = scale;
    starts[2 * b] = (int16_t)(-8 * sums.first);
    starts[2 * b + 1] = (int16_t)(-8 * sums.second);
    scaled_sums[b] = scale * (float)(sums.first + sums.second);
  }
}

static void quantize_q8_256(const float* x, int64_t k, uint8_t* out) {
  const ActLayout layout = act_layout(ActFormat::q8_256, k);
  float* scales = (float*)(out + layout.scale_offset);
  int16_t* starts = (int16_t*)(out + layout.sum_offset);
  int16_t* sums = (int16_t*)(out + layout.scaled_sum_offset);
  for (int64_t b = 0; b < k / 256; b++) {
    float factor;
    scales[b] = block_scale(max_magnitude(x + b * 256, 256), &factor);
    for (int64_t g = b * 16; g < b * 16 + 16; g++) {
      HalfSums s = write_codes(x + g * 16, 16, factor, (int8_t*)out + g * 16);
      starts[2 * g] = (int16_t)(-32 * s.first);
      starts[2 * g + 1] = (int16_t)(-32 * s.second);
      sums[g / 2] = (int16_t)((g % 2 ? sums[g / 2] : 0) + s.first + s.second);
    }
  }
}

static void quantize_bf16(const float* x, int64_t k, uint8_t* out) {
  int64_t i = 0;
  for (; i + W <= k; i += W) store_bf16(out + 2 * i, load(x + i));
  if (i < k) {
    uint16_t rest[W];
    store_bf16(rest, load_n(x + i, (int)(k - i)));
    memcpy(out + 2 * i, rest, (size_t)(k - i) * 2);
  }
  if (k % 2) memset(out + 2 * k, 0, 2);
}

static void quantize(ActFormat format, const float* x, int64_t k, uint8_t* out) {
  switch (format) {
    case ActFormat::f32:
      memcpy(out, x, (size_t)k * 4);
      break;
    case ActFormat::bf16:
      quantize_bf16(x, k, out);
      break;
    case ActFormat::q8_32:
      quantize_q8_32(x, k, out);
      break;
    case ActFormat::q8_256:
      quantize_q8_256(x, k, out);
      break;
  }
}

}  // namespace invar::INVAR_ISA
