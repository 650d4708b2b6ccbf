// Arrays of strings in GGUF metadata: one after the other, a little-endian u64 with the length in
// front of each. Vocabularies have hundreds of thousands, and Python needs a microsecond for one.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "bindings/bindings.h"
#include "bindings/bytes.h"

namespace invar::bindings {
namespace nb = nanobind;
namespace {

// Reads the length at `position` and steps over it; false where the bytes end before the string.
bool next_string(const Bytes& bytes, uint64_t& position, uint64_t& length) {
  if (position > bytes.size() || bytes.size() - position < sizeof length) return false;
  std::memcpy(&length, bytes.at(position), sizeof length);
  position += sizeof length;
  return length <= bytes.size() - position;
}

// The position behind `count` strings; None where the buffer ends before.
nb::object skip_strings(nb::handle buffer, uint64_t start, uint64_t count) {
  const Bytes bytes(buffer);
  uint64_t length = 0;
  for (uint64_t i = 0; i < count; ++i, start += length) {
    if (!next_string(bytes, start, length)) return nb::none();
  }
  return nb::cast(start);
}

// [str] and the position behind. Raises UnicodeDecodeError for bytes that are not UTF-8.
nb::tuple decode_strings(nb::handle buffer, uint64_t start, uint64_t count) {
  const Bytes bytes(buffer);
  nb::list strings;
  uint64_t length = 0;
  for (uint64_t i = 0; i < count; ++i, start += length) {
    if (!next_string(bytes, start, length))
      throw std::invalid_argument("the strings pass the buffer");
    PyObject* text =
        PyUnicode_DecodeUTF8(bytes.at(start), static_cast<Py_ssize_t>(length), nullptr);
    if (text == nullptr) throw nb::python_error();
    strings.append(nb::steal(text));
  }
  return nb::make_tuple(strings, start);
}

}  // namespace

void bind_strings(nb::module_& module) {
  module.def("skip_strings", &skip_strings, nb::arg("buffer"), nb::arg("start"), nb::arg("count"));
  module.def("decode_strings", &decode_strings, nb::arg("buffer"), nb::arg("start"),
             nb::arg("count"));
}

}  // namespace invar::bindings
