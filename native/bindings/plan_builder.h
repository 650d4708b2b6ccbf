// Builds a Plan from Python: checks every argument, keeps alive what the plan points to.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/memory.h"
#include "runtime/plan.h"
#include "runtime/steps_attention.h"
#include "runtime/steps_experts.h"
#include "runtime/steps_linear.h"
#include "runtime/steps_rows.h"
#include "runtime/steps_sample.h"

namespace invar::bindings {

namespace nb = nanobind;
using MaybeId = std::optional<int64_t>;

// Dimensions of a head that attention is tested with: DeepSeek's latent of 512 and 64 that rotate.
constexpr int64_t kMaxHeadDim = 576;

// A packed weight in the units of a part (runtime/steps_linear.h Segment).
struct SegmentSpec {
  WeightFormat format;
  int64_t x;  // activations
  nb::object memory;
  int64_t offset, unit_stride, panels_per_unit, panels;
};

// What happens to a head (runtime/steps_linear.h HeadTransform); arrays are float32 or None.
struct HeadSpec {
  HeadSpec(nb::object bias, nb::object norm, float eps, MaybeId rope_table, std::string rope_style,
           int64_t rope_pairs)
      : bias(std::move(bias)),
        norm(std::move(norm)),
        eps(eps),
        rope_table(rope_table),
        rope_style(std::move(rope_style)),
        rope_pairs(rope_pairs) {}
  nb::object bias, norm;
  float eps;
  MaybeId rope_table;
  std::string rope_style;
  int64_t rope_pairs;
};

class PlanBuilder {
 public:
  PlanBuilder(const std::string& isa, nb::object memory, int64_t scratch_offset, int64_t max_tokens,
              int64_t max_sequences, int64_t embedding_rows, int64_t vocab, int threads,
              int64_t scratch_bytes, int64_t sampling_scratch_bytes, int64_t partials,
              int64_t partial_bytes);

  // Buffers, numbered from 0 in either kind.
  int64_t matrix(int64_t offset, int64_t width, int64_t rows);
  int64_t activations(int64_t offset, const std::string& format, int64_t k, int64_t rows);
  // The rows of one head of activations that have `heads` rows a token, or columns of a matrix that
  // are whole panels, as buffers of their own.
  int64_t head_activations(int64_t activations, int64_t heads, int64_t head);
  int64_t matrix_columns(int64_t matrix, int64_t first, int64_t width);
  int64_t cache_group(nb::object memory, int64_t slab_bytes, int64_t page_bytes,
                      int32_t pages_per_slab, int64_t slabs, int32_t kv_heads, int32_t head_dim,
                      int64_t window, bool chunked, const std::string& format);

  // A step stays open until the next begins; finish() closes the last.
  void begin_head();
  void finish();

  void begin_rows();
  void embed(nb::object raw, const std::string& format, float factor, int64_t out);
  void position_embed(nb::object raw, const std::string& format, int64_t out);
  void rope_table(nb::object inv_freq, double magnitude, int64_t out);
  void rms_norm(int64_t x, nb::object weight, float eps, int64_t heads, int64_t out);
  void layer_norm(int64_t x, nb::object weight, nb::object bias, float eps, int64_t out);
  void quantize(int64_t x, int64_t out);
  void add(int64_t a, int64_t b, int64_t out);
  void scale(int64_t x, float factor, int64_t out);
  void soft_cap(int64_t x, float cap, int64_t out);
  void sigmoid(int64_t x, int64_t out);
  void join(int64_t a, int64_t b, int64_t heads, int64_t out);
  void quantize_heads(int64_t x, int64_t heads, int64_t out);
  void columns(int64_t x, int64_t heads, int64_t first, int64_t out);
  void reorder(int64_t x, nb::object order, int64_t out);
  void temperature(double scale, int64_t length, int64_t out);
  void scale_rows(int64_t x, int64_t factor, int64_t out);
  void gated(int64_t gate, int64_t up, const std::string& activation, int64_t out);
  void activate(int64_t x, const std::string& activation, int64_t out);
  void rope(int64_t x, int64_t table, const std::string& style, int64_t pairs, int64_t heads,
            int64_t out);
  void store_kv(int64_t k, int64_t v, int64_t group, int64_t layer);
  void take_rows(int64_t x, int64_t out);
  void check(int64_t x, int32_t number, nb::object first_fault);

  void begin_linear();
  void part_store(const SegmentSpec& segment, int64_t n, int64_t out, nb::object bias,
                  MaybeId residual);
  void part_gated(const SegmentSpec& gate, const SegmentSpec& up, int64_t n,
                  const std::string& activation, nb::object gate_bias, nb::object up_bias,
                  MaybeId out, MaybeId act);
  void part_query(const SegmentSpec& segment, const HeadSpec& transform, int64_t head_dim,
                  int64_t heads, int64_t out);
  void part_cache(const SegmentSpec& key, const SegmentSpec& value, const HeadSpec& key_transform,
                  const HeadSpec& value_transform, int64_t group, int64_t layer);

  // Mixtures of experts (runtime/steps_experts.h). Buffers of expert rows have a row for every
  // token and slot.
  int64_t grouping(int64_t experts, int64_t used);
  void route(int64_t logits, nb::object bias, const std::string& scoring, int64_t used,
             bool normalise, float scale, int64_t groups, int64_t groups_used, int64_t group_best,
             int64_t out);
  void group_experts(int64_t routes, int64_t grouping);
  void gather(int64_t x, int64_t grouping, int64_t out);
  void quantize_experts(int64_t x, int64_t grouping, int64_t out);
  void experts_store(const SegmentSpec& segment, int64_t grouping, int64_t n, nb::object bias,
                     int64_t out);
  void experts_gated(const SegmentSpec& gate, const SegmentSpec& up, int64_t grouping, int64_t n,
                     const std::string& activation, nb::object gate_bias, nb::object up_bias,
                     MaybeId out, MaybeId act);
  void combine(int64_t x, int64_t routes, int64_t grouping, bool weighted, int64_t out);

  void attention(int64_t q, int64_t group, int64_t layer, int64_t heads, float scale,
                 float soft_cap, nb::object sinks, MaybeId out, MaybeId act);
  void sample(int64_t logits);

  Plan& plan() { return *plan_; }
  Matrix matrix_at(int64_t id) const;

 private:
  Activations activations_at(int64_t id) const;
  Matrix matrix_of_width(int64_t id, int64_t width, const char* what) const;
  // An operation whose input and output are as wide.
  template <typename Op>
  std::unique_ptr<Op> same_width(int64_t x, int64_t out, const char* input) const;
  const float* floats(nb::object array, int64_t length, const char* what);
  const float* maybe_floats(nb::object array, int64_t length, const char* what);
  Segment segment(const SegmentSpec& spec);
  HeadTransform transform(const HeadSpec& spec, int64_t head_dim, int64_t heads);
  int64_t layer_offset(int64_t group, int64_t layer) const;
  int64_t heads_per_unit(const SegmentSpec& spec, int64_t head_dim) const;
  // Of `stack` weights that lie one after another.
  Part store_part(const SegmentSpec& segment, int64_t stack, int64_t n, int64_t out,
                  nb::object bias, MaybeId residual);
  Part gated_part(const SegmentSpec& gate, const SegmentSpec& up, int64_t stack, int64_t n,
                  const std::string& activation, nb::object gate_bias, nb::object up_bias,
                  MaybeId out, MaybeId act);
  void add_part(Part part);
  std::shared_ptr<Grouping> grouping_at(int64_t id) const;
  RowStep& rows();
  void close();

  nb::object memory_;
  uint8_t* base_;
  int64_t bytes_;
  std::unique_ptr<Plan> plan_;
  std::vector<Matrix> matrices_;
  std::vector<Activations> activations_;
  std::vector<std::shared_ptr<Grouping>> groupings_;
  std::vector<nb::object> retained_;
  std::unique_ptr<RowStep> open_rows_;
  std::unique_ptr<LinearStep> open_linear_;
};

int64_t attention_scratch_bytes(const std::string& isa, const std::string& format, int32_t group,
                                int32_t head_dim);
int64_t sampling_scratch_bytes(const std::string& isa, int64_t vocab);

}  // namespace invar::bindings
