// Bound by memory where a KV head has up to 4 query heads: each key is read once. Beyond, by the
// reads of shared memory.
#include <cmath>
#include <cstdint>

#include "block_reduction.cuh"
#include "key_tile.cuh"
#include "launch.cuh"
#include "ops/key_range.h"
#include "phasekv/cuda.h"
#include "softmax.cuh"
#include "validate.h"
#include "views.cuh"
#include "warp.cuh"
#include "workspace.cuh"

namespace phasekv::cuda {
namespace {

constexpr int kKeys = 32;          // of a block
constexpr int kHeadsPerChunk = 4;  // query heads that are scored at once
constexpr int kThreads = kKeys * kHeadsPerChunk;
constexpr int kAtOnce = 4;  // floats that a thread reads from shared memory
constexpr int kNormalizeThreads = 256;
constexpr int kNormalizeWarps = kNormalizeThreads / kWarpSize;
constexpr float kLeastDeviation = 1e-6F;

// Shared memory of a block, in floats. Rows of keys are that of the key and, behind it, the norms
// of its pairs; rows of query heads are the synthetic query and, behind it, the weights of the
// norms.
struct Extents {
  int head_size;  // in whole steps of kAtOnce, as
  int pairs;
  int stride;  // of rows of keys: 8 of them lie in different banks

  int floats() const {
    return kKeys * stride + kHeadsPerChunk * (head_size + pairs) + kHeadsPerChunk * kKeys;
  }
};

Extents extents_of(const TriattentionScoreParams& params) {
  const auto whole_steps = [](int64_t count) {
    return static_cast<int>(ceil_div(count, kAtOnce)) * kAtOnce;
  };
  Extents extents{};
  extents.head_size = whole_steps(params.key.head_size);
  extents.pairs = whole_steps(params.rotary_dim / 2);
  extents.stride = extents.head_size + extents.pairs;
  while (extents.stride % 32 != kAtOnce) extents.stride += kAtOnce;
  return extents;
}

template <int kCount>
__device__ inline void load_keys(const KeyRows& rows, int first, const Extents& extents,
                                 float* to) {
  const int head_size = static_cast<int>(rows.view->head_size);
  const int per_row = (extents.head_size + kCount - 1) / kCount;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * per_row; i += kThreads) {
    const int row = i / per_row;
    const int dim = (i - row * per_row) * kCount;
    float values[kCount] = {};
    if (rows.has(first + row) && dim < head_size) {
      load_vector<kCount>(rows.data(), rows.dtype(),
                          rows.offset(first + row) + (kCount == 1 ? rows.offset_in_row(dim) : dim),
                          values);
    }
    store_vector<kCount>(values, to + row * extents.stride + dim);
  }
}

__device__ inline void take_norms(const TriattentionScoreParams& params, const Extents& extents,
                                  float* keys) {
  const auto pairs = static_cast<int>(params.rotary_dim / 2);
  const bool is_neox = params.pairing == RopePairing::neox;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * extents.pairs; i += kThreads) {
    const int row = i / extents.pairs;
    const int pair = i - row * extents.pairs;
    float* key = keys + row * extents.stride;
    float norm = 0.0F;
    if (pair < pairs) {
      const float x = key[is_neox ? pair : 2 * pair];
      const float y = key[is_neox ? pair + pairs : 2 * pair + 1];
      norm = sqrtf(fmaf(x, x, y * y));
    }
    key[extents.head_size + pair] = norm;
  }
}

// Query heads [first, first + kHeadsPerChunk) of all, those before `end`.
__device__ inline void load_query_heads(const TriattentionScoreParams& params,
                                        const Extents& extents, int64_t first, int64_t end,
                                        float* to) {
  const auto head_size = static_cast<int>(params.key.head_size);
  const auto pairs = static_cast<int>(params.rotary_dim / 2);
  const int width = extents.head_size + extents.pairs;
  for (int i = static_cast<int>(threadIdx.x); i < kHeadsPerChunk * width; i += kThreads) {
    const int64_t head = first + i / width;
    const int at = i % width;
    const int pair = at - extents.head_size;
    float x = 0.0F;
    if (head < end && at < head_size) x = params.synthetic_query[head * head_size + at];
    if (head < end && pair >= 0 && pair < pairs) x = params.norm_weights[head * pairs + pair];
    to[i] = x;
  }
}

// Block (32 keys, KV head). Thread (key, head): that key's score of one of the four query heads of
// a chunk. `raw` [query heads, tokens] takes the scores as they are; null: they are reduced here.
__global__ void __launch_bounds__(kThreads)
    score_kernel(TriattentionScoreParams params, Extents extents, bool is_aligned, float* raw) {
  auto* keys = reinterpret_cast<float*>(dynamic_shared_memory());
  float* queries = keys + kKeys * extents.stride;
  float* scores = queries + kHeadsPerChunk * (extents.head_size + extents.pairs);
  const int thread = static_cast<int>(threadIdx.x);
  const int key = thread % kKeys;
  const int head = thread / kKeys;
  const int first = static_cast<int>(blockIdx.x) * kKeys;
  const KeyRows rows = {&params.key,
                        params.block_table,
                        static_cast<uint32_t>(params.first_token),
                        blockIdx.y,
                        static_cast<int>(params.tokens),
                        is_aligned};
  if (is_aligned) {
    load_keys<8>(rows, first, extents, keys);
  } else {
    load_keys<1>(rows, first, extents, keys);
  }
  __syncthreads();
  take_norms(params, extents, keys);

  const int64_t group = params.query_heads / params.key.num_heads;
  const int64_t first_head = blockIdx.y * group;
  const int width = extents.head_size + extents.pairs;
  const float share = params.group_mean ? 1.0F / static_cast<float>(group) : 1.0F;
  float reduced = 0.0F;  // of the threads of head 0
  for (int64_t chunk = 0; chunk < group; chunk += kHeadsPerChunk) {
    load_query_heads(params, extents, first_head + chunk, first_head + group, queries);
    __syncthreads();
    if (chunk + head < group) {
      float sum = 0.0F;
      for (int i = 0; i < width; i += kAtOnce) {
        float a[kAtOnce];
        float b[kAtOnce];
        load_vector<kAtOnce>(keys + key * extents.stride + i, a);
        load_vector<kAtOnce>(queries + head * width + i, b);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) sum = fmaf(a[j], b[j], sum);
      }
      if (raw == nullptr) {
        scores[head * kKeys + key] = sum;
      } else if (first + key < params.tokens) {
        raw[(first_head + chunk + head) * params.tokens + first + key] = sum;
      }
    }
    __syncthreads();  // the scores are there, and nobody needs these query heads
    if (raw != nullptr || head != 0) continue;
    for (int i = 0; i < kHeadsPerChunk && chunk + i < group; ++i) {
      const float score = share * scores[i * kKeys + key];
      if (chunk + i == 0) {
        reduced = score;
      } else {
        reduced = params.group_mean ? reduced + score : larger_of(reduced, score);
      }
    }
  }
  if (raw == nullptr && head == 0 && first + key < params.tokens) {
    params.scores[blockIdx.y * params.tokens + first + key] = reduced;
  }
}

struct Moments {
  float mean;
  float inverse_deviation;
};

// Block: a query head.
__global__ void __launch_bounds__(kNormalizeThreads)
    find_moments_kernel(const float* raw, int64_t tokens, Moments* moments) {
  auto* sums = reinterpret_cast<float*>(dynamic_shared_memory());  // [2][kNormalizeWarps]
  const float* scores = raw + blockIdx.x * tokens;
  const float share = 1.0F / static_cast<float>(tokens);
  float sum = 0.0F;
  for (int64_t i = threadIdx.x; i < tokens; i += kNormalizeThreads) sum += scores[i];
  const float mean = share * block_sum<kNormalizeThreads>(sum, sums);
  float squares = 0.0F;
  for (int64_t i = threadIdx.x; i < tokens; i += kNormalizeThreads) {
    const float distance = scores[i] - mean;
    squares = fmaf(distance, distance, squares);
  }
  const float deviation =
      sqrtf(share * block_sum<kNormalizeThreads>(squares, sums + kNormalizeWarps));
  if (threadIdx.x != 0) return;
  moments[blockIdx.x] = {mean, 1.0F / (deviation < kLeastDeviation ? kLeastDeviation : deviation)};
}

// A thread takes a key of a KV head.
__global__ void __launch_bounds__(kNormalizeThreads)
    reduce_normalized_kernel(TriattentionScoreParams params, const float* raw,
                             const Moments* moments) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * kNormalizeThreads + threadIdx.x;
  if (key >= params.tokens) return;
  const int64_t group = params.query_heads / params.key.num_heads;
  const float share = params.group_mean ? 1.0F / static_cast<float>(group) : 1.0F;
  float reduced = 0.0F;
  for (int64_t i = 0; i < group; ++i) {
    const int64_t head = blockIdx.y * group + i;
    const Moments& of_head = moments[head];
    const float score =
        share * (raw[head * params.tokens + key] - of_head.mean) * of_head.inverse_deviation;
    if (i == 0) {
      reduced = score;
    } else {
      reduced = params.group_mean ? reduced + score : larger_of(reduced, score);
    }
  }
  params.scores[blockIdx.y * params.tokens + key] = reduced;
}

struct Memory {
  float* raw;
  Moments* moments;
};

Memory take_memory(const TriattentionScoreParams& params, Allotment& memory) {
  const int64_t heads = params.normalize ? params.query_heads : 0;
  float* raw = memory.take<float>(heads * params.tokens);
  return {raw, memory.take<Moments>(heads)};
}

void check(const TriattentionScoreParams& params) {
  check_device_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_key_tile(params.key);
  check_whole_groups("query_heads", params.query_heads, params.key);
  check_rotary_dim("rotary_dim", params.rotary_dim, params.key.head_size);
  check_not_null("synthetic_query", params.synthetic_query, params.query_heads);
  check_not_null("norm_weights", params.norm_weights, params.query_heads);
  check_not_null("scores", params.scores, params.tokens);
}

}  // namespace

int64_t triattention_score_workspace_bytes(const TriattentionScoreParams& params) {
  check(params);
  Allotment memory;
  take_memory(params, memory);
  return memory.bytes();
}

void triattention_score(const TriattentionScoreParams& params, const Workspace& workspace,
                        Stream stream) {
  check(params);
  if (params.tokens == 0) return;
  Allotment memory(workspace);
  const Memory taken = take_memory(params, memory);
  memory.check("triattention_score_workspace_bytes()");
  const Extents extents = extents_of(params);
  const auto kv_heads = static_cast<unsigned>(params.key.num_heads);
  launch(score_kernel, dim3(blocks_for(params.tokens, kKeys), kv_heads), kThreads,
         static_cast<size_t>(extents.floats()) * sizeof(float), stream, params, extents,
         has_aligned_rows(params.key), taken.raw);
  if (!params.normalize) return;
  launch(find_moments_kernel, dim3(blocks_for(params.query_heads, 1)), kNormalizeThreads,
         2 * kNormalizeWarps * sizeof(float), stream, taken.raw, params.tokens, taken.moments);
  launch(reduce_normalized_kernel, dim3(blocks_for(params.tokens, kNormalizeThreads), kv_heads),
         kNormalizeThreads, 0, stream, params, taken.raw, taken.moments);
}

}  // namespace phasekv::cuda
