// Eviction as a whole, beside a plain model of it: which keys are held, and that they are the keys
// that were written.
#include "phasekv/eviction/evictor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "eviction_driver.h"
#include "phasekv/error.h"

namespace phasekv::eviction {
namespace {

using oracle::Half;

constexpr int64_t kLayers = EvictionDriver::kLayers;
constexpr int64_t kQueryHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadSize = 32;
constexpr int64_t kBlockSize = EvictionDriver::kBlockSize;

class EvictorTest : public testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Policies, EvictorTest, testing::ValuesIn(eviction_settings()),
                         [](const testing::TestParamInfo<Setting>& info) {
                           return info.param.policy + "_" + std::to_string(info.index);
                         });

TEST_P(EvictorTest, HeldKeysAreTheKeysThatWereWritten) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    std::mt19937 generator(seed);
    EvictionDriver driver(GetParam(), seed, seed + 1);
    while (driver.computed() < 420) {
      const auto count = static_cast<int64_t>(generator() % (generator() % 4 == 0 ? 90 : 8) + 1);
      const int64_t before = driver.computed();
      const Window window = GetParam().window();
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
  EvictionDriver driver(GetParam(), 5, 6);
  const ProtectedTokens kept = driver.policy()->protected_tokens(GetParam().budget);
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
  EvictionDriver one(GetParam(), 3, 1);
  EvictionDriver other(GetParam(), 3, 2);
  for (const int64_t count : {100, 1, 27, 16, 16, 1, 60}) {
    one.step(count);
    other.step(count);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(one.evictor().positions(EvictionDriver::kRequest, layer),
                other.evictor().positions(EvictionDriver::kRequest, layer));
    }
  }
}

TEST_P(EvictorTest, ARestoredStateGoesOnAsIfNothingHadHappened) {
  EvictionDriver driver(GetParam(), 9, 4);
  EvictionDriver restored(GetParam(), 9, 4);
  for (const int64_t count : {70, 30, 1, 1}) {
    driver.step(count);
    restored.step(count);
  }
  const std::vector<uint8_t> state = restored.evictor().save(EvictionDriver::kRequest);
  restored.add();
  restored.evictor().restore(EvictionDriver::kRequest, state);
  for (const int64_t count : {20, 16, 64, 1}) {
    driver.step(count);
    restored.step(count);
    EXPECT_EQ(driver.held_positions(), restored.held_positions());
    EXPECT_EQ(driver.evictor().kept_by_phase(EvictionDriver::kRequest),
              restored.evictor().kept_by_phase(EvictionDriver::kRequest));
  }
}

TEST_P(EvictorTest, ADamagedStateIsRefused) {
  EvictionDriver driver(GetParam(), 2, 2);
  driver.step(100);
  const std::vector<uint8_t> state = driver.evictor().save(EvictionDriver::kRequest);
  const Window window = GetParam().window();
  const auto restore = [&](std::vector<uint8_t> bytes, const Window& other) {
    driver.evictor().add(EvictionDriver::kRequest, driver.policy(), other);
    driver.evictor().restore(EvictionDriver::kRequest, bytes);
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
    EvictionDriver driver({.policy = "full"}, 1, 1);
    driver.evictor().add(EvictionDriver::kRequest, std::make_shared<Broken>(throws),
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
  EvictionDriver driver({.policy = "agentkv", .options = {.sinks = 0}}, 1, 1);
  Evictor& evictor = driver.evictor();
  std::vector<int32_t> tokens(128, 0);
  std::vector<uint8_t> computed(128, 0);
  std::fill_n(computed.begin(), 64, uint8_t{1});
  std::vector<int32_t> table(8);
  std::iota(table.begin(), table.end(), 0);
  std::vector<int64_t> query_rows(128, -1);
  std::iota(query_rows.begin(), query_rows.begin() + 64, 0);
  evictor.begin_step();
  evictor.schedule({.request = EvictionDriver::kRequest,
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
        cache.set_row(Half::key, slot, head, driver.row(0, layer, 0, slot, head));
        cache.set_row(Half::value, slot, head, driver.row(1, layer, 0, slot, head));
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
  EXPECT_EQ(refused("adakv", {.safeguard = 1.0}), "accepted");
  EXPECT_EQ(refused("adakv", {.safeguard = 1.1}), "safeguard");
  EXPECT_EQ(refused("adakv", {.steepness = 20.0}), "steepness");
  EXPECT_EQ(refused("snapkv", {.safeguard = 0.2}), "safeguard");
  EXPECT_EQ(refused("pyramidkv", {.steepness = 1.0}), "accepted");
  for (const double steepness :
       {0.9, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(refused("pyramidkv", {.steepness = steepness}), "steepness");
  }
}

}  // namespace
}  // namespace phasekv::eviction
