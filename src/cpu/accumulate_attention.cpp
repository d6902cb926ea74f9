#include "phasekv/ops/accumulate_attention.h"

#include <omp.h>

#include "cpu/attention_mass.h"
#include "cpu/kernels.h"
#include "ops/attention_mass_plan.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

void accumulate_attention(const AccumulateAttentionParams& params) {
  const int64_t heads = params.key.num_heads;
  const MassProblem problem{params.query,       params.key,    params.block_table,
                            params.first_token, params.tokens, GroupReduction::mean,
                            params.scale};
  const AttentionMassPlan plan(params.query.tokens, params.query_limits, params.tokens,
                               params.query_phases, problem.group(), heads, params.key.head_size,
                               omp_in_parallel() != 0 ? 1 : omp_get_max_threads());
  if (plan.num_queries() == 0) return;
  for_each_mass(problem, plan, [&](const MassTile& tile, int64_t head, const float* mass) {
    float* sums = params.sums + (tile.phase * heads + head) * params.sums_stride;
    for (int64_t i = 0; i < params.tokens; ++i) sums[i] += mass[i];
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
