// Checked access to numpy arrays: shape, dtype and contiguity once, then raw pointers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace invar::bindings {

namespace nb = nanobind;

template <class T, int Dimensions>
using Array = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, double>) return "float64";
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, uint8_t>) return "uint8";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (std::is_same_v<T, uint32_t>) return "uint32";
  if constexpr (std::is_same_v<T, int64_t>) return "int64";
  if constexpr (std::is_same_v<T, uint64_t>) return "uint64";
}

template <class T, int Dimensions>
struct View {
  T* data;
  std::array<int64_t, Dimensions> shape;
};

// The array behind `object` without conversion. Throws std::invalid_argument with its name. The
// caller keeps the object alive while it uses the pointer.
template <class T, int Dimensions>
View<T, Dimensions> view(nb::handle object, const std::string& name) {
  Array<T, Dimensions> array;
  if (!nb::try_cast(object, array, false)) {
    throw std::invalid_argument(
        name + ": expected a contiguous " + type_name<std::remove_const_t<T>>() + " array of " +
        std::to_string(Dimensions) + " dimensions, got " + nb::repr(object.type()).c_str());
  }
  View<T, Dimensions> result{array.data(), {}};
  for (int i = 0; i < Dimensions; ++i) result.shape[i] = static_cast<int64_t>(array.shape(i));
  return result;
}

// Attribute `name` of `object`, checked as view() does.
template <class T, int Dimensions>
View<T, Dimensions> field(nb::handle object, const char* name) {
  return view<T, Dimensions>(object.attr(name), name);
}

// A one-dimensional attribute of exactly `length` elements.
template <class T>
T* row_field(nb::handle object, const char* name, int64_t length) {
  const auto array = field<T, 1>(object, name);
  if (array.shape[0] != length) {
    throw std::invalid_argument(std::string(name) + ": has " + std::to_string(array.shape[0]) +
                                " elements, expected " + std::to_string(length));
  }
  return array.data;
}

// A new numpy array that owns its memory.
template <class T>
nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t length : shape) count *= length;
  T* data = new T[count]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

}  // namespace invar::bindings
