// key_redundancy against the oracle, in every layout, dtype and instruction set.
#include "phasekv/ops/key_redundancy.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cached_request.h"
#include "cases.h"
#include "implementations.h"
#include "oracle/key_scores.h"

namespace phasekv {
namespace {

using oracle::Half;

class KeyRedundancy : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(KeyRedundancy);

// [kv_heads, tokens] positions in an order of their own for each head.
std::vector<int32_t> shuffled_positions(int64_t heads, int64_t tokens, uint32_t seed) {
  std::vector<int32_t> positions;
  std::mt19937 generator(seed);
  for (int64_t head = 0; head < heads; ++head) {
    std::vector<int32_t> row(static_cast<size_t>(tokens));
    for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<int32_t>(3 * i) - 50;
    std::shuffle(row.begin(), row.end(), generator);
    positions.insert(positions.end(), row.begin(), row.end());
  }
  return positions;
}

std::vector<float> redundancy_of(const CachedRequest& request,
                                 const std::vector<int32_t>& positions, double threshold) {
  const PagedView key = request.key();
  std::vector<float> redundancy(static_cast<size_t>(key.num_heads * request.tokens()) + 1,
                                std::numeric_limits<float>::quiet_NaN());
  redundancy.back() = -1.0F;
  key_redundancy({.key = key,
                  .block_table = request.block_table(),
                  .first_token = request.first_token(),
                  .tokens = request.tokens(),
                  .positions = positions.empty() ? nullptr : positions.data(),
                  .threshold = static_cast<float>(threshold),
                  .redundancy = redundancy.data()});
  EXPECT_EQ(redundancy.back(), -1.0F);
  redundancy.pop_back();
  return redundancy;
}

// One head of `actual`, [kv_heads, tokens].
void expect_near(const std::vector<float>& actual, size_t head, const oracle::Row& expected) {
  const size_t tokens = expected.size();
  for (size_t j = 0; j < tokens; ++j) {
    // The mean cosine is a sum of up to unit terms over their number.
    ASSERT_NEAR(actual[head * tokens + j], expected[j], 3e-6 * expected[j])
        << "head " << head << ", key " << j;
  }
}

void check(const CachedRequest& request, const std::vector<int32_t>& positions, double wanted) {
  const auto rows = request.rows(Half::key);
  const auto tokens = static_cast<size_t>(request.tokens());
  const double threshold = oracle::threshold_between_cosines(rows, wanted);
  SCOPED_TRACE(testing::Message() << "threshold " << threshold);
  const std::vector<float> actual = redundancy_of(request, positions, threshold);
  for (size_t head = 0; head < rows.size(); ++head) {
    std::vector<int64_t> order(tokens);
    std::iota(order.begin(), order.end(), 0);
    if (!positions.empty()) {
      std::copy_n(positions.begin() + static_cast<std::ptrdiff_t>(head * tokens), tokens,
                  order.begin());
    }
    expect_near(actual, head, oracle::key_redundancy(rows[head], order, threshold));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(KeyRedundancy, EveryCase) {
  for (const Case& shape : all_cases()) {
    if (shape.tokens > 150) continue;  // the oracle compares all pairs; see ManyKeys
    SCOPED_TRACE(shape);
    const std::vector<int32_t> positions =
        shape.seed % 2 == 0 ? std::vector<int32_t>()
                            : shuffled_positions(shape.heads, shape.tokens, shape.seed);
    constexpr double kThresholds[] = {0.5, 0.1, 0.0, 0.3};
    check(CachedRequest(shape), positions, kThresholds[shape.seed / 10 % 4]);
    if (HasFatalFailure()) return;
  }
}

// Chunks of all kinds, and searches that go through many of them.
TEST_P(KeyRedundancy, ManyKeys) {
  for (const int64_t block_size : {32, 96, 13}) {
    const CachedRequest request("vec", DataType::float32, 700, 1, 24, block_size, 45, 3);
    for (const double threshold : {0.45, 0.7}) {
      SCOPED_TRACE(testing::Message() << "block size " << block_size << ", " << threshold);
      check(request, {}, threshold);
      check(request, shuffled_positions(1, 700, 2), threshold);
    }
  }
}

// Keys of two directions, the one of `lone` and that of all others, which have `cosine` with it and
// are alike to each other only.
oracle::Row redundancy_of_two_directions(const std::vector<int32_t>& positions, size_t lone,
                                         double cosine) {
  const size_t tokens = positions.size();
  const auto count = static_cast<double>(tokens);
  std::vector<size_t> others(tokens);
  std::iota(others.begin(), others.end(), 0);
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(lone));
  std::partial_sort(others.begin(), others.begin() + 2, others.end(),
                    [&](size_t a, size_t b) { return positions[a] > positions[b]; });
  const auto first =
      static_cast<size_t>(std::min_element(positions.begin(), positions.end()) - positions.begin());
  oracle::Row cosines(tokens, count - 2 + cosine);  // with all other keys
  cosines[lone] = (count - 1) * cosine;
  cosines[others[0]] -= count - 2;  // what the others leave out
  cosines[others[1]] -= 1;          // what the one of the largest position leaves out
  cosines[first] -= cosine;         // what the lone one does
  double sum = 0.0;
  for (double& x : cosines) sum += x = std::exp(x / count);
  for (double& x : cosines) x /= sum;
  return cosines;
}

// More keys than are merged at a time: the least and the largest position among those of the first
// time and of the last.
TEST_P(KeyRedundancy, ThousandsOfKeys) {
  constexpr int64_t kTokens = 8192 + 300;
  constexpr size_t kLone = 300;
  constexpr double kCosine = 0.3;
  constexpr size_t kLeast[] = {10, 8210};
  constexpr size_t kLargest[] = {8180, 8220};
  CachedRequest request("rows", DataType::float32, kTokens, 2, 32, 64, 5, 3);
  oracle::Row common(32, 0.0);
  common[3] = 2.0;
  oracle::Row lone(32, 0.0);
  lone[3] = 5.0 * kCosine;
  lone[7] = 5.0 * std::sqrt(1.0 - kCosine * kCosine);
  std::vector<int32_t> positions;
  for (size_t head = 0; head < 2; ++head) {
    for (int64_t i = 0; i < kTokens; ++i) {
      const bool is_lone = i == static_cast<int64_t>(kLone);
      request.cache().set_row(Half::key, request.slot(i), static_cast<int64_t>(head),
                              is_lone ? lone : common);
      positions.push_back(static_cast<int32_t>(i));
    }
    positions[head * kTokens + kLeast[head]] = -1;
    positions[head * kTokens + kLargest[head]] = 2 * kTokens;
  }
  const std::vector<float> actual = redundancy_of(request, positions, 0.5);
  for (size_t head = 0; head < 2; ++head) {
    const auto begin = positions.begin() + static_cast<std::ptrdiff_t>(head * kTokens);
    expect_near(actual, head,
                redundancy_of_two_directions({begin, begin + kTokens}, kLone, kCosine));
  }
}

// Keys that repeat in every way: all alike, opposite, zero.
TEST_P(KeyRedundancy, EqualKeys) {
  CachedRequest request("vec", DataType::float32, 90, 1, 32, 32, 5, 3);
  const oracle::Row row = request.cache().row(Half::key, request.slot(0), 0);
  oracle::Row opposite = row;
  for (double& x : opposite) x = -x;
  for (int64_t i = 0; i < 90; ++i) {
    request.cache().set_row(Half::key, request.slot(i), 0, i % 5 == 3 ? opposite : row);
  }
  check(request, {}, 0.5);
  for (int64_t i = 40; i < 60; ++i) {
    request.cache().set_row(Half::key, request.slot(i), 0, oracle::Row(32, 0.0));
  }
  check(request, {}, 0.5);
  check(request, shuffled_positions(1, 90, 2), 0.5);
}

TEST_P(KeyRedundancy, OneKey) {
  const CachedRequest request("vec", DataType::float32, 1, 2, 32, 32, 5, 3);
  EXPECT_EQ(redundancy_of(request, {}, 0.5), (std::vector<float>{1.0F, 1.0F}));
}

TEST_P(KeyRedundancy, ThreadsDoNotMatter) {
  const CachedRequest request("vec", DataType::bfloat16, 500, 2, 64, 32, 7, 3);
  omp_set_num_threads(1);
  const std::vector<float> alone = redundancy_of(request, {}, 0.2);
  for (const int threads : {2, 3, 7}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(redundancy_of(request, {}, 0.2), alone) << threads << " threads";
  }
}

TEST_P(KeyRedundancy, BlockIdsDoNotMatter) {
  const CachedRequest request("vec", DataType::float32, 300, 2, 64, 32, 7, 3);
  EXPECT_EQ(redundancy_of(request, {}, 0.2), redundancy_of(request.in_other_blocks(9), {}, 0.2));
}

TEST_P(KeyRedundancy, NotANumberIsNotHidden) {
  CachedRequest request("vec", DataType::float32, 50, 2, 32, 32, 7, 3);
  request.cache().set_row(Half::key, request.slot(20), 1,
                          oracle::Row(32, std::numeric_limits<double>::quiet_NaN()));
  const std::vector<float> redundancy = redundancy_of(request, {}, 0.5);
  for (size_t j = 0; j < 50; ++j) {
    ASSERT_FALSE(std::isnan(redundancy[j]));
    ASSERT_TRUE(std::isnan(redundancy[50 + j]));
  }
}

}  // namespace
}  // namespace phasekv
