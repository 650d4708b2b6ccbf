#include "kernels/sampling.h"

namespace invar::INVAR_ISA {

// ---------------------------------------------------------------- selection

Candidate* sort_by_rank(Candidate* candidates, Candidate* spare, int64_t n) {
  for (int shift = 0; shift < 32; shift += 8) {
    int64_t starts[256] = {};
    // Digits descend, so the complement is counted.
    auto digit = [shift](const Candidate& c) { return (~c.key >> shift) & 255u; };
    for (int64_t i = 0; i < n; i++) starts[digit(candidates[i])]++;
    if (n == 0 || starts[digit(candidates[0])] == n) continue;
    int64_t sum = 0;
    for (int64_t& start : starts) {
      const int64_t count = start;
      start = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; i++) spare[starts[digit(candidates[i])]++] = candidates[i];
    Candidate* sorted = spare;
    spare = candidates;
    candidates = sorted;
  }
  return candidates;
}

static int64_t count_at_least(const int32_t* keys, int64_t n, int32_t bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; i++) count += keys[i] >= bound;
  return count;
}

float kth_largest(const float* x, int64_t n, int64_t k, int32_t* keys) {
  for (int64_t i = 0; i < n; i++) keys[i] = int32_t(key_of(x[i]) ^ 0x80000000u);
  uint32_t key = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t higher = key | 1u << bit;
    if (count_at_least(keys, n, int32_t(higher ^ 0x80000000u)) >= k) key = higher;
  }
  return from_key(key);
}

// ---------------------------------------------------------------- passes over logits

Extent find_maxima(const float* x, int64_t n, float* maxima) {
  Lanes16 overall = set1_16(-kInfinity);
  uint32_t ordered = ~0u;
  for (int64_t start = 0; start < n; start += kStripeIds, maxima += kStripeMaxima) {
    const int64_t end = start + kStripeIds < n ? start + kStripeIds : n;
    Lanes16 stripe = set1_16(-kInfinity);
    VM same = equal(zero(), zero());
    int64_t i = start;
    for (; i + 16 <= end; i += 16) {
      const Lanes16 v = load16(x + i);
      stripe = max(stripe, v);
      for (VF part : v.v) same = mask_and(same, equal(part, part));
    }
    if (i < end) {
      const Lanes16 v = load16_n(x + i, int(end - i), -kInfinity);
      stripe = max(stripe, v);
      for (VF part : v.v) same = mask_and(same, equal(part, part));
    }
    ordered &= mask_bits(same);
    store16(maxima, stripe);
    overall = max(overall, stripe);
  }
  return {max16(overall), ordered != (1u << W) - 1};
}

// Calls f(id) for the ids of a stripe whose logits pass `test`, ascending, until f returns false.
template <typename Test, typename F>
INVAR_INLINE bool each_in_stripe(const Logits& logits, int64_t start, Test test, F f) {
  const int64_t end = start + kStripeIds < logits.n ? start + kStripeIds : logits.n;
  for (int64_t i = start; i < end; i += W) {
    const int lanes = end - i < W ? int(end - i) : W;
    const VF v = lanes == W ? load(logits.x + i) : load_n(logits.x + i, lanes);
    uint32_t bits = mask_bits(mask_and(test(v), first_n(lanes)));
    for (; bits != 0; bits &= bits - 1)
      if (!f(int32_t(i + __builtin_ctz(bits)))) return false;
  }
  return true;
}

template <typename Test, typename F>
INVAR_INLINE void each_id(const Logits& logits, Test test, F f) {
  for (int64_t s = 0; s < stripes_of(logits.n); s++) {
    uint32_t any = 0;
    for (int i = 0; i < kStripeMaxima; i += W)
      any |= mask_bits(test(load(logits.maxima + s * kStripeMaxima + i)));
    if (any != 0 && !each_in_stripe(logits, s * kStripeIds, test, f)) return;
  }
}

int64_t collect(const Logits& logits, Boundary boundary, Candidate* out) {
  const VF bound = set1(boundary.logit);
  int64_t count = 0;
  each_id(
      logits, [=](VF v) { return less_equal(bound, v); },
      [&](int32_t id) {
        if (boundary.keeps(logits.x[id], id)) out[count++] = {key_of(logits.x[id]), id};
        return true;
      });
  return count;
}

int32_t first_maximum(const Logits& logits) {
  int32_t found = 0;
  const VF highest = set1(logits.max);
  each_id(
      logits, [=](VF v) { return equal(v, highest); },
      [&](int32_t id) {
        found = id;
        return false;
      });
  return found;
}

static int32_t count_above(const float* x, int64_t n, float bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; i++) count += x[i] > bound;
  return count;
}

static int32_t count_equal(const float* x, int64_t n, float bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; i++) count += x[i] == bound;
  return count;
}

int32_t rank_of(const Logits& logits, int32_t id) {
  const float bound = logits.x[id];
  int32_t rank = 1 + count_equal(logits.x, id, bound);
  for (int64_t s = 0; s < stripes_of(logits.n); s++) {
    if (count_above(logits.maxima + s * kStripeMaxima, kStripeMaxima, bound) == 0) continue;
    const int64_t start = s * kStripeIds;
    rank += count_above(logits.x + start,
                        logits.n - start < kStripeIds ? logits.n - start : kStripeIds, bound);
  }
  return rank;
}

// ---------------------------------------------------------------- weights

INVAR_INLINE VF scaled_exponential(VF x, VF max, VF temperature, bool divide) {
  VF scaled = x - max;
  if (divide) scaled = scaled / temperature;
  return exp_nonpositive(select(equal(x, max), zero(), scaled));
}

void exponentials(const float* x, int64_t n, Scale scale, float* out) {
  const VF max = set1(scale.max), temperature = set1(scale.temperature);
  const bool divide = scale.temperature != 1.0f;  // dividing by 1 changes nothing
  int64_t i = 0;
  for (; i + W <= n; i += W)
    store(out + i, scaled_exponential(load(x + i), max, temperature, divide));
  if (const int rest = int(n - i); rest > 0)
    store_n(out + i, rest, scaled_exponential(load_n(x + i, rest), max, temperature, divide));
}

void weights_of(const float* exponentials, int64_t n, uint64_t* out) {
  for (int64_t i = 0; i < n; i++) out[i] = weight_of(exponentials[i]);
}

uint64_t sum_weights(const float* exponentials, int64_t n, uint64_t least) {
  uint64_t sum = 0;
  if (least == 0) {
    for (int64_t i = 0; i < n; i++) sum += weight_of(exponentials[i]);
  } else {
    for (int64_t i = 0; i < n; i++) {
      const uint64_t w = weight_of(exponentials[i]);
      sum += int64_t(w) >= int64_t(least) ? w : 0;
    }
  }
  return sum;
}

// Zero for the exponentials of ids that the boundary does not keep.
static void drop_beyond(const Boundary& limit, const float* x, int64_t first_id, int64_t n,
                        float* e) {
  const VF logit = set1(limit.logit);
  const VI last = set1_i(limit.id);
  for (int64_t i = 0; i < n; i += W) {
    const int lanes = n - i < W ? int(n - i) : W;
    const VF v = load_n(x + i, lanes);
    const VI id = iota() + set1_i(int32_t(first_id + i));
    const VM up_to_last = mask_or(less(id, last), equal(id, last));
    const VM kept = mask_or(less(logit, v), mask_and(equal(logit, v), up_to_last));
    store(e + i, select(kept, load(e + i), zero()));  // e has room for whole stripes
  }
}

int64_t Pool::stripe(int64_t s, float* e) const {
  const int64_t start = s * kStripeIds;
  const int64_t count = n - start < kStripeIds ? n - start : kStripeIds;
  if (list == nullptr) {
    exponentials(logits.x + start, count, scale, e);
    if (limit != nullptr) drop_beyond(*limit, logits.x + start, start, count, e);
    return count;
  }
  for (int64_t i = 0; i < count; i++) e[i] = from_key(list[start + i].key);
  exponentials(e, count, scale, e);
  return count;
}

INVAR_INLINE VI bin_of(VF x, VF max, VF temperature, bool divide) {
  VF depth = max - x;
  if (divide) depth = depth / temperature;
  depth = select(equal(x, max), zero(), depth);
  return to_int(min(depth * set1(kBinsPerUnit), set1(float(kBins - 1))));
}

void bin_logits(const float* x, int64_t n, Scale scale, int32_t* out) {
  const VF max = set1(scale.max), temperature = set1(scale.temperature);
  const bool divide = scale.temperature != 1.0f;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_i(out + i, bin_of(load(x + i), max, temperature, divide));
  if (const int rest = int(n - i); rest > 0)
    store_i_n(out + i, rest, bin_of(load_n(x + i, rest), max, temperature, divide));
}

int64_t collect_bin(const Logits& logits, Scale scale, int32_t bin, Candidate* out) {
  const VF max = set1(scale.max), temperature = set1(scale.temperature);
  const bool divide = scale.temperature != 1.0f;
  const VI wanted = set1_i(bin);
  int64_t count = 0;
  for (int64_t s = 0; s < stripes_of(logits.n); s++)
    each_in_stripe(
        logits, s * kStripeIds,
        [=](VF v) { return equal(bin_of(v, max, temperature, divide), wanted); },
        [&](int32_t id) {
          out[count++] = {key_of(logits.x[id]), id};
          return true;
        });
  return count;
}

}  // namespace invar::INVAR_ISA
