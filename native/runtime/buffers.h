// Views of a plan's pre-planned buffers: rows of floats and rows of quantised activations.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace invar {

// Rows a power of two apart compete for the same sets of L1: one more line moves them apart.
constexpr int64_t padded_stride(int64_t bytes) {
  const int64_t lines = (bytes + 63) / 64 * 64;
  return lines % 4096 == 0 ? lines + 64 : lines;
}

// fp32 rows [rows, width]; a row has room for whole panels, so that gemm may write the last one.
struct Matrix {
  uint8_t* data = nullptr;
  int64_t stride = 0;  // bytes
  int64_t width = 0;
  int64_t rows = 0;

  float* row(int64_t r) const { return reinterpret_cast<float*>(data + r * stride); }
  int64_t stride_floats() const { return stride / 4; }
};

constexpr int64_t matrix_stride(int64_t width) {
  return padded_stride((width + kPanelColumns - 1) / kPanelColumns * kPanelColumns * 4);
}

// Activation rows of one format, laid out as act_layout says.
struct Activations {
  uint8_t* data = nullptr;
  ActFormat format = ActFormat::f32;
  int64_t k = 0;
  int64_t rows = 0;
  ActLayout layout{};

  uint8_t* row(int64_t r) const { return data + r * layout.row_bytes; }
};

// Columns of a row that can be quantised on their own: 32, 256, or any even number (1).
int64_t act_block(ActFormat format);

}  // namespace invar
