// Row-wise operations: what needs nothing but one row runs in one phase, without barriers between.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/buffers.h"
#include "runtime/execution.h"

namespace invar {

class RowOp {
 public:
  virtual ~RowOp() = default;
  virtual void run(const Execution& execution, const Worker& worker, int64_t row) const = 0;
};

// Items of a step that works on each of so many rows by itself.
int64_t row_items(const Execution& execution, int64_t rows);

// An item is a contiguous share of the rows: all operations on one row, then on the next.
class RowStep : public Step {
 public:
  void add(std::unique_ptr<RowOp> op) { ops_.push_back(std::move(op)); }
  int64_t items(const Execution& execution, int64_t rows) const override;
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  const char* kind() const override { return "rows"; }

 private:
  std::vector<std::unique_ptr<RowOp>> ops_;
};

// Rows of a GGML-layout weight by token id, times a factor (1: none).
struct EmbedOp : RowOp {
  WeightFormat format;
  const uint8_t* weight;
  int64_t row_bytes;
  float factor;
  Matrix out;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// Rows of a GGML-layout weight by position; Plan::limit_positions has its number of rows.
struct PositionEmbedOp : RowOp {
  WeightFormat format;
  const uint8_t* weight;
  int64_t row_bytes;
  Matrix out;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct RopeTableOp : RowOp {
  std::vector<double> inv_freq;
  double magnitude;
  Matrix out;  // cos[pairs] then sin[pairs]
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct RmsNormOp : RowOp {
  Matrix x, out;
  const float* weight;
  float eps;
  int64_t heads;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct LayerNormOp : RowOp {
  Matrix x, out;
  const float *weight, *bias;
  float eps;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct QuantizeOp : RowOp {
  Matrix x;
  Activations out;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct AddOp : RowOp {
  Matrix a, b, out;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct ScaleOp : RowOp {
  Matrix x, out;
  float factor;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct SigmoidOp : RowOp {
  Matrix x, out;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct ScaleRowsOp : RowOp {
  Matrix x, factor, out;  // factor: one column
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// Columns [first, first + out.width / heads) of each of `heads` equal parts.
struct ColumnsOp : RowOp {
  Matrix x, out;
  int64_t heads, first;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// Of each of `heads` parts, that of a and then that of b.
struct JoinOp : RowOp {
  Matrix a, b, out;
  int64_t heads;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// Column i of out is column order[i] of x.
struct ReorderOp : RowOp {
  Matrix x, out;
  std::vector<int32_t> order;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// Codes of the first out.k columns of each of `heads` parts: row `row * heads + head` of `out`.
struct QuantizeHeadsOp : RowOp {
  Matrix x;
  Activations out;
  int64_t heads;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// 1 + scale * log(1 + floor((position + 1) / length)), in double.
struct TemperatureOp : RowOp {
  double scale;
  int64_t length;
  Matrix out;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct SoftCapOp : RowOp {
  Matrix x, out;
  float cap;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct ActivateOp : RowOp {
  Matrix x, out;
  Activation activation;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct GatedOp : RowOp {
  Matrix gate, up, out;
  Activation activation;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

struct RopeOp : RowOp {
  Matrix x, out, table;
  RopeStyle style;
  int64_t pairs, heads;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// K and V of one token, all heads of a layer, into its page.
struct StoreKvOp : RowOp {
  Matrix k, v;
  int64_t group;
  int64_t layer_offset;  // of the layer's first head in the page
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// Row logit_rows[row] of the tile.
struct TakeRowOp : RowOp {
  Matrix x, out;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// Notes in `first_fault`, per token of the step, the first check that met NaN or an infinity.
struct CheckOp : RowOp {
  Matrix x;
  bool in_head;          // x has the tile's logit rows, not the step's tokens
  int32_t number;        // of this check, from 1 in the order of the plan
  int32_t* first_fault;  // [max_tokens], 0: none
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// K and V of one head of token `row` into its page.
void store_kv(const Execution& execution, int64_t group, int64_t row, int64_t layer_offset,
              int64_t kv_head, const float* k, const float* v);

}  // namespace invar
