// What a plan does with a batch before any thread starts: checks it, resolves feedback and places
// its tokens. All of it is linear in tokens and pages (but for a sort of attention's units) and
// allocates nothing.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "runtime/plan.h"

namespace invar {
namespace {

[[noreturn]] void refuse(const std::string& what, int64_t index, const std::string& why) {
  throw std::invalid_argument("batch: " + what + "[" + std::to_string(index) + "] " + why);
}

void check_starts(const char* what, const int64_t* starts, int64_t rows, int64_t length) {
  for (int64_t r = 0; r < rows; ++r) {
    if (starts[r] < 0 || starts[r] > starts[r + 1]) refuse(what, r, "is not ascending");
  }
  if (rows > 0 && starts[rows] > length) refuse(what, rows, "lies behind the end of its array");
}

}  // namespace

void Plan::check(const BatchView& b) const {
  if (b.tokens > limits_.max_tokens || b.sequences > limits_.max_sequences) {
    throw std::invalid_argument("batch: " + std::to_string(b.tokens) + " tokens of " +
                                std::to_string(b.sequences) + " sequences, planned are at most " +
                                std::to_string(limits_.max_tokens) + " of " +
                                std::to_string(limits_.max_sequences));
  }
  if (b.groups != static_cast<int64_t>(execution_.groups.size())) {
    throw std::invalid_argument("batch: " + std::to_string(b.groups) + " block tables, the plan " +
                                "has " + std::to_string(execution_.groups.size()) + " groups");
  }
  if (b.sequences > 0 && b.query_start[0] != 0) refuse("query_start", 0, "is not 0");
  for (int64_t s = 0; s < b.sequences; ++s) check_sequence(b, s);
  const int64_t rows = b.sequences > 0 ? b.query_start[b.sequences] : 0;
  for (int64_t i = 0; i < b.feedback_count; ++i) {
    const int32_t row = b.feedback[2 * i], sample = b.feedback[2 * i + 1];
    if (row < 0 || row >= b.tokens) refuse("feedback", i, "names a row that does not exist");
    if (sample < 0 || sample >= sample_count_) {
      refuse("feedback", i,
             "names sample " + std::to_string(sample) + ", the previous step had " +
                 std::to_string(sample_count_));
    }
  }
  for (int64_t i = 0; i < b.logit_count; ++i) {
    if (b.logit_rows[i] < 0 || b.logit_rows[i] >= rows) {
      refuse("logit_rows", i, "is not a row of a sequence");
    }
    if (i > 0 && b.logit_rows[i] <= b.logit_rows[i - 1])
      refuse("logit_rows", i, "is not ascending");
  }
  check_sampling(b);
}

void Plan::check_sequence(const BatchView& b, int64_t s) const {
  const int64_t rows = b.query_start[s + 1] - b.query_start[s];
  if (rows < 0 || b.query_start[s + 1] > b.tokens) {
    refuse("query_start", s + 1, "does not fit the tokens");
  }
  if (b.kv_len[s] < rows) refuse("kv_len", s, "is less than the rows of the sequence");
  const int64_t needed = (b.kv_len[s] + kPageTokens - 1) / kPageTokens;
  for (int64_t g = 0; g < b.groups; ++g) {
    const CacheGroup& cache = execution_.groups[g];
    if (needed > b.block_tables[g].pages_per_row) {
      refuse("block_tables", g,
             "has too few columns for " + std::to_string(b.kv_len[s]) + " tokens of sequence " +
                 std::to_string(s));
    }
    // Pages that lie wholly before what the first query sees may be gone.
    const int64_t seen = cache.mask.first_key(b.kv_len[s] - rows);
    const int32_t* table = b.block_tables[g].row(s);
    for (int64_t p = seen / kPageTokens; p < needed; ++p) {
      if (table[p] < 0 || table[p] >= cache.page_count) {
        refuse("block_tables", g,
               "names page " + std::to_string(table[p]) + " for sequence " + std::to_string(s) +
                   ", the group has " + std::to_string(cache.page_count));
      }
    }
  }
}

void Plan::check_sampling(const BatchView& b) const {
  const SamplingView& s = b.sampling;
  check_starts("sampling.history_start", s.history_start, b.logit_count, s.history_len);
  check_starts("sampling.bias_start", s.bias_start, b.logit_count, s.bias_len);
  for (int64_t r = 0; r < b.logit_count; ++r) {
    if (s.top_logprobs[r] < 0 || s.top_logprobs[r] > b.result.max_top ||
        s.top_logprobs[r] > kMaxTopLogprobs) {
      refuse("sampling.top_logprobs", r, "is not in [0, " + std::to_string(kMaxTopLogprobs) + "]");
    }
    if (s.score[r] && (s.score_token[r] < 0 || s.score_token[r] >= limits_.vocab)) {
      refuse("sampling.score_token", r, "is not in the vocabulary");
    }
    if (s.prompt_len[r] < 0) refuse("sampling.prompt_len", r, "is negative");
  }
  for (int64_t i = 0; i < s.history_len; ++i) {
    if (s.history[i] < 0 || s.history[i] >= limits_.vocab) {
      refuse("sampling.history", i, "is not in the vocabulary");
    }
  }
  for (int64_t i = 0; i < s.bias_len; ++i) {
    if (s.bias_ids[i] < 0 || s.bias_ids[i] >= limits_.vocab) {
      refuse("sampling.bias_ids", i, "is not in the vocabulary");
    }
  }
  if (!s.masks.empty() && s.mask_words * 32 < limits_.vocab) {
    throw std::invalid_argument("batch: sampling.masks has " + std::to_string(s.mask_words) +
                                " words a row, too few for " + std::to_string(limits_.vocab) +
                                " ids");
  }
  for (size_t i = 0; i < s.masks.size(); ++i) {
    if (s.masked_rows[i] < 0 || s.masked_rows[i] >= b.logit_count) {
      refuse("sampling.masked_rows", static_cast<int64_t>(i), "is not a logit row");
    }
  }
}

void Plan::prepare(const BatchView& b) {
  Execution& e = execution_;
  e.batch = &b;
  e.rows = b.sequences > 0 ? b.query_start[b.sequences] : 0;
  std::copy_n(b.token_ids, e.rows, e.token_ids.begin());
  for (int64_t i = 0; i < b.feedback_count; ++i) {
    if (b.feedback[2 * i] < e.rows)
      e.token_ids[b.feedback[2 * i]] = samples_[b.feedback[2 * i + 1]];
  }
  for (int64_t r = 0; r < e.rows; ++r) {
    if (e.token_ids[r] < 0 || e.token_ids[r] >= limits_.embedding_rows) {
      refuse("token_ids", r,
             "is " + std::to_string(e.token_ids[r]) + ", the model has " +
                 std::to_string(limits_.embedding_rows) + " embeddings");
    }
    if (b.positions[r] < 0) refuse("positions", r, "is negative");
    if (b.positions[r] >= positions_) {
      refuse(
          "positions", r,
          "is " + std::to_string(b.positions[r]) + ", the model has " + std::to_string(positions_));
    }
  }
  std::fill_n(e.masks.begin(), b.logit_count, nullptr);
  for (size_t i = 0; i < b.sampling.masks.size(); ++i) {
    e.masks[b.sampling.masked_rows[i]] = b.sampling.masks[i];
  }
  place_tokens(b);
}

void Plan::place_tokens(const BatchView& b) {
  Execution& e = execution_;
  for (int64_t s = 0; s < b.sequences; ++s) {
    const int32_t first = b.query_start[s], last = b.query_start[s + 1];
    for (int32_t r = first; r < last; ++r) {
      e.token_sequence[r] = static_cast<int32_t>(s);
      e.token_position[r] = b.kv_len[s] - (last - r);
    }
  }
  for (size_t g = 0; g < e.groups.size(); ++g) {
    place_units(b, e.groups[g].kv_heads, e.groups[g].mask, limits_.threads, limits_.partials,
                e.units[g]);
  }
  // A step that failed may have left splits half finished.
  for (int64_t i = 0; i < max_split_items(limits_.threads); ++i) {
    e.counters[i].store(0, std::memory_order_relaxed);
  }
}

}  // namespace invar
