// Moves tiles, some tokens of one head, between rows and the blocks of a paged cache.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/vector.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// Tokens [begin, begin + count) of a list whose slots follow each other in one block.
struct Tile {
  int64_t begin;
  int64_t count;
  int64_t block;   // kPaddingSlot for padding
  int64_t offset;  // of the first token in the block
};

// The most tokens in a tile: as many elements as a cache line has. Tiles do not cross multiples of
// it, so that the tokens of a tile fill lines where a block is stored transposed.
template <typename T>
inline constexpr int64_t kTileTokens = 64 / static_cast<int64_t>(sizeof(T));

template <typename T>
inline Tile next_tile(const int64_t* slots, int64_t begin, int64_t end, int64_t block_size) {
  const int64_t slot = slots[begin];
  if (slot == kPaddingSlot) return {begin, 1, kPaddingSlot, 0};
  const int64_t block = slot / block_size;
  const int64_t offset = slot - block * block_size;
  int64_t most = kTileTokens<T> - offset % kTileTokens<T>;
  if (most > block_size - offset) most = block_size - offset;
  if (most > end - begin) most = end - begin;
  int64_t count = 1;
  while (count < most && slots[begin + count] == slot + count) ++count;
  return {begin, count, block, offset};
}

enum class Arrangement {
  dim_contiguous,    // the dimensions of a token are adjacent
  token_contiguous,  // transposed: the tokens of a dimension are adjacent
  other,
};

inline Arrangement arrangement_of(const PagedView& blocks) {
  if (blocks.dim.tile == 1 && blocks.dim.outer_stride == 1) return Arrangement::dim_contiguous;
  const bool plain_dim = blocks.dim.tile == 1;
  const bool plain_token = blocks.token.tile == 1 && blocks.token.outer_stride == 1;
  return plain_dim && plain_token ? Arrangement::token_contiguous : Arrangement::other;
}

inline int64_t offset_on(const AxisStride& axis, int64_t i) {
  return (i / axis.tile) * axis.outer_stride + (i % axis.tile) * axis.inner_stride;
}

template <typename T>
inline T* head_of_block(const PagedView& blocks, int64_t block, int64_t head) {
  return static_cast<T*>(blocks.data) + block * blocks.block_stride + head * blocks.head_stride;
}

template <typename In, typename Out>
inline void copy_row(const In* in, int64_t head_size, Out* out) {
  int64_t d = 0;
  for (; d + kWidth <= head_size; d += kWidth) store(out + d, load(in + d));
  if (d < head_size) {
    const int rest = static_cast<int>(head_size - d);
    store_partial(out + d, load_partial(in + d, rest), rest);
  }
}

// function(d, offset) for every dimension; the offset is the element's within its token.
template <typename Function>
inline void for_each_dim(const AxisStride& dim, int64_t head_size, const Function& function) {
  for (int64_t begin = 0; begin < head_size; begin += dim.tile) {
    const int64_t left = head_size - begin;
    const int64_t members = left < dim.tile ? left : dim.tile;
    const int64_t start = begin / dim.tile * dim.outer_stride;
    for (int64_t i = 0; i < members; ++i) function(begin + i, start + i * dim.inner_stride);
  }
}

// rows[0 .. tokens) -> columns [0, tokens) of the matrix at `out`, whose rows are dimensions.
template <typename In, typename Out>
inline void store_transposed(const In* const* rows, int64_t tokens, int64_t head_size,
                             int64_t dim_stride, Out* out) {
  for (int64_t d = 0; d < head_size; d += kWidth) {
    const bool all_dims = head_size - d >= kWidth;
    const int dims = all_dims ? kWidth : static_cast<int>(head_size - d);
    for (int64_t t = 0; t < tokens; t += kWidth) {
      const bool all_tokens = tokens - t >= kWidth;
      const int columns = all_tokens ? kWidth : static_cast<int>(tokens - t);
      Vec square[kWidth];
      if (all_dims && all_tokens) {
        for (int i = 0; i < kWidth; ++i) square[i] = load(rows[t + i] + d);
        transpose(square);
        for (int i = 0; i < kWidth; ++i) store(out + (d + i) * dim_stride + t, square[i]);
        continue;
      }
      for (int i = 0; i < kWidth; ++i) {
        square[i] = i < columns ? load_partial(rows[t + i] + d, dims) : zero();
      }
      transpose(square);
      for (int i = 0; i < dims; ++i) {
        store_partial(out + (d + i) * dim_stride + t, square[i], columns);
      }
    }
  }
}

// The reverse of store_transposed.
template <typename In, typename Out>
inline void load_transposed(const In* in, int64_t tokens, int64_t head_size, int64_t dim_stride,
                            Out* const* rows) {
  for (int64_t d = 0; d < head_size; d += kWidth) {
    const bool all_dims = head_size - d >= kWidth;
    const int dims = all_dims ? kWidth : static_cast<int>(head_size - d);
    for (int64_t t = 0; t < tokens; t += kWidth) {
      const bool all_tokens = tokens - t >= kWidth;
      const int columns = all_tokens ? kWidth : static_cast<int>(tokens - t);
      Vec square[kWidth];
      if (all_dims && all_tokens) {
        for (int i = 0; i < kWidth; ++i) square[i] = load(in + (d + i) * dim_stride + t);
        transpose(square);
        for (int i = 0; i < kWidth; ++i) store(rows[t + i] + d, square[i]);
        continue;
      }
      for (int i = 0; i < kWidth; ++i) {
        square[i] = i < dims ? load_partial(in + (d + i) * dim_stride + t, columns) : zero();
      }
      transpose(square);
      for (int i = 0; i < columns; ++i) store_partial(rows[t + i] + d, square[i], dims);
    }
  }
}

// rows[i] -> token `offset` + i of the block whose head starts at `out`.
template <typename In, typename Out>
inline void store_tile(Arrangement arrangement, const In* const* rows, int64_t tokens,
                       const PagedView& blocks, int64_t offset, Out* out) {
  if (arrangement == Arrangement::token_contiguous) {
    store_transposed(rows, tokens, blocks.head_size, blocks.dim.outer_stride, out + offset);
    return;
  }
  for (int64_t i = 0; i < tokens; ++i) {
    const In* row = rows[i];
    Out* token = out + offset_on(blocks.token, offset + i);
    if (arrangement == Arrangement::dim_contiguous) {
      copy_row(row, blocks.head_size, token);
    } else {
      for_each_dim(blocks.dim, blocks.head_size, [&](int64_t d, int64_t at) {
        store_one(token + at, load_one(row + d));
      });
    }
  }
}

// The reverse of store_tile.
template <typename In, typename Out>
inline void load_tile(Arrangement arrangement, const In* in, const PagedView& blocks,
                      int64_t offset, int64_t tokens, Out* const* rows) {
  if (arrangement == Arrangement::token_contiguous) {
    load_transposed(in + offset, tokens, blocks.head_size, blocks.dim.outer_stride, rows);
    return;
  }
  for (int64_t i = 0; i < tokens; ++i) {
    Out* row = rows[i];
    const In* token = in + offset_on(blocks.token, offset + i);
    if (arrangement == Arrangement::dim_contiguous) {
      copy_row(token, blocks.head_size, row);
    } else {
      for_each_dim(blocks.dim, blocks.head_size, [&](int64_t d, int64_t at) {
        store_one(row + d, load_one(token + at));
      });
    }
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
