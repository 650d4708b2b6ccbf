#include "kernels/sampling.h"

namespace invar::INVAR_ISA {

// ---------------------------------------------------------------- workspace

static SampleWork plan_work(uint8_t* base, int64_t vocab) {
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    uint8_t* p = base + used;
    used += (bytes + 63) / 64 * 64;
    return p;
  };
  SampleWork w;
  w.vocab = vocab;
  w.stripes = stripes_of(vocab);
  w.counts = reinterpret_cast<int32_t*>(take(vocab * 4));
  w.raw_maxima = reinterpret_cast<float*>(take(w.stripes * kStripeMaxima * 4));
  w.adjusted_maxima = reinterpret_cast<float*>(take(w.stripes * kStripeMaxima * 4));
  w.keys = reinterpret_cast<int32_t*>(take(w.stripes * kStripeMaxima * 4));
  w.sums = reinterpret_cast<uint64_t*>(take(w.stripes * 8));
  w.bins = reinterpret_cast<uint64_t*>(take(kBins * 8));
  w.adjusted = reinterpret_cast<float*>(take(vocab * 4));
  w.candidates = reinterpret_cast<Candidate*>(take(vocab * int64_t(sizeof(Candidate))));
  w.spare = reinterpret_cast<Candidate*>(take(vocab * int64_t(sizeof(Candidate))));
  w.bytes = used;
  return w;
}

static int64_t workspace_bytes(int64_t vocab) {
  alignas(64) uint8_t base[1];
  return plan_work(base, vocab).bytes;
}

// ---------------------------------------------------------------- adjustments

static bool penalised(const SampleRow& row) {
  return row.history_len > 0 && (row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f ||
                                 row.presence_penalty != 0.0f);
}

// Every distinct id of the history once: its count among the output ids sits in the low bits, the
// flag says that it occurs at all. The second walk applies and clears.
static void apply_penalties(const SampleRow& row, int64_t vocab, int32_t* counts, float* x) {
  constexpr int32_t kSeen = 1 << 30;
  for (int64_t i = 0; i < row.history_len; i++) {
    const int32_t id = row.history[i];
    if (id < 0 || id >= vocab) continue;  // placeholders of media are no tokens
    counts[id] = (counts[id] | kSeen) + (i >= row.prompt_len);
  }
  for (int64_t i = 0; i < row.history_len; i++) {
    const int32_t id = row.history[i];
    if (id < 0 || id >= vocab || counts[id] == 0) continue;
    const int32_t count = counts[id] & ~kSeen;
    counts[id] = 0;
    float logit = x[id];
    if (row.repetition_penalty != 1.0f)
      logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    if (count > 0) {
      logit = logit - row.frequency_penalty * float(count);
      logit = logit - row.presence_penalty;
    }
    x[id] = logit;
  }
}

static void apply_bias(const SampleRow& row, int64_t vocab, float* x) {
  for (int64_t i = 0; i < row.bias_len; i++) {
    const int32_t id = row.bias_ids[i];
    if (id < 0 || id >= vocab) continue;
    const float bias = row.bias_values[i];
    x[id] = bias == -kInfinity ? bias : x[id] + bias;
  }
}

// ---------------------------------------------------------------- masks

// The ids [start, start + 32) of a vocabulary that a mask allows, as bits.
INVAR_INLINE uint32_t allowed_of(const uint32_t* mask, int64_t start, int64_t vocab) {
  const uint32_t word = mask[start / 32];
  return start + 32 <= vocab ? word : word & ((1u << (vocab - start)) - 1);
}

// Up to W at a time of the ids [start, start + 32): use(id, how many, logits), -infinity where they
// are not allowed.
template <class Use>
INVAR_INLINE void each_allowed(const float* x, int64_t vocab, int64_t start, uint32_t allowed,
                               const Use& use) {
  alignas(64) static constexpr uint32_t kBits[16] = {
      1u,      1u << 1, 1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
      1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15};
  const VI bits = load_i(kBits);
  for (int64_t id = start; id < start + 32 && id < vocab; id += W) {
    const VM is_allowed = equal(bit_and(set1_i(int32_t(allowed >> (id - start))), bits), bits);
    const int lanes = vocab - id < W ? int(vocab - id) : W;
    const VF logits = lanes == W ? load(x + id) : load_n(x + id, lanes);
    use(id, lanes, select(is_allowed, logits, set1(-kInfinity)));
  }
}

static void apply_mask(const uint32_t* mask, int64_t vocab, float* x) {
  for (int64_t start = 0; start < vocab; start += 32) {
    const uint32_t allowed = allowed_of(mask, start, vocab);
    if (allowed == ~0u) continue;
    each_allowed(x, vocab, start, allowed, [&](int64_t id, int lanes, VF logits) {
      if (lanes == W)
        store(x + id, logits);
      else
        store_n(x + id, lanes, logits);
    });
  }
}

// For a greedy row that nothing but a mask changes: the first of the allowed ids with the greatest
// logit; -1 where all are -infinity. Nothing is copied, and words of a mask that allow nothing are
// not looked at: most, under a tight one.
static int32_t first_allowed_maximum(const Logits& raw, const uint32_t* mask) {
  VF best = set1(-kInfinity);
  for (int64_t start = 0; start < raw.n; start += 32) {
    if (const uint32_t allowed = allowed_of(mask, start, raw.n))
      each_allowed(raw.x, raw.n, start, allowed, [&](int64_t, int, VF x) { best = max(best, x); });
  }
  alignas(64) float lanes[W];
  store(lanes, best);
  float highest = lanes[0];
  for (float lane : lanes) highest = lane > highest ? lane : highest;
  if (highest == -kInfinity) return -1;
  int64_t found = -1;
  for (int64_t start = 0; found < 0; start += 32) {
    if (const uint32_t allowed = allowed_of(mask, start, raw.n)) {
      each_allowed(raw.x, raw.n, start, allowed, [&](int64_t id, int, VF x) {
        const uint32_t bits = mask_bits(equal(x, set1(highest)));
        if (found < 0 && bits != 0) found = id + __builtin_ctz(bits);
      });
    }
  }
  return int32_t(found);
}

// ---------------------------------------------------------------- report

// log of the sum of e^(x - max), from integer weights at temperature 1. The one call of libm.
static double log_sum(const Logits& logits, SampleWork& work) {
  const Pool all{logits, nullptr, logits.n, {logits.max, 1.0f}};
  return __builtin_log(double(sum_pool(all, work)) * 0x1p-40);
}

static float log_probability(float logit, float max, double log_sum) {
  const double difference = logit == max ? 0.0 : double(logit) - double(max);
  return float(difference - log_sum);
}

static void report_top(const Logits& logits, int32_t count, double log_sum, SampleWork& work,
                       SampleResult& result) {
  const Ranked ranked = rank_first(logits, count < logits.n ? count : logits.n, -kInfinity, work);
  for (int32_t i = 0; i < count; i++) {
    const bool exists = i < ranked.n;  // a vocabulary may be shorter than the report
    result.top_ids[i] = exists ? ranked.list[i].id : 0;
    result.top_logprobs[i] =
        exists ? log_probability(from_key(ranked.list[i].key), logits.max, log_sum) : -kInfinity;
  }
}

// ---------------------------------------------------------------- one row

// Whether anything but a mask changes the logits.
static bool is_adjusted(const SampleRow& row) { return penalised(row) || row.bias_len > 0; }

static Logits adjust(const Logits& raw, const SampleRow& row, SampleWork& work, bool& finite) {
  if (!is_adjusted(row) && row.mask == nullptr) return raw;
  work.used_adjusted = true;
  memcpy(work.adjusted, raw.x, size_t(raw.n) * 4);
  if (penalised(row)) apply_penalties(row, raw.n, work.counts, work.adjusted);
  apply_bias(row, raw.n, work.adjusted);
  if (row.mask != nullptr) apply_mask(row.mask, raw.n, work.adjusted);
  const Extent extent = find_maxima(work.adjusted, raw.n, work.adjusted_maxima);
  finite = !extent.nan && extent.max != -kInfinity;
  return {work.adjusted, raw.n, work.adjusted_maxima, extent.max};
}

static void sample_row(const float* x, int64_t vocab, const SampleRow& row, SampleResult& result,
                       SampleWork& work) {
  const Extent extent = find_maxima(x, vocab, work.raw_maxima);
  result.finite = !extent.nan && extent.max != -kInfinity;
  result.token = 0;
  result.rank = 0;
  result.logprob = -kInfinity;
  if (!result.finite) return;
  const Logits raw{x, vocab, work.raw_maxima, extent.max};
  const double sum = log_sum(raw, work);
  if (row.score) {
    result.token = row.score_token;
  } else if (is_greedy(row) && row.mask != nullptr && !is_adjusted(row)) {
    const int32_t token = first_allowed_maximum(raw, row.mask);
    result.finite = token >= 0;
    if (!result.finite) return;
    result.token = token;
  } else {
    const Logits adjusted = adjust(raw, row, work, result.finite);
    if (!result.finite) return;
    result.token = draw(adjusted, row, work);
  }
  result.logprob = log_probability(x[result.token], extent.max, sum);
  result.rank = rank_of(raw, result.token);
  if (row.top_logprobs > 0) report_top(raw, row.top_logprobs, sum, work, result);
}

static void sample(const float* logits, int64_t vocab, const SampleRow& row, SampleResult& result,
                   void* workspace) {
  SampleWork work = plan_work(static_cast<uint8_t*>(workspace), vocab);
  sample_row(logits, vocab, row, result, work);
  work.clear();
}

extern const SamplingKernels sampling_kernels = {sample, workspace_bytes};

}  // namespace invar::INVAR_ISA
