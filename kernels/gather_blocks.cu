#include "copy_rows.cuh"
#include "phasekv/cuda.h"
#include "validate.h"

namespace phasekv::cuda {

void gather_blocks(const GatherBlocksParams& params, Stream stream) {
  check_output_rows("rows", params.rows);
  check_device_blocks("blocks", params.blocks);
  check_same_heads("rows", params.rows, "blocks", params.blocks);
  check_same_dtype("rows", params.rows.dtype, "blocks", params.blocks.dtype);
  check_not_null("slots", params.slots, params.rows.tokens);
  copy_rows<Direction::from_blocks>(params.rows, params.blocks, params.slots, stream);
}

}  // namespace phasekv::cuda
