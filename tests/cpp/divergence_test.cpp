// divergence against a plain sum.
#include "phasekv/ops/divergence.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "buffers.h"
#include "cases.h"
#include "implementations.h"
#include "oracle/residuals.h"

namespace phasekv {
namespace {

class Divergence : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(Divergence);

TEST_P(Divergence, EveryCase) {
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    RowsBuffer fresh(shape.other_dtype, shape.tokens, shape.heads, shape.head_size,
                     RowsOrder::padded);
    RowsBuffer cached(shape.dtype, shape.tokens, shape.heads, shape.head_size, shape.rows_order);
    fresh.fill_random(shape.seed);
    cached.fill_random(shape.seed + 1);
    std::vector<float> out(static_cast<size_t>(shape.tokens), -1.0F);
    divergence({.fresh = fresh.view(), .cached = cached.view(), .out = out.data()});
    // A rounding per term, in either direction.
    const auto terms = static_cast<double>(shape.heads * shape.head_size);
    const double tolerance = 3e-6 * std::max(1.0, std::sqrt(terms / 2048));
    for (int64_t token = 0; token < shape.tokens; ++token) {
      const double expected = oracle::squared_distance(fresh, cached, token);
      ASSERT_NEAR(out[static_cast<size_t>(token)], expected, tolerance * expected);
    }
  }
}

TEST_P(Divergence, SameRowsAreAtDistanceZeroAndNotANumberIsNotHidden) {
  RowsBuffer rows(DataType::float32, 3, 2, 40, RowsOrder::packed);
  rows.fill_random(1);
  RowsBuffer other = rows;
  other.set_bits(1, 1, 39, 0x7FC00000U);
  other.set_bits(2, 0, 0, 0x7F800000U);
  std::vector<float> out(3, -1.0F);
  divergence({.fresh = rows.view(), .cached = rows.view(), .out = out.data()});
  EXPECT_EQ(out, std::vector<float>(3, 0.0F));
  divergence({.fresh = rows.view(), .cached = other.view(), .out = out.data()});
  EXPECT_EQ(out[0], 0.0F);
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_EQ(out[2], std::numeric_limits<float>::infinity());
}

TEST_P(Divergence, ThreadsDoNotMatter) {
  RowsBuffer fresh(DataType::float32, 3000, 2, 80, RowsOrder::packed);
  RowsBuffer cached(DataType::float32, 3000, 2, 80, RowsOrder::packed);
  fresh.fill_random(1);
  cached.fill_random(2);
  std::vector<float> first(3000);
  for (const int threads : {1, 2, 3, 7}) {
    omp_set_num_threads(threads);
    std::vector<float> out(3000);
    divergence({.fresh = fresh.view(), .cached = cached.view(), .out = out.data()});
    if (threads == 1) first = out;
    EXPECT_EQ(std::memcmp(out.data(), first.data(), 3000 * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace phasekv
