// Keys as directions: their norms, the sum of the keys of unit length, and products with one
// vector. Bound by memory: each reads the keys once.
#pragma once

#include <cstdint>

#include "elements.cuh"
#include "key_tile.cuh"
#include "launch.cuh"
#include "platform.cuh"
#include "views.cuh"
#include "warp.cuh"
#include "workspace.cuh"

namespace phasekv::cuda {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarpSize;
inline constexpr int kKeysPerWarp = 8;
inline constexpr int kChunkKeys = kWarps * kKeysPerWarp;  // of a block
inline constexpr int kDimsPerLane = 8;
inline constexpr int kMostDims = kDimsPerLane * kWarpSize;
static_assert(kMostDims == kMaxKeyTileHeadSize);
inline constexpr float kNormAddend = 1e-8F;

// A warp has a row; lane l its dimensions dimension_of(0), ..., dimension_of(kDimsPerLane - 1), and
// zeros for those beyond the head.
__device__ inline int dimension_of(bool is_aligned, int i) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  return is_aligned ? lane * kDimsPerLane + i : lane + i * kWarpSize;
}

__device__ inline void load_row(const KeyRows& rows, int key, float (&values)[kDimsPerLane]) {
  const auto head_size = static_cast<int>(rows.view->head_size);
#pragma unroll
  for (float& x : values) x = 0.0F;
  if (rows.is_aligned) {
    const int dim = dimension_of(true, 0);
    if (dim < head_size) {
      load_vector<kDimsPerLane>(rows.data(), rows.dtype(), rows.offset(key) + dim, values);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kDimsPerLane; ++i) {
    const int dim = dimension_of(false, i);
    if (dim < head_size) {
      values[i] =
          load_element(rows.data(), rows.dtype(), rows.offset(key) + rows.offset_in_row(dim));
    }
  }
}

// use(key, row) by every lane of a warp, for those of the block's keys, from `first_key` on, that
// are the warp's.
template <typename Use>
__device__ inline void for_each_row(const KeyRows& rows, int first_key, const Use& use) {
  first_key += static_cast<int>(threadIdx.x) / kWarpSize * kKeysPerWarp;
  for (int i = 0; i < kKeysPerWarp; ++i) {
    const int key = first_key + i;
    if (!rows.has(key)) break;  // the whole warp
    float values[kDimsPerLane];
    load_row(rows, key, values);
    use(key, values);
  }
}

// What all launches of an op over the keys of a request need: its part of the workspace, whether
// rows are read as vectors, and grids with a block for each chunk of each KV head, or for each
// head.
template <typename Memory>
struct DirectionLaunch {
  Memory memory;
  bool is_aligned;
  dim3 chunks;
  dim3 heads;
};

// take(params, allotment) divides the workspace, of which `needed_by` says the size.
template <typename Params, typename Memory>
DirectionLaunch<Memory> prepare_launch(const Params& params, const Workspace& workspace,
                                       Memory (*take)(const Params&, Allotment&),
                                       const char* needed_by) {
  Allotment allotment(workspace);
  const Memory memory = take(params, allotment);
  allotment.check(needed_by);
  const auto heads = static_cast<unsigned>(params.key.num_heads);
  return {memory, has_aligned_rows(params.key), dim3(blocks_for(params.tokens, kChunkKeys), heads),
          dim3(heads)};
}

struct DirectionMemory {
  float sums[kWarps][kMostDims];
};

// For the block's kChunkKeys keys from `first_key` on: inverse_norms[key] = 1 / (norm +
// kNormAddend), and sum[dim] of the keys times that; note(key) by one thread of each key. A barrier
// passes in between.
template <typename Note>
__device__ inline void measure_directions(const KeyRows& rows, int first_key,
                                          DirectionMemory& shared, float* inverse_norms, float* sum,
                                          const Note& note) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  float sums[kDimsPerLane] = {};
  for_each_row(rows, first_key, [&](int key, const float(&values)[kDimsPerLane]) {
    float squares = 0.0F;
#pragma unroll
    for (const float x : values) squares = fmaf(x, x, squares);
    const float inverse = 1.0F / (sqrtf(warp_sum(squares)) + kNormAddend);
#pragma unroll
    for (int i = 0; i < kDimsPerLane; ++i) sums[i] = fmaf(values[i], inverse, sums[i]);
    if (threadIdx.x % kWarpSize != 0) return;
    inverse_norms[key] = inverse;
    note(key);
  });
#pragma unroll
  for (int i = 0; i < kDimsPerLane; ++i) {
    shared.sums[warp][dimension_of(rows.is_aligned, i)] = sums[i];
  }
  __syncthreads();
  for (int dim = static_cast<int>(threadIdx.x); dim < rows.view->head_size; dim += kThreads) {
    float total = 0.0F;
    for (int i = 0; i < kWarps; ++i) total += shared.sums[i][dim];
    sum[dim] = total;
  }
}

// use(key, product of the key and `vector` [head_size]) by one thread of each of the block's keys
// from `first_key` on.
template <typename Use>
__device__ inline void multiply_directions(const KeyRows& rows, int first_key, const float* vector,
                                           const Use& use) {
  float factors[kDimsPerLane];
#pragma unroll
  for (int i = 0; i < kDimsPerLane; ++i) {
    const int dim = dimension_of(rows.is_aligned, i);
    factors[i] = dim < rows.view->head_size ? vector[dim] : 0.0F;
  }
  for_each_row(rows, first_key, [&](int key, const float(&values)[kDimsPerLane]) {
    float product = 0.0F;
#pragma unroll
    for (int i = 0; i < kDimsPerLane; ++i) product = fmaf(values[i], factors[i], product);
    product = warp_sum(product);
    if (threadIdx.x % kWarpSize == 0) use(key, product);
  });
}

}  // namespace phasekv::cuda
