// Conversion between the element types, over every 16-bit pattern and every kind of float32.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "implementations.h"
#include "oracle/elements.h"
#include "phasekv/ops/apply_shift.h"

namespace phasekv {
namespace {

class Conversion : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(Conversion);

// Converts by "moving" rows of 8 elements by nothing: that is copying from one type to another.
std::vector<char> convert(std::vector<char>& from, DataType from_type, DataType to_type) {
  constexpr int64_t kHeadSize = 8;
  const int64_t rows = static_cast<int64_t>(from.size()) / size_of(from_type) / kHeadSize;
  std::vector<char> to(static_cast<size_t>(rows * kHeadSize * size_of(to_type)));
  std::vector<int64_t> all(static_cast<size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int64_t> starts = {0, rows};
  ApplyShiftParams params;
  params.cached = {.data = from.data(),
                   .dtype = from_type,
                   .tokens = rows,
                   .heads = 1,
                   .head_size = kHeadSize,
                   .token_stride = kHeadSize,
                   .head_stride = kHeadSize};
  params.cached_rows = all.data();
  params.slots = all.data();
  params.segment_starts = starts.data();
  params.num_segments = 1;
  params.blocks.data = to.data();
  params.blocks.dtype = to_type;
  params.blocks.num_blocks = rows;
  params.blocks.num_heads = 1;
  params.blocks.block_size = 1;
  params.blocks.head_size = kHeadSize;
  params.blocks.block_stride = kHeadSize;
  params.blocks.head_stride = kHeadSize;
  params.blocks.token.outer_stride = kHeadSize;
  params.blocks.dim.outer_stride = 1;
  apply_shift(params);
  return to;
}

TEST_P(Conversion, EveryHalfToFloat) {
  for (const DataType dtype : {DataType::bfloat16, DataType::float16}) {
    std::vector<char> from(2 * 65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      oracle::store_bits(from.data(), dtype, bits, bits);
    }
    const std::vector<char> to = convert(from, dtype, DataType::float32);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const double expected = oracle::decode(bits, dtype);
      const double actual = oracle::load(to.data(), DataType::float32, bits);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(actual)) << bits;
      } else {
        ASSERT_EQ(actual, expected) << bits;
        ASSERT_EQ(std::signbit(actual), std::signbit(expected)) << bits;
      }
    }
  }
}

// Halfway points and their neighbours, around every 16-bit number, and random bits.
std::vector<uint32_t> hard_floats(DataType dtype) {
  std::vector<uint32_t> all;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint32_t exact = oracle::encode(oracle::decode(bits, dtype), DataType::float32);
    const uint32_t dropped = dtype == DataType::bfloat16 ? 16 : 13;
    const uint32_t halfway = exact + (1U << (dropped - 1));
    all.insert(all.end(), {exact, halfway - 1, halfway, halfway + 1});
  }
  std::mt19937 generator(7);
  for (int i = 0; i < 100000; ++i) all.push_back(static_cast<uint32_t>(generator()));
  // Around the smallest numbers of float16, where subnormals round.
  for (int i = 0; i < 20000; ++i) {
    all.push_back((static_cast<uint32_t>(generator()) % (1U << 26)) + 0x32000000U);
  }
  return all;
}

TEST_P(Conversion, FloatToTheNearestHalf) {
  for (const DataType dtype : {DataType::bfloat16, DataType::float16}) {
    const std::vector<uint32_t> bits = hard_floats(dtype);
    std::vector<char> from(bits.size() * 4);
    std::memcpy(from.data(), bits.data(), from.size());
    const std::vector<char> to = convert(from, DataType::float32, dtype);
    for (size_t i = 0; i < bits.size(); ++i) {
      const double x = oracle::decode(bits[i], DataType::float32);
      const auto index = static_cast<int64_t>(i);
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(oracle::load(to.data(), dtype, index))) << bits[i];
        continue;
      }
      const uint32_t actual = oracle::load_bits(to.data(), dtype, index);
      // The BF16 instructions take subnormals for zero.
      const bool may_be_zero =
          GetParam().name == "avx512bf16" && dtype == DataType::bfloat16 && std::fabs(x) < 0x1p-126;
      if (may_be_zero && (actual & 0x7FFFU) == 0) continue;
      ASSERT_EQ(actual, oracle::encode(x, dtype)) << bits[i];
    }
  }
}

}  // namespace
}  // namespace phasekv
