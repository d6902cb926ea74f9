// StreamingLLM (arXiv 2309.17453): the first tokens, which act as attention sinks, and the newest.
#include <memory>

#include "eviction/options.h"
#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {
namespace {

class StreamingLlm final : public Policy {
 public:
  explicit StreamingLlm(int64_t sinks) : sinks_(sinks) {}

  std::string_view name() const override { return "streaming_llm"; }
  PolicyNeeds needs() const override { return {}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return {sinks_, 0}; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    // Ages are exact in float32 where positions themselves might not be.
    for (size_t i = 0; i < scores.size(); ++i) {
      scores[i] = -static_cast<float>(input.seen - input.positions[i]);
    }
  }

 private:
  int64_t sinks_;
};

}  // namespace

std::unique_ptr<Policy> make_streaming_llm(const PolicyOptions& options) {
  check_options("streaming_llm", options, {.sinks = true});
  return std::make_unique<StreamingLlm>(options.sinks.value_or(4));
}

}  // namespace phasekv::eviction
