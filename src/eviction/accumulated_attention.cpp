#include "eviction/accumulated_attention.h"

#include <algorithm>
#include <optional>

#include "eviction/attention_score.h"

namespace phasekv::eviction {
namespace {

class AccumulatedAttentionPolicy final : public Policy {
 public:
  AccumulatedAttentionPolicy(std::string_view name, const AccumulatedAttention& definition,
                             std::optional<int64_t> recent)
      : name_(name), definition_(definition), recent_(recent) {}

  std::string_view name() const override { return name_; }
  PolicyNeeds needs() const override {
    return {.buffers = 1,
            .capacity = definition_.queries,
            .cleared = true,
            .sums = definition_.sums,
            .marker_queries = definition_.marker_queries};
  }
  ProtectedTokens protected_tokens(int64_t budget) const override {
    const int64_t half = std::max<int64_t>(0, (budget - definition_.sinks) / 2);
    return {definition_.sinks, recent_.value_or(half)};
  }
  double phase_quota() const override { return definition_.phase_quota; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    input.when_computed([&input, scores] { add_means(input, scores); });
    subtract_redundancy(input, definition_.redundancy, scores);
  }

 private:
  // Over the sums that any query went into.
  static void add_means(const PolicyInput& input, std::span<float> scores) {
    std::fill(scores.begin(), scores.end(), 0.0F);
    const auto filled = std::count_if(input.sum_counts.begin(), input.sum_counts.end(),
                                      [](int64_t count) { return count > 0; });
    for (size_t sum = 0; sum < input.sum_counts.size(); ++sum) {
      if (input.sum_counts[sum] == 0) continue;
      const float weight = 1.0F / static_cast<float>(input.sum_counts[sum] * filled);
      const std::span<const float> attention =
          input.sums.subspan(sum * scores.size(), scores.size());
      for (size_t i = 0; i < scores.size(); ++i) scores[i] += weight * attention[i];
    }
  }

  std::string_view name_;
  AccumulatedAttention definition_;
  std::optional<int64_t> recent_;
};

}  // namespace

std::unique_ptr<Policy> make_accumulated_attention(std::string_view name,
                                                   AccumulatedAttention definition,
                                                   const PolicyOptions& options) {
  definition.queries = options.queries.value_or(definition.queries);
  definition.sinks = options.sinks.value_or(definition.sinks);
  definition.redundancy = options.redundancy.value_or(definition.redundancy);
  definition.phase_quota = options.phase_quota.value_or(definition.phase_quota);
  definition.marker_queries = options.marker_queries.value_or(definition.marker_queries);
  return std::make_unique<AccumulatedAttentionPolicy>(name, definition, options.recent);
}

}  // namespace phasekv::eviction
