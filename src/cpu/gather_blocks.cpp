#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tile.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Dimensions [d, d + dims) and tokens [t, t + columns) of a transposed block.
template <typename T>
void read_square(const T* block, int64_t dim_stride, int64_t d, int dims, int64_t t, int columns,
                 T* const* rows) {
  Vec square[kWidth];
  if (dims == kWidth && columns == kWidth) {
    for (int i = 0; i < kWidth; ++i) square[i] = load(block + (d + i) * dim_stride + t);
    transpose(square);
    for (int i = 0; i < kWidth; ++i) store(rows[t + i] + d, square[i]);
    return;
  }
  for (int i = 0; i < kWidth; ++i) {
    square[i] = i < dims ? load_partial(block + (d + i) * dim_stride + t, columns) : zero();
  }
  transpose(square);
  for (int i = 0; i < columns; ++i) store_partial(rows[t + i] + d, square[i], dims);
}

int lanes_left(int64_t left) { return left < kWidth ? static_cast<int>(left) : kWidth; }

template <typename T>
void read_transposed(const T* block, int64_t dim_stride, int64_t head_size, int64_t tokens,
                     T* const* rows) {
  for (int64_t d = 0; d < head_size; d += kWidth) {
    for (int64_t t = 0; t < tokens; t += kWidth) {
      read_square(block, dim_stride, d, lanes_left(head_size - d), t, lanes_left(tokens - t), rows);
    }
  }
}

template <typename T>
void read_tile(Arrangement arrangement, const PagedView& blocks, const Tile& tile, int64_t head,
               T* const* rows) {
  const T* block = head_of_block<const T>(blocks, tile.block, head);
  if (arrangement == Arrangement::token_contiguous) {
    read_transposed(block + tile.offset, blocks.dim.outer_stride, blocks.head_size, tile.count,
                    rows);
    return;
  }
  for (int64_t i = 0; i < tile.count; ++i) {
    const T* token = block + offset_on(blocks.token, tile.offset + i);
    T* row = rows[i];
    if (arrangement == Arrangement::dim_contiguous) {
      copy_row(token, blocks.head_size, row);
    } else {
      for_each_dim(blocks.dim, blocks.head_size,
                   [&](int64_t d, int64_t offset) { row[d] = token[offset]; });
    }
  }
}

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
      read_tile(arrangement, blocks, tile, head, targets);
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
