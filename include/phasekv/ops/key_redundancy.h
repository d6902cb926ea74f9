// How much a key repeats the others: the redundancy term of R-KV (arXiv 2505.24133, section 3).
#pragma once

#include <cstdint>

#include "phasekv/tensor.h"

namespace phasekv {

struct KeyRedundancyParams {
  PagedView key;
  const int32_t* block_table = nullptr;  // [blocks of the request] block ids; only those of the
                                         // keys are looked at
  int64_t first_token = 0;               // index in the request's block table of the first key
  int64_t tokens = 0;
  const int32_t* positions = nullptr;  // [kv_heads, tokens] original positions, any numbers that
                                       // differ within a head; null: the keys are in order
  float threshold = 0.5F;              // at least 0; keys of a larger cosine are similar
  float* redundancy = nullptr;         // output, [kv_heads, tokens], a softmax over the tokens
};

// With c[i][j] the cosine of keys i and j (norms plus 1e-8), zero for i = j, and for every i also
// zero at the similar j of the largest position, or, where none is similar, at the j of the
// smallest:
//   redundancy[h][j] = softmax over j of (mean over i of c[i][j])
// The result does not depend on block ids or thread count.
void key_redundancy(const KeyRedundancyParams& params);

}  // namespace phasekv
