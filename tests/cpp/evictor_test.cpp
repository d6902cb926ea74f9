// Eviction as a whole, beside a plain model of it: which keys are held, and that they are the keys
// that were written.
#include "phasekv/eviction/evictor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "phasekv/error.h"

namespace phasekv::eviction {
namespace {

using oracle::Half;
using oracle::Row;

constexpr int64_t kLayers = 2;
constexpr int64_t kQueryHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadSize = 32;
constexpr int64_t kBlockSize = 16;
constexpr int64_t kBlocks = 40;

struct Setting {
  std::string policy;
  int64_t budget = 64;
  int64_t stride = 16;
  PolicyOptions options = {};
};

std::shared_ptr<const Policy> policy_of(const Setting& setting) {
  return make_policy(setting.policy, setting.options);
}

// A request in a cache of its own, driven step by step as an engine would.
class Driver {
 public:
  Driver(const Setting& setting, uint32_t seed, uint32_t block_seed)
      : setting_(setting),
        window_{.budget = setting.budget, .stride = setting.stride},
        seed_(seed),
        evictor_({.layers = kLayers,
                  .query_heads = kQueryHeads,
                  .kv_heads = kKvHeads,
                  .head_size = kHeadSize,
                  .block_size = kBlockSize,
                  .scale = 0.5F,
                  .rope_frequencies = std::vector<double>(kHeadSize / 2, 0.3)}),
        block_table_(kBlocks) {
    std::iota(block_table_.begin(), block_table_.end(), 0);
    std::shuffle(block_table_.begin(), block_table_.end(), std::mt19937(block_seed));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      caches_.emplace_back("vec", DataType::float32, kBlocks, kKvHeads, kBlockSize, kHeadSize);
    }
    evictor_.add(kRequest, policy_of(setting), window_);
  }

  Evictor& evictor() { return evictor_; }
  int64_t computed() const { return computed_; }
  static constexpr int64_t kRequest = 7;

  // Row `position` of the keys, values or queries of a layer: a function of the seed alone.
  Row row(int what, int64_t layer, int64_t position, int64_t head) const {
    std::seed_seq seeds{seed_, static_cast<uint32_t>(what), static_cast<uint32_t>(layer),
                        static_cast<uint32_t>(position), static_cast<uint32_t>(head)};
    std::mt19937 generator(seeds);
    std::normal_distribution<float> normal;
    Row row(kHeadSize);
    for (double& x : row) x = normal(generator);
    return row;
  }

  // Computes `count` more tokens.
  std::vector<EvictionReport> step(int64_t count) {
    const int64_t end = computed_ + count;
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    evictor_.begin_step();
    evictor_.schedule({.request = kRequest,
                       .begin = computed_,
                       .end = end,
                       .first_row = 0,
                       .tokens = tokens,
                       .block_table = block_table_});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      CacheBuffer& cache = caches_[static_cast<size_t>(layer)];
      RowsBuffer query(DataType::float32, count, kQueryHeads, kHeadSize, RowsOrder::packed);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = computed_ + i;
        for (int64_t head = 0; head < kQueryHeads; ++head) {
          query.set_row(i, head, row(2, layer, position, head));
        }
        for (int64_t head = 0; head < kKvHeads; ++head) {
          cache.set_row(Half::key, slot(position), head, row(0, layer, position, head));
          cache.set_row(Half::value, slot(position), head, row(1, layer, position, head));
        }
      }
      evictor_.layer(layer, query.view(), {cache.view(Half::key), cache.view(Half::value)},
                     nullptr);
    }
    computed_ = end;
    poison_freed();
    return evictor_.finish();
  }

  // Every held key and value is the one of the position that the evictor names, bit for bit.
  void expect_consistent() const {
    const int64_t first = window_.start(computed_);
    ASSERT_EQ(evictor_.computed(kRequest), computed_);
    ASSERT_EQ(evictor_.held(kRequest), computed_ - first);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<int32_t> positions = evictor_.positions(kRequest, layer);
      const int64_t held = computed_ - first;
      for (int64_t head = 0; head < kKvHeads; ++head) {
        std::set<int32_t> seen;
        for (int64_t i = 0; i < held; ++i) {
          const int32_t position = positions[static_cast<size_t>(head * held + i)];
          ASSERT_TRUE(seen.insert(position).second) << "position " << position << " twice";
          ASSERT_LT(position, computed_);
          const CacheBuffer& cache = caches_[static_cast<size_t>(layer)];
          ASSERT_EQ(cache.row(Half::key, slot(first + i), head), row(0, layer, position, head));
          ASSERT_EQ(cache.row(Half::value, slot(first + i), head), row(1, layer, position, head));
        }
      }
    }
  }

  std::vector<std::set<int32_t>> held_positions() const {
    std::vector<std::set<int32_t>> sets;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<int32_t> positions = evictor_.positions(kRequest, layer);
      const auto held = static_cast<int64_t>(positions.size()) / kKvHeads;
      for (int64_t head = 0; head < kKvHeads; ++head) {
        sets.emplace_back(positions.begin() + head * held, positions.begin() + (head + 1) * held);
      }
    }
    return sets;
  }

 private:
  int64_t slot(int64_t position) const {
    return block_table_[static_cast<size_t>(position / kBlockSize)] * kBlockSize +
           position % kBlockSize;
  }

  // Freed blocks belong to others now.
  void poison_freed() {
    const Row nan(kHeadSize, std::numeric_limits<double>::quiet_NaN());
    for (int64_t position = 0; position < window_.start(computed_); ++position) {
      for (CacheBuffer& cache : caches_) {
        for (int64_t head = 0; head < kKvHeads; ++head) {
          cache.set_row(Half::key, slot(position), head, nan);
          cache.set_row(Half::value, slot(position), head, nan);
        }
      }
    }
  }

  Setting setting_;
  Window window_;
  uint32_t seed_;
  Evictor evictor_;
  std::vector<int32_t> block_table_;
  std::vector<CacheBuffer> caches_;
  int64_t computed_ = 0;
};

std::vector<Setting> settings() {
  std::vector<Setting> settings;
  for (const std::string& name : policy_names()) {
    if (name == "triattention") continue;  // it needs statistics
    if (make_policy(name)->is_ragged()) continue;
    Setting setting{.policy = name};
    if (name == "agentkv" || name == "agentkv_recency") setting.options.sinks = 4;
    if (name == "snapkv") setting.options.queries = 16;
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

class EvictorTest : public testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Policies, EvictorTest, testing::ValuesIn(settings()),
                         [](const testing::TestParamInfo<Setting>& info) {
                           return info.param.policy + "_" + std::to_string(info.index);
                         });

TEST_P(EvictorTest, HeldKeysAreTheKeysThatWereWritten) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    std::mt19937 generator(seed);
    Driver driver(GetParam(), seed, seed + 1);
    while (driver.computed() < 420) {
      const auto count = static_cast<int64_t>(generator() % (generator() % 4 == 0 ? 90 : 8) + 1);
      const int64_t before = driver.computed();
      const Window window{.budget = GetParam().budget, .stride = GetParam().stride};
      const std::vector<EvictionReport> reports = driver.step(count);
      const int64_t evicted = window.start(before + count) - window.start(before);
      ASSERT_EQ(reports.size(), evicted > 0 ? 1U : 0U);
      if (evicted > 0) {
        EXPECT_EQ(reports[0].evicted_tokens, evicted);
        EXPECT_EQ(reports[0].freed_blocks * kBlockSize, evicted);
        EXPECT_EQ(reports[0].failure, "");
      }
      driver.expect_consistent();
    }
  }
}

TEST_P(EvictorTest, ProtectedTokensStay) {
  Driver driver(GetParam(), 5, 6);
  const auto policy = policy_of(GetParam());
  const ProtectedTokens kept = policy->protected_tokens(GetParam().budget);
  while (driver.computed() < 320) {
    if (driver.step(16).empty()) continue;
    for (const std::set<int32_t>& positions : driver.held_positions()) {
      for (int64_t i = 0; i < kept.sinks; ++i) EXPECT_TRUE(positions.contains(i));
      for (int64_t i = 1; i <= kept.recent; ++i) {
        EXPECT_TRUE(positions.contains(static_cast<int32_t>(driver.computed() - i)));
      }
    }
  }
}

TEST_P(EvictorTest, BlockIdsDoNotMatter) {
  Driver one(GetParam(), 3, 1);
  Driver other(GetParam(), 3, 2);
  for (const int64_t count : {100, 1, 27, 16, 16, 1, 60}) {
    one.step(count);
    other.step(count);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(one.evictor().positions(Driver::kRequest, layer),
                other.evictor().positions(Driver::kRequest, layer));
    }
  }
}

TEST_P(EvictorTest, ARestoredStateGoesOnAsIfNothingHadHappened) {
  Driver driver(GetParam(), 9, 4);
  Driver restored(GetParam(), 9, 4);
  for (const int64_t count : {70, 30, 1, 1}) {
    driver.step(count);
    restored.step(count);
  }
  const std::vector<uint8_t> state = restored.evictor().save(Driver::kRequest);
  restored.evictor().add(Driver::kRequest, policy_of(GetParam()),
                         {.budget = GetParam().budget, .stride = GetParam().stride});
  restored.evictor().restore(Driver::kRequest, state);
  for (const int64_t count : {20, 16, 64, 1}) {
    driver.step(count);
    restored.step(count);
    EXPECT_EQ(driver.held_positions(), restored.held_positions());
    EXPECT_EQ(driver.evictor().kept_by_phase(Driver::kRequest),
              restored.evictor().kept_by_phase(Driver::kRequest));
  }
}

TEST_P(EvictorTest, ADamagedStateIsRefused) {
  Driver driver(GetParam(), 2, 2);
  driver.step(100);
  const std::vector<uint8_t> state = driver.evictor().save(Driver::kRequest);
  const Window window{.budget = GetParam().budget, .stride = GetParam().stride};
  const auto restore = [&](std::vector<uint8_t> bytes, const Window& other) {
    driver.evictor().add(Driver::kRequest, policy_of(GetParam()), other);
    driver.evictor().restore(Driver::kRequest, bytes);
  };
  for (size_t size = 0; size < state.size(); size += state.size() / 23 + 1) {
    EXPECT_THROW(restore({state.begin(), state.begin() + static_cast<int64_t>(size)}, window),
                 Error);
  }
  EXPECT_THROW(restore(state, {.budget = GetParam().budget + 16, .stride = GetParam().stride}),
               Error);
  EXPECT_NO_THROW(restore(state, window));
}

// A policy of which nothing good can be expected.
class Broken final : public Policy {
 public:
  explicit Broken(bool throws) : throws_(throws) {}
  std::string_view name() const override { return "broken"; }
  PolicyNeeds needs() const override { return {}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return {2, 0}; }
  void score(const PolicyInput& /*input*/, std::span<float> scores) const override {
    if (throws_) throw Error(ErrorCode::invalid_argument, "scores", "[1]", "[2]");
    scores[3] = std::numeric_limits<float>::quiet_NaN();
  }

 private:
  bool throws_;
};

TEST(Evictor, ABrokenPolicyKeepsTheNewestAndSaysSo) {
  for (const bool throws : {false, true}) {
    Driver driver({.policy = "full"}, 1, 1);
    driver.evictor().add(Driver::kRequest, std::make_shared<Broken>(throws),
                         {.budget = 64, .stride = 16});
    const std::vector<EvictionReport> reports = driver.step(160);
    ASSERT_EQ(reports.size(), 1U);
    EXPECT_NE(reports[0].failure.find("broken"), std::string::npos);
    driver.expect_consistent();
    std::set<int32_t> expected = {0, 1};
    for (int32_t position = 98; position < 160; ++position) expected.insert(position);
    for (const std::set<int32_t>& positions : driver.held_positions()) {
      EXPECT_EQ(positions, expected);
    }
  }
}

TEST(Evictor, TokensThatAreReusedEnterNoBuffer) {
  // With queries of the first half only, the second half's must not matter: poison would show.
  Driver driver({.policy = "agentkv", .options = {.sinks = 0}}, 1, 1);
  Evictor& evictor = driver.evictor();
  std::vector<int32_t> tokens(128, 0);
  std::vector<uint8_t> computed(128, 0);
  std::fill_n(computed.begin(), 64, uint8_t{1});
  std::vector<int32_t> table(8);
  std::iota(table.begin(), table.end(), 0);
  std::vector<int64_t> query_rows(128, -1);
  std::iota(query_rows.begin(), query_rows.begin() + 64, 0);
  evictor.begin_step();
  evictor.schedule({.request = Driver::kRequest,
                    .begin = 0,
                    .end = 128,
                    .first_row = 0,
                    .tokens = tokens,
                    .computed = computed,
                    .block_table = table});
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    CacheBuffer cache("vec", DataType::float32, 8, kKvHeads, kBlockSize, kHeadSize);
    for (int64_t slot = 0; slot < 128; ++slot) {
      for (int64_t head = 0; head < kKvHeads; ++head) {
        cache.set_row(Half::key, slot, head, driver.row(0, layer, slot, head));
        cache.set_row(Half::value, slot, head, driver.row(1, layer, slot, head));
      }
    }
    RowsBuffer query(DataType::float32, 64, kQueryHeads, kHeadSize, RowsOrder::packed);
    query.fill_random(3);
    evictor.layer(layer, query.view(), {cache.view(Half::key), cache.view(Half::value)},
                  query_rows.data());
  }
  const std::vector<EvictionReport> reports = evictor.finish();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].failure, "");
}

TEST(Evictor, APolicyThatNeedsTheRotationIsRefusedWithoutOne) {
  Evictor evictor({.layers = kLayers,
                   .query_heads = kQueryHeads,
                   .kv_heads = kKvHeads,
                   .head_size = kHeadSize,
                   .block_size = kBlockSize});
  const Window window{.budget = 64, .stride = 16};
  evictor.add(0, make_policy("keydiff"), window);
  try {
    evictor.add(1, make_policy("expected_attention"), window);
    FAIL() << "added";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::missing_capability);
    EXPECT_EQ(error.argument(), "rope");
  }
}

TEST(Evictor, ARaggedPolicyIsRefused) {
  Evictor evictor({.layers = kLayers,
                   .query_heads = kQueryHeads,
                   .kv_heads = kKvHeads,
                   .head_size = kHeadSize,
                   .block_size = kBlockSize});
  for (const char* name : {"adakv", "pyramidkv"}) {
    try {
      evictor.add(0, make_policy(name), {.budget = 64, .stride = 16});
      FAIL() << "added";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_EQ(error.value(), name);
    }
  }
}

TEST(Policies, RefuseWhatTheyDoNotHave) {
  const auto refused = [](const char* name, const PolicyOptions& options) {
    try {
      make_policy(name, options);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refused("agentkv", {.queries = 16}), "accepted");
  EXPECT_EQ(refused("agent_kv", {}), "policy");
  EXPECT_EQ(refused("full", {.sinks = 4}), "sinks");
  EXPECT_EQ(refused("h2o", {.group = GroupReduction::max}), "group");
  EXPECT_EQ(refused("agentkv", {.pooling_kernel = 4}), "pooling_kernel");
  EXPECT_EQ(refused("agentkv", {.queries = 0}), "queries");
  EXPECT_EQ(refused("agentkv", {.phase_quota = 1.5}), "phase_quota");
  EXPECT_EQ(refused("r_kv", {.redundancy = std::numeric_limits<double>::quiet_NaN()}),
            "redundancy");
  EXPECT_EQ(refused("triattention", {}), "statistics");
  EXPECT_EQ(refused("adakv", {.sinks = 3}), "sinks");
  EXPECT_EQ(refused("keydiff", {.queries = 3}), "queries");
  EXPECT_EQ(refused("pyramidkv", {.phase_quota = 0.5}), "phase_quota");
  EXPECT_EQ(refused("expected_attention", {.pooling = Pooling::max}), "pooling");
}

}  // namespace
}  // namespace phasekv::eviction
