#include "runtime/buffers.h"

#include <cstring>

namespace invar {

int64_t act_block(ActFormat format) {
  switch (format) {
    case ActFormat::q8_32:
      return 32;
    case ActFormat::q8_256:
      return 256;
    case ActFormat::bf16:
      return 2;
    case ActFormat::f32:
      break;
  }
  return 1;
}

void quantize_columns(const LinearKernels& linear, const Activations& out, int64_t r, int64_t first,
                      int64_t count, const float* x, uint8_t* scratch) {
  uint8_t* row = out.row(r);
  if (out.format == ActFormat::f32 || out.format == ActFormat::bf16) {
    const int64_t size = out.format == ActFormat::f32 ? 4 : 2;
    linear.quantize(out.format, x, count, scratch);
    std::memcpy(row + first * size, scratch, count * size);
    return;
  }
  linear.quantize(out.format, x, count, scratch);
  // Columns per element of each part behind the codes, and its bytes (layout.cpp act_layout).
  struct Part {
    int64_t ActLayout::* offset;
    int64_t columns, bytes;
  };
  static constexpr Part kParts32[] = {{&ActLayout::scale_offset, 32, 4},
                                      {&ActLayout::sum_offset, 32, 4},
                                      {&ActLayout::scaled_sum_offset, 32, 4}};
  static constexpr Part kParts256[] = {{&ActLayout::scale_offset, 256, 4},
                                       {&ActLayout::sum_offset, 16, 4},
                                       {&ActLayout::scaled_sum_offset, 32, 2}};
  const ActLayout from = act_layout(out.format, count);
  std::memcpy(row + first, scratch, count);
  for (const Part& part : out.format == ActFormat::q8_32 ? kParts32 : kParts256) {
    std::memcpy(row + out.layout.*part.offset + first / part.columns * part.bytes,
                scratch + from.*part.offset, count / part.columns * part.bytes);
  }
}

}  // namespace invar
