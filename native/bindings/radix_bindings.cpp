// The prefix cache's tree for `invar/engine/radix.py`.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/bytes.h"
#include "kernels/kernels.h"
#include "runtime/radix.h"

namespace invar::bindings {
namespace {

using NodePtr = std::shared_ptr<RadixNode>;

// The int32 ids of a buffer: of an array, or of bytes that are copied from one.
Ids ids_of(const Bytes& bytes) {
  const char* data = bytes.at(0);
  if (bytes.size() % sizeof(int32_t) || reinterpret_cast<uintptr_t>(data) % alignof(int32_t)) {
    throw std::invalid_argument("ids: not whole int32 at an address for them");
  }
  return {reinterpret_cast<const int32_t*>(data), bytes.size() / sizeof(int32_t)};
}

nb::bytes bytes_of(Ids ids) { return nb::bytes(ids.data(), ids.size_bytes()); }

std::span<int32_t> page_ids(nb::handle pages, const char* name) {
  const auto ids = view<int32_t, 1>(pages, name);
  return {ids.data, static_cast<size_t>(ids.shape[0])};
}

// A cache_salt as UTF-8; text from JSON may have half a surrogate pair.
RadixTree::Salt salt_of(std::optional<nb::str> salt) {
  if (!salt) return std::nullopt;
  const nb::object bytes =
      nb::steal(PyUnicode_AsEncodedString(salt->ptr(), "utf-8", "surrogatepass"));
  if (!bytes.is_valid()) throw nb::python_error();
  return std::string(PyBytes_AS_STRING(bytes.ptr()), PyBytes_GET_SIZE(bytes.ptr()));
}

int64_t common_ids_from(nb::handle left, nb::handle right, int64_t start) {
  const Bytes ours(left), theirs(right);
  const Ids ids = ids_of(theirs);
  if (start < 0 || start > std::ssize(ids)) throw std::invalid_argument("start: past the ids");
  return common_ids(ids_of(ours), ids.subspan(start));
}

RadixTree::OnFree on_free(nb::object callable) {
  if (callable.is_none()) return {};
  return [callable](int64_t group, Ids pages) {
    const auto copy = new_array<int32_t>({pages.size()});
    std::ranges::copy(pages, copy.data());
    callable(group, copy);
  };
}

NodePtr insert(RadixTree& tree, NodePtr node, nb::handle data, const nb::list& rows,
               const std::vector<int64_t>& missing) {
  const Bytes bytes(data);
  const Ids ids = ids_of(bytes);
  std::vector<std::span<int32_t>> own;
  for (nb::handle row : rows) own.push_back(page_ids(row, "own"));
  const auto whole = [&](const auto& row) {
    return std::ssize(row) * kPageTokens == std::ssize(ids);
  };
  if (own.size() != tree.num_groups() || missing.size() != own.size() ||
      !std::ranges::all_of(own, whole)) {
    throw std::invalid_argument("own: not a page of each group for each page of ids");
  }
  return tree.insert(std::move(node), ids, own, missing);
}

bool insert_tail(RadixTree& tree, RadixNode& node, nb::handle data,
                 const std::vector<int32_t>& pages) {
  const Bytes bytes(data);
  const Ids ids = ids_of(bytes);
  if (pages.size() != tree.num_groups() || ids.empty() || ids.size() > kPageTokens) {
    throw std::invalid_argument("pages: not one of each group, with ids for one page");
  }
  return tree.insert_tail(node, ids, pages);
}

}  // namespace

void bind_radix(nb::module_& module) {
  nb::class_<RadixNode>(module, "RadixNode")
      .def_prop_ro("parent",
                   [](const RadixNode& node) {
                     return node.parent ? node.parent->shared_from_this() : nullptr;
                   })
      .def_prop_ro("key", [](const RadixNode& node) { return bytes_of(node.key); })
      .def_ro("start", &RadixNode::start)
      .def_prop_ro("num_pages", &RadixNode::num_pages)
      .def_prop_ro("end", &RadixNode::end)
      .def_ro("pages", &RadixNode::pages)
      .def_ro("first", &RadixNode::first)
      .def_ro("children", &RadixNode::children)
      .def_ro("holders", &RadixNode::holders)
      .def_prop_ro("is_leaf", &RadixNode::is_leaf);
  nb::class_<RadixMatch>(module, "RadixMatch")
      .def(
          "__init__",
          [](RadixMatch* match, NodePtr node, int64_t pages, std::vector<int32_t> lent,
             int64_t tail_tokens) {
            new (match) RadixMatch{std::move(node), pages, nullptr, std::move(lent), tail_tokens};
          },
          nb::arg("node").none() = nb::none(), nb::arg("pages") = 0,
          nb::arg("lent") = std::vector<int32_t>(), nb::arg("tail_tokens") = 0)
      .def_ro("node", &RadixMatch::node)
      .def_ro("pages", &RadixMatch::pages)
      .def_ro("tail_tokens", &RadixMatch::tail_tokens)
      .def_prop_ro("tokens", &RadixMatch::tokens);
  nb::class_<RadixTree>(module, "RadixTree")
      .def(
          "__init__",
          [](RadixTree* tree, SlabArbiter& arbiter, std::vector<PageCounts*> pools,
             std::vector<std::optional<int64_t>> windows, nb::object told) {
            new (tree)
                RadixTree(arbiter, std::move(pools), std::move(windows), on_free(std::move(told)));
          },
          nb::arg("arbiter"), nb::arg("pools"), nb::arg("windows"), nb::arg("on_free").none(),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "match",
          [](const RadixTree& tree, std::optional<nb::str> salt, nb::handle data) {
            const Bytes bytes(data);
            return tree.match(salt_of(salt), ids_of(bytes));
          },
          nb::arg("salt").none(), nb::arg("ids"))
      .def("usable", &RadixTree::usable, nb::arg("match"))
      .def(
          "hold",
          [](RadixTree& tree, const RadixMatch& match, std::optional<nb::str> salt) {
            return tree.hold(match, salt_of(salt));
          },
          nb::arg("match"), nb::arg("salt").none())
      .def("release", &RadixTree::release, nb::arg("node"))
      .def("forget", &RadixTree::forget, nb::arg("node"))
      .def(
          "pages_of",
          [](const RadixTree& tree, const RadixNode& node, int64_t group, nb::handle table,
             int64_t first) { tree.pages_of(node, group, page_ids(table, "table"), first); },
          nb::arg("node"), nb::arg("group"), nb::arg("table"), nb::arg("first"))
      .def("tail_pages", &RadixTree::tail_pages, nb::arg("match"))
      .def("insert", &insert, nb::arg("node"), nb::arg("ids"), nb::arg("own"), nb::arg("missing"))
      .def("insert_tail", &insert_tail, nb::arg("node"), nb::arg("ids"), nb::arg("pages"))
      .def(
          "free",
          [](RadixTree& tree, int64_t group, nb::handle pages) {
            tree.free(group, page_ids(pages, "pages"));
          },
          nb::arg("group"), nb::arg("pages"))
      .def(
          "make_room",
          [](RadixTree& tree, const std::vector<int64_t>& wanted) {
            if (wanted.size() != tree.num_groups()) {
              throw std::invalid_argument("wanted: not one for each pool");
            }
            return tree.make_room(wanted);
          },
          nb::arg("wanted"))
      .def("evict", &RadixTree::evict, nb::arg("pages"))
      .def("_evict_wide", &RadixTree::evict_wide)
      .def("clear", &RadixTree::clear)
      .def("reset", &RadixTree::reset)
      .def_prop_ro("generation", &RadixTree::generation)
      .def_prop_ro("num_tokens", &RadixTree::num_tokens)
      .def_prop_ro("num_pages", &RadixTree::num_pages)
      .def_prop_ro("num_evicted_tokens", &RadixTree::num_evicted_tokens)
      .def_prop_ro("roots", &RadixTree::roots)
      .def("nodes", &RadixTree::nodes)
      .def("leaves", &RadixTree::leaves);
  module.def("common_ids", &common_ids_from, nb::arg("left"), nb::arg("right"),
             nb::arg("start") = 0);
  module.def("behind_window", &behind_window, nb::arg("tokens"), nb::arg("window"));
}

}  // namespace invar::bindings
