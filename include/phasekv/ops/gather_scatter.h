// Paged <-> contiguous K or V of a list of slots.
#pragma once

#include "phasekv/tensor.h"

namespace phasekv {

struct GatherBlocksParams {
  PagedView blocks;
  const int64_t* slots = nullptr;  // [rows.tokens], each in [0, num_blocks * block_size)
  RowsView rows;                   // output; same dtype, heads and head size as blocks
};

struct ScatterBlocksParams {
  RowsView rows;                   // input
  const int64_t* slots = nullptr;  // [rows.tokens]; kPaddingSlot is skipped; no slot twice
  PagedView blocks;                // output
};

// Throw invalid_argument on a slot out of range or shapes that disagree; nothing is then written.
void gather_blocks(const GatherBlocksParams& params);
void scatter_blocks(const ScatterBlocksParams& params);

}  // namespace phasekv
