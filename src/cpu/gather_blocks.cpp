#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/move_transposed.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Gathers the tokens that one thread was given.
template <typename T>
class Gatherer {
 public:
  Gatherer(const GatherBlocksParams& params, bool streams)
      : rows_(params.rows),
        blocks_(params.blocks),
        slots_(params.slots),
        arrangement_(arrangement_of(params.blocks)),
        streams_(streams) {}

  void run(Range tokens) const {
    if (tokens.begin == tokens.end) return;
    Tile tile = tile_at(tokens.begin, tokens.end);
    while (true) {
      const int64_t after = tile.begin + tile.count;
      const bool is_last = after == tokens.end;
      const Tile next = is_last ? Tile{} : tile_at(after, tokens.end);
      if (arrangement_ == Arrangement::token_contiguous) {
        for (int64_t head = 0; head < rows_.heads; ++head) {
          const bool is_last_head = head + 1 == rows_.heads;
          const T* coming = !is_last_head ? first_token(tile, head + 1)
                            : !is_last    ? first_token(next, 0)
                                          : nullptr;
          read_transposed(tile, head, coming);
        }
      } else {
        read_rows(tile);
      }
      if (is_last) break;
      tile = next;
    }
    if (streams_) end_of_streams();
  }

 private:
  Tile tile_at(int64_t begin, int64_t end) const {
    return next_tile(slots_, begin, end, blocks_.block_size, blocks_.block_size);
  }

  const T* first_token(const Tile& tile, int64_t head) const {
    return head_of_block<const T>(blocks_, tile.block, head) + tile.offset;
  }

  void read_transposed(const Tile& tile, int64_t head, const T* coming) const {
    move_transposed(TransposedMove<T>{.from = first_token(tile, head),
                                      .from_stride = blocks_.dim.outer_stride,
                                      .rows = blocks_.head_size,
                                      .columns = tile.count,
                                      .to = row_of<T>(rows_, tile.begin, head),
                                      .to_stride = rows_.token_stride,
                                      .next = coming,
                                      .next_stride = blocks_.dim.outer_stride * int64_t{sizeof(T)},
                                      .streams = streams_});
  }

  // Token after token, so that the rows are written as they lie.
  void read_rows(const Tile& tile) const {
    for (int64_t i = 0; i < tile.count; ++i) {
      const int64_t offset = offset_on(blocks_.token, tile.offset + i);
      for (int64_t head = 0; head < rows_.heads; ++head) {
        const T* token = head_of_block<const T>(blocks_, tile.block, head) + offset;
        T* row = row_of<T>(rows_, tile.begin + i, head);
        if (arrangement_ == Arrangement::dim_contiguous) {
          copy_row(token, blocks_.head_size, row);
        } else {
          for_each_dim(blocks_.dim, blocks_.head_size,
                       [&](int64_t d, int64_t place) { row[d] = token[place]; });
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

void gather_blocks(const GatherBlocksParams& params) {
  with_bits_type(params.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const RowsView& rows = params.rows;
    const int64_t bytes = rows.tokens * rows.heads * rows.head_size * int64_t{sizeof(T)};
    const Gatherer<T> gatherer(params, is_worth_streaming(bytes));
#pragma omp parallel num_threads(threads_for(2 * bytes))
    gatherer.run(share_of_thread(rows.tokens));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
