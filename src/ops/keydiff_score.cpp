#include "phasekv/ops/keydiff_score.h"

#include "dispatch.h"
#include "ops/key_range.h"
#include "validate.h"

namespace phasekv {

void keydiff_score(const KeydiffScoreParams& params) {
  check_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_not_null("scores", params.scores, params.tokens);
  if (params.tokens > 0) active_kernels().keydiff_score(params);
}

}  // namespace phasekv
