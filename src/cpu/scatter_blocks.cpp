#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/shifted_tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// A shift by nothing.
template <typename T>
void scatter(const ScatterBlocksParams& params, Range tokens, T* row) {
  const RowsView& rows = params.rows;
  const TileWriter<T, T> writer(params.blocks, RopeView{});
  ShiftedTile<T> shifted;
  for (int64_t at = tokens.begin; at < tokens.end;) {
    const Tile tile = next_tile<T>(params.slots, at, tokens.end, params.blocks.block_size);
    at += tile.count;
    if (tile.block == kPaddingSlot) continue;
    shifted.count = tile.count;
    for (int64_t head = 0; head < rows.heads; ++head) {
      for (int64_t i = 0; i < tile.count; ++i) {
        shifted.rows[i].in = row_of<const T>(rows, tile.begin + i, head);
      }
      writer.write(shifted, tile, head, row);
    }
  }
}

}  // namespace

void scatter_blocks(const ScatterBlocksParams& params) {
  with_bits_type(params.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const RowsView& rows = params.rows;
    const int64_t bytes = 2 * rows.tokens * rows.heads * rows.head_size * int64_t{sizeof(T)};
    const int threads = threads_for(bytes);
    const Scratch scratch(threads, rows.head_size);
#pragma omp parallel num_threads(threads)
    scatter<T>(params, share_of_thread(rows.tokens),
               reinterpret_cast<T*>(scratch.part(omp_get_thread_num())));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
