// score_keys against the oracle, in every layout, dtype and instruction set.
#include "phasekv/ops/score_keys.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "buffers.h"
#include "cached_request.h"
#include "cases.h"
#include "implementations.h"
#include "oracle/attention_mass.h"

namespace phasekv {
namespace {

using oracle::Half;

class ScoreKeys : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(ScoreKeys);

struct Options {
  int64_t queries = 8;
  int64_t group = 3;
  GroupReduction reduction = GroupReduction::max_logit;
  Pooling pooling = Pooling::none;
  int64_t pooling_kernel = 1;
  int64_t excluded_recent = 0;
  bool has_limits = false;
  double scale_factor = 1.0;  // on 1 / sqrt(head size)
  DataType query_dtype = DataType::float32;
  RowsOrder rows_order = RowsOrder::packed;
  uint32_t seed = 1;
};

class Problem {
 public:
  Problem(CachedRequest request, const Options& options)
      : request_(std::move(request)),
        options_(options),
        query_(options.query_dtype, options.queries, request_.key().num_heads * options.group,
               request_.key().head_size, options.rows_order),
        scale_(static_cast<float>(options.scale_factor /
                                  std::sqrt(static_cast<double>(request_.key().head_size)))) {
    query_.fill_random(options.seed + 17);
    std::mt19937 generator(options.seed);
    for (int64_t i = 0; i < options.queries; ++i) {
      const auto limit = static_cast<int64_t>(generator() % (request_.tokens() + 1));
      limits_.push_back(i % 4 == 3 ? 0 : limit);
    }
  }

  std::vector<float> scores() const {
    const int64_t count = request_.key().num_heads * request_.tokens();
    // NaN, so that a score left out is found, and one more, which must stay.
    std::vector<float> scores(static_cast<size_t>(count) + 1,
                              std::numeric_limits<float>::quiet_NaN());
    scores.back() = -1.0F;
    ScoreKeysParams params;
    params.query = query_.view();
    params.key = request_.key();
    params.block_table = request_.block_table();
    params.first_token = request_.first_token();
    params.tokens = request_.tokens();
    params.query_limits = options_.has_limits ? limits_.data() : nullptr;
    params.excluded_recent = options_.excluded_recent;
    params.group = options_.reduction;
    params.pooling = options_.pooling;
    params.pooling_kernel = options_.pooling_kernel;
    params.scale = scale_;
    params.scores = scores.data();
    score_keys(params);
    EXPECT_EQ(scores.back(), -1.0F);
    scores.pop_back();
    return scores;
  }

  void check() const {
    oracle::Attention attention;
    attention.keys = request_.rows(Half::key);
    attention.scale = scale_;
    for (int64_t i = 0; i < options_.queries; ++i) {
      attention.limits.push_back(options_.has_limits ? limits_[static_cast<size_t>(i)]
                                                     : request_.tokens());
      attention.queries.emplace_back();
      for (int64_t head = 0; head < query_.view().heads; ++head) {
        attention.queries.back().push_back(query_.row(i, head));
      }
    }
    const std::vector<oracle::Row> expected =
        oracle::score_keys(attention, options_.reduction, options_.pooling, options_.pooling_kernel,
                           options_.excluded_recent);
    // A score of a key has a relative error of some float32 roundings, which the exponential turns
    // into a relative one of the probability.
    const double tolerance = 1e-6 * (4.0 + attention.largest_score());
    const std::vector<float> actual = scores();
    for (size_t head = 0; head < expected.size(); ++head) {
      for (size_t j = 0; j < expected[head].size(); ++j) {
        const double score = actual[head * expected[head].size() + j];
        ASSERT_NEAR(score, expected[head][j], tolerance * expected[head][j] + 1e-30)
            << "head " << head << ", key " << j;
      }
    }
  }

  CachedRequest& request() { return request_; }
  RowsBuffer& query() { return query_; }
  std::vector<int64_t>& limits() { return limits_; }

 private:
  CachedRequest request_;
  Options options_;
  RowsBuffer query_;
  float scale_;
  std::vector<int64_t> limits_;
};

constexpr GroupReduction kReductions[] = {GroupReduction::max_logit, GroupReduction::max,
                                          GroupReduction::mean};

TEST_P(ScoreKeys, EveryCase) {
  for (const Case& shape : all_cases()) {
    SCOPED_TRACE(shape);
    std::mt19937 generator(shape.seed);
    const auto one_of = [&](std::vector<int64_t> list) { return list[generator() % list.size()]; };
    Options options;
    options.queries = one_of({1, 2, 5, 9});
    options.group = one_of({1, 2, 3, 7});
    options.reduction = kReductions[generator() % 3];
    options.pooling = static_cast<Pooling>(generator() % 3);
    options.pooling_kernel = one_of({1, 3, 7, 31});
    options.excluded_recent = one_of({0, 0, 1, 8, 40});
    options.has_limits = generator() % 2 == 0;
    options.query_dtype = shape.other_dtype;
    options.rows_order = shape.rows_order;
    options.seed = shape.seed;
    Problem(CachedRequest(shape), options).check();
    if (HasFatalFailure()) return;
  }
}

// Queries that fill one tile, end in it, and need several.
TEST_P(ScoreKeys, EveryNumberOfQueriesAndGroup) {
  for (const GroupReduction reduction : kReductions) {
    for (const int64_t group : {1, 2, 3, 5, 8, 60}) {
      for (const int64_t queries : {1, 4, 15, 16, 17, 50}) {
        SCOPED_TRACE(testing::Message() << queries << " queries, group " << group << ", reduction "
                                        << static_cast<int>(reduction));
        Options options;
        options.queries = queries;
        options.group = group;
        options.reduction = reduction;
        options.has_limits = queries % 2 == 0;
        Problem(CachedRequest("vec", DataType::float32, 90, 2, 32, 32, 13, 1), options).check();
      }
    }
  }
}

// Where the first key lies in its block and in a vector, and where the last.
TEST_P(ScoreKeys, EveryFirstToken) {
  for (const int64_t block_size : {32, 48, 96, 13}) {
    for (int64_t first_token = 0; first_token < 40; first_token += first_token % 3 + 1) {
      SCOPED_TRACE(testing::Message() << "block size " << block_size << ", from " << first_token);
      Options options;
      options.has_limits = first_token % 2 == 0;
      options.reduction = kReductions[first_token % 3];
      options.seed = static_cast<uint32_t>(first_token);
      const int64_t tokens = 70 + 3 * first_token;
      Problem(CachedRequest("vec", DataType::float32, tokens, 1, 24, block_size, first_token, 2),
              options)
          .check();
    }
  }
}

// Scores of hundreds, whose softmax without its maximum would be infinite.
TEST_P(ScoreKeys, SpreadScores) {
  for (const GroupReduction reduction : kReductions) {
    for (const double scale_factor : {0.01, 30.0, 100.0}) {
      Options options;
      options.reduction = reduction;
      options.scale_factor = scale_factor;
      Problem(CachedRequest("vec", DataType::float32, 500, 2, 64, 32, 7, 3), options).check();
    }
  }
}

TEST_P(ScoreKeys, ThreadsDoNotMatter) {
  for (const GroupReduction reduction : kReductions) {
    Options options;
    options.queries = 120;
    options.reduction = reduction;
    options.has_limits = true;
    const Problem problem(CachedRequest("vec", DataType::bfloat16, 700, 2, 64, 32, 7, 3), options);
    omp_set_num_threads(1);
    const std::vector<float> alone = problem.scores();
    for (const int threads : {2, 3, 7}) {
      omp_set_num_threads(threads);
      EXPECT_EQ(problem.scores(), alone) << threads << " threads";
    }
  }
}

TEST_P(ScoreKeys, BlockIdsDoNotMatter) {
  for (const char* layout : {"vec", "rows"}) {
    const CachedRequest request(layout, DataType::float32, 700, 2, 64, 32, 7, 3);
    const Options options;
    EXPECT_EQ(Problem(request, options).scores(),
              Problem(request.in_other_blocks(99), options).scores());
  }
}

TEST_P(ScoreKeys, NoQueryThatSeesAKeyGivesZeros) {
  Options options;
  options.has_limits = true;
  options.pooling = Pooling::max;
  options.pooling_kernel = 3;
  const CachedRequest request("vec", DataType::float32, 40, 2, 32, 16, 0, 3);
  Problem blind(request, options);
  blind.limits().assign(blind.limits().size(), 0);
  EXPECT_EQ(blind.scores(), std::vector<float>(80, 0.0F));
  options.queries = 0;
  EXPECT_EQ(Problem(request, options).scores(), std::vector<float>(80, 0.0F));
  options = {};
  for (const int64_t excluded : {40, 41, 1000}) {
    options.excluded_recent = excluded;
    EXPECT_EQ(Problem(request, options).scores(), std::vector<float>(80, 0.0F));
  }
}

// Keys that are excluded are not read, whatever lies there.
TEST_P(ScoreKeys, ExcludedKeysAreNotRead) {
  Options options;
  options.excluded_recent = 9;
  Problem problem(CachedRequest("vec", DataType::float32, 50, 1, 32, 16, 3, 3), options);
  const std::vector<float> before = problem.scores();
  const oracle::Row nan(32, std::numeric_limits<double>::quiet_NaN());
  for (int64_t i = 41; i < 50; ++i) {
    problem.request().cache().set_row(Half::key, problem.request().slot(i), 0, nan);
  }
  EXPECT_EQ(problem.scores(), before);
}

// A query head or a key that is not finite spoils its KV head, visibly, and no other.
TEST_P(ScoreKeys, NotANumberIsNotHidden) {
  for (const GroupReduction reduction : kReductions) {
    for (const int64_t query_head : {3, 4, 5}) {
      for (const double x :
           {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        Options options;
        options.reduction = reduction;
        Problem problem(CachedRequest("vec", DataType::float32, 50, 2, 32, 16, 3, 3), options);
        oracle::Row row = problem.query().row(5, query_head);
        row[7] = x;
        problem.query().set_row(5, query_head, row);
        const std::vector<float> scores = problem.scores();
        for (size_t j = 0; j < 50; ++j) {
          ASSERT_FALSE(std::isnan(scores[j]));
          ASSERT_TRUE(std::isnan(scores[50 + j]));
        }
      }
    }
    Options options;
    options.reduction = reduction;
    Problem problem(CachedRequest("vec", DataType::float32, 50, 2, 32, 16, 3, 3), options);
    problem.request().cache().set_row(Half::key, problem.request().slot(20), 1,
                                      oracle::Row(32, std::numeric_limits<double>::quiet_NaN()));
    const std::vector<float> scores = problem.scores();
    for (size_t j = 0; j < 50; ++j) {
      ASSERT_FALSE(std::isnan(scores[j]));
      ASSERT_TRUE(std::isnan(scores[50 + j]));
    }
  }
}

}  // namespace
}  // namespace phasekv
