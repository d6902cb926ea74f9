#include "eviction/scheduled_request.h"

#include "validate.h"

namespace phasekv::eviction {

ScheduledRequest::ScheduledRequest(RequestCache* cache, const ScheduledTokens& tokens)
    : cache_(cache), begin_(tokens.begin), end_(tokens.end) {
  check_equal("begin", tokens.begin, "the tokens computed so far", cache->computed());
  check_equal("tokens.size", static_cast<int64_t>(tokens.tokens.size()), "end - begin",
              tokens.end - tokens.begin);
  cache->schedule(tokens.tokens, tokens.computed);
  report_.request = tokens.request;
  const QueryRange& range = cache->queries();
  for (const BufferedQuery& query : cache->buffers().take_pushed()) {
    range.memory().schedule(tokens.first_row + query.position - tokens.begin,
                            range.first() + query.entry);
  }
  if (!has_event()) return;
  const bool has_phases = cache->policy().needs().sums != 1;
  for (const BufferedQuery& query : cache->buffers().contents()) {
    entries_.push_back(range.first() + query.entry);
    query_positions_.push_back(query.position);
    query_phases_.push_back(has_phases ? static_cast<int32_t>(query.phase) : 0);
  }
  std::vector<int64_t>& counts = cache->sum_counts();
  if (counts.empty()) return;
  for (const int32_t phase : query_phases_) ++counts[static_cast<size_t>(phase)];
}

RowsView ScheduledRequest::gather_queries(int64_t layer) const {
  return cache_->queries().memory().gather(layer, entries_);
}

}  // namespace phasekv::eviction
