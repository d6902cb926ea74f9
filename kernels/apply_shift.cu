// Rotation, shift and write into the blocks in one pass. Bound by memory: each cached row is read
// once and each row of the blocks is written once.
#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "phasekv/cuda.h"
#include "rotation.cuh"
#include "validate.h"
#include "views.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kUnitsPerThread = 2;
constexpr int64_t kMaxTokensPerBlock = 16;

// What all heads of a token share.
struct TokenToShift {
  int64_t target;  // offset of its slot; kPaddingSlot: not written
  int64_t cached_row;
  int64_t segment;
  float weight;
};

// Shared memory of a block, for `tokens` tokens.
struct Memory {
  TokenToShift* tokens;
  int64_t* deltas;  // of the cached rows
  int64_t* mean_deltas;
  FactorTables factors;
  FactorTables mean_factors;

  static size_t bytes(int64_t tokens, int64_t rotary_dim) {
    return static_cast<size_t>(tokens) *
           (sizeof(TokenToShift) +
            2 * (sizeof(int64_t) + static_cast<size_t>(rotary_dim) * sizeof(float) + sizeof(int)));
  }
  // The tables come first, where vectors are aligned.
  __device__ Memory(unsigned count, unsigned rotary_dim) {
    factors.tables = reinterpret_cast<float*>(dynamic_shared_memory());
    mean_factors.tables = factors.tables + count * rotary_dim;
    tokens = reinterpret_cast<TokenToShift*>(mean_factors.tables + count * rotary_dim);
    deltas = reinterpret_cast<int64_t*>(tokens + count);
    mean_deltas = deltas + count;
    factors.table_of = reinterpret_cast<int*>(mean_deltas + count);
    mean_factors.table_of = factors.table_of + count;
  }
};

// The segment that a token is in: the last that starts at it or before and is not empty.
__device__ inline int64_t segment_of(const int64_t* segment_starts, int64_t num_segments,
                                     int64_t token) {
  int64_t low = 0;
  int64_t high = num_segments;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (segment_starts[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kPairs>
__device__ inline void store_unit(const PagedView& blocks, int64_t offset, const Unit<kPairs>& unit,
                                  const float (&values)[2 * kPairs]) {
  // A wide unit is only chosen where dimensions are adjacent.
  const auto at = [&](unsigned dim) {
    return offset + (kPairs > 1 ? static_cast<int64_t>(dim) : offset_of(blocks.dim, dim));
  };
  store_vector<kPairs>(values, blocks.data, blocks.dtype, at(unit.first));
  if (unit.has_second) {
    store_vector<kPairs>(values + kPairs, blocks.data, blocks.dtype, at(unit.second));
  }
}

// Block b: tokens [b * tokens_per_block, ...), all heads.
template <int kPairs>
__global__ void __launch_bounds__(kThreads)
    apply_shift_kernel(ApplyShiftParams params, int64_t num_tokens, HeadShape shape,
                       unsigned units_per_head, unsigned tokens_per_block) {
  const Memory memory(tokens_per_block, shape.rotary_dim);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int64_t left = num_tokens - first;
  const unsigned tokens = left < tokens_per_block ? static_cast<unsigned>(left) : tokens_per_block;
  for (unsigned i = threadIdx.x; i < tokens; i += kThreads) {
    const int64_t token = first + i;
    const int64_t slot = params.slots[token];
    TokenToShift& to_shift = memory.tokens[i];
    to_shift.target = slot == kPaddingSlot ? kPaddingSlot : offset_of_slot(params.blocks, slot);
    to_shift.cached_row = params.cached_rows[token];
    to_shift.segment = segment_of(params.segment_starts, params.num_segments, token);
    to_shift.weight = params.weights != nullptr ? params.weights[token] : 1.0F;
    memory.deltas[i] = params.deltas != nullptr ? params.deltas[to_shift.segment] : 0;
    memory.mean_deltas[i] = params.mean_deltas != nullptr ? params.mean_deltas[token] : 0;
  }
  __syncthreads();
  if (shape.rotary_dim > 0) {
    memory.factors.fill(params.rope, memory.deltas, tokens);
    memory.mean_factors.fill(params.rope, memory.mean_deltas, tokens);
  }
  __syncthreads();

  const auto heads = static_cast<unsigned>(params.blocks.num_heads);
  const unsigned units_per_token = units_per_head * heads;
  for (unsigned i = threadIdx.x; i < tokens * units_per_token; i += kThreads) {
    const unsigned token = i / units_per_token;
    const TokenToShift& to_shift = memory.tokens[token];
    if (to_shift.target == kPaddingSlot) continue;
    const unsigned in_token = i - token * units_per_token;
    const unsigned head = in_token / units_per_head;
    const Unit<kPairs> unit = unit_of<kPairs>(shape, in_token - head * units_per_head);
    float values[2 * kPairs];
    load_unit(unit, params.cached.data, params.cached.dtype,
              offset_of_row(params.cached, to_shift.cached_row, head), values);
    memory.factors.rotate(shape, token, unit, values);
    if (params.mean != nullptr) {
      float mean[2 * kPairs];
      load_unit(unit, params.mean, DataType::float32,
                (to_shift.segment * heads + head) * shape.head_size, mean);
      memory.mean_factors.rotate(shape, token, unit, mean);
#pragma unroll
      for (int j = 0; j < 2 * kPairs; ++j) values[j] = fmaf(to_shift.weight, mean[j], values[j]);
    }
    store_unit(params.blocks, to_shift.target + head * params.blocks.head_stride, unit, values);
  }
}

template <int kPairs>
void run(const ApplyShiftParams& params, int64_t tokens, const HeadShape& shape, Stream stream) {
  const unsigned units_per_head = units_of<kPairs>(shape);
  const auto tokens_per_block =
      std::clamp<int64_t>(kThreads * kUnitsPerThread / (params.blocks.num_heads * units_per_head),
                          1, kMaxTokensPerBlock);
  launch(apply_shift_kernel<kPairs>, dim3(blocks_for(tokens, tokens_per_block)), kThreads,
         Memory::bytes(tokens_per_block, shape.rotary_dim), stream, params, tokens, shape,
         units_per_head, static_cast<unsigned>(tokens_per_block));
}

}  // namespace

void apply_shift(const ApplyShiftParams& params, int64_t tokens, Stream stream) {
  check_rows("cached", params.cached);
  check_device_blocks("blocks", params.blocks);
  check_same_heads("cached", params.cached, "blocks", params.blocks);
  check_not_null("segment_starts", params.segment_starts, tokens);
  check_not_null("cached_rows", params.cached_rows, tokens);
  check_not_null("slots", params.slots, tokens);
  if (params.mean_deltas != nullptr) check_not_null("mean", params.mean, tokens);
  const bool rotates = params.deltas != nullptr || params.mean_deltas != nullptr;
  if (rotates) check_device_rope(params.rope, params.blocks.head_size);
  if (tokens <= 0) return;
  const HeadShape shape = head_shape_of(params.blocks.head_size, params.rope, rotates);
  const int64_t mean_alignment = common_alignment(reinterpret_cast<uintptr_t>(params.mean));
  const bool is_aligned =
      std::min({alignment_of(params.cached), alignment_of(params.blocks), mean_alignment}) == 16;
  if (is_aligned && fits_wide_units(shape)) {
    run<kWidePairs>(params, tokens, shape, stream);
  } else {
    run<1>(params, tokens, shape, stream);
  }
}

}  // namespace phasekv::cuda
