// quantize and dequantize against the definition in double precision.
#include "phasekv/ops/quantize.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "buffers.h"
#include "cases.h"
#include "compare.h"
#include "dispatch.h"
#include "implementations.h"
#include "oracle/elements.h"
#include "oracle/quantization.h"

namespace phasekv {
namespace {

class Quantize : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(Quantize);

constexpr uint32_t kPoisonWord = 0xABCDEF01U;

// Quantised rows in memory that ends with an element more, which nobody may write.
class QuantizedBuffer {
 public:
  QuantizedBuffer(int64_t tokens, int64_t heads, int64_t head_size, int bits, int64_t group_size,
                  GroupAxis axis)
      : rows_{.tokens = tokens,
              .heads = heads,
              .head_size = head_size,
              .bits = bits,
              .group_size = group_size,
              .axis = axis},
        codes_(static_cast<size_t>(oracle::words_in(rows_)) + 1, kPoisonWord),
        scales_(static_cast<size_t>(oracle::groups_in(rows_)) + 1, poison_half()),
        zero_points_(scales_) {}

  QuantizedRows view() const {
    QuantizedRows rows = rows_;
    rows.codes = const_cast<uint32_t*>(codes_.data());
    rows.scales = const_cast<uint16_t*>(scales_.data());
    rows.zero_points = const_cast<uint16_t*>(zero_points_.data());
    return rows;
  }
  uint32_t code(int64_t token, int64_t head, int64_t channel) const {
    return oracle::code_at(view(), token, head, channel);
  }
  // Of the group that an element is in.
  oracle::GroupRange range(int64_t token, int64_t head, int64_t channel) const {
    const int64_t index = oracle::group_index(rows_, token, head, channel);
    return {.scale = oracle::load(scales_.data(), DataType::float16, index),
            .zero_point = oracle::load(zero_points_.data(), DataType::float16, index)};
  }
  bool ends_are_poisoned() const {
    return codes_.back() == kPoisonWord && scales_.back() == poison_half() &&
           zero_points_.back() == poison_half();
  }
  // All of it but what no op wrote.
  std::vector<uint32_t> bits() const {
    std::vector<uint32_t> all(codes_);
    all.insert(all.end(), scales_.begin(), scales_.end());
    all.insert(all.end(), zero_points_.begin(), zero_points_.end());
    return all;
  }
  // In all words.
  int64_t bits_set() const {
    int64_t set = 0;
    for (size_t i = 0; i + 1 < codes_.size(); ++i) set += std::popcount(codes_[i]);
    return set;
  }

 private:
  static uint16_t poison_half() { return static_cast<uint16_t>(poison(DataType::float16)); }

  QuantizedRows rows_;
  std::vector<uint32_t> codes_;
  std::vector<uint16_t> scales_;
  std::vector<uint16_t> zero_points_;
};

// The rows of one head, by token.
std::vector<oracle::Row> rows_of_head(const RowsBuffer& rows, int64_t head) {
  std::vector<oracle::Row> all;
  for (int64_t token = 0; token < rows.view().tokens; ++token) all.push_back(rows.row(token, head));
  return all;
}

// The elements of a group that has (token, channel) of a head for its first.
oracle::Row group_at(const std::vector<oracle::Row>& head, const QuantizedRows& quantized,
                     int64_t token, int64_t channel) {
  const oracle::Row& row = head[static_cast<size_t>(token)];
  if (quantized.axis == GroupAxis::channels) {
    const int64_t end = std::min(channel + quantized.group_size, quantized.head_size);
    return {row.begin() + channel, row.begin() + end};
  }
  oracle::Row group;
  const int64_t end = std::min(token + quantized.group_size, quantized.tokens);
  for (int64_t t = token; t < end; ++t) {
    group.push_back(head[static_cast<size_t>(t)][static_cast<size_t>(channel)]);
  }
  return group;
}

// Every group's scale and zero point, and every code by those that are stored.
void expect_quantized(const RowsBuffer& rows, const QuantizedBuffer& buffer) {
  const QuantizedRows quantized = buffer.view();
  int64_t bits_set = 0;
  for (int64_t head = 0; head < quantized.heads; ++head) {
    const std::vector<oracle::Row> all = rows_of_head(rows, head);
    double worst = 0.0;
    for (int64_t token = 0; token < quantized.tokens; ++token) {
      const oracle::Row& row = all[static_cast<size_t>(token)];
      for (int64_t d = 0; d < quantized.head_size; ++d) {
        const auto [scale, zero_point] = buffer.range(token, head, d);
        const int64_t along = quantized.axis == GroupAxis::tokens ? token : d;
        if (along % quantized.group_size == 0) {
          const oracle::Row group = group_at(all, quantized, token, d);
          const oracle::GroupRange expected = oracle::range_of(group, quantized.bits);
          ASSERT_TRUE(is_near({zero_point}, {expected.zero_point}, 0.0, DataType::float16));
          ASSERT_TRUE(is_near({scale}, {expected.scale}, largest(group), DataType::float16));
        }
        const double quotient =
            oracle::quotient_of(row[static_cast<size_t>(d)], scale, zero_point, quantized.bits);
        const uint32_t code = buffer.code(token, head, d);
        worst = std::max(worst, std::fabs(code - quotient));
        bits_set += std::popcount(code);
      }
    }
    ASSERT_LE(worst, 0.5 + 4e-6);
  }
  EXPECT_EQ(buffer.bits_set(), bits_set);  // none that is of no code
  EXPECT_TRUE(buffer.ends_are_poisoned());
}

void expect_dequantized(const QuantizedBuffer& buffer, int64_t first_token,
                        const RowsBuffer& rows) {
  const RowsView view = rows.view();
  for (int64_t token = 0; token < view.tokens; ++token) {
    for (int64_t head = 0; head < view.heads; ++head) {
      oracle::Row expected;
      for (int64_t d = 0; d < view.head_size; ++d) {
        const int64_t from = first_token + token;
        const auto [scale, zero_point] = buffer.range(from, head, d);
        expected.push_back(buffer.code(from, head, d) * scale + zero_point);
      }
      ASSERT_TRUE(is_near(rows.row(token, head), expected, largest(expected), view.dtype));
    }
  }
  EXPECT_TRUE(rows.gaps_are_poisoned());
}

int bits_of(const Case& shape) { return shape.seed % 2 == 0 ? 2 : 4; }

int64_t group_size_of(const Case& shape) {
  constexpr int64_t kSizes[] = {32, 16, 48, 128};
  return kSizes[shape.seed / 10 % 4];
}

TEST_P(Quantize, EveryCase) {
  for (const Case& shape : cases_of_any_width()) {
    for (const GroupAxis axis : {GroupAxis::tokens, GroupAxis::channels}) {
      SCOPED_TRACE(testing::Message() << shape << ", axis " << static_cast<int>(axis));
      RowsBuffer rows(shape.dtype, shape.tokens, shape.heads, shape.head_size, shape.rows_order);
      rows.fill_random(shape.seed);
      const QuantizedBuffer quantized(shape.tokens, shape.heads, shape.head_size, bits_of(shape),
                                      group_size_of(shape), axis);
      quantize({.rows = rows.view(), .out = quantized.view()});
      expect_quantized(rows, quantized);
      for (const int64_t first : {int64_t{0}, shape.tokens / 3}) {
        const RowsBuffer out(shape.other_dtype, shape.tokens - first, shape.heads, shape.head_size,
                             RowsOrder::padded);
        dequantize({.quantized = quantized.view(), .first_token = first, .rows = out.view()});
        expect_dequantized(quantized, first, out);
      }
    }
  }
}

TEST_P(Quantize, EveryProcessorGivesTheSameBits) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    for (const auto& [axis, bits] :
         {std::pair(GroupAxis::tokens, 2), std::pair(GroupAxis::tokens, 4),
          std::pair(GroupAxis::channels, 2), std::pair(GroupAxis::channels, 4)}) {
      RowsBuffer rows(dtype, 75, 3, 80, RowsOrder::padded);
      rows.fill_random(static_cast<uint32_t>(bits));
      const QuantizedBuffer ours(75, 3, 80, bits, 32, axis);
      const QuantizedBuffer plain(75, 3, 80, bits, 32, axis);
      const RowsBuffer our_rows(dtype, 75, 3, 80, RowsOrder::packed);
      const RowsBuffer plain_rows(dtype, 75, 3, 80, RowsOrder::packed);
      quantize({.rows = rows.view(), .out = ours.view()});
      dequantize({.quantized = ours.view(), .rows = our_rows.view()});
      override_kernels(kernels_of(CpuIsa::scalar));
      quantize({.rows = rows.view(), .out = plain.view()});
      dequantize({.quantized = plain.view(), .rows = plain_rows.view()});
      override_kernels(GetParam().kernels);
      EXPECT_EQ(ours.bits(), plain.bits());
      for (int64_t token = 0; token < 75; ++token) {
        for (int64_t head = 0; head < 3; ++head) {
          ASSERT_EQ(our_rows.row(token, head), plain_rows.row(token, head));
        }
      }
    }
  }
}

// A head of one token and groups of 16 channels, each given by its elements.
struct OneRow {
  explicit OneRow(const oracle::Row& elements, int bits = 2)
      : rows(DataType::float32, 1, 1, static_cast<int64_t>(elements.size()), RowsOrder::packed),
        out(rows),
        quantized(1, 1, static_cast<int64_t>(elements.size()), bits, 16, GroupAxis::channels) {
    rows.set_row(0, 0, elements);
    quantize({.rows = rows.view(), .out = quantized.view()});
    dequantize({.quantized = quantized.view(), .rows = out.view()});
  }

  RowsBuffer rows;
  RowsBuffer out;
  QuantizedBuffer quantized;
};

TEST_P(Quantize, TiesGoToTheEvenCode) {
  const OneRow row({0.0, 0.5, 1.5, 2.5, 3.0, 0.49, 1.51, 2.49});
  EXPECT_EQ(row.out.row(0, 0), (oracle::Row{0.0, 0.0, 2.0, 2.0, 3.0, 0.0, 2.0, 2.0}));
  oracle::Row halves;
  oracle::Row expected;
  for (int i = 0; i < 15; ++i) {
    halves.push_back(i + 0.5);
    expected.push_back(i + i % 2);
  }
  halves[0] = expected[0] = 0.0;
  halves[13] = expected[13] = 15.0;
  EXPECT_EQ(OneRow(halves, 4).out.row(0, 0), expected);
}

TEST_P(Quantize, OneValueIsItsOwnCode) {
  const OneRow row(oracle::Row(37, -1.75));
  EXPECT_EQ(row.out.row(0, 0), oracle::Row(37, -1.75));
  // A scale that float16 takes for 0, and a zero point that it rounds: codes are 0 all the same.
  oracle::Row close(16, 0.5 + std::ldexp(1.0, -14));
  close[3] += std::ldexp(1.0, -24);
  const OneRow rounded(close);
  EXPECT_EQ(rounded.out.row(0, 0), oracle::Row(16, 0.5));
  for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(rounded.quantized.code(0, 0, d), 0U);
}

TEST_P(Quantize, WhatIsNotFiniteSpoilsItsGroupAndNoOther) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {std::nan(""), infinity, -infinity}) {
    for (const size_t place : {16, 19, 31}) {
      oracle::Row elements(40);
      for (size_t d = 0; d < 40; ++d) elements[d] = static_cast<double>(d % 4);
      const oracle::Row good = elements;
      elements[place] = bad;
      const oracle::Row out = OneRow(elements).out.row(0, 0);
      for (size_t d = 0; d < 40; ++d) {
        if (d >= 16 && d < 32) {
          EXPECT_TRUE(std::isnan(out[d])) << bad << " at " << place << ", " << d;
        } else {
          EXPECT_EQ(out[d], good[d]);
        }
      }
      // The same along tokens: one channel of three.
      RowsBuffer rows(DataType::float32, 40, 1, 3, RowsOrder::packed);
      for (int64_t t = 0; t < 40; ++t) {
        const auto i = static_cast<size_t>(t);
        rows.set_row(t, 0, {good[i], elements[i], good[i]});
      }
      const QuantizedBuffer quantized(40, 1, 3, 2, 16, GroupAxis::tokens);
      quantize({.rows = rows.view(), .out = quantized.view()});
      dequantize({.quantized = quantized.view(), .rows = rows.view()});
      for (int64_t t = 0; t < 40; ++t) {
        const oracle::Row row = rows.row(t, 0);
        EXPECT_EQ(row[0], static_cast<double>(t % 4));
        EXPECT_EQ(row[2], row[0]);
        EXPECT_EQ(std::isnan(row[1]), t >= 16 && t < 32);
      }
    }
  }
}

TEST_P(Quantize, WhatFloat16CannotHoldIsNotHidden) {
  const OneRow row({-1e6, 0.0, 1e6});
  for (const double x : row.out.row(0, 0)) EXPECT_FALSE(std::isfinite(x));
}

TEST_P(Quantize, ThreadsDoNotMatter) {
  for (const GroupAxis axis : {GroupAxis::tokens, GroupAxis::channels}) {
    RowsBuffer rows(DataType::float32, 1500, 2, 80, RowsOrder::packed);
    rows.fill_random(3);
    std::vector<uint32_t> first;
    for (const int threads : {1, 2, 3, 7}) {
      omp_set_num_threads(threads);
      const QuantizedBuffer quantized(1500, 2, 80, 2, 32, axis);
      const RowsBuffer out(DataType::float32, 1500, 2, 80, RowsOrder::packed);
      quantize({.rows = rows.view(), .out = quantized.view()});
      dequantize({.quantized = quantized.view(), .rows = out.view()});
      std::vector<uint32_t> bits = quantized.bits();
      for (int64_t token = 0; token < 1500; ++token) bits.push_back(out.bits(token, 1, 79));
      if (threads == 1) first = bits;
      EXPECT_EQ(bits, first);
    }
  }
}

}  // namespace
}  // namespace phasekv
