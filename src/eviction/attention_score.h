// The score that most policies share: mean attention of the buffered queries, and R-KV's mixture
// of it with redundancy.
#pragma once

#include <cstdint>
#include <span>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

struct AttentionRules {
  GroupReduction group = GroupReduction::mean;
  Pooling pooling = Pooling::none;
  int64_t pooling_kernel = 1;
  bool causal = false;          // whether a query sees only keys that stand before it
  int64_t excluded_recent = 0;  // newest keys left out of the softmax
};

// `rules` with what `options` sets.
AttentionRules with_options(AttentionRules rules, const PolicyOptions& options);

// scores [kv heads, tokens] = mean over input.queries of their softmax over the keys, as soon as
// `input` has what was computed; `rules` are the policy's and live as long.
void score_attention(const PolicyInput& input, const AttentionRules& rules,
                     std::span<float> scores);

// scores = (1 - share) scores - share R, R-KV's redundancy R (arXiv 2505.24133), after what was
// asked for before. A share of 0 leaves them as they are.
void subtract_redundancy(const PolicyInput& input, double share, std::span<float> scores);

}  // namespace phasekv::eviction
