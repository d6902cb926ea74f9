#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

template <typename T>
void gather(const GatherBlocksParams& params, Range tokens) {
  const RowsView& rows = params.rows;
  const PagedView& blocks = params.blocks;
  const Arrangement arrangement = arrangement_of(blocks);
  T* targets[kTileTokens<T>];
  for (int64_t at = tokens.begin; at < tokens.end;) {
    const Tile tile = next_tile<T>(params.slots, at, tokens.end, blocks.block_size);
    at += tile.count;
    for (int64_t head = 0; head < rows.heads; ++head) {
      for (int64_t i = 0; i < tile.count; ++i) {
        targets[i] = row_of<T>(rows, tile.begin + i, head);
      }
      load_tile(arrangement, head_of_block<const T>(blocks, tile.block, head), blocks, tile.offset,
                tile.count, targets);
    }
  }
}

}  // namespace

void gather_blocks(const GatherBlocksParams& params) {
  with_bits_type(params.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const RowsView& rows = params.rows;
    const int64_t bytes = 2 * rows.tokens * rows.heads * rows.head_size * int64_t{sizeof(T)};
#pragma omp parallel num_threads(threads_for(bytes))
    gather<T>(params, share_of_thread(rows.tokens));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
