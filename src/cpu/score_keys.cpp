#include "phasekv/ops/score_keys.h"

#include <omp.h>

#include "cpu/attention_mass.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/vector.h"
#include "ops/attention_mass_plan.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// scores[i] = the largest, or the mean, of the `kernel` scores around i; `memory` has room for
// count + kernel floats.
void pool(Pooling pooling, int64_t kernel, int64_t count, float* memory, float* scores) {
  const bool averages = pooling == Pooling::average;
  const float beyond = averages ? 0.0F : -__builtin_inff();
  for (int64_t i = 0; i < kernel / 2; ++i) memory[i] = memory[kernel / 2 + count + i] = beyond;
  for (int64_t i = 0; i < count; ++i) memory[kernel / 2 + i] = scores[i];
  const Vec scale = broadcast(averages ? 1.0F / static_cast<float>(kernel) : 1.0F);
  for_lanes(0, count, [&](auto lanes, int64_t i, int n) {
    Vec pooled = load_lanes<lanes.kFull>(memory + i, n);
    for (int64_t k = 1; k < kernel; ++k) {
      const Vec neighbour = load_lanes<lanes.kFull>(memory + i + k, n);
      pooled = averages ? pooled + neighbour : max(pooled, neighbour);
    }
    store_lanes<lanes.kFull>(scores + i, scale * pooled, n);
  });
}

}  // namespace

void score_keys(const ScoreKeysParams& params) {
  const int64_t heads = params.key.num_heads;
  const int64_t excluded =
      params.excluded_recent < params.tokens ? params.excluded_recent : params.tokens;
  const int64_t candidates = params.tokens - excluded;
  for (int64_t i = 0; i < heads * params.tokens; ++i) params.scores[i] = 0.0F;
  const MassProblem problem{params.query, params.key,   params.block_table, params.first_token,
                            candidates,   params.group, params.scale};
  const AttentionMassPlan plan(params.query.tokens, params.query_limits, candidates, nullptr,
                               problem.group(), heads, params.key.head_size,
                               omp_in_parallel() != 0 ? 1 : omp_get_max_threads());
  if (plan.num_queries() == 0) return;

  const float share = 1.0F / static_cast<float>(plan.num_queries());
  for_each_mass(problem, plan, [&](const MassTile& /*tile*/, int64_t head, const float* mass) {
    float* scores = params.scores + head * params.tokens;
    for (int64_t i = 0; i < candidates; ++i) scores[i] += share * mass[i];
  });
  if (params.pooling == Pooling::none) return;
  const Scratch memory(1, candidates + params.pooling_kernel);
  for (int64_t head = 0; head < heads; ++head) {
    pool(params.pooling, params.pooling_kernel, candidates, memory.part(0),
         params.scores + head * params.tokens);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
