// Bound: see attention_mass.cu. Pooling reads and writes one float per key and KV head.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_mass.cuh"
#include "launch.cuh"
#include "phasekv/cuda.h"
#include "softmax.cuh"
#include "validate.h"
#include "views.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kPoolThreads = 128;

// A thread takes a key of a KV head. `unpooled` is [KV heads, candidates].
__global__ void __launch_bounds__(kPoolThreads)
    pool_kernel(ScoreKeysParams params, const float* unpooled, int64_t candidates) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (key >= params.tokens) return;
  float pooled = 0.0F;
  if (key < candidates) {
    const float* scores = unpooled + blockIdx.y * candidates;
    const int64_t half = params.pooling_kernel / 2;
    const int64_t begin = key < half ? 0 : key - half;
    const int64_t end = candidates - key > half ? key + half + 1 : candidates;
    pooled = scores[begin];
    for (int64_t i = begin + 1; i < end; ++i) {
      pooled =
          params.pooling == Pooling::average ? pooled + scores[i] : larger_of(pooled, scores[i]);
    }
    if (params.pooling == Pooling::average) pooled /= static_cast<float>(params.pooling_kernel);
  }
  params.scores[blockIdx.y * params.tokens + key] = pooled;
}

int64_t candidates_of(const ScoreKeysParams& params) {
  return params.tokens - std::min(params.excluded_recent, params.tokens);
}

bool pools(const ScoreKeysParams& params) {
  return params.pooling != Pooling::none && candidates_of(params) > 0;
}

MassProblem problem_of(const ScoreKeysParams& params) {
  MassProblem problem;
  problem.query = params.query;
  problem.query_limits = params.query_limits;
  problem.key = params.key;
  problem.block_table = params.block_table;
  problem.first_token = params.first_token;
  problem.tokens = candidates_of(params);
  problem.reduction = params.group;
  problem.scale = params.scale;
  return problem;
}

float* take_unpooled(const ScoreKeysParams& params, Allotment& memory) {
  return memory.take<float>(pools(params) ? params.key.num_heads * candidates_of(params) : 0);
}

void check(const ScoreKeysParams& params) {
  check_device_key_range(params.key, params.block_table, params.first_token, params.tokens);
  if (params.excluded_recent < 0) refuse("excluded_recent", params.excluded_recent, "at least 0");
  check_mass_problem(problem_of(params));
  const bool is_odd = params.pooling_kernel > 0 && params.pooling_kernel % 2 == 1;
  if (params.pooling != Pooling::none && !is_odd) {
    refuse("pooling_kernel", params.pooling_kernel, "odd and positive");
  }
  check_not_null("scores", params.scores, params.tokens);
}

}  // namespace

int64_t score_keys_workspace_bytes(const ScoreKeysParams& params) {
  check(params);
  Allotment memory;
  take_unpooled(params, memory);
  take_attention_mass_memory(problem_of(params), memory);
  return memory.bytes();
}

void score_keys(const ScoreKeysParams& params, const Workspace& workspace, Stream stream) {
  check(params);
  if (params.tokens == 0) return;
  Allotment memory(workspace);
  float* unpooled = take_unpooled(params, memory);
  const int64_t written = pools(params) ? candidates_of(params) : params.tokens;
  const MassOutput output = {.data = pools(params) ? unpooled : params.scores,
                             .phase_stride = 0,
                             .head_stride = written,
                             .tokens = written,
                             .adds = false,
                             .is_a_mean = true};
  attention_mass(problem_of(params), output, memory, "score_keys_workspace_bytes()", stream);
  if (!pools(params)) return;
  launch(pool_kernel,
         dim3(blocks_for(params.tokens, kPoolThreads), static_cast<unsigned>(params.key.num_heads)),
         kPoolThreads, 0, stream, params, unpooled, candidates_of(params));
}

}  // namespace phasekv::cuda
