// Counts of pages: what the engine does once for each request over thousands of them.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/pages.h"

namespace invar::bindings {
namespace {

std::span<const int32_t> page_ids(nb::handle pages) {
  const auto ids = view<const int32_t, 1>(pages, "pages");
  return {ids.data, static_cast<size_t>(ids.shape[0])};
}

nb::ndarray<nb::numpy, int32_t> copy_of(const std::vector<int32_t>& values) {
  const auto out = new_array<int32_t>({values.size()});
  std::copy(values.begin(), values.end(), out.data());
  return out;
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::class_<SlabArbiter>(module, "SlabArbiter")
      .def(nb::init<int64_t>(), nb::arg("slabs"))
      .def_prop_ro("total", &SlabArbiter::total)
      .def_prop_ro("num_free", &SlabArbiter::num_free)
      .def("free_slabs", &SlabArbiter::free_slabs)
      .def("take", &SlabArbiter::take)
      .def("give_back", &SlabArbiter::give_back, nb::arg("slab"));
  nb::class_<PageCounts>(module, "PageCounts")
      .def(nb::init<SlabArbiter&, int64_t>(), nb::arg("arbiter"), nb::arg("pages_per_slab"),
           nb::keep_alive<1, 2>())
      .def("slabs_needed", &PageCounts::slabs_needed, nb::arg("pages"))
      .def("slabs_needed_at_best", &PageCounts::slabs_needed_at_best, nb::arg("pages"))
      .def(
          "take",
          [](PageCounts& counts, nb::handle pages) {
            const auto ids = view<int32_t, 1>(pages, "pages");
            counts.take(std::span(ids.data, static_cast<size_t>(ids.shape[0])));
          },
          nb::arg("pages"))
      .def(
          "use", [](PageCounts& counts, nb::handle pages) { counts.use(page_ids(pages)); },
          nb::arg("pages"))
      .def(
          "drop", [](PageCounts& counts, nb::handle pages) { counts.drop(page_ids(pages)); },
          nb::arg("pages"))
      .def(
          "give_back",
          [](PageCounts& counts, nb::handle pages) { return counts.give_back(page_ids(pages)); },
          nb::arg("pages"))
      .def(
          "leading_unused",
          [](const PageCounts& counts, nb::handle pages) {
            return counts.leading_unused(page_ids(pages));
          },
          nb::arg("pages"))
      .def_prop_ro("num_releases", &PageCounts::num_releases)
      .def_prop_ro("num_named", &PageCounts::num_named)
      .def_prop_ro("num_owned", &PageCounts::num_owned)
      .def_prop_ro("num_used", &PageCounts::num_used)
      .def_prop_ro("num_used_slabs", &PageCounts::num_used_slabs)
      .def_prop_ro("num_free", &PageCounts::num_free)
      .def("users", [](const PageCounts& counts) { return copy_of(counts.users()); })
      .def("free_pages", [](const PageCounts& counts) { return copy_of(counts.free_pages()); })
      .def("held_slabs", &PageCounts::held_slabs);
}

}  // namespace invar::bindings
