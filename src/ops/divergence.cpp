#include "phasekv/ops/divergence.h"

#include "dispatch.h"
#include "validate.h"

namespace phasekv {

void divergence(const DivergenceParams& params) {
  check_rows("fresh", params.fresh);
  check_rows("cached", params.cached);
  check_equal("cached.tokens", params.cached.tokens, "fresh", params.fresh.tokens);
  check_same_heads("cached", params.cached, "fresh", params.fresh);
  check_not_null("out", params.out, params.fresh.tokens);
  if (params.fresh.tokens > 0) active_kernels().divergence(params);
}

}  // namespace phasekv
