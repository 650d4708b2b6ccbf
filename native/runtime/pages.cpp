#include "runtime/pages.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

namespace invar {
namespace {

[[noreturn]] void refuse(int64_t page, const char* why) {
  throw std::invalid_argument("page " + std::to_string(page) + ": " + why);
}

int64_t slabs_for(int64_t pages, int64_t per_slab) {
  return pages <= 0 ? 0 : (pages + per_slab - 1) / per_slab;
}

}  // namespace

SlabArbiter::SlabArbiter(int64_t slabs) : total_(slabs) {
  if (slabs < 0) throw std::invalid_argument("slabs: less than none");
  for (int64_t slab = slabs - 1; slab >= 0; --slab) free_.push_back(static_cast<int32_t>(slab));
}

int32_t SlabArbiter::take() {
  if (free_.empty()) throw std::invalid_argument("no slab is free");
  const int32_t slab = free_.back();
  free_.pop_back();
  return slab;
}

PageCounts::PageCounts(SlabArbiter& arbiter, int64_t pages_per_slab)
    : arbiter_(arbiter), per_slab_(static_cast<int32_t>(pages_per_slab)) {
  const int64_t most = std::numeric_limits<int32_t>::max() / std::max<int64_t>(1, arbiter.total());
  if (pages_per_slab < 1 || pages_per_slab > most) {
    throw std::invalid_argument("pages_per_slab: less than one, or more than int32 can number");
  }
  slabs_.resize(arbiter.total());
  users_.resize(arbiter.total() * per_slab_);
  free_.resize((users_.size() + 63) / 64);
}

int64_t PageCounts::slabs_needed(int64_t pages) const {
  return slabs_for(pages - num_free_, per_slab_);
}

int64_t PageCounts::slabs_needed_at_best(int64_t pages) const {
  return slabs_for(pages - (num_used_slabs_ * per_slab_ - num_used_), per_slab_);
}

void PageCounts::take(std::span<int32_t> pages) {
  const int64_t slabs = slabs_needed(static_cast<int64_t>(pages.size()));
  if (slabs > arbiter_.num_free()) {
    throw std::invalid_argument(std::to_string(pages.size()) + " pages need " +
                                std::to_string(slabs) + " slabs, " +
                                std::to_string(arbiter_.num_free()) + " are free");
  }
  for (int64_t i = 0; i < slabs; ++i) open(arbiter_.take());
  size_t word = first_free_word_;
  for (int32_t& page : pages) {
    while (!free_[word]) ++word;
    page = static_cast<int32_t>(word * 64 + std::countr_zero(free_[word]));
    mark(page, false);
    add_user(page);
  }
  first_free_word_ = word;
}

void PageCounts::use(std::span<const int32_t> pages) {
  for (int32_t page : pages) {
    if (!slab_of(checked(page)).held || is_free(page)) refuse(page, "used, but free");
    add_user(page);
  }
}

void PageCounts::drop(std::span<const int32_t> pages) {
  for (int32_t page : pages) {
    if (!users_[checked(page)]) refuse(page, "dropped, but has no user");
    --num_named_;
    if (--users_[page]) continue;
    --num_used_;
    ++num_releases_;
    if (!--slab_of(page).used) --num_used_slabs_;
  }
}

void PageCounts::give_back(std::span<const int32_t> pages) {
  for (int32_t page : pages) {
    Slab& slab = slab_of(checked(page));
    if (!slab.held || is_free(page)) refuse(page, "given back, but free");
    if (users_[page]) refuse(page, "given back, but in use");
    mark(page, true);
    if (slab.free == per_slab_) close(static_cast<int32_t>(page / per_slab_));
  }
}

int64_t PageCounts::leading_unused(std::span<const int32_t> pages) const {
  const auto used = [&](int32_t page) { return users_[checked(page)] != 0; };
  return std::find_if(pages.begin(), pages.end(), used) - pages.begin();
}

std::vector<int32_t> PageCounts::free_pages() const {
  std::vector<int32_t> pages;
  for (int32_t page = 0; page < static_cast<int32_t>(users_.size()); ++page) {
    if (is_free(page)) pages.push_back(page);
  }
  return pages;
}

std::vector<int32_t> PageCounts::held_slabs() const {
  std::vector<int32_t> held;
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    if (slabs_[slab].held) held.push_back(static_cast<int32_t>(slab));
  }
  return held;
}

int32_t PageCounts::checked(int32_t page) const {
  if (page < 0 || page >= static_cast<int32_t>(users_.size())) refuse(page, "does not exist");
  return page;
}

void PageCounts::open(int32_t slab) {
  slabs_[slab].held = true;
  ++num_held_slabs_;
  for (int64_t i = 0; i < per_slab_; ++i) mark(static_cast<int32_t>(slab * per_slab_ + i), true);
}

void PageCounts::close(int32_t slab) {
  slabs_[slab].held = false;
  --num_held_slabs_;
  for (int64_t i = 0; i < per_slab_; ++i) mark(static_cast<int32_t>(slab * per_slab_ + i), false);
  arbiter_.give_back(slab);
}

void PageCounts::mark(int32_t page, bool free) {
  const size_t word = page / 64;
  const uint64_t bit = uint64_t{1} << (page % 64);
  free_[word] = free ? free_[word] | bit : free_[word] & ~bit;
  if (free) first_free_word_ = std::min(first_free_word_, word);
  const int change = free ? 1 : -1;
  num_free_ += change;
  slab_of(page).free += change;
}

void PageCounts::add_user(int32_t page) {
  ++num_named_;
  if (users_[page]++) return;
  ++num_used_;
  if (!slab_of(page).used++) ++num_used_slabs_;
}

}  // namespace invar
