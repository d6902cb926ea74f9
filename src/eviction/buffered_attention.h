// Policies that differ only in which queries they buffer and how they reduce their attention.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "eviction/attention_score.h"
#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

struct BufferedAttention {
  int64_t buffers = 1;
  int64_t queries = 0;  // in each buffer
  AttentionRules rules;
  ProtectedTokens protected_tokens;
  double redundancy = 0.0;
  double phase_quota = 0.0;
  bool marker_queries = true;
};

// `name` must outlive the policy. What `options` sets replaces the policy's own; it was checked.
std::unique_ptr<Policy> make_buffered_attention(std::string_view name, BufferedAttention definition,
                                                const PolicyOptions& options);

}  // namespace phasekv::eviction
