// What only an emulated device shows of the evictor's backend: when it waits, when it allocates,
// and that nothing it was given is read too late.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "buffers.h"
#include "eviction_driver.h"
#include "kernel_calls.h"
#include "phasekv/error.h"
#include "phasekv/eviction/cuda_backend.h"
#include "streams.h"

namespace phasekv::eviction {
namespace {

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
