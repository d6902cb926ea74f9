// What score_keys and accumulate_attention must compute, in double precision and plain loops.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/rotation.h"
#include "phasekv/ops/score_keys.h"

namespace phasekv::oracle {

struct Attention {
  std::vector<std::vector<Row>> queries;  // [queries][query heads]
  std::vector<std::vector<Row>> keys;     // [kv_heads][tokens]
  std::vector<int64_t> limits;            // [queries]
  double scale = 1.0;

  int64_t tokens() const { return static_cast<int64_t>(keys[0].size()); }
  // The largest |scale * q.k| of any query with the keys of its head.
  double largest_score() const;
};

// softmax(scale * q k) over the keys [0, limit) of one KV head, [tokens]; zeros beyond.
Row probabilities(const Attention& attention, size_t query, size_t query_head, int64_t limit);

// [kv_heads][tokens]
std::vector<Row> score_keys(const Attention& attention, GroupReduction group, Pooling pooling,
                            int64_t pooling_kernel, int64_t excluded_recent);

// [num_phases][kv_heads][tokens]: what is added to the sums.
std::vector<std::vector<Row>> attention_sums(const Attention& attention,
                                             const std::vector<int32_t>& phases,
                                             int64_t num_phases);

}  // namespace phasekv::oracle
