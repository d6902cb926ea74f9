// Rotates cached rows to their new position, adds a weighted mean residual and writes the result
// into the blocks, in one pass over the data:
//   blocks[slot_j] = R(delta_j) cached_j + weight_j * R(mean_delta_j) mean[segment of j]
// (arXiv 2607.21604, Algorithm 1, step 6). Without a mean this is "move and write": full reuse.
#pragma once

#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv {

struct ApplyShiftParams {
  RowsView cached;
  const int64_t* cached_rows = nullptr;     // [tokens] row of `cached` of each token to write
  const int64_t* slots = nullptr;           // [tokens] where it goes; kPaddingSlot is skipped
  const int64_t* segment_starts = nullptr;  // [num_segments + 1] into the token lists
  int64_t num_segments = 0;
  const int64_t* deltas = nullptr;       // [num_segments] or null (values: no rotation)
  RopeView rope;                         // unused when deltas and mean_deltas are null
  const float* mean = nullptr;           // [num_segments, heads, head_size] or null
  const float* weights = nullptr;        // [tokens] or null (all one)
  const int64_t* mean_deltas = nullptr;  // [tokens] or null: rotate the mean by it before adding
  PagedView blocks;                      // output, same heads and head size
};

void apply_shift(const ApplyShiftParams& params);

}  // namespace phasekv
