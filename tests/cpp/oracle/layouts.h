// Where an element lies in each block layout, as the engines' own sources compute it.
#pragma once

#include <cstdint>
#include <string>

namespace phasekv::oracle {

enum class Half { key, value };

// Element (token, dim) within one (block, head) of the named layout:
//   "vec", "vec16"  keys [head_size][block_size], values [block_size][head_size]
//   "amx"           both packed for the tile unit
//   "rows"          [block_size][2 * head_size], a token's key beside its value
int64_t offset_in_head(const std::string& layout, Half half, int64_t block_size, int64_t head_size,
                       int64_t token, int64_t dim);

}  // namespace phasekv::oracle
