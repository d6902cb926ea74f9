#include "phasekv/ops/mean_residual.h"

#include "dispatch.h"
#include "validate.h"

namespace phasekv {

void mean_residual(const MeanResidualParams& params) {
  check_rows("fresh", params.fresh);
  check_rows("cached", params.cached);
  check_same_heads("cached", params.cached, "fresh", params.fresh);
  const int64_t probes = check_segment_starts(params.segment_starts, params.num_segments);
  check_indices("fresh_rows", params.fresh_rows, probes, params.fresh.tokens);
  check_indices("cached_rows", params.cached_rows, probes, params.cached.tokens);
  if (params.fresh_deltas != nullptr) check_deltas("fresh_deltas", params.fresh_deltas, probes);
  if (params.cached_deltas != nullptr) check_deltas("cached_deltas", params.cached_deltas, probes);
  if (params.fresh_deltas != nullptr || params.cached_deltas != nullptr) {
    check_rope(params.rope, params.fresh.head_size);
  }
  check_not_null("out", params.out, params.num_segments);
  if (params.num_segments > 0) active_kernels().mean_residual(params);
}

}  // namespace phasekv
