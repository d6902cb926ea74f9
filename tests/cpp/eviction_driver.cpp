#include "eviction_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "oracle/elements.h"

namespace phasekv::eviction {
namespace {

using oracle::Half;
using oracle::Row;

constexpr int64_t kBlocksOfRequest = 40;

std::shared_ptr<const TriattentionStatistics> statistics_of(const TensorShape& shape) {
  auto statistics = std::make_shared<TriattentionStatistics>();
  statistics->layers = EvictionDriver::kLayers;
  statistics->query_heads = shape.query_heads;
  statistics->rotary_dim = shape.head_size;
  statistics->frequencies.assign(static_cast<size_t>(shape.head_size / 2), 0.3);
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  const auto norms = static_cast<size_t>(statistics->layers * shape.query_heads *
                                         static_cast<int64_t>(statistics->frequencies.size()));
  for (size_t i = 0; i < norms; ++i)
    statistics->mean_norm.push_back(1.0F + 0.1F * normal(generator));
  for (size_t i = 0; i < 2 * norms; ++i) statistics->mean_query.push_back(0.4F * normal(generator));
  return statistics;
}

std::shared_ptr<const Policy> policy_of(const Setting& setting, const TensorShape& shape) {
  PolicyOptions options = setting.options;
  if (setting.policy == "triattention") options.statistics = statistics_of(shape);
  return make_policy(setting.policy, options);
}

// Tokens 0 to 3 each begin a phase; no other is in the vocabulary.
std::shared_ptr<const phases::MarkerAutomaton> markers() {
  phases::MarkerTable table;
  for (int32_t phase = 0; phase < kNumPhases; ++phase) {
    table.states.push_back(
        {std::string(phases::name_of(static_cast<Phase>(phase))), static_cast<Phase>(phase)});
    const phases::MarkerSpelling only_token = {{"", phase}};
    table.markers.push_back({{only_token}, {}, phase});
  }
  phases::Vocabulary vocabulary;
  vocabulary.offsets.assign(kNumPhases + 1, 0);
  return std::make_shared<const phases::MarkerAutomaton>(table, vocabulary);
}

int32_t token_at(int64_t position) {
  constexpr int64_t kTokensOfPhase = 11;
  return position % kTokensOfPhase == 0
             ? static_cast<int32_t>(position / kTokensOfPhase % kNumPhases)
             : static_cast<int32_t>(100 + position);
}

PagedView moved_to(PagedView view, const CacheBuffer& here, const TensorMemory& there) {
  const auto* begin = static_cast<const char*>(here.view(Half::key).data);
  view.data = static_cast<char*>(there.data()) + (static_cast<const char*>(view.data) - begin);
  return view;
}

int64_t bytes_of(const CacheBuffer& cache) {
  return cache.elements() * size_of(cache.view(Half::key).dtype);
}

int64_t bytes_of(const RowsView& rows) {
  const int64_t elements =
      (rows.tokens - 1) * rows.token_stride + (rows.heads - 1) * rows.head_stride + rows.head_size;
  return elements * size_of(rows.dtype);
}

}  // namespace

std::vector<Setting> eviction_settings() {
  std::vector<Setting> settings;
  for (const std::string& name : policy_names()) {
    Setting setting{.policy = name};
    if (name == "agentkv" || name == "agentkv_recency") setting.options.sinks = 4;
    if (name == "snapkv") setting.options.queries = 16;
    if (name == "triattention") {
      setting.options.recent = 16;
    } else if (make_policy(name)->is_ragged()) {
      continue;
    }
    settings.push_back(setting);
  }
  PolicyOptions many{.queries = 5,
                     .sinks = 3,
                     .recent = 9,
                     .group = GroupReduction::mean,
                     .pooling = Pooling::average,
                     .pooling_kernel = 3,
                     .phase_quota = 0.5,
                     .redundancy = 0.4};
  settings.push_back({.policy = "agentkv", .budget = 48, .stride = 32, .options = many});
  return settings;
}

EvictionDriver::EvictionDriver(const Setting& setting, uint32_t seed, uint32_t block_seed,
                               const TensorShape& shape, std::shared_ptr<Backend> backend,
                               int64_t requests)
    : setting_(setting),
      shape_(shape),
      seed_(seed),
      backend_(std::move(backend)),
      policy_(policy_of(setting, shape)),
      markers_(markers()),
      evictor_(
          {.layers = kLayers,
           .query_heads = shape.query_heads,
           .kv_heads = shape.kv_heads,
           .head_size = shape.head_size,
           .block_size = kBlockSize,
           .dtype = shape.dtype,
           .scale = 0.5F,
           .rope_frequencies = std::vector<double>(static_cast<size_t>(shape.head_size / 2), 0.3)},
          backend_),
      requests_(static_cast<size_t>(requests)) {
  std::vector<int32_t> blocks(static_cast<size_t>(requests * kBlocksOfRequest));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(block_seed));
  for (size_t i = 0; i < requests_.size(); ++i) {
    const auto begin = blocks.begin() + static_cast<int64_t>(i) * kBlocksOfRequest;
    requests_[i].block_table.assign(begin, begin + kBlocksOfRequest);
    add(request_number(i));
  }
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    CacheBuffer cache(shape.layout, shape.dtype, requests * kBlocksOfRequest, shape.kv_heads,
                      kBlockSize, shape.head_size);
    const int64_t bytes = bytes_of(cache);
    layers_.push_back({std::move(cache), TensorMemory(backend_, bytes)});
  }
}

int64_t EvictionDriver::computed(int64_t request) const {
  return requests_[static_cast<size_t>(request - kRequest)].computed;
}

void EvictionDriver::add(int64_t request) {
  evictor_.add(request, policy_, setting_.window(), markers_);
}

Row EvictionDriver::row(int what, int64_t layer, int64_t request, int64_t position,
                        int64_t head) const {
  std::seed_seq seeds{seed_,
                      static_cast<uint32_t>(what),
                      static_cast<uint32_t>(layer),
                      static_cast<uint32_t>(request),
                      static_cast<uint32_t>(position),
                      static_cast<uint32_t>(head)};
  std::mt19937 generator(seeds);
  std::normal_distribution<float> normal;
  Row row(static_cast<size_t>(shape_.head_size));
  for (double& x : row) {
    x = oracle::decode(oracle::encode(normal(generator), shape_.dtype), shape_.dtype);
  }
  return row;
}

std::vector<EvictionReport> EvictionDriver::step(int64_t count) {
  return step(std::vector<int64_t>{count});
}

std::vector<EvictionReport> EvictionDriver::step(const std::vector<int64_t>& counts) {
  evictor_.begin_step();
  int64_t first_row = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    const Request& request = requests_[i];
    std::vector<int32_t> tokens;
    for (int64_t n = 0; n < counts[i]; ++n) tokens.push_back(token_at(request.computed + n));
    evictor_.schedule({.request = request_number(i),
                       .begin = request.computed,
                       .end = request.computed + counts[i],
                       .first_row = first_row,
                       .tokens = tokens,
                       .block_table = request.block_table});
    first_row += counts[i];
  }
  for (int64_t index = 0; index < kLayers; ++index) {
    Layer& layer = layers_[static_cast<size_t>(index)];
    write_cache(layer, index, counts);
    backend_->upload(layer.here.view(Half::key).data, layer.there.data(), bytes_of(layer.here));
    const RowsBuffer query = queries(index, counts);
    RowsView view = query.view();
    const TensorMemory query_there(backend_, bytes_of(view));
    backend_->upload(view.data, query_there.data(), bytes_of(view));
    view.data = query_there.data();
    evictor_.layer(index, view,
                   {moved_to(layer.here.view(Half::key), layer.here, layer.there),
                    moved_to(layer.here.view(Half::value), layer.here, layer.there)},
                   nullptr);
  }
  std::vector<EvictionReport> reports = evictor_.finish();
  for (Layer& layer : layers_) {
    backend_->download(layer.there.data(), layer.here.view(Half::key).data, bytes_of(layer.here));
  }
  for (size_t i = 0; i < requests_.size(); ++i) requests_[i].computed += counts[i];
  poison_freed();
  return reports;
}

void EvictionDriver::write_cache(Layer& layer, int64_t index, const std::vector<int64_t>& counts) {
  for (size_t i = 0; i < requests_.size(); ++i) {
    const Request& request = requests_[i];
    for (int64_t position = request.computed; position < request.computed + counts[i]; ++position) {
      for (int64_t head = 0; head < shape_.kv_heads; ++head) {
        const auto number = request_number(i);
        layer.here.set_row(Half::key, slot(request, position), head,
                           row(0, index, number, position, head));
        layer.here.set_row(Half::value, slot(request, position), head,
                           row(1, index, number, position, head));
      }
    }
  }
}

RowsBuffer EvictionDriver::queries(int64_t layer, const std::vector<int64_t>& counts) const {
  RowsBuffer query(shape_.dtype, std::accumulate(counts.begin(), counts.end(), int64_t{0}),
                   shape_.query_heads, shape_.head_size, shape_.query_order);
  int64_t batch_row = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    for (int64_t n = 0; n < counts[i]; ++n, ++batch_row) {
      for (int64_t head = 0; head < shape_.query_heads; ++head) {
        query.set_row(batch_row, head,
                      row(2, layer, request_number(i), requests_[i].computed + n, head));
      }
    }
  }
  return query;
}

void EvictionDriver::expect_consistent() const {
  for (size_t i = 0; i < requests_.size(); ++i) {
    const Request& request = requests_[i];
    const int64_t number = request_number(i);
    const int64_t first = setting_.window().start(request.computed);
    const int64_t held = request.computed - first;
    ASSERT_EQ(evictor_.computed(number), request.computed);
    ASSERT_EQ(evictor_.held(number), held);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<int32_t> positions = evictor_.positions(number, layer);
      const CacheBuffer& cache = layers_[static_cast<size_t>(layer)].here;
      for (int64_t head = 0; head < shape_.kv_heads; ++head) {
        std::set<int32_t> seen;
        for (int64_t n = 0; n < held; ++n) {
          const int32_t position = positions[static_cast<size_t>(head * held + n)];
          ASSERT_TRUE(seen.insert(position).second) << "position " << position << " twice";
          ASSERT_LT(position, request.computed);
          const int64_t at = slot(request, first + n);
          ASSERT_EQ(cache.row(Half::key, at, head), row(0, layer, number, position, head));
          ASSERT_EQ(cache.row(Half::value, at, head), row(1, layer, number, position, head));
        }
      }
    }
  }
}

std::vector<std::set<int32_t>> EvictionDriver::held_positions(int64_t request) const {
  std::vector<std::set<int32_t>> sets;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const std::vector<int32_t> positions = evictor_.positions(request, layer);
    const auto held = static_cast<int64_t>(positions.size()) / shape_.kv_heads;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      sets.emplace_back(positions.begin() + head * held, positions.begin() + (head + 1) * held);
    }
  }
  return sets;
}

int64_t EvictionDriver::slot(const Request& request, int64_t position) {
  return request.block_table[static_cast<size_t>(position / kBlockSize)] * kBlockSize +
         position % kBlockSize;
}

// Freed blocks belong to others now.
void EvictionDriver::poison_freed() {
  const Row nan(static_cast<size_t>(shape_.head_size), std::numeric_limits<double>::quiet_NaN());
  for (const Request& request : requests_) {
    for (int64_t position = 0; position < setting_.window().start(request.computed); ++position) {
      for (Layer& layer : layers_) {
        for (int64_t head = 0; head < shape_.kv_heads; ++head) {
          layer.here.set_row(Half::key, slot(request, position), head, nan);
          layer.here.set_row(Half::value, slot(request, position), head, nan);
        }
      }
    }
  }
}

}  // namespace phasekv::eviction
