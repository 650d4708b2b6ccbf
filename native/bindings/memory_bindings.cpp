#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace invar::bindings {
namespace {

struct PackJob {
  WeightFormat format;
  const uint8_t* rows;
  int64_t n, k;
  uint8_t* out;         // of unit 0
  int64_t unit_stride;  // bytes
  int64_t panels_per_unit;
};

// Units on all threads off a counter. Few units at a time: they are what a page fault costs.
void run_pack(const Kernels& kernels, const PackJob& job, int threads) {
  const int64_t panels = (job.n + kPanelColumns - 1) / kPanelColumns;
  const int64_t units = (panels + job.panels_per_unit - 1) / job.panels_per_unit;
  std::atomic<int64_t> next{0};
  ThreadPool::instance().run(threads, [&](int) {
    for (int64_t unit = next++; unit < units; unit = next++) {
      const int64_t first = unit * job.panels_per_unit;
      kernels.linear->pack(job.format, job.rows, job.n, job.k, first,
                           std::min(panels, first + job.panels_per_unit),
                           job.out + unit * job.unit_stride);
    }
  });
}

void pack(const std::string& format_name, nb::handle raw, int64_t k, const Memory& memory,
          int64_t offset, int64_t unit_stride, int64_t panels_per_unit, int threads,
          const std::string& isa) {
  const WeightFormat format = weight_format(format_name);
  const auto rows = view<const uint8_t, 2>(raw, "raw");
  if (rows.shape[1] != row_bytes_ggml(format, k)) {
    throw std::invalid_argument("raw: rows of " + std::to_string(rows.shape[1]) +
                                " bytes, expected " + std::to_string(row_bytes_ggml(format, k)) +
                                " for " + std::to_string(k) + " columns of " + format_name);
  }
  const int64_t panels = (rows.shape[0] + kPanelColumns - 1) / kPanelColumns;
  const int64_t units = (panels + panels_per_unit - 1) / panels_per_unit;
  const int64_t last = panels - (units - 1) * panels_per_unit;
  PackJob job{format, rows.data, rows.shape[0], k, nullptr, unit_stride, panels_per_unit};
  job.out = memory.range(offset, (units - 1) * unit_stride + last * panel_bytes(format, k));
  const Kernels& kernels = choose_kernels(isa);
  const nb::gil_scoped_release release;
  run_pack(kernels, job, threads);
}

}  // namespace

void bind_memory(nb::module_& module) {
  nb::class_<Memory>(module, "Memory")
      .def(nb::init<int64_t>(), nb::arg("bytes"))
      .def_prop_ro("bytes", &Memory::bytes)
      .def(
          "array",
          [](Memory& memory) {
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
                memory.data(), {static_cast<size_t>(memory.bytes())}, nb::find(&memory));
          },
          nb::rv_policy::reference_internal);
  module.def("pack", &pack, nb::arg("format"), nb::arg("raw"), nb::arg("k"), nb::arg("memory"),
             nb::arg("offset"), nb::arg("unit_stride"), nb::arg("panels_per_unit"),
             nb::arg("threads"), nb::arg("isa") = "");
  module.def("panel_bytes", [](const std::string& format, int64_t k) {
    return panel_bytes(weight_format(format), k);
  });
  module.def("act_format_of", [](const std::string& format) {
    return name_of(act_format_of(weight_format(format)));
  });
  module.def("act_row_bytes", [](const std::string& format, int64_t k) {
    return act_layout(act_format(format), k).row_bytes;
  });
}

}  // namespace invar::bindings
