// How many keys the KV heads of a layer keep.
#pragma once

#include <cstdint>
#include <vector>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

// `count` for each head, or all it holds where that is less.
std::vector<int64_t> alike(const LayerScores& layer, int64_t count);

// What `policy` says, if every head gets at least its protected keys and at most those it holds;
// else throws invalid_argument naming the policy.
std::vector<int64_t> checked_allocation(const Policy& policy, const LayerScores& layer);

// How many keys of a head are protected.
int64_t count_protected(const HeadScores& head, ProtectedTokens tokens, int64_t seen);

inline bool is_protected(int32_t position, ProtectedTokens tokens, int64_t seen) {
  return position < tokens.sinks || position >= seen - tokens.recent;
}

}  // namespace phasekv::eviction
