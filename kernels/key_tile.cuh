// The keys of a block of threads, and their dot products with vectors that stream past them: what
// score_keys, accumulate_attention and key_redundancy share. Each warp keeps its own keys, and all
// warps see all vectors, so sums over the vectors stay in a lane.
#pragma once

#include <cstdint>
#include <string>

#include "elements.cuh"
#include "phasekv/error.h"
#include "phasekv/tensor.h"
#include "platform.cuh"
#include "views.cuh"

namespace phasekv::cuda {

inline constexpr int kKeyTileWarps = 4;
inline constexpr int kKeyTileThreads = kKeyTileWarps * kWarpSize;
inline constexpr int kVectorsPerTile = 16;  // that are multiplied at once
inline constexpr int64_t kMaxKeyTileHeadSize = 256;

// So many that they have room in registers.
constexpr int keys_per_warp(int64_t head_size) { return head_size <= 128 ? 32 : 16; }

// Keys [0, count) of one KV head, counted from a token of the request.
struct KeyRows {
  const PagedView* view;
  const int32_t* block_table;
  uint32_t first_token;
  int64_t kv_head;
  int count;
  bool is_aligned;  // whole rows of it to 16 bytes

  __device__ const void* data() const { return view->data; }
  __device__ DataType dtype() const { return view->dtype; }
  __device__ bool has(int key) const { return key < count; }
  __device__ int64_t offset(int key) const {
    const auto block_size = static_cast<uint32_t>(view->block_size);
    const uint32_t token = first_token + static_cast<uint32_t>(key);
    const uint32_t entry = token / block_size;
    return block_table[entry] * view->block_stride + kv_head * view->head_stride +
           offset_of(view->token, token - entry * block_size);
  }
  __device__ int64_t offset_in_row(int dim) const {
    return offset_of(view->dim, static_cast<uint32_t>(dim));
  }
};

// Of the KV head that the block of threads works on, blockIdx.y. `Problem` says which keys.
template <typename Problem>
__device__ inline KeyRows key_rows_of(const Problem& problem, bool is_aligned) {
  return {&problem.key,
          problem.block_table,
          static_cast<uint32_t>(problem.first_token),
          blockIdx.y,
          static_cast<int>(problem.tokens),
          is_aligned};
}

// One element as T: the very bits, or float32.
template <typename T>
__device__ inline T element_at(const void* data, DataType dtype, int64_t offset) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return load_element(data, dtype, offset);
  } else {
    return static_cast<const T*>(data)[offset];
  }
}

// Brings rows [first, first + kRows) to shared memory, kStride elements apart, with zeros for rows
// that do not exist and for dimensions beyond the head. They are there after a wait and a barrier.
template <int kRows, int kDims, int kStride, typename T, typename Rows>
__device__ inline void load_rows(const Rows& rows, int first, int head_size, T* to) {
  const int thread = static_cast<int>(threadIdx.x);
  if (sizeof(T) == 2 && rows.is_aligned) {
    constexpr int kChunk = 8;
    constexpr int kChunks = kDims / kChunk;
    for (int i = thread; i < kRows * kChunks; i += kKeyTileThreads) {
      const int row = i / kChunks;
      const int dim = i % kChunks * kChunk;
      const bool exists = rows.has(first + row) && dim < head_size;
      const auto* from = static_cast<const T*>(rows.data());
      copy_async_16(to + row * kStride + dim, exists ? from + rows.offset(first + row) + dim : from,
                    exists);
    }
  } else {
    for (int i = thread; i < kRows * kDims; i += kKeyTileThreads) {
      const int row = i / kDims;
      const int dim = i % kDims;
      const bool exists = rows.has(first + row) && dim < head_size;
      to[row * kStride + dim] =
          exists ? element_at<T>(rows.data(), rows.dtype(),
                                 rows.offset(first + row) + rows.offset_in_row(dim))
                 : from_float<T>(0.0F);
    }
  }
  commit_async_copies();
}

// On the tensor cores, for keys and vectors of the same 16 bits. kHeadDims: the head size, rounded
// up. A warp's keys stay in its registers.
//
// Products with 16 vectors: with g = lane / 4 and t = lane % 4, a lane holds in [n][i] that of
// vector g (i = 0, 1) or g + 8 (i = 2, 3) and of its warp's key 8 n + 2 t + i % 2.
template <typename T, int kHeadDims>
class KeyTile {
 public:
  static constexpr int kDims = kHeadDims;
  static constexpr int kKeysPerWarp = keys_per_warp(kDims);
  static constexpr int kKeys = kKeyTileWarps * kKeysPerWarp;
  static constexpr int kTilesPerStage = 4;
  static constexpr int kVectorsPerStage = kTilesPerStage * kVectorsPerTile;
  static constexpr int kStride = kDims + 8;  // so that 8 rows of a matrix lie in different banks
  using Element = T;
  using Products = float[kKeysPerWarp / 8][4];

  // First the keys, until they are in registers; then two stages of vectors.
  struct Memory {
    T rows[(kKeys > 2 * kVectorsPerStage ? kKeys : 2 * kVectorsPerStage) * kStride];

    __device__ T* stage(int i) { return rows + i % 2 * kVectorsPerStage * kStride; }
  };

  // Keys [first, first + kKeys). All threads of the block call it.
  __device__ void load(const KeyRows& rows, int first, int head_size, Memory& memory) {
    load_rows<kKeys, kDims, kStride>(rows, first, head_size, memory.rows);
    wait_async_copies<0>();
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const T* key =
        memory.rows + (warp * kKeysPerWarp + lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < kDims / 16; ++d) {
#pragma unroll
      for (int n = 0; n < kKeysPerWarp / 16; ++n) {
        load_matrix<false>(keys_[d][n], key + n * 16 * kStride + d * 16);
      }
    }
    __syncthreads();  // the vectors may take the place of the keys
  }

  __device__ void multiply(const T* vectors, const Memory& /*memory*/, Products& products) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const T* vector = vectors + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < kKeysPerWarp / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[n][i] = 0.0F;
    }
#pragma unroll
    for (int d = 0; d < kDims / 16; ++d) {
      uint32_t a[4];
      load_matrix<false>(a, vector + d * 16);
#pragma unroll
      for (int n = 0; n < kKeysPerWarp / 16; ++n) {
        const uint32_t(&b)[4] = keys_[d][n];
        mma_m16n8k16<T>(products[2 * n], a, b[0], b[1]);
        mma_m16n8k16<T>(products[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

 private:
  uint32_t keys_[kDims / 16][kKeysPerWarp / 16][4];
};

// The same in float32 arithmetic, for float32 and for types that differ. The keys stay in shared
// memory.
template <int kHeadDims>
class KeyTile<float, kHeadDims> {
 public:
  static constexpr int kDims = kHeadDims;
  static constexpr int kKeysPerWarp = keys_per_warp(kDims);
  static constexpr int kKeys = kKeyTileWarps * kKeysPerWarp;
  static constexpr int kTilesPerStage = 1;
  static constexpr int kVectorsPerStage = kVectorsPerTile;
  static constexpr int kStride = kDims + 4;
  using Element = float;
  using Products = float[kKeysPerWarp / 8][4];

  struct Memory {
    float vectors[2 * kVectorsPerStage * kStride];
    float keys[kKeys * kStride];

    __device__ float* stage(int i) { return vectors + i % 2 * kVectorsPerStage * kStride; }
  };

  __device__ void load(const KeyRows& rows, int first, int head_size, Memory& memory) {
    load_rows<kKeys, kDims, kStride>(rows, first, head_size, memory.keys);
    dims_ = (head_size + kPerStep - 1) / kPerStep * kPerStep;
  }

  __device__ void multiply(const float* vectors, const Memory& memory, Products& products) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const float* vector = vectors + lane / 4 * kStride;
    const float* key = memory.keys + (warp * kKeysPerWarp + lane % 4 * 2) * kStride;
#pragma unroll
    for (int n = 0; n < kKeysPerWarp / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[n][i] = 0.0F;
    }
    for (int d = 0; d < dims_; d += kPerStep) {
      float a[2][kPerStep];
      load_vector<kPerStep>(vector + d, a[0]);
      load_vector<kPerStep>(vector + 8 * kStride + d, a[1]);
#pragma unroll
      for (int n = 0; n < kKeysPerWarp / 8; ++n) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float b[kPerStep];
          load_vector<kPerStep>(key + (8 * n + k) * kStride + d, b);
#pragma unroll
          for (int j = 0; j < kPerStep; ++j) {
            products[n][k] = fmaf(a[0][j], b[j], products[n][k]);
            products[n][2 + k] = fmaf(a[1][j], b[j], products[n][2 + k]);
          }
        }
      }
    }
  }

 private:
  static constexpr int kPerStep = 4;
  int dims_ = 0;  // the head size in whole steps
};

// The kernels' class of a head size; `use` is called with a KeyTileTag<Tile>. Head sizes up to
// kMaxKeyTileHeadSize (check_key_tile).
template <typename Tile>
struct KeyTileTag {
  using Type = Tile;
};

template <typename T, typename Use>
void with_key_tile_of(int64_t head_size, const Use& use) {
  if (head_size <= 64) return use(KeyTileTag<KeyTile<T, 64>>());
  if (head_size <= 128) return use(KeyTileTag<KeyTile<T, 128>>());
  use(KeyTileTag<KeyTile<T, 256>>());
}

// On the tensor cores where keys and vectors have the same 16 bits.
template <typename Use>
void with_key_tile(const PagedView& key, DataType vectors, const Use& use) {
  if (key.dtype != vectors || key.dtype == DataType::float32) {
    with_key_tile_of<float>(key.head_size, use);
  } else if (key.dtype == DataType::bfloat16) {
    with_key_tile_of<__nv_bfloat16>(key.head_size, use);
  } else {
    with_key_tile_of<__half>(key.head_size, use);
  }
}

inline void check_key_tile(const PagedView& key) {
  if (key.head_size <= kMaxKeyTileHeadSize) return;
  throw Error(ErrorCode::unsupported, "key.head_size", std::to_string(key.head_size),
              "there are CUDA kernels of head sizes up to " + std::to_string(kMaxKeyTileHeadSize));
}

// Whether rows can be moved 16 bytes at a time.
template <typename View>
bool has_aligned_rows(const View& view) {
  return alignment_of(view) == 16 && view.head_size % 8 == 0;
}

// Multiplies the tile's keys with vectors [0, 16 tiles) of `rows`, 16 at a time: wherever
// `wants(tile)`, the same for all lanes of a warp, use(tile, products) is called. All threads of
// the block call this, after load(); nobody may use the memory afterwards without a barrier.
template <typename Tile, typename Rows, typename Wants, typename Use>
__device__ inline void stream_vectors(const Tile& tile, typename Tile::Memory& memory,
                                      const Rows& rows, int tiles, int head_size,
                                      const Wants& wants, const Use& use) {
  constexpr int kPerStage = Tile::kTilesPerStage;
  const auto load_stage = [&](int stage) {
    load_rows<Tile::kVectorsPerStage, Tile::kDims, Tile::kStride>(
        rows, stage * Tile::kVectorsPerStage, head_size, memory.stage(stage));
  };
  const int stages = (tiles + kPerStage - 1) / kPerStage;
  if (stages > 0) load_stage(0);
  for (int stage = 0; stage < stages; ++stage) {
    wait_async_copies<0>();
    __syncthreads();  // this stage is there, and nobody needs the one before
    if (stage + 1 < stages) load_stage(stage + 1);
    for (int i = 0; i < kPerStage && stage * kPerStage + i < tiles; ++i) {
      const int index = stage * kPerStage + i;
      if (!wants(index)) continue;
      typename Tile::Products products;
      tile.multiply(memory.stage(stage) + i * kVectorsPerTile * Tile::kStride, memory, products);
      use(index, products);
    }
  }
}

}  // namespace phasekv::cuda
