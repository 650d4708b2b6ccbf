#include "runtime/steps_experts.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace invar {
namespace {

// To read a unit's weights from memory takes about as long as to multiply so many rows with them:
// 0.6 bytes a weight of Q4_K at 10 GB/s a core, against 2 operations a row at 130 int8 GOPS.
constexpr int64_t kReadCost = 4;

// The sum of the `count` highest of `values`, highest first.
float sum_of_highest(const float* values, int64_t n, int64_t count) {
  std::array<bool, kMaxExperts> taken{};
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    int64_t best = -1;
    for (int64_t j = 0; j < n; ++j) {
      if (!taken[j] && (best < 0 || values[j] > values[best])) best = j;
    }
    taken[best] = true;
    sum += values[best];
  }
  return sum;
}

// The `count` highest of `allowed` values, ties to the lower index. NaN is never higher, so that
// whatever the values, `count` different indices come out.
void choose(const float* values, int64_t n, int64_t count, std::array<bool, kMaxExperts>& allowed,
            int64_t* chosen) {
  for (int64_t slot = 0; slot < count; ++slot) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i) {
      if (allowed[i] && (best < 0 || values[i] > values[best])) best = i;
    }
    allowed[best] = false;
    chosen[slot] = best;
  }
}

std::array<bool, kMaxExperts> allowed_experts(const Routing& r, const float* selection) {
  std::array<bool, kMaxExperts> allowed{};
  if (r.groups_used == r.groups) {
    std::fill_n(allowed.begin(), r.experts, true);
    return allowed;
  }
  const int64_t width = r.experts / r.groups;
  std::array<float, kMaxExperts> score;
  std::array<bool, kMaxExperts> free{};
  std::array<int64_t, kMaxExperts> groups;
  std::fill_n(free.begin(), r.groups, true);
  for (int64_t g = 0; g < r.groups; ++g) {
    score[g] = sum_of_highest(selection + g * width, width, r.group_best);
  }
  choose(score.data(), r.groups, r.groups_used, free, groups.data());
  for (int64_t g = 0; g < r.groups_used; ++g) {
    std::fill_n(allowed.begin() + groups[g] * width, width, true);
  }
  return allowed;
}

}  // namespace

void RouteOp::run(const Execution& e, const Worker&, int64_t row) const {
  const Routing& r = routing;
  const RowKernels& kernel = *e.kernels->rows;
  alignas(64) std::array<float, kMaxExperts> scores, selection;
  std::copy_n(logits.row(row), r.experts, scores.data());
  if (r.scoring == Scoring::softmax) kernel.softmax(scores.data(), r.experts, scores.data());
  if (r.scoring == Scoring::sigmoid) kernel.sigmoid(scores.data(), r.experts, scores.data());
  std::copy_n(scores.data(), r.experts, selection.data());
  if (bias != nullptr) kernel.add(selection.data(), bias, r.experts, selection.data());
  std::array<bool, kMaxExperts> allowed = allowed_experts(r, selection.data());
  std::array<int64_t, kMaxExperts> chosen;
  choose(selection.data(), r.experts, r.used, allowed, chosen.data());
  float* ids = out.row(row);
  float* weights = ids + r.used;
  for (int64_t slot = 0; slot < r.used; ++slot) {
    ids[slot] = static_cast<float>(chosen[slot]);  // exact
    weights[slot] = scores[chosen[slot]];
  }
  if (r.scoring == Scoring::softmax_of_chosen) kernel.softmax(weights, r.used, weights);
  if (r.normalise) {
    float sum = 0.0f;
    for (int64_t slot = 0; slot < r.used; ++slot) sum += weights[slot];
    for (int64_t slot = 0; slot < r.used; ++slot) weights[slot] /= sum;
  }
  for (int64_t slot = 0; slot < r.used; ++slot) weights[slot] *= r.scale;
}

Grouping::Grouping(int64_t experts, int64_t used, int64_t max_tokens)
    : experts(experts),
      used(used),
      first(experts + 1),
      active(experts),
      token(max_tokens * used),
      row_of(max_tokens * used) {}

void GroupStep::run(const Execution&, const Worker& w, int64_t) const {
  Grouping& g = *grouping_;
  std::fill(g.first.begin(), g.first.end(), 0);
  for (int64_t t = 0; t < w.rows; ++t) {
    for (int64_t slot = 0; slot < g.used; ++slot) {
      ++g.first[static_cast<int64_t>(routes_.row(t)[slot]) + 1];
    }
  }
  g.active_count = 0;
  for (int64_t e = 0; e < g.experts; ++e) {
    if (g.first[e + 1] > 0) g.active[g.active_count++] = static_cast<int32_t>(e);
    g.first[e + 1] += g.first[e];
  }
  for (int64_t t = 0; t < w.rows; ++t) {
    for (int64_t slot = 0; slot < g.used; ++slot) {
      const int32_t row = g.first[static_cast<int64_t>(routes_.row(t)[slot])]++;
      g.token[row] = static_cast<int32_t>(t);
      g.row_of[t * g.used + slot] = row;
    }
  }
  // Every first[e] has moved on to first[e + 1].
  std::copy_backward(g.first.begin(), g.first.end() - 1, g.first.end());
  g.first[0] = 0;
}

int64_t GatherStep::items(const Execution& e, int64_t rows) const {
  return row_items(e, rows * grouping_->used);
}

void GatherStep::run(const Execution& e, const Worker& w, int64_t item) const {
  const int64_t rows = w.rows * grouping_->used, count = items(e, w.rows);
  for (int64_t r = rows * item / count; r < rows * (item + 1) / count; ++r) {
    std::memcpy(out_.row(r), x_.row(grouping_->token[r]), x_.layout.row_bytes);
  }
}

int64_t QuantizeExpertsStep::items(const Execution& e, int64_t rows) const {
  return row_items(e, rows * grouping_->used);
}

void QuantizeExpertsStep::run(const Execution& e, const Worker& w, int64_t item) const {
  const int64_t rows = w.rows * grouping_->used, count = items(e, w.rows);
  for (int64_t r = rows * item / count; r < rows * (item + 1) / count; ++r) {
    e.kernels->linear->quantize(out_.format, x_.row(r), out_.k, out_.row(r));
  }
}

ExpertStep::ExpertStep(Part part, int threads, std::shared_ptr<Grouping> grouping)
    : part_(std::move(part)),
      columns_(part_columns(part_)),
      items_(threads * kItemsPerThread),
      grouping_(std::move(grouping)) {}

void ExpertStep::run(const Execution& e, const Worker& w, int64_t item) const {
  const Grouping& g = *grouping_;
  const auto cost = [&](int64_t i) {
    return kReadCost + g.first[g.active[i] + 1] - g.first[g.active[i]];
  };
  int64_t total = 0;
  for (int64_t i = 0; i < g.active_count; ++i) total += cost(i) * part_.units;
  const int64_t begin = total * item / items_, end = total * (item + 1) / items_;
  // A unit goes to the share that holds its first piece of cost.
  for (int64_t i = 0, at = 0; i < g.active_count && at < end; at += cost(i++) * part_.units) {
    const auto units_before = [&](int64_t place) {
      return std::clamp<int64_t>((place - at + cost(i) - 1) / cost(i), 0, part_.units);
    };
    for (int64_t unit = units_before(begin); unit < units_before(end); ++unit) {
      run_unit(e, w, g.active[i], unit);
    }
  }
}

void ExpertStep::run_unit(const Execution& e, const Worker& w, int64_t expert, int64_t unit) const {
  const int64_t last = grouping_->first[expert + 1], step = tile_rows(columns_);
  Tile tile{unit,  grouping_->first[expert], 0, reinterpret_cast<float*>(w.scratch), columns_,
            expert};
  while (tile.first_row < last) {
    tile.rows = std::min<int64_t>(step, last - tile.first_row);
    run_tile(e, part_, columns_, tile);
    tile.first_row += tile.rows;
  }
}

void CombineOp::run(const Execution& e, const Worker&, int64_t row) const {
  const int64_t used = grouping->used, width = out.width;
  const RowKernels& kernel = *e.kernels->rows;
  const int32_t* rows = grouping->row_of.data() + row * used;
  const float* weights = routes.row(row) + used;
  float* sum = out.row(row);
  kernel.scale(x.row(rows[0]), weighted ? weights[0] : 1.0f, width, sum);
  for (int64_t slot = 1; slot < used; ++slot) {
    kernel.add_scaled(x.row(rows[slot]), weighted ? weights[slot] : 1.0f, sum, width, sum);
  }
}

}  // namespace invar
