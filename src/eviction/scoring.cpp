#include "eviction/scoring.h"

#include <algorithm>
#include <cmath>
#include <exception>

namespace phasekv::eviction {

void add_attention(const PolicyInput& input, std::vector<float>* sums) {
  input.backend->accumulate_attention({.query = input.queries,
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
