// Addresses of rows and blocks, and what their strides allow.
#pragma once

#include <cstdint>
#include <string>

#include "phasekv/rope.h"
#include "phasekv/tensor.h"
#include "platform.cuh"
#include "validate.h"

namespace phasekv::cuda {

// Of dimension 0.
__device__ inline int64_t offset_of_row(const RowsView& rows, int64_t token, int64_t head) {
  return token * rows.token_stride + head * rows.head_stride;
}

// Indices within a block are of 32 bits (check_device_blocks).
__device__ inline int64_t offset_of(const AxisStride& axis, uint32_t i) {
  if (axis.tile == 1) return i * axis.outer_stride;
  const uint32_t tile = i / static_cast<uint32_t>(axis.tile);
  const uint32_t inner = i - tile * static_cast<uint32_t>(axis.tile);
  return tile * axis.outer_stride + inner * axis.inner_stride;
}

// Of element (token, head 0, dimension 0) of a slot.
__device__ inline int64_t offset_of_slot(const PagedView& blocks, int64_t slot) {
  const int64_t block = slot / blocks.block_size;
  const auto token = static_cast<uint32_t>(slot - block * blocks.block_size);
  return block * blocks.block_stride + offset_of(blocks.token, token);
}

inline constexpr int64_t kMaxInBlock = 0x7FFFFFFF;

// The largest power of two of bytes, up to 16, that all of the given numbers are multiples of.
template <typename... Bytes>
int64_t common_alignment(Bytes... bytes) {
  const uint64_t all = (uint64_t{16} | ... | static_cast<uint64_t>(bytes));
  return static_cast<int64_t>(all & (~all + 1));
}

// What every row of a head is aligned to, in bytes, up to 16.
inline int64_t alignment_of(const RowsView& rows) {
  const int64_t size = size_of(rows.dtype);
  return common_alignment(reinterpret_cast<uintptr_t>(rows.data), rows.token_stride * size,
                          rows.head_stride * size);
}

// The same for blocks; one element if the dimensions of a row are not adjacent.
inline int64_t alignment_of(const PagedView& blocks) {
  const int64_t size = size_of(blocks.dtype);
  if (!blocks.dim.is_plain(1)) return size;
  const int64_t inner = blocks.token.tile == 1 ? 0 : blocks.token.inner_stride;
  return common_alignment(reinterpret_cast<uintptr_t>(blocks.data), blocks.block_stride * size,
                          blocks.head_stride * size, blocks.token.outer_stride * size,
                          inner * size);
}

// check_blocks, and that a block is no larger than offset_of can tell.
inline void check_device_blocks(const char* argument, const PagedView& blocks) {
  check_blocks(argument, blocks);
  const auto check = [argument](const char* member, int64_t value) {
    if (value <= kMaxInBlock) return;
    refuse(std::string(argument) + member, value, "at most " + std::to_string(kMaxInBlock));
  };
  check(".block_size", blocks.block_size);
  check(".head_size", blocks.head_size);
  check(".token.tile", blocks.token.tile);
  check(".dim.tile", blocks.dim.tile);
}

// Keys [first_token, first_token + tokens) of a request, counted by numbers of 32 bits: a tile
// beyond the last of them too.
inline void check_device_key_range(const PagedView& key, const int32_t* block_table,
                                   int64_t first_token, int64_t tokens) {
  constexpr int64_t kMostTokens = kMaxInBlock - 256;
  check_device_blocks("key", key);
  if (first_token < 0 || first_token > kMostTokens) {
    refuse("first_token", first_token, "in [0, " + std::to_string(kMostTokens) + "]");
  }
  if (tokens < 0 || tokens > kMostTokens - first_token) {
    refuse("tokens", tokens, "in [0, " + std::to_string(kMostTokens - first_token) + "]");
  }
  check_not_null("block_table", block_table, tokens);
}

// The frequencies themselves are on the device.
inline void check_device_rope(const RopeView& rope, int64_t head_size) {
  check_rotary_dim("rope.rotary_dim", rope.rotary_dim, head_size);
  check_not_null("rope.frequencies", rope.frequencies, rope.rotary_dim / 2);
}

}  // namespace phasekv::cuda
