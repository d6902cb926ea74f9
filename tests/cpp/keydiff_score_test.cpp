// keydiff_score against the oracle, in every layout, dtype and instruction set.
#include "phasekv/ops/keydiff_score.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cached_request.h"
#include "cases.h"
#include "implementations.h"
#include "oracle/key_scores.h"

namespace phasekv {
namespace {

using oracle::Half;

class KeydiffScore : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(KeydiffScore);

std::vector<float> scores_of(const CachedRequest& request) {
  const PagedView key = request.key();
  std::vector<float> scores(static_cast<size_t>(key.num_heads * request.tokens()) + 1,
                            std::numeric_limits<float>::quiet_NaN());
  scores.back() = -2.0F;
  keydiff_score({.key = key,
                 .block_table = request.block_table(),
                 .first_token = request.first_token(),
                 .tokens = request.tokens(),
                 .scores = scores.data()});
  EXPECT_EQ(scores.back(), -2.0F);
  scores.pop_back();
  return scores;
}

void check(const CachedRequest& request) {
  const auto rows = request.rows(Half::key);
  const std::vector<float> actual = scores_of(request);
  const auto tokens = static_cast<size_t>(request.tokens());
  for (size_t head = 0; head < rows.size(); ++head) {
    const oracle::Row expected = oracle::keydiff_score(rows[head]);
    for (size_t j = 0; j < tokens; ++j) {
      ASSERT_NEAR(actual[head * tokens + j], expected[j], 2e-6) << "head " << head << ", key " << j;
    }
  }
}

TEST_P(KeydiffScore, EveryCase) {
  for (const Case& shape : all_cases()) {
    if (shape.tokens > 150) continue;  // see ManyKeys
    SCOPED_TRACE(shape);
    check(CachedRequest(shape));
    if (HasFatalFailure()) return;
  }
}

// Chunks and parts of all kinds, and requests that begin anywhere in a block.
TEST_P(KeydiffScore, ManyKeys) {
  for (const int64_t block_size : {32, 96, 13}) {
    for (const char* layout : {"vec", "vec16"}) {
      SCOPED_TRACE(testing::Message() << layout << ", block size " << block_size);
      check(CachedRequest(layout, DataType::float32, 1100, 2, 24, block_size, 45, 3));
    }
  }
}

TEST_P(KeydiffScore, KeysOfZerosAreAtRightAnglesToAll) {
  CachedRequest request("vec", DataType::float32, 90, 1, 32, 32, 5, 3);
  for (int64_t i = 40; i < 60; ++i) {
    request.cache().set_row(Half::key, request.slot(i), 0, oracle::Row(32, 0.0));
  }
  check(request);
  const std::vector<float> scores = scores_of(request);
  for (size_t i = 40; i < 60; ++i) EXPECT_EQ(std::abs(scores[i]), 0.0F);
  for (int64_t i = 0; i < 90; ++i) {
    request.cache().set_row(Half::key, request.slot(i), 0, oracle::Row(32, 0.0));
  }
  check(request);
}

TEST_P(KeydiffScore, ThreadsDoNotMatter) {
  const CachedRequest request("vec", DataType::bfloat16, 1500, 2, 64, 32, 7, 3);
  omp_set_num_threads(1);
  const std::vector<float> alone = scores_of(request);
  for (const int threads : {2, 3, 7}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(scores_of(request), alone) << threads << " threads";
  }
}

TEST_P(KeydiffScore, BlockIdsDoNotMatter) {
  const CachedRequest request("vec", DataType::float32, 300, 2, 64, 32, 7, 3);
  EXPECT_EQ(scores_of(request), scores_of(request.in_other_blocks(9)));
}

TEST_P(KeydiffScore, NotANumberIsNotHidden) {
  CachedRequest request("vec", DataType::float32, 50, 2, 32, 32, 7, 3);
  request.cache().set_row(Half::key, request.slot(20), 1,
                          oracle::Row(32, std::numeric_limits<double>::quiet_NaN()));
  const std::vector<float> scores = scores_of(request);
  for (size_t j = 0; j < 50; ++j) {
    ASSERT_FALSE(std::isnan(scores[j]));
    ASSERT_TRUE(std::isnan(scores[50 + j]));
  }
}

}  // namespace
}  // namespace phasekv
