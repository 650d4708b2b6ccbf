// The codebooks of iq1, iq2 and iq3 as the number formats of Python read them.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "kernels/codebooks.h"

namespace invar::bindings {
namespace {

template <size_t Count>
nb::ndarray<nb::numpy, uint16_t> copy_of(const uint16_t (&entries)[Count]) {
  auto copy = new_array<uint16_t>({Count});
  std::copy(entries, entries + Count, copy.data());
  return copy;
}

nb::ndarray<nb::numpy, uint16_t> codebook(const std::string& name) {
  if (name == "iq1") return copy_of(kGridIQ1);
  if (name == "iq2_xxs") return copy_of(kGridIQ2_XXS);
  if (name == "iq2_xs") return copy_of(kGridIQ2_XS);
  if (name == "iq2_s") return copy_of(kGridIQ2_S);
  if (name == "iq3_xxs") return copy_of(kGridIQ3_XXS);
  if (name == "iq3_s") return copy_of(kGridIQ3_S);
  throw std::invalid_argument("codebook '" + name + "' is not known");
}

}  // namespace

void bind_codebooks(nb::module_& module) { module.def("codebook", &codebook, nb::arg("name")); }

}  // namespace invar::bindings
