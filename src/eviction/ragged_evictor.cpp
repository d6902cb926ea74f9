#include "phasekv/eviction/ragged_evictor.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "eviction/allocation.h"
#include "eviction/query_memory.h"
#include "eviction/request_cache.h"
#include "eviction/scheduled_request.h"
#include "eviction/scoring.h"
#include "eviction/stopwatch.h"
#include "eviction/survivors.h"
#include "phasekv/error.h"
#include "phasekv/ops/compact.h"
#include "validate.h"

namespace phasekv::eviction {
namespace {

// Survivors, ascending, that lie behind the first `survivors.size()` indices move into the holes
// among those.
struct ForwardMoves {
  std::vector<int64_t> from;
  std::vector<int64_t> to;
};

ForwardMoves plan_forward_moves(const std::vector<int64_t>& survivors) {
  const auto kept = static_cast<int64_t>(survivors.size());
  ForwardMoves moves;
  const auto first_mover = std::lower_bound(survivors.begin(), survivors.end(), kept);
  moves.from.assign(first_mover, survivors.end());
  auto stays = survivors.begin();
  for (int64_t i = 0; i < kept; ++i) {
    if (stays != first_mover && *stays == i) {
      ++stays;
    } else {
      moves.to.push_back(i);
    }
  }
  return moves;
}

// Rows of [tokens] entries, of which the first `kept` remain after the moves.
template <typename T>
std::vector<T> moved_forward(const std::vector<T>& table, int64_t tokens, int64_t kept,
                             const ForwardMoves& moves) {
  std::vector<T> moved;
  for (auto row = table.begin(); row != table.end(); row += tokens) {
    const auto begin = static_cast<int64_t>(moved.size());
    moved.insert(moved.end(), row, row + kept);
    for (size_t i = 0; i < moves.to.size(); ++i) {
      moved[static_cast<size_t>(begin + moves.to[i])] = row[moves.from[i]];
    }
  }
  return moved;
}

// The query heads of one of `kv_heads` KV heads.
RowsView of_kv_head(RowsView queries, int64_t head, int64_t kv_heads) {
  queries.heads /= kv_heads;
  queries.data = static_cast<uint8_t*>(queries.data) +
                 head * queries.heads * queries.head_stride * size_of(queries.dtype);
  return queries;
}

}  // namespace

struct RaggedEvictor::Request {
  RequestCache cache;
  std::vector<int64_t> held;  // [layers, kv heads]
};

struct RaggedEvictor::Scheduled : ScheduledRequest {
  Scheduled(Request* owner, const ScheduledTokens& tokens)
      : ScheduledRequest(&owner->cache, tokens), request(owner) {}

  Request* request;
};

RaggedEvictor::RaggedEvictor(const EvictorShape& shape)
    : shape_(shape), queries_(std::make_unique<QueryMemory>(shape_, cpu_backend())) {}
RaggedEvictor::~RaggedEvictor() = default;

RaggedEvictor::Request& RaggedEvictor::request_of(int64_t request) const {
  const auto found = requests_.find(request);
  if (found == requests_.end()) refuse("request", request, "one that was added");
  return *found->second;
}

void RaggedEvictor::add(int64_t request, std::shared_ptr<const Policy> policy, const Window& window,
                        std::shared_ptr<const phases::MarkerAutomaton> markers) {
  if (!policy->is_ragged()) {
    throw Error(ErrorCode::unsupported, "policy", std::string(policy->name()),
                "it lets all layers and KV heads keep alike, which Evictor does at less cost");
  }
  check_policy(*policy, window, shape_);
  const auto tables = static_cast<size_t>(shape_.layers * shape_.kv_heads);
  requests_[request] = std::make_unique<Request>(
      Request{RequestCache(shape_, std::move(policy), window, std::move(markers), queries_.get(),
                           Tables::per_head),
              std::vector<int64_t>(tables, 0)});
}

void RaggedEvictor::remove(int64_t request) { requests_.erase(request); }

void RaggedEvictor::begin_step() {
  scheduled_.clear();
  queries_->begin_step();
}

void RaggedEvictor::schedule(const ScheduledTokens& tokens) {
  scheduled_.emplace_back(&request_of(tokens.request), tokens);
}

bool RaggedEvictor::has_events() const {
  return std::any_of(scheduled_.begin(), scheduled_.end(),
                     [](const Scheduled& scheduled) { return scheduled.has_event(); });
}

void RaggedEvictor::layer(int64_t layer, const RowsView& query, const PagedKV& kv,
                          std::span<const int32_t> block_tables, int64_t table_stride) {
  check_indices("layer", &layer, 1, shape_.layers);
  const auto tables = static_cast<int64_t>(scheduled_.size()) * shape_.kv_heads;
  check_equal("block_tables.size", static_cast<int64_t>(block_tables.size()),
              "requests * kv heads * table_stride", tables * table_stride);
  const int32_t* blocks = block_tables.data();
  check_equal("kv.num_heads", kv.key.num_heads, "the heads of a block", 1);
  {
    const Stopwatch watch(&seconds_.collecting);
    queries_->push(layer, query, nullptr);
  }
  for (Scheduled& scheduled : scheduled_) {
    int64_t* held = scheduled.request->held.data() + layer * shape_.kv_heads;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      held[head] += scheduled.end() - scheduled.begin();
      if (held[head] > table_stride * kv.key.block_size) {
        refuse("block_tables", table_stride,
               "blocks for the " + std::to_string(held[head]) + " keys of each head");
      }
    }
    if (scheduled.has_event()) evict(scheduled, layer, kv, blocks, table_stride);
    blocks += shape_.kv_heads * table_stride;
  }
}

void RaggedEvictor::evict(Scheduled& scheduled, int64_t layer, const PagedKV& kv,
                          const int32_t* block_tables, int64_t table_stride) {
  RequestCache& cache = scheduled.cache();
  const Policy& policy = cache.policy();
  const int64_t budget = cache.window().budget;
  const int64_t first_table = layer * shape_.kv_heads;
  int64_t* held = scheduled.request->held.data() + first_table;
  std::vector<ScoredKeys> heads(static_cast<size_t>(shape_.kv_heads));
  std::vector<int64_t> counts;
  std::vector<std::vector<int64_t>> survivors;
  double scoring = 0;
  {
    const Stopwatch watch(&scoring);
    const RowsView queries = scheduled.gather_queries(layer);
    LayerScores scores{.heads = {},
                       .layer = layer,
                       .layers = shape_.layers,
                       .block_size = kv.key.block_size,
                       .seen = scheduled.end(),
                       .budget = budget,
                       .kept = scheduled.kept()};
    for (int64_t i = 0; i < shape_.kv_heads; ++i) {
      ScoredKeys& head = heads[static_cast<size_t>(i)];
      head.positions = cache.positions(first_table + i, held[i]);
      head.sums = cache.sums(first_table + i, held[i]);
      for (const int64_t position : scheduled.query_positions()) {
        head.query_limits.push_back(cache.limit_of(position, first_table + i));
      }
      PolicyInput& input = head.input;
      input.key = kv.key;
      input.value = kv.value;
      input.block_table = block_tables + i * table_stride;
      input.tokens = held[i];
      input.phases = cache.phases();
      input.queries = of_kv_head(queries, i, shape_.kv_heads);
      input.query_limits = head.query_limits;
      input.query_positions = scheduled.query_positions();
      input.query_phases = scheduled.query_phases();
      input.sum_counts = cache.sum_counts();
      input.seen = scheduled.end();
      input.budget = budget;
      input.layer = layer;
      input.scale = shape_.scale;
      input.rope = shape_.rope();
      head.ask(policy);
      const std::string failure = head.finish(policy);
      if (!failure.empty()) scheduled.report().failure = failure;
      scores.heads.push_back({head.scores, head.positions});
    }
    try {
      counts = checked_allocation(policy, scores);
    } catch (const std::exception& error) {
      scheduled.report().failure = error.what();
      counts = alike(scores, scores.kept);
    }
    for (size_t i = 0; i < heads.size(); ++i) {
      survivors.push_back(choose_survivors(heads[i].input, heads[i].scores,
                                           policy.protected_tokens(budget), policy.phase_quota(),
                                           counts[i]));
    }
  }
  seconds_.scoring += scoring;
  scheduled.report().scoring_seconds += scoring;
  double compacting = 0;
  {
    const Stopwatch watch(&compacting);
    for (size_t i = 0; i < heads.size(); ++i) {
      const ScoredKeys& head = heads[i];
      const ForwardMoves moves = plan_forward_moves(survivors[i]);
      const int64_t starts[] = {0, static_cast<int64_t>(moves.from.size())};
      compact({.key = kv.key,
               .value = kv.value,
               .block_table = head.input.block_table,
               .starts = starts,
               .from = moves.from.data(),
               .to = moves.to.data()});
      const auto head_index = static_cast<int64_t>(i);
      cache.replace(first_table + head_index, counts[i],
                    moved_forward(head.positions, head.input.tokens, counts[i], moves),
                    moved_forward(head.sums, head.input.tokens, counts[i], moves));
      held[head_index] = counts[i];
    }
  }
  seconds_.compacting += compacting;
  scheduled.report().compacting_seconds += compacting;
}

std::vector<EvictionReport> RaggedEvictor::finish() {
  std::vector<EvictionReport> reports;
  for (Scheduled& scheduled : scheduled_) {
    const Window& window = scheduled.cache().window();
    const int64_t evicted = window.start(scheduled.end()) - window.start(scheduled.begin());
    const bool had_event = scheduled.has_event();
    scheduled.cache().commit(scheduled.end(), had_event);
    if (!had_event) continue;
    scheduled.report().evicted_tokens = evicted;
    scheduled.report().freed_blocks = evicted / shape_.block_size;
    reports.push_back(std::move(scheduled.report()));
  }
  begin_step();
  return reports;
}

int64_t RaggedEvictor::computed(int64_t request) const {
  return request_of(request).cache.computed();
}

std::vector<int64_t> RaggedEvictor::held(int64_t request, int64_t layer) const {
  check_indices("layer", &layer, 1, shape_.layers);
  const auto begin = request_of(request).held.begin() + layer * shape_.kv_heads;
  return {begin, begin + shape_.kv_heads};
}

std::vector<int32_t> RaggedEvictor::positions(int64_t request, int64_t layer, int64_t head) const {
  check_indices("layer", &layer, 1, shape_.layers);
  check_indices("head", &head, 1, shape_.kv_heads);
  const Request& owner = request_of(request);
  const int64_t table = layer * shape_.kv_heads + head;
  return owner.cache.positions(table, owner.held[static_cast<size_t>(table)]);
}

std::vector<double> RaggedEvictor::kept_by_phase(int64_t request) const {
  return request_of(request).cache.kept_by_phase();
}

int64_t RaggedEvictor::nbytes(int64_t request) const { return request_of(request).cache.nbytes(); }

}  // namespace phasekv::eviction
