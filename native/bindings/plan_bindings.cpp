#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/plan_builder.h"
#include "runtime/buffers.h"

namespace invar::bindings {
namespace {

// [(kind, calls, nanoseconds)] per phase of the plan
nb::list profile_list(const Plan& plan) {
  nb::list rows;
  for (const StepTime& time : plan.profile()) {
    rows.append(nb::make_tuple(time.kind, time.calls, time.nanoseconds));
  }
  return rows;
}

void run(PlanBuilder& builder, nb::handle batch, nb::handle result) {
  const BatchView view = batch_view(batch, result);
  Plan& plan = builder.plan();
  const nb::gil_scoped_release release;
  plan.run(view);
}

void clear_pages(PlanBuilder& builder, int64_t group, nb::handle pages) {
  const auto ids = view<const int32_t, 1>(pages, "page_ids");
  builder.plan().clear_pages(group, ids.data, ids.shape[0]);
}

void copy_pages(PlanBuilder& builder, int64_t group, nb::handle sources, nb::handle targets) {
  const auto from = view<const int32_t, 1>(sources, "sources");
  const auto to = view<const int32_t, 1>(targets, "targets");
  if (from.shape[0] != to.shape[0]) {
    throw std::invalid_argument("copy_pages: " + std::to_string(from.shape[0]) + " sources, " +
                                std::to_string(to.shape[0]) + " targets");
  }
  builder.plan().copy_pages(group, from.data, to.data, from.shape[0]);
}

// The bytes behind `data`: [pages, bytes of a page of the group].
template <class Byte>
Byte* page_bytes(const Plan& plan, int64_t group, nb::handle data, int64_t pages) {
  const auto bytes = view<Byte, 2>(data, "data");
  const int64_t page = plan.cache_group(group).pages.page_bytes;
  if (bytes.shape[0] != pages || bytes.shape[1] != page) {
    throw std::invalid_argument("data: [" + std::to_string(bytes.shape[0]) + ", " +
                                std::to_string(bytes.shape[1]) + "], expected [" +
                                std::to_string(pages) + ", " + std::to_string(page) + "]");
  }
  return bytes.data;
}

void read_pages(PlanBuilder& builder, int64_t group, nb::handle pages, nb::handle out) {
  const auto ids = view<const int32_t, 1>(pages, "page_ids");
  const Plan& plan = builder.plan();
  auto* target = page_bytes<uint8_t>(plan, group, out, ids.shape[0]);
  plan.read_pages(group, ids.data, ids.shape[0], target);
}

void write_pages(PlanBuilder& builder, int64_t group, nb::handle pages, nb::handle data) {
  const auto ids = view<const int32_t, 1>(pages, "page_ids");
  const Plan& plan = builder.plan();
  const auto* source = page_bytes<const uint8_t>(plan, group, data, ids.shape[0]);
  plan.write_pages(group, ids.data, ids.shape[0], source);
}

// The counter stays alive through the caller's keep_alive.
void count_in(PlanBuilder& builder, nb::handle counter) {
  const auto word = view<uint64_t, 1>(counter, "counter");
  if (word.shape[0] != 1 || reinterpret_cast<uintptr_t>(word.data) % alignof(uint64_t) != 0) {
    throw std::invalid_argument("counter: expected one aligned uint64");
  }
  builder.plan().count_in(word.data);
}

nb::ndarray<nb::numpy, float> read_matrix(PlanBuilder& builder, int64_t id, int64_t rows) {
  const Matrix matrix = builder.matrix_at(id);
  if (rows < 0 || rows > matrix.rows) throw std::invalid_argument("read_matrix: too many rows");
  auto out = new_array<float>({static_cast<size_t>(rows), static_cast<size_t>(matrix.width)});
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(out.data() + r * matrix.width, matrix.row(r), matrix.width * sizeof(float));
  }
  return out;
}

void bind_rows(nb::class_<PlanBuilder>& plan) {
  plan.def("begin_rows", &PlanBuilder::begin_rows)
      .def("embed", &PlanBuilder::embed, nb::arg("raw"), nb::arg("format"), nb::arg("factor"),
           nb::arg("out"))
      .def("position_embed", &PlanBuilder::position_embed, nb::arg("raw"), nb::arg("format"),
           nb::arg("out"))
      .def("rope_table", &PlanBuilder::rope_table, nb::arg("inv_freq"), nb::arg("magnitude"),
           nb::arg("out"))
      .def("rms_norm", &PlanBuilder::rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"),
           nb::arg("heads"), nb::arg("out"))
      .def("layer_norm", &PlanBuilder::layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
           nb::arg("eps"), nb::arg("out"))
      .def("quantize", &PlanBuilder::quantize, nb::arg("x"), nb::arg("out"))
      .def("add", &PlanBuilder::add, nb::arg("a"), nb::arg("b"), nb::arg("out"))
      .def("scale", &PlanBuilder::scale, nb::arg("x"), nb::arg("factor"), nb::arg("out"))
      .def("soft_cap", &PlanBuilder::soft_cap, nb::arg("x"), nb::arg("cap"), nb::arg("out"))
      .def("sigmoid", &PlanBuilder::sigmoid, nb::arg("x"), nb::arg("out"))
      .def("join", &PlanBuilder::join, nb::arg("a"), nb::arg("b"), nb::arg("heads"), nb::arg("out"))
      .def("quantize_heads", &PlanBuilder::quantize_heads, nb::arg("x"), nb::arg("heads"),
           nb::arg("out"))
      .def("columns", &PlanBuilder::columns, nb::arg("x"), nb::arg("heads"), nb::arg("first"),
           nb::arg("out"))
      .def("reorder", &PlanBuilder::reorder, nb::arg("x"), nb::arg("order"), nb::arg("out"))
      .def("temperature", &PlanBuilder::temperature, nb::arg("scale"), nb::arg("length"),
           nb::arg("out"))
      .def("scale_rows", &PlanBuilder::scale_rows, nb::arg("x"), nb::arg("factor"), nb::arg("out"))
      .def("gated", &PlanBuilder::gated, nb::arg("gate"), nb::arg("up"), nb::arg("activation"),
           nb::arg("out"))
      .def("activate", &PlanBuilder::activate, nb::arg("x"), nb::arg("activation"), nb::arg("out"))
      .def("rope", &PlanBuilder::rope, nb::arg("x"), nb::arg("table"), nb::arg("style"),
           nb::arg("pairs"), nb::arg("heads"), nb::arg("out"))
      .def("store_kv", &PlanBuilder::store_kv, nb::arg("k"), nb::arg("v"), nb::arg("group"),
           nb::arg("layer"))
      .def("take_rows", &PlanBuilder::take_rows, nb::arg("x"), nb::arg("out"))
      .def("check", &PlanBuilder::check, nb::arg("x"), nb::arg("number"), nb::arg("first_fault"));
}

void bind_linear(nb::module_& module, nb::class_<PlanBuilder>& plan) {
  nb::class_<SegmentSpec>(module, "Segment")
      .def(
          "__init__",
          [](SegmentSpec* self, const std::string& format, int64_t x, nb::object memory,
             int64_t offset, int64_t unit_stride, int64_t panels_per_unit, int64_t panels) {
            new (self) SegmentSpec{weight_format(format), x,     memory, offset, unit_stride,
                                   panels_per_unit,       panels};
          },
          nb::arg("format"), nb::arg("x"), nb::arg("memory"), nb::arg("offset"),
          nb::arg("unit_stride"), nb::arg("panels_per_unit"), nb::arg("panels"));
  nb::class_<HeadSpec>(module, "HeadTransform")
      .def(nb::init<nb::object, nb::object, float, std::optional<int64_t>, std::string, int64_t>(),
           nb::arg("bias").none(), nb::arg("norm").none(), nb::arg("eps"),
           nb::arg("rope_table").none(), nb::arg("rope_style"), nb::arg("rope_pairs"));
  plan.def("begin_linear", &PlanBuilder::begin_linear)
      .def("part_store", &PlanBuilder::part_store, nb::arg("segment"), nb::arg("n"), nb::arg("out"),
           nb::arg("bias").none(), nb::arg("residual").none())
      .def("part_gated", &PlanBuilder::part_gated, nb::arg("gate"), nb::arg("up"), nb::arg("n"),
           nb::arg("activation"), nb::arg("gate_bias").none(), nb::arg("up_bias").none(),
           nb::arg("out").none(), nb::arg("act").none())
      .def("part_query", &PlanBuilder::part_query, nb::arg("segment"), nb::arg("transform"),
           nb::arg("head_dim"), nb::arg("heads"), nb::arg("out"))
      .def("part_cache", &PlanBuilder::part_cache, nb::arg("key"), nb::arg("value"),
           nb::arg("key_transform"), nb::arg("value_transform"), nb::arg("group"),
           nb::arg("layer"));
}

void bind_experts(nb::class_<PlanBuilder>& plan) {
  plan.def("grouping", &PlanBuilder::grouping, nb::arg("experts"), nb::arg("used"))
      .def("route", &PlanBuilder::route, nb::arg("logits"), nb::arg("bias").none(),
           nb::arg("scoring"), nb::arg("used"), nb::arg("normalise"), nb::arg("scale"),
           nb::arg("groups"), nb::arg("groups_used"), nb::arg("group_best"), nb::arg("out"))
      .def("group_experts", &PlanBuilder::group_experts, nb::arg("routes"), nb::arg("grouping"))
      .def("gather", &PlanBuilder::gather, nb::arg("x"), nb::arg("grouping"), nb::arg("out"))
      .def("quantize_experts", &PlanBuilder::quantize_experts, nb::arg("x"), nb::arg("grouping"),
           nb::arg("out"))
      .def("experts_store", &PlanBuilder::experts_store, nb::arg("segment"), nb::arg("grouping"),
           nb::arg("n"), nb::arg("bias").none(), nb::arg("out"))
      .def("experts_gated", &PlanBuilder::experts_gated, nb::arg("gate"), nb::arg("up"),
           nb::arg("grouping"), nb::arg("n"), nb::arg("activation"), nb::arg("gate_bias").none(),
           nb::arg("up_bias").none(), nb::arg("out").none(), nb::arg("act").none())
      .def("combine", &PlanBuilder::combine, nb::arg("x"), nb::arg("routes"), nb::arg("grouping"),
           nb::arg("weighted"), nb::arg("out"));
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<PlanBuilder> plan(module, "Plan");
  plan.def(nb::init<std::string, nb::object, int64_t, int64_t, int64_t, int64_t, int64_t, int,
                    int64_t, int64_t, int64_t, int64_t>(),
           nb::arg("isa"), nb::arg("memory"), nb::arg("scratch_offset"), nb::arg("max_tokens"),
           nb::arg("max_sequences"), nb::arg("embedding_rows"), nb::arg("vocab"),
           nb::arg("threads"), nb::arg("scratch_bytes"), nb::arg("sampling_scratch_bytes"),
           nb::arg("partials"), nb::arg("partial_bytes"))
      .def("matrix", &PlanBuilder::matrix, nb::arg("offset"), nb::arg("width"), nb::arg("rows"))
      .def("activations", &PlanBuilder::activations, nb::arg("offset"), nb::arg("format"),
           nb::arg("k"), nb::arg("rows"))
      .def("cache_group", &PlanBuilder::cache_group, nb::arg("memory"), nb::arg("slab_bytes"),
           nb::arg("page_bytes"), nb::arg("pages_per_slab"), nb::arg("slabs"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("window"), nb::arg("chunked"), nb::arg("format"))
      .def("head_activations", &PlanBuilder::head_activations, nb::arg("activations"),
           nb::arg("heads"), nb::arg("head"))
      .def("matrix_columns", &PlanBuilder::matrix_columns, nb::arg("matrix"), nb::arg("first"),
           nb::arg("width"))
      .def("begin_head", &PlanBuilder::begin_head)
      .def("attention", &PlanBuilder::attention, nb::arg("q"), nb::arg("group"), nb::arg("layer"),
           nb::arg("heads"), nb::arg("scale"), nb::arg("soft_cap"), nb::arg("sinks").none(),
           nb::arg("out").none(), nb::arg("act").none())
      .def("sample", &PlanBuilder::sample, nb::arg("logits"))
      .def("finish", &PlanBuilder::finish)
      .def("run", &run, nb::arg("batch"), nb::arg("result"))
      .def("clear_pages", &clear_pages, nb::arg("group"), nb::arg("page_ids"))
      .def("copy_pages", &copy_pages, nb::arg("group"), nb::arg("sources"), nb::arg("targets"))
      .def("read_pages", &read_pages, nb::arg("group"), nb::arg("page_ids"), nb::arg("out"))
      .def("write_pages", &write_pages, nb::arg("group"), nb::arg("page_ids"), nb::arg("data"))
      .def("read_matrix", &read_matrix, nb::arg("matrix"), nb::arg("rows"))
      .def("set_profile", [](PlanBuilder& b, bool on) { b.plan().set_profile(on); })
      .def("profile", [](PlanBuilder& b) { return profile_list(b.plan()); })
      .def("count_in", &count_in, nb::arg("counter"), nb::keep_alive<1, 2>())
      .def_prop_ro("progress", [](PlanBuilder& b) { return b.plan().progress(); })
      .def_prop_ro("isa", [](PlanBuilder& b) { return b.plan().kernels().isa; });
  bind_rows(plan);
  bind_linear(module, plan);
  bind_experts(plan);
  module.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  module.attr("MAX_EXPERTS") = kMaxExperts;
  module.attr("HEAD_ROWS") = kHeadRows;
  module.def("matrix_stride", &matrix_stride, nb::arg("width"));
  module.def(
      "kv_head_bytes",
      [](const std::string& format, int64_t dim) { return kv_head_bytes(kv_format(format), dim); },
      nb::arg("format"), nb::arg("head_dim"));
  module.def("attention_scratch_bytes", &attention_scratch_bytes, nb::arg("isa"), nb::arg("format"),
             nb::arg("group"), nb::arg("head_dim"));
  module.def("attention_partials", &max_partials, nb::arg("threads"), nb::arg("max_length"));
  module.def("attention_partial_bytes", &attention_partial_bytes, nb::arg("rows"),
             nb::arg("head_dim"));
  module.def("sampling_scratch_bytes", &sampling_scratch_bytes, nb::arg("isa"), nb::arg("vocab"));
  module.def("linear_scratch_bytes", &linear_scratch_bytes, nb::arg("columns"));
}

}  // namespace invar::bindings
