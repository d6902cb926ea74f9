// Keeps everything. The engine gives it a budget of the longest request, so that no event comes.
#include <algorithm>
#include <memory>

#include "eviction/options.h"
#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {
namespace {

class Full final : public Policy {
 public:
  std::string_view name() const override { return "full"; }
  PolicyNeeds needs() const override { return {}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return {}; }
  void score(const PolicyInput& /*input*/, std::span<float> scores) const override {
    std::fill(scores.begin(), scores.end(), 0.0F);
  }
};

}  // namespace

std::unique_ptr<Policy> make_full(const PolicyOptions& options) {
  check_options("full", options, {});
  return std::make_unique<Full>();
}

}  // namespace phasekv::eviction
