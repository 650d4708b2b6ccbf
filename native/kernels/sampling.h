// The parts of sampling: weights, keys, selection, and the generator. The flow is sampling.cpp.
//
// Weight of a logit x: round_to_nearest_even(2^40 * e^((x - max) / temperature)), at most 2^40, so
// that sums over 2^23 ids fit 64 bits and are the same in any order.
#pragma once

#include "kernels/kernels.h"
#include "kernels/math.h"

namespace invar::INVAR_ISA {

constexpr int kWeightBits = 40;

// The vocabulary is read in stripes of 1,024 ids (4 KiB of floats, the size of every buffer on the
// stack); entry j of a stripe's 16 maxima covers its ids j, j + 16, j + 32, ... No lane is reduced,
// so the pass runs at the rate of loads, and 262,144 ids leave 4,096 maxima: the k-th largest of
// them bounds the k-th largest logit from below, tightly for k well under their number.
constexpr int kStripeIds = 1024;
constexpr int kStripeMaxima = 16;
INVAR_INLINE int64_t stripes_of(int64_t n) { return (n + kStripeIds - 1) / kStripeIds; }

// ---------------------------------------------------------------- keys

// Ascending keys = ascending floats, -0 as +0 (they compare equal, so only the id may rank them).
INVAR_INLINE uint32_t key_of(float x) {
  uint32_t bits;
  x += 0.0f;
  memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
INVAR_INLINE float from_key(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct Candidate {
  uint32_t key;
  int32_t id;
};

// A place in the ranking: (logit descending, id ascending); ids up to it are kept.
struct Boundary {
  float logit;
  int32_t id;
  bool keeps(float x, int32_t i) const { return x > logit || (x == logit && i <= id); }
};
constexpr int32_t kLastId = INT32_MAX;

// Sorts by key descending, equal keys in the order they came (by id). Radix 256; digits that all
// keys share are skipped. Returns the one of the two arrays that holds the result.
Candidate* sort_by_rank(Candidate* candidates, Candidate* spare, int64_t n);

// The k-th largest of n floats, 1 <= k <= n: its key bit by bit, one counting pass for each.
// `keys` is room for n.
float kth_largest(const float* x, int64_t n, int64_t k, int32_t* keys);

// ---------------------------------------------------------------- passes over logits

// The logits that one step of sampling looks at, raw or adjusted.
struct Logits {
  const float* x;
  int64_t n;
  const float* maxima;  // [stripes][kStripeMaxima], -infinity where there is no id
  float max;
};

struct Extent {
  float max;
  bool nan;
};
Extent find_maxima(const float* x, int64_t n, float* maxima);

// The ids that `boundary` keeps, ascending; returns how many.
int64_t collect(const Logits& logits, Boundary boundary, Candidate* out);

// The lowest id whose logit is the maximum.
int32_t first_maximum(const Logits& logits);

// 1 + ids that come before `id` in the ranking.
int32_t rank_of(const Logits& logits, int32_t id);

// (x - max) / temperature -> weight. An infinite maximum shares everything among its equals.
struct Scale {
  float max, temperature;
};
// e^scaled of n logits.
void exponentials(const float* x, int64_t n, Scale scale, float* out);
// Weights of n exponentials.
void weights_of(const float* exponentials, int64_t n, uint64_t* out);
// Sum of the weights of n exponentials that are at least `least`.
uint64_t sum_weights(const float* exponentials, int64_t n, uint64_t least);

// round_to_nearest_even(2^40 e) for 0 <= e <= 1: the product is exact in double, and adding 2^52
// leaves no bit below one.
INVAR_INLINE uint64_t weight_of(float e) {
  const double shifted = double(e) * 0x1p40 + 0x1p52;
  uint64_t bits;
  memcpy(&bits, &shifted, 8);
  return bits - 0x4330000000000000u;
}

// Bins of (max - x) / temperature for a truncation that keeps thousands of ids: all but the last
// cover the 29 units in which weights can be above zero (2^-41 = e^-28.4), so the bin in which the
// cut falls holds one id in a few hundred even of a flat distribution, and the totals fit L1.
constexpr int kBins = 1024;
constexpr float kBinsPerUnit = float(kBins - 1) / 29.0f;
// Bin of each of n logits, non-decreasing by rank.
void bin_logits(const float* x, int64_t n, Scale scale, int32_t* out);
// The ids in one bin, ascending; returns how many.
int64_t collect_bin(const Logits& logits, Scale scale, int32_t bin, Candidate* out);

// ---------------------------------------------------------------- workspace

// All zero between calls. `counts` comes first and cleans itself up id by id; the rest is cleared
// at the end as far as it was used.
struct SampleWork {
  int32_t* counts;         // [vocab] of the history
  float* raw_maxima;       // [stripes][kStripeMaxima]
  float* adjusted_maxima;  // the same
  int32_t* keys;           // the same, for kth_largest
  uint64_t* sums;          // [stripes] weight sums
  uint64_t* bins;          // [kBins], cleared by its user
  float* adjusted;         // [vocab]
  Candidate* candidates;   // [vocab]
  Candidate* spare;        // [vocab]
  int64_t bytes;
  int64_t stripes, vocab;
  const float* summed = nullptr;  // the logits of which `sums` holds all ids, if any,
  float summed_temperature = 0;   // at this temperature,
  uint64_t summed_total = 0;      // and their total
  bool used_adjusted = false;
  int64_t used_candidates = 0;

  void use(int64_t count) {
    if (count > used_candidates) used_candidates = count;
  }
  void clear() {
    memset(raw_maxima, 0, size_t(stripes) * kStripeMaxima * 4);
    memset(adjusted_maxima, 0, size_t(stripes) * kStripeMaxima * 4);
    memset(keys, 0, size_t(stripes) * kStripeMaxima * 4);
    memset(sums, 0, size_t(stripes) * 8);
    if (used_adjusted) memset(adjusted, 0, size_t(vocab) * 4);
    memset(candidates, 0, size_t(used_candidates) * sizeof(Candidate));
    memset(spare, 0, size_t(used_candidates) * sizeof(Candidate));
  }
};

// ---------------------------------------------------------------- weights of ids

// Ids with their weights, in stripes of kStripeIds: the whole vocabulary, or a list of candidates.
struct Pool {
  const Logits& logits;
  const Candidate* list;  // null: all ids
  int64_t n;
  Scale scale;
  uint64_t least = 0;               // weights below it count as nothing (min_p)
  const Boundary* limit = nullptr;  // of all ids, those beyond it count as nothing

  int64_t stripe(int64_t s, float* e) const;  // e^scaled of stripe s, [kStripeIds]; how many
  int32_t id(int64_t i) const { return list != nullptr ? list[i].id : int32_t(i); }
  uint64_t weight(float e) const {
    const uint64_t w = weight_of(e);
    return w >= least ? w : 0;
  }
};

// The total of a pool; its stripes' sums are in work.sums. All ids at one temperature are summed
// once: the report and the draw often want the same.
uint64_t sum_pool(const Pool& pool, SampleWork& work);

// Candidates by rank: at least the first k of those from `lowest` on, and all that equal the last
// of them.
struct Ranked {
  const Candidate* list;
  int64_t n;
};
Ranked rank_first(const Logits& logits, int64_t k, float lowest, SampleWork& work);

// ---------------------------------------------------------------- draw

// Philox4x32-10 (Salmon et al., SC11, "Parallel random numbers: as easy as 1, 2, 3"): a counter
// keyed by the seed. The first two words of the block are the draw.
INVAR_INLINE uint64_t philox(uint64_t seed, uint32_t position, uint32_t choice) {
  uint32_t c0 = position, c1 = choice, c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return uint64_t(c1) << 32 | c0;
}

INVAR_INLINE uint64_t below(uint64_t random, uint64_t total) {
  return uint64_t((unsigned __int128)random * total >> 64);
}

// A subnormal temperature is zero, since denormals are flushed.
INVAR_INLINE bool is_greedy(const SampleRow& row) { return row.temperature < 0x1p-126f; }

// The token of an adjusted row; its logits hold no NaN and not only -infinity.
int32_t draw(const Logits& logits, const SampleRow& row, SampleWork& work);

}  // namespace invar::INVAR_ISA
