#include "eviction/buffered_attention.h"

#include <utility>

namespace phasekv::eviction {
namespace {

class BufferedAttentionPolicy final : public Policy {
 public:
  BufferedAttentionPolicy(std::string_view name, const BufferedAttention& definition)
      : name_(name), definition_(definition) {}

  std::string_view name() const override { return name_; }
  PolicyNeeds needs() const override {
    return {.buffers = definition_.buffers,
            .capacity = definition_.queries,
            .marker_queries = definition_.marker_queries};
  }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override {
    return definition_.protected_tokens;
  }
  double phase_quota() const override { return definition_.phase_quota; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    score_attention(input, definition_.rules, scores);
    subtract_redundancy(input, definition_.redundancy, scores);
  }

 private:
  std::string_view name_;
  BufferedAttention definition_;
};

}  // namespace

std::unique_ptr<Policy> make_buffered_attention(std::string_view name, BufferedAttention definition,
                                                const PolicyOptions& options) {
  definition.queries = options.queries.value_or(definition.queries);
  definition.rules = with_options(definition.rules, options);
  definition.protected_tokens.sinks = options.sinks.value_or(definition.protected_tokens.sinks);
  definition.protected_tokens.recent = options.recent.value_or(definition.protected_tokens.recent);
  definition.redundancy = options.redundancy.value_or(definition.redundancy);
  definition.phase_quota = options.phase_quota.value_or(definition.phase_quota);
  definition.marker_queries = options.marker_queries.value_or(definition.marker_queries);
  return std::make_unique<BufferedAttentionPolicy>(name, definition);
}

}  // namespace phasekv::eviction
