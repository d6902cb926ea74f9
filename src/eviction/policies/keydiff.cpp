// KeyDiff (arXiv 2504.15364): keys that point away from the others stay. A key's score is minus its
// cosine with the mean of all held keys, each of unit length, as they are cached (after RoPE).
// Nothing is protected, and no query is looked at.
#include <cmath>
#include <memory>
#include <vector>

#include "eviction/held_rows.h"
#include "eviction/options.h"
#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {
namespace {

// A row of zeros has no direction: it counts as one at right angles to all.
float inverse_norm(const float* row, int64_t size) {
  const float squared = product(row, row, size);
  return squared == 0.0F ? 0.0F : 1.0F / std::sqrt(squared);
}

class KeyDiff final : public Policy {
 public:
  explicit KeyDiff(ProtectedTokens kept) : kept_(kept) {}

  std::string_view name() const override { return "keydiff"; }
  PolicyNeeds needs() const override { return {}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return kept_; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    const int64_t size = input.key.head_size;
    for (int64_t head = 0; head < input.kv_heads(); ++head) {
      const std::vector<float> keys = held_rows(input, input.key, head);
      std::vector<float> direction(static_cast<size_t>(size), 0.0F);  // of the mean
      for (int64_t i = 0; i < input.tokens; ++i) {
        const float* key = keys.data() + i * size;
        const float factor = inverse_norm(key, size);
        for (int64_t d = 0; d < size; ++d) direction[static_cast<size_t>(d)] += factor * key[d];
      }
      const float factor = -inverse_norm(direction.data(), size);
      float* row = scores.data() + head * input.tokens;
      for (int64_t i = 0; i < input.tokens; ++i) {
        const float* key = keys.data() + i * size;
        row[i] = factor * inverse_norm(key, size) * product(key, direction.data(), size);
      }
    }
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
