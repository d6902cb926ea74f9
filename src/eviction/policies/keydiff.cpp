// KeyDiff (arXiv 2504.15364): keys that point away from the others stay. A key's score is minus its
// cosine with the mean of all held keys, each of unit length, as they are cached (after RoPE).
// Nothing is protected, and no query is looked at.
#include <memory>

#include "eviction/options.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/ops/keydiff_score.h"

namespace phasekv::eviction {
namespace {

class KeyDiff final : public Policy {
 public:
  explicit KeyDiff(ProtectedTokens kept) : kept_(kept) {}

  std::string_view name() const override { return "keydiff"; }
  PolicyNeeds needs() const override { return {}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return kept_; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    input.backend->keydiff_score({.key = input.key,
                                  .block_table = input.block_table,
                                  .first_token = input.first_token,
                                  .tokens = input.tokens,
                                  .scores = scores.data()});
  }

 private:
  ProtectedTokens kept_;
};

}  // namespace

std::unique_ptr<Policy> make_keydiff(const PolicyOptions& options) {
  check_options("keydiff", options, {.sinks = true, .recent = true});
  return std::make_unique<KeyDiff>(
      ProtectedTokens{options.sinks.value_or(0), options.recent.value_or(0)});
}

}  // namespace phasekv::eviction
