// Which pages of the prefix cache go when somebody needs the memory.
#include <algorithm>
#include <stdexcept>

#include "runtime/radix.h"

namespace invar {
namespace {

constexpr int64_t kNoLimit = int64_t{1} << 30;

}  // namespace

bool RadixTree::make_room(std::span<const int64_t> wanted) {
  const auto missing = [&] {
    int64_t slabs = 0;
    for (size_t group = 0; group < pools_.size(); ++group) {
      slabs += pools_[group]->slabs_needed(wanted[group]);
    }
    return slabs - arbiter_.num_free();
  };
  int64_t short_of = missing();
  if (short_of <= 0) return true;
  int64_t at_best = 0;
  for (size_t group = 0; group < pools_.size(); ++group) {
    const PageCounts& pool = *pools_[group];
    at_best += pool.num_used_slabs() + pool.slabs_needed_at_best(wanted[group]);
  }
  if (at_best > arbiter_.total()) return false;
  for (; short_of > 0; short_of = missing()) {
    int64_t pages = 0;
    for (size_t group = 0; group < pools_.size(); ++group) {
      pages = std::max(pages, std::min(wanted[group], short_of * pools_[group]->pages_per_slab()));
    }
    if (!evict(pages)) throw std::logic_error("what requests leave is not all free");
  }
  return true;
}

bool RadixTree::evict(int64_t pages) {
  return evict_wide() || evict_leaf(pages) || evict_windows();
}

void RadixTree::clear() {
  while (evict(kNoLimit)) continue;
}

void RadixTree::reset() {
  clear();
  ++generation_;
}

bool RadixTree::evict_leaf(int64_t pages) {
  if (leaves_.empty()) return false;
  RadixNode& node = **leaves_.begin();
  const int64_t before = num_tokens_;
  trim(node, std::min(pages, node.num_pages()));
  num_evicted_tokens_ += before - num_tokens_;
  return true;
}

bool RadixTree::evict_wide() {
  bool freed = false;
  for (auto next = wide_.begin(); next != wide_.end() && !freed;) {
    RadixNode& node = *next->second;
    bool blocked = false;
    for (const auto& [group, window] : windows_) {
      const int64_t stop = behind_window(node.end_tokens(), window) - node.start;
      freed |= evict_front(node, group, stop);
      blocked |= node.first[group] < std::min(stop, node.num_pages());
    }
    next = blocked ? std::next(next) : wide_.erase(next);
  }
  return freed;
}

bool RadixTree::evict_windows() {
  bool freed = false;
  for (const auto& node : nodes()) {
    for (const auto& [group, window] : windows_) {
      freed |= evict_front(*node, group, node->num_pages());
    }
  }
  return freed;
}

// Frees pages before index `stop`, up to the first one in use.
bool RadixTree::evict_front(RadixNode& node, int64_t group, int64_t stop) {
  int64_t& first = node.first[group];
  const int64_t end = std::max(first, std::min(stop, node.num_pages()));
  Ids pages = Ids(node.pages[group]).subspan(first, end - first);
  pages = pages.first(pools_[group]->leading_unused(pages));
  first += std::ssize(pages);
  free(group, pages);
  return !pages.empty();
}

}  // namespace invar
