// Sampling against a straightforward reference: the same integer weights, full sorts, no shortcuts.
#include <algorithm>
#include <functional>
#include <numeric>

#include "tests/kernel_test.h"

using namespace invar;
using namespace kernel_test;

namespace {

SampleRow plain_row() {
  SampleRow row{};
  row.temperature = 1;
  row.top_p = 1;
  row.repetition_penalty = 1;
  return row;
}

struct Outcome {
  SampleResult result{};
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  bool operator==(const Outcome& o) const {
    return result.token == o.result.token && result.rank == o.result.rank &&
           same_bits(&result.logprob, &o.result.logprob, 1) && result.finite == o.result.finite &&
           ids == o.ids && same_bits(logprobs.data(), o.logprobs.data(), logprobs.size());
  }
};

// One workspace for the whole test, checked to be zero after every call.
class Sampler {
 public:
  explicit Sampler(const Isa& isa) : isa_(isa) {}
  Outcome operator()(const std::vector<float>& logits, const SampleRow& row) {
    const int64_t vocab = int64_t(logits.size());
    const size_t bytes = size_t(isa_.sampling->workspace_bytes(vocab));
    if (workspace_.size() < bytes / 8 + 24) workspace_.resize(bytes / 8 + 24);
    uint8_t* base =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(workspace_.data()) + 63) / 64 * 64);
    Outcome o;
    o.ids.assign(row.top_logprobs, -7);
    o.logprobs.assign(row.top_logprobs, kNaN);
    o.result.top_ids = o.ids.data();
    o.result.top_logprobs = o.logprobs.data();
    const std::vector<float> before = logits;
    isa_.sampling->sample(logits.data(), vocab, row, o.result, base);
    check(same_bits(before.data(), logits.data(), logits.size()), "logits were changed");
    for (size_t i = 0; i < bytes + 64; i++)  // and 64 bytes past its end
      if (base[i] != 0) {
        check(false, std::string(isa_.name) + ": the workspace is not left zero");
        std::fill(workspace_.begin(), workspace_.end(), 0);
        break;
      }
    return o;
  }
  const char* name() const { return isa_.name; }

 private:
  const Isa& isa_;
  std::vector<uint64_t> workspace_;
};

// ---------------------------------------------------------------- reference

std::vector<float> adjusted(std::vector<float> x, const SampleRow& row) {
  const int64_t vocab = int64_t(x.size());
  std::vector<int> seen(vocab), output(vocab);
  for (int64_t i = 0; i < row.history_len; i++) {
    if (row.history[i] < 0 || row.history[i] >= vocab) continue;
    seen[row.history[i]] = 1;
    output[row.history[i]] += i >= row.prompt_len;
  }
  for (int64_t id = 0; id < vocab; id++) {
    if (seen[id] && row.repetition_penalty != 1)
      x[id] = x[id] > 0 ? x[id] / row.repetition_penalty : x[id] * row.repetition_penalty;
    if (output[id]) {
      x[id] = x[id] - row.frequency_penalty * float(output[id]);
      x[id] = x[id] - row.presence_penalty;
    }
  }
  for (int64_t i = 0; i < row.bias_len; i++) x[row.bias_ids[i]] += row.bias_values[i];
  for (int64_t id = 0; id < vocab && row.mask; id++)
    if (!(row.mask[id / 32] >> (id % 32) & 1)) x[id] = -kInf;
  return x;
}

std::vector<int32_t> ranking(const std::vector<float>& x) {
  std::vector<int32_t> ids(x.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  return ids;
}

uint64_t reference_philox(uint64_t seed, uint32_t position, uint32_t choice) {
  uint32_t c[4] = {position, choice, 0, 0}, k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int i = 0; i < 10; i++) {
    const uint64_t a = uint64_t(c[0]) * 0xD2511F53, b = uint64_t(c[2]) * 0xCD9E8D57;
    const uint32_t n[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b),
                           uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    memcpy(c, n, 16);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return uint64_t(c[1]) << 32 | c[0];
}

// Weights come from libm here; the kernel's exp is within 2^-23, so a draw may only differ where r
// lies that near to a border, as a part of the total.
constexpr double kSlack = 2.5e-7;
struct Draw {
  int32_t token;
  bool certain;
};
Draw reference_draw(const std::vector<float>& x, const SampleRow& row) {
  const std::vector<int32_t> ids = ranking(x);
  if (row.temperature == 0) return {ids[0], true};
  const double top = x[ids[0]];
  auto weight = [&](int32_t id) {
    const double d = x[id] == top ? 0.0 : (double(x[id]) - top) / row.temperature;
    return std::nearbyint(std::exp(d) * 0x1p40);
  };
  size_t kept = ids.size();
  if (row.top_k > 0) kept = std::min<size_t>(kept, row.top_k);
  bool certain = true;
  if (row.top_p < 1) {
    double total = 0, sum = 0;
    for (size_t i = 0; i < kept; i++) total += weight(ids[i]);
    const double threshold = std::max(1.0, std::ceil(double(row.top_p) * total));
    size_t n = 0;
    while (n < kept && sum < threshold) {
      sum += weight(ids[n++]);
      certain &= std::fabs(sum - threshold) > total * kSlack;
    }
    kept = n;
  }
  std::vector<int32_t> order(ids.begin(), ids.begin() + kept);
  const double least = row.min_p > 0 ? std::ceil(double(row.min_p) * 0x1p40) : 0;
  for (int32_t id : order) certain &= std::fabs(weight(id) - least) > least * kSlack || least == 0;
  order.erase(
      std::remove_if(order.begin(), order.end(), [&](int32_t id) { return weight(id) < least; }),
      order.end());
  std::sort(order.begin(), order.end());
  double total = 0, sum = 0;
  for (int32_t id : order) total += weight(id);
  const double r = double(reference_philox(row.seed, row.position, row.choice)) * 0x1p-64 * total;
  for (int32_t id : order) {
    sum += weight(id);
    certain &= std::fabs(sum - r) > total * kSlack;
    if (sum > r) return {id, certain};
  }
  return {order.back(), false};
}

double reference_logprob(const std::vector<float>& x, int32_t token) {
  double top = -kInf, sum = 0;
  for (float v : x) top = std::max<double>(top, v);
  for (float v : x) sum += std::exp(v - top);
  return x[token] - top - std::log(sum);
}

// ---------------------------------------------------------------- tests

std::vector<Sampler> samplers(const std::vector<Isa>& isas) {
  std::vector<Sampler> r;
  for (const Isa& isa : isas) r.emplace_back(isa);
  return r;
}

void check_row(std::vector<Sampler>& all, const std::vector<float>& x, const SampleRow& row,
               const std::string& what, int& uncertain) {
  const Draw want = reference_draw(adjusted(x, row), row);
  const Outcome first = all[0](x, row);
  for (size_t i = 1; i < all.size(); i++)
    check(all[i](x, row) == first, what + ": " + all[i].name() + " differs from portable");
  check(first.result.finite, what + ": finite");
  if (want.certain)
    check(first.result.token == want.token, what + ": token " + std::to_string(first.result.token) +
                                                " not " + std::to_string(want.token));
  else
    uncertain++;
  const int32_t token = first.result.token;
  const double logprob = reference_logprob(x, token);
  check(std::fabs(first.result.logprob - logprob) <= 4 * kEps * (1 + std::fabs(logprob)),
        what + ": logprob");
  const auto ids = ranking(x);
  check(ids[first.result.rank - 1] == token, what + ": rank");
  for (size_t i = 0; i < first.ids.size() && i < ids.size(); i++) {
    check(first.ids[i] == ids[i], what + ": top id " + std::to_string(i));
    const double p = reference_logprob(x, ids[i]);
    check(
        first.logprobs[i] == p || std::fabs(first.logprobs[i] - p) <= 4 * kEps * (1 + std::fabs(p)),
        what + ": top logprob " + std::to_string(i));
  }
}

// Every combination of the truncations over vocabularies of all shapes.
void sweep(std::vector<Sampler>& all) {
  std::mt19937 random(7);
  int uncertain = 0, count = 0;
  for (int64_t vocab : {1, 2, 7, 8, 17, 63, 64, 65, 1000, 1023, 1024, 1025, 5000, 49152})
    for (float sigma : {0.5f, 3.0f, 8.0f}) {
      auto x = normal(random, vocab, sigma);
      if (vocab > 100)
        for (int i = 0; i < vocab / 3; i++) x[random() % vocab] = x[random() % vocab];  // ties
      const std::vector<std::tuple<float, int, float, float>> settings = {
          {0.0f, 0, 1.0f, 0.0f},   {1.0f, 0, 1.0f, 0.0f},     {0.7f, 1, 1.0f, 0.0f},
          {0.7f, 5, 1.0f, 0.0f},   {1.3f, 40, 0.9f, 0.0f},    {1.0f, 0, 0.9f, 0.0f},
          {1.0f, 0, 0.5f, 0.02f},  {2.5f, 0, 0.99f, 0.0f},    {1.0f, 0, 1.0f, 0.1f},
          {0.3f, 700, 1.0f, 0.0f}, {1.0f, 3000, 0.97f, 0.0f}, {1.0f, 20000, 1.0f, 0.001f},
          {1.0f, 0, 1e-9f, 0.0f},  {1.0f, 0, 0.0f, 0.0f},     {5.0f, 0, 0.95f, 1.0f},
          {1e-4f, 0, 1.0f, 0.0f},  {0.02f, 4000, 0.9f, 0.0f}};
      for (const auto& [temperature, top_k, top_p, min_p] : settings) {
        SampleRow row = plain_row();
        row.temperature = temperature;
        row.top_k = top_k;
        row.top_p = top_p;
        row.min_p = min_p;
        row.seed = random() * 0x100000001ull;
        row.position = random() % 1000;
        row.choice = random() % 3;
        row.top_logprobs = random() % 2 ? 0 : 1 + random() % 20;
        const std::string what = "vocab " + std::to_string(vocab) + " sigma " +
                                 std::to_string(sigma) + " T " + std::to_string(temperature) +
                                 " k " + std::to_string(top_k) + " p " + std::to_string(top_p) +
                                 " min " + std::to_string(min_p);
        check_row(all, x, row, what, uncertain);
        count++;
      }
    }
  printf("%d of %d draws lie at a border\n", uncertain, count);
  check(uncertain * 10 < count, "too many draws at a border: the test proves little");
}

void penalties(std::vector<Sampler>& all) {
  std::mt19937 random(11);
  int uncertain = 0;
  for (int trial = 0; trial < 200; trial++) {
    const int64_t vocab = 50 + random() % 3000;
    const auto x = normal(random, vocab, 3);
    std::vector<int32_t> history(random() % 60), bias_ids;
    for (int32_t& id : history) id = random() % (vocab / 10);
    if (history.size() > 3) history[1] = int32_t(vocab) + 5, history[2] = -1;
    std::vector<float> bias;
    std::vector<uint32_t> mask((vocab + 31) / 32, ~0u);
    for (int i = random() % 5; i > 0; i--) {
      bias_ids.push_back(random() % vocab);
      bias.push_back(i % 2 ? -kInf : 4.0f);
    }
    for (uint32_t& m : mask) m = random() % 4 ? m : random() % 2 ? random() : 0;
    mask[0] |= 2;
    SampleRow row = plain_row();
    row.temperature = trial % 3 ? 0.9f : 0.0f;
    row.seed = trial;
    row.repetition_penalty = trial % 2 ? 1.3f : 1.0f;
    row.frequency_penalty = trial % 4 ? 0.7f : 0.0f;
    row.presence_penalty = trial % 5 ? 0.4f : 0.0f;
    row.history = history.data();
    row.history_len = int64_t(history.size());
    row.prompt_len = int64_t(history.size()) / 2;
    row.bias_ids = bias_ids.data();
    row.bias_values = bias.data();
    row.bias_len = int64_t(bias.size());
    row.mask = trial % 3 == 1 ? mask.data() : nullptr;
    row.top_k = trial % 7 == 0 ? 3 : 0;
    row.top_logprobs = 5;  // of the raw logits, whatever was adjusted
    check_row(all, x, row, "penalties " + std::to_string(trial), uncertain);
  }
  check(uncertain < 10, "penalties: too many draws at a border");
}

// A penalty that is far too strong, to see each of them act, and on the right ids.
void each_penalty(std::vector<Sampler>& all) {
  const std::vector<float> x = {5, 4, 3, 2, 1, 0, 0, 0};
  const std::vector<int32_t> history = {0, 1, 2, 1};  // prompt 0 1, output 2 1
  for (Sampler& sample : all) {
    SampleRow row = plain_row();
    row.temperature = 0;
    row.history = history.data();
    row.history_len = 4;
    row.prompt_len = 2;
    check(sample(x, row).result.token == 0, "no penalty");
    row.repetition_penalty = 100;
    check(sample(x, row).result.token == 3, "repetition covers prompt and output");
    row.repetition_penalty = 1;
    row.presence_penalty = 100;
    check(sample(x, row).result.token == 0, "presence leaves the prompt alone");
    row.history_len = 4, row.prompt_len = 0;
    check(sample(x, row).result.token == 3, "presence covers all output ids");
    row.presence_penalty = 0;
    row.frequency_penalty = 1.4f;  // 5-1.4, 4-2.8, 3-1.4, 2
    check(sample(x, row).result.token == 0, "frequency counts");
    row.frequency_penalty = 3.1f;  // 1.9, -2.2, -0.1, 2
    check(sample(x, row).result.token == 3, "frequency counts each");
    const std::vector<float> negative = {-1, -1.5f, -9};
    const std::vector<int32_t> first = {0};
    SampleRow r = plain_row();
    r.temperature = 0, r.repetition_penalty = 2, r.history = first.data(), r.history_len = 1;
    check(sample(negative, r).result.token == 1, "a negative logit is multiplied");
  }
}

void greedy_and_ties(std::vector<Sampler>& all) {
  for (Sampler& sample : all)
    for (int64_t vocab : {10, 1500, 70000}) {
      std::vector<float> x(vocab, 1.0f);
      x[0] = -0.0f;
      SampleRow row = plain_row();
      row.top_logprobs = 4;
      row.temperature = 0;
      Outcome o = sample(x, row);
      check(o.result.token == 1 && o.result.rank == 1, "greedy ties go to the lower id");
      check(o.ids == std::vector<int32_t>({1, 2, 3, 4}), "ties are ranked by id");
      row.temperature = 1;
      for (uint32_t seed = 0; seed < 20; seed++) {
        row.seed = seed;
        row.top_k = 1;
        check(sample(x, row).result.token == 1, "top_k = 1 is greedy");
        row.top_k = 3;
        const int32_t t = sample(x, row).result.token;
        check(t >= 1 && t <= 3, "top_k cuts ties by id");
        row.top_k = 0;
        row.top_p = 1e-12f;
        check(sample(x, row).result.token == 1, "a tiny top_p keeps one");
        row.top_p = 1;
      }
      std::fill(x.begin(), x.end(), 0.0f);
      x[1] = -0.0f;
      row.temperature = 0;
      check(sample(x, row).result.token == 0, "-0 ties with +0");
      check(sample(x, row).ids == std::vector<int32_t>({0, 1, 2, 3}), "-0 ranks with +0");
    }
}

// Chi-square against the exact probabilities, over positions, seeds and choices.
void distribution(std::vector<Sampler>& all) {
  const std::vector<float> x = {2, 1, 0, -1, 1.5f, 0.3f, -0.5f, 2, -4, 0};
  Sampler& sample = all.back();
  for (int axis = 0; axis < 3; axis++)
    for (float top_p : {1.0f, 0.8f}) {
      SampleRow row = plain_row();
      row.temperature = 1.5f;
      row.top_p = top_p;
      std::vector<double> p(x.size());
      const auto ids = ranking(x);
      double total = 0, kept = 0;
      for (float v : x) total += std::exp((v - 2) / 1.5);
      for (int32_t id : ids) {
        if (kept >= top_p * total) break;
        p[id] = std::exp((x[id] - 2) / 1.5);
        kept += p[id];
      }
      const int draws = 40000;
      std::vector<int> seen(x.size());
      for (int i = 0; i < draws; i++) {
        row.position = axis == 0 ? i : 3;
        row.seed = axis == 1 ? i : 77;
        row.choice = axis == 2 ? i : 1;
        seen[sample(x, row).result.token]++;
      }
      double chi = 0;
      int free = -1;
      for (size_t i = 0; i < x.size(); i++) {
        if (p[i] == 0) {
          check(seen[i] == 0, "drew an id that top_p removed");
          continue;
        }
        const double want = draws * p[i] / kept;
        chi += (seen[i] - want) * (seen[i] - want) / want;
        free++;
      }
      // mean `free`, deviation sqrt(2 free): five deviations; and it must not be too good either
      check(chi < free + 5 * std::sqrt(2.0 * free) && chi > 0.05,
            "chi-square " + std::to_string(chi) + " of " + std::to_string(free));
    }
}

void seeds_are_independent(std::vector<Sampler>& all) {
  const std::vector<float> x(16, 0.0f);
  SampleRow row = plain_row();
  // Neighbouring seeds, positions and choices: 16 equal ids agree by chance once in 16.
  for (int axis = 0; axis < 3; axis++) {
    int equal = 0;
    for (uint32_t i = 0; i < 4000; i++) {
      row.seed = 5, row.position = i, row.choice = 0;
      const int32_t a = all[0](x, row).result.token;
      if (axis == 0) row.seed++;
      if (axis == 1) row.position++;
      if (axis == 2) row.choice++;
      equal += all[0](x, row).result.token == a;
    }
    check(std::abs(equal - 250) < 80, "neighbouring draws agree " + std::to_string(equal));
  }
}

void refusals(std::vector<Sampler>& all) {
  std::mt19937 random(3);
  for (Sampler& sample : all)
    for (int64_t vocab : {5, 1000, 2049}) {
      SampleRow row = plain_row();
      auto x = normal(random, vocab);
      for (int64_t at : {int64_t(0), vocab / 2, vocab - 1})
        for (float temperature : {0.0f, 1.0f})
          for (bool score : {false, true}) {
            auto y = x;
            y[at] = kNaN;
            row.temperature = temperature, row.score = score;
            check(!sample(y, row).result.finite, "NaN at " + std::to_string(at) + " passes");
            y[at] = -kInf;
            check(sample(y, row).result.finite, "-inf is finite enough");
          }
      row = plain_row();
      check(!sample(std::vector<float>(vocab, -kInf), row).result.finite, "all -inf passes");
      const std::vector<uint32_t> none((vocab + 31) / 32, 0);
      row.mask = none.data();
      check(!sample(x, row).result.finite, "an empty mask passes");
      row.mask = nullptr;
      x[vocab - 2] = kInf;
      const Outcome o = sample(x, row);
      check(o.result.finite && o.result.token == vocab - 2 && o.result.logprob == 0 &&
                o.result.rank == 1,
            "+inf takes all");
      row.score = true;
      row.score_token = 0;
      check(sample(x, row).result.logprob == -kInf, "beside +inf nothing has probability");
    }
}

// A grammar leaves a handful of ids: fewer than top_k, and most stripes without any.
void tight_masks(std::vector<Sampler>& all) {
  std::mt19937 random(12);
  int uncertain = 0;
  for (int64_t vocab : {40, 5000, 49152})
    for (int allowed : {1, 3, 30}) {
      auto x = normal(random, vocab, 3);
      for (int i = 0; i < vocab; i += 3) x[i] = -kInf;
      std::vector<uint32_t> mask((vocab + 31) / 32, 0);
      for (int i = 0; i < allowed; i++) {
        const int64_t id = random() % vocab / 3 * 3 + 1;
        if (id < vocab) mask[id / 32] |= 1u << id % 32;
      }
      mask[0] |= 2;
      for (int top_k : {0, 2, 50, 4000})
        for (float top_p : {1.0f, 0.9f})
          for (uint32_t seed = 0; seed < 8; seed++) {
            SampleRow row = plain_row();
            row.mask = mask.data();
            row.top_k = top_k, row.top_p = top_p, row.seed = seed;
            row.top_logprobs = seed == 0 ? 35 : 0;  // of 40 raw logits, 26 are finite
            check_row(all, x, row, "tight mask, vocab " + std::to_string(vocab), uncertain);
          }
    }
}

// The report of a token is the same however it was asked for.
void report_is_stable(std::vector<Sampler>& all) {
  std::mt19937 random(4);
  const auto x = normal(random, 3000, 3);
  const std::vector<int32_t> history = {1, 2, 3};
  for (Sampler& sample : all)
    for (uint32_t seed = 0; seed < 50; seed++) {
      SampleRow row = plain_row();
      row.seed = seed;
      row.temperature = seed % 2 ? 1.0f : 0.6f;
      row.top_p = seed % 3 ? 1.0f : 0.9f;
      row.top_logprobs = seed % 5;
      row.frequency_penalty = seed % 7 ? 0 : 0.5f;
      row.history = history.data(), row.history_len = 3;
      const Outcome a = sample(x, row);
      SampleRow score = plain_row();
      score.score = true;
      score.score_token = a.result.token;
      score.top_logprobs = kMaxTopLogprobs;
      const Outcome b = sample(x, score);
      check(b.result.token == a.result.token, "score returns its token");
      check(same_bits(&a.result.logprob, &b.result.logprob, 1), "logprob depends on the request");
      check(a.result.rank == b.result.rank, "rank depends on the request");
      for (size_t i = 0; i < a.ids.size(); i++)
        check(a.ids[i] == b.ids[i] && same_bits(&a.logprobs[i], &b.logprobs[i], 1),
              "the report depends on its length");
    }
}

void known_answers(std::vector<Sampler>& all) {
  check(reference_philox(0, 0, 0) == 0xe169c58d6627e8d5ull,
        "philox4x32-10, zero vector of Random123");
  // 2^32 equal ids would be needed to see all bits; 4096 show the top twelve.
  const std::vector<float> x(4096, 1.0f);
  for (Sampler& sample : all)
    for (uint64_t seed : {0ull, 1ull, 0xffffffffffffffffull}) {
      SampleRow row = plain_row();
      row.seed = seed;
      check(sample(x, row).result.token == int32_t(reference_philox(seed, 0, 0) >> 52),
            std::string(sample.name()) + ": the draw is the top of philox");
    }
}

}  // namespace

int main() {
  flush_denormals();
  const auto isas = instruction_sets();
  auto all = samplers(isas);
  known_answers(all);
  greedy_and_ties(all);
  each_penalty(all);
  refusals(all);
  report_is_stable(all);
  penalties(all);
  tight_masks(all);
  distribution(all);
  seeds_are_independent(all);
  sweep(all);
  return finish("sampling_test");
}
