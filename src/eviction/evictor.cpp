#include "phasekv/eviction/evictor.h"

#include <algorithm>
#include <string>
#include <utility>

#include "eviction/query_memory.h"
#include "eviction/request_cache.h"
#include "eviction/scheduled_request.h"
#include "eviction/scoring.h"
#include "eviction/stopwatch.h"
#include "eviction/survivors.h"
#include "phasekv/error.h"
#include "validate.h"

namespace phasekv::eviction {

// A request's part in the step, and its window, which is the same in every layer.
struct Evictor::Scheduled : ScheduledRequest {
  Scheduled(RequestCache* cache, const ScheduledTokens& scheduled)
      : ScheduledRequest(cache, scheduled),
        first_token(cache->window().start(scheduled.begin)),
        tokens(scheduled.end - first_token),
        block_table(scheduled.block_table.begin(), scheduled.block_table.end()) {
    for (const int64_t position : query_positions()) {
      query_limits.push_back(cache->limit_of(position));
    }
  }

  int64_t first_token;  // start of the window before this step
  int64_t tokens;       // held at the end of the step, before an event
  std::vector<int32_t> block_table;
  std::vector<int64_t> query_limits;
  std::vector<std::unique_ptr<ScoredKeys>> scored;  // layers whose survivors still have to move
};

namespace {

// Takes a table of one entry per key, [rows of each KV head, kv heads, tokens], through the moves.
template <typename T>
void bring_along(const CompactionMoves& moves, int64_t kv_heads, int64_t tokens,
                 std::vector<T>* table) {
  const auto rows = static_cast<int64_t>(table->size()) / tokens;
  for (int64_t row = 0; row < rows; ++row) {
    T* entries = table->data() + row * tokens;
    const auto head = static_cast<size_t>(row % kv_heads);
    const auto begin = static_cast<size_t>(moves.starts[head]);
    const auto end = static_cast<size_t>(moves.starts[head + 1]);
    for (size_t i = begin; i < end; ++i) entries[moves.to[i]] = entries[moves.from[i]];
  }
}

}  // namespace

void check_policy(const Policy& policy, const Window& window, const EvictorShape& shape) {
  const ProtectedTokens kept = policy.protected_tokens(window.budget);
  check_window(window, shape.block_size, kept.sinks + kept.recent);
  if (policy.needs().rope && shape.rope_frequencies.empty()) {
    throw Error(ErrorCode::missing_capability, "rope", "unknown",
                "the policy " + std::string(policy.name()) + " needs the model's rotary embedding");
  }
}

Evictor::Evictor(const EvictorShape& shape, std::shared_ptr<Backend> backend)
    : shape_(shape),
      backend_(std::move(backend)),
      queries_(std::make_unique<QueryMemory>(shape_, backend_)) {}
Evictor::~Evictor() = default;

RequestCache& Evictor::cache_of(int64_t request) const {
  const auto found = caches_.find(request);
  if (found == caches_.end()) refuse("request", request, "one that was added");
  return *found->second;
}

void Evictor::add(int64_t request, std::shared_ptr<const Policy> policy, const Window& window,
                  std::shared_ptr<const phases::MarkerAutomaton> markers) {
  if (policy->is_ragged()) {
    throw Error(ErrorCode::unsupported, "policy", std::string(policy->name()),
                "it gives layers and KV heads budgets of their own, and a block holds all heads");
  }
  check_policy(*policy, window, shape_);
  caches_[request] = std::make_unique<RequestCache>(shape_, std::move(policy), window,
                                                    std::move(markers), queries_.get());
}

void Evictor::remove(int64_t request) { caches_.erase(request); }

void Evictor::begin_step() {
  backend_->forget();
  scheduled_.clear();
  queries_->begin_step();
}

void Evictor::schedule(const ScheduledTokens& tokens) {
  scheduled_.emplace_back(&cache_of(tokens.request), tokens);
}

bool Evictor::has_events() const {
  return std::any_of(scheduled_.begin(), scheduled_.end(),
                     [](const Scheduled& scheduled) { return scheduled.has_event(); });
}

void Evictor::layer(int64_t layer, const RowsView& query, const PagedKV& kv,
                    const int64_t* query_rows) {
  check_indices("layer", &layer, 1, shape_.layers);
  {
    const Stopwatch watch(&seconds_.collecting);
    queries_->push(layer, query, query_rows);
  }
  for (Scheduled& scheduled : scheduled_) {
    if (!scheduled.has_event()) continue;
    score(scheduled, layer, kv);
    if (!backend_->computes_later()) evict(scheduled);
  }
}

void Evictor::score(Scheduled& scheduled, int64_t layer, const PagedKV& kv) {
  const Stopwatch all(&seconds_.scoring);
  const Stopwatch own(&scheduled.report().scoring_seconds);
  RequestCache& cache = scheduled.cache();
  auto keys = std::make_unique<ScoredKeys>();
  keys->positions = cache.positions(layer, scheduled.tokens);
  keys->sums = cache.sums(layer, scheduled.tokens);
  PolicyInput& input = keys->input;
  input.backend = backend_.get();
  input.key = kv.key;
  input.value = kv.value;
  input.block_table = scheduled.block_table.data();
  input.first_token = scheduled.first_token;
  input.tokens = scheduled.tokens;
  input.phases = cache.phases();
  input.queries = scheduled.gather_queries(layer);
  input.query_limits = scheduled.query_limits;
  input.query_positions = scheduled.query_positions();
  input.query_phases = scheduled.query_phases();
  input.sum_counts = cache.sum_counts();
  input.seen = scheduled.end();
  input.budget = cache.window().budget;
  input.layer = layer;
  input.scale = shape_.scale;
  input.rope = shape_.rope();
  keys->ask(cache.policy());
  scheduled.scored.push_back(std::move(keys));
}

void Evictor::evict(Scheduled& scheduled) {
  const Policy& policy = scheduled.cache().policy();
  std::vector<std::vector<int64_t>> survivors;
  {
    const Stopwatch all(&seconds_.scoring);
    const Stopwatch own(&scheduled.report().scoring_seconds);
    backend_->wait();
    for (const auto& keys : scheduled.scored) {
      const std::string failure = keys->finish(policy);
      if (!failure.empty()) scheduled.report().failure = failure;
      survivors.push_back(choose_survivors(keys->input, keys->scores,
                                           policy.protected_tokens(keys->input.budget),
                                           policy.phase_quota(), scheduled.kept()));
    }
  }
  const Stopwatch all(&seconds_.compacting);
  const Stopwatch own(&scheduled.report().compacting_seconds);
  std::vector<CompactionMoves> moves;
  std::vector<CompactParams> layers;
  moves.reserve(survivors.size());
  for (size_t i = 0; i < survivors.size(); ++i) {
    moves.push_back(plan_compaction(survivors[i], shape_.kv_heads, scheduled.tokens));
    const PolicyInput& input = scheduled.scored[i]->input;
    layers.push_back({.key = input.key,
                      .value = input.value,
                      .block_table = input.block_table,
                      .first_token = input.first_token,
                      .starts = moves[i].starts.data(),
                      .from = moves[i].from.data(),
                      .to = moves[i].to.data()});
  }
  backend_->compact(layers);
  for (size_t i = 0; i < moves.size(); ++i) {
    ScoredKeys& keys = *scheduled.scored[i];
    bring_along(moves[i], shape_.kv_heads, scheduled.tokens, &keys.positions);
    bring_along(moves[i], shape_.kv_heads, scheduled.tokens, &keys.sums);
    scheduled.cache().replace(keys.input.layer, scheduled.kept(), keys.positions, keys.sums);
  }
  scheduled.scored.clear();
}

std::vector<EvictionReport> Evictor::finish() {
  std::vector<EvictionReport> reports;
  for (Scheduled& scheduled : scheduled_) {
    if (!scheduled.scored.empty()) evict(scheduled);
    scheduled.cache().commit(scheduled.end(), scheduled.has_event());
    if (!scheduled.has_event()) continue;
    scheduled.report().evicted_tokens = scheduled.tokens - scheduled.kept();
    scheduled.report().freed_blocks = scheduled.report().evicted_tokens / shape_.block_size;
    reports.push_back(std::move(scheduled.report()));
  }
  begin_step();
  return reports;
}

int64_t Evictor::computed(int64_t request) const { return cache_of(request).computed(); }
int64_t Evictor::held(int64_t request) const { return cache_of(request).held(); }

std::vector<double> Evictor::kept_by_phase(int64_t request) const {
  return cache_of(request).kept_by_phase();
}

std::vector<int32_t> Evictor::positions(int64_t request, int64_t layer) const {
  check_indices("layer", &layer, 1, shape_.layers);
  const RequestCache& cache = cache_of(request);
  return cache.positions(layer, cache.held());
}

int64_t Evictor::nbytes(int64_t request) const { return cache_of(request).nbytes(); }

std::vector<uint8_t> Evictor::save(int64_t request) const { return cache_of(request).serialize(); }

void Evictor::restore(int64_t request, std::span<const uint8_t> state) {
  cache_of(request).deserialize(state);
}

}  // namespace phasekv::eviction
