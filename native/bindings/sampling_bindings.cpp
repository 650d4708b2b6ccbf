// The sampling kernel for tests: rows of logits and the sampling arrays of a batch.
#include <nanobind/stl/string.h>

#include <atomic>
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/execution.h"
#include "runtime/memory.h"
#include "runtime/steps_sample.h"
#include "runtime/threads.h"

namespace invar::bindings {
namespace {

// logits [rows, vocab]; batch and result as for Plan.run, of which only sampling is looked at.
void sample(nb::handle logits, nb::handle batch, nb::handle result, const std::string& isa) {
  const auto values = view<const float, 2>(logits, "logits");
  const BatchView v = batch_view(batch, result);
  if (v.logit_count != values.shape[0])
    throw std::invalid_argument("logits: one row per logit row");
  Execution execution{};
  execution.kernels = &choose_kernels(isa);
  execution.batch = &v;
  execution.masks.resize(static_cast<size_t>(v.logit_count));
  for (size_t i = 0; i < v.sampling.masks.size(); ++i) {
    execution.masks.at(v.sampling.masked_rows[i]) = v.sampling.masks[i];
  }
  const Memory workspace(execution.kernels->sampling->workspace_bytes(values.shape[1]));
  SampleStep step;
  step.logits = {reinterpret_cast<uint8_t*>(const_cast<float*>(values.data)), values.shape[1] * 4,
                 values.shape[1], values.shape[0]};
  step.vocab = values.shape[1];
  Worker worker;
  worker.rows = values.shape[0];
  worker.sampling_scratch = workspace.data();
  const FloatState state;
  for (int64_t row = 0; row < worker.rows; ++row) step.run(execution, worker, row);
}

// Says that a mask's words are final, to whatever thread looks at them in a running step.
void publish_mask(nb::handle mask) {
  const auto words = view<uint32_t, 1>(mask, "mask");
  if (words.shape[0] < 1) throw std::invalid_argument("mask: it has no words");
  std::atomic_ref(words.data[words.shape[0] - 1]).store(1, std::memory_order_release);
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.def("publish_mask", &publish_mask, nb::arg("mask"));
  nb::module_ kernels = nb::cast<nb::module_>(module.attr("kernels"));
  kernels.def("sample", &sample, nb::arg("logits"), nb::arg("batch"), nb::arg("result"),
              nb::arg("isa") = "");
}

}  // namespace invar::bindings
