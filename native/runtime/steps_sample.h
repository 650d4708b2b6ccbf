// Sampling of the logit rows of a tile, one item per row.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/buffers.h"
#include "runtime/execution.h"

namespace invar {

class SampleStep : public Step {
 public:
  Matrix logits;
  int64_t vocab;  // ids that can be sampled; logits behind them are never read

  int64_t items(const Execution&, int64_t rows) const override { return rows; }
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  const char* kind() const override { return "sample"; }
};

}  // namespace invar
