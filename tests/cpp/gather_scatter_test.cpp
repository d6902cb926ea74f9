// gather_blocks and scatter_blocks move every bit to where the oracle's formulas say it belongs.
#include "phasekv/ops/gather_scatter.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <vector>

#include "buffers.h"
#include "cases.h"
#include "implementations.h"

namespace phasekv {
namespace {

using oracle::Half;

class GatherScatter : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(GatherScatter);

CacheBuffer cache_of(const Case& shape) {
  return CacheBuffer(shape.layout, shape.dtype, shape.num_blocks(), shape.heads, shape.block_size,
                     shape.head_size);
}

RowsBuffer rows_of(const Case& shape) {
  return RowsBuffer(shape.dtype, shape.tokens, shape.heads, shape.head_size, shape.rows_order);
}

void expect_same(const CacheBuffer& cache, Half half, const std::vector<int64_t>& slots,
                 const RowsBuffer& rows) {
  int64_t different = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == kPaddingSlot) continue;
    for (int64_t head = 0; head < rows.view().heads; ++head) {
      for (int64_t d = 0; d < rows.view().head_size; ++d) {
        const auto token = static_cast<int64_t>(i);
        if (cache.bits(half, slots[i], head, d) != rows.bits(token, head, d)) ++different;
      }
    }
  }
  EXPECT_EQ(different, 0);
}

TEST_P(GatherScatter, ScatterWritesTheSlotsAndNothingElse) {
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    for (const Half half : {Half::key, Half::value}) {
      RowsBuffer rows = rows_of(shape);
      rows.fill_random_bits(shape.seed);
      CacheBuffer cache = cache_of(shape);
      const std::vector<int64_t> slots = shape.slots();
      scatter_blocks({.rows = rows.view(), .slots = slots.data(), .blocks = cache.view(half)});
      expect_same(cache, half, slots, rows);
      int64_t written = 0;
      for (const int64_t slot : slots) written += slot == kPaddingSlot ? 0 : 1;
      EXPECT_EQ(cache.elements() - cache.poisoned(), written * shape.heads * shape.head_size);
    }
  }
}

TEST_P(GatherScatter, GatherReadsTheSlotsAndNothingElse) {
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    const Half half = shape.seed % 2 == 0 ? Half::key : Half::value;
    RowsBuffer source = rows_of(shape);
    source.fill_random_bits(shape.seed);
    CacheBuffer cache = cache_of(shape);
    const std::vector<int64_t> slots = shape.slots_without_padding();
    for (int64_t i = 0; i < shape.tokens; ++i) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        for (int64_t d = 0; d < shape.head_size; ++d) {
          cache.set_bits(half, slots[static_cast<size_t>(i)], head, d, source.bits(i, head, d));
        }
      }
    }
    const RowsBuffer rows = rows_of(shape);
    gather_blocks({.blocks = cache.view(half), .slots = slots.data(), .rows = rows.view()});
    expect_same(cache, half, slots, rows);
    EXPECT_TRUE(rows.gaps_are_poisoned());
  }
}

// As much as goes past the caches.
TEST_P(GatherScatter, ThreadsDoNotMatter) {
  constexpr int64_t kTokens = 3000;
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < kTokens; ++i) slots.push_back(i + 7);
  for (const char* layout : {"vec", "rows"}) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      RowsBuffer rows(dtype, kTokens, 3, 80, RowsOrder::packed);
      rows.fill_random_bits(1);
      for (const int threads : {1, 2, 3, 7}) {
        omp_set_num_threads(threads);
        CacheBuffer cache(layout, dtype, 96, 3, 32, 80);
        const PagedView& blocks = cache.view(Half::key);
        scatter_blocks({.rows = rows.view(), .slots = slots.data(), .blocks = blocks});
        expect_same(cache, Half::key, slots, rows);
        const RowsBuffer back(dtype, kTokens, 3, 80, RowsOrder::packed);
        gather_blocks({.blocks = blocks, .slots = slots.data(), .rows = back.view()});
        expect_same(cache, Half::key, slots, back);
      }
    }
  }
}

}  // namespace
}  // namespace phasekv
