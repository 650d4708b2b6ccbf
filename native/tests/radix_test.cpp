// The prefix cache's tree under random requests: what it finds is what stands in the pages, it
// finds all that there is, and no page is lost. The engine's tests drive it through `KVMemory`.
#include "runtime/radix.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_test.h"

namespace {

using namespace invar;
using kernel_test::check;

constexpr int64_t kSlabs = 40, kPerSlab = 3, kWindow = 70;

// A cache of two groups, the second with a window, and what stands in its pages.
struct Cache {
  SlabArbiter arbiter{kSlabs};
  std::vector<PageCounts> pools{{arbiter, kPerSlab}, {arbiter, kPerSlab}};
  using Pages = std::vector<std::vector<int32_t>>;  // the ids of each
  std::vector<Pages> written = std::vector<Pages>(2, Pages(kSlabs* kPerSlab));
  RadixTree tree{
      arbiter, {&pools[0], &pools[1]}, {std::nullopt, kWindow}, [this](int64_t group, Ids pages) {
        for (int32_t page : pages) written[group][page].clear();
      }};

  bool stands(int64_t group, int32_t page, Ids ids) const {
    const auto& there = written[group][page];
    return there.size() >= ids.size() && std::equal(ids.begin(), ids.end(), there.begin());
  }

  // Every page is free, or a node's that says what stands in it; nobody runs.
  bool sound() const {
    int64_t tokens = 0, count = 0;
    std::vector<int64_t> owned(2);
    for (const auto& node : tree.nodes()) {
      tokens += std::ssize(node->key);
      count += node->num_pages();
      for (int64_t group = 0; group < 2; ++group) {
        owned[group] += node->num_pages() - node->first[group];
        for (int64_t page = node->first[group]; page < node->num_pages(); ++page) {
          const int64_t begin = page * kPageTokens;
          const int64_t size = std::min<int64_t>(kPageTokens, std::ssize(node->key) - begin);
          if (!stands(group, node->pages[group][page], Ids(node->key).subspan(begin, size))) {
            return false;
          }
        }
      }
    }
    return tokens == tree.num_tokens() && count == tree.num_pages() &&
           owned[0] == pools[0].num_owned() && owned[1] == pools[1].num_owned() &&
           !pools[0].num_used() && !pools[1].num_used();
  }

  // Runs a request in two pieces, as `KVMemory` does. The tokens that were found; none where there
  // is no room.
  int64_t run(const RadixTree::Salt& salt, Ids ids, int64_t reusable, int64_t cut) {
    const RadixMatch match = tree.usable(tree.match(salt, ids.first(reusable)));
    auto node = tree.hold(match, salt);
    const int64_t total = (std::ssize(ids) + kPageTokens - 1) / kPageTokens;
    const int64_t whole = std::ssize(ids) / kPageTokens;
    std::vector<std::vector<int32_t>> tables(2, std::vector<int32_t>(total));
    const std::vector<int64_t> first = {0, behind_window(match.tokens(), kWindow)};
    for (int64_t group = 0; group < 2; ++group) {
      auto& table = tables[group];
      tree.pages_of(*node, group, table, first[group]);
      if (first[group] < match.pages) {
        pools[group].use(Ids(table).subspan(first[group], match.pages - first[group]));
      }
      for (int64_t page = first[group]; page < match.pages; ++page) {
        check(stands(group, table[page], ids.subspan(page * kPageTokens, kPageTokens)),
              "a page that is found holds the ids that were asked for");
      }
    }
    const int64_t begin = match.pages;
    const std::vector<int64_t> wanted(2, total - begin);
    const bool fits = tree.make_room(wanted);
    check(fits, "nobody else holds pages, so there is room");
    for (int64_t group = 0; group < 2; ++group) {
      pools[group].take(std::span(tables[group]).subspan(begin));
      for (int64_t page = begin; page < total; ++page) {
        const auto rest = ids.subspan(page * kPageTokens);
        const auto written_ids = rest.first(std::min<size_t>(rest.size(), kPageTokens));
        written[group][tables[group][page]].assign(written_ids.begin(), written_ids.end());
      }
    }
    cut = std::clamp(cut, begin, whole);
    for (auto [from, to] : {std::pair(begin, cut), std::pair(cut, whole)}) {
      std::vector<std::span<int32_t>> own;
      for (auto& table : tables) own.push_back(std::span(table).subspan(from, to - from));
      const auto part = ids.subspan(from * kPageTokens, (to - from) * kPageTokens);
      node = tree.insert(node, part, own, std::vector<int64_t>(2));
    }
    check(node->end() == whole, "an insertion ends with the node that is returned");
    int64_t shared = whole;
    if (whole < total) {
      const std::vector<int32_t> last = {tables[0][whole], tables[1][whole]};
      shared += tree.insert_tail(*node, ids.subspan(whole * kPageTokens), last);
    }
    for (int64_t group = 0; group < 2; ++group) {
      const Ids table(tables[group]);
      pools[group].drop(table.subspan(first[group]));
      tree.free(group, table.subspan(std::max(shared, first[group])));
    }
    tree.release(*node);
    return match.tokens();
  }
};

// Few ids and prompts that go on from others, so that runs part, meet and end anywhere.
void test_random_requests() {
  std::mt19937 dice(0);
  const auto roll = [&](int64_t below) { return static_cast<int64_t>(dice() % below); };
  Cache cache;
  std::vector<std::vector<int32_t>> said;
  int64_t found = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<int32_t> ids;
    if (!said.empty() && roll(4)) {
      const auto& before =
          said[std::ssize(said) - 1 - roll(std::min<int64_t>(6, std::ssize(said)))];
      ids.assign(before.begin(), before.begin() + roll(std::ssize(before) + 1));
    }
    const int64_t length = std::max<int64_t>(1, std::min<int64_t>(640, ids.size() + roll(200)));
    while (std::ssize(ids) < length) ids.push_back(static_cast<int32_t>(roll(2)));
    const RadixTree::Salt salt = roll(3) ? RadixTree::Salt() : "salt";
    found += cache.run(salt, ids, std::ssize(ids) - 1, roll(20));
    said.push_back(ids);
    const int64_t again = cache.tree.match(salt, ids).tokens();
    if (!check(again == std::ssize(ids), "what was just computed is found whole")) return;
    if (!roll(40)) cache.tree.evict(roll(5) + 1);
    if (!roll(60)) cache.tree.evict_wide();
    if (!roll(400)) cache.tree.reset();
    if (!check(cache.sound(), "pages are lost, doubled or not what the tree says")) return;
  }
  check(found > 50'000, "prompts find little of what was computed");
  check(cache.tree.num_evicted_tokens() > 10'000, "memory was never short");
  cache.tree.clear();
  check(cache.arbiter.num_free() == kSlabs && cache.tree.roots().empty(), "an empty tree has none");
}

void test_what_runs_is_not_evicted() {
  Cache cache;
  const std::vector<int32_t> ids(320, 7);
  cache.run(std::nullopt, ids, 0, 3);
  const RadixMatch match = cache.tree.match(std::nullopt, Ids(ids).first(200));
  check(match.pages == 6 && match.tail_tokens == 8, "whole pages, and part of one");
  auto node = cache.tree.hold(match, std::nullopt);
  check(cache.tree.tail_pages(match).has_value(), "the page to copy from is there");
  std::vector<int32_t> table(6);
  for (int64_t group = 0; group < 2; ++group) {
    cache.tree.pages_of(*node, group, table, 0);
    cache.pools[group].use(table);
  }
  cache.tree.clear();
  check(!cache.tree.tail_pages(match), "the page to copy from was evicted");
  check(cache.tree.num_tokens() == 6 * kPageTokens, "what is used stays");
  check(!cache.tree.make_room(std::vector<int64_t>{kSlabs * kPerSlab, 0}), "no room for so much");
  for (int64_t group = 0; group < 2; ++group) {
    cache.tree.pages_of(*node, group, table, 0);
    cache.pools[group].drop(table);
  }
  cache.tree.release(*node);
  cache.tree.forget(node);
  check(cache.tree.nodes().empty() && cache.arbiter.num_free() == kSlabs, "all of it is free");
}

void test_a_node_outlives_its_tree() {
  std::shared_ptr<RadixNode> node;
  {
    Cache cache;
    cache.run(std::nullopt, std::vector<int32_t>(100, 1), 0, 0);
    node = cache.tree.leaves().front();
  }
  check(!node->parent && node->end() == 4, "a node does not point into a tree that is gone");
}

}  // namespace

int main() {
  test_random_requests();
  test_what_runs_is_not_evicted();
  test_a_node_outlives_its_tree();
  return kernel_test::finish("radix_test");
}
