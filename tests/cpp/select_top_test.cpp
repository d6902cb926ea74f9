// select_top against sorting everything.
#include "phasekv/ops/select_top.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "oracle/selection.h"
#include "phasekv/error.h"

namespace phasekv {
namespace {

struct Lists {
  std::vector<float> scores;
  std::vector<int64_t> starts = {0};
  std::vector<int64_t> counts;
  std::vector<uint8_t> pinned;

  SelectTopParams params() const {
    return {.scores = scores.data(),
            .segment_starts = starts.data(),
            .num_segments = static_cast<int64_t>(counts.size()),
            .counts = counts.data(),
            .pinned = pinned.empty() ? nullptr : pinned.data()};
  }
};

TEST(SelectTop, RandomSegments) {
  std::mt19937 generator(1);
  for (int round = 0; round < 300; ++round) {
    Lists lists;
    const int segments = static_cast<int>(generator() % 5);
    for (int s = 0; s < segments; ++s) {
      const auto length = static_cast<int64_t>(generator() % 40);
      // Few distinct scores, so that ties are everywhere.
      for (int64_t i = 0; i < length; ++i) {
        lists.scores.push_back(static_cast<float>(generator() % 6) - 2.0F);
        lists.pinned.push_back(generator() % 5 == 0 ? 7 : 0);
      }
      lists.starts.push_back(lists.starts.back() + length);
      lists.counts.push_back(static_cast<int64_t>(generator() % 50));
    }
    if (round % 2 == 0) lists.pinned.clear();
    EXPECT_EQ(select_top(lists.params()),
              oracle::select_top(lists.scores, lists.starts, lists.counts, lists.pinned));
  }
}

TEST(SelectTop, InfinitiesAndZerosAreRanked) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Lists lists{.scores = {-infinity, 0.0F, -0.0F, infinity, infinity},
                    .starts = {0, 5},
                    .counts = {3},
                    .pinned = {}};
  EXPECT_EQ(select_top(lists.params()), (std::vector<int64_t>{1, 3, 4}));
}

TEST(SelectTop, PinnedOnesAreNeverDropped) {
  const Lists lists{
      .scores = {9, 8, 7, 6}, .starts = {0, 4}, .counts = {1}, .pinned = {0, 1, 0, 1}};
  EXPECT_EQ(select_top(lists.params()), (std::vector<int64_t>{1, 3}));
}

TEST(SelectTop, NoSegmentsAndEmptyOnes) {
  EXPECT_TRUE(select_top({}).empty());
  const Lists lists{.scores = {}, .starts = {0, 0, 0}, .counts = {3, 0}, .pinned = {}};
  EXPECT_TRUE(select_top(lists.params()).empty());
}

TEST(SelectTop, RefusesNotANumberAndNegativeCounts) {
  Lists lists{.scores = {1, 2, 3}, .starts = {0, 3}, .counts = {1}, .pinned = {}};
  lists.scores[2] = std::numeric_limits<float>::quiet_NaN();
  try {
    select_top(lists.params());
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "scores[2]");
    EXPECT_EQ(error.value(), "nan");
  }
  lists.scores[2] = 0.0F;
  lists.counts[0] = -1;
  try {
    select_top(lists.params());
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "counts[0]");
    EXPECT_EQ(error.value(), "-1");
  }
}

}  // namespace
}  // namespace phasekv
