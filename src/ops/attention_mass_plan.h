// Divides the queries of score_keys and accumulate_attention into tiles that share one pass over
// the keys. Compiled once, for all instruction sets.
#pragma once

#include <cstdint>
#include <vector>

namespace phasekv {

// Queries [first_query, first_query + num_queries) of AttentionMassPlan::queries, all of one phase,
// by ascending limit.
struct MassTile {
  int64_t first_query;
  int64_t num_queries;
  int64_t phase;
};

struct MassQuery {
  int64_t row;
  int64_t limit;  // it attends the keys [0, limit); never 0
};

// What the tiles are does not depend on the thread count, so neither does the order of additions.
class AttentionMassPlan {
 public:
  // `limits` may be null (all keys are attended) and is cut at most_limit; `phases` may be null
  // (one phase).
  AttentionMassPlan(int64_t num_queries, const int64_t* limits, int64_t most_limit,
                    const int32_t* phases, int64_t group, int64_t kv_heads, int64_t head_size,
                    int threads);
  ~AttentionMassPlan();
  AttentionMassPlan(const AttentionMassPlan&) = delete;
  AttentionMassPlan& operator=(const AttentionMassPlan&) = delete;

  // Everything below is out of line: the kernels must not instantiate a standard template.
  const MassQuery* queries() const;  // without those of limit 0
  int64_t num_queries() const;
  const MassTile* tiles() const;
  int64_t num_tiles() const;
  int64_t max_queries_per_tile() const;
  int num_threads() const;

 private:
  std::vector<MassQuery> queries_;
  std::vector<MassTile> tiles_;
  int64_t max_queries_per_tile_ = 0;
  int num_threads_ = 1;
};

}  // namespace phasekv
