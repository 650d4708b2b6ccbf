#include "bindings/plan_builder.h"

#include <stdexcept>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace invar::bindings {
namespace {

constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

}  // namespace

PlanBuilder::PlanBuilder(const std::string& isa, nb::object memory, int64_t scratch_offset,
                         int64_t max_tokens, int64_t max_sequences, int64_t embedding_rows,
                         int64_t vocab, int threads, int64_t scratch_bytes,
                         int64_t sampling_scratch_bytes, int64_t partials, int64_t partial_bytes)
    : memory_(std::move(memory)) {
  const Memory& workspace = nb::cast<const Memory&>(memory_);
  base_ = workspace.data();
  bytes_ = workspace.bytes();
  if (max_tokens < 1 || max_sequences < 1 || vocab < 1) refuse("limits below 1");
  if (scratch_bytes % 64 || sampling_scratch_bytes % 64 || partial_bytes % 64 ||
      scratch_offset % 64) {
    refuse("scratch is not a multiple of 64 bytes");
  }
  if (partials < 0 || partial_bytes < 0) refuse("fewer than no partials");
  const PlanLimits limits{max_tokens,   max_sequences, embedding_rows,         vocab,
                          threads,      scratch_bytes, sampling_scratch_bytes, partials,
                          partial_bytes};
  uint8_t* scratch = workspace.range(scratch_offset, limits.all_scratch_bytes());
  plan_ = std::make_unique<Plan>(choose_kernels(isa), limits, scratch);
}

int64_t PlanBuilder::matrix(int64_t offset, int64_t width, int64_t rows) {
  const int64_t stride = matrix_stride(width);
  if (offset % 64) refuse("a matrix does not start on 64 bytes");
  uint8_t* data = nb::cast<const Memory&>(memory_).range(offset, stride * rows);
  matrices_.push_back({data, stride, width, rows});
  return static_cast<int64_t>(matrices_.size()) - 1;
}

int64_t PlanBuilder::activations(int64_t offset, const std::string& format, int64_t k,
                                 int64_t rows) {
  Activations act{nullptr, act_format(format), k, rows, {}};
  if (k % act_block(act.format)) {
    refuse(std::to_string(k) + " columns are not whole blocks of " + format);
  }
  act.layout = act_layout(act.format, k);
  if (offset % 64) refuse("activations do not start on 64 bytes");
  act.data = nb::cast<const Memory&>(memory_).range(offset, act.layout.row_bytes * rows);
  activations_.push_back(act);
  return static_cast<int64_t>(activations_.size()) - 1;
}

int64_t PlanBuilder::head_activations(int64_t id, int64_t heads, int64_t head) {
  Activations act = activations_at(id);
  if (heads < 1 || head < 0 || head >= heads || act.rows % heads) refuse("no such head");
  act.data = act.row(head);
  act.rows /= heads;
  act.layout.row_bytes *= heads;
  activations_.push_back(act);
  return static_cast<int64_t>(activations_.size()) - 1;
}

int64_t PlanBuilder::matrix_columns(int64_t id, int64_t first, int64_t width) {
  Matrix matrix = matrix_at(id);
  if (first < 0 || first % kPanelColumns || width < 1 || width % kPanelColumns ||
      first + width > matrix.width) {
    refuse("columns of a matrix that are not whole panels of it");
  }
  matrix.data += first * static_cast<int64_t>(sizeof(float));
  matrix.width = width;
  matrices_.push_back(matrix);
  return static_cast<int64_t>(matrices_.size()) - 1;
}

int64_t PlanBuilder::cache_group(nb::object memory, int64_t slab_bytes, int64_t page_bytes,
                                 int32_t pages_per_slab, int64_t slabs, int32_t kv_heads,
                                 int32_t head_dim, int64_t window, bool chunked,
                                 const std::string& format) {
  if (head_dim < 16 || head_dim > kMaxHeadDim || head_dim % 16) {
    refuse("head size " + std::to_string(head_dim) + " is not a multiple of 16 up to " +
           std::to_string(kMaxHeadDim));
  }
  const KVFormat kv = kv_format(format);
  if (page_bytes % (kv_heads * kv_head_bytes(kv, head_dim))) refuse("a page is not whole layers");
  uint8_t* arena = nb::cast<const Memory&>(memory).range(0, slab_bytes * slabs);
  retained_.push_back(std::move(memory));
  return plan_->add_cache_group({{arena, slab_bytes, page_bytes, pages_per_slab},
                                 slabs * pages_per_slab,
                                 kv_heads,
                                 head_dim,
                                 {window, chunked},
                                 kv});
}

void PlanBuilder::close() {
  if (open_rows_) plan_->add(std::exchange(open_rows_, nullptr));
  if (open_linear_) plan_->add(std::exchange(open_linear_, nullptr));
}

void PlanBuilder::begin_head() {
  close();
  plan_->begin_head();
}

void PlanBuilder::finish() { close(); }

void PlanBuilder::begin_rows() {
  close();
  open_rows_ = std::make_unique<RowStep>();
}

void PlanBuilder::begin_linear() {
  close();
  open_linear_ = std::make_unique<LinearStep>(plan_->limits().threads);
}

RowStep& PlanBuilder::rows() {
  if (!open_rows_) refuse("a row operation outside begin_rows()");
  return *open_rows_;
}

Matrix PlanBuilder::matrix_at(int64_t id) const {
  if (id < 0 || id >= static_cast<int64_t>(matrices_.size())) {
    refuse("matrix " + std::to_string(id) + " does not exist");
  }
  return matrices_[id];
}

Matrix PlanBuilder::matrix_of_width(int64_t id, int64_t width, const char* what) const {
  const Matrix matrix = matrix_at(id);
  if (matrix.width != width) {
    refuse(std::string(what) + " has width " + std::to_string(matrix.width) + ", expected " +
           std::to_string(width));
  }
  return matrix;
}

Activations PlanBuilder::activations_at(int64_t id) const {
  if (id < 0 || id >= static_cast<int64_t>(activations_.size())) {
    refuse("activations " + std::to_string(id) + " do not exist");
  }
  return activations_[id];
}

const float* PlanBuilder::floats(nb::object array, int64_t length, const char* what) {
  const auto values = view<const float, 1>(array, what);
  if (values.shape[0] != length) {
    refuse(std::string(what) + " has " + std::to_string(values.shape[0]) + " elements, expected " +
           std::to_string(length));
  }
  retained_.push_back(std::move(array));
  return values.data;
}

const float* PlanBuilder::maybe_floats(nb::object array, int64_t length, const char* what) {
  return array.is_none() ? nullptr : floats(std::move(array), length, what);
}

int64_t PlanBuilder::layer_offset(int64_t group, int64_t layer) const {
  const CacheGroup& cache = plan_->cache_group(group);
  const int64_t bytes = cache.kv_heads * cache.head_bytes();
  if (layer < 0 || (layer + 1) * bytes > cache.pages.page_bytes) {
    refuse("layer " + std::to_string(layer) + " is not in a page of its cache group");
  }
  return layer * bytes;
}

void PlanBuilder::attention(int64_t q, int64_t group, int64_t layer, int64_t heads, float scale,
                            float soft_cap, nb::object sinks, MaybeId out, MaybeId act) {
  close();
  const CacheGroup& cache = plan_->cache_group(group);
  const int64_t width = heads * cache.head_dim;
  if (heads % cache.kv_heads) refuse("query heads are not a multiple of KV heads");
  if (out.has_value() == act.has_value()) refuse("attention writes either out or act");
  auto step = std::make_unique<AttentionStep>();
  step->q = matrix_of_width(q, width, "q");
  if (out) step->out = matrix_of_width(*out, width, "attention output");
  if (act) step->act = activations_at(*act);
  if (act && (step->act.k != width || width / cache.kv_heads % act_block(step->act.format))) {
    refuse("attention output: the heads of a KV head are not whole activation blocks");
  }
  step->group = group;
  step->layer_offset = layer_offset(group, layer);
  step->heads = heads;
  step->scale = scale;
  step->soft_cap = soft_cap;
  step->sinks = maybe_floats(std::move(sinks), heads, "sinks");
  step->head_dim = cache.head_dim;
  step->kv_heads = cache.kv_heads;
  if (plan_->limits().partials > 0 &&
      attention_partial_bytes(heads / cache.kv_heads, cache.head_dim) >
          plan_->limits().partial_bytes) {
    refuse("too little room for the partials of attention");
  }
  step->workspace_bytes =
      plan_->kernels()
          .attention_over(cache.kv_format)
          .workspace_bytes(kQueryChunk, static_cast<int32_t>(heads / cache.kv_heads),
                           cache.head_dim);
  plan_->add(std::move(step));
}

void PlanBuilder::sample(int64_t logits) {
  close();
  auto step = std::make_unique<SampleStep>();
  step->logits = matrix_at(logits);
  step->vocab = plan_->limits().vocab;
  if (step->vocab > step->logits.width) {
    refuse("the vocabulary has " + std::to_string(step->vocab) + " ids, the model " +
           std::to_string(step->logits.width) + " logits");
  }
  if (plan_->kernels().sampling->workspace_bytes(step->vocab) >
      plan_->limits().sampling_scratch_bytes) {
    refuse("too little scratch for sampling");
  }
  plan_->add(std::move(step));
}

int64_t attention_scratch_bytes(const std::string& isa, const std::string& format, int32_t group,
                                int32_t head_dim) {
  const AttentionKernels& kernels = choose_kernels(isa).attention_over(kv_format(format));
  const int64_t workspace = kernels.workspace_bytes(kQueryChunk, group, head_dim);
  const int64_t columns = int64_t{group} * head_dim;
  // The result and one row of activations of any format, for heads that are quantised at once.
  return round_up(workspace) + round_up((kQueryChunk + 1) * columns * 4 + 256);
}

int64_t sampling_scratch_bytes(const std::string& isa, int64_t vocab) {
  return round_up(choose_kernels(isa).sampling->workspace_bytes(vocab));
}

}  // namespace invar::bindings
