// Eviction with blocks per layer and KV head: what is held beside what was written, beside Evictor
// where all heads keep alike, and beside plain definitions of the budgets.
#include "phasekv/eviction/ragged_evictor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "eviction/ragged_policy.h"
#include "phasekv/error.h"

namespace phasekv::eviction {
namespace {

using oracle::Half;
using oracle::Row;

constexpr int64_t kLayers = 3;
constexpr int64_t kQueryHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadSize = 32;
constexpr int64_t kBlockSize = 16;
constexpr int64_t kBlocks = 20;  // of each head
constexpr int64_t kRequest = 7;

EvictorShape shape() {
  return {.layers = kLayers,
          .query_heads = kQueryHeads,
          .kv_heads = kKvHeads,
          .head_size = kHeadSize,
          .block_size = kBlockSize,
          .scale = 0.5F,
          .rope_frequencies = std::vector<double>(kHeadSize / 2, 0.3)};
}

// Row `position` of the keys, values or queries of a layer.
Row row(int what, int64_t layer, int64_t position, int64_t head) {
  std::seed_seq seeds{what, static_cast<int>(layer), static_cast<int>(position),
                      static_cast<int>(head)};
  std::mt19937 generator(seeds);
  std::normal_distribution<float> normal;
  Row row(kHeadSize);
  // Heads differ in how sharply they attend.
  for (double& x : row) x = normal(generator) * static_cast<float>(1 + head);
  return row;
}

RowsBuffer queries_of(int64_t layer, int64_t begin, int64_t count) {
  RowsBuffer query(DataType::float32, count, kQueryHeads, kHeadSize, RowsOrder::packed);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t head = 0; head < kQueryHeads; ++head) {
      query.set_row(i, head, row(2, layer, begin + i, head));
    }
  }
  return query;
}

// Positions that each layer and head holds.
using Held = std::vector<std::set<int32_t>>;

// A request, driven step by step as an engine would.
class Driver {
 public:
  Driver(std::shared_ptr<const Policy> policy, const Window& window, uint32_t block_seed)
      : window_(window), evictor_(shape()) {
    std::mt19937 generator(block_seed);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      caches_.emplace_back("vec", DataType::float32, kKvHeads * kBlocks, 1, kBlockSize, kHeadSize);
      std::vector<int32_t> table(kKvHeads * kBlocks);
      std::iota(table.begin(), table.end(), 0);
      std::shuffle(table.begin(), table.end(), generator);
      tables_.push_back(table);
    }
    evictor_.add(kRequest, std::move(policy), window);
  }

  RaggedEvictor& evictor() { return evictor_; }
  int64_t computed() const { return computed_; }

  std::vector<EvictionReport> step(int64_t count) {
    evictor_.begin_step();
    const std::vector<int32_t> tokens(static_cast<size_t>(count), 1);
    evictor_.schedule({.request = kRequest,
                       .begin = computed_,
                       .end = computed_ + count,
                       .first_row = 0,
                       .tokens = tokens});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<int64_t> held = evictor_.held(kRequest, layer);
      for (int64_t head = 0; head < kKvHeads; ++head) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t index = held[static_cast<size_t>(head)] + i;
          set_row(layer, head, index, row(0, layer, computed_ + i, head),
                  row(1, layer, computed_ + i, head));
        }
      }
      CacheBuffer& cache = caches_[static_cast<size_t>(layer)];
      evictor_.layer(layer, queries_of(layer, computed_, count).view(),
                     {cache.view(Half::key), cache.view(Half::value)},
                     tables_[static_cast<size_t>(layer)], kBlocks);
      poison_freed(layer);
    }
    computed_ += count;
    return evictor_.finish();
  }

  // Every held key and value is the one of the position that the evictor names, bit for bit.
  Held held() const {
    Held sets;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<int64_t> counts = evictor_.held(kRequest, layer);
      for (int64_t head = 0; head < kKvHeads; ++head) {
        const std::vector<int32_t> positions = evictor_.positions(kRequest, layer, head);
        EXPECT_EQ(static_cast<int64_t>(positions.size()), counts[static_cast<size_t>(head)]);
        const CacheBuffer& cache = caches_[static_cast<size_t>(layer)];
        for (size_t i = 0; i < positions.size(); ++i) {
          const int64_t slot = slot_of(layer, head, static_cast<int64_t>(i));
          EXPECT_EQ(cache.row(Half::key, slot, 0), row(0, layer, positions[i], head));
          EXPECT_EQ(cache.row(Half::value, slot, 0), row(1, layer, positions[i], head));
        }
        sets.emplace_back(positions.begin(), positions.end());
        EXPECT_EQ(sets.back().size(), positions.size()) << "a position twice";
      }
    }
    return sets;
  }

  int64_t total_held() const {
    int64_t total = 0;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (const int64_t held : evictor_.held(kRequest, layer)) total += held;
    }
    return total;
  }

  int64_t kept() const { return computed_ - window_.start(computed_); }

 private:
  int64_t slot_of(int64_t layer, int64_t head, int64_t index) const {
    const auto entry = static_cast<size_t>(head * kBlocks + index / kBlockSize);
    return tables_[static_cast<size_t>(layer)][entry] * kBlockSize + index % kBlockSize;
  }

  void set_row(int64_t layer, int64_t head, int64_t index, const Row& key, const Row& value) {
    CacheBuffer& cache = caches_[static_cast<size_t>(layer)];
    cache.set_row(Half::key, slot_of(layer, head, index), 0, key);
    cache.set_row(Half::value, slot_of(layer, head, index), 0, value);
  }

  // What lies behind the held keys is free.
  void poison_freed(int64_t layer) {
    const Row nan(kHeadSize, std::numeric_limits<double>::quiet_NaN());
    const std::vector<int64_t> held = evictor_.held(kRequest, layer);
    for (int64_t head = 0; head < kKvHeads; ++head) {
      for (int64_t i = held[static_cast<size_t>(head)]; i < kBlocks * kBlockSize; ++i) {
        set_row(layer, head, i, nan, nan);
      }
    }
  }

  Window window_;
  RaggedEvictor evictor_;
  std::vector<CacheBuffer> caches_;
  std::vector<std::vector<int32_t>> tables_;  // [layers][kv heads * kBlocks]
  int64_t computed_ = 0;
};

// The same request in an Evictor, whose heads all hold a window.
Held held_in_windows(const std::shared_ptr<const Policy>& policy, const Window& window,
                     const std::vector<int64_t>& steps) {
  Evictor evictor(shape());
  evictor.add(kRequest, policy, window);
  std::vector<CacheBuffer> caches;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    caches.emplace_back("vec", DataType::float32, kBlocks, kKvHeads, kBlockSize, kHeadSize);
  }
  std::vector<int32_t> table(kBlocks);
  std::iota(table.begin(), table.end(), 0);
  int64_t computed = 0;
  for (const int64_t count : steps) {
    const std::vector<int32_t> tokens(static_cast<size_t>(count), 1);
    evictor.begin_step();
    evictor.schedule({.request = kRequest,
                      .begin = computed,
                      .end = computed + count,
                      .first_row = 0,
                      .tokens = tokens,
                      .block_table = table});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      CacheBuffer& cache = caches[static_cast<size_t>(layer)];
      for (int64_t i = computed; i < computed + count; ++i) {
        for (int64_t head = 0; head < kKvHeads; ++head) {
          cache.set_row(Half::key, i, head, row(0, layer, i, head));
          cache.set_row(Half::value, i, head, row(1, layer, i, head));
        }
      }
      evictor.layer(layer, queries_of(layer, computed, count).view(),
                    {cache.view(Half::key), cache.view(Half::value)}, nullptr);
    }
    computed += count;
    evictor.finish();
  }
  Held sets;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const std::vector<int32_t> positions = evictor.positions(kRequest, layer);
    const auto held = static_cast<int64_t>(positions.size()) / kKvHeads;
    for (int64_t head = 0; head < kKvHeads; ++head) {
      sets.emplace_back(positions.begin() + head * held, positions.begin() + (head + 1) * held);
    }
  }
  return sets;
}

constexpr Window kWindow{.budget = 64, .stride = 16};

PolicyOptions options_of(const std::string& name) {
  PolicyOptions options;
  if (name.starts_with("agentkv")) options.sinks = 4;
  if (name == "snapkv" || name == "adakv" || name == "pyramidkv") options.queries = 16;
  return options;
}

std::shared_ptr<const Policy> policy_named(const std::string& name) {
  return make_policy(name, options_of(name));
}

// With r_kv it would not be so: it takes the last keys for the newest, as they are in a window.
TEST(RaggedEvictor, PoliciesOfAlikeHeadsKeepWhatTheyKeepInWindows) {
  const std::vector<int64_t> steps = {100, 1, 27, 16, 16, 1, 60, 3};
  for (const char* name : {"streaming_llm", "snapkv", "h2o", "keydiff", "agentkv", "phase_balanced",
                           "expected_attention"}) {
    SCOPED_TRACE(name);
    Driver driver(std::make_shared<RaggedPolicy>(name, make_policy(name, options_of(name))),
                  kWindow, 1);
    for (const int64_t count : steps) driver.step(count);
    EXPECT_EQ(driver.held(), held_in_windows(policy_named(name), kWindow, steps));
  }
}

class RaggedPolicies : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Each, RaggedPolicies, testing::Values("adakv", "pyramidkv"),
                         [](const testing::TestParamInfo<std::string>& info) {
                           return info.param;
                         });

TEST_P(RaggedPolicies, HoldTheBudgetOnAverageAndTheKeysThatWereWritten) {
  std::mt19937 generator(3);
  Driver driver(policy_named(GetParam()), kWindow, 1);
  bool is_ragged = false;
  while (driver.computed() < 330) {
    const auto count = static_cast<int64_t>(generator() % (generator() % 4 == 0 ? 90 : 8) + 1);
    for (const EvictionReport& report : driver.step(count)) {
      EXPECT_EQ(report.failure, "");
      for (const std::set<int32_t>& positions : driver.held()) {
        for (int64_t i = 1; i <= 16; ++i) {
          EXPECT_TRUE(positions.contains(static_cast<int32_t>(driver.computed() - i)));
        }
        is_ragged = is_ragged || static_cast<int64_t>(positions.size()) != driver.kept();
      }
    }
    ASSERT_EQ(driver.total_held(), kLayers * kKvHeads * driver.kept());
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_TRUE(is_ragged);
}

TEST_P(RaggedPolicies, BlockIdsDoNotMatter) {
  Driver one(policy_named(GetParam()), kWindow, 1);
  Driver other(policy_named(GetParam()), kWindow, 2);
  for (const int64_t count : {100, 1, 27, 16, 60}) {
    one.step(count);
    other.step(count);
    EXPECT_EQ(one.held(), other.held());
  }
}

// A policy of which nothing good can be expected.
class Broken final : public Policy {
 public:
  explicit Broken(bool scores) : scores_(scores) {}
  std::string_view name() const override { return "broken"; }
  PolicyNeeds needs() const override { return {}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return {2, 0}; }
  void score(const PolicyInput& input, std::span<float> scores) const override {
    if (scores_) throw Error(ErrorCode::invalid_argument, "scores", "[1]", "[2]");
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(input.positions[i]);
  }
  bool is_ragged() const override { return true; }
  std::vector<int64_t> allocate(const LayerScores& layer) const override {
    if (scores_) return Policy::allocate(layer);
    return {1, layer.kept};  // less than its sinks
  }

 private:
  bool scores_;
};

TEST(RaggedEvictor, ABrokenPolicyKeepsTheNewestAndSaysSo) {
  for (const bool scores : {true, false}) {
    Driver driver(std::make_shared<Broken>(scores), kWindow, 1);
    const std::vector<EvictionReport> reports = driver.step(160);
    ASSERT_EQ(reports.size(), 1U);
    EXPECT_NE(reports[0].failure.find("broken"), std::string::npos);
    std::set<int32_t> expected = {0, 1};
    for (int32_t position = 98; position < 160; ++position) expected.insert(position);
    for (const std::set<int32_t>& positions : driver.held()) EXPECT_EQ(positions, expected);
  }
}

TEST(RaggedEvictor, APolicyOfAlikeHeadsIsRefused) {
  RaggedEvictor evictor(shape());
  try {
    evictor.add(kRequest, policy_named("snapkv"), kWindow);
    FAIL() << "added";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_EQ(error.value(), "snapkv");
  }
}

TEST(RaggedEvictor, TablesThatAreTooShortAreRefused) {
  RaggedEvictor evictor(shape());
  evictor.add(kRequest, policy_named("adakv"), kWindow);
  const std::vector<int32_t> tokens(20, 1);
  const CacheBuffer cache("vec", DataType::float32, 4, 1, kBlockSize, kHeadSize);
  const auto run = [&](const std::vector<int32_t>& tables, int64_t stride) {
    evictor.begin_step();
    evictor.add(kRequest, policy_named("adakv"), kWindow);
    evictor.schedule(
        {.request = kRequest, .begin = 0, .end = 20, .first_row = 0, .tokens = tokens});
    evictor.layer(0, queries_of(0, 0, 20).view(), {cache.view(Half::key), cache.view(Half::value)},
                  tables, stride);
  };
  EXPECT_THROW(run({0, 1}, 1), Error);     // a block for 20 keys
  EXPECT_THROW(run({0, 1, 2}, 2), Error);  // of two heads
  EXPECT_NO_THROW(run({0, 1, 2, 3}, 2));
}

// One layer's keys, whose positions are their indices and none of which is protected.
struct Layer {
  std::vector<std::vector<float>> scores;
  std::vector<std::vector<int32_t>> positions;

  LayerScores view(int64_t kept) const {
    LayerScores layer{.heads = {}, .layers = 4, .block_size = 16, .budget = kept, .kept = kept};
    for (size_t head = 0; head < scores.size(); ++head) {
      layer.heads.push_back({scores[head], positions[head]});
    }
    layer.seen = 100000;
    return layer;
  }
};

TEST(AdaKv, TheBestOfAllHeadsStayBesidesEachHeadsSafeguard) {
  std::mt19937 generator(7);
  for (int round = 0; round < 30; ++round) {
    Layer layer;
    for (int head = 0; head < 3; ++head) {
      layer.scores.emplace_back();
      layer.positions.emplace_back();
      for (int32_t i = 0; i < 50; ++i) {
        // Few different scores, so that there are ties; heads of different height.
        layer.scores.back().push_back(static_cast<float>(generator() % 8 * (head * 2 + 1)));
        layer.positions.back().push_back(i);
      }
    }
    const int64_t kept = 10 + round;
    const std::optional<double> safeguard =
        std::array<std::optional<double>, 4>{std::nullopt, 0.0, 0.5, 1.0}[round % 4];
    const auto counts =
        make_policy("adakv", {.recent = 0, .safeguard = safeguard})->allocate(layer.view(kept));
    // By definition: safeguarded ones first, then the best, one by one.
    std::vector<std::set<int32_t>> chosen(3);
    const auto take_best = [&](const std::vector<size_t>& heads) {
      size_t best_head = 0;
      int32_t best = -1;
      for (int32_t i = 0; i < 50; ++i) {
        for (const size_t head : heads) {
          if (chosen[head].contains(i)) continue;
          if (best < 0 || layer.scores[head][static_cast<size_t>(i)] >
                              layer.scores[best_head][static_cast<size_t>(best)]) {
            best_head = head;
            best = i;
          }
        }
      }
      chosen[best_head].insert(best);
    };
    const auto safe = static_cast<int64_t>(safeguard.value_or(0.2) * static_cast<double>(kept));
    for (size_t head = 0; head < 3; ++head) {
      for (int64_t i = 0; i < safe; ++i) take_best({head});
    }
    for (int64_t i = 3 * safe; i < 3 * kept; ++i) take_best({0, 1, 2});
    ASSERT_EQ(counts.size(), 3U);
    for (size_t head = 0; head < 3; ++head) {
      EXPECT_EQ(counts[head], static_cast<int64_t>(chosen[head].size()));
    }
  }
}

class PyramidKv : public testing::TestWithParam<std::optional<double>> {};

INSTANTIATE_TEST_SUITE_P(Steepness, PyramidKv, testing::Values(std::nullopt, 4.0, 1.0));

TEST_P(PyramidKv, BudgetsFallLinearlyAndTheirTotalIsExact) {
  const auto policy = make_policy("pyramidkv", {.queries = 32, .steepness = GetParam()});
  const double steepness = GetParam().value_or(20.0);
  for (const int64_t layers : {1, 2, 5, 30}) {
    for (const int64_t seen : {1100, 1400, 1804, 5000}) {
      const int64_t newest = seen % 16;
      std::vector<int32_t> positions(static_cast<size_t>(seen));
      std::iota(positions.begin(), positions.end(), 0);
      const std::vector<float> scores(positions.size());
      constexpr int64_t kBudget = 1024;
      int64_t total = 0;
      int64_t before = seen;
      for (int64_t layer = 0; layer < layers; ++layer) {
        const LayerScores input{.heads = {{scores, positions}, {scores, positions}},
                                .layer = layer,
                                .layers = layers,
                                .block_size = 16,
                                .seen = seen,
                                .budget = kBudget,
                                .kept = kBudget + newest};
        const std::vector<int64_t> counts = policy->allocate(input);
        ASSERT_EQ(counts.size(), 2U);
        EXPECT_EQ(counts[0], counts[1]);
        const int64_t budget = counts[0] - newest;
        EXPECT_EQ(budget % 16, 0);
        EXPECT_GE(budget, 32);
        EXPECT_LE(budget, before);
        // The line as published, which rounds otherwise.
        const double mean = kBudget - 32;
        const double first = std::min<double>(2 * mean - mean / steepness, seen - newest - 32);
        const double step = layers > 1 ? 2 * (first - mean) / static_cast<double>(layers - 1) : 0;
        const double exact = layers > 1 ? 32 + first - static_cast<double>(layer) * step : kBudget;
        EXPECT_NEAR(static_cast<double>(budget), exact, 16);
        before = budget;
        total += budget;
      }
      EXPECT_EQ(total, layers * kBudget) << layers << " layers, " << seen << " tokens";
    }
  }
}

}  // namespace
}  // namespace phasekv::eviction
