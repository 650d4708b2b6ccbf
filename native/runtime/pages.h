// Bookkeeping of a cache group's pages: which are free, and how many block tables name each one.
// `invar/engine/pages.py` says what the states of a page mean, and owns the slabs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace invar {

// The slabs of the process: each is free here, or held by one group's pages.
class SlabArbiter {
 public:
  explicit SlabArbiter(int64_t slabs);

  int64_t total() const { return total_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  const std::vector<int32_t>& free_slabs() const { return free_; }

  // Throws std::invalid_argument where none is left.
  int32_t take();
  void give_back(int32_t slab) { free_.push_back(slab); }

 private:
  int64_t total_;
  std::vector<int32_t> free_;  // the last one goes first
};

// Page p lies in slab p / pages_per_slab. A slab is held or not; only pages of held slabs are free
// or have users. Page ids in a call are distinct. Every call throws std::invalid_argument for a
// page that does not exist or whose state forbids the call.
class PageCounts {
 public:
  // The arbiter must outlive the pages.
  PageCounts(SlabArbiter& arbiter, int64_t pages_per_slab);

  int64_t pages_per_slab() const { return per_slab_; }
  // Slabs that `take` of so many pages would draw from the arbiter.
  int64_t slabs_needed(int64_t pages) const;
  // The same, were everything given back that has no users.
  int64_t slabs_needed_at_best(int64_t pages) const;

  // Writes the lowest free pages: each has one user. The arbiter must have the slabs needed.
  void take(std::span<int32_t> pages);
  // One more user.
  void use(std::span<const int32_t> pages);
  // One user less.
  void drop(std::span<const int32_t> pages);
  // Pages without users are free, and slabs that become whole are the arbiter's.
  void give_back(std::span<const int32_t> pages);

  // How many of the first pages have no users.
  int64_t leading_unused(std::span<const int32_t> pages) const;

  // Counts up whenever a page loses its last user.
  int64_t num_releases() const { return num_releases_; }
  int64_t num_named() const { return num_named_; }  // users of all pages together
  // Pages of held slabs that are not free.
  int64_t num_owned() const { return num_held_slabs_ * per_slab_ - num_free_; }
  int64_t num_used() const { return num_used_; }
  int64_t num_used_slabs() const { return num_used_slabs_; }
  int64_t num_free() const { return num_free_; }
  const std::vector<int32_t>& users() const { return users_; }
  std::vector<int32_t> free_pages() const;
  std::vector<int32_t> held_slabs() const;

 private:
  struct Slab {
    bool held = false;
    int32_t free = 0;  // pages
    int32_t used = 0;  // pages with users
  };

  int32_t checked(int32_t page) const;
  Slab& slab_of(int32_t page) { return slabs_[page / per_slab_]; }
  bool is_free(int32_t page) const { return free_[page / 64] >> (page % 64) & 1; }
  void open(int32_t slab);   // held from now on, all its pages free
  void close(int32_t slab);  // the arbiter's from now on
  void mark(int32_t page, bool free);
  void add_user(int32_t page);

  SlabArbiter& arbiter_;
  int32_t per_slab_;
  std::vector<Slab> slabs_;
  std::vector<int32_t> users_;  // per page
  std::vector<uint64_t> free_;  // a bit per page
  size_t first_free_word_ = 0;  // no page is free before it
  int64_t num_free_ = 0;
  int64_t num_releases_ = 0;
  int64_t num_held_slabs_ = 0;
  int64_t num_named_ = 0;
  int64_t num_used_ = 0;        // pages with users
  int64_t num_used_slabs_ = 0;  // slabs with such pages
};

}  // namespace invar
