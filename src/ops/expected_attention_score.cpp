#include "phasekv/ops/expected_attention_score.h"

#include <string>

#include "dispatch.h"
#include "ops/check_expected_attention.h"
#include "ops/key_range.h"
#include "validate.h"

namespace phasekv {

void check_expected_attention(const ExpectedAttentionScoreParams& params) {
  check_same_blocks("value", params.value, "key", params.key);
  check_query(params.query, params.key);
  check_not_null("query_positions", params.query_positions, params.query.tokens);
  if (params.sinks < 0) refuse("sinks", params.sinks, "at least 0");
  if (params.horizon < 1 || params.horizon > kMaxDelta) {
    refuse("horizon", params.horizon, "in [1, " + std::to_string(kMaxDelta) + "]");
  }
  const int64_t last = kMaxDelta - params.horizon;
  if (params.next_position < 0 || params.next_position > last) {
    refuse("next_position", params.next_position, "in [0, " + std::to_string(last) + "]");
  }
  check_scale(params.scale);
  check_not_null("scores", params.scores, params.tokens);
}

void check_query_positions(const int64_t* query_positions, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (query_positions[i] >= 0 && query_positions[i] <= kMaxDelta) continue;
    refuse("query_positions[" + std::to_string(i) + "]", query_positions[i],
           "in [0, " + std::to_string(kMaxDelta) + "]");
  }
}

void expected_attention_score(const ExpectedAttentionScoreParams& params) {
  check_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_blocks("value", params.value);
  check_expected_attention(params);
  check_rope(params.rope, params.key.head_size);
  check_query_positions(params.query_positions, params.query.tokens);
  if (params.tokens > 0) active_kernels().expected_attention_score(params);
}

}  // namespace phasekv
