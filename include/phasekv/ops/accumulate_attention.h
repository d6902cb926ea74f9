// Adds up the attention that keys receive, by the phase of the queries that pay it: the running sum
// of H2O (arXiv 2306.14048), kept per phase.
#pragma once

#include <cstdint>

#include "phasekv/tensor.h"

namespace phasekv {

struct AccumulateAttentionParams {
  RowsView query;  // [queries, query heads, head_size], rotated to their positions as the keys are;
                   // query heads a multiple of KV heads
  const int64_t* query_limits =
      nullptr;  // [queries] each in [0, tokens]: query i attends the keys
                // [0, limit), counted from first_token; 0: it adds nothing
  const int32_t* query_phases = nullptr;  // [queries] each in [0, num_phases)
  int64_t num_phases = 0;
  PagedView key;
  const int32_t* block_table = nullptr;  // [blocks of the request] block ids; only those of the
                                         // keys attended are looked at
  int64_t first_token = 0;               // index in the request's block table of key 0
  int64_t tokens = 0;
  float scale = 1.0F;       // multiplies q.k before the softmax
  float* sums = nullptr;    // in and out, [num_phases, kv_heads, sums_stride]
  int64_t sums_stride = 0;  // at least tokens; entries beyond are left alone
};

// sums[phase][head][j] += over the queries of the phase, the mean over the head's query heads of
// softmax(scale * q k)_j: exact causal attention. The result does not depend on block ids or thread
// count.
void accumulate_attention(const AccumulateAttentionParams& params);

}  // namespace phasekv
