// How a policy comes to its scores at an event, whichever cache the keys lie in.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

// Held keys of a layer, or of one KV head where heads differ, and their scores. It stays in its
// place, as `input` looks at it.
struct ScoredKeys {
  std::vector<int32_t> positions;     // [kv heads, tokens]
  std::vector<float> sums;            // [sums, kv heads, tokens]
  std::vector<int64_t> query_limits;  // [queries], where the layer's heads differ in them
  std::vector<float> scores;          // [kv heads, tokens]
  PolicyInput input;

  ScoredKeys() = default;
  ScoredKeys(const ScoredKeys&) = delete;
  ScoredKeys& operator=(const ScoredKeys&) = delete;

  // Adds the attention of the queries to the sums, if there are any, and lets the policy score.
  void ask(const Policy& policy);
  // Once what the backend was asked for is there: makes the scores final, and tells what the policy
  // did wrong, if anything. Then the scores are positions, so that the newest tokens are the best:
  // a step is under way and other requests share it.
  std::string finish(const Policy& policy);

 private:
  std::vector<std::function<void()>> waiting_;
  std::string failure_;
};

}  // namespace phasekv::eviction
