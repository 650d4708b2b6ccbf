// Activations: fp32 values to the parts of ActLayout, a whole row or some of its blocks.
//
//   q8_32   int8 codes[k] | float scale[k/32]  | int16 start[k/32][2] | float scaled_sum[k/32]
//   q8_256  int8 codes[k] | float scale[k/256] | int16 start[k/16][2] | int16 sum[k/32]
//   q8_row  int8 codes[k] | float scale | int32 start, -128 times the sum of all codes
//   q8_16   int8 codes[k] | float scale[k/16]  | int16 start[k/16][2]
//
// start: -8 times (q8_32, q8_16) or -32 times (q8_256) the sums of the codes with K % 4 in {0, 1}
// and in {2, 3}: the values at which dot.h starts its sums. At most 8 * 127 * 16 and 32 * 127 * 8.
// A block whose scale would be denormal (max|x| below about 1.5e-36) is zero. A block with an
// infinity or a NaN gets the scale NaN and codes 0: its outputs are NaN, nothing traps.
#pragma once

#include "kernels/block_scale.h"
#include "kernels/dot.h"
#include "kernels/records.h"

namespace invar::INVAR_ISA {

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
  return half_sums(sum);
}

// Blocks [first, first + count) of a row.
INVAR_INLINE void quantize_q8_32(const ActLayout& layout, const float* x, int64_t first,
                                 int64_t count, uint8_t* row) {
  int8_t* codes = (int8_t*)row + first * 32;
  float* scales = (float*)(row + layout.scale_offset) + first;
  int16_t* starts = (int16_t*)(row + layout.sum_offset) + 2 * first;
  float* scaled_sums = (float*)(row + layout.scaled_sum_offset) + first;
  for (int64_t b = 0; b < count; b++) {
    float factor, scale = block_scale(max_magnitude(x + b * 32, 32), &factor);
    HalfSums sums = write_codes(x + b * 32, 32, factor, codes + b * 32);
    scales[b] = scale;
    starts[2 * b] = (int16_t)(-8 * sums.first);
    starts[2 * b + 1] = (int16_t)(-8 * sums.second);
    scaled_sums[b] = scale * (float)(sums.first + sums.second);
  }
}

INVAR_INLINE void quantize_q8_256(const ActLayout& layout, const float* x, int64_t first,
                                  int64_t count, uint8_t* row) {
  int8_t* codes = (int8_t*)row + first * 256;
  float* scales = (float*)(row + layout.scale_offset) + first;
  int16_t* starts = (int16_t*)(row + layout.sum_offset) + 32 * first;
  int16_t* sums = (int16_t*)(row + layout.scaled_sum_offset) + 8 * first;
  for (int64_t b = 0; b < count; b++) {
    float factor;
    scales[b] = block_scale(max_magnitude(x + b * 256, 256), &factor);
    for (int64_t g = b * 16; g < b * 16 + 16; g++) {
      HalfSums s = write_codes(x + g * 16, 16, factor, codes + g * 16);
      starts[2 * g] = (int16_t)(-32 * s.first);
      starts[2 * g + 1] = (int16_t)(-32 * s.second);
      sums[g / 2] = (int16_t)((g % 2 ? sums[g / 2] : 0) + s.first + s.second);
    }
  }
}

INVAR_INLINE void quantize_q8_16(const ActLayout& layout, const float* x, int64_t first,
                                 int64_t count, uint8_t* row) {
  int8_t* codes = (int8_t*)row + first * 16;
  float* scales = (float*)(row + layout.scale_offset) + first;
  int16_t* starts = (int16_t*)(row + layout.sum_offset) + 2 * first;
  for (int64_t b = 0; b < count; b++) {
    float factor;
    scales[b] = block_scale(max_magnitude(x + b * 16, 16), &factor);
    HalfSums sums = write_codes(x + b * 16, 16, factor, codes + b * 16);
    starts[2 * b] = (int16_t)(-8 * sums.first);
    starts[2 * b + 1] = (int16_t)(-8 * sums.second);
  }
}

// The row as one block.
INVAR_INLINE void quantize_q8_row(const ActLayout& layout, const float* x, int64_t k,
                                  uint8_t* row) {
  VI magnitude = zero_i(), sum = zero_i();
  const int64_t whole = k / W * W;
  const int rest = (int)(k - whole);
  for (int64_t i = 0; i < whole; i += W)
    magnitude = max(magnitude, as_int(load(x + i)) & set1_i(INT32_MAX));
  magnitude = max(magnitude, as_int(load_n(x + whole, rest)) & set1_i(INT32_MAX));
  float factor;
  const float scale = block_scale(max_lane(magnitude), &factor);
  memcpy(row + layout.scale_offset, &scale, 4);
  if (factor == 0) {
    memset(row, 0, (size_t)(k + 3) / 4 * 4);
  } else {
    for (int64_t i = 0; i < whole; i += W) {
      const VI q = to_int(load(x + i) * set1(factor));
      store_s8((int8_t*)row + i, q);
      sum = sum + q;
    }
    int8_t last[W];
    const VI q = to_int(load_n(x + whole, rest) * set1(factor));
    store_s8(last, q);
    sum = sum + q;
    memcpy(row + whole, last, (size_t)((rest + 3) / 4 * 4));
  }
  const HalfSums sums = half_sums(sum);
  const int32_t start = -128 * (sums.first + sums.second);
  memcpy(row + layout.sum_offset, &start, 4);
}

// W values as bf16 and, for kernels that multiply in fp32, widened again.
INVAR_INLINE void write_bf16(VF x, uint16_t* pairs, float* widened) {
  store_bf16(pairs, x);
  store(widened, as_float(shift_left<16>(to_bf16(x))));
}

INVAR_INLINE void quantize_bf16(const ActLayout& layout, const float* x, int64_t first,
                                int64_t count, uint8_t* row) {
  uint16_t* pairs = (uint16_t*)row + first;
  float* widened = (float*)(row + layout.widened_offset) + first;
  int64_t i = 0;
  for (; i + W <= count; i += W) write_bf16(load(x + i), pairs + i, widened + i);
  if (i < count) {
    const size_t left = (size_t)(count - i);
    uint16_t last[W];
    float last_widened[W];
    write_bf16(load_n(x + i, (int)left), last, last_widened);
    memcpy(pairs + i, last, left * 2);
    memcpy(widened + i, last_widened, left * 4);
  }
  if (count % 2) pairs[count] = 0, widened[count] = 0;
}

static void quantize_columns(ActFormat format, const ActLayout& layout, const float* x,
                             int64_t first, int64_t count, uint8_t* row) {
  switch (format) {
    case ActFormat::f32:
      memcpy(row + first * 4, x, (size_t)count * 4);
      break;
    case ActFormat::bf16:
      quantize_bf16(layout, x, first, count, row);
      break;
    case ActFormat::q8_32:
      quantize_q8_32(layout, x, first / 32, count / 32, row);
      break;
    case ActFormat::q8_16:
      quantize_q8_16(layout, x, first / 16, count / 16, row);
      break;
    case ActFormat::q8_256:
      quantize_q8_256(layout, x, first / 256, count / 256, row);
      break;
    case ActFormat::q8_row:
      quantize_q8_row(layout, x, count, row);
      break;
  }
}

}  // namespace invar::INVAR_ISA
