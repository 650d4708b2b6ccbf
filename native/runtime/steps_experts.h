// Mixtures of experts: which rows go where, the products of all experts as one phase each, and what
// a token makes of its experts' results.
//
//   RouteOp      per token: the experts it uses and their weights, best first
//   GroupStep    sorts the pairs (token, slot) by expert, stably: the *expert rows* of the step
//   GatherStep   copies activation codes of tokens to their expert rows
//   ExpertStep   products; the items of all experts share one counter
//   CombineOp    per token: the sum of its slots in ascending order
//
// The order of expert rows depends on the batch, their bits do not.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/steps_linear.h"
#include "runtime/steps_rows.h"

namespace invar {

// How a router scores experts; Routing of graph/routing.py.
enum class Scoring : int { softmax, sigmoid, softmax_of_chosen };

struct Routing {
  int64_t experts, used;
  Scoring scoring;
  bool normalise;  // the weights of a token to a sum of 1
  float scale;     // of the weights
  // Experts come from the best `groups_used` of `groups` equal runs of experts; a group is as good
  // as the sum of its `group_best` highest scores.
  int64_t groups, groups_used, group_best;
};

// RouteOp keeps scores on the stack.
constexpr int64_t kMaxExperts = 512;

// Row `used` experts, then their weights, into `out` [tokens, 2 * used].
struct RouteOp : RowOp {
  Matrix logits, out;
  Routing routing;
  const float* bias;  // [experts], added to scores for the choice alone; or null
  void run(const Execution&, const Worker&, int64_t row) const override;
};

// The expert rows of a step. Mixtures of the same numbers share one: only one layer runs at a time.
struct Grouping {
  Grouping(int64_t experts, int64_t used, int64_t max_tokens);
  int64_t experts, used;
  std::vector<int32_t> first;   // [experts + 1]: expert e has expert rows [first[e], first[e + 1])
  std::vector<int32_t> active;  // [experts]: those that have rows, ascending
  int64_t active_count = 0;
  std::vector<int32_t> token;   // [max_tokens * used], of an expert row
  std::vector<int32_t> row_of;  // [max_tokens * used], the expert row of (token, slot)
};

class GroupStep : public Step {
 public:
  GroupStep(Matrix routes, std::shared_ptr<Grouping> grouping)
      : routes_(routes), grouping_(std::move(grouping)) {}
  int64_t items(const Execution&, int64_t rows) const override { return rows > 0 ? 1 : 0; }
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  const char* kind() const override { return "group experts"; }

 private:
  Matrix routes_;
  std::shared_ptr<Grouping> grouping_;
};

class GatherStep : public Step {
 public:
  GatherStep(Activations x, Activations out, std::shared_ptr<Grouping> grouping)
      : x_(x), out_(out), grouping_(std::move(grouping)) {}
  int64_t items(const Execution& execution, int64_t rows) const override;
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  const char* kind() const override { return "gather"; }

 private:
  Activations x_, out_;
  std::shared_ptr<Grouping> grouping_;
};

// Codes of fp32 expert rows.
class QuantizeExpertsStep : public Step {
 public:
  QuantizeExpertsStep(Matrix x, Activations out, std::shared_ptr<Grouping> grouping)
      : x_(x), out_(out), grouping_(std::move(grouping)) {}
  int64_t items(const Execution& execution, int64_t rows) const override;
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  const char* kind() const override { return "quantize experts"; }

 private:
  Matrix x_;
  Activations out_;
  std::shared_ptr<Grouping> grouping_;
};

// The weights of all experts lie one after another, `part.units` units each. The units of all
// experts that have rows stand in one line, of which an item is a share; all rows of its expert go
// past a unit at once, so that weights are read once a step.
class ExpertStep : public Step {
 public:
  ExpertStep(Part part, int threads, std::shared_ptr<Grouping> grouping);
  // Whatever the experts: a thread that comes too late asks when the next layer has other ones.
  int64_t items(const Execution&, int64_t rows) const override { return rows > 0 ? items_ : 0; }
  void run(const Execution& execution, const Worker& worker, int64_t item) const override;
  int64_t scratch_bytes() const override { return linear_scratch_bytes(columns_); }
  const char* kind() const override { return "experts"; }

 private:
  void run_unit(const Execution& execution, const Worker& worker, int64_t expert,
                int64_t unit) const;

  Part part_;
  int64_t columns_;  // of a tile
  int64_t items_;
  std::shared_ptr<Grouping> grouping_;
};

struct CombineOp : RowOp {
  Matrix x, routes, out;  // x: expert rows
  bool weighted;          // false: each counts once
  std::shared_ptr<Grouping> grouping;
  void run(const Execution&, const Worker&, int64_t row) const override;
};

}  // namespace invar
