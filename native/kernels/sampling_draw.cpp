#include "kernels/sampling.h"

namespace invar::INVAR_ISA {

// ---------------------------------------------------------------- weights of ids

uint64_t sum_pool(const Pool& pool, SampleWork& work) {
  const bool whole = pool.list == nullptr && pool.least == 0 && pool.limit == nullptr;
  if (whole && work.summed == pool.logits.x && work.summed_temperature == pool.scale.temperature)
    return work.summed_total;
  alignas(64) float e[kStripeIds];
  uint64_t total = 0;
  for (int64_t s = 0; s < stripes_of(pool.n); s++) {
    const int64_t count = pool.stripe(s, e);
    work.sums[s] = sum_weights(e, count, pool.least);
    total += work.sums[s];
  }
  work.summed = whole ? pool.logits.x : nullptr;
  work.summed_temperature = pool.scale.temperature;
  work.summed_total = total;
  return total;
}

// The id, in the pool's order, whose cumulative weight passes r; sums are those of the pool.
static int32_t pick(const Pool& pool, const uint64_t* sums, uint64_t r) {
  int64_t s = 0;
  for (; r >= sums[s]; s++) r -= sums[s];
  alignas(64) float e[kStripeIds];
  const int64_t count = pool.stripe(s, e);
  int64_t i = 0;
  for (; i + 1 < count; i++) {
    const uint64_t w = pool.weight(e[i]);
    if (r < w) break;
    r -= w;
  }
  return pool.id(s * kStripeIds + i);
}

// How many of the pool, in its order, until their weights reach `threshold`; n + 1 if they do not.
static int64_t prefix_reaching(const Pool& pool, uint64_t threshold) {
  alignas(64) float e[kStripeIds];
  uint64_t sum = 0;
  for (int64_t s = 0; s < stripes_of(pool.n); s++) {
    const int64_t count = pool.stripe(s, e);
    for (int64_t i = 0; i < count; i++) {
      sum += weight_of(e[i]);
      if (sum >= threshold) return s * kStripeIds + i + 1;
    }
  }
  return pool.n + 1;
}

// ceil(top_p * total) with top_p as an integer over 2^32, rounded up (exact from 2^-8 on); at
// least 1, so that one token is always kept.
static uint64_t top_p_threshold(float top_p, uint64_t total) {
  const double shifted = double(top_p) * 0x1p32;
  uint64_t p = shifted > 0 ? uint64_t(shifted) : 0;
  if (double(p) < shifted) p++;
  const unsigned __int128 product = (unsigned __int128)p * total;
  const uint64_t threshold = uint64_t((product + 0xffffffffu) >> 32);
  return threshold > 0 ? threshold : 1;
}

// ceil(min_p * 2^40): the highest weight is 2^40, whatever the logits.
static uint64_t min_p_threshold(float min_p) {
  if (!(min_p > 0)) return 0;
  const double shifted = double(min_p < 1 ? min_p : 1.0f) * 0x1p40;
  const uint64_t p = uint64_t(shifted);
  return double(p) < shifted ? p + 1 : p;
}

// ---------------------------------------------------------------- truncation

INVAR_INLINE int64_t maxima_of(const Logits& logits) {
  return stripes_of(logits.n) * kStripeMaxima;
}

Ranked rank_first(const Logits& logits, int64_t k, float lowest, SampleWork& work) {
  const int64_t maxima = maxima_of(logits);
  const float bound = k <= maxima ? kth_largest(logits.maxima, maxima, k, work.keys) : lowest;
  const int64_t n = collect(logits, {bound > lowest ? bound : lowest, kLastId}, work.candidates);
  work.use(n);
  return {sort_by_rank(work.candidates, work.spare, n), n};
}

// Forbidden ids need no rank in a draw; under a tight mask they are nearly all.
constexpr float kLowestFinite = -0x1.fffffep127f;

static Boundary boundary_at(const Candidate& candidate) {
  return {from_key(candidate.key), candidate.id};
}

enum class Measure { ids, weights };

template <Measure measure>
static void fill_bins(const Logits& logits, Scale scale, uint64_t* totals) {
  alignas(64) float e[kStripeIds];
  alignas(64) uint64_t weights[kStripeIds];
  alignas(64) int32_t bins[kStripeIds];
  const Pool all{logits, nullptr, logits.n, scale};
  for (int64_t s = 0; s < stripes_of(logits.n); s++) {
    const int64_t start = s * kStripeIds;
    const int64_t count = logits.n - start < kStripeIds ? logits.n - start : kStripeIds;
    bin_logits(logits.x + start, count, scale, bins);
    if constexpr (measure == Measure::weights) {
      all.stripe(s, e);
      weights_of(e, count, weights);
    }
    for (int64_t i = 0; i < count; i++)
      totals[bins[i]] += measure == Measure::weights ? weights[i] : 1;
  }
}

// The id, by rank, with which the measure reaches `threshold`: a histogram finds the bin, and only
// that bin is ranked. In the last bin nothing has weight, so there the cut makes no difference.
template <Measure measure>
static Boundary find_crossing(const Logits& logits, Scale scale, uint64_t threshold,
                              SampleWork& work) {
  fill_bins<measure>(logits, scale, work.bins);
  int bin = 0;
  for (; bin < kBins - 1 && work.bins[bin] < threshold; bin++) threshold -= work.bins[bin];
  memset(work.bins, 0, kBins * sizeof(uint64_t));
  if (bin == kBins - 1) return {-kInfinity, kLastId};

  const int64_t n = collect_bin(logits, scale, bin, work.candidates);
  work.use(n);
  const Candidate* ranked = sort_by_rank(work.candidates, work.spare, n);
  if (measure == Measure::ids) return boundary_at(ranked[threshold - 1]);
  return boundary_at(ranked[prefix_reaching({logits, ranked, n, scale}, threshold) - 1]);
}

// How many candidates to rank before a top_p without top_k is settled. A peaked distribution, the
// common case, is covered by far fewer; ranking 256 costs less than one pass over the logits.
constexpr int64_t kFirstRanked = 256;

// The last id, by rank, that is kept, and whether so few are that they are better listed than
// found again among all.
struct Cut {
  Boundary last;
  bool few;
};

// The cut of top_p where `kept` has passed top_k: its total sets the threshold.
static Cut cut_by_p(const Pool& kept, float top_p, SampleWork& work) {
  const Logits& logits = kept.logits;
  const uint64_t threshold = top_p_threshold(top_p, sum_pool(kept, work));
  const int64_t maxima = maxima_of(logits);
  const Ranked ranked =
      rank_first(logits, kFirstRanked < maxima ? kFirstRanked : maxima, kLowestFinite, work);
  const int64_t n = prefix_reaching({logits, ranked.list, ranked.n, kept.scale}, threshold);
  if (n <= ranked.n) return {boundary_at(ranked.list[n - 1]), true};
  return {find_crossing<Measure::weights>(logits, kept.scale, threshold, work), false};
}

static bool cuts_by_k(const SampleRow& row, int64_t vocab) {
  return row.top_k > 0 && row.top_k < vocab;
}

// top_k, and after it top_p.
static Cut truncate(const Logits& logits, const SampleRow& row, Scale scale, SampleWork& work) {
  const bool by_p = row.top_p < 1.0f;
  Pool kept{logits, nullptr, logits.n, scale};
  if (!cuts_by_k(row, logits.n)) return cut_by_p(kept, row.top_p, work);
  if (row.top_k > maxima_of(logits)) {
    const Boundary last = find_crossing<Measure::ids>(logits, scale, row.top_k, work);
    if (!by_p) return {last, false};
    kept.limit = &last;
    return cut_by_p(kept, row.top_p, work);
  }
  const Ranked ranked = rank_first(logits, row.top_k, kLowestFinite, work);
  kept.list = ranked.list;
  kept.n = row.top_k < ranked.n ? row.top_k : ranked.n;
  if (by_p) kept.n = prefix_reaching(kept, top_p_threshold(row.top_p, sum_pool(kept, work)));
  return {boundary_at(kept.list[kept.n - 1]), true};
}

// ---------------------------------------------------------------- draw

int32_t draw(const Logits& logits, const SampleRow& row, SampleWork& work) {
  if (is_greedy(row)) return first_maximum(logits);
  const Scale scale{logits.max, row.temperature};
  Pool pool{logits, nullptr, logits.n, scale, min_p_threshold(row.min_p)};
  Cut cut;
  if (cuts_by_k(row, logits.n) || row.top_p < 1.0f) {
    cut = truncate(logits, row, scale, work);
    if (cut.few) {
      pool.n = collect(logits, cut.last, work.candidates);
      pool.list = work.candidates;
      work.use(pool.n);
    } else {
      pool.limit = &cut.last;
    }
  }
  const uint64_t total = sum_pool(pool, work);
  return pick(pool, work.sums, below(philox(row.seed, row.position, row.choice), total));
}

}  // namespace invar::INVAR_ISA
