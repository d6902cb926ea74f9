// The CUDA select_top, which writes to lists on the device, against sorting everything.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "implementations.h"
#include "kernel_calls.h"
#include "oracle/selection.h"

namespace phasekv {
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
  std::vector<int64_t> first_nan = {0};
};

class SelectTop : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    const Implementation& implementation = implementations()[GetParam()];
    if (implementation.kernels == nullptr) GTEST_SKIP() << implementation.how;
  }

  static Chosen choose(const Lists& lists);
  static void check(const Lists& lists);
};

INSTANTIATE_TEST_SUITE_P(Each, SelectTop, testing::Range(size_t{0}, implementations().size()),
                         [](const auto& index) { return implementations()[index.param].name; });

Chosen SelectTop::choose(const Lists& lists) {
  const SelectTopParams params = {.scores = lists.scores.data(),
                                  .segment_starts = lists.starts.data(),
                                  .num_segments = static_cast<int64_t>(lists.counts.size()),
                                  .counts = lists.counts.data(),
                                  .pinned = lists.pinned.empty() ? nullptr : lists.pinned.data()};
  Chosen chosen;
  chosen.indices.assign(lists.scores.size(), -7);
  chosen.starts.assign(lists.counts.size() + 1, -7);
  select_top_calls()[GetParam()](params, {.chosen = chosen.indices.data(),
                                          .chosen_starts = chosen.starts.data(),
                                          .first_nan = chosen.first_nan.data()});
  chosen.indices.resize(static_cast<size_t>(chosen.starts.back()));
  return chosen;
}

void SelectTop::check(const Lists& lists) {
  const std::vector<int64_t> expected =
      oracle::select_top(lists.scores, lists.starts, lists.counts, lists.pinned);
  const Chosen chosen = choose(lists);
  EXPECT_EQ(chosen.indices, expected);
  EXPECT_EQ(chosen.first_nan, std::vector<int64_t>{-1});
  for (size_t segment = 0; segment < lists.counts.size(); ++segment) {
    for (int64_t i = chosen.starts[segment]; i < chosen.starts[segment + 1]; ++i) {
      const int64_t index = chosen.indices[static_cast<size_t>(i)];
      EXPECT_TRUE(lists.starts[segment] <= index && index < lists.starts[segment + 1]);
    }
  }
}

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
  EXPECT_EQ(choose(lists).first_nan, std::vector<int64_t>{2});
}

TEST_P(SelectTop, NoSegments) {
  EXPECT_EQ(choose({.scores = {}, .starts = {0}, .counts = {}, .pinned = {}}).starts,
            std::vector<int64_t>{0});
}

}  // namespace
}  // namespace phasekv
