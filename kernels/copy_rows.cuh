// Moves rows between blocks and contiguous memory without looking at what they hold. Bound by
// memory: each element is read once and written once, and each slot is read once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elements.cuh"
#include "launch.cuh"
#include "phasekv/tensor.h"
#include "views.cuh"

namespace phasekv::cuda {

enum class Direction { from_blocks, to_blocks };

struct CopyShape {
  int element_bytes;
  unsigned elements_per_unit;  // a unit is what a thread moves at once
  unsigned units_per_head;
  int tokens_per_block;
};

inline constexpr unsigned kCopyThreads = 256;
inline constexpr int kCopyUnitsPerThread = 4;  // that are under way at once

// Block b: tokens [b * tokens_per_block, ...), all heads. Shared memory: an int64 per token.
// kAdjacent: the dimensions of a row lie beside each other in the blocks; else a unit is one
// element.
template <int kUnitBytes, bool kAdjacent, Direction kDirection>
__global__ void __launch_bounds__(kCopyThreads)
    copy_rows_kernel(RowsView rows, PagedView blocks, const int64_t* __restrict__ slots,
                     CopyShape shape) {
  using Unit = Word<kUnitBytes>;
  auto* offsets = reinterpret_cast<int64_t*>(dynamic_shared_memory());
  const int64_t first = static_cast<int64_t>(blockIdx.x) * shape.tokens_per_block;
  const int64_t left = rows.tokens - first;
  const unsigned tokens =
      static_cast<unsigned>(left < shape.tokens_per_block ? left : shape.tokens_per_block);
  for (unsigned i = threadIdx.x; i < tokens; i += kCopyThreads) {
    const int64_t slot = slots[first + i];
    offsets[i] = slot == kPaddingSlot ? kPaddingSlot : offset_of_slot(blocks, slot);
  }
  __syncthreads();

  const unsigned units_per_token = shape.units_per_head * static_cast<unsigned>(rows.heads);
  const unsigned units = tokens * units_per_token;
  constexpr unsigned kStep = kCopyThreads * kCopyUnitsPerThread;
  for (unsigned base = threadIdx.x; base < units; base += kStep) {
    Unit words[kCopyUnitsPerThread];
    Unit* targets[kCopyUnitsPerThread];
#pragma unroll
    for (int i = 0; i < kCopyUnitsPerThread; ++i) {
      targets[i] = nullptr;
      const unsigned unit = base + static_cast<unsigned>(i) * kCopyThreads;
      if (unit >= units) continue;
      const unsigned token = unit / units_per_token;
      if (offsets[token] == kPaddingSlot) continue;
      const unsigned in_token = unit - token * units_per_token;
      const unsigned head = in_token / shape.units_per_head;
      const unsigned dim = (in_token - head * shape.units_per_head) * shape.elements_per_unit;
      const int64_t in_blocks = offsets[token] + head * blocks.head_stride +
                                (kAdjacent ? dim : offset_of(blocks.dim, dim));
      const int64_t in_rows = offset_of_row(rows, first + token, head) + dim;
      auto* block = static_cast<char*>(blocks.data) + in_blocks * shape.element_bytes;
      auto* row = static_cast<char*>(rows.data) + in_rows * shape.element_bytes;
      const bool to_blocks = kDirection == Direction::to_blocks;
      words[i] = *reinterpret_cast<const Unit*>(to_blocks ? row : block);
      targets[i] = reinterpret_cast<Unit*>(to_blocks ? block : row);
    }
#pragma unroll
    for (int i = 0; i < kCopyUnitsPerThread; ++i) {
      if (targets[i] != nullptr) *targets[i] = words[i];
    }
  }
}

template <Direction kDirection>
void copy_rows(const RowsView& rows, const PagedView& blocks, const int64_t* slots, Stream stream) {
  if (rows.tokens == 0) return;
  const int64_t size = size_of(rows.dtype);
  const int64_t unit_bytes =
      std::min({alignment_of(rows), alignment_of(blocks), common_alignment(rows.head_size * size)});
  CopyShape shape{};
  shape.element_bytes = static_cast<int>(size);
  shape.elements_per_unit = static_cast<unsigned>(unit_bytes / size);
  shape.units_per_head = static_cast<unsigned>(rows.head_size / shape.elements_per_unit);
  const int64_t units_per_token = rows.heads * shape.units_per_head;
  shape.tokens_per_block = static_cast<int>(
      std::clamp<int64_t>(kCopyThreads * kCopyUnitsPerThread / units_per_token, 1, 64));
  const auto run = [&](auto kernel) {
    launch(kernel, dim3(blocks_for(rows.tokens, shape.tokens_per_block)), kCopyThreads,
           static_cast<size_t>(shape.tokens_per_block) * sizeof(int64_t), stream, rows, blocks,
           slots, shape);
  };
  if (!blocks.dim.is_plain(1)) {
    return size == 4 ? run(copy_rows_kernel<4, false, kDirection>)
                     : run(copy_rows_kernel<2, false, kDirection>);
  }
  switch (unit_bytes) {
    case 16:
      return run(copy_rows_kernel<16, true, kDirection>);
    case 8:
      return run(copy_rows_kernel<8, true, kDirection>);
    case 4:
      return run(copy_rows_kernel<4, true, kDirection>);
    default:
      return run(copy_rows_kernel<2, true, kDirection>);
  }
}

}  // namespace phasekv::cuda
