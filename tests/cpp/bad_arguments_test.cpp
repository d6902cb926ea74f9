// Every op refuses bad arguments by name and value, before it writes anything.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "buffers.h"
#include "phasekv/error.h"
#include "phasekv/ops.h"

namespace phasekv {
namespace {

using oracle::Half;

void expect_refused(const std::string& argument, const std::string& value,
                    const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << argument << " = " << value << " was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.argument(), argument);
    EXPECT_EQ(error.value(), value);
    EXPECT_NE(std::string(error.what()).find(argument + " = " + value), std::string::npos);
  }
}

// Right arguments for every op, of which each test spoils one.
class BadArguments : public testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(cache_.poisoned(), cache_.elements()); }

  static constexpr int64_t kTokens = 3;

  GatherBlocksParams gather() {
    return {.blocks = cache_.view(Half::key), .slots = indices_.data(), .rows = rows_.view()};
  }
  ScatterBlocksParams scatter() {
    return {.rows = rows_.view(), .slots = indices_.data(), .blocks = cache_.view(Half::key)};
  }
  RopeView rope() { return {.frequencies = frequencies_.data(), .rotary_dim = 32}; }
  RotateKeysParams rotate() {
    return {.keys = rows_.view(), .deltas = indices_.data(), .rope = rope(), .out = rows_.view()};
  }
  ApplyShiftParams shift() {
    ApplyShiftParams params;
    params.cached = rows_.view();
    params.cached_rows = indices_.data();
    params.slots = indices_.data();
    params.segment_starts = starts_.data();
    params.num_segments = 1;
    params.deltas = indices_.data();
    params.rope = rope();
    params.blocks = cache_.view(Half::key);
    return params;
  }
  MeanResidualParams mean() {
    MeanResidualParams params;
    params.fresh = rows_.view();
    params.cached = rows_.view();
    params.fresh_rows = indices_.data();
    params.cached_rows = indices_.data();
    params.segment_starts = starts_.data();
    params.num_segments = 1;
    params.out = floats_.data();
    return params;
  }

  RowsBuffer rows_{DataType::float32, kTokens, 2, 32, RowsOrder::packed};
  CacheBuffer cache_{"vec", DataType::float32, 4, 2, 16, 32};
  std::vector<int64_t> indices_ = {0, 1, 2};
  std::vector<int64_t> starts_ = {0, 3};
  std::vector<double> frequencies_ = std::vector<double>(16, 0.5);
  std::vector<float> floats_ = std::vector<float>(64, 0.0F);
};

TEST_F(BadArguments, QuantizedRows) {
  std::vector<uint32_t> codes(64, 0);
  std::vector<uint16_t> halves(64, 0);
  const QuantizedRows good = {.codes = codes.data(),
                              .scales = halves.data(),
                              .zero_points = halves.data(),
                              .tokens = kTokens,
                              .heads = 2,
                              .head_size = 32};
  const auto refused = [&](const std::string& argument, const std::string& value,
                           const std::function<void(QuantizedRows*)>& spoil) {
    QuantizedRows bad = good;
    spoil(&bad);
    const bool is_row_size = argument.starts_with("rows.");
    expect_refused(is_row_size ? argument : "out." + argument, value,
                   [&] { quantize({.rows = rows_.view(), .out = bad}); });
    if (argument == "rows.tokens") return;
    expect_refused(is_row_size ? argument : "quantized." + argument, value,
                   [&] { dequantize({.quantized = bad, .rows = rows_.view()}); });
  };
  refused("bits", "3", [](QuantizedRows* rows) { rows->bits = 3; });
  refused("group_size", "0", [](QuantizedRows* rows) { rows->group_size = 0; });
  refused("group_size", "24", [](QuantizedRows* rows) { rows->group_size = 24; });
  refused("group_size", "2097152", [](QuantizedRows* rows) { rows->group_size = 1 << 21; });
  refused("codes", "null", [](QuantizedRows* rows) { rows->codes = nullptr; });
  refused("scales", "null", [](QuantizedRows* rows) { rows->scales = nullptr; });
  refused("zero_points", "null", [](QuantizedRows* rows) { rows->zero_points = nullptr; });
  refused("tokens", "-1", [](QuantizedRows* rows) { rows->tokens = -1; });
  refused("rows.tokens", "3", [](QuantizedRows* rows) { rows->tokens = 4; });
  refused("rows.heads", "2", [](QuantizedRows* rows) { rows->heads = 1; });
  refused("rows.head_size", "32", [](QuantizedRows* rows) { rows->head_size = 64; });
  QuantizedRows longer = good;
  longer.tokens = 5;
  for (const int64_t first : {-1, 3}) {
    expect_refused("first_token", std::to_string(first), [&] {
      dequantize({.quantized = longer, .first_token = first, .rows = rows_.view()});
    });
  }
  longer.tokens = 2;
  expect_refused("rows.tokens", "3",
                 [&] { dequantize({.quantized = longer, .rows = rows_.view()}); });
}

TEST_F(BadArguments, Slots) {
  indices_[1] = 64;
  expect_refused("slots[1]", "64", [&] { gather_blocks(gather()); });
  expect_refused("slots[1]", "64", [&] { scatter_blocks(scatter()); });
  expect_refused("cached_rows[1]", "64", [&] { apply_shift(shift()); });
  const std::vector<int64_t> rows = {0, 1, 2};
  ApplyShiftParams params = shift();
  params.cached_rows = rows.data();
  expect_refused("slots[1]", "64", [&] { apply_shift(params); });
  indices_[1] = kPaddingSlot;
  expect_refused("slots[1]", "-1", [&] { gather_blocks(gather()); });
  indices_[1] = -2;
  expect_refused("slots[1]", "-2", [&] { scatter_blocks(scatter()); });
  indices_[1] = std::numeric_limits<int64_t>::min();
  expect_refused("slots[1]", "-9223372036854775808", [&] { gather_blocks(gather()); });
}

TEST_F(BadArguments, NullPointers) {
  GatherBlocksParams params = gather();
  params.slots = nullptr;
  expect_refused("slots", "null", [&] { gather_blocks(params); });
  params = gather();
  params.rows.data = nullptr;
  expect_refused("rows.data", "null", [&] { gather_blocks(params); });
  params = gather();
  params.blocks.data = nullptr;
  expect_refused("blocks.data", "null", [&] { gather_blocks(params); });
  expect_refused("out", "null", [&] {
    divergence({.fresh = rows_.view(), .cached = rows_.view(), .out = nullptr});
  });
  RotateKeysParams keys = rotate();
  keys.deltas = nullptr;
  expect_refused("deltas", "null", [&] { rotate_keys(keys); });
  keys = rotate();
  keys.rope.frequencies = nullptr;
  expect_refused("rope.frequencies", "null", [&] { rotate_keys(keys); });
}

TEST_F(BadArguments, ShapesThatDisagree) {
  const RowsBuffer wide(DataType::float32, kTokens, 2, 64, RowsOrder::packed);
  const RowsBuffer many(DataType::float32, kTokens, 3, 32, RowsOrder::packed);
  const RowsBuffer few(DataType::float32, 1, 2, 32, RowsOrder::packed);
  const RowsBuffer half(DataType::float16, kTokens, 2, 32, RowsOrder::packed);
  GatherBlocksParams params = gather();
  params.rows = wide.view();
  expect_refused("rows.head_size", "64", [&] { gather_blocks(params); });
  params.rows = many.view();
  expect_refused("rows.heads", "3", [&] { gather_blocks(params); });
  params.rows = half.view();
  expect_refused("rows.dtype", "float16", [&] { gather_blocks(params); });
  RotateKeysParams keys = rotate();
  keys.out = few.view();
  expect_refused("out.tokens", "1", [&] { rotate_keys(keys); });
  expect_refused("cached.tokens", "1", [&] {
    divergence({.fresh = rows_.view(), .cached = few.view(), .out = floats_.data()});
  });
  MeanResidualParams residual = mean();
  residual.cached = many.view();
  expect_refused("cached.heads", "3", [&] { mean_residual(residual); });
  ApplyShiftParams shifted = shift();
  shifted.cached = wide.view();
  expect_refused("cached.head_size", "64", [&] { apply_shift(shifted); });
}

TEST_F(BadArguments, ViewsThatCannotBe) {
  GatherBlocksParams params = gather();
  params.rows.tokens = -1;
  expect_refused("rows.tokens", "-1", [&] { gather_blocks(params); });
  params = gather();
  params.rows.token_stride = 31;
  expect_refused("rows.token_stride", "31", [&] { gather_blocks(params); });
  params = gather();
  params.rows.head_stride = -32;
  expect_refused("rows.head_stride", "-32", [&] { gather_blocks(params); });
  params = gather();
  params.blocks.block_size = 0;
  expect_refused("blocks.block_size", "0", [&] { gather_blocks(params); });
  params = gather();
  params.blocks.dim.tile = 0;
  expect_refused("blocks.dim.tile", "0", [&] { gather_blocks(params); });
  params = gather();
  params.blocks.data = static_cast<char*>(params.blocks.data) + 1;
  EXPECT_THROW(gather_blocks(params), Error);
}

TEST_F(BadArguments, Rope) {
  RotateKeysParams params = rotate();
  for (const int64_t rotary_dim : {int64_t{0}, int64_t{3}, int64_t{34}, int64_t{-2}}) {
    params.rope.rotary_dim = rotary_dim;
    expect_refused("rope.rotary_dim", std::to_string(rotary_dim), [&] { rotate_keys(params); });
  }
  params = rotate();
  frequencies_[5] = std::numeric_limits<double>::infinity();
  expect_refused("rope.frequencies[5]", "inf", [&] { rotate_keys(params); });
  frequencies_[5] = 0.5;
  indices_[2] = (int64_t{1} << 24) + 1;
  expect_refused("deltas[2]", "16777217", [&] { rotate_keys(params); });
}

TEST_F(BadArguments, Segments) {
  starts_ = {1, 3};
  expect_refused("segment_starts[0]", "1", [&] { apply_shift(shift()); });
  starts_ = {0, -1};
  expect_refused("segment_starts[1]", "-1", [&] { mean_residual(mean()); });
  ApplyShiftParams params = shift();
  params.num_segments = -1;
  expect_refused("num_segments", "-1", [&] { apply_shift(params); });
}

TEST_F(BadArguments, RotatedMeanWithoutMean) {
  ApplyShiftParams params = shift();
  params.mean_deltas = indices_.data();
  expect_refused("mean", "null", [&] { apply_shift(params); });
}

// Right arguments for every op over a request's keys.
class BadRequestArguments : public BadArguments {
 protected:
  static constexpr int64_t kKeys = 20;
  static constexpr int64_t kQueries = 3;

  PushQueriesParams push() {
    return {.query = rows_.view(),
            .rows = indices_.data(),
            .entries = indices_.data(),
            .count = kQueries,
            .buffer = buffer_.view()};
  }
  ScoreKeysParams score() {
    ScoreKeysParams params;
    params.query = rows_.view();
    params.key = cache_.view(Half::key);
    params.block_table = block_table_.data();
    params.first_token = 18;
    params.tokens = kKeys;
    params.query_limits = limits_.data();
    params.scores = floats_.data();
    return params;
  }
  AccumulateAttentionParams accumulate() {
    AccumulateAttentionParams params;
    params.query = rows_.view();
    params.query_limits = limits_.data();
    params.query_phases = phases_.data();
    params.num_phases = 1;
    params.key = cache_.view(Half::key);
    params.block_table = block_table_.data();
    params.first_token = 18;
    params.tokens = kKeys;
    params.sums = floats_.data();
    params.sums_stride = kKeys;
    return params;
  }
  CompactParams moves() {
    return {.key = cache_.view(Half::key),
            .value = cache_.view(Half::value),
            .block_table = block_table_.data(),
            .first_token = 18,
            .starts = move_starts_.data(),
            .from = from_.data(),
            .to = to_.data()};
  }
  KeyRedundancyParams redundancy() {
    KeyRedundancyParams params;
    params.key = cache_.view(Half::key);
    params.block_table = block_table_.data();
    params.first_token = 18;
    params.tokens = kKeys;
    params.redundancy = floats_.data();
    return params;
  }
  KeydiffScoreParams keydiff() {
    return {.key = cache_.view(Half::key),
            .block_table = block_table_.data(),
            .first_token = 18,
            .tokens = kKeys,
            .scores = floats_.data()};
  }
  ExpectedAttentionScoreParams expected_attention() {
    ExpectedAttentionScoreParams params;
    params.key = cache_.view(Half::key);
    params.value = cache_.view(Half::value);
    params.block_table = block_table_.data();
    params.first_token = 18;
    params.tokens = kKeys;
    params.query = rows_.view();
    params.query_positions = indices_.data();
    params.rope = rope();
    params.scores = floats_.data();
    return params;
  }
  TriattentionScoreParams triattention() {
    TriattentionScoreParams params;
    params.key = cache_.view(Half::key);
    params.block_table = block_table_.data();
    params.first_token = 18;
    params.tokens = kKeys;
    params.synthetic_query = weights_.data();
    params.norm_weights = weights_.data();
    params.query_heads = 2;
    params.rotary_dim = 32;
    params.scores = floats_.data();
    return params;
  }
  TriattentionQueryParams triattention_query_params() {
    return {.query_heads = 1,
            .head_size = 32,
            .rope = rope(),
            .mean_query = weights_.data(),
            .mean_norm = weights_.data(),
            .synthetic_query = floats_.data(),
            .norm_weights = floats_.data()};
  }

  RowsBuffer buffer_{DataType::bfloat16, kQueries, 2, 32, RowsOrder::packed};
  std::vector<int32_t> block_table_ = {-1, 3, 0};
  std::vector<int64_t> limits_ = {0, 5, kKeys};
  std::vector<int32_t> phases_ = {0, 0, 0};
  std::vector<int64_t> move_starts_ = {0, 2, 3};
  std::vector<int64_t> from_ = {0, 1, 2};
  std::vector<int64_t> to_ = {10, 12, 11};
  std::vector<float> weights_ = std::vector<float>(64, 1.0F);
};

TEST_F(BadRequestArguments, KeyRange) {
  block_table_[2] = 4;
  const std::string entry = "block_table[2]";
  expect_refused(entry, "4", [&] { score_keys(score()); });
  expect_refused(entry, "4", [&] { accumulate_attention(accumulate()); });
  expect_refused(entry, "4", [&] { key_redundancy(redundancy()); });
  expect_refused(entry, "4", [&] { keydiff_score(keydiff()); });
  expect_refused(entry, "4", [&] { expected_attention_score(expected_attention()); });
  expect_refused(entry, "4", [&] { triattention_score(triattention()); });
  to_[2] = 14;
  expect_refused(entry, "4", [&] { compact(moves()); });
  block_table_[2] = 0;
  ScoreKeysParams params = score();
  params.first_token = 15;  // in a block that was freed
  expect_refused("block_table[0]", "-1", [&] { score_keys(params); });
  params.first_token = -1;
  expect_refused("first_token", "-1", [&] { score_keys(params); });
  params = score();
  params.tokens = -1;
  expect_refused("tokens", "-1", [&] { score_keys(params); });
  params.tokens = std::numeric_limits<int64_t>::max();
  expect_refused("tokens", "9223372036854775807", [&] { score_keys(params); });
  params = score();
  params.block_table = nullptr;
  expect_refused("block_table", "null", [&] { score_keys(params); });
}

TEST_F(BadRequestArguments, PushQueries) {
  indices_[1] = 3;
  expect_refused("rows[1]", "3", [&] { push_queries(push()); });
  const std::vector<int64_t> rows = {0, 1, 2};
  PushQueriesParams params = push();
  params.rows = rows.data();
  expect_refused("entries[1]", "3", [&] { push_queries(params); });
  params.count = -1;
  expect_refused("count", "-1", [&] { push_queries(params); });
  indices_[1] = 1;
  const RowsBuffer wide(DataType::float32, kQueries, 2, 64, RowsOrder::packed);
  params = push();
  params.buffer = wide.view();
  expect_refused("buffer.head_size", "64", [&] { push_queries(params); });
}

TEST_F(BadRequestArguments, Queries) {
  limits_[1] = kKeys + 1;
  expect_refused("query_limits[1]", "21", [&] { score_keys(score()); });
  expect_refused("query_limits[1]", "21", [&] { accumulate_attention(accumulate()); });
  limits_[1] = -1;
  expect_refused("query_limits[1]", "-1", [&] { score_keys(score()); });
  limits_[1] = 1;
  const RowsBuffer three(DataType::float32, kQueries, 3, 32, RowsOrder::packed);
  ScoreKeysParams params = score();
  params.query = three.view();
  expect_refused("query.heads", "3", [&] { score_keys(params); });
  params = score();
  params.scale = std::numeric_limits<float>::infinity();
  expect_refused("scale", "inf", [&] { score_keys(params); });
  params = score();
  params.excluded_recent = -1;
  expect_refused("excluded_recent", "-1", [&] { score_keys(params); });
  params = score();
  params.pooling = Pooling::max;
  for (const int64_t kernel : {0, 4, -3}) {
    params.pooling_kernel = kernel;
    expect_refused("pooling_kernel", std::to_string(kernel), [&] { score_keys(params); });
  }
  params = score();
  params.scores = nullptr;
  expect_refused("scores", "null", [&] { score_keys(params); });
}

TEST_F(BadRequestArguments, AttentionSums) {
  phases_[2] = 1;
  expect_refused("query_phases[2]", "1", [&] { accumulate_attention(accumulate()); });
  phases_[2] = -1;
  expect_refused("query_phases[2]", "-1", [&] { accumulate_attention(accumulate()); });
  phases_[2] = 0;
  AccumulateAttentionParams params = accumulate();
  params.sums_stride = kKeys - 1;
  expect_refused("sums_stride", "19", [&] { accumulate_attention(params); });
  params = accumulate();
  params.query_limits = nullptr;
  expect_refused("query_limits", "null", [&] { accumulate_attention(params); });
}

TEST_F(BadRequestArguments, Moves) {
  to_[1] = 9;
  expect_refused("to[1]", "9", [&] { compact(moves()); });
  to_[1] = 12;
  from_[1] = 10;
  expect_refused("to[0]", "10", [&] { compact(moves()); });
  from_[1] = 0;
  expect_refused("from[1]", "0", [&] { compact(moves()); });
  from_[1] = 1;
  from_[0] = -1;
  expect_refused("from[0]", "-1", [&] { compact(moves()); });
  from_[0] = 0;
  move_starts_ = {0, 2, 1};
  expect_refused("starts[2]", "1", [&] { compact(moves()); });
  move_starts_ = {1, 2, 3};
  expect_refused("starts[0]", "1", [&] { compact(moves()); });
  move_starts_ = {0, 2, 3};
  CompactParams params = moves();
  params.first_token = -1;
  expect_refused("first_token", "-1", [&] { compact(params); });
  params = moves();
  params.value.head_size = 16;
  expect_refused("value.head_size", "16", [&] { compact(params); });
  const CacheBuffer half("vec", DataType::float16, 4, 2, 16, 32);
  params = moves();
  params.value = half.view(Half::value);
  expect_refused("value.dtype", "float16", [&] { compact(params); });
}

TEST_F(BadRequestArguments, KeptIndices) {
  expect_refused("kept_indices", "[3]",
                 [] { plan_compaction(std::vector<int64_t>{0, 1, 2}, 2, 8); });
  expect_refused("kept_indices[1]", "0",
                 [] { plan_compaction(std::vector<int64_t>{0, 0, 1, 2}, 2, 8); });
  expect_refused("kept_indices[3]", "8",
                 [] { plan_compaction(std::vector<int64_t>{0, 1, 2, 8}, 2, 8); });
  expect_refused("kept_indices[2]", "-1",
                 [] { plan_compaction(std::vector<int64_t>{0, 1, -1, 2}, 2, 8); });
  expect_refused("tokens", "1", [] { plan_compaction(std::vector<int64_t>{0, 1}, 1, 1); });
  expect_refused("kv_heads", "0", [] { plan_compaction({}, 0, 1); });
  const CompactionMoves moves = plan_compaction(std::vector<int64_t>{0, 1}, 1, 8);
  expect_refused("kept", "9", [&] { compaction_sources(moves, 9, 8); });
  expect_refused("moves.to[0]", "6", [&] { compaction_sources(moves, 1, 8); });
}

TEST_F(BadRequestArguments, ExpectedAttention) {
  expected_attention_score(expected_attention());
  const auto refused = [&](const std::string& argument, const std::string& value,
                           const std::function<void(ExpectedAttentionScoreParams*)>& spoil) {
    ExpectedAttentionScoreParams params = expected_attention();
    spoil(&params);
    expect_refused(argument, value, [&] { expected_attention_score(params); });
  };
  refused("value.head_size", "16", [](auto* params) { params->value.head_size = 16; });
  refused("value.data", "null", [](auto* params) { params->value.data = nullptr; });
  refused("query.heads", "1", [](auto* params) { params->query.heads = 1; });
  refused("query_positions", "null", [](auto* params) { params->query_positions = nullptr; });
  refused("sinks", "-1", [](auto* params) { params->sinks = -1; });
  refused("rope.rotary_dim", "34", [](auto* params) { params->rope.rotary_dim = 34; });
  refused("horizon", "0", [](auto* params) { params->horizon = 0; });
  refused("next_position", "-1", [](auto* params) { params->next_position = -1; });
  refused("next_position", "16777215", [](auto* params) {
    params->next_position = (1 << 24) - 1;
    params->horizon = 2;
  });
  refused("scale", "inf",
          [](auto* params) { params->scale = std::numeric_limits<float>::infinity(); });
  refused("scores", "null", [](auto* params) { params->scores = nullptr; });
  for (const int64_t position : {-1, (1 << 24) + 1}) {
    indices_[1] = position;
    refused("query_positions[1]", std::to_string(position), [](auto* /*params*/) {});
  }
}

TEST_F(BadRequestArguments, KeyScores) {
  KeyRedundancyParams params = redundancy();
  params.threshold = -0.5F;
  expect_refused("threshold", "-0.500000", [&] { key_redundancy(params); });
  params = redundancy();
  params.redundancy = nullptr;
  expect_refused("redundancy", "null", [&] { key_redundancy(params); });
  KeydiffScoreParams compared = keydiff();
  compared.scores = nullptr;
  expect_refused("scores", "null", [&] { keydiff_score(compared); });
  TriattentionScoreParams scored = triattention();
  scored.query_heads = 3;
  expect_refused("query_heads", "3", [&] { triattention_score(scored); });
  scored = triattention();
  for (const int64_t rotary_dim : {0, 3, 34}) {
    scored.rotary_dim = rotary_dim;
    expect_refused("rotary_dim", std::to_string(rotary_dim), [&] { triattention_score(scored); });
  }
  scored = triattention();
  scored.norm_weights = nullptr;
  expect_refused("norm_weights", "null", [&] { triattention_score(scored); });
  TriattentionQueryParams query = triattention_query_params();
  query.time = -1;
  expect_refused("time", "-1", [&] { triattention_query(query); });
  query = triattention_query_params();
  query.mean_norm = nullptr;
  expect_refused("mean_norm", "null", [&] { triattention_query(query); });
  query = triattention_query_params();
  query.magnitude = std::numeric_limits<double>::quiet_NaN();
  expect_refused("magnitude", "nan", [&] { triattention_query(query); });
}

}  // namespace
}  // namespace phasekv
