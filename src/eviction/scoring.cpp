#include "eviction/scoring.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "phasekv/ops/accumulate_attention.h"
#include "phasekv/ops/push_queries.h"

namespace phasekv::eviction {

GatheredQueries::GatheredQueries(const ScheduledRequest& scheduled, int64_t layer)
    : view_(scheduled.cache().queries(layer)) {
  const RowsView array = view_;
  view_.tokens = static_cast<int64_t>(scheduled.queries().size());
  memory_.resize(static_cast<size_t>(view_.tokens * array.token_stride * size_of(array.dtype)));
  view_.data = memory_.data();
  std::vector<int64_t> rows;
  std::vector<int64_t> entries;
  for (const BufferedQuery& query : scheduled.queries()) {
    entries.push_back(static_cast<int64_t>(rows.size()));
    rows.push_back(query.entry);
  }
  push_queries({.query = array,
                .rows = rows.data(),
                .entries = entries.data(),
                .count = view_.tokens,
                .buffer = view_});
}

RowsView GatheredQueries::of_kv_head(int64_t head, int64_t kv_heads) const {
  RowsView view = view_;
  view.heads = view_.heads / kv_heads;
  view.data = static_cast<uint8_t*>(view_.data) +
              head * view.heads * view_.head_stride * size_of(view_.dtype);
  return view;
}

void add_attention(const PolicyInput& input, std::vector<float>* sums) {
  accumulate_attention({.query = input.queries,
                        .query_limits = input.query_limits.data(),
                        .query_phases = input.query_phases.data(),
                        .num_phases = static_cast<int64_t>(input.sum_counts.size()),
                        .key = input.key,
                        .block_table = input.block_table,
                        .first_token = input.first_token,
                        .tokens = input.tokens,
                        .scale = input.scale,
                        .sums = sums->data(),
                        .sums_stride = input.tokens});
}

std::string score_or_newest(const Policy& policy, const PolicyInput& input,
                            std::span<float> scores) {
  std::string failure;
  try {
    policy.score(input, scores);
    const bool all_finite =
        std::all_of(scores.begin(), scores.end(), [](float score) { return std::isfinite(score); });
    if (!all_finite) failure = "scores that are not finite";
  } catch (const std::exception& error) {
    failure = error.what();
  }
  if (failure.empty()) return failure;
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(input.positions[i]);
  return "policy " + std::string(policy.name()) + ", layer " + std::to_string(input.layer) + ": " +
         failure;
}

}  // namespace phasekv::eviction
