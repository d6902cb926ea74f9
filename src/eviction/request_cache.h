// What an evictor knows about one request: how much of it is held, where each held key came from,
// its buffered queries and carried attention. Keys are known by tables of KV heads that hold
// equally many: one for each layer, or, where heads may differ, one for each layer and head.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "eviction/query_buffers.h"
#include "eviction/query_memory.h"
#include "phasekv/eviction/evictor.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/eviction/window.h"
#include "phasekv/phases/phase_tracker.h"

namespace phasekv::eviction {

enum class Tables { per_layer, per_head };

class RequestCache {
 public:
  // The buffered queries lie in `memory`, which lives longer.
  RequestCache(const EvictorShape& shape, std::shared_ptr<const Policy> policy, Window window,
               std::shared_ptr<const phases::MarkerAutomaton> markers, QueryMemory* memory,
               Tables tables = Tables::per_layer);

  const Policy& policy() const { return *policy_; }
  const Window& window() const { return window_; }
  QueryBuffers& buffers() { return buffers_; }
  const QueryBuffers& buffers() const { return buffers_; }

  // Tokens computed (logical length), and how many of them are held (physical length).
  int64_t computed() const { return computed_; }
  int64_t held() const { return computed_ - window_.start(computed_); }

  // Labels the next tokens and buffers the queries of those that are computed (all, if empty).
  void schedule(std::span<const int32_t> tokens, std::span<const uint8_t> computed);
  std::span<const Phase> phases() const { return phases_; }

  // The step's tokens are computed: from now on [start(end), end) is held.
  void commit(int64_t end, bool had_event);

  // Where the entries of the buffers lie.
  const QueryRange& queries() const { return queries_; }

  // Positions of the held keys of a table, [heads, tokens], the tokens of this step included.
  std::vector<int32_t> positions(int64_t table, int64_t tokens) const;
  // Attention sums of a table, [sums, heads, tokens]; zero for keys that came since.
  std::vector<float> sums(int64_t table, int64_t tokens) const;
  // After compaction: of the last `kept` of `tokens` keys.
  void replace(int64_t table, int64_t kept, std::span<const int32_t> positions,
               std::span<const float> sums);

  std::vector<int64_t>& sum_counts() { return sum_counts_; }

  // Logical position up to which a query at `position` stands behind the held keys, as an index
  // among them.
  int64_t limit_of(int64_t position) const;
  // The same of a table of one head.
  int64_t limit_of(int64_t position, int64_t table) const;

  // Kept (layer, KV head, token) triples per phase, over layers * KV heads.
  std::vector<double> kept_by_phase() const;

  std::vector<uint8_t> serialize() const;
  // Throws invalid_argument if the bytes do not fit this request's policy and shape.
  void deserialize(std::span<const uint8_t> bytes);
  int64_t nbytes() const;

 private:
  // Keys of a head that the last event left.
  int64_t kept_of(int64_t table) const;
  // The buffered queries, [layers, entries, query heads, head size] of shape.dtype; zeros where
  // there are none.
  std::vector<uint8_t> read_queries() const;
  void write_queries(std::span<const uint8_t> queries);
  int64_t nbytes_of_queries() const;

  EvictorShape shape_;
  int64_t table_heads_;
  std::shared_ptr<const Policy> policy_;
  PolicyNeeds needs_;
  Window window_;
  QueryBuffers buffers_;
  int64_t computed_ = 0;
  // After the last event: tokens computed then, and keys held then (on average, where heads
  // differ). Later keys follow in order.
  int64_t event_at_ = 0;
  int64_t event_kept_ = 0;
  std::optional<phases::PhaseTracker> tracker_;
  std::vector<Phase> phases_;  // [tokens scheduled]
  QueryRange queries_;
  std::vector<std::vector<int32_t>> positions_;  // [tables][heads * kept at the event]
  std::vector<std::vector<float>> sums_;         // [tables][sums * heads * kept at the event]
  std::vector<int64_t> sum_counts_;              // [sums]
};

}  // namespace phasekv::eviction
