// Runs eviction for all requests of a worker: collects queries step by step, and at an event lets
// the policy score each layer's keys and moves the survivors into the window (window.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "phasekv/eviction/backend.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/eviction/window.h"
#include "phasekv/layout.h"
#include "phasekv/phases/marker_automaton.h"
#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv::eviction {

class QueryMemory;
class RequestCache;

struct EvictorShape {
  int64_t layers = 0;
  int64_t query_heads = 0;  // of this worker
  int64_t kv_heads = 0;     // of this worker
  int64_t head_size = 0;
  int64_t block_size = 0;
  DataType dtype = DataType::float32;         // of queries and of the cache
  float scale = 1.0F;                         // of the logits
  std::vector<double> rope_frequencies = {};  // [rotary_dim / 2] radians per position; empty: not
                                              // known, for policies that do without
  RopePairing rope_pairing = RopePairing::neox;

  RopeView rope() const {
    return {.frequencies = rope_frequencies.data(),
            .rotary_dim = 2 * static_cast<int64_t>(rope_frequencies.size()),
            .pairing = rope_pairing};
  }
};

// Throws unless a request of this policy and window can run in such an evictor: invalid_argument
// for the window (window.h), missing_capability for a policy that needs a rotation where the shape
// has none.
void check_policy(const Policy& policy, const Window& window, const EvictorShape& shape);

// A request's tokens in one step.
struct ScheduledTokens {
  int64_t request = 0;
  int64_t begin = 0;  // logical positions [begin, end); begin is what was computed before
  int64_t end = 0;
  int64_t first_row = 0;                   // row of `begin` in the step's batch
  std::span<const int32_t> tokens = {};    // [end - begin] token ids
  std::span<const uint8_t> computed = {};  // [end - begin] 0: the token has no query of its own in
                                           // this step (it is reused); empty: all have
  std::span<const int32_t> block_table = {};  // block of each logical block up to `end`; those
                                              // before the window may hold anything
};

// What happened to one request in a step.
struct EvictionReport {
  int64_t request = 0;
  int64_t evicted_tokens = 0;  // per layer and KV head
  int64_t freed_blocks = 0;
  // Wall time of all layers; of a step's requests, the first waits for the device for all.
  double scoring_seconds = 0;
  double compacting_seconds = 0;
  std::string failure;  // empty, or what the policy did wrong: the newest tokens were kept instead
};

// Wall time of steps since the evictor was made.
struct EvictionSeconds {
  double collecting = 0;  // queries into buffers
  double scoring = 0;     // scores and the choice of survivors
  double compacting = 0;
};

class Evictor {
 public:
  // The queries and caches that `layer` is given lie where the backend is.
  explicit Evictor(const EvictorShape& shape, std::shared_ptr<Backend> backend = cpu_backend());
  ~Evictor();
  Evictor(const Evictor&) = delete;
  Evictor& operator=(const Evictor&) = delete;

  const EvictorShape& shape() const { return shape_; }

  // A request begins, from nothing; one that was there under the same number is forgotten. Without
  // an automaton all its tokens are Phase::others. Throws as check_policy does; unsupported for a
  // ragged policy, which needs a RaggedEvictor.
  void add(int64_t request, std::shared_ptr<const Policy> policy, const Window& window,
           std::shared_ptr<const phases::MarkerAutomaton> markers = nullptr);
  void remove(int64_t request);

  // One step: schedule each request with an evictable window once, then call `layer` for every
  // layer, after its attention, then `finish`. A layer's keys move in one of the last two: at once
  // on the CPU, where they are still in its caches; for all layers together on a device, which so
  // is waited for once. Where something throws, the step is over.
  void begin_step();
  void schedule(const ScheduledTokens& tokens);
  // Whether this step moves any keys.
  bool has_events() const;
  // query [rows, query heads, head size] after RoPE. query_rows [rows of the batch] or null: where
  // in `query` each row of the batch stands, when only some of them ran (-1: it did not).
  void layer(int64_t layer, const RowsView& query, const PagedKV& kv, const int64_t* query_rows);
  std::vector<EvictionReport> finish();

  const EvictionSeconds& seconds() const { return seconds_; }

  // Logical and physical length of a request.
  int64_t computed(int64_t request) const;
  int64_t held(int64_t request) const;
  // Mean number of kept tokens of each phase, over layers and KV heads.
  std::vector<double> kept_by_phase(int64_t request) const;
  // Logical positions of a layer's held keys, [kv heads, held].
  std::vector<int32_t> positions(int64_t request, int64_t layer) const;
  // Bytes of buffers, positions and sums.
  int64_t nbytes(int64_t request) const;

  // Everything but the keys and values themselves, for a session. `restore` wants a request that
  // was just added with the same policy and window; else it throws invalid_argument.
  std::vector<uint8_t> save(int64_t request) const;
  void restore(int64_t request, std::span<const uint8_t> state);

 private:
  struct Scheduled;

  RequestCache& cache_of(int64_t request) const;
  // Asks for the scores of a layer, and moves the survivors of all layers that were asked for.
  void score(Scheduled& scheduled, int64_t layer, const PagedKV& kv);
  void evict(Scheduled& scheduled);

  EvictorShape shape_;
  std::shared_ptr<Backend> backend_;
  std::unique_ptr<QueryMemory> queries_;
  std::map<int64_t, std::unique_ptr<RequestCache>> caches_;
  std::vector<Scheduled> scheduled_;
  EvictionSeconds seconds_;
};

}  // namespace phasekv::eviction
