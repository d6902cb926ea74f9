// Small problems, whose results are the same bits in every order of threads. These are also what
// runs under ThreadSanitizer, which needs a few shapes only to see a race, and takes its time for
// each.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

#include "buffers.h"
#include "dispatch.h"
#include "implementations.h"
#include "phasekv/ops.h"

namespace phasekv {
namespace {

using oracle::Half;

constexpr int64_t kTokens = 21;
constexpr int64_t kHeads = 2;
constexpr int64_t kBlockSize = 16;

// Wide vectors on the one hand, single elements on the other.
struct Shape {
  const char* layout;
  DataType dtype;
  int64_t head_size;
  RowsOrder rows_order;
};
constexpr Shape kShapes[] = {
    {"rows", DataType::bfloat16, 64, RowsOrder::packed},
    {"vec", DataType::float32, 40, RowsOrder::padded},
    {"rows", DataType::float16, 80, RowsOrder::head_major},
};

class Problem {
 public:
  explicit Problem(const Shape& shape)
      : rows_(shape.dtype, kTokens, kHeads, shape.head_size, shape.rows_order),
        more_rows_(shape.dtype, kTokens, kHeads, shape.head_size, shape.rows_order),
        out_(shape.dtype, kTokens, 2 * kHeads, shape.head_size, shape.rows_order),
        query_(shape.dtype, kTokens, 2 * kHeads, shape.head_size, shape.rows_order),
        cache_(shape.layout, shape.dtype, 4, kHeads, kBlockSize, shape.head_size),
        floats_(static_cast<size_t>(3 * kHeads * shape.head_size), 0.0F),
        frequencies_(static_cast<size_t>(shape.head_size / 2), 0.37) {
    rows_.fill_random(1);
    more_rows_.fill_random(2);
    query_.fill_random(3);
    for (int64_t i = 0; i < kTokens; ++i) {
      slots_.push_back((i * 3) % (4 * kBlockSize));
      indices_.push_back(i);
      deltas_.push_back(i / 4 - 2);
      limits_.push_back(i * 2);
    }
    for (int64_t slot = 0; slot < 4 * kBlockSize; ++slot) {
      for (int64_t head = 0; head < kHeads; ++head) {
        cache_.set_row(Half::key, slot, head, rows_.row(slot % kTokens, head));
        cache_.set_row(Half::value, slot, head, more_rows_.row(slot % kTokens, head));
      }
    }
  }

  void gather() {
    gather_blocks(
        {.blocks = cache_.view(Half::key), .slots = slots_.data(), .rows = more_rows_.view()});
  }
  void scatter() {
    scatter_blocks(
        {.rows = rows_.view(), .slots = slots_.data(), .blocks = cache_.view(Half::value)});
  }
  void rotate() {
    rotate_keys(
        {.keys = rows_.view(), .deltas = deltas_.data(), .rope = rope(), .out = more_rows_.view()});
  }
  void diverge() {
    divergence({.fresh = rows_.view(), .cached = more_rows_.view(), .out = floats_.data()});
  }
  void mean() {
    mean_residual({.fresh = rows_.view(),
                   .cached = more_rows_.view(),
                   .fresh_rows = indices_.data(),
                   .cached_rows = indices_.data(),
                   .segment_starts = starts_.data(),
                   .num_segments = 3,
                   .cached_deltas = deltas_.data(),
                   .rope = rope(),
                   .out = floats_.data()});
  }
  void shift() {
    ApplyShiftParams params;
    params.cached = rows_.view();
    params.cached_rows = indices_.data();
    params.slots = slots_.data();
    params.segment_starts = starts_.data();
    params.num_segments = 3;
    params.deltas = deltas_.data();
    params.rope = rope();
    params.mean = floats_.data();
    params.mean_deltas = deltas_.data();
    params.blocks = cache_.view(Half::key);
    apply_shift(params);
  }
  void attend() {
    AttendRowsParams params;
    params.query = query_.view();
    params.key = cache_.view(Half::key);
    params.value = cache_.view(Half::value);
    params.block_table = block_table_.data();
    params.num_requests = 2;
    params.block_table_stride = 3;
    params.row_requests = row_requests_.data();
    params.row_limits = limits_.data();
    params.scale = 0.1F;
    params.out = out_.view();
    attend_rows(params);
  }
  // No loop over keys stands between what a block begins and ends with.
  void attend_to_nothing() {
    limits_.assign(limits_.size(), 0);
    attend();
  }
  void push() {
    push_queries({.query = rows_.view(),
                  .rows = indices_.data(),
                  .entries = indices_.data(),
                  .count = 7,
                  .buffer = more_rows_.view()});
  }
  void move() {
    CompactParams params;
    params.key = cache_.view(Half::key);
    params.value = cache_.view(Half::value);
    params.block_table = block_table_.data();
    params.starts = move_starts_.data();
    params.from = indices_.data();
    params.to = move_targets_.data();
    compact(params);
  }

  void score() {
    for (const GroupReduction reduction :
         {GroupReduction::max_logit, GroupReduction::max, GroupReduction::mean}) {
      ScoreKeysParams params;
      params.query = query_.view();
      params.key = cache_.view(Half::key);
      params.block_table = block_table_.data();
      params.first_token = 3;
      params.tokens = kTokens;
      params.query_limits = indices_.data();
      params.excluded_recent = 2;
      params.group = reduction;
      params.pooling = static_cast<Pooling>(reduction);
      params.pooling_kernel = 3;
      params.scores = floats_.data() + static_cast<int>(reduction) * kHeads * kTokens;
      score_keys(params);
    }
  }
  void accumulate() {
    AccumulateAttentionParams params;
    params.query = query_.view();
    params.query_limits = indices_.data();
    params.query_phases = row_requests_.data();
    params.num_phases = 2;
    params.key = cache_.view(Half::key);
    params.block_table = block_table_.data();
    params.tokens = kTokens;
    params.sums = floats_.data();
    params.sums_stride = kTokens;
    accumulate_attention(params);
  }
  void find_redundancy() {
    KeyRedundancyParams params;
    params.key = cache_.view(Half::key);
    params.block_table = block_table_.data();
    params.first_token = 3;
    params.tokens = 2 * kTokens;
    params.threshold = 0.1F;
    params.redundancy = floats_.data();
    key_redundancy(params);
  }
  void score_by_direction() {
    keydiff_score({.key = cache_.view(Half::key),
                   .block_table = block_table_.data(),
                   .first_token = 3,
                   .tokens = 2 * kTokens,
                   .scores = floats_.data()});
  }
  void score_by_expectation() {
    std::vector<int32_t> positions(static_cast<size_t>(kHeads * kTokens));
    std::iota(positions.begin(), positions.end(), 0);
    expected_attention_score({.key = cache_.view(Half::key),
                              .value = cache_.view(Half::value),
                              .block_table = block_table_.data(),
                              .first_token = 3,
                              .tokens = kTokens,
                              .positions = positions.data(),
                              .query = query_.view(),
                              .query_positions = indices_.data(),
                              .sinks = 2,
                              .rope = rope(),
                              .next_position = 30,
                              .horizon = 5,
                              .scale = 0.1F,
                              .scores = floats_.data()});
  }
  void score_by_frequency() {
    const std::vector<float> query(static_cast<size_t>(2 * kHeads * query_.view().head_size), 0.3F);
    for (const bool normalizes : {false, true}) {
      TriattentionScoreParams params;
      params.key = cache_.view(Half::key);
      params.block_table = block_table_.data();
      params.first_token = 3;
      params.tokens = kTokens;
      params.synthetic_query = query.data();
      params.norm_weights = query.data();
      params.query_heads = 2 * kHeads;
      params.rotary_dim = rope().rotary_dim;
      params.normalize = normalizes;
      params.scores = floats_.data() + (normalizes ? kHeads * kTokens : 0);
      triattention_score(params);
    }
  }

  void quantize_rows() {
    for (const GroupAxis axis : {GroupAxis::tokens, GroupAxis::channels}) {
      QuantizedRows quantized{.codes = codes_.data(),
                              .scales = halves_.data(),
                              .zero_points = halves_.data() + halves_.size() / 2,
                              .tokens = kTokens,
                              .heads = kHeads,
                              .head_size = rows_.view().head_size,
                              .bits = axis == GroupAxis::tokens ? 2 : 4,
                              .group_size = 16,
                              .axis = axis};
      quantize({.rows = rows_.view(), .out = quantized});
      dequantize({.quantized = quantized, .rows = more_rows_.view()});
    }
  }

  // Everything that an op may have written.
  std::vector<uint32_t> bits() const {
    std::vector<uint32_t> all;
    for (const RowsBuffer* rows : {&more_rows_, &out_}) {
      const RowsView view = rows->view();
      for (int64_t token = 0; token < view.tokens; ++token) {
        for (int64_t head = 0; head < view.heads; ++head) {
          for (int64_t d = 0; d < view.head_size; ++d) all.push_back(rows->bits(token, head, d));
        }
      }
    }
    for (const Half half : {Half::key, Half::value}) {
      for (int64_t slot = 0; slot < 4 * kBlockSize; ++slot) {
        for (int64_t d = 0; d < out_.view().head_size; ++d) {
          all.push_back(cache_.bits(half, slot, 0, d));
          all.push_back(cache_.bits(half, slot, 1, d));
        }
      }
    }
    for (const float x : floats_) all.push_back(std::bit_cast<uint32_t>(x));
    all.insert(all.end(), codes_.begin(), codes_.end());
    all.insert(all.end(), halves_.begin(), halves_.end());
    return all;
  }

 private:
  RopeView rope() const {
    return {.frequencies = frequencies_.data(),
            .rotary_dim = static_cast<int64_t>(2 * frequencies_.size())};
  }

  RowsBuffer rows_;
  RowsBuffer more_rows_;
  RowsBuffer out_;
  RowsBuffer query_;
  CacheBuffer cache_;
  std::vector<float> floats_;
  std::vector<uint32_t> codes_ = std::vector<uint32_t>(1024);
  std::vector<uint16_t> halves_ = std::vector<uint16_t>(1024);
  std::vector<double> frequencies_;
  std::vector<int64_t> slots_;
  std::vector<int64_t> indices_;
  std::vector<int64_t> deltas_;
  std::vector<int64_t> limits_;
  std::vector<int64_t> starts_ = {0, 2, 15, kTokens};
  std::vector<int32_t> block_table_ = {2, 0, 3, 1, 3, 0};
  std::vector<int32_t> row_requests_ = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                        1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  std::vector<int64_t> move_starts_ = {0, 5, 9};
  std::vector<int64_t> move_targets_ = {20, 21, 25, 30, 31, 33, 34, 40, 41};
};

void expect_same_in_every_order(void (Problem::*op)()) {
  for (const Shape& shape : kShapes) {
    std::vector<uint32_t> first;
    for (const Implementation& implementation : implementations()) {
      Problem problem(shape);
      override_kernels(implementation.kernels);
      (problem.*op)();
      override_kernels(nullptr);
      if (first.empty()) first = problem.bits();
      EXPECT_TRUE(problem.bits() == first) << implementation.name << ", " << shape.layout;
    }
  }
}

TEST(EveryThreadOrder, GatherBlocks) { expect_same_in_every_order(&Problem::gather); }
TEST(EveryThreadOrder, ScatterBlocks) { expect_same_in_every_order(&Problem::scatter); }
TEST(EveryThreadOrder, RotateKeys) { expect_same_in_every_order(&Problem::rotate); }
TEST(EveryThreadOrder, Divergence) { expect_same_in_every_order(&Problem::diverge); }
TEST(EveryThreadOrder, MeanResidual) { expect_same_in_every_order(&Problem::mean); }
TEST(EveryThreadOrder, ApplyShift) { expect_same_in_every_order(&Problem::shift); }
TEST(EveryThreadOrder, AttendRows) { expect_same_in_every_order(&Problem::attend); }
TEST(EveryThreadOrder, AttendRowsWithoutKeys) {
  expect_same_in_every_order(&Problem::attend_to_nothing);
}
TEST(EveryThreadOrder, PushQueries) { expect_same_in_every_order(&Problem::push); }
TEST(EveryThreadOrder, Compact) { expect_same_in_every_order(&Problem::move); }
TEST(EveryThreadOrder, ScoreKeys) { expect_same_in_every_order(&Problem::score); }
TEST(EveryThreadOrder, AccumulateAttention) { expect_same_in_every_order(&Problem::accumulate); }
TEST(EveryThreadOrder, KeyRedundancy) { expect_same_in_every_order(&Problem::find_redundancy); }
TEST(EveryThreadOrder, KeydiffScore) { expect_same_in_every_order(&Problem::score_by_direction); }
TEST(EveryThreadOrder, ExpectedAttentionScore) {
  expect_same_in_every_order(&Problem::score_by_expectation);
}
TEST(EveryThreadOrder, Quantize) { expect_same_in_every_order(&Problem::quantize_rows); }
TEST(EveryThreadOrder, TriattentionScore) {
  expect_same_in_every_order(&Problem::score_by_frequency);
}

}  // namespace
}  // namespace phasekv
