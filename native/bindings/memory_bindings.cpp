#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "kernels/records.h"
#include "runtime/checksum.h"
#include "runtime/memory.h"
#include "runtime/threads.h"
#include "runtime/unpack.h"

namespace invar::bindings {
namespace {

struct PackJob {
  WeightFormat format;
  const uint8_t* rows;
  int64_t n, k;
  int64_t offset, unit_stride;  // bytes; unit u lies at offset + u * unit_stride
  int64_t panels_per_unit;

  int64_t panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }
  int64_t units() const { return (panels() + panels_per_unit - 1) / panels_per_unit; }

  // The first unit that begins at byte `place` or behind it.
  int64_t first_unit_from(int64_t place) const {
    const int64_t before = std::max<int64_t>(0, place - offset);
    return std::min(units(), (before + unit_stride - 1) / unit_stride);
  }
};

// What begins in one huge page. Two threads that touch a fresh page at once both fill it with
// zeros, so a page is one thread's.
void pack_page(const LinearKernels& linear, const std::vector<PackJob>& jobs, uint8_t* memory,
               int64_t page) {
  const int64_t begin = page * kHugePage, end = begin + kHugePage;
  for (const PackJob& job : jobs) {
    const int64_t last = job.first_unit_from(end);
    for (int64_t unit = job.first_unit_from(begin); unit < last; ++unit) {
      const int64_t first = unit * job.panels_per_unit;
      linear.pack(job.format, job.rows, job.n, job.k, first,
                  std::min(job.panels(), first + job.panels_per_unit),
                  memory + job.offset + unit * job.unit_stride);
    }
  }
}

PackJob pack_job(nb::handle weight, nb::handle raw, const Memory& memory) {
  const auto name = nb::cast<std::string>(weight.attr("weight_format"));
  const auto number = [&](const char* of) { return nb::cast<int64_t>(weight.attr(of)); };
  const auto rows = view<const uint8_t, 2>(raw, "raw");
  const PackJob job{weight_format(name),      rows.data,        rows.shape[0],
                    number("columns"),        number("offset"), number("unit_stride"),
                    number("panels_per_unit")};
  if (rows.shape[1] != row_bytes_ggml(job.format, job.k)) {
    throw std::invalid_argument("raw: rows of " + std::to_string(rows.shape[1]) +
                                " bytes, expected " +
                                std::to_string(row_bytes_ggml(job.format, job.k)) + " for " +
                                std::to_string(job.k) + " columns of " + name);
  }
  if (job.unit_stride < 1 || job.panels_per_unit < 1) throw std::invalid_argument("empty units");
  const int64_t before = job.units() - 1, last = job.panels() - before * job.panels_per_unit;
  memory.range(job.offset, before * job.unit_stride + last * panel_bytes(job.format, job.k));
  return job;
}

// All weights at once, on all threads, without the GIL: a region for each would wait for whoever
// holds it, some hundred times.
void pack(nb::sequence weights, nb::sequence raws, const Memory& memory, int threads,
          const std::string& isa) {
  std::vector<PackJob> jobs;
  for (size_t i = 0; i < nb::len(weights); ++i) {
    jobs.push_back(pack_job(weights[i], raws[i], memory));
  }
  const Kernels& kernels = choose_kernels(isa);
  const nb::gil_scoped_release release;
  const int64_t pages = (memory.bytes() + kHugePage - 1) / kHugePage;
  std::atomic<int64_t> next{0};
  ThreadPool::instance().run(threads, [&](int) {
    for (int64_t page = next++; page < pages; page = next++) {
      pack_page(*kernels.linear, jobs, memory.data(), page);
    }
  });
}

// Rows [n, ...] of one format as rows of another, by row on all threads, without the GIL.
nb::ndarray<nb::numpy, uint8_t> encode_rows(nb::handle raw, int64_t k, const std::string& from,
                                            const std::string& to, int threads,
                                            const std::string& isa) {
  constexpr int64_t kRows = 16;  // at a time
  const WeightFormat source = weight_format(from), target = weight_format(to);
  const auto rows = view<const uint8_t, 2>(raw, "raw");
  const int64_t n = rows.shape[0], bytes = row_bytes_ggml(source, k);
  const int64_t out_bytes = row_bytes_ggml(target, k);
  if (k < 1 || rows.shape[1] != bytes || k % ggml_block(source).k || k % ggml_block(target).k) {
    throw std::invalid_argument("raw: rows of " + std::to_string(rows.shape[1]) +
                                " bytes are not " + std::to_string(k) + " columns of " + from +
                                " to make " + to);
  }
  const LinearKernels& linear = *choose_kernels(isa).linear;
  auto out = new_array<uint8_t>({static_cast<size_t>(n), static_cast<size_t>(out_bytes)});
  uint8_t* data = out.data();
  std::atomic<int64_t> next{0};
  // Scales of GGML's blocks are fp16, and a weight beyond its largest value may make one infinite.
  const bool in_half = target != WeightFormat::int8 && target != WeightFormat::fp8;
  const float most = in_half ? 65504.0f : std::numeric_limits<float>::max();
  std::atomic<bool> finite{true}, fits{true}, known{true};
  {
    const nb::gil_scoped_release release;
    ThreadPool::instance().run(threads, [&](int) {
      std::vector<float> values(static_cast<size_t>(k));
      for (int64_t first = next++ * kRows; first < n; first = next++ * kRows) {
        for (int64_t r = first; r < std::min(n, first + kRows); ++r) {
          linear.dequantize_row(source, rows.data + r * bytes, k, values.data());
          for (const float value : values) {
            if (!std::isfinite(value)) finite = false;
            if (std::fabs(value) > most) fits = false;
          }
          if (!finite || !fits) return;
          if (!linear.encode_row(target, values.data(), k, data + r * out_bytes)) known = false;
        }
      }
    });
  }
  if (!finite) throw std::invalid_argument("NaN or infinity among the weights");
  if (!fits) throw std::invalid_argument("a weight beyond 65,504, where scales are fp16");
  if (!known) throw std::invalid_argument("there is no quantiser for " + to);
  return out;
}

CodeOrder code_order(const std::string& name) {
  if (name == "gptq") return CodeOrder::gptq;
  if (name == "awq") return CodeOrder::awq;
  if (name == "rows") return CodeOrder::rows;
  throw std::invalid_argument("order of codes '" + name + "' is not known (gptq, awq, rows)");
}

// Codes of words int32 [rows, columns] into the blocks of `out` [n, row_bytes], on all threads.
void unpack_codes(nb::handle words, const std::string& layout, int bits, int64_t k,
                  nb::object order, nb::handle out, int64_t header, int64_t block_bytes,
                  int threads) {
  const auto from = view<const int32_t, 2>(words, "words");
  const auto rows = view<uint8_t, 2>(out, "out");
  const int64_t n = rows.shape[0];
  PackedCodes codes{
      reinterpret_cast<const uint32_t*>(from.data), code_order(layout), bits, n, k, nullptr};
  const bool is_awq = codes.layout == CodeOrder::awq;
  if ((bits != 4 && (bits != 8 || is_awq)) || k < 1 || k % 32 || (is_awq && n % 8) || header < 0 ||
      header + 4 * bits > block_bytes || rows.shape[1] != k / 32 * block_bytes) {
    throw std::invalid_argument("unpack_codes: codes or blocks that do not fit together");
  }
  const int64_t in_words = k * bits / 32;
  const bool down = codes.layout == CodeOrder::gptq;
  if (from.shape[0] != (is_awq ? k
                        : down ? in_words
                               : n) ||
      from.shape[1] != (is_awq ? n / 8
                        : down ? n
                               : in_words)) {
    throw std::invalid_argument("unpack_codes: words of another shape");
  }
  if (!order.is_none()) {
    const auto places = view<const int32_t, 1>(order, "order");
    const auto is_place = [k](int32_t place) { return place >= 0 && place < k; };
    if (places.shape[0] != k || !std::all_of(places.data, places.data + k, is_place)) {
      throw std::invalid_argument("unpack_codes: an order of other columns");
    }
    codes.order = places.data;
  }
  constexpr int64_t kRows = 128;  // at a time: whole cache lines of the words of a row of AWQ
  const BlockRows to{rows.data, rows.shape[1], block_bytes, header};
  std::atomic<int64_t> next{0};
  const nb::gil_scoped_release release;
  ThreadPool::instance().run(threads, [&](int) {
    for (int64_t first = next++ * kRows; first < n; first = next++ * kRows) {
      unpack_rows(codes, first, std::min(n, first + kRows), to);
    }
  });
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
  module.def("checksum", [](nb::handle data) {
    const auto bytes = view<const uint8_t, 1>(data, "data");
    const nb::gil_scoped_release release;
    return checksum(bytes.data, bytes.shape[0]);
  });
  module.def("pack", &pack, nb::arg("weights"), nb::arg("raws"), nb::arg("memory"),
             nb::arg("threads"), nb::arg("isa") = "");
  module.def("encode_rows", &encode_rows, nb::arg("raw"), nb::arg("k"), nb::arg("source"),
             nb::arg("target"), nb::arg("threads"), nb::arg("isa") = "");
  module.def("unpack_codes", &unpack_codes, nb::arg("words"), nb::arg("layout"), nb::arg("bits"),
             nb::arg("k"), nb::arg("order").none(), nb::arg("out"), nb::arg("header"),
             nb::arg("block_bytes"), nb::arg("threads"));
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
