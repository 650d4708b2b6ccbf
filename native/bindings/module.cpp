#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings/bindings.h"
#include "runtime/cpu.h"
#include "runtime/machine.h"

namespace invar::bindings {
namespace nb = nanobind;
namespace {

constexpr const char* kActFormatNames[] = {"f32", "bf16", "q8_32", "q8_256", "q8_row", "q8_16"};

template <class Format, size_t Count>
Format find_format(const char* const (&names)[Count], const char* what, const std::string& name) {
  std::string known;
  for (size_t i = 0; i < Count; i++) {
    if (name == names[i]) return (Format)i;
    known += (known.empty() ? "" : ", ") + std::string(names[i]);
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is not known (known: " + known +
                              ")");
}

}  // namespace

const Kernels& choose_kernels(const std::string& isa) {
  return isa.empty() ? kernels() : kernels_for(isa);
}

WeightFormat weight_format(const std::string& name) {
  return find_format<WeightFormat>(kWeightFormatNames, "weight format", name);
}

ActFormat act_format(const std::string& name) {
  return find_format<ActFormat>(kActFormatNames, "activation format", name);
}

KVFormat kv_format(const std::string& name) {
  return find_format<KVFormat>(kKVFormatNames, "KV format", name);
}

const char* name_of(ActFormat format) { return kActFormatNames[(int)format]; }

void bind_machine(nb::module_& module) {
  module.def("cpu_info", [] {
    nb::dict info;
    info["isa"] = kernels().isa;
    info["available_isas"] = available_isas();
    info["usable_cores"] = usable_cores();
    info["affinity_cpus"] = affinity_cpus();
    return info;
  });
  module.def("int8_peak_gops", &int8_peak_gops, nb::arg("threads"), nb::arg("seconds") = 0.3,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("bf16_peak_gflops", &bf16_peak_gflops, nb::arg("threads"), nb::arg("seconds") = 0.3,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("fp32_peak_gflops", &fp32_peak_gflops, nb::arg("threads"), nb::arg("seconds") = 0.3,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("read_rate_gbs", &read_rate_gbs, nb::arg("memory"), nb::arg("threads"),
             nb::arg("seconds") = 0.5, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace invar::bindings

NB_MODULE(_native, module) {
  using namespace invar::bindings;
  // An engine that lives as long as its process is no leak, and nothing to print at its end.
  nb::set_leak_warnings(false);
  module.attr("NUMERIC_VERSION") = invar::kNumericVersion;
  module.attr("PAGE_TOKENS") = invar::kPageTokens;
  module.attr("PANEL_COLUMNS") = invar::kPanelColumns;
  module.attr("MAX_TOP_LOGPROBS") = invar::kMaxTopLogprobs;
  bind_machine(module);
  bind_memory(module);
  bind_plan(module);
  bind_kernels(module);
  bind_sampling(module);
  bind_strings(module);
  bind_engine(module);
  bind_radix(module);
  bind_bench(module);
  bind_codebooks(module);
}
