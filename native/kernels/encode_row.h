// A row brought to another format: which encoder is that of which.
#pragma once

#include "kernels/encode.h"
#include "kernels/encode_k.h"

namespace invar::INVAR_ISA {

using EncodeBlock = void (*)(const float* x, uint8_t* block);

// Of GGML's formats; nullptr: there is none.
static EncodeBlock encoder_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::q4_0:
      return encode_signed<4>;
    case WeightFormat::q4_1:
      return encode_with_minimum<4>;
    case WeightFormat::q5_0:
      return encode_signed<5>;
    case WeightFormat::q5_1:
      return encode_with_minimum<5>;
    case WeightFormat::q8_0:
      return encode_q8_0;
    case WeightFormat::q2_k:
      return encode_q2_k;
    case WeightFormat::q3_k:
      return encode_q3_k;
    case WeightFormat::q4_k:
      return encode_q4_k;
    case WeightFormat::q5_k:
      return encode_q5_k;
    case WeightFormat::q6_k:
      return encode_q6_k;
    case WeightFormat::iq4_nl:
      return encode_iq4_nl;
    case WeightFormat::iq4_xs:
      return encode_iq4_xs;
    default:
      return nullptr;
  }
}

// false: there is no encoder.
static bool encode_row(WeightFormat format, const float* x, int64_t k, uint8_t* row) {
  if (format == WeightFormat::int8) {
    encode_int8(x, k, row);
  } else if (format == WeightFormat::fp8) {
    encode_fp8(x, k, row);
  } else if (const EncodeBlock encode = encoder_of(format)) {
    const GgmlBlock block = ggml_block(format);
    for (int64_t b = 0; b < k / block.k; b++) encode(x + b * block.k, row + b * block.bytes);
  } else {
    return false;
  }
  return true;
}

}  // namespace invar::INVAR_ISA
