// Views of memory that somebody else owns. Nothing here allocates, and nothing assumes a layout:
// a layout is strides, counted in elements.
#pragma once

#include <cstdint>

namespace phasekv {

enum class DataType { float32, bfloat16, float16 };

// Bytes of one element.
constexpr int64_t size_of(DataType dtype) { return dtype == DataType::float32 ? 4 : 2; }

// Rows of keys, values or queries: [tokens, heads, head_size]; elements of one head are adjacent.
struct RowsView {
  void* data = nullptr;  // never null unless tokens == 0
  DataType dtype = DataType::float32;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t head_size = 0;
  int64_t token_stride = 0;  // elements between two tokens of one head
  int64_t head_stride = 0;   // elements between two heads of one token
};

// Where index i of one axis of a block lies: tiles of `tile` indices, `outer_stride` apart, whose
// members are `inner_stride` apart. tile == 1 is a plain stride (inner_stride is then unused).
struct AxisStride {
  int64_t tile = 1;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;

  constexpr int64_t offset(int64_t i) const {
    return (i / tile) * outer_stride + (i % tile) * inner_stride;
  }
  constexpr bool is_plain(int64_t stride) const { return tile == 1 && outer_stride == stride; }
};

// The K half or the V half of an engine's paged cache. Element (block, head, token, dim) lies at
//   data + block * block_stride + head * head_stride + token.offset(t) + dim.offset(d),
// all in elements and all 64-bit. Every layout in use is an instance (see layout.h).
struct PagedView {
  void* data = nullptr;
  DataType dtype = DataType::float32;
  int64_t num_blocks = 0;
  int64_t num_heads = 0;   // KV heads
  int64_t block_size = 0;  // tokens in a block
  int64_t head_size = 0;
  int64_t block_stride = 0;
  int64_t head_stride = 0;
  AxisStride token;
  AxisStride dim;
};

// A position in the cache: slot = block * block_size + offset within the block. vLLM's padding is
// -1.
inline constexpr int64_t kPaddingSlot = -1;

}  // namespace phasekv
