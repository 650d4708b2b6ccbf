#include "runtime/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace invar {
Memory::Memory(int64_t bytes) : bytes_(bytes) {
  if (bytes < 0) throw std::invalid_argument("memory of " + std::to_string(bytes) + " bytes");
  // Rounded up to whole huge pages, plus one to align the start.
  const size_t page = kHugePage, wanted = (static_cast<size_t>(bytes) + page) / page * page;
  mapped_ = wanted + page;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw std::runtime_error("cannot allocate " + std::to_string(bytes) +
                             " bytes: " + std::strerror(errno));
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<uint8_t*>((start + page - 1) / page * page);
#if defined(MADV_HUGEPAGE)
  madvise(data_, wanted, MADV_HUGEPAGE);  // advice only: without it everything still works
#endif
}

Memory::~Memory() { munmap(mapping_, mapped_); }

uint8_t* Memory::range(int64_t offset, int64_t length) const {
  if (offset < 0 || length < 0 || offset > bytes_ - length) {
    throw std::out_of_range("bytes [" + std::to_string(offset) + ", +" + std::to_string(length) +
                            ") lie outside a memory of " + std::to_string(bytes_) + " bytes");
  }
  return data_ + offset;
}

}  // namespace invar
