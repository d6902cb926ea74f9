// How far a key points away from the others: the score of KeyDiff (arXiv 2504.15364, section 3).
#pragma once

#include <cstdint>

#include "phasekv/tensor.h"

namespace phasekv {

struct KeydiffScoreParams {
  PagedView key;
  const int32_t* block_table = nullptr;  // [blocks of the request] block ids; only those of the
                                         // keys are looked at
  int64_t first_token = 0;               // index in the request's block table of the first key
  int64_t tokens = 0;
  float* scores = nullptr;  // output, [kv_heads, tokens], in [-1, 1]
};

// With u[i] = key i / (its norm + 1e-8) and m the sum of all u[i] / (its norm + 1e-8):
//   scores[h][j] = - u[j] . m
// The mean has the sum's direction, so this is minus the cosine of key j and the mean of the keys
// of unit length. A key of zeros counts as one at right angles to all. The result does not depend
// on block ids or thread count.
void keydiff_score(const KeydiffScoreParams& params);

}  // namespace phasekv
