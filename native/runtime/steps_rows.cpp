#include "runtime/steps_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace invar {
namespace {

// Rows of an item, at least: norm and codes of a row take about half a microsecond, handing a phase
// over to other threads two to four.
constexpr int64_t kItemRows = 4;

}  // namespace

int64_t row_items(const Execution& e, int64_t rows) {
  return std::min<int64_t>((rows + kItemRows - 1) / kItemRows, e.threads * kItemsPerThread);
}

int64_t RowStep::items(const Execution& e, int64_t rows) const { return row_items(e, rows); }

void RowStep::run(const Execution& e, const Worker& w, int64_t item) const {
  const int64_t count = items(e, w.rows);
  const int64_t first = pair_boundary(e, w.rows * item / count);
  const int64_t last = pair_boundary(e, w.rows * (item + 1) / count);
  for (int64_t row = first; row < last && row < w.rows; ++row) {
    for (const auto& op : ops_) op->run(e, w, row);
  }
}

void EmbedOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->linear->dequantize_row(format, weight + e.token_ids[row] * row_bytes, out.width,
                                    out.row(row));
  if (factor != 1.0f) e.kernels->rows->scale(out.row(row), factor, out.width, out.row(row));
}

void PositionEmbedOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->linear->dequantize_row(format, weight + e.batch->positions[row] * row_bytes, out.width,
                                    out.row(row));
}

void RopeTableOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->rope_table(e.batch->positions[row], inv_freq.data(), magnitude,
                              static_cast<int64_t>(inv_freq.size()), out.row(row));
}

void RmsNormOp::run(const Execution& e, const Worker&, int64_t row) const {
  const int64_t width = x.width / heads;
  for (int64_t head = 0; head < heads; ++head) {
    e.kernels->rows->rms_norm(x.row(row) + head * width, weight, eps, width,
                              out.row(row) + head * width);
  }
}

void LayerNormOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->layer_norm(x.row(row), weight, bias, eps, out.width, out.row(row));
}

void QuantizeOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->linear->quantize(out.format, x.row(row), out.k, out.row(row));
}

void AddOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->add(a.row(row), b.row(row), out.width, out.row(row));
}

void ScaleOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->scale(x.row(row), factor, out.width, out.row(row));
}

void SigmoidOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->sigmoid(x.row(row), out.width, out.row(row));
}

void ScaleRowsOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->scale(x.row(row), factor.row(row)[0], out.width, out.row(row));
}

void ColumnsOp::run(const Execution&, const Worker&, int64_t row) const {
  const int64_t from = x.width / heads, to = out.width / heads;
  for (int64_t head = 0; head < heads; ++head) {
    std::memcpy(out.row(row) + head * to, x.row(row) + head * from + first, to * sizeof(float));
  }
}

void JoinOp::run(const Execution&, const Worker&, int64_t row) const {
  const int64_t left = a.width / heads, right = b.width / heads;
  for (int64_t head = 0; head < heads; ++head) {
    float* to = out.row(row) + head * (left + right);
    std::memcpy(to, a.row(row) + head * left, left * sizeof(float));
    std::memcpy(to + left, b.row(row) + head * right, right * sizeof(float));
  }
}

void ReorderOp::run(const Execution&, const Worker&, int64_t row) const {
  const float* from = x.row(row);
  float* to = out.row(row);
  for (size_t i = 0; i < order.size(); ++i) to[i] = from[order[i]];
}

void QuantizeHeadsOp::run(const Execution& e, const Worker&, int64_t row) const {
  for (int64_t head = 0; head < heads; ++head) {
    e.kernels->linear->quantize(out.format, x.row(row) + head * (x.width / heads), out.k,
                                out.row(row * heads + head));
  }
}

void TemperatureOp::run(const Execution& e, const Worker&, int64_t row) const {
  const int64_t runs = (int64_t{e.batch->positions[row]} + 1) / length;
  out.row(row)[0] = static_cast<float>(1.0 + scale * std::log1p(static_cast<double>(runs)));
}

void SoftCapOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->soft_cap(x.row(row), cap, out.width, out.row(row));
}

void ActivateOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->activate(activation, x.row(row), out.width, out.row(row));
}

void GatedOp::run(const Execution& e, const Worker&, int64_t row) const {
  e.kernels->rows->gated(activation, gate.row(row), up.row(row), out.width, out.row(row));
}

void RopeOp::run(const Execution& e, const Worker&, int64_t row) const {
  const int64_t dim = x.width / heads;
  std::memcpy(out.row(row), x.row(row), x.width * sizeof(float));
  for (int64_t head = 0; head < heads; ++head) {
    e.kernels->rows->rope(style, table.row(row), pairs, dim, out.row(row) + head * dim);
  }
}

void StoreKvOp::run(const Execution& e, const Worker&, int64_t row) const {
  const CacheGroup& cache = e.groups[group];
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    store_kv(e, group, row, layer_offset, head, k.row(row) + head * cache.head_dim,
             v.row(row) + head * cache.head_dim);
  }
}

void TakeRowOp::run(const Execution& e, const Worker& w, int64_t row) const {
  const int64_t source = e.batch->logit_rows[w.first_logit + row];
  std::memcpy(out.row(row), x.row(source), x.width * sizeof(float));
}

void CheckOp::run(const Execution& e, const Worker& w, int64_t row) const {
  constexpr uint32_t kExponent = 0x7f800000;  // all ones: infinity or NaN
  uint32_t bad = 0;
  for (int64_t i = 0; i < x.width; ++i) {
    bad |= (std::bit_cast<uint32_t>(x.row(row)[i]) & kExponent) == kExponent;
  }
  int32_t& fault = first_fault[in_head ? e.batch->logit_rows[w.first_logit + row] : row];
  if (bad && fault == 0) fault = number;
}

void store_kv(const Execution& e, int64_t group, int64_t row, int64_t layer_offset, int64_t kv_head,
              const float* k, const float* v) {
  const CacheGroup& cache = e.groups[group];
  const int32_t position = e.token_position[row];
  const int32_t* table = e.batch->block_tables[group].row(e.token_sequence[row]);
  uint8_t* page = cache.pages.at(table[position / kPageTokens]) + layer_offset;
  e.kernels->attention_over(cache.kv_format)
      .store(k, v, cache.head_dim, position % kPageTokens, page + kv_head * cache.head_bytes());
}

}  // namespace invar
