// What one core does with the linear kernels of one format: `invar bench kernels`.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace invar::bindings {
namespace nb = nanobind;
namespace {

constexpr int64_t kColumns = 2048;  // K: the width of a 1B model, whole blocks of every format
constexpr int64_t kMaxRows = 4096;
// A quarter of the smallest L2 about (512 KiB, Zen): room for activations, outputs and the stack.
constexpr int64_t kCachedBytes = 128 << 10;
constexpr int64_t kStreamBytes = 192 << 20;  // several times the L3 that a core can reach
constexpr int64_t kPackBytes = 32 << 20;

// Passes per second of `pass` over `seconds`, at least one; a first one fills the caches untimed.
template <class Pass>
double rate(double seconds, Pass pass) {
  using Clock = std::chrono::steady_clock;
  const nb::gil_scoped_release release;
  const FloatState state;
  pass();
  const auto start = Clock::now();
  double elapsed = 0;
  int64_t passes = 0;
  do {
    pass();
    ++passes;
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  } while (elapsed < seconds);
  return static_cast<double>(passes) / elapsed;
}

class LinearRates {
 public:
  LinearRates(const std::string& format, const std::string& isa)
      : kernels_(*choose_kernels(isa).linear),
        format_(weight_format(format)),
        act_format_(act_format_of(format_)),
        panel_bytes_(panel_bytes(format_, kColumns)),
        row_bytes_(row_bytes_ggml(format_, kColumns)),
        act_stride_(act_layout(act_format_, kColumns).row_bytes),
        raw_panels_(kPackBytes / row_bytes_ / kPanelColumns),
        panels_(std::max(raw_panels_, kStreamBytes / panel_bytes_)),
        raw_(raw_panels_ * kPanelColumns * row_bytes_),
        packed_(panels_ * panel_bytes_),
        act_(kMaxRows * act_stride_),
        out_(kMaxRows * kPanelColumns * 4),
        x_(kColumns) {
    // Small bytes everywhere: finite scales in every format. Speed depends on no value.
    for (int64_t i = 0; i < raw_.bytes(); ++i) raw_.data()[i] = static_cast<uint8_t>(i * 29) & 0x3B;
    for (int64_t i = 0; i < kColumns; ++i) x_[i] = static_cast<float>(i * 37 % 201 - 100) / 100;
    const FloatState state;
    for (int64_t p = 0; p < panels_; p += raw_panels_) pack(p);
    for (int64_t r = 0; r < kMaxRows; ++r) quantize(r);
  }

  // 10^9 operations per second (a multiply and an add are two) of `rows` rows, weights in L2.
  double gemm_gops(int rows, double seconds) {
    if (rows < 1 || rows > kMaxRows) {
      throw std::invalid_argument("rows: " + std::to_string(rows) + " is outside 1 … " +
                                  std::to_string(kMaxRows));
    }
    const int64_t panels = std::max<int64_t>(1, kCachedBytes / panel_bytes_);
    const double operations = 2.0 * rows * kColumns * kPanelColumns * static_cast<double>(panels);
    return rate(seconds, [&] { gemm(0, panels, rows); }) * operations / 1e9;
  }

  // 10^9 packed bytes per second that a product with one row streams from memory.
  double stream_gbs(double seconds) {
    // In pieces, so that the clock is looked at often enough.
    const int64_t piece = panels_ / 16;
    int64_t at = 0;
    const auto pass = [&] {
      gemm(at, piece, 1);
      at = at + 2 * piece <= panels_ ? at + piece : 0;
    };
    return rate(seconds, pass) * static_cast<double>(piece * panel_bytes_) / 1e9;
  }

  // 10^9 fp32 bytes per second that become activation codes.
  double quantize_gbs(double seconds) {
    return rate(seconds, [&] { quantize(0); }) * kColumns * 4 / 1e9;
  }

  // 10^9 bytes of GGML rows per second that are packed, from memory to memory.
  double pack_gbs(double seconds) {
    return rate(seconds, [&] { pack(0); }) * static_cast<double>(raw_.bytes()) / 1e9;
  }

 private:
  void pack(int64_t first) {
    kernels_.pack(format_, raw_.data(), raw_panels_ * kPanelColumns, kColumns, 0,
                  std::min(raw_panels_, panels_ - first), packed_.data() + first * panel_bytes_);
  }

  void quantize(int64_t row) {
    kernels_.quantize(act_format_, x_.data(), kColumns, act_.data() + row * act_stride_);
  }

  void gemm(int64_t first, int64_t count, int rows) {
    for (int64_t p = first; p < first + count; ++p) {
      kernels_.gemm(format_, packed_.data() + p * panel_bytes_, kColumns, act_.data(), act_stride_,
                    rows, reinterpret_cast<float*>(out_.data()), kPanelColumns);
    }
  }

  const LinearKernels& kernels_;
  WeightFormat format_;
  ActFormat act_format_;
  int64_t panel_bytes_, row_bytes_, act_stride_, raw_panels_, panels_;
  Memory raw_, packed_, act_, out_;
  std::vector<float> x_;
};

}  // namespace

void bind_bench(nb::module_& module) {
  nb::class_<LinearRates>(module, "LinearRates")
      .def(nb::init<const std::string&, const std::string&>(), nb::arg("format"),
           nb::arg("isa") = "")
      .def("gemm_gops", &LinearRates::gemm_gops, nb::arg("rows"), nb::arg("seconds"))
      .def("stream_gbs", &LinearRates::stream_gbs, nb::arg("seconds"))
      .def("quantize_gbs", &LinearRates::quantize_gbs, nb::arg("seconds"))
      .def("pack_gbs", &LinearRates::pack_gbs, nb::arg("seconds"))
      .def_ro_static("COLUMNS", &kColumns)
      .def_ro_static("MAX_ROWS", &kMaxRows);
}

}  // namespace invar::bindings
