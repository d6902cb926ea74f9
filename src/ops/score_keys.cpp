#include "phasekv/ops/score_keys.h"

#include "dispatch.h"
#include "ops/key_range.h"
#include "validate.h"

namespace phasekv {

void score_keys(const ScoreKeysParams& params) {
  check_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_query(params.query, params.key);
  if (params.query_limits != nullptr) {
    check_query_limits(params.query_limits, params.query, params.tokens);
  }
  if (params.excluded_recent < 0) refuse("excluded_recent", params.excluded_recent, "at least 0");
  const bool is_odd = params.pooling_kernel > 0 && params.pooling_kernel % 2 == 1;
  if (params.pooling != Pooling::none && !is_odd) {
    refuse("pooling_kernel", params.pooling_kernel, "odd and positive");
  }
  check_scale(params.scale);
  check_not_null("scores", params.scores, params.tokens);
  if (params.tokens > 0) active_kernels().score_keys(params);
}

}  // namespace phasekv
