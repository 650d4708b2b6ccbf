#include "runtime/steps_linear.h"

#include <algorithm>

#include "runtime/steps_rows.h"

namespace invar {
namespace {

// Rows whose activations stay in L2 (512 KiB) while the panels stream: 130 KiB of them at K = 576,
// 370 KiB at K = 2048. A multiple of 6 and 4, the rows of register tiles (gemm_int.h).
constexpr int64_t kBlockRows = 132;
constexpr int64_t kRowTile = 12;

// A tile of 66 KiB leaves most of L2 to the panel and to activation rows.
constexpr int64_t kTileFloats = kBlockRows * 128;

int64_t block_count(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Of blocks of about equal size.
int64_t block_rows(int64_t rows) {
  const int64_t blocks = block_count(rows);
  return (rows + blocks * kRowTile - 1) / (blocks * kRowTile) * kRowTile;
}

}  // namespace

int64_t tile_rows(int64_t columns) {
  return std::clamp<int64_t>(kTileFloats / columns / 6 * 6, 6, kBlockRows);
}

int64_t part_columns(const Part& part) {
  int64_t columns = 0;
  for (const Segment& segment : part.segments) columns += segment.panels_per_unit * kPanelColumns;
  return columns;
}

int64_t linear_scratch_bytes(int64_t columns) {
  // Enough for narrower tiles too. One row more: a boundary between rows may move by one
  // (pair_boundary).
  return (std::max(kTileFloats, 6 * columns) + columns) * 4;
}

void LinearStep::add(Part part) {
  Shape shape{part_columns(part), 0, 0, 0};
  for (const Segment& segment : part.segments) {
    shape.unit_bytes += segment.panels_per_unit * panel_bytes(segment.format, segment.x.k);
  }
  shape.block_rows = tile_rows(shape.columns);
  if (!parts_.empty()) shape.first_unit = shapes_.back().first_unit + parts_.back().units;
  scratch_bytes_ = std::max(scratch_bytes_, linear_scratch_bytes(shape.columns));
  parts_.push_back(std::move(part));
  shapes_.push_back(shape);
  share_units();
}

void LinearStep::share_units() {
  int64_t total = 0;
  for (size_t p = 0; p < parts_.size(); ++p) total += parts_[p].units * shapes_[p].unit_bytes;
  first_unit_.assign(shares_ + 1, shapes_.back().first_unit + parts_.back().units);
  int64_t share = 0, before = 0;
  for (size_t p = 0; p < parts_.size(); ++p) {
    for (int64_t u = 0; u < parts_[p].units; ++u, before += shapes_[p].unit_bytes) {
      // A unit goes to the share that holds its middle.
      const int64_t middle = before + shapes_[p].unit_bytes / 2;
      while (share < shares_ && middle >= total / shares_ * share) {
        first_unit_[share++] = shapes_[p].first_unit + u;
      }
    }
  }
}

int64_t LinearStep::items(const Execution&, int64_t rows) const {
  return shares_ * block_count(rows);
}

void LinearStep::run(const Execution& e, const Worker& w, int64_t item) const {
  const int64_t block = block_rows(w.rows), share = item % shares_;
  const int64_t first = item / shares_ * block;
  const int64_t last = std::min(first + block, w.rows);
  for (size_t p = 0; p < parts_.size(); ++p) {
    const int64_t begin = shapes_[p].first_unit;
    const int64_t first_unit = std::max(first_unit_[share], begin);
    const int64_t last_unit = std::min(first_unit_[share + 1], begin + parts_[p].units);
    const bool pairs = parts_[p].epilogue->writes_pages();
    for (int64_t unit = first_unit; unit < last_unit; ++unit) {
      run_rows(e, w, p, unit - begin, pairs ? pair_boundary(e, first) : first,
               pairs ? pair_boundary(e, last) : last);
    }
  }
}

void LinearStep::run_rows(const Execution& e, const Worker& w, size_t part, int64_t unit,
                          int64_t first, int64_t last) const {
  const Shape& shape = shapes_[part];
  Tile tile{unit, first, 0, reinterpret_cast<float*>(w.scratch), shape.columns};
  while (tile.first_row < last) {
    const int64_t left = last - tile.first_row;
    tile.rows = left <= shape.block_rows + 1 ? left : shape.block_rows;
    run_tile(e, parts_[part], shape.columns, tile);
    tile.first_row += tile.rows;
  }
}

void run_tile(const Execution& e, const Part& part, int64_t columns, Tile tile) {
  const Epilogue& epilogue = *part.epilogue;
  const Matrix direct = epilogue.direct();
  if (direct.data != nullptr) {
    tile.data = direct.row(tile.first_row) + tile.unit * columns;
    tile.stride = direct.stride_floats();
  }
  epilogue.prefetch(tile);
  float* out = tile.data;
  const int64_t unit = tile.matrix * part.units + tile.unit;
  for (const Segment& s : part.segments) {
    const int64_t bytes = panel_bytes(s.format, s.x.k);
    const uint8_t* panel = s.panels + unit * s.unit_stride;
    const int64_t count = std::min(s.panels_per_unit, s.panel_count - unit * s.panels_per_unit);
    for (int64_t j = 0; j < count; ++j) {
      e.kernels->linear->gemm(s.format, panel + j * bytes, s.x.k, s.x.row(tile.first_row),
                              s.x.layout.row_bytes, static_cast<int>(tile.rows),
                              out + j * kPanelColumns, tile.stride);
    }
    out += s.panels_per_unit * kPanelColumns;
  }
  if (direct.data == nullptr) epilogue.apply(e, tile);
}

// Rows of a residual lie too far apart for the hardware to fetch their pieces ahead.
void StoreEpilogue::prefetch(const Tile& tile) const {
  if (residual.data == nullptr) return;
  const int64_t column = tile.unit * unit_columns;
  for (int64_t r = tile.first_row; r < tile.first_row + tile.rows; ++r) {
    for (int64_t i = 0; i < unit_columns; i += 16) {
      __builtin_prefetch(residual.row(r) + column + i, 0, 2);
      __builtin_prefetch(out.row(r) + column + i, 1, 2);
    }
  }
}

void StoreEpilogue::apply(const Execution& e, const Tile& tile) const {
  const int64_t column = tile.unit * unit_columns;
  const int64_t columns = std::min(unit_columns, n - column);
  const RowKernels& kernel = *e.kernels->rows;
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* x = tile.row(r);
    float* to = out.row(tile.first_row + r) + column;
    if (bias != nullptr) {
      kernel.add(x, bias + tile.matrix * n + column, columns, residual.data ? x : to);
    }
    if (residual.data != nullptr) {
      kernel.add(x, residual.row(tile.first_row + r) + column, columns, to);
    }
  }
}

void GatedEpilogue::apply(const Execution& e, const Tile& tile) const {
  const int64_t column = tile.unit * half_columns;
  const int64_t columns = std::min(half_columns, n - column);
  const RowKernels& kernel = *e.kernels->rows;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.first_row + r;
    float* gate = tile.row(r);
    float* up = gate + half_columns;
    const int64_t at = tile.matrix * n + column;
    if (gate_bias != nullptr) kernel.add(gate, gate_bias + at, columns, gate);
    if (up_bias != nullptr) kernel.add(up, up_bias + at, columns, up);
    if (act.data == nullptr) {
      kernel.gated(activation, gate, up, columns, out.row(row) + column);
    } else {
      kernel.gated(activation, gate, up, columns, gate);
      e.kernels->linear->quantize_columns(act.format, act.layout, gate, column, columns,
                                          act.row(row));
    }
  }
}

namespace {

// In place on one head of `dim` floats; `index` is the head's number.
void transform_head(const Execution& e, const HeadTransform& t, int64_t row, int64_t index,
                    int64_t dim, float* head) {
  const RowKernels& kernel = *e.kernels->rows;
  if (t.bias != nullptr) kernel.add(head, t.bias + index * dim, dim, head);
  if (t.norm != nullptr) kernel.rms_norm(head, t.norm, t.eps, dim, head);
  if (t.rope_table.data != nullptr) {
    kernel.rope(t.style, t.rope_table.row(row), t.pairs, dim, head);
  }
}

}  // namespace

void QueryEpilogue::apply(const Execution& e, const Tile& tile) const {
  const int64_t first = tile.unit * heads_per_unit;
  const int64_t count = std::min(heads_per_unit, heads - first);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.first_row + r;
    for (int64_t h = 0; h < count; ++h) {
      transform_head(e, transform, row, first + h, head_dim, tile.row(r) + h * head_dim);
    }
    std::copy_n(tile.row(r), count * head_dim, out.row(row) + first * head_dim);
  }
}

void CacheEpilogue::apply(const Execution& e, const Tile& tile) const {
  const int64_t first = tile.unit * heads_per_unit;
  const int64_t count = std::min(heads_per_unit, heads - first);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.first_row + r;
    for (int64_t h = 0; h < count; ++h) {
      float* k = tile.row(r) + h * head_dim;
      float* v = k + half_columns;
      transform_head(e, key, row, first + h, head_dim, k);
      transform_head(e, value, row, first + h, head_dim, v);
      store_kv(e, group, row, layer_offset, first + h, k, v);
    }
  }
}

}  // namespace invar
