// Row operations of PlanBuilder.
#include <algorithm>
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/plan_builder.h"

namespace invar::bindings {

RopeStyle rope_style(const std::string& name) {
  if (name == "interleaved") return RopeStyle::interleaved;
  if (name == "half") return RopeStyle::half;
  throw std::invalid_argument("rope style '" + name + "' is not known (known: interleaved, half)");
}

Activation activation_function(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "gelu") return Activation::gelu;
  if (name == "swiglu_oai") return Activation::swiglu_oai;
  throw std::invalid_argument("activation '" + name +
                              "' is not known (known: silu, gelu_tanh, gelu, swiglu_oai)");
}

template <typename Op>
std::unique_ptr<Op> PlanBuilder::same_width(int64_t x, int64_t out, const char* input) const {
  auto op = std::make_unique<Op>();
  op->out = matrix_at(out);
  op->x = matrix_of_width(x, op->out.width, input);
  return op;
}

void PlanBuilder::embed(nb::object raw, const std::string& format, float factor, int64_t out) {
  auto op = std::make_unique<EmbedOp>();
  const auto rows_view = view<const uint8_t, 2>(raw, "embedding");
  op->format = weight_format(format);
  op->weight = rows_view.data;
  op->row_bytes = rows_view.shape[1];
  op->factor = factor;
  op->out = matrix_at(out);
  if (op->row_bytes != row_bytes_ggml(op->format, op->out.width) ||
      rows_view.shape[0] < plan_->limits().embedding_rows) {
    throw std::invalid_argument("plan: the embedding's rows do not fit its buffer");
  }
  retained_.push_back(std::move(raw));
  rows().add(std::move(op));
}

void PlanBuilder::position_embed(nb::object raw, const std::string& format, int64_t out) {
  auto op = std::make_unique<PositionEmbedOp>();
  const auto rows_view = view<const uint8_t, 2>(raw, "position embedding");
  op->format = weight_format(format);
  op->weight = rows_view.data;
  op->row_bytes = rows_view.shape[1];
  op->out = matrix_at(out);
  if (op->row_bytes != row_bytes_ggml(op->format, op->out.width)) {
    throw std::invalid_argument("plan: the rows of positions do not fit their buffer");
  }
  plan_->limit_positions(rows_view.shape[0]);
  retained_.push_back(std::move(raw));
  rows().add(std::move(op));
}

void PlanBuilder::rope_table(nb::object inv_freq, double magnitude, int64_t out) {
  auto op = std::make_unique<RopeTableOp>();
  const auto values = view<const double, 1>(inv_freq, "inv_freq");
  op->inv_freq.assign(values.data, values.data + values.shape[0]);
  op->magnitude = magnitude;
  op->out = matrix_of_width(out, 2 * values.shape[0], "rope table");
  rows().add(std::move(op));
}

void PlanBuilder::rms_norm(int64_t x, nb::object weight, float eps, int64_t heads, int64_t out) {
  auto op = std::make_unique<RmsNormOp>();
  op->x = matrix_at(x);
  op->out = matrix_of_width(out, op->x.width, "rms_norm output");
  op->weight = floats(std::move(weight), op->x.width / heads, "rms_norm weight");
  op->eps = eps;
  op->heads = heads;
  rows().add(std::move(op));
}

void PlanBuilder::layer_norm(int64_t x, nb::object weight, nb::object bias, float eps,
                             int64_t out) {
  auto op = same_width<LayerNormOp>(x, out, "layer_norm input");
  op->weight = floats(std::move(weight), op->x.width, "layer_norm weight");
  op->bias = floats(std::move(bias), op->x.width, "layer_norm bias");
  op->eps = eps;
  rows().add(std::move(op));
}

void PlanBuilder::quantize(int64_t x, int64_t out) {
  auto op = std::make_unique<QuantizeOp>();
  op->out = activations_at(out);
  op->x = matrix_of_width(x, op->out.k, "quantize input");
  rows().add(std::move(op));
}

void PlanBuilder::add(int64_t a, int64_t b, int64_t out) {
  auto op = std::make_unique<AddOp>();
  op->out = matrix_at(out);
  op->a = matrix_of_width(a, op->out.width, "add input");
  op->b = matrix_of_width(b, op->out.width, "add input");
  rows().add(std::move(op));
}

void PlanBuilder::scale(int64_t x, float factor, int64_t out) {
  auto op = same_width<ScaleOp>(x, out, "scale input");
  op->factor = factor;
  rows().add(std::move(op));
}

void PlanBuilder::sigmoid(int64_t x, int64_t out) {
  rows().add(same_width<SigmoidOp>(x, out, "sigmoid input"));
}

void PlanBuilder::scale_rows(int64_t x, int64_t factor, int64_t out) {
  auto op = same_width<ScaleRowsOp>(x, out, "scale_rows input");
  op->factor = matrix_of_width(factor, 1, "scale_rows factor");
  rows().add(std::move(op));
}

void PlanBuilder::columns(int64_t x, int64_t heads, int64_t first, int64_t out) {
  auto op = std::make_unique<ColumnsOp>();
  op->x = matrix_at(x);
  op->out = matrix_at(out);
  op->heads = heads;
  op->first = first;
  if (heads < 1 || first < 0 || op->x.width % heads || op->out.width % heads ||
      first + op->out.width / heads > op->x.width / heads) {
    throw std::invalid_argument("plan: columns: the parts do not have them");
  }
  rows().add(std::move(op));
}

void PlanBuilder::join(int64_t a, int64_t b, int64_t heads, int64_t out) {
  auto op = std::make_unique<JoinOp>();
  op->a = matrix_at(a);
  op->b = matrix_at(b);
  op->out = matrix_of_width(out, op->a.width + op->b.width, "join output");
  op->heads = heads;
  if (heads < 1 || op->a.width % heads || op->b.width % heads) {
    throw std::invalid_argument("plan: join: rows that are not whole heads");
  }
  rows().add(std::move(op));
}

void PlanBuilder::reorder(int64_t x, nb::object order, int64_t out) {
  auto op = same_width<ReorderOp>(x, out, "reorder input");
  const auto places = view<const int32_t, 1>(order, "order");
  op->order.assign(places.data, places.data + places.shape[0]);
  if (places.shape[0] != op->out.width ||
      std::any_of(op->order.begin(), op->order.end(),
                  [&](int32_t place) { return place < 0 || place >= op->x.width; })) {
    throw std::invalid_argument("plan: reorder: places that are no columns");
  }
  rows().add(std::move(op));
}

void PlanBuilder::quantize_heads(int64_t x, int64_t heads, int64_t out) {
  auto op = std::make_unique<QuantizeHeadsOp>();
  op->x = matrix_at(x);
  op->out = activations_at(out);
  op->heads = heads;
  if (heads < 1 || op->x.width % heads || op->out.k > op->x.width / heads ||
      op->out.rows < heads * plan_->limits().max_tokens) {
    throw std::invalid_argument("plan: quantize_heads: rows that are not whole heads");
  }
  rows().add(std::move(op));
}

void PlanBuilder::temperature(double scale, int64_t length, int64_t out) {
  auto op = std::make_unique<TemperatureOp>();
  if (length < 1) throw std::invalid_argument("plan: temperature: a length below 1");
  op->scale = scale;
  op->length = length;
  op->out = matrix_of_width(out, 1, "temperature");
  rows().add(std::move(op));
}

void PlanBuilder::soft_cap(int64_t x, float cap, int64_t out) {
  auto op = same_width<SoftCapOp>(x, out, "soft_cap input");
  op->cap = cap;
  rows().add(std::move(op));
}

void PlanBuilder::gated(int64_t gate, int64_t up, const std::string& activation, int64_t out) {
  auto op = std::make_unique<GatedOp>();
  op->out = matrix_at(out);
  op->gate = matrix_of_width(gate, op->out.width, "gate");
  op->up = matrix_of_width(up, op->out.width, "up");
  op->activation = activation_function(activation);
  rows().add(std::move(op));
}

void PlanBuilder::activate(int64_t x, const std::string& activation, int64_t out) {
  auto op = same_width<ActivateOp>(x, out, "activate input");
  op->activation = activation_function(activation);
  if (op->activation == Activation::swiglu_oai) {
    throw std::invalid_argument("plan: activate: swiglu_oai needs a second factor");
  }
  rows().add(std::move(op));
}

void PlanBuilder::rope(int64_t x, int64_t table, const std::string& style, int64_t pairs,
                       int64_t heads, int64_t out) {
  auto op = std::make_unique<RopeOp>();
  op->x = matrix_at(x);
  op->out = matrix_of_width(out, op->x.width, "rope output");
  op->table = matrix_of_width(table, 2 * pairs, "rope table");
  op->style = rope_style(style);
  op->pairs = pairs;
  op->heads = heads;
  rows().add(std::move(op));
}

void PlanBuilder::store_kv(int64_t k, int64_t v, int64_t group, int64_t layer) {
  auto op = std::make_unique<StoreKvOp>();
  const CacheGroup& cache = plan_->cache_group(group);
  op->k = matrix_of_width(k, int64_t{cache.kv_heads} * cache.head_dim, "k");
  op->v = matrix_of_width(v, int64_t{cache.kv_heads} * cache.head_dim, "v");
  op->group = group;
  op->layer_offset = layer_offset(group, layer);
  rows().add(std::move(op));
}

void PlanBuilder::take_rows(int64_t x, int64_t out) {
  rows().add(same_width<TakeRowOp>(x, out, "take_rows input"));
}

void PlanBuilder::check(int64_t x, int32_t number, nb::object first_fault) {
  auto op = std::make_unique<CheckOp>();
  const auto faults = view<int32_t, 1>(first_fault, "first_fault");
  if (faults.shape[0] < plan_->limits().max_tokens) {
    throw std::invalid_argument("plan: check: fewer places for faults than tokens in a step");
  }
  op->x = matrix_at(x);
  op->in_head = plan_->in_head();
  op->number = number;
  op->first_fault = faults.data;
  retained_.push_back(std::move(first_fault));
  rows().add(std::move(op));
}

}  // namespace invar::bindings
