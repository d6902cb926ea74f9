// expected_attention_score against the oracle, in every layout, dtype and instruction set.
#include "phasekv/ops/expected_attention_score.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cached_request.h"
#include "cases.h"
#include "implementations.h"
#include "oracle/expected_attention.h"

namespace phasekv {
namespace {

using oracle::Half;
using oracle::Row;

class ExpectedAttentionScore : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(ExpectedAttentionScore);

struct Options {
  int64_t group = 2;
  int64_t queries = 9;
  DataType query_dtype = DataType::float32;
  RowsOrder query_order = RowsOrder::packed;
  RopePairing pairing = RopePairing::neox;
  std::vector<double> frequencies = {1.0, 0.1};
  int64_t sinks = 3;
  int64_t next_position = 700;
  int64_t horizon = 5;
  float scale = 0.125F;
};

class Problem {
 public:
  Problem(CachedRequest request, Options options)
      : request_(std::move(request)),
        options_(std::move(options)),
        queries_(options_.query_dtype, options_.queries, options_.group * request_.key().num_heads,
                 request_.key().head_size, options_.query_order) {
    queries_.fill_random(11);
    std::mt19937 generator(5);
    for (int64_t head = 0; head < request_.key().num_heads; ++head) {
      std::vector<int32_t> row(static_cast<size_t>(request_.tokens()));
      std::iota(row.begin(), row.end(), 0);
      std::shuffle(row.begin(), row.end(), generator);
      positions_.insert(positions_.end(), row.begin(), row.end());
    }
    // The first one is a sink's.
    for (int64_t i = 0; i < options_.queries; ++i) query_positions_.push_back(2 + 5 * i);
  }

  std::vector<float> scores() const {
    std::vector<float> scores(positions_.size() + 1, std::numeric_limits<float>::quiet_NaN());
    scores.back() = -1.0F;
    expected_attention_score(
        {.key = request_.key(),
         .value = request_.value(),
         .block_table = request_.block_table(),
         .first_token = request_.first_token(),
         .tokens = request_.tokens(),
         .positions = has_positions_ ? positions_.data() : nullptr,
         .query = queries_.view(),
         .query_positions = query_positions_.data(),
         .sinks = options_.sinks,
         .rope = {.frequencies = options_.frequencies.data(),
                  .rotary_dim = 2 * static_cast<int64_t>(options_.frequencies.size()),
                  .pairing = options_.pairing},
         .next_position = options_.next_position,
         .horizon = options_.horizon,
         .scale = options_.scale,
         .scores = scores.data()});
    EXPECT_EQ(scores.back(), -1.0F);
    scores.pop_back();
    return scores;
  }

  void check() const {
    const std::vector<float> actual = scores();
    for (int64_t head = 0; head < request_.key().num_heads; ++head) {
      const Row expected = oracle::expected_attention_score(head_of(head));
      const double largest =
          expected.empty() ? 0.0 : *std::max_element(expected.begin(), expected.end());
      for (size_t j = 0; j < expected.size(); ++j) {
        ASSERT_NEAR(actual[index(head, j)], expected[j], 2e-5 * largest)
            << "head " << head << ", key " << j;
      }
    }
  }

  size_t index(int64_t head, size_t key) const {
    return static_cast<size_t>(head * request_.tokens()) + key;
  }
  bool is_sink(int64_t head, size_t key) const {
    return positions_[index(head, key)] < options_.sinks;
  }

  CachedRequest& request() { return request_; }
  RowsBuffer& queries() { return queries_; }
  void move_to_other_blocks(uint32_t seed) { request_ = request_.in_other_blocks(seed); }
  // Keys in their order, given without positions.
  void leave_out_positions() {
    has_positions_ = false;
    for (size_t i = 0; i < positions_.size(); ++i) {
      positions_[i] = static_cast<int32_t>(static_cast<int64_t>(i) % request_.tokens());
    }
  }

 private:
  oracle::ExpectedAttention head_of(int64_t kv_head) const {
    oracle::ExpectedAttention head;
    head.keys = request_.rows(Half::key)[static_cast<size_t>(kv_head)];
    head.values = request_.rows(Half::value)[static_cast<size_t>(kv_head)];
    const auto begin = positions_.begin() + kv_head * request_.tokens();
    head.positions.assign(begin, begin + request_.tokens());
    for (int64_t member = 0; member < options_.group; ++member) {
      head.queries.emplace_back();
      for (int64_t i = 0; i < options_.queries; ++i) {
        head.queries.back().push_back(queries_.row(i, kv_head * options_.group + member));
      }
    }
    head.query_positions = query_positions_;
    head.frequencies = options_.frequencies;
    head.pairing = options_.pairing;
    head.sinks = options_.sinks;
    head.next_position = options_.next_position;
    head.horizon = options_.horizon;
    head.scale = options_.scale;
    return head;
  }

  CachedRequest request_;
  Options options_;
  RowsBuffer queries_;
  bool has_positions_ = true;
  std::vector<int32_t> positions_;  // [kv heads, tokens]
  std::vector<int64_t> query_positions_;
};

TEST_P(ExpectedAttentionScore, EveryCase) {
  for (const Case& shape : all_cases()) {
    // The oracle takes its time; a third of the cases has every layout and type.
    if (shape.tokens > 70 || shape.seed % 3 != 0) continue;
    SCOPED_TRACE(shape);
    constexpr int64_t kQueries[] = {9, 16, 1, 15};
    const Options options = {.group = 1 + shape.seed / 3 % 3,
                             .queries = kQueries[shape.seed / 10 % 4],
                             .query_dtype = shape.seed % 2 == 0 ? shape.dtype : shape.other_dtype,
                             .query_order = shape.rows_order,
                             .pairing = shape.pairing,
                             .frequencies = shape.frequencies(),
                             .horizon = 1 + shape.seed / 10 % 9};
    Problem(CachedRequest(shape), options).check();
    if (HasFatalFailure()) return;
  }
}

// Tiles and parts of all kinds, requests that begin anywhere in a block, and the horizon that the
// policy has.
TEST_P(ExpectedAttentionScore, ManyKeys) {
  for (const int64_t block_size : {32, 96, 13}) {
    for (const char* layout : {"vec", "rows"}) {
      SCOPED_TRACE(testing::Message() << layout << ", block size " << block_size);
      Problem({layout, DataType::float32, 1100, 1, 24, block_size, 45, 3},
              {.group = 1, .queries = 5, .horizon = 512})
          .check();
    }
  }
}

// Of 16-bit keys, whose queries go to the tensor cores of a device, in tiles that end anywhere.
TEST_P(ExpectedAttentionScore, EveryGroupAndNumberOfQueries) {
  for (const DataType dtype : {DataType::bfloat16, DataType::float16}) {
    for (const int64_t group : {1, 4, 5, 8, 9}) {
      for (const int64_t queries : {0, 1, 31, 32, 33}) {
        SCOPED_TRACE(testing::Message() << "group " << group << ", queries " << queries);
        Problem({"rows", dtype, 20, 1, 40, 16, 3, 1},
                {.group = group, .queries = queries, .query_dtype = dtype})
            .check();
        if (HasFatalFailure()) return;
      }
    }
  }
}

// So many KV heads that a block of a device takes two query heads, then three.
TEST_P(ExpectedAttentionScore, ManyHeads) {
  for (const int64_t heads : {66, 67}) {
    SCOPED_TRACE(testing::Message() << heads << " heads");
    Problem({"rows", DataType::bfloat16, 130, heads, 8, 16, 0, 1},
            {.group = 3, .queries = 2, .query_dtype = DataType::bfloat16})
        .check();
  }
}

TEST_P(ExpectedAttentionScore, WithoutPositionsKeysAreInOrder) {
  Problem problem({"vec", DataType::float32, 50, 2, 32, 16, 3, 1}, {});
  problem.leave_out_positions();
  problem.check();
}

// As large as there are, and turned by less than a half turn in all.
TEST_P(ExpectedAttentionScore, QueriesOfFloat16AreAsLargeAsTheyMay) {
  Problem problem({"rows", DataType::float16, 20, 1, 32, 16, 3, 1},
                  {.group = 1,
                   .queries = 4,
                   .query_dtype = DataType::float16,
                   .frequencies = std::vector<double>(16, 1e-4),
                   .scale = 2e-6F});
  for (int64_t i = 0; i < 4; ++i) {
    Row row = problem.queries().row(i, 0);
    for (double& x : row) x = x < 0.0 ? -65504.0 : 65504.0;
    problem.queries().set_row(i, 0, row);
  }
  problem.check();
}

TEST_P(ExpectedAttentionScore, WithoutQueriesTheNormOfTheValueDecides) {
  Problem problem({"vec", DataType::float32, 40, 2, 32, 16, 3, 1}, {.queries = 0, .sinks = 0});
  const std::vector<float> scores = problem.scores();
  for (size_t j = 0; j < 40; ++j) {
    const Row value = problem.request().rows(Half::value)[1][j];
    const double squares = std::inner_product(value.begin(), value.end(), value.begin(), 0.0);
    EXPECT_NEAR(scores[40 + j], std::sqrt(squares) / 40.0, 1e-6);
  }
}

TEST_P(ExpectedAttentionScore, SinksDoNotCount) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    Problem problem({"rows", dtype, 40, 2, 32, 16, 3, 1}, {.query_dtype = dtype});
    const std::vector<float> before = problem.scores();
    const Row not_a_number(32, std::numeric_limits<double>::quiet_NaN());
    for (int64_t head = 0; head < 4; ++head) problem.queries().set_row(0, head, not_a_number);
    for (int64_t head = 0; head < 2; ++head) {
      for (size_t j = 0; j < 40; ++j) {
        if (!problem.is_sink(head, j)) continue;
        EXPECT_EQ(before[problem.index(head, j)], 0.0F);
        problem.request().cache().set_row(
            Half::key, problem.request().slot(static_cast<int64_t>(j)), head, not_a_number);
      }
    }
    EXPECT_EQ(problem.scores(), before);
  }
}

TEST_P(ExpectedAttentionScore, WithSinksOnlyAllScoresAreZero) {
  const Problem problem({"vec", DataType::float32, 40, 2, 32, 16, 3, 1}, {.sinks = 40});
  EXPECT_EQ(problem.scores(), std::vector<float>(80, 0.0F));
}

TEST_P(ExpectedAttentionScore, ThreadsDoNotMatter) {
  const Problem problem({"vec", DataType::bfloat16, 1500, 2, 64, 32, 7, 3}, {.queries = 20});
  omp_set_num_threads(1);
  const std::vector<float> alone = problem.scores();
  for (const int threads : {2, 3, 7}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(problem.scores(), alone) << threads << " threads";
  }
}

TEST_P(ExpectedAttentionScore, BlockIdsDoNotMatter) {
  Problem problem({"vec", DataType::float32, 300, 2, 64, 32, 7, 3}, {});
  const std::vector<float> before = problem.scores();
  problem.move_to_other_blocks(9);
  EXPECT_EQ(problem.scores(), before);
}

TEST_P(ExpectedAttentionScore, NotANumberIsNotHidden) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    const auto expect_spoilt = [](const Problem& problem) {
      const std::vector<float> scores = problem.scores();
      for (size_t j = 0; j < 40; ++j) {
        ASSERT_FALSE(std::isnan(scores[j])) << j;
        ASSERT_TRUE(std::isnan(scores[40 + j])) << j;
      }
    };
    const Row not_a_number(32, std::numeric_limits<double>::quiet_NaN());
    const CachedRequest request("rows", dtype, 40, 2, 32, 16, 3, 1);
    Problem of_key(request, {.query_dtype = dtype});
    size_t key = 20;
    while (of_key.is_sink(1, key)) ++key;
    of_key.request().cache().set_row(Half::key, of_key.request().slot(static_cast<int64_t>(key)), 1,
                                     not_a_number);
    expect_spoilt(of_key);
    Problem of_query(request, {.query_dtype = dtype});
    of_query.queries().set_row(5, 3, not_a_number);
    expect_spoilt(of_query);
    Problem of_value(request, {.query_dtype = dtype});
    of_value.request().cache().set_row(Half::value, of_value.request().slot(7), 1, not_a_number);
    const std::vector<float> scores = of_value.scores();
    for (size_t i = 0; i < 80; ++i) EXPECT_EQ(std::isnan(scores[i]), i == 47) << i;
  }
}

}  // namespace
}  // namespace phasekv
