#include "phasekv/ops/gather_scatter.h"

#include "dispatch.h"
#include "validate.h"

namespace phasekv {

void gather_blocks(const GatherBlocksParams& params) {
  check_output_rows("rows", params.rows);
  check_blocks("blocks", params.blocks);
  check_same_heads("rows", params.rows, "blocks", params.blocks);
  check_same_dtype("rows", params.rows.dtype, "blocks", params.blocks.dtype);
  check_slots(params.slots, params.rows.tokens, params.blocks, Padding::refused);
  if (params.rows.tokens > 0) active_kernels().gather_blocks(params);
}

void scatter_blocks(const ScatterBlocksParams& params) {
  check_rows("rows", params.rows);
  check_blocks("blocks", params.blocks);
  check_same_heads("rows", params.rows, "blocks", params.blocks);
  check_same_dtype("rows", params.rows.dtype, "blocks", params.blocks.dtype);
  check_slots(params.slots, params.rows.tokens, params.blocks, Padding::allowed);
  if (params.rows.tokens > 0) active_kernels().scatter_blocks(params);
}

}  // namespace phasekv
