// A request's part in one step, as far as it is the same in every layer: which of its queries enter
// the buffers, and at an event which ones the policy is shown.
#pragma once

#include <cstdint>
#include <vector>

#include "eviction/request_cache.h"
#include "phasekv/eviction/evictor.h"
#include "phasekv/tensor.h"

namespace phasekv::eviction {

class ScheduledRequest {
 public:
  // Labels the tokens and schedules their queries for the query memory. Throws invalid_argument
  // where they do not follow those computed so far.
  ScheduledRequest(RequestCache* cache, const ScheduledTokens& tokens);

  RequestCache& cache() const { return *cache_; }
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }
  bool has_event() const { return cache_->window().start(end_) > cache_->window().start(begin_); }
  // Keys of each KV head that stay at the end of the step, on average over layers and KV heads.
  int64_t kept() const { return end_ - cache_->window().start(end_); }

  // At an event: the buffered queries of a layer, in the query memory until it gathers others.
  RowsView gather_queries(int64_t layer) const;
  // Their positions and phases (0 where sums have no phases).
  const std::vector<int64_t>& query_positions() const { return query_positions_; }
  const std::vector<int32_t>& query_phases() const { return query_phases_; }

  EvictionReport& report() { return report_; }

 private:
  RequestCache* cache_;
  EvictionReport report_;
  int64_t begin_;
  int64_t end_;
  std::vector<int64_t> entries_;  // of the buffered queries
  std::vector<int64_t> query_positions_;
  std::vector<int32_t> query_phases_;
};

}  // namespace phasekv::eviction
