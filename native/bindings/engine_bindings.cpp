// What the engine does once for each request over thousands of pages and ids.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/bytes.h"
#include "runtime/pages.h"

namespace invar::bindings {
namespace {

std::span<const int32_t> page_ids(nb::handle pages) {
  const auto ids = view<const int32_t, 1>(pages, "pages");
  return {ids.data, static_cast<size_t>(ids.shape[0])};
}

// How many int32 ids `left` begins with that `right` has from id `start` on.
int64_t common_ids(nb::handle left, nb::handle right, int64_t start) {
  const Bytes ours(left), theirs(right);
  constexpr int64_t size = sizeof(int32_t);
  const int64_t total = static_cast<int64_t>(theirs.size()) / size;
  if (start < 0 || start > total) throw std::invalid_argument("start: past the ids");
  const int64_t count = std::min(static_cast<int64_t>(ours.size()) / size, total - start);
  const char *a = ours.at(0), *b = theirs.at(start * size);
  const auto equal = [&](int64_t id, int64_t ids) {  // at any address
    return std::memcmp(a + id * size, b + id * size, ids * size) == 0;
  };
  constexpr int64_t kStride = 64;
  int64_t common = 0;
  while (count - common >= kStride && equal(common, kStride)) common += kStride;
  while (common < count && equal(common, 1)) ++common;
  return common;
}

// Pages of each group that somebody wants, beside the groups' own.
using Pools = std::vector<PageCounts*>;
using Wanted = std::vector<int64_t>;

void check_groups(const Pools& pools, const Wanted& wanted) {
  if (pools.size() != wanted.size()) throw std::invalid_argument("wanted: not one for each pool");
}

int64_t slabs_missing(const SlabArbiter& arbiter, const Pools& pools, const Wanted& wanted) {
  check_groups(pools, wanted);
  int64_t slabs = 0;
  for (size_t group = 0; group < pools.size(); ++group) {
    slabs += pools[group]->slabs_needed(wanted[group]);
  }
  return slabs - arbiter.num_free();
}

bool fits_at_best(const SlabArbiter& arbiter, const Pools& pools, const Wanted& wanted) {
  check_groups(pools, wanted);
  int64_t slabs = 0;
  for (size_t group = 0; group < pools.size(); ++group) {
    const PageCounts& pool = *pools[group];
    slabs += pool.num_used_slabs() + pool.slabs_needed_at_best(wanted[group]);
  }
  return slabs <= arbiter.total();
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::class_<SlabArbiter>(module, "SlabArbiter")
      .def(nb::init<int64_t>(), nb::arg("slabs"))
      .def_prop_ro("total", &SlabArbiter::total)
      .def_prop_ro("num_free", &SlabArbiter::num_free)
      .def("free_slabs", &SlabArbiter::free_slabs)
      .def("missing", &slabs_missing, nb::arg("pools"), nb::arg("wanted"))
      .def("fits_at_best", &fits_at_best, nb::arg("pools"), nb::arg("wanted"))
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
      .def("users", &PageCounts::users)
      .def("free_pages", &PageCounts::free_pages)
      .def("held_slabs", &PageCounts::held_slabs);
  module.def("common_ids", &common_ids, nb::arg("left"), nb::arg("right"), nb::arg("start") = 0);
}

}  // namespace invar::bindings
