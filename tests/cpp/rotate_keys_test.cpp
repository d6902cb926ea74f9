// rotate_keys against the oracle's rotation.
#include "phasekv/ops/rotate_keys.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "buffers.h"
#include "cases.h"
#include "compare.h"
#include "implementations.h"

namespace phasekv {
namespace {

class RotateKeys : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(RotateKeys);

Case case_of(uint32_t seed, int64_t rotary_dim, RopePairing pairing = RopePairing::neox) {
  Case shape;
  shape.seed = seed;
  shape.rotary_dim = rotary_dim;
  shape.pairing = pairing;
  return shape;
}

RopeView rope_of(const Case& shape, const std::vector<double>& frequencies) {
  return {
      .frequencies = frequencies.data(), .rotary_dim = shape.rotary_dim, .pairing = shape.pairing};
}

void expect_rotated(const RowsBuffer& actual, const RowsBuffer& keys,
                    const std::vector<int64_t>& deltas, const std::vector<double>& frequencies,
                    RopePairing pairing) {
  for (int64_t token = 0; token < keys.view().tokens; ++token) {
    for (int64_t head = 0; head < keys.view().heads; ++head) {
      const oracle::Row row = keys.row(token, head);
      const int64_t delta = deltas[static_cast<size_t>(token)];
      ASSERT_TRUE(is_near(actual.row(token, head), oracle::rotate(row, frequencies, pairing, delta),
                          2.0 * largest(row), keys.view().dtype))
          << "token " << token << " head " << head << " delta " << delta;
    }
  }
}

TEST_P(RotateKeys, EveryCase) {
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    RowsBuffer keys(shape.dtype, shape.tokens, shape.heads, shape.head_size, shape.rows_order);
    keys.fill_random(shape.seed);
    const std::vector<double> frequencies = shape.frequencies();
    const std::vector<int64_t> deltas = shape.deltas(shape.tokens);
    RowsBuffer out(shape.dtype, shape.tokens, shape.heads, shape.head_size, RowsOrder::padded);
    rotate_keys({.keys = keys.view(),
                 .deltas = deltas.data(),
                 .rope = rope_of(shape, frequencies),
                 .out = out.view()});
    expect_rotated(out, keys, deltas, frequencies, shape.pairing);
    EXPECT_TRUE(out.gaps_are_poisoned());
    if (HasFatalFailure()) return;
  }
}

TEST_P(RotateKeys, InPlaceIsTheSame) {
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    RowsBuffer keys(DataType::bfloat16, 9, 2, 80, RowsOrder::padded);
    keys.fill_random(5);
    const RowsBuffer before = keys;
    const Case shape = case_of(4, 60);
    const std::vector<double> frequencies = shape.frequencies();
    const std::vector<int64_t> deltas = shape.deltas(9);
    const RopeView rope = {.frequencies = frequencies.data(), .rotary_dim = 60, .pairing = pairing};
    rotate_keys({.keys = keys.view(), .deltas = deltas.data(), .rope = rope, .out = keys.view()});
    expect_rotated(keys, before, deltas, frequencies, pairing);
  }
}

TEST_P(RotateKeys, NoMoveKeepsEveryBit) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    RowsBuffer keys(dtype, 40, 2, 64, RowsOrder::packed);
    keys.fill_random(3);
    keys.set_row(1, 0, oracle::Row(64, std::numeric_limits<double>::infinity()));
    keys.set_row(2, 0, oracle::Row(64, -0.0));
    const RowsBuffer out(dtype, 40, 2, 64, RowsOrder::packed);
    const std::vector<int64_t> deltas(40, 0);
    const std::vector<double> frequencies(32, 0.5);
    rotate_keys({.keys = keys.view(),
                 .deltas = deltas.data(),
                 .rope = {.frequencies = frequencies.data(), .rotary_dim = 64},
                 .out = out.view()});
    for (int64_t token = 0; token < 40; ++token) {
      for (int64_t d = 0; d < 64; ++d) {
        ASSERT_EQ(out.bits(token, 0, d), keys.bits(token, 0, d));
      }
    }
  }
}

TEST_P(RotateKeys, NotANumberStaysInItsPair) {
  RowsBuffer keys(DataType::float32, 2, 1, 64, RowsOrder::packed);
  keys.fill_random(1);
  oracle::Row row = keys.row(0, 0);
  row[5] = std::numeric_limits<double>::quiet_NaN();
  row[40] = std::numeric_limits<double>::infinity();
  keys.set_row(0, 0, row);
  const Case shape = case_of(0, 64);
  const std::vector<double> frequencies = shape.frequencies();
  const std::vector<int64_t> deltas = {3, 3};
  const RowsBuffer out(DataType::float32, 2, 1, 64, RowsOrder::packed);
  rotate_keys({.keys = keys.view(),
               .deltas = deltas.data(),
               .rope = rope_of(shape, frequencies),
               .out = out.view()});
  expect_rotated(out, keys, deltas, frequencies, RopePairing::neox);
}

TEST_P(RotateKeys, PhasesAreExactAtEveryPosition) {
  // One token per delta, with a key of (1, 0) in each pair: the result is the sine and the cosine.
  constexpr int64_t kTokens = 4000;
  std::mt19937 generator(11);
  std::uniform_int_distribution<int64_t> positions(-131071, 131071);
  std::vector<int64_t> deltas;
  for (int64_t i = 0; i < kTokens; ++i) deltas.push_back(positions(generator));
  // Multiples of a quarter turn, where a wrong quadrant would show, and the largest delta there is.
  const std::vector<double> frequencies = {1.0, 0.5 * 3.14159265358979323846, 0.37, 1e-5, 4.0, 0.0};
  deltas[0] = int64_t{1} << 24;
  deltas[1] = -deltas[0];
  for (int64_t i = 0; i < 9; ++i) deltas[static_cast<size_t>(2 + i)] = i - 4;
  RowsBuffer keys(DataType::float32, kTokens, 1, 12, RowsOrder::packed);
  for (int64_t i = 0; i < kTokens; ++i) {
    keys.set_row(i, 0, {1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0});
  }
  const RowsBuffer out(DataType::float32, kTokens, 1, 12, RowsOrder::packed);
  rotate_keys({.keys = keys.view(),
               .deltas = deltas.data(),
               .rope = {.frequencies = frequencies.data(), .rotary_dim = 12},
               .out = out.view()});
  for (int64_t i = 0; i < kTokens; ++i) {
    const oracle::Row row = out.row(i, 0);
    for (size_t pair = 0; pair < 6; ++pair) {
      const long double phase =
          static_cast<long double>(deltas[static_cast<size_t>(i)]) * frequencies[pair];
      // Half a unit of float32 below 1, and what the product of a large delta loses in double.
      ASSERT_NEAR(row[pair], static_cast<double>(std::cos(phase)), 4e-8) << deltas[i];
      ASSERT_NEAR(row[pair + 6], static_cast<double>(std::sin(phase)), 4e-8) << deltas[i];
    }
  }
}

TEST_P(RotateKeys, ManyMovesAreOneMove) {
  const Case shape = case_of(0, 128);
  const std::vector<double> frequencies = shape.frequencies();
  std::mt19937 generator(2);
  std::uniform_int_distribution<int64_t> moves(-3000, 3000);
  RowsBuffer keys(DataType::float32, 4, 2, 128, RowsOrder::packed);
  keys.fill_random(9);
  const RowsBuffer before = keys;
  std::vector<int64_t> sum(4, 0);
  for (int round = 0; round < 100; ++round) {
    std::vector<int64_t> deltas;
    for (size_t i = 0; i < 4; ++i) {
      deltas.push_back(moves(generator));
      sum[i] += deltas.back();
    }
    rotate_keys({.keys = keys.view(),
                 .deltas = deltas.data(),
                 .rope = rope_of(shape, frequencies),
                 .out = keys.view()});
  }
  for (int64_t token = 0; token < 4; ++token) {
    const oracle::Row row = before.row(token, 0);
    const oracle::Row moved =
        oracle::rotate(row, frequencies, RopePairing::neox, sum[static_cast<size_t>(token)]);
    // A hundred roundings in random directions: ten times one's error, and then some.
    EXPECT_TRUE(is_near(keys.row(token, 0), moved, 15.0 * largest(row), DataType::float32));
  }
}

TEST_P(RotateKeys, ThreadsDoNotMatter) {
  constexpr int64_t kTokens = 3000;
  RowsBuffer keys(DataType::float32, kTokens, 2, 112, RowsOrder::packed);
  keys.fill_random(1);
  const Case shape = case_of(1, 56, RopePairing::interleaved);
  const std::vector<double> frequencies = shape.frequencies();
  const std::vector<int64_t> deltas = shape.deltas(kTokens);
  RowsBuffer first(DataType::float32, kTokens, 2, 112, RowsOrder::packed);
  for (const int threads : {1, 2, 3, 7}) {
    omp_set_num_threads(threads);
    const RowsBuffer out(DataType::float32, kTokens, 2, 112, RowsOrder::packed);
    rotate_keys({.keys = keys.view(),
                 .deltas = deltas.data(),
                 .rope = rope_of(shape, frequencies),
                 .out = out.view()});
    if (threads == 1) first = out;
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t d = 0; d < 112; ++d) {
        ASSERT_EQ(out.bits(token, 1, d), first.bits(token, 1, d));
      }
    }
  }
}

}  // namespace
}  // namespace phasekv
