// How a policy comes to its scores at an event, whichever cache the keys lie in.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "eviction/scheduled_request.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/tensor.h"

namespace phasekv::eviction {

// The buffered queries of a request's layer, in the order of ScheduledRequest::queries().
class GatheredQueries {
 public:
  GatheredQueries(const ScheduledRequest& scheduled, int64_t layer);

  const RowsView& view() const { return view_; }
  // Of the query heads of one of `kv_heads` KV heads.
  RowsView of_kv_head(int64_t head, int64_t kv_heads) const;

 private:
  std::vector<uint8_t> memory_;
  RowsView view_;
};

// Adds the attention of input.queries to `sums`, [needs.sums, kv heads, tokens].
void add_attention(const PolicyInput& input, std::vector<float>* sums);

// Lets the policy score, and tells what it did wrong, if anything: then the scores are positions,
// so that the newest tokens are the best. A step is under way and other requests share it.
std::string score_or_newest(const Policy& policy, const PolicyInput& input,
                            std::span<float> scores);

}  // namespace phasekv::eviction
