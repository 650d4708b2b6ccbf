// Single kernels for tests: each with an instruction set by name.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/buffers.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace invar::bindings {
namespace {

using Floats = nb::ndarray<nb::numpy, float>;

Floats dequantize_row(const std::string& format_name, nb::handle row, int64_t k,
                      const std::string& isa) {
  const WeightFormat format = weight_format(format_name);
  const auto bytes = view<const uint8_t, 1>(row, "row");
  if (bytes.shape[0] != row_bytes_ggml(format, k)) {
    throw std::invalid_argument("row: wrong number of bytes");
  }
  auto out = new_array<float>({static_cast<size_t>(k)});
  const FloatState state;
  choose_kernels(isa).linear->dequantize_row(format, bytes.data, k, out.data());
  return out;
}

nb::ndarray<nb::numpy, uint8_t> quantize(const std::string& format_name, nb::handle x,
                                         const std::string& isa) {
  const ActFormat format = act_format(format_name);
  const auto values = view<const float, 1>(x, "x");
  const int64_t bytes = act_layout(format, values.shape[0]).row_bytes;
  const Memory row(bytes);
  const FloatState state;
  choose_kernels(isa).linear->quantize(format, values.data, values.shape[0], row.data());
  auto out = new_array<uint8_t>({static_cast<size_t>(bytes)});
  std::memcpy(out.data(), row.data(), static_cast<size_t>(bytes));
  return out;
}

// x [rows, k] times the transpose of a GGML-layout weight [n, k]: quantise, pack, gemm.
Floats gemm(const std::string& format_name, nb::handle raw, nb::handle x, const std::string& isa) {
  const WeightFormat format = weight_format(format_name);
  const auto weight = view<const uint8_t, 2>(raw, "raw");
  const auto values = view<const float, 2>(x, "x");
  const int64_t rows = values.shape[0], k = values.shape[1], n = weight.shape[0];
  if (weight.shape[1] != row_bytes_ggml(format, k)) {
    throw std::invalid_argument("raw: its rows do not have as many columns as x");
  }
  const LinearKernels& linear = *choose_kernels(isa).linear;
  const int64_t panels = (n + kPanelColumns - 1) / kPanelColumns;
  const ActLayout layout = act_layout(act_format_of(format), k);
  const Memory packed(panels * panel_bytes(format, k)), act(rows * layout.row_bytes);
  const Memory result(rows * panels * kPanelColumns * 4);
  float* out = reinterpret_cast<float*>(result.data());
  const FloatState state;
  linear.pack(format, weight.data, n, k, 0, panels, packed.data());
  for (int64_t r = 0; r < rows; ++r) {
    linear.quantize(act_format_of(format), values.data + r * k, k,
                    act.data() + r * layout.row_bytes);
  }
  for (int64_t p = 0; p < panels; ++p) {
    linear.gemm(format, packed.data() + p * panel_bytes(format, k), k, act.data(), layout.row_bytes,
                static_cast<int>(rows), out + p * kPanelColumns, panels * kPanelColumns);
  }
  auto copy = new_array<float>({static_cast<size_t>(rows), static_cast<size_t>(n)});
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(out + r * panels * kPanelColumns, n, copy.data() + r * n);
  }
  return copy;
}

Floats rms_norm(nb::handle x, nb::handle weight, float eps, const std::string& isa) {
  const auto values = view<const float, 1>(x, "x");
  const auto scale = view<const float, 1>(weight, "weight");
  if (scale.shape != values.shape) throw std::invalid_argument("weight: not as long as x");
  auto out = new_array<float>({static_cast<size_t>(values.shape[0])});
  const FloatState state;
  choose_kernels(isa).rows->rms_norm(values.data, scale.data, eps, values.shape[0], out.data());
  return out;
}

Floats layer_norm(nb::handle x, nb::handle weight, nb::handle bias, float eps,
                  const std::string& isa) {
  const auto values = view<const float, 1>(x, "x");
  const auto scale = view<const float, 1>(weight, "weight"),
             shift = view<const float, 1>(bias, "bias");
  if (scale.shape != values.shape || shift.shape != values.shape) {
    throw std::invalid_argument("weight or bias: not as long as x");
  }
  auto out = new_array<float>({static_cast<size_t>(values.shape[0])});
  const FloatState state;
  choose_kernels(isa).rows->layer_norm(values.data, scale.data, shift.data, eps, values.shape[0],
                                       out.data());
  return out;
}

Floats gated(const std::string& activation, nb::handle gate, nb::handle up,
             const std::string& isa) {
  const auto a = view<const float, 1>(gate, "gate"), b = view<const float, 1>(up, "up");
  if (a.shape != b.shape) throw std::invalid_argument("up: not as long as gate");
  auto out = new_array<float>({static_cast<size_t>(a.shape[0])});
  const FloatState state;
  choose_kernels(isa).rows->gated(activation_function(activation), a.data, b.data, a.shape[0],
                                  out.data());
  return out;
}

// Rotates one head to a position.
Floats rope(nb::handle head, nb::handle inv_freq, int64_t position, double magnitude,
            const std::string& style, const std::string& isa) {
  const auto values = view<const float, 1>(head, "head");
  const auto frequencies = view<const double, 1>(inv_freq, "inv_freq");
  const int64_t pairs = frequencies.shape[0];
  if (2 * pairs > values.shape[0]) throw std::invalid_argument("inv_freq: longer than the head");
  const RowKernels& rows = *choose_kernels(isa).rows;
  std::vector<float> table(static_cast<size_t>(2 * pairs));
  auto out = new_array<float>({static_cast<size_t>(values.shape[0])});
  std::copy_n(values.data, values.shape[0], out.data());
  const FloatState state;
  rows.rope_table(position, frequencies.data, magnitude, pairs, table.data());
  rows.rope(rope_style(style), table.data(), pairs, values.shape[0], out.data());
  return out;
}

// q [tokens, heads, head_dim]; k, v [kv_len, kv_heads, head_dim]; the queries are the last tokens.
Floats attention(nb::handle q, nb::handle k, nb::handle v, int64_t window, float scale,
                 float soft_cap, const std::string& format, const std::string& isa) {
  const auto queries = view<const float, 3>(q, "q");
  const auto keys = view<const float, 3>(k, "k"), values = view<const float, 3>(v, "v");
  const int64_t tokens = queries.shape[0], heads = queries.shape[1], dim = queries.shape[2];
  const int64_t kv_len = keys.shape[0], kv_heads = keys.shape[1];
  if (keys.shape != values.shape || keys.shape[2] != dim || heads % kv_heads || tokens > kv_len ||
      dim % 16 || dim > 256) {
    throw std::invalid_argument("attention: shapes of q, k and v do not fit together");
  }
  const AttentionKernels& kernel = choose_kernels(isa).attention_over(kv_format(format));
  const int64_t head_bytes = kv_head_bytes(kv_format(format), dim);
  const int64_t pages = (kv_len + kPageTokens - 1) / kPageTokens;
  const int64_t page_bytes = kv_heads * head_bytes, group = heads / kv_heads;
  const Memory arena(pages * page_bytes);
  const Memory workspace(kernel.workspace_bytes(
      static_cast<int32_t>(tokens), static_cast<int32_t>(group), static_cast<int32_t>(dim)));
  std::memset(arena.data(), 0xFF, static_cast<size_t>(arena.bytes()));  // unwritten KV is NaN
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (int64_t p = 0; p < pages; ++p) table[p] = static_cast<int32_t>(pages - 1 - p);
  auto out = new_array<float>(
      {static_cast<size_t>(tokens), static_cast<size_t>(heads), static_cast<size_t>(dim)});
  const PageMap map{arena.data(), page_bytes, page_bytes, 1};
  const FloatState state;
  for (int64_t t = 0; t < kv_len; ++t) {
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t at = (t * kv_heads + h) * dim;
      kernel.store(keys.data + at, values.data + at, static_cast<int32_t>(dim), t % kPageTokens,
                   map.at(table[t / kPageTokens]) + h * head_bytes);
    }
  }
  for (int64_t h = 0; h < kv_heads; ++h) {
    AttentionItem item{};
    item.q = queries.data + h * group * dim;
    item.q_stride = item.out_stride = heads * dim;
    item.out = out.data() + h * group * dim;
    item.tokens = static_cast<int32_t>(tokens);
    item.group = static_cast<int32_t>(group);
    item.head_dim = static_cast<int32_t>(dim);
    item.first_position = kv_len - tokens;
    item.mask = {window, false};
    item.scale = scale;
    item.soft_cap = soft_cap;
    item.pages = map;
    item.block_table = table.data();
    item.offset_in_page = h * head_bytes;
    item.workspace = workspace.data();
    kernel.run(item);
  }
  return out;
}

}  // namespace

void bind_kernels(nb::module_& module) {
  nb::module_ kernels = module.def_submodule("kernels", "Single kernels, for tests.");
  kernels.def("dequantize_row", &dequantize_row, nb::arg("format"), nb::arg("row"), nb::arg("k"),
              nb::arg("isa") = "");
  kernels.def("quantize", &quantize, nb::arg("format"), nb::arg("x"), nb::arg("isa") = "");
  kernels.def("gemm", &gemm, nb::arg("format"), nb::arg("raw"), nb::arg("x"), nb::arg("isa") = "");
  kernels.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"),
              nb::arg("isa") = "");
  kernels.def("layer_norm", &layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
              nb::arg("eps"), nb::arg("isa") = "");
  kernels.def("gated", &gated, nb::arg("activation"), nb::arg("gate"), nb::arg("up"),
              nb::arg("isa") = "");
  kernels.def("rope", &rope, nb::arg("head"), nb::arg("inv_freq"), nb::arg("position"),
              nb::arg("magnitude") = 1.0, nb::arg("style") = "half", nb::arg("isa") = "");
  kernels.def("attention", &attention, nb::arg("q"), nb::arg("k"), nb::arg("v"),
              nb::arg("window") = 0, nb::arg("scale") = 1.0f, nb::arg("soft_cap") = 0.0f,
              nb::arg("kv_format") = "bf16", nb::arg("isa") = "");
}

}  // namespace invar::bindings
