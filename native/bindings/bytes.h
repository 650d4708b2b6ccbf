// The bytes of any object with the buffer protocol, such as a mapped file.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace invar::bindings {

class Bytes {
 public:
  explicit Bytes(nanobind::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) {
      throw nanobind::python_error();
    }
  }
  ~Bytes() { PyBuffer_Release(&buffer_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  const char* at(uint64_t position) const {
    return static_cast<const char*>(buffer_.buf) + position;
  }
  uint64_t size() const { return static_cast<uint64_t>(buffer_.len); }

 private:
  Py_buffer buffer_;
};

}  // namespace invar::bindings
