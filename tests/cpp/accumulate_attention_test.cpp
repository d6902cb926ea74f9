// accumulate_attention against the oracle, in every layout, dtype and instruction set.
#include "phasekv/ops/accumulate_attention.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "buffers.h"
#include "cached_request.h"
#include "cases.h"
#include "implementations.h"
#include "oracle/attention_mass.h"

namespace phasekv {
namespace {

using oracle::Half;

class AccumulateAttention : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(AccumulateAttention);

constexpr int64_t kPhases = 3;
constexpr int64_t kGap = 5;  // entries of a row of sums beyond the tokens
constexpr float kBefore = 0.5F;

class Problem {
 public:
  // The queries' limits are random, or their own positions where the queries are the last tokens.
  Problem(CachedRequest request, int64_t queries, int64_t group, bool is_causal,
          DataType query_dtype, uint32_t seed)
      : request_(std::move(request)),
        query_(query_dtype, queries, request_.key().num_heads * group, request_.key().head_size,
               RowsOrder::padded),
        scale_(1.0F / std::sqrt(static_cast<float>(request_.key().head_size))) {
    query_.fill_random(seed + 17);
    std::mt19937 generator(seed);
    for (int64_t i = 0; i < queries; ++i) {
      const auto any = static_cast<int64_t>(generator() % (request_.tokens() + 1));
      limits_.push_back(is_causal ? request_.tokens() - queries + i + 1 : any);
      phases_.push_back(static_cast<int32_t>(generator() % kPhases));
    }
  }

  int64_t stride() const { return request_.tokens() + kGap; }

  void accumulate(std::vector<float>& sums) const {
    AccumulateAttentionParams params;
    params.query = query_.view();
    params.query_limits = limits_.data();
    params.query_phases = phases_.data();
    params.num_phases = kPhases;
    params.key = request_.key();
    params.block_table = request_.block_table();
    params.first_token = request_.first_token();
    params.tokens = request_.tokens();
    params.scale = scale_;
    params.sums = sums.data();
    params.sums_stride = stride();
    accumulate_attention(params);
  }

  std::vector<float> sums() const {
    std::vector<float> sums(static_cast<size_t>(kPhases * request_.key().num_heads * stride()),
                            kBefore);
    accumulate(sums);
    return sums;
  }

  void check() const {
    oracle::Attention attention;
    attention.keys = request_.rows(Half::key);
    attention.scale = scale_;
    attention.limits = limits_;
    for (int64_t i = 0; i < query_.view().tokens; ++i) {
      attention.queries.emplace_back();
      for (int64_t head = 0; head < query_.view().heads; ++head) {
        attention.queries.back().push_back(query_.row(i, head));
      }
    }
    const auto expected = oracle::attention_sums(attention, phases_, kPhases);
    const double tolerance = 1e-6 * (4.0 + attention.largest_score());
    const std::vector<float> actual = sums();
    for (size_t phase = 0; phase < expected.size(); ++phase) {
      for (size_t head = 0; head < expected[phase].size(); ++head) {
        const size_t start =
            (phase * expected[phase].size() + head) * static_cast<size_t>(stride());
        const oracle::Row& row = expected[phase][head];
        for (size_t j = 0; j < row.size(); ++j) {
          ASSERT_NEAR(actual[start + j], kBefore + row[j], tolerance * row[j] + 1e-7)
              << "phase " << phase << ", head " << head << ", key " << j;
        }
        for (size_t j = row.size(); j < static_cast<size_t>(stride()); ++j) {
          ASSERT_EQ(actual[start + j], kBefore);
        }
      }
    }
  }

  std::vector<int64_t>& limits() { return limits_; }

 private:
  CachedRequest request_;
  RowsBuffer query_;
  float scale_;
  std::vector<int64_t> limits_;
  std::vector<int32_t> phases_;
};

TEST_P(AccumulateAttention, EveryCase) {
  for (const Case& shape : all_cases()) {
    SCOPED_TRACE(shape);
    std::mt19937 generator(shape.seed);
    const auto one_of = [&](std::vector<int64_t> list) { return list[generator() % list.size()]; };
    const int64_t group = one_of({1, 2, 3, 7});
    const int64_t queries = one_of({1, 2, 5, 9});
    const bool is_causal = queries <= shape.tokens && generator() % 2 == 0;
    Problem(CachedRequest(shape), queries, group, is_causal, shape.other_dtype, shape.seed).check();
    if (HasFatalFailure()) return;
  }
}

// Enough queries for several tiles of each phase.
TEST_P(AccumulateAttention, AWholePrompt) {
  Problem(CachedRequest("vec", DataType::float32, 150, 2, 32, 32, 45, 1), 150, 3, true,
          DataType::float32, 1)
      .check();
}

// A key receives what all queries together give: their number, over all keys.
TEST_P(AccumulateAttention, AttentionAddsUpToTheQueries) {
  const Problem problem(CachedRequest("vec", DataType::float32, 400, 1, 64, 32, 0, 1), 40, 3, true,
                        DataType::float32, 1);
  std::vector<float> sums(static_cast<size_t>(kPhases * problem.stride()), 0.0F);
  problem.accumulate(sums);
  problem.accumulate(sums);
  double total = 0.0;
  for (const float x : sums) total += x;
  EXPECT_NEAR(total, 80.0, 1e-4);
}

TEST_P(AccumulateAttention, ThreadsDoNotMatter) {
  const Problem problem(CachedRequest("vec", DataType::float32, 600, 2, 64, 32, 7, 3), 300, 3, true,
                        DataType::bfloat16, 2);
  omp_set_num_threads(1);
  const std::vector<float> alone = problem.sums();
  for (const int threads : {2, 3, 7}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(problem.sums(), alone) << threads << " threads";
  }
}

TEST_P(AccumulateAttention, BlockIdsDoNotMatter) {
  const CachedRequest request("vec", DataType::float16, 300, 2, 64, 32, 7, 3);
  EXPECT_EQ(Problem(request, 30, 2, true, DataType::float32, 1).sums(),
            Problem(request.in_other_blocks(9), 30, 2, true, DataType::float32, 1).sums());
}

TEST_P(AccumulateAttention, NothingToAttendAddsNothing) {
  Problem problem(CachedRequest("vec", DataType::float32, 30, 2, 64, 32, 7, 3), 4, 2, true,
                  DataType::float32, 1);
  problem.limits().assign(4, 0);
  const std::vector<float> sums = problem.sums();
  EXPECT_EQ(sums, std::vector<float>(sums.size(), kBefore));
}

}  // namespace
}  // namespace phasekv
