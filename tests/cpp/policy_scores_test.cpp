// Policies that score by no op of their own, against their definitions in double precision, in
// every layout, dtype and instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cached_request.h"
#include "cases.h"
#include "implementations.h"
#include "oracle/rotation.h"
#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {
namespace {

using oracle::Half;
using oracle::Row;

class PolicyScores : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(PolicyScores);

constexpr int64_t kSeen = 700;
constexpr double kScale = 0.125;

double dot(const Row& a, const Row& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

double norm(const Row& row) { return std::sqrt(dot(row, row)); }

// A cached request with queries of its last tokens, and what a policy is shown of it.
class Problem {
 public:
  Problem(CachedRequest request, std::vector<double> frequencies, RopePairing pairing,
          int64_t group, int64_t num_queries, DataType query_dtype)
      : request_(std::move(request)),
        frequencies_(std::move(frequencies)),
        pairing_(pairing),
        group_(group),
        queries_(query_dtype, num_queries, group * request_.key().num_heads,
                 request_.key().head_size, RowsOrder::packed) {
    queries_.fill_random(11);
    std::mt19937 generator(5);
    for (int64_t head = 0; head < request_.key().num_heads; ++head) {
      std::vector<int32_t> row(static_cast<size_t>(request_.tokens()));
      std::iota(row.begin(), row.end(), 0);
      std::shuffle(row.begin(), row.end(), generator);
      positions_.insert(positions_.end(), row.begin(), row.end());
    }
    // The first one is a sink's.
    for (int64_t i = 0; i < num_queries; ++i) query_positions_.push_back(2 + 5 * i);
  }

  std::vector<float> scores(const char* policy, const PolicyOptions& options = {}) const {
    PolicyInput input;
    input.key = request_.key();
    input.value = request_.value();
    input.block_table = request_.block_table();
    input.first_token = request_.first_token();
    input.tokens = request_.tokens();
    input.positions = positions_;
    input.queries = queries_.view();
    input.query_positions = query_positions_;
    input.seen = kSeen;
    input.scale = static_cast<float>(kScale);
    input.rope = {.frequencies = frequencies_.data(),
                  .rotary_dim = 2 * static_cast<int64_t>(frequencies_.size()),
                  .pairing = pairing_};
    std::vector<float> scores(positions_.size(), std::numeric_limits<float>::quiet_NaN());
    make_policy(policy, options)->score(input, scores);
    return scores;
  }

  Row expected_keydiff(size_t head) const {
    const std::vector<Row> keys = request_.rows(Half::key)[head];
    Row mean(keys[0].size(), 0.0);
    for (const Row& key : keys) {
      for (size_t d = 0; d < key.size(); ++d) mean[d] += key[d] / norm(key);
    }
    Row scores;
    for (const Row& key : keys) scores.push_back(-dot(key, mean) / norm(key) / norm(mean));
    return scores;
  }

  Row expected_attention(size_t kv_head, int64_t sinks) const {
    const std::vector<Row> keys = request_.rows(Half::key)[kv_head];
    const std::vector<Row> values = request_.rows(Half::value)[kv_head];
    const std::vector<std::complex<double>> ahead = mean_rotations();
    Row scores(keys.size(), 0.0);
    for (int64_t member = 0; member < group_; ++member) {
      std::vector<Row> rows;
      for (size_t i = 0; i < query_positions_.size(); ++i) {
        if (query_positions_[i] < sinks) continue;
        const Row query =
            queries_.row(static_cast<int64_t>(i), static_cast<int64_t>(kv_head) * group_ + member);
        rows.push_back(
            turned(oracle::rotate(query, frequencies_, pairing_, -query_positions_[i]), ahead));
      }
      Row logits;
      for (const Row& key : keys) logits.push_back(logit(rows, key));
      double sum = 0.0;
      for (size_t j = 0; j < keys.size(); ++j)
        sum += is_sink(kv_head, j, sinks) ? 0.0 : std::exp(logits[j]);
      for (size_t j = 0; j < keys.size(); ++j) {
        if (is_sink(kv_head, j, sinks)) continue;
        scores[j] += std::exp(logits[j]) / sum * norm(values[j]) / static_cast<double>(group_);
      }
    }
    return scores;
  }

  CachedRequest& request() { return request_; }
  const CachedRequest& request() const { return request_; }

 private:
  bool is_sink(size_t head, size_t key, int64_t sinks) const {
    return positions_[head * static_cast<size_t>(request_.tokens()) + key] < sinks;
  }

  // Of each pair, the mean of its rotations at the next positions.
  std::vector<std::complex<double>> mean_rotations() const {
    constexpr int64_t kHorizon = 512;
    std::vector<std::complex<double>> means;
    for (const double frequency : frequencies_) {
      std::complex<double> sum = 0.0;
      for (int64_t ahead = 0; ahead < kHorizon; ++ahead) {
        sum += std::polar(1.0, frequency * static_cast<double>(kSeen + ahead));
      }
      means.push_back(sum / static_cast<double>(kHorizon));
    }
    return means;
  }

  Row turned(Row row, const std::vector<std::complex<double>>& rotations) const {
    for (size_t f = 0; f < rotations.size(); ++f) {
      const bool is_neox = pairing_ == RopePairing::neox;
      double& real = row[is_neox ? f : 2 * f];
      double& imaginary = row[is_neox ? f + rotations.size() : 2 * f + 1];
      const std::complex<double> pair = std::complex<double>(real, imaginary) * rotations[f];
      real = pair.real();
      imaginary = pair.imag();
    }
    return row;
  }

  // Mean of s q.k plus half its variance.
  static double logit(const std::vector<Row>& queries, const Row& key) {
    const auto count = static_cast<double>(queries.size());
    double mean = 0.0;
    for (const Row& query : queries) mean += kScale * dot(query, key) / count;
    double variance = 0.0;
    for (const Row& query : queries) {
      variance += std::pow(kScale * dot(query, key) - mean, 2) / count;
    }
    return mean + variance / 2.0;
  }

  CachedRequest request_;
  std::vector<double> frequencies_;
  RopePairing pairing_;
  int64_t group_;
  RowsBuffer queries_;
  std::vector<int32_t> positions_;  // [kv heads, tokens]
  std::vector<int64_t> query_positions_;
};

void expect_near(const std::vector<float>& actual, size_t head, const Row& expected,
                 double tolerance) {
  for (size_t j = 0; j < expected.size(); ++j) {
    ASSERT_NEAR(actual[head * expected.size() + j], expected[j], tolerance)
        << "head " << head << ", key " << j;
  }
}

TEST_P(PolicyScores, EveryCase) {
  for (const Case& shape : all_cases()) {
    // The oracle takes its time; a third of the cases has every layout and type.
    if (shape.tokens > 70 || shape.tokens == 0 || shape.seed % 3 != 0) continue;
    SCOPED_TRACE(shape);
    const Problem problem(CachedRequest(shape), shape.frequencies(), shape.pairing,
                          1 + shape.seed / 3 % 3, 9, shape.dtype);
    const std::vector<float> keydiff = problem.scores("keydiff");
    const std::vector<float> expected_attention =
        problem.scores("expected_attention", {.sinks = 3});
    for (size_t head = 0; head < static_cast<size_t>(shape.heads); ++head) {
      expect_near(keydiff, head, problem.expected_keydiff(head), 1e-6);
      const Row expected = problem.expected_attention(head, 3);
      expect_near(expected_attention, head, expected,
                  2e-5 * *std::max_element(expected.begin(), expected.end()));
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(PolicyScores, KeysOfZerosHaveNoDirection) {
  Problem problem({"vec", DataType::float32, 40, 1, 32, 16, 3, 1}, {0.5}, RopePairing::neox, 1, 2,
                  DataType::float32);
  problem.request().cache().set_row(Half::key, problem.request().slot(7), 0, Row(32, 0.0));
  const std::vector<float> scores = problem.scores("keydiff");
  EXPECT_EQ(scores[7], 0.0F);
  EXPECT_TRUE(std::all_of(scores.begin(), scores.end(), [](float x) { return std::isfinite(x); }));
}

TEST_P(PolicyScores, WithoutQueriesTheNormOfTheValueDecides) {
  const Problem problem({"vec", DataType::float32, 40, 2, 32, 16, 3, 1}, {0.5, 0.1},
                        RopePairing::neox, 2, 0, DataType::float32);
  const std::vector<float> scores = problem.scores("expected_attention", {.sinks = 0});
  for (size_t j = 0; j < 40; ++j) {
    const double value = norm(problem.request().rows(Half::value)[1][j]);
    EXPECT_NEAR(scores[40 + j], value / 40.0, 1e-6);
  }
}

TEST_P(PolicyScores, NotANumberIsNotHidden) {
  Problem problem({"vec", DataType::float32, 40, 2, 32, 16, 3, 1}, {0.5, 0.1}, RopePairing::neox, 2,
                  4, DataType::float32);
  problem.request().cache().set_row(Half::key, problem.request().slot(20), 1,
                                    Row(32, std::numeric_limits<double>::quiet_NaN()));
  for (const char* policy : {"keydiff", "expected_attention"}) {
    const std::vector<float> scores = problem.scores(policy, {.sinks = 0});
    EXPECT_FALSE(
        std::any_of(scores.begin(), scores.begin() + 40, [](float x) { return std::isnan(x); }));
    EXPECT_TRUE(
        std::all_of(scores.begin() + 40, scores.end(), [](float x) { return std::isnan(x); }));
  }
}

}  // namespace
}  // namespace phasekv::eviction
