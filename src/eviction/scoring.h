// How a policy comes to its scores at an event, whichever cache the keys lie in.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

// Adds the attention of input.queries to `sums`, [needs.sums, kv heads, tokens].
void add_attention(const PolicyInput& input, std::vector<float>* sums);

// Lets the policy score, and tells what it did wrong, if anything: then the scores are positions,
// so that the newest tokens are the best. A step is under way and other requests share it.
std::string score_or_newest(const Policy& policy, const PolicyInput& input,
                            std::span<float> scores);

}  // namespace phasekv::eviction
