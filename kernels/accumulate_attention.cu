// Bound: see attention_mass.cu.
#include <cstdint>
#include <string>

#include "attention_mass.cuh"
#include "phasekv/cuda.h"
#include "validate.h"

namespace phasekv::cuda {
namespace {

constexpr int64_t kMostPhases = 65535;  // blocks of a grid's third axis

MassProblem problem_of(const AccumulateAttentionParams& params) {
  MassProblem problem;
  problem.query = params.query;
  problem.query_limits = params.query_limits;
  problem.query_phases = params.query_phases;
  problem.num_phases = params.num_phases;
  problem.key = params.key;
  problem.block_table = params.block_table;
  problem.first_token = params.first_token;
  problem.tokens = params.tokens;
  problem.scale = params.scale;
  return problem;
}

void check(const AccumulateAttentionParams& params) {
  check_mass_problem(problem_of(params));
  if (params.num_phases < 0 || params.num_phases > kMostPhases) {
    refuse("num_phases", params.num_phases, "in [0, " + std::to_string(kMostPhases) + "]");
  }
  check_not_null("query_limits", params.query_limits, params.query.tokens);
  check_not_null("query_phases", params.query_phases, params.query.tokens);
  if (params.sums_stride < params.tokens) {
    refuse("sums_stride", params.sums_stride, "at least tokens = " + std::to_string(params.tokens));
  }
  check_not_null("sums", params.sums, params.tokens * params.num_phases);
}

}  // namespace

int64_t accumulate_attention_workspace_bytes(const AccumulateAttentionParams& params) {
  check(params);
  Allotment memory;
  take_attention_mass_memory(problem_of(params), memory);
  return memory.bytes();
}

void accumulate_attention(const AccumulateAttentionParams& params, const Workspace& workspace,
                          Stream stream) {
  check(params);
  if (params.tokens == 0 || params.query.tokens == 0 || params.num_phases == 0) return;
  const MassOutput output = {.data = params.sums,
                             .phase_stride = params.key.num_heads * params.sums_stride,
                             .head_stride = params.sums_stride,
                             .tokens = params.tokens,
                             .adds = true,
                             .is_a_mean = false};
  attention_mass(problem_of(params), output, Allotment(workspace),
                 "accumulate_attention_workspace_bytes()", stream);
}

}  // namespace phasekv::cuda
