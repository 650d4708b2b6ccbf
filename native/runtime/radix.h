// The prefix cache: a radix tree over token ids whose nodes own pages. `invar/engine/radix.py` says
// which pages are the tree's and when they go.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/pages.h"

namespace invar {

using Ids = std::span<const int32_t>;

// How many ids two sequences begin with alike.
int64_t common_ids(Ids left, Ids right);

// The first page that a row at position `tokens` sees.
int64_t behind_window(int64_t tokens, int64_t window);

// A run of pages that follows its parent's. Only a leaf may end within a page. Children are in the
// order of the ids of their first pages, and no two begin with the same page: what has most ids in
// common with a page is then next to where the page would stand.
struct RadixNode : std::enable_shared_from_this<RadixNode> {
  RadixNode* parent = nullptr;              // none: a root, or a node that has left its tree
  int64_t start = 0;                        // pages before it
  std::vector<int32_t> key;                 // the ids of the run; a root has none
  std::vector<std::vector<int32_t>> pages;  // per group, one for each page of the key
  std::vector<int64_t> first;               // per group: pages before that are gone
  std::vector<std::shared_ptr<RadixNode>> children;
  int64_t holders = 0;  // running requests whose shared pages end with this node
  int64_t used_at = 0;
  int64_t serial = 0;

  int64_t num_pages() const;
  int64_t end() const { return start + num_pages(); }  // in pages from the root on
  int64_t end_tokens() const;
  Ids first_page() const;
  // Whether it can be evicted.
  bool is_leaf() const { return parent && children.empty() && !holders; }
};

// What is there of a prompt. Stays true until the tree is changed.
struct RadixMatch {
  std::shared_ptr<RadixNode> node;  // the deepest one of which whole pages match; none: the root
  int64_t pages = 0;                // that match whole, from the root on; the node may have more
  std::shared_ptr<RadixNode>
      source;                 // begins, once `node` is split, with a page that matches partly
  std::vector<int32_t> lent;  // in its place, per group: the page of a running request
  int64_t tail_tokens = 0;    // that match in it

  int64_t tokens() const;
};

// Owner of the pages of finished prefixes.
class RadixTree {
 public:
  using Salt = std::optional<std::string>;
  using OnFree = std::function<void(int64_t group, Ids pages)>;

  // windows: per group, in tokens. on_free: told of pages that are about to be free; may be empty.
  // The arbiter and the pools must outlive the tree.
  RadixTree(SlabArbiter& arbiter, std::vector<PageCounts*> pools,
            std::vector<std::optional<int64_t>> windows, OnFree on_free);
  ~RadixTree();

  // Changes nothing. What is there of ids that may be reused.
  RadixMatch match(const Salt& salt, Ids ids) const;
  // Changes nothing. The longest part of a match whose last window is there in every group: all of
  // it, its whole pages, or those up to the end of an earlier node.
  RadixMatch usable(const RadixMatch& match) const;

  // The node whose end is that of the match's whole pages, held. To be released.
  std::shared_ptr<RadixNode> hold(const RadixMatch& match, const Salt& salt);
  // A node that was held or got as the end of an insertion may be evicted.
  void release(RadixNode& node);
  // Evicts what nobody else uses of the path to a node, which was released.
  void forget(std::shared_ptr<RadixNode> node);
  // Writes the group's pages [first, end of node) into a block table. Throws std::invalid_argument
  // where it is too short.
  void pages_of(const RadixNode& node, int64_t group, std::span<int32_t> table,
                int64_t first) const;
  // Per group the page to copy from, once the match is held. None: it has been evicted.
  std::optional<std::vector<int32_t>> tail_pages(const RadixMatch& match) const;

  // Whole pages of ids that follow `node`, which the caller holds; the hold moves to the node that
  // is returned. own: per group the caller's page for each, with it as a user. The tree's pages
  // take their place where it has these ids; then the caller's own are free. missing: per group,
  // how many of the first pages the caller does not have.
  std::shared_ptr<RadixNode> insert(std::shared_ptr<RadixNode> node, Ids ids,
                                    std::span<const std::span<int32_t>> own,
                                    std::span<const int64_t> missing);
  // A page that is not full, of a request that holds `node` and ends; one for each group. False
  // where the tree has these ids already: then it does not take them.
  bool insert_tail(RadixNode& node, Ids ids, std::span<const int32_t> pages);

  // Pages without users that are not the tree's are free.
  void free(int64_t group, Ids pages);
  // Evicts until so many pages of each group can be taken. False, and nothing is evicted, where
  // what requests use leaves no room for them.
  bool make_room(std::span<const int64_t> wanted);
  // Frees something that no request uses, `pages` pages of a group if there are so many in one
  // place. False when there is nothing left to evict. In this order: pages before the last window
  // of a node's end (they serve only prompts that part from the node's run in its middle); from the
  // least recently used leaf the last pages; at last windows that end in the middle of running
  // requests.
  bool evict(int64_t pages);
  bool evict_wide();
  // Evicts all that no running request uses.
  void clear();
  // Nothing computed so far is found any more. What running requests use goes with them.
  void reset();

  size_t num_groups() const { return pools_.size(); }
  int64_t generation() const { return generation_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_pages() const { return num_pages_; }  // of them, whether or not windows have them
  int64_t num_evicted_tokens() const { return num_evicted_tokens_; }
  std::vector<std::shared_ptr<RadixNode>> roots() const;
  // All but the roots, parents first.
  std::vector<std::shared_ptr<RadixNode>> nodes() const;
  std::vector<std::shared_ptr<RadixNode>> leaves() const;  // in the order of their eviction

 private:
  using RootName = std::pair<int64_t, Salt>;  // generation
  struct Found {
    std::shared_ptr<RadixNode> child;  // none: no child has an id in common
    int64_t common = 0;
  };
  struct UsedBefore {
    bool operator()(const RadixNode* left, const RadixNode* right) const;
  };

  static Found nearest(const RadixNode& node, Ids ids);
  bool has_windows(const RadixNode& node, int64_t end, int64_t tokens) const;
  std::shared_ptr<RadixNode> new_node(RadixNode* parent, int64_t start);
  std::shared_ptr<RadixNode> split(RadixNode& node, int64_t pages);
  std::shared_ptr<RadixNode> append(RadixNode& node, Ids ids, std::span<const Ids> pages,
                                    std::span<const int64_t> missing);
  void exchange(RadixNode& node, std::span<const std::span<int32_t>> own, int64_t position,
                std::span<const int64_t> missing);
  void trim(RadixNode& leaf, int64_t count);
  void touch(RadixNode& node);
  // To be called where a node may have become a leaf: it can be evicted, or is an empty root.
  void settle(RadixNode& node);
  void widen(RadixNode& node);
  bool evict_leaf(int64_t pages);
  bool evict_windows();
  bool evict_front(RadixNode& node, int64_t group, int64_t stop);

  SlabArbiter& arbiter_;
  std::vector<PageCounts*> pools_;
  std::vector<std::pair<int64_t, int64_t>> windows_;  // (group, tokens)
  OnFree on_free_;
  std::map<RootName, std::shared_ptr<RadixNode>> roots_;
  std::set<RadixNode*, UsedBefore> leaves_;
  std::map<int64_t, RadixNode*> wide_;  // by serial: may have pages before their last window
  int64_t generation_ = 0;
  int64_t clock_ = 0;
  int64_t serial_ = 0;
  int64_t num_tokens_ = 0;
  int64_t num_pages_ = 0;
  int64_t num_evicted_tokens_ = 0;
};

}  // namespace invar
