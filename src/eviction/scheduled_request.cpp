#include "eviction/scheduled_request.h"

#include "phasekv/ops/push_queries.h"
#include "validate.h"

namespace phasekv::eviction {

ScheduledRequest::ScheduledRequest(RequestCache* cache, const ScheduledTokens& tokens)
    : cache_(cache), begin_(tokens.begin), end_(tokens.end) {
  check_equal("begin", tokens.begin, "the tokens computed so far", cache->computed());
  check_equal("tokens.size", static_cast<int64_t>(tokens.tokens.size()), "end - begin",
              tokens.end - tokens.begin);
  cache->schedule(tokens.tokens, tokens.computed);
  report_.request = tokens.request;
  for (const BufferedQuery& query : cache->buffers().take_pushed()) {
    batch_rows_.push_back(tokens.first_row + query.position - tokens.begin);
    entries_.push_back(query.entry);
  }
  if (!has_event()) return;
  queries_ = cache->buffers().contents();
  const bool has_phases = cache->policy().needs().sums != 1;
  for (const BufferedQuery& query : queries_) {
    query_positions_.push_back(query.position);
    query_phases_.push_back(has_phases ? static_cast<int32_t>(query.phase) : 0);
  }
  std::vector<int64_t>& counts = cache->sum_counts();
  if (counts.empty()) return;
  for (const int32_t phase : query_phases_) ++counts[static_cast<size_t>(phase)];
}

void ScheduledRequest::collect(int64_t layer, const RowsView& query,
                               const int64_t* query_rows) const {
  if (entries_.empty()) return;
  std::vector<int64_t> rows = batch_rows_;
  if (query_rows != nullptr) {
    for (int64_t& row : rows) row = query_rows[row];
  }
  push_queries({.query = query,
                .rows = rows.data(),
                .entries = entries_.data(),
                .count = static_cast<int64_t>(rows.size()),
                .buffer = cache_->queries(layer)});
}

}  // namespace phasekv::eviction
