// Where an element lies in each block layout, as the engines' own sources compute it.
#pragma once

#include <cstdint>
#include <string>

namespace phasekv::oracle {

enum class Half { key, value };

enum class Layout {
  vec,   // keys [head_size][block_size], values [block_size][head_size]
  amx,   // both packed for the tile unit
  rows,  // [block_size][2 * head_size], a token's key beside its value
};

// "vec" and "vec16" are one layout for elements of two sizes.
Layout layout_named(const std::string& name);

// Element (token, dim) within one (block, head).
int64_t offset_in_head(Layout layout, Half half, int64_t block_size, int64_t head_size,
                       int64_t token, int64_t dim);

}  // namespace phasekv::oracle
