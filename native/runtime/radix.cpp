#include "runtime/radix.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/kernels.h"

namespace invar {
namespace {

bool less(Ids left, Ids right) {
  return std::lexicographical_compare(left.begin(), left.end(), right.begin(), right.end());
}

bool begins_with(Ids ids, Ids start) {
  return common_ids(ids, start) == static_cast<int64_t>(start.size());
}

Ids page_of(Ids ids) { return ids.first(std::min<size_t>(ids.size(), kPageTokens)); }

// Where a page stands, or would, among a node's children.
auto place_of(auto& children, Ids page) {
  const auto before = [](const std::shared_ptr<RadixNode>& child, Ids ids) {
    return less(child->first_page(), ids);
  };
  return std::lower_bound(children.begin(), children.end(), page, before);
}

}  // namespace

int64_t common_ids(Ids left, Ids right) {
  const size_t count = std::min(left.size(), right.size());
  const auto equal = [&](size_t id, size_t ids) {
    return std::memcmp(&left[id], &right[id], ids * sizeof(int32_t)) == 0;
  };
  constexpr size_t kStride = 64;
  size_t common = 0;
  while (count - common >= kStride && equal(common, kStride)) common += kStride;
  while (common < count && left[common] == right[common]) ++common;
  return static_cast<int64_t>(common);
}

int64_t behind_window(int64_t tokens, int64_t window) {
  return std::max<int64_t>(0, tokens - window + 1) / kPageTokens;
}

int64_t RadixNode::num_pages() const {
  return (static_cast<int64_t>(key.size()) + kPageTokens - 1) / kPageTokens;
}

int64_t RadixNode::end_tokens() const {
  return start * kPageTokens + static_cast<int64_t>(key.size());
}

Ids RadixNode::first_page() const { return page_of(key); }

int64_t RadixMatch::tokens() const { return pages * kPageTokens + tail_tokens; }

bool RadixTree::UsedBefore::operator()(const RadixNode* left, const RadixNode* right) const {
  return std::pair(left->used_at, left->serial) < std::pair(right->used_at, right->serial);
}

RadixTree::RadixTree(SlabArbiter& arbiter, std::vector<PageCounts*> pools,
                     std::vector<std::optional<int64_t>> windows, OnFree on_free)
    : arbiter_(arbiter), pools_(std::move(pools)), on_free_(std::move(on_free)) {
  if (windows.size() != pools_.size())
    throw std::invalid_argument("windows: not one for each pool");
  for (size_t group = 0; group < windows.size(); ++group) {
    if (windows[group]) windows_.emplace_back(group, *windows[group]);
  }
}

RadixTree::~RadixTree() {
  for (const auto& node : nodes()) node->parent = nullptr;  // some may be held elsewhere
}

// ------------------------------------------------------------------------------------ matching

RadixTree::Found RadixTree::nearest(const RadixNode& node, Ids ids) {
  const Ids page = page_of(ids);
  const auto& children = node.children;
  const auto place = place_of(children, page);
  Found best;
  if (place != children.end() && std::ranges::equal((*place)->first_page(), page)) {
    return {*place, common_ids((*place)->key, ids)};
  }
  const auto consider = [&](const std::shared_ptr<RadixNode>& child) {
    const int64_t common = common_ids(child->first_page(), page);
    if (common > best.common) best = {child, common};
  };
  if (place != children.begin()) consider(place[-1]);
  if (place != children.end()) consider(*place);
  return best;
}

RadixMatch RadixTree::match(const Salt& salt, Ids ids) const {
  const auto root = roots_.find({generation_, salt});
  if (root == roots_.end()) return {};
  std::shared_ptr<RadixNode> node = root->second;
  while (true) {
    const auto [child, common] = nearest(*node, ids);
    if (!child) return {node, node->end(), nullptr, {}, 0};
    const int64_t whole = common / kPageTokens, tail = common % kPageTokens;
    if (tail || whole < child->num_pages()) {
      return {whole ? child : node, node->end() + whole, tail ? child : nullptr, {}, tail};
    }
    node = child;
    ids = ids.subspan(common);
  }
}

RadixMatch RadixTree::usable(const RadixMatch& match) const {
  if (!match.node || windows_.empty()) return match;
  std::shared_ptr<RadixNode> node = match.node;
  int64_t pages = match.pages;
  if (match.tail_tokens && has_windows(*node, pages, match.tokens())) {
    const RadixNode* source = match.source.get();
    const int64_t page = source == node.get() ? pages - node->start : 0;
    const auto there = [page](int64_t first) { return first <= page; };
    if (!source || std::ranges::all_of(source->first, there)) return match;
  }
  for (; node->parent; pages = node->start, node = node->parent->shared_from_this()) {
    if (has_windows(*node, pages, pages * kPageTokens)) return {node, pages, nullptr, {}, 0};
  }
  return {node, 0, nullptr, {}, 0};
}

// Whether every group's last window before `tokens` is there; `last` has page `end - 1`.
bool RadixTree::has_windows(const RadixNode& last, int64_t end, int64_t tokens) const {
  for (const auto& [group, window] : windows_) {
    const int64_t needed = behind_window(tokens, window);
    int64_t stop = end;
    for (const RadixNode* node = &last; needed < stop && node->parent; node = node->parent) {
      if (std::max(needed, node->start) < node->start + node->first[group]) return false;
      stop = node->start;
    }
  }
  return true;
}

// ------------------------------------------------------------------------------------- holding

std::shared_ptr<RadixNode> RadixTree::hold(const RadixMatch& match, const Salt& salt) {
  std::shared_ptr<RadixNode> node = match.node;
  if (!node) {
    const auto [place, added] = roots_.try_emplace(RootName{generation_, salt});
    if (added) place->second = new_node(nullptr, 0);
    node = place->second;
  } else if (match.pages < node->end()) {
    node = split(*node, match.pages - node->start);
  }
  leaves_.erase(node.get());
  ++node->holders;
  touch(match.source ? *match.source : *node);
  return node;
}

void RadixTree::release(RadixNode& node) {
  --node.holders;
  settle(node);
}

void RadixTree::forget(std::shared_ptr<RadixNode> node) {
  while (node->is_leaf()) {
    const auto parent = node->parent->shared_from_this();
    trim(*node, node->num_pages());
    node = parent;
  }
}

void RadixTree::pages_of(const RadixNode& last, int64_t group, std::span<int32_t> table,
                         int64_t first) const {
  int64_t end = last.end();
  if (static_cast<int64_t>(table.size()) < end || first < 0) {
    throw std::invalid_argument("table: has " + std::to_string(table.size()) + " pages of " +
                                std::to_string(end));
  }
  for (const RadixNode* node = &last; first < end && node->parent; node = node->parent) {
    const int64_t begin = std::max(first, node->start);
    const auto& pages = node->pages[group];
    std::copy(pages.begin() + (begin - node->start), pages.begin() + (end - node->start),
              table.begin() + begin);
    end = node->start;
  }
}

std::optional<std::vector<int32_t>> RadixTree::tail_pages(const RadixMatch& match) const {
  if (!match.source) return match.lent;
  const RadixNode& source = *match.source;
  const auto gone = [](int64_t first) { return first != 0; };
  if (source.key.empty() || std::ranges::any_of(source.first, gone)) return std::nullopt;
  std::vector<int32_t> found;
  for (const auto& pages : source.pages) found.push_back(pages[0]);
  return found;
}

// ----------------------------------------------------------------------------------- inserting

std::shared_ptr<RadixNode> RadixTree::insert(std::shared_ptr<RadixNode> node, Ids ids,
                                             std::span<const std::span<int32_t>> own,
                                             std::span<const int64_t> missing) {
  const int64_t total = static_cast<int64_t>(ids.size()) / kPageTokens;
  for (int64_t position = 0; position < total;) {
    const Ids rest = ids.subspan(position * kPageTokens);
    auto [child, common] = nearest(*node, rest);
    std::vector<int64_t> lacking(missing.begin(), missing.end());
    for (int64_t& pages : lacking) pages = std::max<int64_t>(0, pages - position);
    if (common < kPageTokens) {
      std::vector<Ids> pages;
      for (const auto& run : own) pages.push_back(run.subspan(position));
      child = append(*node, rest, pages, lacking);
      position = total;
    } else {
      const int64_t whole = common / kPageTokens;
      if (whole < child->num_pages()) child = split(*child, whole);
      exchange(*child, own, position, lacking);
      position += child->num_pages();
    }
    leaves_.erase(child.get());
    --node->holders;
    ++child->holders;
    node = child;
  }
  touch(*node);
  return node;
}

// Of pages that are there twice the tree's stay; those that it lacks, it takes.
void RadixTree::exchange(RadixNode& node, std::span<const std::span<int32_t>> own, int64_t position,
                         std::span<const int64_t> missing) {
  std::vector<int32_t> before, after;
  for (size_t group = 0; group < own.size(); ++group) {
    std::vector<int32_t>& pages = node.pages[group];
    int64_t& gone = node.first[group];
    const std::span<int32_t> run = own[group].subspan(position, pages.size());
    for (int64_t page = missing[group]; page < gone; ++page) pages[page] = run[page];
    before.clear();
    after.clear();
    for (int64_t page = std::max(missing[group], gone); page < std::ssize(pages); ++page) {
      if (run[page] == pages[page]) continue;
      before.push_back(run[page]);
      after.push_back(run[page] = pages[page]);
    }
    gone = std::min(gone, missing[group]);
    pools_[group]->use(after);
    pools_[group]->drop(before);
    free(group, before);
  }
  widen(node);
}

bool RadixTree::insert_tail(RadixNode& node, Ids ids, std::span<const int32_t> pages) {
  const auto [child, common] = nearest(node, ids);
  if (child && common == std::ssize(ids)) {
    touch(*child);
    return false;
  }
  std::vector<Ids> own;
  for (const int32_t& page : pages) own.emplace_back(&page, 1);
  const std::vector<int64_t> missing(own.size());
  touch(*append(node, ids, own, missing));
  return true;
}

// A leaf that only the caller holds grows, unless pages are missing behind it; any other node gets
// a child. Either is returned.
std::shared_ptr<RadixNode> RadixTree::append(RadixNode& node, Ids ids, std::span<const Ids> pages,
                                             std::span<const int64_t> missing) {
  num_tokens_ += std::ssize(ids);
  num_pages_ += (std::ssize(ids) + kPageTokens - 1) / kPageTokens;
  const auto before = place_of(node.children, page_of(ids));
  if (before != node.children.begin() && begins_with(ids, before[-1]->first_page())) {
    trim(*before[-1], 1);  // a partly filled page that a fuller one begins with is of no more use
  }
  std::shared_ptr<RadixNode> grown = node.shared_from_this();
  const auto lacks = [](int64_t count) { return count > 0; };
  if (!node.children.empty() || node.holders > 1 || !node.parent ||
      std::ranges::any_of(missing, lacks)) {
    grown = new_node(&node, node.end());
    grown->pages.resize(pages.size());
    grown->first.assign(missing.begin(), missing.end());
  }
  for (size_t group = 0; group < pages.size(); ++group) {
    auto& run = grown->pages[group];
    run.insert(run.end(), pages[group].begin(), pages[group].end());
  }
  grown->key.insert(grown->key.end(), ids.begin(), ids.end());
  if (grown.get() != &node) {
    node.children.insert(place_of(node.children, grown->first_page()), grown);
    settle(*grown);
  }
  widen(*grown);
  return grown;
}

std::shared_ptr<RadixNode> RadixTree::new_node(RadixNode* parent, int64_t start) {
  auto node = std::make_shared<RadixNode>();
  node->parent = parent;
  node->start = start;
  node->serial = serial_++;
  return node;
}

// Cuts a node's first `pages` pages off as its new parent, which is returned.
std::shared_ptr<RadixNode> RadixTree::split(RadixNode& node, int64_t pages) {
  const auto place = place_of(node.parent->children, node.first_page());
  const auto lower = *place, upper = new_node(node.parent, node.start);
  *place = upper;
  upper->used_at = node.used_at;
  const auto cut = [](auto& from, int64_t count, auto& to) {
    to.assign(from.begin(), from.begin() + count);
    from.erase(from.begin(), from.begin() + count);
  };
  cut(node.key, pages * kPageTokens, upper->key);
  upper->pages.resize(node.pages.size());
  for (size_t group = 0; group < node.pages.size(); ++group) {
    cut(node.pages[group], pages, upper->pages[group]);
    upper->first.push_back(std::min(node.first[group], pages));
    node.first[group] = std::max<int64_t>(0, node.first[group] - pages);
  }
  node.parent = upper.get();
  node.start += pages;
  upper->children.push_back(lower);
  widen(*upper);
  return upper;
}

void RadixTree::touch(RadixNode& node) {
  const bool leaf = leaves_.erase(&node);  // what stands before it on the path is none
  ++clock_;
  for (RadixNode* up = &node; up; up = up->parent) up->used_at = clock_;
  if (leaf) leaves_.insert(&node);
}

void RadixTree::settle(RadixNode& node) {
  if (node.is_leaf()) {
    leaves_.insert(&node);
  } else if (node.key.empty() && node.children.empty() && !node.holders) {
    std::erase_if(roots_, [&](const auto& root) { return root.second.get() == &node; });
  }
}

// ------------------------------------------------------------------------------------- freeing

void RadixTree::free(int64_t group, Ids pages) {
  if (pages.empty()) return;
  if (on_free_) on_free_(group, pages);
  pools_[group]->give_back(pages);
}

// Gives a leaf's last `count` pages back; one without pages leaves the tree.
void RadixTree::trim(RadixNode& leaf, int64_t count) {
  const int64_t left = leaf.num_pages() - count;
  for (size_t group = 0; group < leaf.pages.size(); ++group) {
    free(group, Ids(leaf.pages[group]).subspan(std::max(left, leaf.first[group])));
  }
  const int64_t kept = std::min(left * kPageTokens, std::ssize(leaf.key));
  num_tokens_ -= std::ssize(leaf.key) - kept;
  num_pages_ -= count;
  if (left) {
    leaf.key.resize(kept);
    for (auto& pages : leaf.pages) pages.resize(left);
    for (int64_t& first : leaf.first) first = std::min(first, left);
    return;
  }
  RadixNode& parent = *leaf.parent;
  const auto place = place_of(parent.children, leaf.first_page());
  const std::shared_ptr<RadixNode> gone = std::move(*place);
  parent.children.erase(place);
  leaves_.erase(&leaf);
  wide_.erase(leaf.serial);
  leaf.parent = nullptr;
  leaf.key.clear();
  settle(parent);
}

void RadixTree::widen(RadixNode& node) {
  if (!windows_.empty()) wide_[node.serial] = &node;
}

// ------------------------------------------------------------------------------------- looking

std::vector<std::shared_ptr<RadixNode>> RadixTree::roots() const {
  std::vector<std::shared_ptr<RadixNode>> found;
  for (const auto& [name, root] : roots_) found.push_back(root);
  return found;
}

std::vector<std::shared_ptr<RadixNode>> RadixTree::nodes() const {
  std::vector<std::shared_ptr<RadixNode>> found;
  for (const auto& root : roots()) {
    found.insert(found.end(), root->children.begin(), root->children.end());
  }
  for (size_t next = 0; next < found.size(); ++next) {
    const auto children = found[next]->children;
    found.insert(found.end(), children.begin(), children.end());
  }
  return found;
}

std::vector<std::shared_ptr<RadixNode>> RadixTree::leaves() const {
  std::vector<std::shared_ptr<RadixNode>> found;
  for (RadixNode* leaf : leaves_) found.push_back(leaf->shared_from_this());
  return found;
}

}  // namespace invar
