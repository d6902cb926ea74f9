// One tile of attend_rows on the tensor cores: queries, keys and values of 16 bits.
//
// S = Q K^T is exact but for its float32 sums. The weights P of the softmax are float32 too, and
// are brought to the tensor cores as the sum of two 16-bit numbers: O = P V then is as good as in
// float32, for half as many multiplications again as with rounded weights.
#pragma once

#include <cstdint>

#include "attend_rows_plan.cuh"
#include "elements.cuh"
#include "phasekv/ops/attend_rows.h"
#include "platform.cuh"
#include "softmax.cuh"
#include "views.cuh"
#include "warp.cuh"

namespace phasekv::cuda {

inline constexpr int kTileWarps = 4;
inline constexpr int kTileThreads = kTileWarps * kWarpSize;
inline constexpr int kVectorsPerWarp = 16;
inline constexpr int kTileVectors = kTileWarps * kVectorsPerWarp;

// What is known of the strides, so that 16 bytes can be moved at once.
struct TileAlignment {
  bool query;
  bool key;
  bool value;
  bool out;
};

// kDims: the head size, rounded up; what is beyond it is zeros. kKeys are taken at a time.
template <typename T, int kDims, int kKeys>
struct TileMemory {
  static constexpr int kStride = kDims + 8;  // so that 8 rows of a matrix lie in different banks

  T queries[kTileVectors * kStride];
  T keys[kKeys * kStride];
  T values[kKeys * kStride];
  int limits[kTileVectors];
};

// Where keys or values of one request and KV head lie.
template <typename T>
struct PagedRows {
  const PagedView* view;
  const T* head;  // of the KV head in block 0
  const int32_t* table;
  uint32_t block_size;

  __device__ PagedRows(const PagedView& paged, const int32_t* block_table, int64_t kv_head)
      : view(&paged),
        head(static_cast<const T*>(paged.data) + kv_head * paged.head_stride),
        table(block_table),
        block_size(static_cast<uint32_t>(paged.block_size)) {}

  __device__ const T* row(uint32_t key) const {
    const uint32_t entry = key / block_size;
    return head + table[entry] * view->block_stride +
           offset_of(view->token, key - entry * block_size);
  }
};

// Brings keys [first, first + kKeys) into `tile`; those from `end` on become zeros, as do the
// dimensions beyond the head. They are there after a wait and a barrier.
template <int kDims, int kKeys, int kStride, typename T>
__device__ inline void load_tile(const PagedRows<T>& rows, int head_size, bool is_aligned,
                                 int first, int end, T* tile) {
  if (is_aligned) {
    constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
    constexpr int kChunks = kDims / kChunk;
    for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kTileThreads) {
      const int key = i / kChunks;
      const int dim = i % kChunks * kChunk;
      const bool exists = first + key < end && dim < head_size;
      const T* from = exists ? rows.row(static_cast<uint32_t>(first + key)) + dim : rows.head;
      copy_async_16(tile + key * kStride + dim, from, exists);
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < kKeys * kDims; i += kTileThreads) {
      const int key = i / kDims;
      const int dim = i % kDims;
      const bool exists = first + key < end && dim < head_size;
      tile[key * kStride + dim] =
          exists ? rows.row(static_cast<uint32_t>(
                       first + key))[offset_of(rows.view->dim, static_cast<uint32_t>(dim))]
                 : from_float<T>(0.0F);
    }
  }
  commit_async_copies();
}

// Two float32 numbers as a register of 16-bit ones, and what their rounding lost as another.
struct SplitPair {
  uint32_t high;
  uint32_t low;
};

template <typename T>
__device__ inline uint32_t pack(T first, T second) {
  const T both[2] = {first, second};
  uint32_t bits;
  memcpy(&bits, both, sizeof bits);
  return bits;
}

template <typename T>
__device__ inline SplitPair split(float x, float y) {
  const T high_x = from_float<T>(x);
  const T high_y = from_float<T>(y);
  return {pack(high_x, high_y),
          pack(from_float<T>(x - to_float(high_x)), from_float<T>(y - to_float(high_y)))};
}

// What a warp keeps of its 16 query vectors while it passes over the keys. Lane l holds, of vectors
// l / 4 (index 0) and l / 4 + 8 (index 1), the columns that mma gives it.
template <typename T, int kDims, int kKeys>
struct WarpTile {
  using Memory = TileMemory<T, kDims, kKeys>;
  static constexpr int kStride = Memory::kStride;

  float output[kDims / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};  // of the scores so far, in units of log 2
  float sum[2] = {};                          // of this lane's weights

  // Scores of kKeys keys, masked by the limits of the two vectors.
  __device__ void score(const T* queries, const T* keys, float scale, int first_key,
                        const int (&limits)[2], float (&scores)[kKeys / 8][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const T* query = queries + lane % 16 * kStride + lane / 16 * 8;
    const T* key = keys + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.0F;
    }
#pragma unroll
    for (int d = 0; d < kDims; d += 16) {
      uint32_t a[4];
      load_matrix<false>(a, query + d);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t b[4];
        load_matrix<false>(b, key + n * 8 * kStride + d);
        mma_m16n8k16<T>(scores[n], a, b[0], b[1]);
        mma_m16n8k16<T>(scores[n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first_key + n * 8 + lane % 4 * 2 + i % 2;
        scores[n][i] = at < limits[i / 2] ? scores[n][i] * scale : -INFINITY;
      }
    }
  }

  // Turns scores into weights, and rescales what came before to the new maximum.
  __device__ void weigh(float (&scores)[kKeys / 8][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = maximum[r];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        most = fmaxf(most, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      }
      most = quad_max(most);
      // Without a key yet, anything finite: no difference of infinities.
      const float base = most == -INFINITY ? 0.0F : most;
      const float rescale = exp2f(maximum[r] - base);
      maximum[r] = most;
      float added = 0.0F;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          scores[n][i] = exp2f(scores[n][i] - base);
          added += scores[n][i];
        }
      }
      sum[r] = fmaf(sum[r], rescale, added);
#pragma unroll
      for (int d = 0; d < kDims / 8; ++d) {
        output[d][2 * r] *= rescale;
        output[d][2 * r + 1] *= rescale;
      }
    }
  }

  // output += weights values
  __device__ void add_values(const float (&weights)[kKeys / 8][4], const T* values) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const T* value = values + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      uint32_t high[4];
      uint32_t low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = weights[n + i / 2] + i % 2 * 2;
        const SplitPair both = split<T>(pair[0], pair[1]);
        high[i] = both.high;
        low[i] = both.low;
      }
#pragma unroll
      for (int d = 0; d < kDims; d += 16) {
        uint32_t b[4];
        load_matrix<true>(b, value + n * 8 * kStride + d);
        mma_m16n8k16<T>(output[d / 8], high, b[0], b[1]);
        mma_m16n8k16<T>(output[d / 8], low, b[0], b[1]);
        mma_m16n8k16<T>(output[d / 8 + 1], high, b[2], b[3]);
        mma_m16n8k16<T>(output[d / 8 + 1], low, b[2], b[3]);
      }
    }
  }
};

// Block (row tile, KV head and head tile, part). Every warp takes 16 of the tile's query vectors.
// One block a multiprocessor is what the compiler may count on: for more it would spill registers.
template <typename T, int kDims, int kKeys>
__global__ void __launch_bounds__(kTileThreads, 1)
    attend_tile_kernel(AttendRowsParams params, AttendGrid grid, TileAlignment alignment) {
  using Memory = TileMemory<T, kDims, kKeys>;
  constexpr int kStride = Memory::kStride;
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
  for (int vector = thread; vector < kTileVectors; vector += kTileThreads) {
    memory.limits[vector] =
        exists(vector) ? static_cast<int>(params.row_limits[row_of(vector)]) : 0;
  }
  const auto* query_data = static_cast<const T*>(params.query.data);
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  for (int i = thread; i < kTileVectors * (kDims / kChunk); i += kTileThreads) {
    const int vector = i / (kDims / kChunk);
    const int dim = i % (kDims / kChunk) * kChunk;
    const T* from = query_data;
    if (exists(vector)) {
      from +=
          offset_of_row(params.query, row_of(vector), kv_head * grid.group + head_of(vector)) + dim;
    }
    T* to = memory.queries + vector * kStride + dim;
    if (alignment.query) {
      copy_async_16(to, from, exists(vector) && dim < head_size);
    } else {
      for (int j = 0; j < kChunk; ++j) {
        to[j] = exists(vector) && dim + j < head_size ? from[j] : from_float<T>(0.0F);
      }
    }
  }
  __syncthreads();

  const int warp = thread / kWarpSize;
  const int lane = thread % kWarpSize;
  int most_keys = 0;       // of the tile
  int most_warp_keys = 0;  // of this warp's vectors
  for (int vector = 0; vector < kTileVectors; ++vector) {
    const int limit = memory.limits[vector];
    most_keys = limit > most_keys ? limit : most_keys;
    const bool is_mine = vector / kVectorsPerWarp == warp;
    most_warp_keys = is_mine && limit > most_warp_keys ? limit : most_warp_keys;
  }
  const int own_vectors[2] = {warp * kVectorsPerWarp + lane / 4,
                              warp * kVectorsPerWarp + lane / 4 + 8};
  const int limits[2] = {memory.limits[own_vectors[0]], memory.limits[own_vectors[1]]};
  const int64_t part_begin = blockIdx.z * grid.keys_per_part;
  const int begin = static_cast<int>(part_begin < most_keys ? part_begin : most_keys);
  const int64_t part_end = part_begin + grid.keys_per_part;
  const int end = static_cast<int>(part_end < most_keys ? part_end : most_keys);

  const int32_t* table = params.block_table + rows.request * params.block_table_stride;
  const PagedRows<T> keys(params.key, table, kv_head);
  const PagedRows<T> values(params.value, table, kv_head);
  WarpTile<T, kDims, kKeys> tile;
  load_tile<kDims, kKeys, kStride>(keys, head_size, alignment.key, begin, end, memory.keys);
  for (int first = begin; first < end; first += kKeys) {
    wait_async_copies<0>();
    __syncthreads();  // the keys are there, and nobody needs the values before
    load_tile<kDims, kKeys, kStride>(values, head_size, alignment.value, first, end, memory.values);
    const bool has_keys = first < most_warp_keys;
    float scores[kKeys / 8][4];
    if (has_keys) {
      tile.score(memory.queries + warp * kVectorsPerWarp * kStride, memory.keys,
                 params.scale * kLog2E, first, limits, scores);
      tile.weigh(scores);
    }
    wait_async_copies<0>();
    __syncthreads();  // the values are there, and nobody needs these keys
    load_tile<kDims, kKeys, kStride>(keys, head_size, alignment.key, first + kKeys, end,
                                     memory.keys);
    if (has_keys) tile.add_values(scores, memory.values);
  }
  wait_async_copies<0>();
  __syncthreads();  // nobody copies to the queries any more, not even where there was no key

#pragma unroll
  for (int r = 0; r < 2; ++r) tile.sum[r] = quad_sum(tile.sum[r]);
  if (grid.parts > 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int vector = own_vectors[r];
      if (!exists(vector)) continue;
      const int64_t query_head = kv_head * grid.group + head_of(vector);
      const int64_t partial =
          (row_of(vector) * params.query.heads + query_head) * grid.parts + blockIdx.z;
      float* output = grid.partial_outputs + partial * kDims + lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < kDims / 8; ++d) {
        store_vector<2>(tile.output[d] + 2 * r, output + d * 8);
      }
      if (lane % 4 == 0) {
        grid.partial_sums[2 * partial] = tile.maximum[r];
        grid.partial_sums[2 * partial + 1] = tile.sum[r];
      }
    }
    return;
  }

  // Through the memory of this warp's queries, so that rows are written 16 bytes at a time.
  T* own_rows = memory.queries + warp * kVectorsPerWarp * kStride;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float share = tile.sum[r] == 0.0F ? 0.0F : 1.0F / tile.sum[r];
    T* to = own_rows + (lane / 4 + 8 * r) * kStride + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kDims / 8; ++d) {
      to[d * 8] = from_float<T>(tile.output[d][2 * r] * share);
      to[d * 8 + 1] = from_float<T>(tile.output[d][2 * r + 1] * share);
    }
  }
  __syncwarp();
  auto* out_data = static_cast<T*>(params.out.data);
  for (int i = lane; i < kVectorsPerWarp * (kDims / kChunk); i += kWarpSize) {
    const int vector = warp * kVectorsPerWarp + i / (kDims / kChunk);
    const int dim = i % (kDims / kChunk) * kChunk;
    if (!exists(vector) || dim >= head_size) continue;
    const T* from = own_rows + i / (kDims / kChunk) * kStride + dim;
    T* to = out_data + dim +
            offset_of_row(params.out, row_of(vector), kv_head * grid.group + head_of(vector));
    if (alignment.out) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < kChunk && dim + j < head_size; ++j) to[j] = from[j];
    }
  }
}

}  // namespace phasekv::cuda
