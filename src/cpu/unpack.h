// Brings parts of a block into plain float32 matrices, whatever its layout.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/rows.h"
#include "cpu/tile.h"
#include "cpu/vector.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// Tokens handled at a time: their keys and values (2 * 64 * head_size floats) stay in the caches
// closest to the core while every query of a task passes over them.
inline constexpr int kChunkTokens = 64;

// AMX packs pairs: two neighbours on the axis `rows` lie together, and beside each pair lies that
// of the next index on the axis `columns`, as far as its tile goes.
inline bool is_packed_in_pairs(const AxisStride& rows, const AxisStride& columns) {
  return rows.tile == 2 && rows.inner_stride == 1 && columns.inner_stride == 2 &&
         columns.tile % kWidth == 0;
}

// A part of a block as the matrix to[num_rows][num_columns], from `row` and `column` on.
template <typename T>
inline void unpack_matrix(const T* block, const AxisStride& rows, int64_t row, int num_rows,
                          const AxisStride& columns, int64_t column, int num_columns, float* to,
                          int64_t to_stride) {
  for (int i = 0; i < num_rows; ++i) {
    const T* p = block + offset_on(rows, row + i);
    for (int j = 0; j < num_columns; ++j) {
      to[i * to_stride + j] = load_one(p + offset_on(columns, column + j));
    }
  }
}

inline void unpack_matrix(const BFloat16* block, const AxisStride& rows, int64_t row, int num_rows,
                          const AxisStride& columns, int64_t column, int num_columns, float* to,
                          int64_t to_stride) {
  const bool whole_pairs = row % 2 == 0 && num_rows % 2 == 0;
  const bool whole_vectors = column % kWidth == 0 && num_columns % kWidth == 0;
  if (!is_packed_in_pairs(rows, columns) || !whole_pairs || !whole_vectors) {
    return unpack_matrix<BFloat16>(block, rows, row, num_rows, columns, column, num_columns, to,
                                   to_stride);
  }
  for (int i = 0; i < num_rows; i += 2) {
    const BFloat16* p = block + offset_on(rows, row + i);
    for (int j = 0; j < num_columns; j += kWidth) {
      Vec first;
      Vec second;
      load_pairs(p + offset_on(columns, column + j), &first, &second);
      store(to + i * to_stride + j, first);
      store(to + (i + 1) * to_stride + j, second);
    }
  }
}

// A square of to[column][row] = from[row][column]: all of it (kFull) or so many rows and columns.
template <bool kFull, typename T>
inline void unpack_square(const T* from, int64_t from_stride, int rows, int columns, float* to,
                          int64_t to_stride) {
  Vec square[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    const bool exists = kFull || i < rows;
    square[i] = exists ? load_lanes<kFull>(from + i * from_stride, columns) : zero();
  }
  transpose(square);
  for (int i = 0; i < (kFull ? kWidth : columns); ++i) {
    store_lanes<kFull>(to + i * to_stride, square[i], rows);
  }
}

// to[column][row] = from[row][column], for rows of adjacent elements.
template <typename T>
inline void unpack_transposed(const T* from, int64_t from_stride, int num_rows, int num_columns,
                              float* to, int64_t to_stride) {
  for (int row = 0; row < num_rows; row += kWidth) {
    const int rows = num_rows - row < kWidth ? num_rows - row : kWidth;
    for (int column = 0; column < num_columns; column += kWidth) {
      const int columns = num_columns - column < kWidth ? num_columns - column : kWidth;
      const T* square = from + row * from_stride + column;
      float* unpacked = to + column * to_stride + row;
      if (rows == kWidth && columns == kWidth) {
        unpack_square<true>(square, from_stride, rows, columns, unpacked, to_stride);
      } else {
        unpack_square<false>(square, from_stride, rows, columns, unpacked, to_stride);
      }
    }
  }
}

// Tokens [token, token + count) of a head of a block as to[dim][0 .. count), dimensions
// kChunkTokens apart.
template <typename T>
inline void unpack_keys(const PagedView& key, const T* block, int64_t token, int count, float* to) {
  const int head_size = static_cast<int>(key.head_size);
  const Arrangement arrangement = arrangement_of(key);
  if (arrangement == Arrangement::token_contiguous) {
    for (int64_t d = 0; d < head_size; ++d) {
      copy_row(block + d * key.dim.outer_stride + token, count, to + d * kChunkTokens);
    }
  } else if (arrangement == Arrangement::dim_contiguous && key.token.tile == 1) {
    unpack_transposed(block + token * key.token.outer_stride, key.token.outer_stride, count,
                      head_size, to, kChunkTokens);
  } else {
    unpack_matrix(block, key.dim, 0, head_size, key.token, token, count, to, kChunkTokens);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
