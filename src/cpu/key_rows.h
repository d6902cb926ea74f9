// Keys of one head of a request whose dimensions are adjacent, read where they lie.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/rows.h"
#include "cpu/tile.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

inline bool has_rows(const PagedView& key) {
  return arrangement_of(key) == Arrangement::dim_contiguous;
}

// visit(i, row) for i in [begin, end): key first_token + i of the request, [head_size] of float,
// BFloat16 or Float16. Only where has_rows(key).
template <typename Visit>
inline void for_each_row(const PagedView& key, const int32_t* blocks, int64_t head,
                         int64_t first_token, int64_t begin, int64_t end, const Visit& visit) {
  with_type(key.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for (int64_t i = begin; i < end;) {
      const int64_t at = first_token + i;
      const T* block = head_of_block<const T>(key, blocks[at / key.block_size], head);
      int64_t token = at % key.block_size;
      for (; i < end && token < key.block_size; ++i, ++token) {
        visit(i, block + offset_on(key.token, token));
      }
    }
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
