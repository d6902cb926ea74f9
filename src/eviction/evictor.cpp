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
};

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
    if (scheduled.has_event()) evict(scheduled, layer, kv);
  }
}

void Evictor::evict(Scheduled& scheduled, int64_t layer, const PagedKV& kv) {
  RequestCache& cache = scheduled.cache();
  const Policy& policy = cache.policy();
  const int64_t tokens = scheduled.tokens;
  std::vector<int32_t> positions = cache.positions(layer, tokens);
  std::vector<float> sums = cache.sums(layer, tokens);
  std::vector<int64_t> survivors;
  double scoring = 0;
  {
    const Stopwatch watch(&scoring);
    PolicyInput input;
    input.backend = backend_.get();
    input.key = kv.key;
    input.value = kv.value;
    input.block_table = scheduled.block_table.data();
    input.first_token = scheduled.first_token;
    input.tokens = tokens;
    input.positions = positions;
    input.phases = cache.phases();
    input.queries = scheduled.gather_queries(layer);
    input.query_limits = scheduled.query_limits;
    input.query_positions = scheduled.query_positions();
    input.query_phases = scheduled.query_phases();
    input.sums = sums;
    input.sum_counts = cache.sum_counts();
    input.seen = scheduled.end();
    input.budget = cache.window().budget;
    input.layer = layer;
    input.scale = shape_.scale;
    input.rope = shape_.rope();
    if (!sums.empty()) add_attention(input, &sums);
    std::vector<float> scores(static_cast<size_t>(shape_.kv_heads * tokens));
    const std::string failure = score_or_newest(policy, input, scores);
    if (!failure.empty()) scheduled.report().failure = failure;
    survivors = choose_survivors(input, scores, policy.protected_tokens(cache.window().budget),
                                 policy.phase_quota(), scheduled.kept());
  }
  seconds_.scoring += scoring;
  scheduled.report().scoring_seconds += scoring;
  double compacting = 0;
  {
    const Stopwatch watch(&compacting);
    move_survivors(scheduled, layer, kv, survivors, &positions, &sums);
  }
  seconds_.compacting += compacting;
  scheduled.report().compacting_seconds += compacting;
}

void Evictor::move_survivors(Scheduled& scheduled, int64_t layer, const PagedKV& kv,
                             std::span<const int64_t> survivors, std::vector<int32_t>* positions,
                             std::vector<float>* sums) {
  const int64_t tokens = scheduled.tokens;
  const int64_t num_sums = scheduled.cache().policy().needs().sums;
  const CompactionMoves moves = plan_compaction(survivors, shape_.kv_heads, tokens);
  backend_->compact({.key = kv.key,
                     .value = kv.value,
                     .block_table = scheduled.block_table.data(),
                     .first_token = scheduled.first_token,
                     .starts = moves.starts.data(),
                     .from = moves.from.data(),
                     .to = moves.to.data()});
  const auto bring_along = [&](auto* table, int64_t row, int64_t head) {
    auto* entries = table + row * tokens;
    const auto begin = static_cast<size_t>(moves.starts[static_cast<size_t>(head)]);
    const auto end = static_cast<size_t>(moves.starts[static_cast<size_t>(head) + 1]);
    for (size_t i = begin; i < end; ++i) entries[moves.to[i]] = entries[moves.from[i]];
  };
  for (int64_t head = 0; head < shape_.kv_heads; ++head) {
    bring_along(positions->data(), head, head);
    for (int64_t sum = 0; sum < num_sums; ++sum) {
      bring_along(sums->data(), sum * shape_.kv_heads + head, head);
    }
  }
  scheduled.cache().replace(layer, scheduled.kept(), *positions, *sums);
}

std::vector<EvictionReport> Evictor::finish() {
  std::vector<EvictionReport> reports;
  for (Scheduled& scheduled : scheduled_) {
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
