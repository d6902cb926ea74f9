// Scores the keys of a request by the attention that representative queries pay to them: the score
// of AgentKV (arXiv 2609.14872, section 3), of R-KV (arXiv 2505.24133, its importance) and of
// SnapKV (arXiv 2404.14469), which differ in the options.
#pragma once

#include <cstdint>

#include "phasekv/tensor.h"

namespace phasekv {

// What the query heads of a KV head (its GQA group) make of one query together.
enum class GroupReduction {
  max_logit,  // softmax of the largest q.k of the group (R-KV)
  max,        // the largest of the group's probabilities
  mean,       // the mean of the group's probabilities (SnapKV)
};

// Over neighbouring tokens, stride 1; as many scores as before.
enum class Pooling {
  none,
  max,      // of the neighbours that exist
  average,  // of pooling_kernel scores, of which those that do not exist count as 0
};

struct ScoreKeysParams {
  RowsView query;  // [queries, query heads, head_size], rotated to their positions as the keys are;
                   // query heads a multiple of KV heads
  PagedView key;
  const int32_t* block_table = nullptr;  // [blocks of the request] block ids; only those of the
                                         // keys scored are looked at
  int64_t first_token = 0;  // index in the request's block table of the first key scored
  int64_t tokens = 0;       // keys scored
  const int64_t* query_limits = nullptr;  // [queries] each in [0, tokens], or null: query i sees
                                          // the keys [0, limit), counted from first_token
  int64_t excluded_recent = 0;  // the last so many keys are outside the softmax, are not read and
                                // get the score 0; may exceed tokens
  GroupReduction group = GroupReduction::max_logit;
  Pooling pooling = Pooling::none;
  int64_t pooling_kernel = 1;  // odd; unused without pooling
  float scale = 1.0F;          // multiplies q.k before the softmax
  float* scores = nullptr;     // output, [kv_heads, tokens]
};

// scores[h][j] = pooled mean over the queries of their softmax over the keys they see. A query that
// sees no key is not counted; without any the scores are zeros. Neighbours are pooled among the
// keys that are not excluded. The result does not depend on block ids or thread count. A query head
// that is not finite spoils the scores of its KV head, visibly.
void score_keys(const ScoreKeysParams& params);

}  // namespace phasekv
