// Eviction whose tensors lie on a device, beside eviction on the CPU: the cases of the CPU's
// evictor.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "eviction_driver.h"
#include "implementations.h"
#include "kernel_calls.h"
#include "phasekv/eviction/cuda_backend.h"

namespace phasekv::eviction {
namespace {

class CudaEvictor : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    const Implementation& implementation = implementations()[GetParam()];
    if (implementation.kernels == nullptr) GTEST_SKIP() << implementation.how;
    device_ = device_setups()[GetParam()]();
  }

 private:
  std::shared_ptr<void> device_;
};

INSTANTIATE_TEST_SUITE_P(Each, CudaEvictor, testing::Range(size_t{0}, implementations().size()),
                         [](const auto& index) { return implementations()[index.param].name; });

constexpr TensorShape kShapes[] = {
    {.layout = "vec", .dtype = DataType::float32, .query_heads = 4, .kv_heads = 2},
    {.layout = "rows",
     .dtype = DataType::bfloat16,
     .query_heads = 6,
     .kv_heads = 2,
     .head_size = 64,
     .query_order = RowsOrder::padded},
    {.layout = "rows",
     .dtype = DataType::float16,
     .query_heads = 4,
     .kv_heads = 1,
     .head_size = 64,
     .query_order = RowsOrder::head_major},
    {.layout = "vec", .dtype = DataType::bfloat16, .query_heads = 2, .kv_heads = 2},
};

// Two requests at once, in one order of blocks here and in another there.
struct Pair {
  Pair(const Setting& setting, const TensorShape& shape, uint32_t seed)
      : here(setting, seed, 1, shape, cpu_backend(), 2),
        there(setting, seed, 2, shape, make_cuda_backend(0), 2) {}

  void step(const std::vector<int64_t>& counts) {
    const std::vector<EvictionReport> expected = here.step(counts);
    const std::vector<EvictionReport> reports = there.step(counts);
    ASSERT_EQ(reports.size(), expected.size());
    for (size_t i = 0; i < reports.size(); ++i) {
      EXPECT_EQ(reports[i].request, expected[i].request);
      EXPECT_EQ(reports[i].evicted_tokens, expected[i].evicted_tokens);
      EXPECT_EQ(reports[i].failure, "");
    }
    for (const int64_t request : kRequests) {
      ASSERT_EQ(there.held_positions(request), here.held_positions(request))
          << "request " << request << " after " << here.computed(request) << " tokens";
    }
    there.expect_consistent();
  }

  static constexpr int64_t kRequests[] = {EvictionDriver::kRequest, EvictionDriver::kRequest + 1};
  EvictionDriver here;
  EvictionDriver there;
};

TEST_P(CudaEvictor, KeepsWhatTheCpusKeeps) {
  const std::vector<Setting> settings = eviction_settings();
  for (size_t i = 0; i < settings.size(); ++i) {
    SCOPED_TRACE(settings[i].policy);
    Pair pair(settings[i], kShapes[i % std::size(kShapes)], static_cast<uint32_t>(i));
    for (const std::vector<int64_t>& counts :
         {std::vector<int64_t>{70, 30}, {11, 66}, {1, 1}, {16, 1}, {1, 15}, {33, 16}}) {
      pair.step(counts);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaEvictor, SmallRequests) {
  std::vector<Setting> settings = eviction_settings();
  for (size_t i = 0; i < settings.size(); ++i) {
    SCOPED_TRACE(settings[i].policy);
    settings[i].budget = 32;
    Pair pair(settings[i], kShapes[i % std::size(kShapes)], static_cast<uint32_t>(i));
    pair.step({50, 20});
    pair.step({1, 1});
    if (HasFatalFailure()) return;
  }
}

// Sums are added up in another order on the device; everything else is the same bytes.
TEST_P(CudaEvictor, ASessionMovesBetweenTheCpuAndTheDevice) {
  for (const Setting& setting : eviction_settings()) {
    if (setting.policy != "agentkv" && setting.policy != "phase_balanced") continue;
    SCOPED_TRACE(setting.policy);
    Pair pair(setting, kShapes[1], 5);
    pair.step({90, 40});
    pair.step({3, 50});
    for (const int64_t request : Pair::kRequests) {
      const std::vector<uint8_t> here = pair.here.evictor().save(request);
      const std::vector<uint8_t> there = pair.there.evictor().save(request);
      EXPECT_EQ(here.size(), there.size());
      if (pair.here.policy()->needs().sums == 0) {
        EXPECT_EQ(here, there);
      }
      pair.here.add(request);
      pair.here.evictor().restore(request, there);
      pair.there.add(request);
      pair.there.evictor().restore(request, here);
    }
    pair.step({9, 2});
    pair.step({20, 21});
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace phasekv::eviction
