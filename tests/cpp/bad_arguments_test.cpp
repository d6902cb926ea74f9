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

}  // namespace
}  // namespace phasekv
