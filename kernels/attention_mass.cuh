// The attention that queries pay to the keys of a request, summed over the queries: the common part
// of score_keys and accumulate_attention.
#pragma once

#include <cstdint>

#include "phasekv/cuda.h"
#include "phasekv/ops/score_keys.h"
#include "phasekv/tensor.h"
#include "workspace.cuh"

namespace phasekv::cuda {

struct MassProblem {
  RowsView query;
  const int64_t* query_limits = nullptr;  // null: every query attends all keys
  const int32_t* query_phases = nullptr;  // null: all are of phase 0
  int64_t num_phases = 1;
  PagedView key;
  const int32_t* block_table = nullptr;
  int64_t first_token = 0;
  int64_t tokens = 0;  // limits are cut to this, and no further key is read
  GroupReduction reduction = GroupReduction::mean;
  float scale = 1.0F;
};

struct MassOutput {
  float* data = nullptr;
  int64_t phase_stride = 0;
  int64_t head_stride = 0;
  int64_t tokens = 0;      // written; at least the problem's
  bool adds = false;       // to what is there
  bool is_a_mean = false;  // over the queries that see a key
};

// data[phase][head][j] = (or +=) the sum, or the mean, over the phase's queries of what the heads
// of the group make of a query's softmax. Takes its memory from `memory`, which is then checked.
void attention_mass(const MassProblem& problem, const MassOutput& output, Allotment memory,
                    const char* needed_by, Stream stream);
// What attention_mass will take.
void take_attention_mass_memory(const MassProblem& problem, Allotment& memory);

// The shapes of a problem. Throws Error.
void check_mass_problem(const MassProblem& problem);

}  // namespace phasekv::cuda
