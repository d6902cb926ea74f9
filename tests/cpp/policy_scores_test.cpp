// What policies hand to the ops that score for them, against their definitions in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cached_request.h"
#include "oracle/expected_attention.h"
#include "oracle/key_scores.h"
#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {
namespace {

using oracle::Half;
using oracle::Row;

constexpr int64_t kTokens = 50;
constexpr int64_t kHeads = 2;
constexpr int64_t kGroup = 3;
constexpr int64_t kQueries = 9;
constexpr int64_t kHeadSize = 32;

// A cached request with some of its queries, and what a policy is shown of it.
class Problem {
 public:
  Problem() {
    queries_.fill_random(11);
    std::mt19937 generator(5);
    for (int64_t head = 0; head < kHeads; ++head) {
      std::vector<int32_t> row(kTokens);
      std::iota(row.begin(), row.end(), 0);
      std::shuffle(row.begin(), row.end(), generator);
      positions_.insert(positions_.end(), row.begin(), row.end());
    }
    // The first two are sinks'.
    for (int64_t i = 0; i < kQueries; ++i) query_positions_.push_back(2 + i);
  }

  void expect(const char* policy, const PolicyOptions& options,
              const std::vector<Row>& expected) const {
    PolicyInput input;
    input.key = request_.key();
    input.value = request_.value();
    input.block_table = request_.block_table();
    input.first_token = request_.first_token();
    input.tokens = kTokens;
    input.positions = positions_;
    input.queries = queries_.view();
    input.query_positions = query_positions_;
    input.seen = kSeen;
    input.scale = static_cast<float>(kScale);
    input.rope = {.frequencies = frequencies_.data(),
                  .rotary_dim = 2 * static_cast<int64_t>(frequencies_.size()),
                  .pairing = RopePairing::interleaved};
    std::vector<float> scores(positions_.size(), std::numeric_limits<float>::quiet_NaN());
    make_policy(policy, options)->score(input, scores);
    for (size_t head = 0; head < expected.size(); ++head) {
      for (size_t j = 0; j < kTokens; ++j) {
        EXPECT_NEAR(scores[head * kTokens + j], expected[head][j], 1e-5) << head << ", " << j;
      }
    }
  }

  std::vector<Row> keydiff() const {
    std::vector<Row> scores;
    for (const std::vector<Row>& keys : request_.rows(Half::key)) {
      scores.push_back(oracle::keydiff_score(keys));
    }
    return scores;
  }

  std::vector<Row> expected_attention(int64_t sinks) const {
    std::vector<Row> scores;
    for (int64_t head = 0; head < kHeads; ++head) {
      oracle::ExpectedAttention problem;
      problem.keys = request_.rows(Half::key)[static_cast<size_t>(head)];
      problem.values = request_.rows(Half::value)[static_cast<size_t>(head)];
      const auto begin = positions_.begin() + head * kTokens;
      problem.positions.assign(begin, begin + kTokens);
      problem.queries.resize(kGroup);
      for (int64_t member = 0; member < kGroup; ++member) {
        for (int64_t i = 0; i < kQueries; ++i) {
          problem.queries[static_cast<size_t>(member)].push_back(
              queries_.row(i, head * kGroup + member));
        }
      }
      problem.query_positions = query_positions_;
      problem.frequencies = frequencies_;
      problem.pairing = RopePairing::interleaved;
      problem.sinks = sinks;
      problem.next_position = kSeen;
      problem.horizon = 512;
      problem.scale = kScale;
      scores.push_back(oracle::expected_attention_score(problem));
    }
    return scores;
  }

 private:
  static constexpr int64_t kSeen = 300;
  static constexpr double kScale = 0.125;

  CachedRequest request_{"vec", DataType::float32, kTokens, kHeads, kHeadSize, 16, 3, 1};
  std::vector<double> frequencies_ = {0.5, 0.02, 0.001};
  RowsBuffer queries_{DataType::float32, kQueries, kHeads* kGroup, kHeadSize, RowsOrder::packed};
  std::vector<int32_t> positions_;  // [kv heads, tokens]
  std::vector<int64_t> query_positions_;
};

TEST(PolicyScores, KeyDiff) {
  const Problem problem;
  problem.expect("keydiff", {}, problem.keydiff());
}

TEST(PolicyScores, ExpectedAttention) {
  const Problem problem;
  problem.expect("expected_attention", {}, problem.expected_attention(4));
  problem.expect("expected_attention", {.sinks = 7}, problem.expected_attention(7));
}

}  // namespace
}  // namespace phasekv::eviction
