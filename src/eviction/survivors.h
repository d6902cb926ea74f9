// Which keys of each KV head survive an event.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

// Indices of the survivors, ascending, [kv heads, kept]: protected tokens first, then the best of
// each phase as far as `phase_quota` goes, then the best of all. Ties go to the older key.
// scores [kv heads, tokens]; kept in [protected tokens, tokens].
std::vector<int64_t> choose_survivors(const PolicyInput& input, std::span<const float> scores,
                                      ProtectedTokens protected_tokens, double phase_quota,
                                      int64_t kept);

}  // namespace phasekv::eviction
