// apply_shift against the oracle's rotation and sum, in every layout.
#include "phasekv/ops/apply_shift.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "buffers.h"
#include "cases.h"
#include "compare.h"
#include "implementations.h"

namespace phasekv {
namespace {

using oracle::Half;

class ApplyShift : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(ApplyShift);

// Which of the optional arguments are given.
struct Given {
  bool deltas;
  bool mean;
  bool weights;
  bool mean_deltas;
};

struct Problem {
  explicit Problem(const Case& of)
      : shape(of),
        cached(of.other_dtype, of.tokens + 2, of.heads, of.head_size, of.rows_order),
        cached_rows(of.rows(of.tokens, of.tokens + 2)),
        slots(of.slots()),
        starts(of.segment_starts()),
        deltas(of.deltas(segments())),
        mean_deltas(of.deltas(of.tokens)),
        frequencies(of.frequencies()) {
    cached.fill_random(of.seed);
    std::mt19937 generator(of.seed + 2);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < segments() * of.heads * of.head_size; ++i) {
      mean.push_back(normal(generator));
    }
    for (int64_t i = 0; i < of.tokens; ++i) {
      weights.push_back(std::fabs(normal(generator)));
    }
    std::reverse(mean_deltas.begin(), mean_deltas.end());
  }

  int64_t segments() const { return static_cast<int64_t>(starts.size()) - 1; }

  ApplyShiftParams params(Given given, const CacheBuffer& cache, Half half) const {
    ApplyShiftParams params;
    params.cached = cached.view();
    params.cached_rows = cached_rows.data();
    params.slots = slots.data();
    params.segment_starts = starts.data();
    params.num_segments = segments();
    if (given.deltas) params.deltas = deltas.data();
    if (given.mean) params.mean = mean.data();
    if (given.weights) params.weights = weights.data();
    if (given.mean_deltas) params.mean_deltas = mean_deltas.data();
    if (given.deltas || given.mean_deltas) {
      params.rope = {.frequencies = frequencies.data(),
                     .rotary_dim = shape.rotary_dim,
                     .pairing = shape.pairing};
    }
    params.blocks = cache.view(half);
    return params;
  }

  CacheBuffer cache() const {
    return CacheBuffer(shape.layout, shape.dtype, shape.num_blocks(), shape.heads, shape.block_size,
                       shape.head_size);
  }

  oracle::Row mean_of(size_t segment, int64_t head) const {
    const float* row =
        mean.data() + (static_cast<int64_t>(segment) * shape.heads + head) * shape.head_size;
    return oracle::Row(row, row + shape.head_size);
  }

  oracle::Row rotated(const oracle::Row& row, int64_t delta) const {
    return oracle::rotate(row, frequencies, shape.pairing, delta);
  }

  void check(Given given, const CacheBuffer& written, Half half) const {
    int64_t tokens_written = 0;
    for (size_t s = 0; s + 1 < starts.size(); ++s) {
      for (auto i = static_cast<size_t>(starts[s]); i < static_cast<size_t>(starts[s + 1]); ++i) {
        if (slots[i] == kPaddingSlot) continue;
        ++tokens_written;
        for (int64_t head = 0; head < shape.heads; ++head) {
          oracle::Row row = cached.row(cached_rows[i], head);
          double magnitude = 2.0 * largest(row);
          if (given.deltas) row = rotated(row, deltas[s]);
          if (given.mean) {
            oracle::Row shift = mean_of(s, head);
            if (given.mean_deltas) shift = rotated(shift, mean_deltas[i]);
            const double weight = given.weights ? weights[i] : 1.0;
            for (size_t d = 0; d < row.size(); ++d) row[d] += weight * shift[d];
            magnitude += 2.0 * weight * largest(shift);
          }
          ASSERT_TRUE(is_near(written.row(half, slots[i], head), row, magnitude, shape.dtype))
              << "token " << i << " of segment " << s << ", head " << head;
        }
      }
    }
    EXPECT_EQ(written.elements() - written.poisoned(),
              tokens_written * shape.heads * shape.head_size);
  }

  Case shape;
  RowsBuffer cached;
  std::vector<int64_t> cached_rows;
  std::vector<int64_t> slots;
  std::vector<int64_t> starts;
  std::vector<int64_t> deltas;
  std::vector<int64_t> mean_deltas;
  std::vector<double> frequencies;
  std::vector<float> mean;
  std::vector<float> weights;
};

TEST_P(ApplyShift, EveryCase) {
  constexpr Given kGiven[] = {
      {.deltas = true, .mean = true, .weights = true, .mean_deltas = false},
      {.deltas = false, .mean = true, .weights = true, .mean_deltas = false},
      {.deltas = true, .mean = true, .weights = true, .mean_deltas = true},
      {.deltas = true, .mean = false, .weights = false, .mean_deltas = false},
      {.deltas = false, .mean = false, .weights = false, .mean_deltas = false},
      {.deltas = true, .mean = true, .weights = false, .mean_deltas = false},
  };
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    const Problem problem(shape);
    for (const Half half : {Half::key, Half::value}) {
      const Given given = kGiven[(shape.seed / 10 + shape.seed + (half == Half::key ? 0 : 3)) % 6];
      const CacheBuffer cache = problem.cache();
      apply_shift(problem.params(given, cache, half));
      problem.check(given, cache, half);
      if (HasFatalFailure()) return;
    }
  }
}

// So much that it goes past the caches.
Case long_case(const char* layout) {
  Case shape;
  shape.seed = 12;
  shape.layout = layout;
  shape.tokens = 1700;
  shape.heads = 2;
  shape.head_size = 80;
  shape.block_size = 32;
  shape.rotary_dim = 80;
  return shape;
}

constexpr Given kEverything = {.deltas = true, .mean = true, .weights = true, .mean_deltas = true};

TEST_P(ApplyShift, ThreadsDoNotMatter) {
  for (const char* layout : {"vec", "rows"}) {
    const Problem problem(long_case(layout));
    CacheBuffer first = problem.cache();
    for (const int threads : {1, 2, 3, 7}) {
      omp_set_num_threads(threads);
      const CacheBuffer cache = problem.cache();
      apply_shift(problem.params(kEverything, cache, Half::key));
      if (threads == 1) first = cache;
      for (const int64_t slot : problem.slots) {
        for (int64_t d = 0; d < 80; ++d) {
          ASSERT_EQ(cache.bits(Half::key, slot, 1, d), first.bits(Half::key, slot, 1, d));
        }
      }
    }
  }
}

TEST_P(ApplyShift, BlockIdsDoNotMatter) {
  const Problem problem(long_case("vec"));
  const CacheBuffer before = problem.cache();
  apply_shift(problem.params(kEverything, before, Half::key));
  std::vector<int64_t> new_ids(static_cast<size_t>(problem.shape.num_blocks()));
  std::iota(new_ids.begin(), new_ids.end(), 0);
  std::shuffle(new_ids.begin(), new_ids.end(), std::mt19937(3));
  Problem permuted = problem;
  for (int64_t& slot : permuted.slots) {
    slot = new_ids[static_cast<size_t>(slot / 32)] * 32 + slot % 32;
  }
  const CacheBuffer after = problem.cache();
  apply_shift(permuted.params(kEverything, after, Half::key));
  for (size_t i = 0; i < problem.slots.size(); ++i) {
    for (int64_t d = 0; d < 80; ++d) {
      ASSERT_EQ(after.bits(Half::key, permuted.slots[i], 0, d),
                before.bits(Half::key, problem.slots[i], 0, d));
    }
  }
}

TEST_P(ApplyShift, NoShiftOf16BitsKeepsEveryNumber) {
  for (const char* layout : {"vec", "rows"}) {
    Case shape = long_case(layout);
    shape.dtype = shape.other_dtype = DataType::bfloat16;
    shape.tokens *= 2;
    const Problem problem(shape);
    const CacheBuffer cache = problem.cache();
    apply_shift(problem.params({}, cache, Half::key));
    for (size_t i = 0; i < problem.slots.size(); ++i) {
      for (int64_t d = 0; d < 80; ++d) {
        ASSERT_EQ(cache.bits(Half::key, problem.slots[i], 1, d),
                  problem.cached.bits(problem.cached_rows[i], 1, d));
      }
    }
  }
}

TEST_P(ApplyShift, NoShiftKeepsEveryBit) {
  for (const char* layout : {"vec", "rows"}) {
    Case shape = long_case(layout);
    Problem problem(shape);
    problem.cached.fill_random_bits(4);
    std::fill(problem.deltas.begin(), problem.deltas.end(), 0);
    const CacheBuffer cache = problem.cache();
    apply_shift(problem.params(
        {.deltas = true, .mean = false, .weights = false, .mean_deltas = false}, cache, Half::key));
    for (size_t i = 0; i < problem.slots.size(); ++i) {
      for (int64_t d = 0; d < 80; ++d) {
        ASSERT_EQ(cache.bits(Half::key, problem.slots[i], 1, d),
                  problem.cached.bits(problem.cached_rows[i], 1, d));
      }
    }
  }
}

}  // namespace
}  // namespace phasekv
