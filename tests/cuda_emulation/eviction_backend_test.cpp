// What only an emulated device shows of the evictor's backend: when it waits, when it allocates,
// and that nothing it was given is read too late.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "buffers.h"
#include "eviction_driver.h"
#include "kernel_calls.h"
#include "phasekv/error.h"
#include "phasekv/eviction/cuda_backend.h"
#include "streams.h"

namespace phasekv::eviction {
namespace {

using oracle::Half;

class EvictionBackend : public testing::Test {
 protected:
  // Rows on the device.
  struct Rows {
    Rows(const std::shared_ptr<Backend>& backend, const RowsBuffer& rows)
        : memory(backend,
                 rows.view().tokens * rows.view().token_stride * size_of(rows.view().dtype)),
          view(rows.view()) {
      backend->upload(view.data, memory.data(), memory.bytes());
      view.data = memory.data();
    }

    TensorMemory memory;
    RowsView view;
  };

  static RowsBuffer random_rows(int64_t tokens, uint32_t seed) {
    RowsBuffer rows(DataType::float32, tokens, kHeads, kHeadSize, RowsOrder::packed);
    rows.fill_random(seed);
    return rows;
  }

  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kHeadSize = 8;

  std::shared_ptr<void> device_ = device_setups().front()();
  std::shared_ptr<CudaBackend> backend_ = make_cuda_backend(0);
};

// Far more lists than the staging memory holds at once, on a device that has not begun.
TEST_F(EvictionBackend, ListsMayChangeAsSoonAsACallReturns) {
  constexpr int64_t kEntries = 3000;
  const RowsBuffer query = random_rows(kEntries, 1);
  const Rows from(backend_, query);
  const Rows to(backend_, random_rows(kEntries, 2));
  std::vector<int64_t> order(kEntries);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  for (int64_t entry = 0; entry < kEntries; ++entry) {
    int64_t row = order[static_cast<size_t>(entry)];
    int64_t where = entry;
    backend_->push_queries(
        {.query = from.view, .rows = &row, .entries = &where, .count = 1, .buffer = to.view});
    row = where = -1;
  }
  std::vector<float> result(static_cast<size_t>(kEntries * kHeads * kHeadSize));
  backend_->download(to.view.data, result.data(), to.memory.bytes());
  const auto* rows = static_cast<const float*>(query.view().data);
  constexpr int64_t kSize = kHeads * kHeadSize;
  for (int64_t entry = 0; entry < kEntries; ++entry) {
    const float* expected = rows + order[static_cast<size_t>(entry)] * kSize;
    ASSERT_TRUE(std::equal(expected, expected + kSize, result.begin() + entry * kSize)) << entry;
  }
}

// On either side.
TEST_F(EvictionBackend, WithoutMemoryForListsACallIsRefusedAndTheNextOneWorks) {
  for (const int64_t others : {0, 1}) {
    const std::shared_ptr<CudaBackend> backend = make_cuda_backend(0);
    const RowsBuffer query = random_rows(1, 1);
    const Rows from(backend, query);
    const Rows to(backend, random_rows(1, 2));
    const int64_t first = 0;
    const PushQueriesParams params = {
        .query = from.view, .rows = &first, .entries = &first, .count = 1, .buffer = to.view};
    emulation::fail_allocation_after(others);
    EXPECT_THROW(backend->push_queries(params), Error);
    backend->push_queries(params);
    std::vector<float> result(static_cast<size_t>(kHeads * kHeadSize));
    backend->download(to.view.data, result.data(), to.memory.bytes());
    const auto* expected = static_cast<const float*>(query.view().data);
    EXPECT_TRUE(std::equal(result.begin(), result.end(), expected));
  }
}

TEST_F(EvictionBackend, AStepWithoutAnEventNeitherWaitsNorAllocates) {
  constexpr int64_t kRequests = 3;
  constexpr int64_t kLayers = 2;
  Evictor evictor({.layers = kLayers,
                   .query_heads = kHeads,
                   .kv_heads = kHeads,
                   .head_size = kHeadSize,
                   .block_size = 16},
                  backend_);
  const std::shared_ptr<const Policy> policy = make_policy("snapkv", {.queries = 16});
  for (int64_t request = 0; request < kRequests; ++request) {
    evictor.add(request, policy, {.budget = 2048, .stride = 16});
  }
  const Rows query(backend_, random_rows(kRequests, 4));
  const std::vector<int32_t> tokens = {5};
  emulation::Costs before;
  for (int64_t step = 0; step < 2000; ++step) {
    // The first one makes the memory.
    if (step == 1) before = emulation::costs();
    evictor.begin_step();
    for (int64_t request = 0; request < kRequests; ++request) {
      evictor.schedule({.request = request,
                        .begin = step,
                        .end = step + 1,
                        .first_row = request,
                        .tokens = tokens});
    }
    ASSERT_FALSE(evictor.has_events());
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      evictor.layer(layer, query.view, {}, nullptr);
    }
    evictor.finish();
  }
  EXPECT_EQ(emulation::costs().allocations, before.allocations);
  // A half of the staging memory is used again, long after.
  EXPECT_LE(emulation::costs().waits, before.waits + 2000 / 100);
}

// Two requests of which each has an event in every step, in a cache of so many layers.
class Evictions {
 public:
  Evictions(const std::shared_ptr<CudaBackend>& backend, const Setting& setting, int64_t layers)
      : layers_(layers),
        evictor_({.layers = layers,
                  .query_heads = kHeads,
                  .kv_heads = kHeads,
                  .head_size = kHeadSize,
                  .block_size = kBlockSize,
                  .rope_frequencies = {1.0, 0.1}},
                 backend),
        cache_("vec", DataType::float32, kRequests * kBlocks, kHeads, kBlockSize, kHeadSize),
        cache_there_(backend, cache_.elements() * size_of(DataType::float32)),
        query_there_(backend, kRequests * kBlockSize * kHeads * kHeadSize * 4) {
    const std::vector<float> zeros(static_cast<size_t>(cache_.elements()), 0.0F);
    backend->upload(zeros.data(), cache_there_.data(), cache_there_.bytes());
    backend->upload(zeros.data(), query_there_.data(), query_there_.bytes());
    const std::shared_ptr<const Policy> policy = make_policy(setting.policy, setting.options);
    for (int64_t request = 0; request < kRequests; ++request) {
      evictor_.add(request, policy, setting.window());
      for (int32_t block = 0; block < kBlocks; ++block) {
        blocks_.push_back(static_cast<int32_t>(request) * kBlocks + block);
      }
    }
  }

  // Up to `layers` of its layers.
  void begin(int64_t layers) {
    const std::vector<int32_t> tokens(kBlockSize, 5);
    evictor_.begin_step();
    for (int64_t request = 0; request < kRequests; ++request) {
      const int64_t computed = evictor_.computed(request);
      evictor_.schedule({.request = request,
                         .begin = computed,
                         .end = computed + kBlockSize,
                         .first_row = request * kBlockSize,
                         .tokens = tokens,
                         .block_table = {blocks_.data() + request * kBlocks, kBlocks}});
    }
    for (int64_t layer = 0; layer < layers; ++layer) {
      evictor_.layer(layer,
                     {.data = query_there_.data(),
                      .dtype = DataType::float32,
                      .tokens = kRequests * kBlockSize,
                      .heads = kHeads,
                      .head_size = kHeadSize,
                      .token_stride = kHeads * kHeadSize,
                      .head_stride = kHeadSize},
                     {there(Half::key), there(Half::value)}, nullptr);
    }
  }

  // Of a layer: keys of all requests and KV heads when an event comes.
  int64_t scores_of_a_step() const { return kRequests * kHeads * (evictor_.held(0) + kBlockSize); }

  std::vector<EvictionReport> step() {
    begin(layers_);
    return evictor_.finish();
  }

 private:
  static constexpr int64_t kRequests = 2;
  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kHeadSize = 16;
  static constexpr int64_t kBlockSize = 16;
  static constexpr int32_t kBlocks = 20;

  PagedView there(Half half) const {
    PagedView view = cache_.view(half);
    const auto offset =
        static_cast<const char*>(view.data) - static_cast<const char*>(cache_.view(Half::key).data);
    view.data = static_cast<char*>(cache_there_.data()) + offset;
    return view;
  }

  int64_t layers_;
  Evictor evictor_;
  CacheBuffer cache_;
  TensorMemory cache_there_;
  TensorMemory query_there_;
  std::vector<int32_t> blocks_;
};

// Of every kind: what goes to the device and comes back is nothing, scores, sums or both.
std::vector<Setting> settings_of_ops() {
  return {{.policy = "streaming_llm", .budget = 48},
          {.policy = "keydiff", .budget = 48},
          {.policy = "expected_attention", .budget = 48, .options = {.queries = 16}},
          {.policy = "h2o", .budget = 48},
          {.policy = "r_kv", .budget = 48}};
}

TEST_F(EvictionBackend, AStepWithEventsWaitsForAllLayersAndRequestsAtOnce) {
  for (const Setting& setting : settings_of_ops()) {
    SCOPED_TRACE(setting.policy);
    for (const int64_t layers : {1, 5}) {
      Evictions evictions(backend_, setting, layers);
      // The first ones make the memory.
      for (int64_t step = 0; step < 6; ++step) evictions.step();
      int64_t waits = 0;
      for (int64_t step = 0; step < 2; ++step) {
        const emulation::Costs before = emulation::costs();
        EXPECT_EQ(evictions.step().size(), 2U);
        EXPECT_EQ(emulation::costs().allocations, before.allocations);
        waits = std::max(waits, emulation::costs().waits - before.waits);
      }
      // One more where a half of the staging memory is used again.
      EXPECT_LE(waits, 2);
    }
  }
}

TEST_F(EvictionBackend, AnEventBringsNothingButScores) {
  constexpr int64_t kLayers = 3;
  for (const char* policy : {"streaming_llm", "keydiff", "expected_attention"}) {
    SCOPED_TRACE(policy);
    Evictions evictions(backend_, {.policy = policy, .budget = 48}, kLayers);
    for (int64_t step = 0; step < 6; ++step) evictions.step();
    const int64_t before = emulation::costs().bytes_to_host;
    EXPECT_EQ(evictions.step().size(), 2U);
    const bool has_scores = std::string_view(policy) != "streaming_llm";
    EXPECT_EQ(emulation::costs().bytes_to_host - before,
              has_scores ? kLayers * evictions.scores_of_a_step() * 4 : 0);
  }
}

// What it asked for comes when its memory is gone.
TEST_F(EvictionBackend, AStepMayBeGivenUp) {
  const Setting setting{.policy = "r_kv", .budget = 32};
  auto given_up = std::make_unique<Evictions>(backend_, setting, 2);
  for (int64_t step = 0; step < 3; ++step) given_up->step();
  given_up->begin(1);
  given_up->begin(0);
  given_up.reset();
  backend_->wait();
  Evictions evictions(backend_, setting, 1);
  for (int64_t step = 0; step < 3; ++step) {
    for (const EvictionReport& report : evictions.step()) EXPECT_EQ(report.failure, "");
  }
}

TEST_F(EvictionBackend, MemoryIsFreedAfterTheWorkThatUsesIt) {
  const Rows query(backend_, random_rows(4, 1));
  const Rows target(backend_, random_rows(4, 2));
  std::vector<int64_t> order = {0, 1, 2, 3};
  {
    const Rows between(backend_, random_rows(4, 3));
    backend_->push_queries({.query = query.view,
                            .rows = order.data(),
                            .entries = order.data(),
                            .count = 4,
                            .buffer = between.view});
    backend_->push_queries({.query = between.view,
                            .rows = order.data(),
                            .entries = order.data(),
                            .count = 4,
                            .buffer = target.view});
  }
  std::vector<float> result(4 * kHeads * kHeadSize);
  backend_->download(target.view.data, result.data(), target.memory.bytes());
  EXPECT_FALSE(std::any_of(result.begin(), result.end(), [](float x) { return x != x; }));
}

TEST_F(EvictionBackend, AnotherStreamGoesOnWhereTheOneBeforeStopped) {
  const Rows query(backend_, random_rows(1, 1));
  const Rows target(backend_, random_rows(1, 2));
  int64_t row = 0;
  backend_->push_queries(
      {.query = query.view, .rows = &row, .entries = &row, .count = 1, .buffer = target.view});
  int other = 0;
  backend_->use_stream(&other);
  std::vector<float> result(kHeads * kHeadSize);
  backend_->download(target.view.data, result.data(), target.memory.bytes());
  const RowsBuffer expected = random_rows(1, 1);
  EXPECT_TRUE(
      std::equal(result.begin(), result.end(), static_cast<const float*>(expected.view().data)));
}

TEST_F(EvictionBackend, AnIndexThatIsNotThereIsRefusedByName) {
  const Rows query(backend_, random_rows(3, 1));
  const Rows target(backend_, random_rows(3, 2));
  const int64_t row = 3;
  const int64_t entry = 0;
  try {
    backend_->push_queries(
        {.query = query.view, .rows = &row, .entries = &entry, .count = 1, .buffer = target.view});
    FAIL() << "pushed";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "rows[0]");
  }
}

}  // namespace
}  // namespace phasekv::eviction
