#include "phasekv/ops/key_redundancy.h"

#include <cmath>
#include <string>

#include "dispatch.h"
#include "ops/key_range.h"
#include "validate.h"

namespace phasekv {

void key_redundancy(const KeyRedundancyParams& params) {
  check_key_range(params.key, params.block_table, params.first_token, params.tokens);
  if (!std::isfinite(params.threshold) || params.threshold < 0.0F) {
    refuse("threshold", std::to_string(params.threshold), "finite and at least 0");
  }
  check_not_null("redundancy", params.redundancy, params.tokens);
  if (params.tokens > 0) active_kernels().key_redundancy(params);
}

}  // namespace phasekv
