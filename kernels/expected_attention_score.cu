// The covariance of a head's queries is the mean of c c^T over its n centred queries c, so that
// k^T S k is the mean of (c.k)^2: no matrix is made, and the products with keys go to the tensor
// cores as those of score_keys do, one with the mean query beside them. A centred query of 16-bit
// keys is two vectors there, what 16 bits can hold of it and what they lack.
//
// Bound by the tensor cores: 4 (queries + 1) x query heads x keys x head size multiplications and
// additions. Beyond a few queries reading keys and values is the smaller part.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "block_reduction.cuh"
#include "elements.cuh"
#include "key_directions.cuh"
#include "key_tile.cuh"
#include "launch.cuh"
#include "ops/check_expected_attention.h"
#include "phasekv/cuda.h"
#include "rotation.cuh"
#include "softmax.cuh"
#include "validate.h"
#include "views.cuh"
#include "warp.cuh"
#include "workspace.cuh"

namespace phasekv::cuda {
namespace {

constexpr int kRotationThreads = 128;
constexpr int kCentringWarps = 8;
constexpr int kCentringThreads = kCentringWarps * kWarpSize;
constexpr int kSumThreads = 256;
constexpr int64_t kMostQueries = int64_t{1} << 20;
// Of all vectors, so that a centred query has room in float16: a pair turns to sqrt(2) times its
// elements at most, and a difference is twice that.
constexpr float kShrinking = 0.25F;

// What a query head knows of its logits, in units of log 2.
struct HeadSum {
  float base;   // of the exponentials
  float share;  // their factor, for the group's mean of softmaxes
};

// On the device.
struct ExpectationMemory {
  int vector_tiles = 0;        // of a query head: its queries, then their mean, then zeros
  int stride = 0;              // of vectors, in elements
  float* rotations = nullptr;  // [queries, rotary_dim] cosines, then sines, of each pair
  int* num_queries = nullptr;  // [1] that count
  void* vectors = nullptr;     // [query heads, vector_tiles, halves, kVectorsPerTile, stride]
  float* logits = nullptr;     // [query heads, tokens] in units of log 2
  HeadSum* sums = nullptr;     // [query heads]
};

// Vectors that one of float32 becomes.
template <typename T>
constexpr int kHalvesOf = sizeof(T) == sizeof(float) ? 1 : 2;

ExpectationMemory take_memory(const ExpectedAttentionScoreParams& params, Allotment& memory) {
  constexpr int64_t kAligned = 8;  // elements: 16 bytes of the smallest
  const int64_t heads = params.query.heads;
  ExpectationMemory taken;
  taken.vector_tiles = static_cast<int>(ceil_div(params.query.tokens + 1, kVectorsPerTile));
  taken.stride = static_cast<int>(ceil_div(params.key.head_size, kAligned) * kAligned);
  taken.rotations = memory.take<float>(params.query.tokens * params.rope.rotary_dim);
  taken.num_queries = memory.take<int>(1);
  // Two halves take as much as a float32.
  taken.vectors = memory.take<float>(heads * taken.vector_tiles * kVectorsPerTile * taken.stride);
  taken.logits = memory.take<float>(heads * params.tokens);
  taken.sums = memory.take<HeadSum>(heads);
  return taken;
}

__device__ inline bool is_sink(const ExpectedAttentionScoreParams& params, int64_t kv_head,
                               int64_t key) {
  const int64_t position =
      params.positions == nullptr ? key : params.positions[kv_head * params.tokens + key];
  return position < params.sinks;
}

// A thread takes a pair of a query: the rotation from its position to the mean of the positions to
// come. The mean of exp(i frequency t) over positions t that follow one another is a geometric sum:
// the rotation of the middle, shortened.
__global__ void __launch_bounds__(kRotationThreads)
    find_rotations_kernel(ExpectedAttentionScoreParams params, ExpectationMemory memory) {
  const int64_t pairs = params.rope.rotary_dim / 2;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kRotationThreads + threadIdx.x;
  const int64_t query = item / pairs;
  if (query >= params.query.tokens) return;
  const int64_t pair = item - query * pairs;
  const double half = params.rope.frequencies[pair] / 2.0;
  const auto horizon = static_cast<double>(params.horizon);
  const auto ahead = static_cast<double>(params.next_position - params.query_positions[query]);
  const float step = sin_cos(half).sin;
  const float length =
      step == 0.0F ? 1.0F
                   : sin_cos(horizon * half).sin / (static_cast<float>(params.horizon) * step);
  const SinCos middle = sin_cos(half * (2.0 * ahead + horizon - 1.0));
  float* rotation = memory.rotations + query * params.rope.rotary_dim;
  rotation[pair] = length * middle.cos;
  rotation[pairs + pair] = length * middle.sin;
}

// One dimension of one query head.
class QueryDimension {
 public:
  __device__ QueryDimension(const ExpectedAttentionScoreParams& params, const float* rotations,
                            int64_t head, int dim)
      : params_(params), rotations_(rotations), head_(head), dim_(dim) {
    const auto pairs = static_cast<int>(params.rope.rotary_dim / 2);
    is_rotated_ = dim < 2 * pairs;
    if (!is_rotated_) return;
    const bool is_neox = params.rope.pairing == RopePairing::neox;
    pair_ = is_neox ? dim % pairs : dim / 2;
    is_first_ = is_neox ? dim < pairs : dim % 2 == 0;
    const int distance = is_neox ? pairs : 1;
    other_ = is_first_ ? dim + distance : dim - distance;
  }

  // Of a query, turned; 0 beyond the head.
  __device__ float at(int query) const {
    const RowsView& rows = params_.query;
    if (dim_ >= rows.head_size) return 0.0F;
    const int64_t row = offset_of_row(rows, query, head_);
    const float x = load_element(rows.data, rows.dtype, row + dim_);
    if (!is_rotated_) return x;
    const float y = load_element(rows.data, rows.dtype, row + other_);
    const float* rotation = rotations_ + query * params_.rope.rotary_dim;
    const float sine = rotation[params_.rope.rotary_dim / 2 + pair_];
    return fmaf(y, is_first_ ? -sine : sine, x * rotation[pair_]);
  }

 private:
  const ExpectedAttentionScoreParams& params_;
  const float* rotations_;
  int64_t head_;
  int dim_;
  bool is_rotated_;
  bool is_first_ = false;  // of its pair
  int pair_ = 0;
  int other_ = 0;  // dimension of the pair
};

// One dimension of a vector of a query head.
template <typename T>
__device__ inline void store_vector_element(const ExpectationMemory& memory, int64_t head,
                                            int vector, int dim, float x) {
  constexpr int kHalves = kHalvesOf<T>;
  const int64_t tile = head * memory.vector_tiles + vector / kVectorsPerTile;
  auto* to = static_cast<T*>(memory.vectors) +
             (tile * kHalves * kVectorsPerTile + vector % kVectorsPerTile) * memory.stride + dim;
  x *= kShrinking;
  const T high = from_float<T>(x);
  to[0] = high;
  if constexpr (kHalves == 2) {
    to[int64_t{kVectorsPerTile} * memory.stride] = from_float<T>(x - to_float(high));
  }
}

struct CentringMemory {
  float sums[kCentringWarps][kWarpSize];
  int counts[kCentringWarps];
};

// Block (query head, 32 dimensions), a lane each; a warp takes every eighth query.
template <typename T>
__global__ void __launch_bounds__(kCentringThreads)
    centre_queries_kernel(ExpectedAttentionScoreParams params, ExpectationMemory memory) {
  auto& shared = *reinterpret_cast<CentringMemory*>(dynamic_shared_memory());
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t head = blockIdx.x;
  const int dim = static_cast<int>(blockIdx.y) * kWarpSize + lane;
  const QueryDimension dimension(params, memory.rotations, head, dim);
  const auto queries = static_cast<int>(params.query.tokens);
  const auto counts = [&](int query) { return params.query_positions[query] >= params.sinks; };
  float sum = 0.0F;
  int count = 0;
  for (int query = warp; query < queries; query += kCentringWarps) {
    if (!counts(query)) continue;
    sum += dimension.at(query);
    ++count;
  }
  shared.sums[warp][lane] = sum;
  if (lane == 0) shared.counts[warp] = count;
  __syncthreads();
  sum = 0.0F;
  count = 0;
  for (int i = 0; i < kCentringWarps; ++i) {
    sum += shared.sums[i][lane];
    count += shared.counts[i];
  }
  const float mean = count == 0 ? 0.0F : sum / static_cast<float>(count);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *memory.num_queries = count;
  if (dim >= memory.stride) return;
  for (int vector = warp; vector < memory.vector_tiles * kVectorsPerTile;
       vector += kCentringWarps) {
    float x = 0.0F;
    if (vector < queries && counts(vector)) x = dimension.at(vector) - mean;
    if (vector == queries) x = mean;
    store_vector_element<T>(memory, head, vector, dim, x);
  }
}

// The vectors of some query heads, one after another.
struct HeadVectors {
  const void* first;
  int count;
  int stride;
  static constexpr bool is_aligned = true;

  __device__ const void* data() const { return first; }
  __device__ DataType dtype() const { return DataType::float32; }  // where it is asked for
  __device__ bool has(int vector) const { return vector < count; }
  __device__ int64_t offset(int vector) const { return int64_t{vector} * stride; }
  __device__ int64_t offset_in_row(int dim) const { return dim; }
};

// Block (key tile, KV head, some query heads of its group).
template <typename Tile>
__global__ void __launch_bounds__(kKeyTileThreads)
    expect_logits_kernel(ExpectedAttentionScoreParams params, ExpectationMemory memory,
                         int heads_per_block, bool is_aligned) {
  using T = typename Tile::Element;
  auto& shared = *reinterpret_cast<typename Tile::Memory*>(dynamic_shared_memory());
  constexpr int kTiles = Tile::kKeysPerWarp / 8;
  constexpr int kHalves = kHalvesOf<T>;
  const auto group = static_cast<int>(params.query.heads / params.key.num_heads);
  const int first_member = static_cast<int>(blockIdx.z) * heads_per_block;
  const int heads = group - first_member < heads_per_block ? group - first_member : heads_per_block;
  const int64_t first_head = int64_t{blockIdx.y} * group + first_member;
  const int tiles = heads * memory.vector_tiles * kHalves;
  const int64_t vectors_of_head = int64_t{memory.vector_tiles} * kHalves * kVectorsPerTile;
  const HeadVectors vectors = {
      static_cast<const T*>(memory.vectors) + first_head * vectors_of_head * memory.stride,
      tiles * kVectorsPerTile, memory.stride};
  const int first_key = static_cast<int>(blockIdx.x) * Tile::kKeys;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp_key = first_key + warp * Tile::kKeysPerWarp;
  const int mean_vector = static_cast<int>(params.query.tokens);
  const int counted = *memory.num_queries;
  const float linear = params.scale * kLog2E / kShrinking;
  const float quadratic =
      params.scale * linear / (2.0F * kShrinking * static_cast<float>(counted > 0 ? counted : 1));
  Tile tile;
  tile.load(key_rows_of(params, is_aligned), first_key, static_cast<int>(params.key.head_size),
            shared);

  float high[kTiles][4];  // products with the first halves of a tile
  float logits[kTiles][2] = {};
  const auto wants = [&](int /*index*/) { return warp_key < params.tokens; };
  const auto use = [&](int index, float(&products)[kTiles][4]) {
    if constexpr (kHalves == 2) {
      const bool is_high = index % 2 == 0;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          high[n][i] = is_high ? products[n][i] : high[n][i] + products[n][i];
          products[n][i] = high[n][i];
        }
      }
      if (is_high) return;
    }
    const int head = index / kHalves / memory.vector_tiles;
    const int tile_of_head = index / kHalves % memory.vector_tiles;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_mean = tile_of_head * kVectorsPerTile + lane / 4 + 8 * r == mean_vector;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float product = products[n][2 * r + i];
          logits[n][i] = fmaf(product, is_mean ? linear : quadratic * product, logits[n][i]);
        }
      }
    }
    if (tile_of_head + 1 < memory.vector_tiles) return;
    float* out = memory.logits + (first_head + head) * params.tokens;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float logit = column_sum(logits[n][i]);
        const int key = warp_key + 8 * n + lane % 4 * 2 + i;
        if (lane < 4 && key < params.tokens) out[key] = logit;
        logits[n][i] = 0.0F;
      }
    }
  };
  stream_vectors(tile, shared, vectors, tiles, memory.stride, wants, use);
}

// Block: a query head.
__global__ void __launch_bounds__(kSumThreads)
    sum_expectations_kernel(ExpectedAttentionScoreParams params, ExpectationMemory memory) {
  auto* shared = reinterpret_cast<float*>(dynamic_shared_memory());  // [2][warps]
  const int64_t group = params.query.heads / params.key.num_heads;
  const int64_t kv_head = blockIdx.x / group;
  const float* logits = memory.logits + blockIdx.x * params.tokens;
  float maximum = -INFINITY;
  for (int64_t i = threadIdx.x; i < params.tokens; i += kSumThreads) {
    if (!is_sink(params, kv_head, i)) maximum = fmaxf(maximum, logits[i]);
  }
  maximum = block_max<kSumThreads>(maximum, shared);
  // Where only sinks are, anything finite: no difference of infinities.
  const float base = maximum == -INFINITY ? 0.0F : maximum;
  float sum = 0.0F;
  for (int64_t i = threadIdx.x; i < params.tokens; i += kSumThreads) {
    if (!is_sink(params, kv_head, i)) sum += exp2f(logits[i] - base);
  }
  sum = block_sum<kSumThreads>(sum, shared + kSumThreads / kWarpSize);
  if (threadIdx.x != 0) return;
  memory.sums[blockIdx.x] = {base, sum == 0.0F ? 0.0F : 1.0F / (static_cast<float>(group) * sum)};
}

// Block (chunk, KV head). A lane first adds up the weights of one of its warp's keys, those of
// every fourth query head.
__global__ void __launch_bounds__(kThreads)
    weigh_values_kernel(ExpectedAttentionScoreParams params, ExpectationMemory memory,
                        bool is_aligned) {
  constexpr int kLanesPerKey = kWarpSize / kKeysPerWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t kv_head = blockIdx.y;
  const int first_key = static_cast<int>(blockIdx.x) * kChunkKeys;
  const int warp_key = first_key + warp * kKeysPerWarp;
  const int own_key = warp_key + lane % kKeysPerWarp;
  const int64_t group = params.query.heads / params.key.num_heads;
  float weight = 0.0F;
  if (own_key < params.tokens) {
    const bool counts = !is_sink(params, kv_head, own_key);
    for (int64_t member = lane / kKeysPerWarp; member < group; member += kLanesPerKey) {
      const int64_t head = kv_head * group + member;
      const HeadSum& sum = memory.sums[head];
      const float logit = memory.logits[head * params.tokens + own_key];
      weight = fmaf(counts ? exp2f(logit - sum.base) : 0.0F, sum.share, weight);
    }
  }
#pragma unroll
  for (int distance = kKeysPerWarp; distance < kWarpSize; distance *= 2) {
    weight += __shfl_xor_sync(kAllLanes, weight, distance);
  }
  KeyRows values = key_rows_of(params, is_aligned);
  values.view = &params.value;
  for_each_row(values, first_key, [&](int key, const float(&row)[kDimsPerLane]) {
    float squares = 0.0F;
#pragma unroll
    for (const float x : row) squares = fmaf(x, x, squares);
    const float norm = sqrtf(warp_sum(squares));
    const float weight_of_key = __shfl_sync(kAllLanes, weight, key - warp_key);
    if (lane == 0) params.scores[kv_head * params.tokens + key] = weight_of_key * norm;
  });
}

void check(const ExpectedAttentionScoreParams& params) {
  check_device_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_key_tile(params.key);
  check_device_blocks("value", params.value);
  check_expected_attention(params);
  check_device_rope(params.rope, params.key.head_size);
  if (params.query.tokens > kMostQueries) {
    refuse("query.tokens", params.query.tokens, "at most " + std::to_string(kMostQueries));
  }
}

}  // namespace

int64_t expected_attention_score_workspace_bytes(const ExpectedAttentionScoreParams& params) {
  check(params);
  Allotment memory;
  take_memory(params, memory);
  return memory.bytes();
}

void expected_attention_score(const ExpectedAttentionScoreParams& params,
                              const Workspace& workspace, Stream stream) {
  check(params);
  if (params.tokens == 0) return;
  const DirectionLaunch<ExpectationMemory> request =
      prepare_launch(params, workspace, take_memory, "expected_attention_score_workspace_bytes()");
  const auto query_heads = static_cast<unsigned>(params.query.heads);
  if (params.query.tokens > 0) {
    launch(find_rotations_kernel,
           dim3(blocks_for(params.query.tokens * (params.rope.rotary_dim / 2), kRotationThreads)),
           kRotationThreads, 0, stream, params, request.memory);
  }
  with_key_tile(params.key, params.query.dtype, [&](auto tag) {
    using Tile = typename decltype(tag)::Type;
    launch(centre_queries_kernel<typename Tile::Element>,
           dim3(query_heads, blocks_for(request.memory.stride, kWarpSize)), kCentringThreads,
           sizeof(CentringMemory), stream, params, request.memory);
    // Query heads are dealt to as many blocks as a device has room for.
    const int64_t group = params.query.heads / params.key.num_heads;
    const int64_t key_tiles = ceil_div(params.tokens, Tile::kKeys);
    const int64_t slices =
        std::clamp<int64_t>(kBlocksThatFillADevice / (key_tiles * params.key.num_heads), 1, group);
    const int64_t heads_per_block = ceil_div(group, slices);
    launch(expect_logits_kernel<Tile>,
           dim3(blocks_for(params.tokens, Tile::kKeys), request.heads.x,
                static_cast<unsigned>(ceil_div(group, heads_per_block))),
           kKeyTileThreads, sizeof(typename Tile::Memory), stream, params, request.memory,
           static_cast<int>(heads_per_block), request.is_aligned);
  });
  launch(sum_expectations_kernel, dim3(query_heads), kSumThreads,
         2 * (kSumThreads / kWarpSize) * sizeof(float), stream, params, request.memory);
  launch(weigh_values_kernel, request.chunks, kThreads, 0, stream, params, request.memory,
         has_aligned_rows(params.value));
}

}  // namespace phasekv::cuda
