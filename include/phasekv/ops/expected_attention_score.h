// The score of ExpectedAttention (arXiv 2510.00636): the attention that queries to come, taken for
// normally distributed, are expected to pay to a key, times the norm of its value.
#pragma once

#include <cstdint>

#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv {

struct ExpectedAttentionScoreParams {
  PagedView key;
  PagedView value;                       // in blocks as the keys are
  const int32_t* block_table = nullptr;  // [blocks of the request] block ids; only those of the
                                         // keys are looked at
  int64_t first_token = 0;               // index in the request's block table of the first key
  int64_t tokens = 0;
  const int32_t* positions = nullptr;  // [kv_heads, tokens] original positions; null: key i stands
                                       // at position i
  RowsView query;  // [queries, query heads, head_size], rotated to their positions; query heads a
                   // multiple of KV heads
  const int64_t* query_positions = nullptr;  // [queries], in [0, 2^24]
  int64_t sinks = 0;          // what stands before this position counts neither as query nor as key
  RopeView rope;              // of queries and keys
  int64_t next_position = 0;  // of the first query to come, in [0, 2^24 - horizon]
  int64_t horizon = 512;      // queries to come, at least 1
  float scale = 1.0F;         // multiplies q.k before the softmax
  float* scores = nullptr;    // output, [kv_heads, tokens]
};

// Of a head's queries before RoPE mean m and covariance S are taken, and of the rotations of the
// positions [next_position, next_position + horizon) the mean R. The logarithm of the expected
// exp(scale q.k) is then
//   z[j] = scale (R m).k[j] + scale^2 / 2 k[j]^T (R S R^T) k[j]
// and
//   scores[h][j] = |v[j]| * mean over the group of softmax(z)[j]
// A sink's weight is zero, and without a query all weights are the same. The result does not depend
// on block ids or thread count.
void expected_attention_score(const ExpectedAttentionScoreParams& params);

}  // namespace phasekv
