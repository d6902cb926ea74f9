// Bound by the tensor cores: every pair of keys is multiplied once (2 x tokens^2 x head size
// multiplications and additions per KV head), but for the keys that have found what they look for.
// The sum over all cosines of a key needs no pairs: it is one product with the sum of the keys.
#include <cmath>
#include <cstdint>

#include "block_reduction.cuh"
#include "key_directions.cuh"
#include "key_tile.cuh"
#include "launch.cuh"
#include "phasekv/cuda.h"
#include "softmax.cuh"
#include "validate.h"
#include "views.cuh"
#include "warp.cuh"
#include "workspace.cuh"

namespace phasekv::cuda {
namespace {

constexpr int kStrip = 256;  // chunks that are looked through at a time
constexpr int kSoftmaxThreads = 512;
// Cosines that are left out are added up as whole numbers of this, in any order.
constexpr float kCosineUnit = 1.0F / (int64_t{1} << 40);
constexpr float kUnitsOfACosine = static_cast<float>(int64_t{1} << 40);

// A key and its position, the larger position being the larger number.
__device__ inline int64_t candidate_of(int position, int key) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(position)) << 32 |
                              static_cast<uint32_t>(key));
}
__device__ inline int position_of(int64_t candidate) { return static_cast<int>(candidate >> 32); }
__device__ inline int key_of(int64_t candidate) { return static_cast<int>(candidate & 0xFFFFFFFF); }
constexpr int64_t kNoCandidate = INT64_MIN;

// On the device.
struct RedundancyMemory {
  int chunks = 0;
  float* inverse_norms = nullptr;         // [KV heads, tokens]
  float* chunk_sums = nullptr;            // [KV heads, chunks, head_size] of normalized keys
  float* sums = nullptr;                  // [KV heads, head_size]
  int64_t* chunk_first = nullptr;         // [KV heads, chunks] the candidate of the least position
  int* chunk_last = nullptr;              // [KV heads, chunks] the largest position
  int64_t* first = nullptr;               // [KV heads]
  int* last_until = nullptr;              // [KV heads, chunks] of this chunk and those before
  unsigned long long* omitted = nullptr;  // [KV heads, tokens] cosines left out, in kCosineUnit
};

RedundancyMemory take_memory(const KeyRedundancyParams& params, Allotment& memory) {
  const int64_t heads = params.key.num_heads;
  const int64_t chunks = ceil_div(params.tokens, kChunkKeys);
  RedundancyMemory taken;
  taken.chunks = static_cast<int>(chunks);
  taken.inverse_norms = memory.take<float>(heads * params.tokens);
  taken.chunk_sums = memory.take<float>(heads * chunks * params.key.head_size);
  taken.sums = memory.take<float>(heads * params.key.head_size);
  taken.chunk_first = memory.take<int64_t>(heads * chunks);
  taken.chunk_last = memory.take<int>(heads * chunks);
  taken.first = memory.take<int64_t>(heads);
  taken.last_until = memory.take<int>(heads * chunks);
  taken.omitted = memory.take<unsigned long long>(heads * params.tokens);
  return taken;
}

__device__ inline int key_position(const KeyRedundancyParams& params, int64_t kv_head, int key) {
  return params.positions == nullptr ? key : params.positions[kv_head * params.tokens + key];
}

struct MeasureMemory {
  DirectionMemory directions;
  int positions[kChunkKeys];
};

// Block (chunk, KV head).
__global__ void __launch_bounds__(kThreads)
    measure_kernel(KeyRedundancyParams params, RedundancyMemory memory, bool is_aligned) {
  auto& shared = *reinterpret_cast<MeasureMemory*>(dynamic_shared_memory());
  const KeyRows rows = key_rows_of(params, is_aligned);
  const int64_t kv_head = blockIdx.y;
  const int first_key = static_cast<int>(blockIdx.x) * kChunkKeys;
  const int64_t first_index = kv_head * params.tokens;
  const int64_t chunk = kv_head * memory.chunks + blockIdx.x;
  measure_directions(rows, first_key, shared.directions, memory.inverse_norms + first_index,
                     memory.chunk_sums + chunk * params.key.head_size, [&](int key) {
                       memory.omitted[first_index + key] = 0;
                       shared.positions[key - first_key] = key_position(params, kv_head, key);
                     });
  if (threadIdx.x != 0) return;
  int64_t first = candidate_of(shared.positions[0], first_key);
  int last = shared.positions[0];
  for (int i = 1; i < kChunkKeys && rows.has(first_key + i); ++i) {
    const int position = shared.positions[i];
    if (position < position_of(first)) first = candidate_of(position, first_key + i);
    if (position > last) last = position;
  }
  memory.chunk_first[chunk] = first;
  memory.chunk_last[chunk] = last;
}

struct StripMemory {
  int64_t first[kStrip];
  int last[kStrip];
};

// Block: a KV head. Adds up what the chunks have, in order.
__global__ void __launch_bounds__(kStrip)
    merge_chunks_kernel(KeyRedundancyParams params, RedundancyMemory memory) {
  auto& shared = *reinterpret_cast<StripMemory*>(dynamic_shared_memory());
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t kv_head = blockIdx.x;
  const int64_t chunks = kv_head * memory.chunks;
  const auto head_size = static_cast<int>(params.key.head_size);
  for (int dim = thread; dim < head_size; dim += kStrip) {
    float sum = 0.0F;
    for (int i = 0; i < memory.chunks; ++i) {
      sum += memory.chunk_sums[(chunks + i) * head_size + dim];
    }
    memory.sums[kv_head * head_size + dim] = sum;
  }
  int64_t first = 0;  // of thread 0, as
  int last = 0;
  for (int base = 0; base < memory.chunks; base += kStrip) {
    if (base + thread < memory.chunks) {
      shared.first[thread] = memory.chunk_first[chunks + base + thread];
      shared.last[thread] = memory.chunk_last[chunks + base + thread];
    }
    __syncthreads();
    if (thread == 0) {
      for (int i = 0; i < kStrip && base + i < memory.chunks; ++i) {
        const bool is_begin = base + i == 0;
        if (is_begin || position_of(shared.first[i]) < position_of(first)) first = shared.first[i];
        if (is_begin || shared.last[i] > last) last = shared.last[i];
        shared.last[i] = last;
      }
    }
    __syncthreads();
    if (base + thread < memory.chunks) {
      memory.last_until[chunks + base + thread] = shared.last[thread];
    }
  }
  if (thread == 0) memory.first[kv_head] = first;
}

// The same keys from the last to the first.
struct ReversedKeyRows {
  KeyRows rows;
  bool is_aligned;

  __device__ const void* data() const { return rows.data(); }
  __device__ DataType dtype() const { return rows.dtype(); }
  __device__ int key(int vector) const { return rows.count - 1 - vector; }
  __device__ bool has(int vector) const { return vector < rows.count; }
  __device__ int64_t offset(int vector) const { return rows.offset(key(vector)); }
  __device__ int64_t offset_in_row(int dim) const { return rows.offset_in_row(dim); }
};

// What the lanes of a warp know of its keys. A lane has two keys of each of kTiles tiles, and of
// the others compared with them those of its rows.
template <int kTiles>
struct Search {
  int64_t best[kTiles][2];  // the similar key of the largest position
  float cosine[kTiles][2];
  float first_cosine[kTiles][2];  // with the key of the least position

  __device__ Search() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        best[n][i] = kNoCandidate;
        cosine[n][i] = first_cosine[n][i] = 0.0F;
      }
    }
  }
};

// Block (key tile, KV head). For each of the tile's keys: which similar key has the largest
// position, and its cosine.
template <typename Tile>
__global__ void __launch_bounds__(kKeyTileThreads)
    search_kernel(KeyRedundancyParams params, RedundancyMemory memory, bool is_aligned) {
  auto& shared = *reinterpret_cast<typename Tile::Memory*>(dynamic_shared_memory());
  constexpr int kTiles = Tile::kKeysPerWarp / 8;
  const KeyRows rows = key_rows_of(params, is_aligned);
  const ReversedKeyRows others = {rows, is_aligned};
  const int64_t kv_head = blockIdx.y;
  const auto head_size = static_cast<int>(params.key.head_size);
  const auto tokens = static_cast<int>(params.tokens);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first_key = static_cast<int>(blockIdx.x) * Tile::kKeys;
  const int warp_key = first_key + warp * Tile::kKeysPerWarp;
  const int least_key = key_of(memory.first[kv_head]);
  const float* inverse_norms = memory.inverse_norms + kv_head * params.tokens;
  const int* last_until = memory.last_until + kv_head * memory.chunks;
  const auto own_key = [&](int n, int i) { return warp_key + 8 * n + lane % 4 * 2 + i; };
  Tile tile;
  tile.load(rows, first_key, head_size, shared);

  float own_norms[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own_norms[n][i] = own_key(n, i) < tokens ? inverse_norms[own_key(n, i)] : 0.0F;
    }
  }
  Search<kTiles> search;
  bool is_done = warp_key >= tokens;
  const auto wants = [&](int index) {
    constexpr int kBetween = 8;  // tiles between two looks at how far the search is
    if (is_done || index == 0 || index % kBetween != 0) return !is_done;
    int64_t least = INT64_MAX;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t best = column_max(search.best[n][i]);
        if (own_key(n, i) < tokens && best < least) least = best;
      }
    }
    least = quad_min(least);
    const int left = tokens - index * kVectorsPerTile;  // keys that have not been looked at
    is_done = least != kNoCandidate && position_of(least) >= last_until[(left - 1) / kChunkKeys];
    return !is_done;
  };
  const auto use = [&](int index, float(&products)[kTiles][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int vector = index * kVectorsPerTile + lane / 4 + 8 * r;
      if (!others.has(vector)) continue;
      const int other = others.key(vector);
      const float norm = inverse_norms[other];
      const int64_t candidate = candidate_of(key_position(params, kv_head, other), other);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float cosine = products[n][2 * r + i] * own_norms[n][i] * norm;
          if (own_key(n, i) == other) continue;
          if (other == least_key) search.first_cosine[n][i] = cosine;
          if (!(cosine > params.threshold) || candidate < search.best[n][i]) continue;
          search.best[n][i] = candidate;
          search.cosine[n][i] = cosine;
        }
      }
    }
  };
  stream_vectors(tile, shared, others, (tokens + kVectorsPerTile - 1) / kVectorsPerTile, head_size,
                 wants, use);

#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t best = column_max(search.best[n][i]);
      const bool is_finder = best == search.best[n][i] && best != kNoCandidate;
      const float found = column_sum(is_finder ? search.cosine[n][i] : 0.0F);
      const float with_first = column_sum(search.first_cosine[n][i]);
      if (lane >= 4 || own_key(n, i) >= tokens) continue;
      const float cosine = best == kNoCandidate ? with_first : found;
      const int omitted = best == kNoCandidate ? least_key : key_of(best);
      if (!(fabsf(cosine) < 2.0F)) continue;  // not finite, as the sum of all keys
      const auto units = static_cast<int64_t>(rintf(cosine * kUnitsOfACosine));
      atomicAdd(memory.omitted + kv_head * params.tokens + omitted,
                static_cast<unsigned long long>(units));
    }
  }
}

// Block (chunk, KV head); a warp takes a key after the other. The mean cosines, before their
// softmax.
__global__ void __launch_bounds__(kThreads)
    mean_cosines_kernel(KeyRedundancyParams params, RedundancyMemory memory, bool is_aligned) {
  const KeyRows rows = key_rows_of(params, is_aligned);
  const int64_t kv_head = blockIdx.y;
  const float* sum = memory.sums + kv_head * params.key.head_size;
  multiply_directions(
      rows, static_cast<int>(blockIdx.x) * kChunkKeys, sum, [&](int key, float product) {
        const int64_t index = kv_head * params.tokens + key;
        const float inverse = memory.inverse_norms[index];
        const float norm = 1.0F - kNormAddend * inverse;  // of the normalized key
        const float omitted = static_cast<float>(static_cast<int64_t>(memory.omitted[index]));
        params.redundancy[index] = (product * inverse - norm * norm - omitted * kCosineUnit) /
                                   static_cast<float>(params.tokens);
      });
}

// Block: a KV head.
__global__ void __launch_bounds__(kSoftmaxThreads)
    soften_kernel(float* redundancy, int64_t tokens) {
  auto* shared = reinterpret_cast<float*>(dynamic_shared_memory());  // [2][warps]
  float* values = redundancy + blockIdx.x * tokens;
  float maximum = -INFINITY;
  for (int64_t i = threadIdx.x; i < tokens; i += kSoftmaxThreads) {
    maximum = fmaxf(maximum, values[i]);
  }
  maximum = block_max<kSoftmaxThreads>(maximum, shared);
  float sum = 0.0F;
  for (int64_t i = threadIdx.x; i < tokens; i += kSoftmaxThreads) sum += expf(values[i] - maximum);
  sum = block_sum<kSoftmaxThreads>(sum, shared + kSoftmaxThreads / kWarpSize);
  for (int64_t i = threadIdx.x; i < tokens; i += kSoftmaxThreads) {
    values[i] = expf(values[i] - maximum) / sum;
  }
}

void check(const KeyRedundancyParams& params) {
  check_device_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_key_tile(params.key);
  if (!std::isfinite(params.threshold) || params.threshold < 0.0F) {
    refuse("threshold", std::to_string(params.threshold), "finite and at least 0");
  }
  check_not_null("redundancy", params.redundancy, params.tokens);
}

}  // namespace

int64_t key_redundancy_workspace_bytes(const KeyRedundancyParams& params) {
  check(params);
  Allotment memory;
  take_memory(params, memory);
  return memory.bytes();
}

void key_redundancy(const KeyRedundancyParams& params, const Workspace& workspace, Stream stream) {
  check(params);
  if (params.tokens == 0) return;
  const DirectionLaunch<RedundancyMemory> request =
      prepare_launch(params, workspace, take_memory, "key_redundancy_workspace_bytes()");
  launch(measure_kernel, request.chunks, kThreads, sizeof(MeasureMemory), stream, params,
         request.memory, request.is_aligned);
  launch(merge_chunks_kernel, request.heads, kStrip, sizeof(StripMemory), stream, params,
         request.memory);
  with_key_tile(params.key, params.key.dtype, [&](auto tag) {
    using Tile = typename decltype(tag)::Type;
    launch(search_kernel<Tile>, dim3(blocks_for(params.tokens, Tile::kKeys), request.heads.x),
           kKeyTileThreads, sizeof(typename Tile::Memory), stream, params, request.memory,
           request.is_aligned);
  });
  launch(mean_cosines_kernel, request.chunks, kThreads, 0, stream, params, request.memory,
         request.is_aligned);
  launch(soften_kernel, request.heads, kSoftmaxThreads,
         2 * (kSoftmaxThreads / kWarpSize) * sizeof(float), stream, params.redundancy,
         params.tokens);
}

}  // namespace phasekv::cuda
