#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace invar::bindings {
namespace {

SamplingView sampling_view(nb::handle s, int64_t rows) {
  SamplingView v{};
  v.temperature = row_field<const float>(s, "temperature", rows);
  v.top_k = row_field<const int32_t>(s, "top_k", rows);
  v.top_p = row_field<const float>(s, "top_p", rows);
  v.min_p = row_field<const float>(s, "min_p", rows);
  v.seed = row_field<const uint64_t>(s, "seed", rows);
  v.choice = row_field<const int32_t>(s, "choice", rows);
  v.position = row_field<const int32_t>(s, "position", rows);
  v.repetition_penalty = row_field<const float>(s, "repetition_penalty", rows);
  v.frequency_penalty = row_field<const float>(s, "frequency_penalty", rows);
  v.presence_penalty = row_field<const float>(s, "presence_penalty", rows);
  const auto history = field<const int32_t, 1>(s, "history");
  v.history = history.data;
  v.history_len = history.shape[0];
  v.history_start = row_field<const int64_t>(s, "history_start", rows + 1);
  v.prompt_len = row_field<const int32_t>(s, "prompt_len", rows);
  const auto bias_ids = field<const int32_t, 1>(s, "bias_ids");
  v.bias_ids = bias_ids.data;
  v.bias_len = bias_ids.shape[0];
  v.bias_values = row_field<const float>(s, "bias_values", v.bias_len);
  v.bias_start = row_field<const int64_t>(s, "bias_start", rows + 1);
  for (nb::handle one : nb::cast<nb::tuple>(s.attr("masks"))) {
    const auto mask = view<const uint32_t, 1>(one, "masks");
    if (mask.shape[0] < 1 || (!v.masks.empty() && mask.shape[0] - 1 != v.mask_words)) {
      throw std::invalid_argument("masks: expected the same number of words in each");
    }
    v.masks.push_back(mask.data);
    v.mask_words = mask.shape[0] - 1;
  }
  const auto masked = static_cast<int64_t>(v.masks.size());
  v.masked_rows = row_field<const int32_t>(s, "masked_rows", masked);
  v.score = row_field<const bool>(s, "score", rows);
  v.score_token = row_field<const int32_t>(s, "score_token", rows);
  v.top_logprobs = row_field<const int32_t>(s, "top_logprobs", rows);
  return v;
}

ResultView result_view(nb::handle r, int64_t rows) {
  ResultView v{};
  v.token_ids = row_field<int32_t>(r, "token_ids", rows);
  v.logprobs = row_field<float>(r, "logprobs", rows);
  v.ranks = row_field<int32_t>(r, "ranks", rows);
  v.finite = row_field<bool>(r, "finite", rows);
  v.skipped = row_field<bool>(r, "skipped", rows);
  const auto top_ids = field<int32_t, 2>(r, "top_ids");
  const auto top_logprobs = field<float, 2>(r, "top_logprobs");
  if (top_ids.shape[0] != rows || top_logprobs.shape != top_ids.shape) {
    throw std::invalid_argument("top_ids and top_logprobs: expected one row per logit row each");
  }
  v.top_ids = top_ids.data;
  v.top_logprobs = top_logprobs.data;
  v.max_top = top_ids.shape[1];
  return v;
}

}  // namespace

BatchView batch_view(nb::handle batch, nb::handle result) {
  BatchView v{};
  const auto tokens = field<const int32_t, 1>(batch, "token_ids");
  v.token_ids = tokens.data;
  v.tokens = tokens.shape[0];
  const auto feedback = field<const int32_t, 2>(batch, "feedback");
  if (feedback.shape[1] != 2) throw std::invalid_argument("feedback: expected two columns");
  v.feedback = feedback.data;
  v.feedback_count = feedback.shape[0];
  const auto positions = field<const int32_t, 2>(batch, "positions");
  if (positions.shape[0] < 1 || positions.shape[1] != v.tokens) {
    throw std::invalid_argument("positions: expected [axes, tokens]");
  }
  v.positions = positions.data;
  const auto kv_len = field<const int32_t, 1>(batch, "kv_len");
  v.kv_len = kv_len.data;
  v.sequences = kv_len.shape[0];
  v.query_start = row_field<const int32_t>(batch, "query_start", v.sequences + 1);
  const nb::tuple tables = nb::cast<nb::tuple>(batch.attr("block_tables"));
  if (tables.size() > kMaxCacheGroups) throw std::invalid_argument("block_tables: too many");
  v.groups = static_cast<int64_t>(tables.size());
  for (size_t g = 0; g < tables.size(); ++g) {
    const auto table = view<const int32_t, 2>(tables[g], "block_tables");
    if (table.shape[0] != v.sequences) {
      throw std::invalid_argument("block_tables: expected one row per sequence");
    }
    v.block_tables[g] = {table.data, table.shape[1]};
  }
  const auto logit_rows = field<const int32_t, 1>(batch, "logit_rows");
  v.logit_rows = logit_rows.data;
  v.logit_count = logit_rows.shape[0];
  v.sampling = sampling_view(batch.attr("sampling"), v.logit_count);
  v.result = result_view(result, v.logit_count);
  return v;
}

}  // namespace invar::bindings
