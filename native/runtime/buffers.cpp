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
  const ActLayout part = act_layout(out.format, count);
  const ActLayout& whole = out.layout;
  const int64_t block = act_block(out.format);
  const int64_t blocks = count / block, skipped = first / block;
  std::memcpy(row + first, scratch, count);
  std::memcpy(row + whole.scale_offset + skipped * 4, scratch + part.scale_offset, blocks * 4);
  if (out.format == ActFormat::q8_32) {
    std::memcpy(row + whole.sum_offset + skipped * 4, scratch + part.sum_offset, blocks * 4);
    std::memcpy(row + whole.scaled_sum_offset + skipped * 4, scratch + part.scaled_sum_offset,
                blocks * 4);
  } else {
    std::memcpy(row + whole.sum_offset + first / 16 * 2, scratch + part.sum_offset, count / 16 * 2);
  }
}

}  // namespace invar
