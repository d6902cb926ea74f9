// mean_residual against the oracle's mean.
#include "phasekv/ops/mean_residual.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "buffers.h"
#include "cases.h"
#include "compare.h"
#include "implementations.h"
#include "oracle/residuals.h"

namespace phasekv {
namespace {

class MeanResidual : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(MeanResidual);

// Which of the two is rotated first.
struct Moves {
  bool fresh;
  bool cached;
};

void check(const Case& shape, Moves moves) {
  const int64_t probes = shape.tokens;
  RowsBuffer fresh(shape.other_dtype, probes + 3, shape.heads, shape.head_size, shape.rows_order);
  RowsBuffer cached(shape.dtype, probes + 1, shape.heads, shape.head_size, RowsOrder::padded);
  fresh.fill_random(shape.seed);
  cached.fill_random(shape.seed + 1);
  const std::vector<int64_t> fresh_rows = shape.rows(probes, probes + 3);
  const std::vector<int64_t> cached_rows = shape.rows(probes, probes + 1);
  const std::vector<int64_t> starts = shape.segment_starts();
  const std::vector<int64_t> deltas = shape.deltas(probes);
  std::vector<int64_t> back;
  for (const int64_t delta : deltas) back.push_back(-delta);
  const std::vector<double> frequencies = shape.frequencies();
  const auto segments = static_cast<int64_t>(starts.size()) - 1;
  std::vector<float> out(static_cast<size_t>(segments * shape.heads * shape.head_size), NAN);
  MeanResidualParams params;
  params.fresh = fresh.view();
  params.cached = cached.view();
  params.fresh_rows = fresh_rows.data();
  params.cached_rows = cached_rows.data();
  params.segment_starts = starts.data();
  params.num_segments = segments;
  if (moves.fresh) params.fresh_deltas = back.data();
  if (moves.cached) params.cached_deltas = deltas.data();
  if (moves.fresh || moves.cached) {
    params.rope = {.frequencies = frequencies.data(),
                   .rotary_dim = shape.rotary_dim,
                   .pairing = shape.pairing};
  }
  params.out = out.data();
  mean_residual(params);

  const auto moved = [&](const oracle::Row& row, bool moves_it, int64_t delta) {
    return moves_it ? oracle::rotate(row, frequencies, shape.pairing, delta) : row;
  };
  for (int64_t s = 0; s < segments; ++s) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      std::vector<std::pair<oracle::Row, oracle::Row>> pairs;
      double magnitude = 0.0;
      for (int64_t i = starts[static_cast<size_t>(s)]; i < starts[static_cast<size_t>(s) + 1];
           ++i) {
        const auto probe = static_cast<size_t>(i);
        pairs.emplace_back(
            moved(fresh.row(fresh_rows[probe], head), moves.fresh, back[probe]),
            moved(cached.row(cached_rows[probe], head), moves.cached, deltas[probe]));
        magnitude += largest(pairs.back().first) + largest(pairs.back().second);
      }
      const float* row = out.data() + (s * shape.heads + head) * shape.head_size;
      ASSERT_TRUE(is_near(oracle::Row(row, row + shape.head_size),
                          oracle::mean_residual(pairs, shape.head_size), magnitude,
                          DataType::float32))
          << "segment " << s << " head " << head;
    }
  }
}

TEST_P(MeanResidual, EveryCase) {
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    check(shape, {.fresh = shape.seed % 2 == 0, .cached = shape.seed % 3 == 0});
    if (HasFatalFailure()) return;
  }
}

TEST_P(MeanResidual, SegmentsWithoutProbesGiveZeros) {
  RowsBuffer rows(DataType::float32, 1, 1, 40, RowsOrder::packed);
  const std::vector<int64_t> starts = {0, 0, 0};
  std::vector<float> out(80, NAN);
  mean_residual({.fresh = rows.view(),
                 .cached = rows.view(),
                 .segment_starts = starts.data(),
                 .num_segments = 2,
                 .rope = {},
                 .out = out.data()});
  EXPECT_EQ(out, std::vector<float>(80, 0.0F));
}

TEST_P(MeanResidual, ThreadsDoNotMatter) {
  constexpr int64_t kProbes = 2000;
  RowsBuffer fresh(DataType::float32, kProbes, 2, 80, RowsOrder::packed);
  RowsBuffer cached(DataType::float32, kProbes, 2, 80, RowsOrder::packed);
  fresh.fill_random(1);
  cached.fill_random(2);
  Case shape;
  shape.seed = 3;
  shape.tokens = kProbes;
  shape.rotary_dim = 80;
  const std::vector<double> frequencies = shape.frequencies();
  const std::vector<int64_t> starts = shape.segment_starts();
  const std::vector<int64_t> rows = shape.rows(kProbes, kProbes);
  const std::vector<int64_t> deltas = shape.deltas(kProbes);
  const auto segments = static_cast<int64_t>(starts.size()) - 1;
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 7}) {
    omp_set_num_threads(threads);
    std::vector<float> out(static_cast<size_t>(segments * 160));
    mean_residual({.fresh = fresh.view(),
                   .cached = cached.view(),
                   .fresh_rows = rows.data(),
                   .cached_rows = rows.data(),
                   .segment_starts = starts.data(),
                   .num_segments = segments,
                   .cached_deltas = deltas.data(),
                   .rope = {.frequencies = frequencies.data(), .rotary_dim = 80},
                   .out = out.data()});
    if (threads == 1) first = out;
    EXPECT_EQ(std::memcmp(out.data(), first.data(), out.size() * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace phasekv
