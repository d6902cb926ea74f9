#include "phasekv/ops/apply_shift.h"

#include "dispatch.h"
#include "validate.h"

namespace phasekv {

void apply_shift(const ApplyShiftParams& params) {
  check_rows("cached", params.cached);
  check_blocks("blocks", params.blocks);
  check_same_heads("cached", params.cached, "blocks", params.blocks);
  const int64_t tokens = check_segment_starts(params.segment_starts, params.num_segments);
  check_indices("cached_rows", params.cached_rows, tokens, params.cached.tokens);
  check_slots(params.slots, tokens, params.blocks, Padding::allowed);
  if (params.deltas != nullptr) check_deltas("deltas", params.deltas, params.num_segments);
  if (params.mean_deltas != nullptr) {
    check_not_null("mean", params.mean, params.num_segments);
    check_deltas("mean_deltas", params.mean_deltas, tokens);
  }
  if (params.deltas != nullptr || params.mean_deltas != nullptr) {
    check_rope(params.rope, params.blocks.head_size);
  }
  if (tokens > 0) active_kernels().apply_shift(params);
}

}  // namespace phasekv
