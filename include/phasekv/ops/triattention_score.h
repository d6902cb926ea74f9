// The score of TriAttention (arXiv 2604.04921) in closed form: the mean over future offsets of the
// attention that a calibrated mean query will pay to a key is one dot product and a sum of norms.
#pragma once

#include <cstdint>

#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv {

struct TriattentionQueryParams {
  int64_t query_heads = 0;
  int64_t head_size = 0;
  RopeView rope;                      // of the model
  const float* mean_query = nullptr;  // [query heads, rotary_dim / 2, 2]: mean over a calibration
                                      // text of the queries before RoPE, pair by pair, as (real,
                                      // imaginary)
  const float* mean_norm = nullptr;   // [query heads, rotary_dim / 2]: mean of the pairs' norms
  double magnitude = 1.0;  // YaRN's factor of rotated queries and keys, which the cached keys carry
  int64_t time = 0;        // position of the next token, in [0, 2^24]
  float* synthetic_query =
      nullptr;                    // output, [query heads, head_size], as triattention_score takes
  float* norm_weights = nullptr;  // output, [query heads, rotary_dim / 2]
};

// Per query head and pair f, with the offsets delta = 1, 2, 4, ..., 65536:
//   synthetic_query[f] = magnitude * mean_query[f] * mean over delta of exp(i frequency[f] (time +
//   delta)), laid out as the model lays out keys; zero in dimensions that are not rotated
//   norm_weights[f]    = magnitude * (mean_norm[f] - |mean_query[f]|)
void triattention_query(const TriattentionQueryParams& params);

struct TriattentionScoreParams {
  PagedView key;
  const int32_t* block_table = nullptr;  // [blocks of the request] block ids; only those of the
                                         // keys are looked at
  int64_t first_token = 0;               // index in the request's block table of the first key
  int64_t tokens = 0;
  const float* synthetic_query = nullptr;  // [query heads, head_size]
  const float* norm_weights = nullptr;     // [query heads, rotary_dim / 2]
  int64_t query_heads = 0;                 // a multiple of the KV heads
  int64_t rotary_dim = 0;                  // even, in [2, head_size]
  RopePairing pairing = RopePairing::neox;
  bool normalize = false;   // per query head: subtract the mean over the tokens and divide by the
                            // standard deviation (of the population, at least 1e-6)
  bool group_mean = false;  // per KV head the mean over its query heads, else the maximum
  float* scores = nullptr;  // output, [kv_heads, tokens]
};

// Per query head, synthetic_query . k + sum over pairs of norm_weights[f] * |pair f of k|; then the
// options. The keys are as cached, rotated to their positions, which need not be known. The result
// does not depend on block ids or thread count.
void triattention_score(const TriattentionScoreParams& params);

}  // namespace phasekv
