// Mixtures of experts in PlanBuilder.
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/plan_builder.h"

namespace invar::bindings {
namespace {

Scoring scoring_function(const std::string& name) {
  if (name == "softmax") return Scoring::softmax;
  if (name == "sigmoid") return Scoring::sigmoid;
  if (name == "softmax_of_chosen") return Scoring::softmax_of_chosen;
  throw std::invalid_argument("scoring '" + name +
                              "' is not known (known: softmax, sigmoid, softmax_of_chosen)");
}

void require(bool right, const char* what) {
  if (!right) throw std::invalid_argument(std::string("plan: experts: ") + what);
}

}  // namespace

int64_t PlanBuilder::grouping(int64_t experts, int64_t used) {
  require(used >= 1 && used <= experts && experts <= kMaxExperts, "used of experts");
  groupings_.push_back(std::make_shared<Grouping>(experts, used, plan_->limits().max_tokens));
  return static_cast<int64_t>(groupings_.size()) - 1;
}

std::shared_ptr<Grouping> PlanBuilder::grouping_at(int64_t id) const {
  require(id >= 0 && id < static_cast<int64_t>(groupings_.size()), "no such grouping");
  return groupings_[id];
}

void PlanBuilder::route(int64_t logits, nb::object bias, const std::string& scoring, int64_t used,
                        bool normalise, float scale, int64_t groups, int64_t groups_used,
                        int64_t group_best, int64_t out) {
  auto op = std::make_unique<RouteOp>();
  op->logits = matrix_at(logits);
  const int64_t experts = op->logits.width;
  require(experts <= kMaxExperts, "too many");
  require(groups >= 1 && experts % groups == 0, "groups do not divide the experts");
  require(groups_used >= 1 && groups_used <= groups, "groups used");
  require(group_best >= 1 && group_best <= experts / groups, "best of a group");
  require(used >= 1 && used <= experts / groups * groups_used, "more used than there are");
  op->routing = {experts,     used,      scoring_function(scoring), normalise, scale, groups,
                 groups_used, group_best};
  op->bias = maybe_floats(std::move(bias), experts, "router bias");
  op->out = matrix_of_width(out, 2 * used, "routes");
  rows().add(std::move(op));
}

void PlanBuilder::group_experts(int64_t routes, int64_t grouping) {
  close();
  const auto group = grouping_at(grouping);
  const Matrix from = matrix_of_width(routes, 2 * group->used, "routes");
  plan_->add(std::make_unique<GroupStep>(from, group));
}

void PlanBuilder::gather(int64_t x, int64_t grouping, int64_t out) {
  close();
  const auto group = grouping_at(grouping);
  const Activations from = activations_at(x), to = activations_at(out);
  require(from.format == to.format && from.k == to.k, "gather: other activations");
  require(to.rows >= plan_->limits().max_tokens * group->used, "gather: too few rows");
  plan_->add(std::make_unique<GatherStep>(from, to, group));
}

void PlanBuilder::quantize_experts(int64_t x, int64_t grouping, int64_t out) {
  close();
  const auto group = grouping_at(grouping);
  const Activations to = activations_at(out);
  const Matrix from = matrix_of_width(x, to.k, "quantize_experts input");
  require(std::min(from.rows, to.rows) >= plan_->limits().max_tokens * group->used,
          "quantize_experts: too few rows");
  plan_->add(std::make_unique<QuantizeExpertsStep>(from, to, group));
}

void PlanBuilder::experts_store(const SegmentSpec& spec, int64_t grouping, int64_t n,
                                nb::object bias, int64_t out) {
  close();
  const auto group = grouping_at(grouping);
  Part part = store_part(spec, group->experts, n, out, std::move(bias), {});
  const int64_t rows = plan_->limits().max_tokens * group->used;
  require(std::min(matrix_at(out).rows, part.segments[0].x.rows) >= rows, "store: too few rows");
  plan_->add(std::make_unique<ExpertStep>(std::move(part), plan_->limits().threads, group));
}

void PlanBuilder::experts_gated(const SegmentSpec& gate, const SegmentSpec& up, int64_t grouping,
                                int64_t n, const std::string& activation, nb::object gate_bias,
                                nb::object up_bias, MaybeId out, MaybeId act) {
  close();
  const auto group = grouping_at(grouping);
  Part part = gated_part(gate, up, group->experts, n, activation, std::move(gate_bias),
                         std::move(up_bias), out, act);
  const int64_t result = out ? matrix_at(*out).rows : activations_at(*act).rows;
  const int64_t input = std::min(part.segments[0].x.rows, part.segments[1].x.rows);
  require(std::min(result, input) >= plan_->limits().max_tokens * group->used,
          "gated: too few rows");
  plan_->add(std::make_unique<ExpertStep>(std::move(part), plan_->limits().threads, group));
}

void PlanBuilder::combine(int64_t x, int64_t routes, int64_t grouping, bool weighted, int64_t out) {
  auto op = std::make_unique<CombineOp>();
  op->grouping = grouping_at(grouping);
  op->out = matrix_at(out);
  op->x = matrix_of_width(x, op->out.width, "combine input");
  op->routes = matrix_of_width(routes, 2 * op->grouping->used, "routes");
  op->weighted = weighted;
  require(op->x.rows >= plan_->limits().max_tokens * op->grouping->used, "combine: too few rows");
  rows().add(std::move(op));
}

}  // namespace invar::bindings
