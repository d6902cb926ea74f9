#include "phasekv/ops/accumulate_attention.h"

#include <string>

#include "dispatch.h"
#include "ops/key_range.h"
#include "validate.h"

namespace phasekv {

void accumulate_attention(const AccumulateAttentionParams& params) {
  check_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_query(params.query, params.key);
  check_query_limits(params.query_limits, params.query, params.tokens);
  if (params.num_phases < 0) refuse("num_phases", params.num_phases, "at least 0");
  check_not_null("query_phases", params.query_phases, params.query.tokens);
  for (int64_t i = 0; i < params.query.tokens; ++i) {
    const int32_t phase = params.query_phases[i];
    if (phase >= 0 && phase < params.num_phases) continue;
    refuse("query_phases[" + std::to_string(i) + "]", phase,
           "in [0, num_phases = " + std::to_string(params.num_phases) + ")");
  }
  check_scale(params.scale);
  if (params.sums_stride < params.tokens) {
    refuse("sums_stride", params.sums_stride, "at least tokens = " + std::to_string(params.tokens));
  }
  check_not_null("sums", params.sums, params.tokens * params.num_phases);
  if (params.tokens > 0) active_kernels().accumulate_attention(params);
}

}  // namespace phasekv
