// push_queries: the right rows in the right entries, every bit, and nothing else.
#include "phasekv/ops/push_queries.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "buffers.h"
#include "cases.h"
#include "compare.h"
#include "implementations.h"

namespace phasekv {
namespace {

class PushQueries : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(PushQueries);

TEST_P(PushQueries, EveryCase) {
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    RowsBuffer query(shape.dtype, shape.tokens + 2, shape.heads, shape.head_size, shape.rows_order);
    const bool converts = shape.dtype != shape.other_dtype;
    if (converts) {
      query.fill_random(shape.seed);
    } else {
      query.fill_random_bits(shape.seed);
    }
    const std::vector<int64_t> rows = shape.rows(shape.tokens, shape.tokens + 2);
    std::vector<int64_t> entries(static_cast<size_t>(shape.tokens + 3));
    std::iota(entries.begin(), entries.end(), 0);
    std::shuffle(entries.begin(), entries.end(), std::mt19937(shape.seed));
    const RowsBuffer buffer(shape.other_dtype, shape.tokens + 3, shape.heads, shape.head_size,
                            RowsOrder::padded);
    push_queries({.query = query.view(),
                  .rows = rows.data(),
                  .entries = entries.data(),
                  .count = shape.tokens,
                  .buffer = buffer.view()});
    for (size_t i = 0; i < entries.size(); ++i) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        if (i < rows.size() && converts) {
          const oracle::Row expected = query.row(rows[i], head);
          ASSERT_TRUE(is_near(buffer.row(entries[i], head), expected, 0.0, shape.other_dtype));
        }
        for (int64_t d = 0; d < shape.head_size; ++d) {
          const uint32_t bits = buffer.bits(entries[i], head, d);
          if (i >= rows.size()) {
            ASSERT_EQ(bits, poison(shape.other_dtype));
          } else if (!converts) {
            ASSERT_EQ(bits, query.bits(rows[i], head, d));
          }
        }
      }
    }
    EXPECT_TRUE(buffer.gaps_are_poisoned());
  }
}

}  // namespace
}  // namespace phasekv
