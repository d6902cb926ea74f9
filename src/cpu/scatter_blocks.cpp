#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/move_transposed.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Scatters the tokens that one thread was given.
template <typename T>
class Scatterer {
 public:
  Scatterer(const ScatterBlocksParams& params, bool streams)
      : rows_(params.rows),
        blocks_(params.blocks),
        slots_(params.slots),
        arrangement_(arrangement_of(params.blocks)),
        streams_(streams) {}

  void run(Range tokens) const {
    for (int64_t at = tokens.begin; at < tokens.end;) {
      const Tile tile = next_tile(slots_, at, tokens.end, blocks_.block_size, blocks_.block_size);
      at += tile.count;
      if (tile.block == kPaddingSlot) continue;
      if (arrangement_ == Arrangement::token_contiguous) {
        for (int64_t head = 0; head < rows_.heads; ++head) {
          const bool is_last_head = head + 1 == rows_.heads;
          const T* coming = !is_last_head     ? row(tile.begin, head + 1)
                            : at < tokens.end ? row(at, 0)
                                              : nullptr;
          write_transposed(tile, head, coming);
        }
      } else {
        write_rows(tile);
      }
    }
    if (streams_) end_of_streams();
  }

 private:
  const T* row(int64_t token, int64_t head) const { return row_of<const T>(rows_, token, head); }

  void write_transposed(const Tile& tile, int64_t head, const T* coming) const {
    move_transposed(
        TransposedMove<T>{.from = row(tile.begin, head),
                          .from_stride = rows_.token_stride,
                          .rows = tile.count,
                          .columns = blocks_.head_size,
                          .to = head_of_block<T>(blocks_, tile.block, head) + tile.offset,
                          .to_stride = blocks_.dim.outer_stride,
                          .next = coming,
                          .next_stride = rows_.token_stride * int64_t{sizeof(T)},
                          .streams = streams_});
  }

  // Token after token, so that the rows are read as they lie.
  void write_rows(const Tile& tile) const {
    for (int64_t i = 0; i < tile.count; ++i) {
      const int64_t offset = offset_on(blocks_.token, tile.offset + i);
      for (int64_t head = 0; head < rows_.heads; ++head) {
        const T* from = row(tile.begin + i, head);
        T* token = head_of_block<T>(blocks_, tile.block, head) + offset;
        if (arrangement_ == Arrangement::dim_contiguous) {
          copy_row(from, blocks_.head_size, token);
        } else {
          for_each_dim(blocks_.dim, blocks_.head_size,
                       [&](int64_t d, int64_t place) { token[place] = from[d]; });
        }
      }
    }
  }

  const RowsView& rows_;
  const PagedView& blocks_;
  const int64_t* slots_;
  Arrangement arrangement_;
  bool streams_;
};

}  // namespace

void scatter_blocks(const ScatterBlocksParams& params) {
  with_bits_type(params.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const RowsView& rows = params.rows;
    const int64_t bytes = rows.tokens * rows.heads * rows.head_size * int64_t{sizeof(T)};
    const Scatterer<T> scatterer(params, is_worth_streaming(bytes));
#pragma omp parallel num_threads(threads_for(2 * bytes))
    scatterer.run(share_of_thread(rows.tokens));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
