// One step as it comes from the engine: borrowed arrays, and where the results go.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace invar {

constexpr int kMaxCacheGroups = 8;

// int32 [sequences, pages]
struct BlockTable {
  const int32_t* pages = nullptr;
  int64_t pages_per_row = 0;
  const int32_t* row(int64_t sequence) const { return pages + sequence * pages_per_row; }
};

// Per logit row unless said otherwise; the fields of backends/runner.py SamplingBatch.
struct SamplingView {
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *choice, *position, *prompt_len, *score_token, *top_logprobs;
  const uint64_t* seed;
  const float *repetition_penalty, *frequency_penalty, *presence_penalty;
  const int32_t* history;
  const int64_t* history_start;  // [rows + 1]
  int64_t history_len;
  const int32_t* bias_ids;
  const float* bias_values;
  const int64_t* bias_start;  // [rows + 1]
  int64_t bias_len;
  // One per masked row, of `mask_words` words with a bit per id and one word that is not 0 once
  // those are final: another thread may write them while the step runs.
  std::vector<const uint32_t*> masks;
  int64_t mask_words;
  const int32_t* masked_rows;  // of each mask
  const bool* score;
};

struct ResultView {
  int32_t* token_ids;
  float* logprobs;
  int32_t* ranks;
  bool* finite;
  bool* skipped;     // its mask was not ready: nothing was drawn
  int32_t* top_ids;  // [rows, max_top]
  float* top_logprobs;
  int64_t max_top;
};

struct BatchView {
  const int32_t* token_ids;
  int64_t tokens;
  const int32_t* feedback;  // [feedback_count, 2]: row, index in the previous step's samples
  int64_t feedback_count;
  const int32_t* positions;    // of axis 0
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* kv_len;
  int64_t sequences;
  std::array<BlockTable, kMaxCacheGroups> block_tables;
  int64_t groups;
  const int32_t* logit_rows;
  int64_t logit_count;
  SamplingView sampling;
  ResultView result;
};

}  // namespace invar
