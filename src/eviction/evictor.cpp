#include "phasekv/eviction/evictor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "eviction/request_cache.h"
#include "eviction/survivors.h"
#include "phasekv/ops/accumulate_attention.h"
#include "phasekv/ops/compact.h"
#include "phasekv/ops/push_queries.h"
#include "validate.h"

namespace phasekv::eviction {
namespace {

// Adds the time of a scope to a total.
class Stopwatch {
 public:
  explicit Stopwatch(double* total) : total_(total), begin_(Clock::now()) {}
  ~Stopwatch() { *total_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double* total_;
  Clock::time_point begin_;
};

// The entries of a layer's query array that are in use, adjacent.
class GatheredQueries {
 public:
  GatheredQueries(const RowsView& array, std::span<const BufferedQuery> queries)
      : memory_(queries.size() * static_cast<size_t>(array.token_stride * size_of(array.dtype))),
        view_(array) {
    view_.data = memory_.data();
    view_.tokens = static_cast<int64_t>(queries.size());
    std::vector<int64_t> rows;
    std::vector<int64_t> entries;
    for (const BufferedQuery& query : queries) {
      entries.push_back(static_cast<int64_t>(rows.size()));
      rows.push_back(query.entry);
    }
    push_queries({.query = array,
                  .rows = rows.data(),
                  .entries = entries.data(),
                  .count = view_.tokens,
                  .buffer = view_});
  }

  const RowsView& view() const { return view_; }

 private:
  std::vector<uint8_t> memory_;
  RowsView view_;
};

bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}

}  // namespace

struct Evictor::Scheduled {
  RequestCache* cache = nullptr;
  EvictionReport report;
  int64_t end = 0;
  int64_t first_token = 0;  // start of the window before this step
  int64_t tokens = 0;       // held at the end of the step, before an event
  int64_t kept = 0;         // held after it
  std::vector<int32_t> block_table;

  // Queries of this step that enter the buffers.
  std::vector<int64_t> batch_rows;
  std::vector<int64_t> entries;

  // At an event: what the buffers hold, the same in every layer.
  std::vector<BufferedQuery> queries;
  std::vector<int64_t> query_limits;
  std::vector<int32_t> query_phases;

  bool has_event() const { return kept < tokens; }
};

Evictor::Evictor(const EvictorShape& shape) : shape_(shape) {}
Evictor::~Evictor() = default;

RequestCache& Evictor::cache_of(int64_t request) const {
  const auto found = caches_.find(request);
  if (found == caches_.end()) refuse("request", request, "one that was added");
  return *found->second;
}

void Evictor::add(int64_t request, std::shared_ptr<const Policy> policy, const Window& window,
                  std::shared_ptr<const phases::MarkerAutomaton> markers) {
  const ProtectedTokens kept = policy->protected_tokens(window.budget);
  check_window(window, shape_.block_size, kept.sinks + kept.recent);
  caches_[request] =
      std::make_unique<RequestCache>(shape_, std::move(policy), window, std::move(markers));
}

void Evictor::remove(int64_t request) { caches_.erase(request); }

void Evictor::begin_step() { scheduled_.clear(); }

void Evictor::schedule(const ScheduledTokens& tokens) {
  RequestCache& cache = cache_of(tokens.request);
  check_equal("begin", tokens.begin, "the tokens computed so far", cache.computed());
  check_equal("tokens.size", static_cast<int64_t>(tokens.tokens.size()), "end - begin",
              tokens.end - tokens.begin);
  cache.schedule(tokens.tokens, tokens.computed);
  QueryBuffers& buffers = cache.buffers();

  Scheduled& scheduled = scheduled_.emplace_back();
  scheduled.cache = &cache;
  scheduled.report.request = tokens.request;
  scheduled.end = tokens.end;
  scheduled.first_token = cache.window().start(tokens.begin);
  scheduled.tokens = tokens.end - scheduled.first_token;
  scheduled.kept = tokens.end - cache.window().start(tokens.end);
  scheduled.block_table.assign(tokens.block_table.begin(), tokens.block_table.end());
  for (const BufferedQuery& query : buffers.take_pushed()) {
    scheduled.batch_rows.push_back(tokens.first_row + query.position - tokens.begin);
    scheduled.entries.push_back(query.entry);
  }
  if (!scheduled.has_event()) return;
  scheduled.queries = buffers.contents();
  const bool has_phases = cache.policy().needs().sums != 1;
  for (const BufferedQuery& query : scheduled.queries) {
    scheduled.query_limits.push_back(cache.limit_of(query.position));
    scheduled.query_phases.push_back(has_phases ? static_cast<int32_t>(query.phase) : 0);
  }
  std::vector<int64_t>& counts = cache.sum_counts();
  if (counts.empty()) return;
  for (const int32_t phase : scheduled.query_phases) ++counts[static_cast<size_t>(phase)];
}

bool Evictor::has_events() const {
  return std::any_of(scheduled_.begin(), scheduled_.end(),
                     [](const Scheduled& scheduled) { return scheduled.has_event(); });
}

void Evictor::layer(int64_t layer, const RowsView& query, const PagedKV& kv,
                    const int64_t* query_rows) {
  check_indices("layer", &layer, 1, shape_.layers);
  for (Scheduled& scheduled : scheduled_) {
    collect(scheduled, layer, query, query_rows);
    if (scheduled.has_event()) evict(scheduled, layer, kv);
  }
}

void Evictor::collect(Scheduled& scheduled, int64_t layer, const RowsView& query,
                      const int64_t* query_rows) {
  if (scheduled.entries.empty()) return;
  const Stopwatch watch(&seconds_.collecting);
  std::vector<int64_t> rows = scheduled.batch_rows;
  if (query_rows != nullptr) {
    for (int64_t& row : rows) row = query_rows[row];
  }
  push_queries({.query = query,
                .rows = rows.data(),
                .entries = scheduled.entries.data(),
                .count = static_cast<int64_t>(rows.size()),
                .buffer = scheduled.cache->queries(layer)});
}

void Evictor::evict(Scheduled& scheduled, int64_t layer, const PagedKV& kv) {
  RequestCache& cache = *scheduled.cache;
  const PolicyNeeds needs = cache.policy().needs();
  const int64_t tokens = scheduled.tokens;
  std::vector<int32_t> positions = cache.positions(layer, tokens);
  std::vector<float> sums = cache.sums(layer, tokens);
  std::vector<int64_t> survivors;
  double scoring = 0;
  {
    const Stopwatch watch(&scoring);
    const GatheredQueries queries(cache.queries(layer), scheduled.queries);
    if (needs.sums > 0) {
      accumulate_attention({.query = queries.view(),
                            .query_limits = scheduled.query_limits.data(),
                            .query_phases = scheduled.query_phases.data(),
                            .num_phases = needs.sums,
                            .key = kv.key,
                            .block_table = scheduled.block_table.data(),
                            .first_token = scheduled.first_token,
                            .tokens = tokens,
                            .scale = shape_.scale,
                            .sums = sums.data(),
                            .sums_stride = tokens});
    }
    PolicyInput input;
    input.key = kv.key;
    input.value = kv.value;
    input.block_table = scheduled.block_table.data();
    input.first_token = scheduled.first_token;
    input.tokens = tokens;
    input.positions = positions;
    input.phases = cache.phases();
    input.queries = queries.view();
    input.query_limits = scheduled.query_limits;
    input.query_phases = scheduled.query_phases;
    input.sums = sums;
    input.sum_counts = cache.sum_counts();
    input.seen = scheduled.end;
    input.budget = cache.window().budget;
    input.layer = layer;
    input.scale = shape_.scale;
    std::vector<float> scores(static_cast<size_t>(shape_.kv_heads * tokens));
    std::string failure;
    try {
      cache.policy().score(input, scores);
      if (!all_finite(scores)) failure = "scores that are not finite";
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty()) {
      // The step is under way and other requests share it: this one goes on with its newest tokens.
      scheduled.report.failure = "policy " + std::string(cache.policy().name()) + ", layer " +
                                 std::to_string(layer) + ": " + failure;
      for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(positions[i]);
    }
    survivors =
        choose_survivors(input, scores, cache.policy().protected_tokens(cache.window().budget),
                         cache.policy().phase_quota(), scheduled.kept);
  }
  seconds_.scoring += scoring;
  scheduled.report.scoring_seconds += scoring;
  double compacting = 0;
  {
    const Stopwatch watch(&compacting);
    move_survivors(scheduled, layer, kv, survivors, &positions, &sums);
  }
  seconds_.compacting += compacting;
  scheduled.report.compacting_seconds += compacting;
}

void Evictor::move_survivors(Scheduled& scheduled, int64_t layer, const PagedKV& kv,
                             std::span<const int64_t> survivors, std::vector<int32_t>* positions,
                             std::vector<float>* sums) {
  const int64_t tokens = scheduled.tokens;
  const int64_t num_sums = scheduled.cache->policy().needs().sums;
  const CompactionMoves moves = plan_compaction(survivors, shape_.kv_heads, tokens);
  compact({.key = kv.key,
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
  scheduled.cache->replace(layer, scheduled.kept, *positions, *sums);
}

std::vector<EvictionReport> Evictor::finish() {
  std::vector<EvictionReport> reports;
  for (Scheduled& scheduled : scheduled_) {
    scheduled.cache->commit(scheduled.end, scheduled.has_event());
    if (!scheduled.has_event()) continue;
    scheduled.report.evicted_tokens = scheduled.tokens - scheduled.kept;
    scheduled.report.freed_blocks = scheduled.report.evicted_tokens / shape_.block_size;
    reports.push_back(std::move(scheduled.report));
  }
  scheduled_.clear();
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
