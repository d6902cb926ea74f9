// ExpectedAttention (kvpress; arXiv 2510.00636): keys are scored by the attention that queries to
// come will pay to them, taken for normally distributed, times the norm of their value
// (phasekv/ops/expected_attention_score.h). The first 4 tokens are always kept; neither their
// queries nor their keys count.
//
// Ours differs in one thing: mean and covariance are those of the last 128 queries that the policy
// buffers (`queries`), not of the whole prompt's, so that they follow an agent as it goes on.
// Without any query the norm of the value alone decides.
#include <memory>

#include "eviction/options.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/ops/expected_attention_score.h"

namespace phasekv::eviction {
namespace {

constexpr int64_t kHorizon = 512;  // positions to come

class ExpectedAttention final : public Policy {
 public:
  ExpectedAttention(int64_t queries, ProtectedTokens kept) : queries_(queries), kept_(kept) {}

  std::string_view name() const override { return "expected_attention"; }
  PolicyNeeds needs() const override { return {.buffers = 1, .capacity = queries_, .rope = true}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return kept_; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    input.backend->expected_attention_score({.key = input.key,
                                             .value = input.value,
                                             .block_table = input.block_table,
                                             .first_token = input.first_token,
                                             .tokens = input.tokens,
                                             .positions = input.positions.data(),
                                             .query = input.queries,
                                             .query_positions = input.query_positions.data(),
                                             .sinks = kept_.sinks,
                                             .rope = input.rope,
                                             .next_position = input.seen,
                                             .horizon = kHorizon,
                                             .scale = input.scale,
                                             .scores = scores.data()});
  }

 private:
  int64_t queries_;
  ProtectedTokens kept_;
};

}  // namespace

std::unique_ptr<Policy> make_expected_attention(const PolicyOptions& options) {
  check_options("expected_attention", options, {.queries = true, .sinks = true, .recent = true});
  return std::make_unique<ExpectedAttention>(
      options.queries.value_or(128),
      ProtectedTokens{options.sinks.value_or(4), options.recent.value_or(0)});
}

}  // namespace phasekv::eviction
