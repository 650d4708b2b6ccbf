// Linear parts of PlanBuilder.
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/plan_builder.h"

namespace invar::bindings {
namespace {

int64_t panels_of(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

int64_t units_of(const SegmentSpec& spec) {
  return (spec.panels + spec.panels_per_unit - 1) / spec.panels_per_unit;
}

void expect_columns(const SegmentSpec& spec, int64_t columns, const char* what, int64_t stack = 1) {
  if (spec.panels != stack * panels_of(columns) || (stack > 1 && columns % kPanelColumns) ||
      units_of(spec) % stack) {
    throw std::invalid_argument(std::string("plan: ") + what + ": " + std::to_string(spec.panels) +
                                " panels for " + std::to_string(stack) + " times " +
                                std::to_string(columns) + " columns");
  }
}

}  // namespace

Segment PlanBuilder::segment(const SegmentSpec& spec) {
  Segment result{};
  result.format = spec.format;
  result.x = activations_at(spec.x);
  if (act_format_of(spec.format) != result.x.format) {
    throw std::invalid_argument("plan: activations do not have the format of their weight");
  }
  if (spec.panels_per_unit < 1 || spec.panels < 1 || spec.offset % 64 || spec.unit_stride % 64) {
    throw std::invalid_argument("plan: a segment without panels or off the 64-byte grid");
  }
  const int64_t bytes = panel_bytes(spec.format, result.x.k);
  const int64_t before_last = units_of(spec) - 1;
  const int64_t last_panels = spec.panels - before_last * spec.panels_per_unit;
  result.panels = nb::cast<const Memory&>(spec.memory)
                      .range(spec.offset, before_last * spec.unit_stride + last_panels * bytes);
  result.unit_stride = spec.unit_stride;
  result.panels_per_unit = spec.panels_per_unit;
  result.panel_count = spec.panels;
  retained_.push_back(spec.memory);
  return result;
}

void PlanBuilder::add_part(Part part) {
  if (!open_linear_) throw std::invalid_argument("plan: a part outside begin_linear()");
  open_linear_->add(std::move(part));
}

Part PlanBuilder::store_part(const SegmentSpec& spec, int64_t stack, int64_t n, int64_t out,
                             nb::object bias, MaybeId residual) {
  expect_columns(spec, n, "linear", stack);
  auto epilogue = std::make_unique<StoreEpilogue>();
  epilogue->out = matrix_of_width(out, n, "linear output");
  if (residual) epilogue->residual = matrix_of_width(*residual, n, "residual");
  epilogue->bias = maybe_floats(std::move(bias), stack * n, "bias");
  epilogue->unit_columns = spec.panels_per_unit * kPanelColumns;
  epilogue->n = n;
  Part part;
  part.segments.push_back(segment(spec));
  part.units = units_of(spec) / stack;
  part.epilogue = std::move(epilogue);
  return part;
}

void PlanBuilder::part_store(const SegmentSpec& spec, int64_t n, int64_t out, nb::object bias,
                             MaybeId residual) {
  add_part(store_part(spec, 1, n, out, std::move(bias), residual));
}

Part PlanBuilder::gated_part(const SegmentSpec& gate, const SegmentSpec& up, int64_t stack,
                             int64_t n, const std::string& activation, nb::object gate_bias,
                             nb::object up_bias, MaybeId out, MaybeId act) {
  expect_columns(gate, n, "gate", stack);
  expect_columns(up, n, "up", stack);
  if (out.has_value() == act.has_value() || gate.panels_per_unit != up.panels_per_unit) {
    throw std::invalid_argument("plan: gated: one output, and units of equal shape");
  }
  auto epilogue = std::make_unique<GatedEpilogue>();
  epilogue->half_columns = gate.panels_per_unit * kPanelColumns;
  epilogue->n = n;
  epilogue->activation = activation_function(activation);
  epilogue->gate_bias = maybe_floats(std::move(gate_bias), stack * n, "gate bias");
  epilogue->up_bias = maybe_floats(std::move(up_bias), stack * n, "up bias");
  if (out) epilogue->out = matrix_of_width(*out, n, "gated output");
  if (act) {
    epilogue->act = activations_at(*act);
    if (epilogue->act.k != n || epilogue->half_columns % act_block(epilogue->act.format)) {
      throw std::invalid_argument("plan: gated: units are not whole activation blocks");
    }
  }
  Part part;
  part.segments.push_back(segment(gate));
  part.segments.push_back(segment(up));
  part.units = units_of(gate) / stack;
  part.epilogue = std::move(epilogue);
  return part;
}

void PlanBuilder::part_gated(const SegmentSpec& gate, const SegmentSpec& up, int64_t n,
                             const std::string& activation, nb::object gate_bias,
                             nb::object up_bias, MaybeId out, MaybeId act) {
  add_part(
      gated_part(gate, up, 1, n, activation, std::move(gate_bias), std::move(up_bias), out, act));
}

HeadTransform PlanBuilder::transform(const HeadSpec& spec, int64_t head_dim, int64_t heads) {
  HeadTransform result{};
  result.bias = maybe_floats(spec.bias, heads * head_dim, "head bias");
  result.norm = maybe_floats(spec.norm, head_dim, "head norm");
  result.eps = spec.eps;
  result.pairs = spec.rope_pairs;
  if (spec.rope_table) {
    result.rope_table = matrix_of_width(*spec.rope_table, 2 * spec.rope_pairs, "rope table");
    result.style = rope_style(spec.rope_style);
    if (2 * spec.rope_pairs > head_dim) throw std::invalid_argument("plan: rope exceeds the head");
  }
  return result;
}

int64_t PlanBuilder::heads_per_unit(const SegmentSpec& spec, int64_t head_dim) const {
  const int64_t columns = spec.panels_per_unit * kPanelColumns;
  if (columns % head_dim) throw std::invalid_argument("plan: a unit is not whole heads");
  return columns / head_dim;
}

void PlanBuilder::part_query(const SegmentSpec& spec, const HeadSpec& head, int64_t head_dim,
                             int64_t heads, int64_t out) {
  expect_columns(spec, heads * head_dim, "q");
  auto epilogue = std::make_unique<QueryEpilogue>();
  epilogue->transform = transform(head, head_dim, heads);
  epilogue->head_dim = head_dim;
  epilogue->heads = heads;
  epilogue->heads_per_unit = heads_per_unit(spec, head_dim);
  epilogue->out = matrix_of_width(out, heads * head_dim, "q");
  Part part;
  part.segments.push_back(segment(spec));
  part.units = units_of(spec);
  part.epilogue = std::move(epilogue);
  add_part(std::move(part));
}

void PlanBuilder::part_cache(const SegmentSpec& key, const SegmentSpec& value,
                             const HeadSpec& key_transform, const HeadSpec& value_transform,
                             int64_t group, int64_t layer) {
  const CacheGroup& cache = plan_->cache_group(group);
  const int64_t columns = int64_t{cache.kv_heads} * cache.head_dim;
  expect_columns(key, columns, "k");
  expect_columns(value, columns, "v");
  if (key.panels_per_unit != value.panels_per_unit) {
    throw std::invalid_argument("plan: k and v: units of unequal shape");
  }
  auto epilogue = std::make_unique<CacheEpilogue>();
  epilogue->key = transform(key_transform, cache.head_dim, cache.kv_heads);
  epilogue->value = transform(value_transform, cache.head_dim, cache.kv_heads);
  epilogue->head_dim = cache.head_dim;
  epilogue->heads = cache.kv_heads;
  epilogue->heads_per_unit = heads_per_unit(key, cache.head_dim);
  epilogue->half_columns = key.panels_per_unit * kPanelColumns;
  epilogue->group = group;
  epilogue->layer_offset = layer_offset(group, layer);
  Part part;
  part.segments.push_back(segment(key));
  part.segments.push_back(segment(value));
  part.units = units_of(key);
  part.epilogue = std::move(epilogue);
  add_part(std::move(part));
}

}  // namespace invar::bindings
