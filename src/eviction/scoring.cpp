#include "eviction/scoring.h"

#include <algorithm>
#include <cmath>
#include <exception>

namespace phasekv::eviction {
namespace {

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

// What the function throws, in words.
template <typename Function>
std::string failure_of(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace

void ScoredKeys::ask(const Policy& policy) {
  input.positions = positions;
  input.sums = sums;
  input.waiting = &waiting_;
  if (!sums.empty()) add_attention(input, &sums);
  scores.resize(positions.size());
  failure_ = failure_of([&] { policy.score(input, scores); });
}

std::string ScoredKeys::finish(const Policy& policy) {
  if (failure_.empty()) {
    failure_ = failure_of([&] {
      for (const std::function<void()>& function : waiting_) function();
    });
  }
  if (failure_.empty() && !std::all_of(scores.begin(), scores.end(),
                                       [](float score) { return std::isfinite(score); })) {
    failure_ = "scores that are not finite";
  }
  if (failure_.empty()) return {};
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(positions[i]);
  return "policy " + std::string(policy.name()) + ", layer " + std::to_string(input.layer) + ": " +
         failure_;
}

}  // namespace phasekv::eviction
