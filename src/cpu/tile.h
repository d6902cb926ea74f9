// Tiles: some consecutive tokens of one head in one block of a paged cache, and where their
// elements lie.
#pragma once

#include <cstddef>
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

// Does not cross multiples of `boundary` tokens in the block.
inline Tile next_tile(const int64_t* slots, int64_t begin, int64_t end, int64_t block_size,
                      int64_t boundary) {
  const int64_t slot = slots[begin];
  if (slot == kPaddingSlot) return {begin, 1, kPaddingSlot, 0};
  const int64_t block = slot / block_size;
  const int64_t offset = slot - block * block_size;
  int64_t most = boundary - offset % boundary;
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

template <typename T>
inline void copy_row(const T* in, int64_t head_size, T* out) {
  __builtin_memcpy(out, in, static_cast<size_t>(head_size) * sizeof(T));
}

template <typename In, typename Out>
inline void copy_row(const In* in, int64_t head_size, Out* out) {
  for_lanes(0, head_size, [&](auto lanes, int64_t d, int n) {
    store_lanes<lanes.kFull>(out + d, load_lanes<lanes.kFull>(in + d, n), n);
  });
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

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
