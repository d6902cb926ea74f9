// The CUDA select_top, which writes to lists on the device, against sorting everything.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "oracle/selection.h"
#include "phasekv/cuda.h"
#include "thread_orders.h"

namespace phasekv::cuda {
namespace {

struct Lists {
  std::vector<float> scores;
  std::vector<int64_t> starts = {0};
  std::vector<int64_t> counts;
  std::vector<uint8_t> pinned;
};

struct Chosen {
  std::vector<int64_t> indices;
  std::vector<int64_t> starts;
  int64_t first_nan = 0;
};

Chosen choose(const Lists& lists) {
  const SelectTopParams params = {.scores = lists.scores.data(),
                                  .segment_starts = lists.starts.data(),
                                  .num_segments = static_cast<int64_t>(lists.counts.size()),
                                  .counts = lists.counts.data(),
                                  .pinned = lists.pinned.empty() ? nullptr : lists.pinned.data()};
  Chosen chosen;
  chosen.indices.assign(lists.scores.size(), -7);
  chosen.starts.assign(lists.counts.size() + 1, -7);
  std::vector<unsigned char> memory(static_cast<size_t>(select_top_workspace_bytes(params)), 0xFF);
  select_top(params,
             {.chosen = chosen.indices.data(),
              .chosen_starts = chosen.starts.data(),
              .first_nan = &chosen.first_nan},
             {.data = memory.data(), .bytes = static_cast<int64_t>(memory.size())}, nullptr);
  chosen.indices.resize(static_cast<size_t>(chosen.starts.back()));
  return chosen;
}

void check(const Lists& lists) {
  const std::vector<int64_t> expected =
      oracle::select_top(lists.scores, lists.starts, lists.counts, lists.pinned);
  const Chosen chosen = choose(lists);
  EXPECT_EQ(chosen.indices, expected);
  EXPECT_EQ(chosen.first_nan, -1);
  for (size_t segment = 0; segment < lists.counts.size(); ++segment) {
    for (int64_t i = chosen.starts[segment]; i < chosen.starts[segment + 1]; ++i) {
      const int64_t index = chosen.indices[static_cast<size_t>(i)];
      EXPECT_TRUE(lists.starts[segment] <= index && index < lists.starts[segment + 1]);
    }
  }
}

class SelectTop : public testing::TestWithParam<emulation::NamedOrder> {
 protected:
  void SetUp() override { emulation::set_thread_order(GetParam().order); }
};

INSTANTIATE_TEST_SUITE_P(Each, SelectTop, testing::ValuesIn(emulation::kThreadOrders),
                         [](const auto& order) { return std::string(order.param.name); });

TEST_P(SelectTop, RandomSegments) {
  std::mt19937 generator(1);
  for (int round = 0; round < 40; ++round) {
    Lists lists;
    const int segments = static_cast<int>(generator() % 5);
    for (int s = 0; s < segments; ++s) {
      const auto length = static_cast<int64_t>(generator() % 600);
      // Few distinct scores in half of the rounds, so that ties are everywhere.
      for (int64_t i = 0; i < length; ++i) {
        const auto score = static_cast<float>(generator() % (round % 4 < 2 ? 6 : 1000003));
        lists.scores.push_back((score - 2.0F) * 0.37F);
        lists.pinned.push_back(generator() % 9 == 0 ? 7 : 0);
      }
      lists.starts.push_back(lists.starts.back() + length);
      lists.counts.push_back(static_cast<int64_t>(generator() % 700));
    }
    if (round % 2 == 0) lists.pinned.clear();
    check(lists);
  }
}

TEST_P(SelectTop, InfinitiesAndZerosAreRanked) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (int64_t count = 0; count <= 7; ++count) {
    check({.scores = {-infinity, 0.0F, -0.0F, infinity, infinity, -1e-40F},
           .starts = {0, 6},
           .counts = {count},
           .pinned = {}});
  }
}

TEST_P(SelectTop, NotANumberIsReported) {
  Lists lists{.scores = {1, 2, 3, 4}, .starts = {0, 1, 4}, .counts = {1, 1}, .pinned = {}};
  lists.scores[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(choose(lists).first_nan, 2);
}

TEST_P(SelectTop, NoSegments) {
  EXPECT_EQ(choose({.scores = {}, .starts = {0}, .counts = {}, .pinned = {}}).starts,
            std::vector<int64_t>{0});
}

}  // namespace
}  // namespace phasekv::cuda
