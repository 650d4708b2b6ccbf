// Sizes and offsets of packed weights and quantised activations: shared by every instruction set.
#include "kernels/kernels.h"
#include "kernels/records.h"

namespace invar {

namespace {

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
constexpr int64_t kLine = 64;
constexpr int64_t kAliasing = 4096;  // addresses this far apart share an L1 set

}  // namespace

ActLayout act_layout(ActFormat format, int64_t k) {
  ActLayout layout{};
  int64_t end = 0;
  auto part = [&](int64_t bytes) {
    int64_t start = end;
    end = round_up(start + bytes, kLine);
    return start;
  };
  switch (format) {
    case ActFormat::f32:
      part(k * 4);
      break;
    case ActFormat::bf16:
      part(round_up(k, 2) * 2);
      layout.widened_offset = part(round_up(k, 2) * 4);
      break;
    case ActFormat::q8_32:
      part(k);
      layout.scale_offset = part(k / 32 * 4);
      layout.sum_offset = part(k / 32 * 4);
      layout.scaled_sum_offset = part(k / 32 * 4);
      break;
    case ActFormat::q8_256:
      part(k);
      layout.scale_offset = part(k / 256 * 4);
      layout.sum_offset = part(k / 16 * 4);
      layout.scaled_sum_offset = part(k / 32 * 2);
      break;
    case ActFormat::q8_16:
      part(k);
      layout.scale_offset = part(k / 16 * 4);
      layout.sum_offset = part(k / 16 * 4);
      break;
    case ActFormat::q8_row:
      part(round_up(k, 4));
      layout.scale_offset = part(4);
      layout.sum_offset = part(4);
      break;
  }
  layout.row_bytes = end % kAliasing == 0 ? end + kLine : end;
  return layout;
}

ActFormat act_format_of(WeightFormat format) {
  if (format == WeightFormat::bf16) return ActFormat::bf16;
  if (format == WeightFormat::int8) return ActFormat::q8_row;
  if (format == WeightFormat::nvfp4) return ActFormat::q8_16;
  const int block = ggml_block(format).k;
  return block == 256 ? ActFormat::q8_256 : block == 32 ? ActFormat::q8_32 : ActFormat::f32;
}

int64_t panel_bytes(WeightFormat format, int64_t k) {
  switch (format) {
    case WeightFormat::f32:
      return k * 4 * kPanelColumns;
    case WeightFormat::f16:
      return k * 2 * kPanelColumns;
    case WeightFormat::bf16:
      return round_up(k, 2) * 2 * kPanelColumns;
    case WeightFormat::int8:
      return kQuadBytes + round_up(k, 4) * kPanelColumns;
    case WeightFormat::nvfp4:
      return kQuadBytes + k / RecordNVFP4::k * RecordNVFP4::bytes;
    case WeightFormat::fp8:
      return round_up(k, kFp8K) / kFp8K * kFp8Bytes;
#define INVAR_PANEL(name, Suffix) \
  case WeightFormat::name:        \
    return round_up(k / Record##Suffix::k * Record##Suffix::bytes, kLine);
      INVAR_RECORD_FORMATS(INVAR_PANEL)
#undef INVAR_PANEL
    case WeightFormat::count:
      break;
  }
  return 0;
}

int64_t row_bytes_ggml(WeightFormat format, int64_t k) {
  GgmlBlock block = ggml_block(format);
  return scale_bytes(format, k) + k / block.k * block.bytes;
}

}  // namespace invar
