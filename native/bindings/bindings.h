// The parts of the module `invar._native`.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "kernels/kernels.h"
#include "runtime/batch.h"

namespace invar::bindings {

void bind_machine(nanobind::module_& module);
void bind_memory(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_strings(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
void bind_radix(nanobind::module_& module);
void bind_bench(nanobind::module_& module);
void bind_codebooks(nanobind::module_& module);

// The table of `isa`, or the default one for an empty name.
const Kernels& choose_kernels(const std::string& isa);

// Number formats cross the border by the names of the enumerations.
WeightFormat weight_format(const std::string& name);
ActFormat act_format(const std::string& name);
KVFormat kv_format(const std::string& name);
RopeStyle rope_style(const std::string& name);
Activation activation_function(const std::string& name);
const char* name_of(ActFormat format);

// The arrays of a Batch and of a StepResult (backends/runner.py), shapes checked.
BatchView batch_view(nanobind::handle batch, nanobind::handle result);

}  // namespace invar::bindings
