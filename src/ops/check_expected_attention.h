// The checks of expected_attention_score that the host and the device share. All of them throw
// Error with the argument's name and value.
#pragma once

#include <cstdint>

#include "phasekv/ops/expected_attention_score.h"

namespace phasekv {

// All arguments but the keys' range, the rotation and what lists hold.
void check_expected_attention(const ExpectedAttentionScoreParams& params);

// [count] positions that a query can stand at.
void check_query_positions(const int64_t* query_positions, int64_t count);

}  // namespace phasekv
