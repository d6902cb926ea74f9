// The block layouts of the engines we know, by name, as strides.
#pragma once

#include <string_view>

#include "phasekv/tensor.h"

namespace phasekv {

struct PagedKV {
  PagedView key;
  PagedView value;
};

// Views of an engine's cache tensor [num_blocks, num_kv_heads, block_size, 2 * head_size], whose
// blocks and heads lie `block_stride` and `head_stride` elements apart and where the
// 2 * block_size * head_size elements of one (block, head) are adjacent. `name` says how those are
// arranged:
//   "vec", "vec16"  vLLM's CPU backend: all K first, transposed [head_size][block_size]; then all
//   V,
//                   [block_size][head_size]
//   "amx"           vLLM's CPU backend with AMX: K, then V, both packed in pairs for the tile unit
//                   (block_size a multiple of 32, head_size a multiple of 32, bfloat16 only)
// Throws unsupported for any other name; invalid_argument for impossible sizes.
PagedKV cpu_paged_kv(std::string_view name, void* data, DataType dtype, int64_t num_blocks,
                     int64_t num_kv_heads, int64_t block_size, int64_t head_size,
                     int64_t block_stride, int64_t head_stride);

}  // namespace phasekv
