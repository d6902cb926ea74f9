#include "eviction/request_cache.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "eviction/byte_stream.h"
#include "phasekv/error.h"

namespace phasekv::eviction {
namespace {

std::vector<BufferedQuery> read_contents(ByteReader* in, int64_t num_entries) {
  const auto count = in->number<int64_t>();
  if (count < 0 || count > num_entries) {
    throw Error(ErrorCode::invalid_argument, "state.queries", std::to_string(count),
                "at most " + std::to_string(num_entries));
  }
  std::vector<BufferedQuery> queries(static_cast<size_t>(count));
  for (BufferedQuery& query : queries) {
    query.entry = in->number<int64_t>();
    query.position = in->number<int64_t>();
    const auto phase = in->number<int64_t>();
    if (query.entry < 0 || query.entry >= num_entries || phase < 0 || phase >= kNumPhases) {
      throw Error(ErrorCode::invalid_argument, "state.queries",
                  std::to_string(query.entry) + " of phase " + std::to_string(phase),
                  "an entry and a phase that exist");
    }
    query.phase = static_cast<Phase>(phase);
  }
  return queries;
}

}  // namespace

RequestCache::RequestCache(const EvictorShape& shape, std::shared_ptr<const Policy> policy,
                           Window window, std::shared_ptr<const phases::MarkerAutomaton> markers,
                           QueryMemory* memory, Tables tables)
    : shape_(shape),
      table_heads_(tables == Tables::per_layer ? shape.kv_heads : 1),
      policy_(std::move(policy)),
      needs_(policy_->needs()),
      window_(window),
      buffers_(needs_),
      queries_(memory, buffers_.num_entries()),
      positions_(static_cast<size_t>(shape.layers * shape.kv_heads / table_heads_)),
      sums_(positions_.size()),
      sum_counts_(static_cast<size_t>(needs_.sums), 0) {
  if (markers != nullptr) tracker_.emplace(std::move(markers));
}

void RequestCache::schedule(std::span<const int32_t> tokens, std::span<const uint8_t> computed) {
  std::vector<phases::TokenLabel> labels(tokens.size());
  if (tracker_) tracker_->advance(tokens, labels);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto position = static_cast<int64_t>(phases_.size());
    phases_.push_back(labels[i].phase);
    if (computed.empty() || computed[i] != 0) buffers_.push(position, labels[i].phase);
    // Only the last token of a marker tells that it is one.
    if (!needs_.marker_queries && labels[i].marker_tokens > 0) {
      buffers_.withdraw(position + 1 - labels[i].marker_tokens, position + 1);
    }
  }
}

void RequestCache::commit(int64_t end, bool had_event) {
  computed_ = end;
  if (!had_event) return;
  event_at_ = end;
  event_kept_ = held();
  if (needs_.cleared) buffers_.clear();
}

int64_t RequestCache::nbytes_of_queries() const {
  return queries_.entries() * shape_.layers * queries_.memory().bytes_of_query();
}

std::vector<uint8_t> RequestCache::read_queries() const {
  const int64_t bytes = queries_.memory().bytes_of_query();
  const std::vector<uint8_t> by_entry =
      queries_.memory().read(queries_.first(), queries_.entries());
  std::vector<uint8_t> by_layer(by_entry.size(), uint8_t{0});
  for (const BufferedQuery& query : buffers_.contents()) {
    for (int64_t layer = 0; layer < shape_.layers; ++layer) {
      std::copy_n(by_entry.data() + (query.entry * shape_.layers + layer) * bytes, bytes,
                  by_layer.data() + (layer * queries_.entries() + query.entry) * bytes);
    }
  }
  return by_layer;
}

void RequestCache::write_queries(std::span<const uint8_t> queries) {
  const int64_t bytes = queries_.memory().bytes_of_query();
  std::vector<uint8_t> by_entry(queries.size());
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    for (int64_t entry = 0; entry < queries_.entries(); ++entry) {
      std::copy_n(queries.data() + (layer * queries_.entries() + entry) * bytes, bytes,
                  by_entry.data() + (entry * shape_.layers + layer) * bytes);
    }
  }
  queries_.memory().write(queries_.first(), by_entry);
}

int64_t RequestCache::kept_of(int64_t table) const {
  return static_cast<int64_t>(positions_[static_cast<size_t>(table)].size()) / table_heads_;
}

std::vector<int32_t> RequestCache::positions(int64_t table, int64_t tokens) const {
  const std::vector<int32_t>& known = positions_[static_cast<size_t>(table)];
  const int64_t kept = kept_of(table);
  std::vector<int32_t> positions(static_cast<size_t>(table_heads_ * tokens));
  for (int64_t head = 0; head < table_heads_; ++head) {
    int32_t* row = positions.data() + head * tokens;
    std::copy_n(known.data() + head * kept, kept, row);
    for (int64_t i = kept; i < tokens; ++i) row[i] = static_cast<int32_t>(event_at_ + i - kept);
  }
  return positions;
}

std::vector<float> RequestCache::sums(int64_t table, int64_t tokens) const {
  const int64_t rows = needs_.sums * table_heads_;
  const int64_t kept = kept_of(table);
  const std::vector<float>& known = sums_[static_cast<size_t>(table)];
  std::vector<float> sums(static_cast<size_t>(rows * tokens), 0.0F);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(known.data() + row * kept, kept, sums.data() + row * tokens);
  }
  return sums;
}

void RequestCache::replace(int64_t table, int64_t kept, std::span<const int32_t> positions,
                           std::span<const float> sums) {
  const auto keep_last = [kept](auto values, int64_t rows, auto* kept_values) {
    const auto tokens = static_cast<int64_t>(values.size()) / std::max<int64_t>(rows, 1);
    kept_values->resize(static_cast<size_t>(rows * kept));
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(values.data() + (row + 1) * tokens - kept, kept,
                  kept_values->data() + row * kept);
    }
  };
  const auto index = static_cast<size_t>(table);
  keep_last(positions, table_heads_, &positions_[index]);
  keep_last(sums, needs_.sums * table_heads_, &sums_[index]);
}

int64_t RequestCache::limit_of(int64_t position) const {
  return std::max(position + 1, event_at_) - window_.start(computed_);
}

int64_t RequestCache::limit_of(int64_t position, int64_t table) const {
  return std::max(position + 1, event_at_) - event_at_ + kept_of(table);
}

std::vector<double> RequestCache::kept_by_phase() const {
  std::vector<double> kept(kNumPhases, 0.0);
  const auto rows = static_cast<double>(shape_.layers * shape_.kv_heads);
  for (const std::vector<int32_t>& layer : positions_) {
    for (const int32_t position : layer) {
      kept[static_cast<size_t>(phases_[static_cast<size_t>(position)])] += 1.0 / rows;
    }
  }
  for (int64_t position = event_at_; position < computed_; ++position) {
    kept[static_cast<size_t>(phases_[static_cast<size_t>(position)])] += 1.0;
  }
  return kept;
}

std::vector<uint8_t> RequestCache::serialize() const {
  ByteWriter out;
  out.text(policy_->name());
  out.numbers<int64_t>({shape_.layers, shape_.query_heads, shape_.kv_heads, shape_.head_size,
                        static_cast<int64_t>(shape_.dtype), window_.budget, window_.stride,
                        needs_.buffers, needs_.capacity, needs_.sums, computed_, event_at_,
                        event_kept_});
  out.text(tracker_ ? tracker_->save() : std::string());
  out.array<Phase>(phases_);
  const std::vector<BufferedQuery> contents = buffers_.contents();
  out.number(static_cast<int64_t>(contents.size()));
  for (const BufferedQuery& query : contents) {
    out.numbers<int64_t>({query.entry, query.position, static_cast<int64_t>(query.phase)});
  }
  out.array<uint8_t>(read_queries());
  out.array<int64_t>(sum_counts_);
  for (const std::vector<int32_t>& layer : positions_) out.array<int32_t>(layer);
  for (const std::vector<float>& layer : sums_) out.array<float>(layer);
  return out.take();
}

void RequestCache::deserialize(std::span<const uint8_t> bytes) {
  ByteReader in(bytes);
  const auto expect = [](const char* what, const std::string& value, const std::string& expected) {
    if (value == expected) return;
    throw Error(ErrorCode::invalid_argument, std::string("state.") + what, value, expected);
  };
  expect("policy", in.text(), std::string(policy_->name()));
  const std::pair<const char*, int64_t> fixed[] = {{"layers", shape_.layers},
                                                   {"query_heads", shape_.query_heads},
                                                   {"kv_heads", shape_.kv_heads},
                                                   {"head_size", shape_.head_size},
                                                   {"dtype", static_cast<int64_t>(shape_.dtype)},
                                                   {"budget", window_.budget},
                                                   {"stride", window_.stride},
                                                   {"buffers", needs_.buffers},
                                                   {"queries", needs_.capacity},
                                                   {"sums", needs_.sums}};
  for (const auto& [what, expected] : fixed) {
    expect(what, std::to_string(in.number<int64_t>()), std::to_string(expected));
  }
  const std::shared_ptr<const phases::MarkerAutomaton> markers =
      tracker_ ? tracker_->automaton() : nullptr;
  RequestCache restored(shape_, policy_, window_, markers, &queries_.memory());
  restored.computed_ = in.number<int64_t>();
  restored.event_at_ = in.number<int64_t>();
  restored.event_kept_ = in.number<int64_t>();
  const std::string tracker = in.text();
  if (tracker_) restored.tracker_ = phases::PhaseTracker::restore(markers, tracker);
  restored.phases_ = in.array<Phase>();
  restored.buffers_.restore(read_contents(&in, buffers_.num_entries()));
  const std::vector<uint8_t> queries = in.array<uint8_t>();
  restored.sum_counts_ = in.array<int64_t>();
  for (std::vector<int32_t>& layer : restored.positions_) layer = in.array<int32_t>();
  for (std::vector<float>& layer : restored.sums_) layer = in.array<float>();
  in.end();
  const auto check_size = [](const char* what, size_t size, size_t expected) {
    if (size == expected) return;
    throw Error(ErrorCode::invalid_argument, std::string("state.") + what, std::to_string(size),
                std::to_string(expected) + " bytes or entries");
  };
  check_size("phases", restored.phases_.size(), static_cast<size_t>(restored.computed_));
  check_size("queries", queries.size(), static_cast<size_t>(nbytes_of_queries()));
  check_size("sum_counts", restored.sum_counts_.size(), sum_counts_.size());
  const auto keys = static_cast<size_t>(shape_.kv_heads * restored.event_kept_);
  for (const auto& layer : restored.positions_) check_size("positions", layer.size(), keys);
  const size_t sums = keys * static_cast<size_t>(needs_.sums);
  for (const auto& layer : restored.sums_) check_size("sums", layer.size(), sums);
  restored.write_queries(queries);
  *this = std::move(restored);
}

int64_t RequestCache::nbytes() const {
  size_t bytes = phases_.size() + static_cast<size_t>(nbytes_of_queries());
  for (const std::vector<int32_t>& layer : positions_) bytes += layer.size() * sizeof(int32_t);
  for (const std::vector<float>& layer : sums_) bytes += layer.size() * sizeof(float);
  return static_cast<int64_t>(bytes);
}

}  // namespace phasekv::eviction
