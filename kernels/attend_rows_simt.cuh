// One tile of attend_rows in float32 arithmetic: for float32, for a query of another dtype than the
// keys, and for whatever else the tensor cores do not take.
#pragma once

#include <cstdint>

#include "attend_rows_plan.cuh"
#include "elements.cuh"
#include "phasekv/ops/attend_rows.h"
#include "platform.cuh"
#include "softmax.cuh"
#include "views.cuh"

namespace phasekv::cuda {

inline constexpr int kSimtThreads = 128;
inline constexpr int kSimtVectors = 32;
inline constexpr int kSimtColumns = 16;  // threads that share 4 query vectors
inline constexpr int kSimtRows = 4;

// Keys that are taken at a time: so many that devices with the least shared memory, 99 KiB a block
// (compute capability 8.6, 8.9 and 12.0), have room for them.
constexpr int simt_keys(int dims) { return dims <= 128 ? 32 : 16; }

template <int kDims>
struct SimtMemory {
  static constexpr int kStride = kDims + 1;
  static constexpr int kKeys = simt_keys(kDims);
  static constexpr int kWeightStride = kKeys + 1;

  float queries[kSimtVectors * kStride];
  float keys[kKeys * kStride];
  float values[kKeys * kStride];
  float weights[kSimtVectors * kWeightStride];
  int limits[kSimtVectors];
};

template <int kDims>
__device__ inline void load_simt_tile(const PagedView& view, const int32_t* table, int64_t kv_head,
                                      int first, int end, float* tile) {
  const int head_size = static_cast<int>(view.head_size);
  const auto block_size = static_cast<uint32_t>(view.block_size);
  for (int i = static_cast<int>(threadIdx.x); i < SimtMemory<kDims>::kKeys * head_size;
       i += kSimtThreads) {
    const int key = i / head_size;
    const int dim = i - key * head_size;
    float x = 0.0F;
    if (first + key < end) {
      const uint32_t entry = static_cast<uint32_t>(first + key) / block_size;
      const uint32_t token = static_cast<uint32_t>(first + key) - entry * block_size;
      x = load_element(view.data, view.dtype,
                       table[entry] * view.block_stride + kv_head * view.head_stride +
                           offset_of(view.token, token) +
                           offset_of(view.dim, static_cast<uint32_t>(dim)));
    }
    tile[key * SimtMemory<kDims>::kStride + dim] = x;
  }
}

// Over the 16 threads that share query vectors: half a warp.
__device__ inline float half_warp_max(float x) {
#pragma unroll
  for (int distance = kSimtColumns / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

__device__ inline float half_warp_sum(float x) {
#pragma unroll
  for (int distance = kSimtColumns / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

// Block (row tile, KV head and head tile, part). Thread (c, r) takes query vectors 4 r .. 4 r + 3,
// of their scores those of keys c, c + 16, ..., and of their outputs dimensions c, c + 16, ...
template <int kDims>
__global__ void __launch_bounds__(kSimtThreads)
    attend_simt_kernel(AttendRowsParams params, AttendGrid grid) {
  using Memory = SimtMemory<kDims>;
  constexpr int kStride = Memory::kStride;
  constexpr int kKeys = Memory::kKeys;
  constexpr int kKeysPerThread = kKeys / kSimtColumns;
  constexpr int kWeightStride = Memory::kWeightStride;
  constexpr int kDimsPerThread = kDims / kSimtColumns;
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared_memory());
  const TileRows rows(grid, params.num_requests, blockIdx.x);
  if (rows.count <= 0) return;  // the whole block
  const int64_t kv_head = blockIdx.y / static_cast<unsigned>(grid.head_tiles);
  const int first_head =
      static_cast<int>(blockIdx.y % static_cast<unsigned>(grid.head_tiles)) * grid.heads_per_tile;
  const int head_size = static_cast<int>(params.key.head_size);
  const int vectors = rows.count * grid.heads_per_tile;
  const auto row_of = [&](int vector) { return rows.first + vector / grid.heads_per_tile; };
  const auto head_of = [&](int vector) { return first_head + vector % grid.heads_per_tile; };
  const auto exists = [&](int vector) { return vector < vectors && head_of(vector) < grid.group; };

  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kSimtVectors) {
    memory.limits[thread] =
        exists(thread) ? static_cast<int>(params.row_limits[row_of(thread)]) : 0;
  }
  for (int i = thread; i < kSimtVectors * head_size; i += kSimtThreads) {
    const int vector = i / head_size;
    const int dim = i - vector * head_size;
    float x = 0.0F;
    if (exists(vector)) {
      const int64_t query_head = kv_head * grid.group + head_of(vector);
      x = load_element(params.query.data, params.query.dtype,
                       offset_of_row(params.query, row_of(vector), query_head) + dim);
    }
    memory.queries[vector * kStride + dim] = x;
  }
  __syncthreads();
  int most_keys = 0;
  for (int vector = 0; vector < kSimtVectors; ++vector) {
    most_keys = memory.limits[vector] > most_keys ? memory.limits[vector] : most_keys;
  }
  const int64_t part_begin = blockIdx.z * grid.keys_per_part;
  const int begin = static_cast<int>(part_begin < most_keys ? part_begin : most_keys);
  const int64_t part_end = part_begin + grid.keys_per_part;
  const int end = static_cast<int>(part_end < most_keys ? part_end : most_keys);
  const int32_t* table = params.block_table + rows.request * params.block_table_stride;

  const int column = thread % kSimtColumns;
  const int first_vector = thread / kSimtColumns * kSimtRows;
  const float* queries = memory.queries + first_vector * kStride;
  float output[kSimtRows][kDimsPerThread] = {};
  float maximum[kSimtRows];
  float sum[kSimtRows] = {};  // of this thread's weights
#pragma unroll
  for (float& x : maximum) x = -INFINITY;
  for (int first = begin; first < end; first += kKeys) {
    load_simt_tile<kDims>(params.key, table, kv_head, first, end, memory.keys);
    load_simt_tile<kDims>(params.value, table, kv_head, first, end, memory.values);
    __syncthreads();
    float scores[kSimtRows][kKeysPerThread] = {};
    for (int d = 0; d < head_size; ++d) {
      float own_keys[kKeysPerThread];
#pragma unroll
      for (int k = 0; k < kKeysPerThread; ++k) {
        own_keys[k] = memory.keys[(column + k * kSimtColumns) * kStride + d];
      }
#pragma unroll
      for (int r = 0; r < kSimtRows; ++r) {
        const float query = queries[r * kStride + d];
#pragma unroll
        for (int k = 0; k < kKeysPerThread; ++k) {
          scores[r][k] = fmaf(query, own_keys[k], scores[r][k]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kSimtRows; ++r) {
      const int limit = memory.limits[first_vector + r];
      float most = maximum[r];
#pragma unroll
      for (int k = 0; k < kKeysPerThread; ++k) {
        const int at = first + column + k * kSimtColumns;
        scores[r][k] = at < limit ? scores[r][k] * params.scale : -INFINITY;
        most = fmaxf(most, scores[r][k]);
      }
      most = half_warp_max(most);
      // Without a key yet, anything finite: no difference of infinities.
      const float base = most == -INFINITY ? 0.0F : most;
      const float rescale = expf(maximum[r] - base);
      maximum[r] = most;
      float added = 0.0F;
#pragma unroll
      for (int k = 0; k < kKeysPerThread; ++k) {
        const float weight = expf(scores[r][k] - base);
        memory.weights[(first_vector + r) * kWeightStride + column + k * kSimtColumns] = weight;
        added += weight;
      }
      sum[r] = fmaf(sum[r], rescale, added);
#pragma unroll
      for (float& x : output[r]) x *= rescale;
    }
    __syncwarp();  // a vector's weights come from its own half of the warp
    for (int k = 0; k < kKeys; ++k) {
      float weights[kSimtRows];
#pragma unroll
      for (int r = 0; r < kSimtRows; ++r) {
        weights[r] = memory.weights[(first_vector + r) * kWeightStride + k];
      }
#pragma unroll
      for (int j = 0; j < kDimsPerThread; ++j) {
        const int dim = column + j * kSimtColumns;
        if (dim >= head_size) break;
        const float value = memory.values[k * kStride + dim];
#pragma unroll
        for (int r = 0; r < kSimtRows; ++r) {
          // A value that a vector does not attend must not spoil it, whatever it is.
          if (weights[r] != 0.0F) output[r][j] = fmaf(weights[r], value, output[r][j]);
        }
      }
    }
    __syncthreads();  // nobody needs this tile
  }

#pragma unroll
  for (int r = 0; r < kSimtRows; ++r) {
    const float total = half_warp_sum(sum[r]);
    const int vector = first_vector + r;
    if (!exists(vector)) continue;
    const int64_t query_head = kv_head * grid.group + head_of(vector);
    const int64_t partial =
        (row_of(vector) * params.query.heads + query_head) * grid.parts + blockIdx.z;
    const int64_t out = offset_of_row(params.out, row_of(vector), query_head);
    const float share = total == 0.0F ? 0.0F : 1.0F / total;
#pragma unroll
    for (int j = 0; j < kDimsPerThread; ++j) {
      const int dim = column + j * kSimtColumns;
      if (dim >= head_size) break;
      if (grid.parts > 1) {
        grid.partial_outputs[partial * kDims + dim] = output[r][j];
      } else {
        const float x = output[r][j] * share;
        store_vector<1>(&x, params.out.data, params.out.dtype, out + dim);
      }
    }
    if (grid.parts > 1 && column == 0) {
      grid.partial_sums[2 * partial] = maximum[r] * kLog2E;
      grid.partial_sums[2 * partial + 1] = total;
    }
  }
}

}  // namespace phasekv::cuda
