// Matrix products over packed panels, and what happens to a finished tile while it is in cache.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/buffers.h"
#include "runtime/execution.h"

namespace invar {

// A weight inside the units of a part: unit u holds panels [u * panels_per_unit, ...) of it.
struct Segment {
  WeightFormat format;
  Activations x;
  const uint8_t* panels;  // of unit 0
  int64_t unit_stride;    // bytes from one unit to the next, other segments between
  int64_t panels_per_unit;
  int64_t panel_count;
};

// A tile: columns of all segments side by side, each panel 32 columns wide.
struct Tile {
  int64_t unit;
  int64_t first_row;
  int64_t rows;
  float* data;
  int64_t stride;      // floats
  int64_t matrix = 0;  // of a stack of weights (steps_experts.h), each with all units of the part
  float* row(int64_t r) const { return data + r * stride; }
};

class Epilogue {
 public:
  virtual ~Epilogue() = default;
  // Before the product, then after it.
  virtual void prefetch(const Tile&) const {}
  virtual void apply(const Execution& execution, const Tile& tile) const = 0;
  // Where gemm may write at once when nothing is left to do; null data otherwise.
  virtual Matrix direct() const { return {}; }
  virtual bool writes_pages() const { return false; }
};

// out = x.W (+ bias) (+ residual)
struct StoreEpilogue : Epilogue {
  Matrix out, residual;  // residual.data null: none
  const float* bias;     // [n] of every matrix of the stack, or null
  int64_t unit_columns, n;
  void prefetch(const Tile&) const override;
  void apply(const Execution&, const Tile&) const override;
  Matrix direct() const override { return bias || residual.data ? Matrix{} : out; }
};

// activation(gate) * up; the unit's first half is gate, the second up. Writes fp32 rows or, where
// `act.data` is set, activation rows.
struct GatedEpilogue : Epilogue {
  Matrix out;
  Activations act;
  Activation activation;
  const float *gate_bias, *up_bias;  // [n] of every matrix of the stack, or null
  int64_t half_columns, n;
  void apply(const Execution&, const Tile&) const override;
};

// What happens to a head before it is used.
struct HeadTransform {
  const float* bias;  // [heads * head_dim] or null
  const float* norm;  // [head_dim] or null
  float eps;
  Matrix rope_table;  // data null: no rope
  RopeStyle style;
  int64_t pairs;
};

// Query heads: bias, norm, rope, then the q buffer.
struct QueryEpilogue : Epilogue {
  HeadTransform transform;
  int64_t head_dim, heads, heads_per_unit;
  Matrix out;
  void apply(const Execution&, const Tile&) const override;
};

// Key and value heads: bias, norm, rope, then the page. The unit's first half is k, the second v.
struct CacheEpilogue : Epilogue {
  HeadTransform key, value;
  int64_t head_dim, heads, heads_per_unit;
  int64_t half_columns;
  int64_t group;
  int64_t layer_offset;
  void apply(const Execution&, const Tile&) const override;
  bool writes_pages() const override { return true; }
};

// Bytes of Worker::scratch that are enough for any part whose tiles have so many columns.
int64_t linear_scratch_bytes(int64_t columns);

// Units of equal shape that share an epilogue.
struct Part {
  std::vector<Segment> segments;
  int64_t units;
  std::unique_ptr<Epilogue> epilogue;
};

int64_t part_columns(const Part& part);  // of a tile
int64_t tile_rows(int64_t columns);      // of a tile so wide
void run_tile(const Execution& execution, const Part& part, int64_t columns, Tile tile);

// An item is a share of the units times a block of rows: a thread streams neighbouring panels past
// rows that stay in its cache, and threads write few lines in common.
class LinearStep : public Step {
 public:
  explicit LinearStep(int threads) : shares_(threads * kItemsPerThread) {}
  void add(Part part);
  int64_t items(const Execution& execution, int64_t rows) const override;
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  int64_t scratch_bytes() const override { return scratch_bytes_; }
  const char* kind() const override { return "linear"; }

 private:
  struct Shape {
    int64_t columns;     // of a tile
    int64_t block_rows;  // rows of a tile
    int64_t first_unit;  // of the part among all units
    int64_t unit_bytes;
  };

  void run_rows(const Execution& execution, const Worker& worker, size_t part, int64_t unit,
                int64_t first, int64_t last) const;
  void share_units();

  int64_t shares_;
  int64_t scratch_bytes_ = 0;
  std::vector<Part> parts_;
  std::vector<Shape> shapes_;
  std::vector<int64_t> first_unit_;  // [shares + 1]: shares of about equal weight bytes
};

}  // namespace invar
