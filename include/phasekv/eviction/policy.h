// An eviction policy says which queries it wants to see and scores the cached keys of one layer.
// Everything else (windows, buffers, selection, compaction) is the evictor's and the same for all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phasekv/eviction/backend.h"
#include "phasekv/eviction/triattention_statistics.h"
#include "phasekv/ops/score_keys.h"
#include "phasekv/phases/phase.h"
#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv::eviction {

using phases::kNumPhases;
using phases::Phase;

// Fields left empty take the policy's own definition. A policy refuses what it does not have.
struct PolicyOptions {
  std::optional<int64_t> queries = {};         // kept in each FIFO buffer
  std::optional<int64_t> sinks = {};           // first tokens of the request, always kept, within B
  std::optional<int64_t> recent = {};          // newest tokens, always kept, within B
  std::optional<GroupReduction> group = {};    // over the query heads that share a KV head
  std::optional<Pooling> pooling = {};         // of scores over neighbouring tokens
  std::optional<int64_t> pooling_kernel = {};  // odd
  std::optional<bool> marker_queries = {};  // whether the tokens of a phase's marker enter buffers
  std::optional<double> phase_quota = {};  // in [0, 1]: share of B that is divided evenly among the
                                           // phases, for the best keys of each
  std::optional<double> redundancy = {};   // in [0, 1]: score = (1 - x) attention - x R-KV's term
  std::optional<double> safeguard = {};    // in [0, 1], adakv: share of the budget that each head
                                           // is sure of
  std::optional<double> steepness = {};    // at least 1, pyramidkv: unprotected tokens that a layer
                                           // keeps on average, over what the last layer keeps
  std::shared_ptr<const TriattentionStatistics> statistics = {};  // of calibration
};

// What the evictor keeps for a policy.
struct PolicyNeeds {
  int64_t buffers = 0;   // FIFO query buffers: none, one, or kNumPhases (one per phase)
  int64_t capacity = 0;  // queries in each
  bool cleared = false;  // an event empties the buffers
  int64_t sums = 0;      // attention sums carried along with each key and KV head: none, one, or
                         // kNumPhases; an event adds the attention of all buffered queries, so a
                         // policy with sums has its buffers cleared
  bool marker_queries = true;
  bool rope = false;  // the model's rotation, PolicyInput::rope
};

// Tokens that are kept whatever their score.
struct ProtectedTokens {
  int64_t sinks = 0;
  int64_t recent = 0;
};

// One layer of one request at an event. Keys are counted from the first held token; their order
// within the cache means nothing, `positions` tells. Keys, values and queries lie where the backend
// is, and its ops read them; everything else is the host's.
struct PolicyInput {
  Backend* backend = cpu_backend().get();
  PagedView key;
  PagedView value;
  const int32_t* block_table = nullptr;      // of the request
  int64_t first_token = 0;                   // of the keys, in the block table
  int64_t tokens = 0;                        // held, among them the newest
  std::span<const int32_t> positions;        // [kv heads, tokens] logical position of each key
  std::span<const Phase> phases;             // [seen] by logical position
  RowsView queries;                          // [queries, query heads, head size], after RoPE
  std::span<const int64_t> query_limits;     // [queries] the query stands behind keys [0, limit)
  std::span<const int64_t> query_positions;  // [queries] logical
  std::span<const int32_t> query_phases;     // [queries]
  std::span<const float> sums;               // [sums, kv heads, tokens] attention, of needs().sums
  std::span<const int64_t> sum_counts;       // [sums] queries in each
  int64_t seen = 0;                          // logical length: tokens computed so far
  int64_t budget = 0;
  int64_t layer = 0;
  float scale = 1.0F;
  RopeView rope = {};  // of queries and keys; empty where the evictor was not given it
  // Where the functions of `when_computed` wait; null: all is there at once.
  std::vector<std::function<void()>>* waiting = nullptr;

  int64_t kv_heads() const { return key.num_heads; }

  // Calls `function` once what the ops of the backend were asked for so far is there: now, or after
  // `score` has returned, in the order in which they came. This input, its policy and the scores
  // are still there.
  template <typename Function>
  void when_computed(Function&& function) const {
    if (waiting == nullptr) {
      std::forward<Function>(function)();
    } else {
      waiting->emplace_back(std::forward<Function>(function));
    }
  }
};

// One KV head's part in LayerScores: its held keys, the newest among them.
struct HeadScores {
  std::span<const float> scores;       // [tokens]
  std::span<const int32_t> positions;  // [tokens] logical position of each key
};

// What a ragged policy divides the budget by: one layer of one request at an event.
struct LayerScores {
  std::vector<HeadScores> heads;  // [kv heads]
  int64_t layer = 0;
  int64_t layers = 0;
  int64_t block_size = 0;
  int64_t seen = 0;  // logical length
  int64_t budget = 0;
  int64_t kept = 0;  // keys of each head if all kept alike: the budget, and what came since the
                     // last multiple of the stride
};

class Policy {
 public:
  virtual ~Policy() = default;

  virtual std::string_view name() const = 0;
  virtual PolicyNeeds needs() const = 0;
  virtual ProtectedTokens protected_tokens(int64_t budget) const = 0;
  virtual double phase_quota() const { return 0.0; }

  // scores [kv heads, tokens], the higher the better; finite. Deterministic. What the backend's ops
  // compute, `input.sums` included, is looked at in `input.when_computed` only.
  virtual void score(const PolicyInput& input, std::span<float> scores) const = 0;

  // Whether layers or KV heads keep different numbers of keys. Such a policy needs a cache that
  // frees the blocks of each of them for themselves (ragged_evictor.h).
  virtual bool is_ragged() const { return false; }
  // Of a ragged policy: how many keys each KV head of the layer keeps, [kv heads], between its
  // protected ones and all it holds. By default all keep alike.
  virtual std::vector<int64_t> allocate(const LayerScores& layer) const;
};

// Names of all policies, sorted.
std::vector<std::string> policy_names();

// Throws invalid_argument for an unknown name, an option that the policy does not have or a value
// out of range; missing_capability where the policy needs statistics and has none.
std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options = {});

}  // namespace phasekv::eviction
