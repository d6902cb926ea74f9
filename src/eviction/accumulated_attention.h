// Policies that score a key by the attention it received from every query so far.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

struct AccumulatedAttention {
  int64_t sums = 1;       // 1, or kNumPhases: the score is the mean over phases of their means
  int64_t queries = 128;  // between two events that are counted; the newest ones
  int64_t sinks = 0;
  double redundancy = 0.0;
  double phase_quota = 0.0;
  bool marker_queries = true;
};

// `name` must outlive the policy. Half of the budget is kept for the newest tokens unless the
// options say how many are.
std::unique_ptr<Policy> make_accumulated_attention(std::string_view name,
                                                   AccumulatedAttention definition,
                                                   const PolicyOptions& options);

}  // namespace phasekv::eviction
