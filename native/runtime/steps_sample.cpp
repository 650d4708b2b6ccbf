#include "runtime/steps_sample.h"

#include <atomic>

namespace invar {
namespace {

SampleRow sample_row(const Execution& e, int64_t r) {
  const SamplingView& s = e.batch->sampling;
  SampleRow row{};
  row.temperature = s.temperature[r];
  row.top_k = s.top_k[r];
  row.top_p = s.top_p[r];
  row.min_p = s.min_p[r];
  row.seed = s.seed[r];
  row.choice = static_cast<uint32_t>(s.choice[r]);
  row.position = static_cast<uint32_t>(s.position[r]);
  row.repetition_penalty = s.repetition_penalty[r];
  row.frequency_penalty = s.frequency_penalty[r];
  row.presence_penalty = s.presence_penalty[r];
  row.history = s.history + s.history_start[r];
  row.history_len = s.history_start[r + 1] - s.history_start[r];
  row.prompt_len = s.prompt_len[r];
  row.bias_ids = s.bias_ids + s.bias_start[r];
  row.bias_values = s.bias_values + s.bias_start[r];
  row.bias_len = s.bias_start[r + 1] - s.bias_start[r];
  row.mask = e.masks[r];
  row.score = s.score[r];
  row.score_token = s.score_token[r];
  row.top_logprobs = s.top_logprobs[r];
  return row;
}

}  // namespace

void SampleStep::run(const Execution& e, const Worker& w, int64_t item) const {
  const ResultView& to = e.batch->result;
  const int64_t r = w.first_logit + item;
  // A mask that is being written holds nobody up: the row is drawn in a later step.
  const uint32_t* mask = e.masks[r];
  to.skipped[r] = mask != nullptr && !e.batch->sampling.score[r] &&
                  std::atomic_ref(const_cast<uint32_t&>(mask[e.batch->sampling.mask_words]))
                          .load(std::memory_order_acquire) == 0;
  if (to.skipped[r]) {
    to.token_ids[r] = 0;
    to.finite[r] = true;
    return;
  }
  SampleResult result{};
  result.top_ids = to.top_ids + r * to.max_top;
  result.top_logprobs = to.top_logprobs + r * to.max_top;
  e.kernels->sampling->sample(logits.row(item), vocab, sample_row(e, r), result,
                              w.sampling_scratch);
  to.token_ids[r] = result.token;
  to.logprobs[r] = result.logprob;
  to.ranks[r] = result.rank;
  to.finite[r] = result.finite;
}

}  // namespace invar
