// Bound by memory: the keys are read twice, the second time from the L2 cache where a layer's have
// room there.
#include <cstdint>

#include "key_directions.cuh"
#include "key_tile.cuh"
#include "launch.cuh"
#include "phasekv/cuda.h"
#include "validate.h"
#include "views.cuh"
#include "workspace.cuh"

namespace phasekv::cuda {
namespace {

// On the device.
struct KeydiffMemory {
  int chunks = 0;
  float* inverse_norms = nullptr;  // [KV heads, tokens]
  float* chunk_sums = nullptr;     // [KV heads, chunks, head_size] of keys of unit length
  float* directions = nullptr;     // [KV heads, head_size] what every key is multiplied with
};

KeydiffMemory take_memory(const KeydiffScoreParams& params, Allotment& memory) {
  const int64_t heads = params.key.num_heads;
  const int64_t chunks = ceil_div(params.tokens, kChunkKeys);
  KeydiffMemory taken;
  taken.chunks = static_cast<int>(chunks);
  taken.inverse_norms = memory.take<float>(heads * params.tokens);
  taken.chunk_sums = memory.take<float>(heads * chunks * params.key.head_size);
  taken.directions = memory.take<float>(heads * params.key.head_size);
  return taken;
}

// Block (chunk, KV head).
__global__ void __launch_bounds__(kThreads)
    measure_keys_kernel(KeydiffScoreParams params, KeydiffMemory memory, bool is_aligned) {
  auto& shared = *reinterpret_cast<DirectionMemory*>(dynamic_shared_memory());
  const int64_t kv_head = blockIdx.y;
  const int64_t chunk = kv_head * memory.chunks + blockIdx.x;
  measure_directions(key_rows_of(params, is_aligned), static_cast<int>(blockIdx.x) * kChunkKeys,
                     shared, memory.inverse_norms + kv_head * params.tokens,
                     memory.chunk_sums + chunk * params.key.head_size, [](int) {});
}

// Block: a KV head; a thread has a dimension.
__global__ void __launch_bounds__(kMostDims)
    turn_mean_kernel(KeydiffScoreParams params, KeydiffMemory memory) {
  auto* sums = reinterpret_cast<float*>(dynamic_shared_memory());  // [kMostDims]
  const int64_t kv_head = blockIdx.x;
  const auto dim = static_cast<int>(threadIdx.x);
  const auto head_size = static_cast<int>(params.key.head_size);
  float sum = 0.0F;
  if (dim < head_size) {
    for (int i = 0; i < memory.chunks; ++i) {
      sum += memory.chunk_sums[(kv_head * memory.chunks + i) * head_size + dim];
    }
  }
  sums[dim] = sum;
  __syncthreads();
  if (dim >= head_size) return;
  float squares = 0.0F;
  for (int i = 0; i < head_size; ++i) squares = fmaf(sums[i], sums[i], squares);
  memory.directions[kv_head * head_size + dim] = -sum / (sqrtf(squares) + kNormAddend);
}

// Block (chunk, KV head).
__global__ void __launch_bounds__(kThreads)
    compare_keys_kernel(KeydiffScoreParams params, KeydiffMemory memory, bool is_aligned) {
  const int64_t kv_head = blockIdx.y;
  const int64_t first_index = kv_head * params.tokens;
  multiply_directions(
      key_rows_of(params, is_aligned), static_cast<int>(blockIdx.x) * kChunkKeys,
      memory.directions + kv_head * params.key.head_size, [&](int key, float product) {
        params.scores[first_index + key] = product * memory.inverse_norms[first_index + key];
      });
}

void check(const KeydiffScoreParams& params) {
  check_device_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_key_tile(params.key);
  check_not_null("scores", params.scores, params.tokens);
}

}  // namespace

int64_t keydiff_score_workspace_bytes(const KeydiffScoreParams& params) {
  check(params);
  Allotment memory;
  take_memory(params, memory);
  return memory.bytes();
}

void keydiff_score(const KeydiffScoreParams& params, const Workspace& workspace, Stream stream) {
  check(params);
  if (params.tokens == 0) return;
  const DirectionLaunch<KeydiffMemory> request =
      prepare_launch(params, workspace, take_memory, "keydiff_score_workspace_bytes()");
  launch(measure_keys_kernel, request.chunks, kThreads, sizeof(DirectionMemory), stream, params,
         request.memory, request.is_aligned);
  launch(turn_mean_kernel, request.heads, kMostDims, kMostDims * sizeof(float), stream, params,
         request.memory);
  launch(compare_keys_kernel, request.chunks, kThreads, 0, stream, params, request.memory,
         request.is_aligned);
}

}  // namespace phasekv::cuda
