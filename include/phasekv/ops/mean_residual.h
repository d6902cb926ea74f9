// Mean over a segment's probes of (fresh - cached), per head and dimension: the mu of AgentKVShift
// (arXiv 2607.21604, Algorithm 1, step 5).
#pragma once

#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv {

struct MeanResidualParams {
  RowsView fresh;                           // rows of this step
  RowsView cached;                          // rows of the stored chunk(s)
  const int64_t* fresh_rows = nullptr;      // [probes] row of `fresh` of each probe
  const int64_t* cached_rows = nullptr;     // [probes] row of `cached` of the same token
  const int64_t* segment_starts = nullptr;  // [num_segments + 1] into the probe lists
  int64_t num_segments = 0;
  const int64_t* fresh_deltas = nullptr;   // [probes] or null: rotate the fresh row by it first
  const int64_t* cached_deltas = nullptr;  // [probes] or null: rotate the cached row by it first
  RopeView rope;                           // unused when both deltas are null
  float* out = nullptr;                    // [num_segments, heads, head_size]; zeros for no probes
};

// Sums are taken in probe order in float32, so the result does not depend on threads.
void mean_residual(const MeanResidualParams& params);

}  // namespace phasekv
