// Eviction for caches in which every layer and KV head of a request has blocks of its own, so that
// a ragged policy can let them keep different numbers of keys and all memory of the others is
// freed. Everything else is as in evictor.h, of which it is the counterpart.
//
// A head's keys lie from the front of its blocks on, without gaps: `held` of them, in
// ceil(held / block size) blocks. New ones are appended; an event moves survivors forward into the
// place of evicted keys, so that even the newest may lie anywhere.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "phasekv/eviction/evictor.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/eviction/window.h"
#include "phasekv/layout.h"
#include "phasekv/phases/marker_automaton.h"
#include "phasekv/tensor.h"

namespace phasekv::eviction {

class QueryMemory;

// Tensors lie in CPU memory.
class RaggedEvictor {
 public:
  explicit RaggedEvictor(const EvictorShape& shape);
  ~RaggedEvictor();
  RaggedEvictor(const RaggedEvictor&) = delete;
  RaggedEvictor& operator=(const RaggedEvictor&) = delete;

  // The window's budget holds on average over layers and KV heads. Throws as check_policy does;
  // unsupported for a policy that is not ragged.
  void add(int64_t request, std::shared_ptr<const Policy> policy, const Window& window,
           std::shared_ptr<const phases::MarkerAutomaton> markers = nullptr);
  void remove(int64_t request);

  // As of Evictor; the tokens' block table is not looked at.
  void begin_step();
  void schedule(const ScheduledTokens& tokens);
  bool has_events() const;
  // kv: blocks of one KV head each (num_heads 1). block_tables [requests scheduled, in that order;
  // kv heads; table_stride]: the blocks of each head, from its first held key on.
  void layer(int64_t layer, const RowsView& query, const PagedKV& kv,
             std::span<const int32_t> block_tables, int64_t table_stride);
  // Evicted tokens and freed blocks of the reports are means over layers and KV heads.
  std::vector<EvictionReport> finish();

  const EvictionSeconds& seconds() const { return seconds_; }

  int64_t computed(int64_t request) const;
  // Keys of each KV head of a layer, [kv heads]; those of the step count once its `layer` has run.
  std::vector<int64_t> held(int64_t request, int64_t layer) const;
  // Logical positions of the held keys, in the order in which they lie.
  std::vector<int32_t> positions(int64_t request, int64_t layer, int64_t head) const;
  // Mean number of kept tokens of each phase, over layers and KV heads.
  std::vector<double> kept_by_phase(int64_t request) const;
  // Bytes of buffers, positions and sums.
  int64_t nbytes(int64_t request) const;

 private:
  struct Request;
  struct Scheduled;

  Request& request_of(int64_t request) const;
  void evict(Scheduled& scheduled, int64_t layer, const PagedKV& kv, const int32_t* block_tables,
             int64_t table_stride);

  EvictorShape shape_;
  std::unique_ptr<QueryMemory> queries_;
  std::map<int64_t, std::unique_ptr<Request>> requests_;
  std::vector<Scheduled> scheduled_;
  EvictionSeconds seconds_;
};

}  // namespace phasekv::eviction
