// The logarithm of the expected exp(scale q.k) of queries to come, which are taken for normally
// distributed: a quadratic form in the key, with the mean and the covariance of past queries.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/product.h"
#include "cpu/rotation.h"
#include "cpu/rows.h"
#include "cpu/vector.h"
#include "phasekv/ops/expected_attention_score.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// linear.k + k^T quadratic k of one query head. Of the symmetric matrix only the upper half is
// there, with every element off the diagonal twice, in micro tiles: rows [first, first +
// kMicroRows) are [head_size - first][kMicroRows].
struct Expectation {
  float* linear;     // [head_size]
  float* quadratic;  // the tiles, one after another

  static int64_t floats(int64_t head_size) {
    return head_size + tile_begin(head_size, (head_size + kMicroRows - 1) / kMicroRows);
  }
  static Expectation in(float* memory, int64_t head_size) { return {memory, memory + head_size}; }

  // Of the rows from `first` on.
  float* tile(int64_t head_size, int64_t first) const {
    return quadratic + tile_begin(head_size, first / kMicroRows);
  }

 private:
  static int64_t tile_begin(int64_t head_size, int64_t tile) {
    return kMicroRows * (tile * head_size - kMicroRows * (tile * (tile - 1) / 2));
  }
};

// The rotation that takes a query from its position to the mean of the positions to come, in memory
// of so many floats.
inline int64_t floats_of_rotation(const RopeView& rope) { return 2 * rope.rotary_dim; }

inline Factors rotation_in(const float* memory, const RopeView& rope) {
  return {memory, memory + rope.rotary_dim};
}

// The mean of exp(i frequency t) over positions t that follow one another is a geometric sum: the
// rotation of the middle, shortened.
inline void find_rotation(const ExpectedAttentionScoreParams& params, int64_t query,
                          float* memory) {
  const RopeView& rope = params.rope;
  const auto horizon = static_cast<double>(params.horizon);
  const auto ahead = static_cast<double>(params.next_position - params.query_positions[query]);
  float* cosine = memory;
  float* sine = memory + rope.rotary_dim;
  for (int64_t i = 0; i < rope.rotary_dim / 2; ++i) {
    const double half = rope.frequencies[i] / 2.0;
    const double step = sin_cos(half).sin;
    const double length = step == 0.0 ? 1.0 : sin_cos(horizon * half).sin / (horizon * step);
    const SinCos middle = sin_cos(half * (2.0 * ahead + horizon - 1.0));
    cosine[i] = static_cast<float>(length * middle.cos);
    sine[i] = static_cast<float>(length * middle.sin);
  }
  lay_out_factors(rope, cosine, sine);
}

// Works on one query head after another, in the memory of one thread.
class QueryStatistics {
 public:
  explicit QueryStatistics(const ExpectedAttentionScoreParams& params)
      : params_(params),
        head_size_(params.key.head_size),
        // Tiles begin at any dimension, and whole vectors are read from there.
        stride_((head_size_ + 2 * kWidth - 1) / kWidth * kWidth) {}

  int64_t floats_needed() const {
    return params_.query.tokens * (stride_ + kMicroRows) + kMicroRows * stride_;
  }

  void set_memory(float* memory) {
    queries_ = memory;
    packed_ = queries_ + params_.query.tokens * stride_;
    products_ = packed_ + params_.query.tokens * kMicroRows;
  }

  // rotation_of(query) is what find_rotation found.
  template <typename RotationOf>
  void expect(int64_t query_head, const RotationOf& rotation_of, const Expectation& to) {
    const int64_t count = take_queries(query_head, rotation_of);
    const auto scale = static_cast<double>(params_.scale);
    const double share = 1.0 / static_cast<double>(count > 0 ? count : 1);
    subtract_mean(count, static_cast<float>(share), to.linear);
    for (int64_t d = 0; d < head_size_; ++d) to.linear[d] *= params_.scale;
    for (int64_t first = 0; first < head_size_; first += kMicroRows) {
      take_covariance(count, first, scale * scale / 2.0 * share, to.tile(head_size_, first));
    }
  }

 private:
  // Those that count, turned; returns their number.
  template <typename RotationOf>
  int64_t take_queries(int64_t query_head, const RotationOf& rotation_of) {
    int64_t count = 0;
    with_type(params_.query.dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      for (int64_t i = 0; i < params_.query.tokens; ++i) {
        if (params_.query_positions[i] < params_.sinks) continue;
        const ShiftedRow<T> row = {.in = row_of<const T>(params_.query, i, query_head),
                                   .factors = rotation_of(i)};
        write_row(row, params_.rope, head_size_, queries_ + count * stride_);
        ++count;
      }
    });
    return count;
  }

  void subtract_mean(int64_t count, float share, float* mean) {
    for_lanes(0, head_size_, [&](auto lanes, int64_t d, int n) {
      Vec sum = zero();
      for (int64_t i = 0; i < count; ++i) {
        sum = sum + load_lanes<lanes.kFull>(queries_ + i * stride_ + d, n);
      }
      const Vec middle = sum * broadcast(share);
      store_lanes<lanes.kFull>(mean + d, middle, n);
      for (int64_t i = 0; i < count; ++i) {
        float* query = queries_ + i * stride_ + d;
        store_lanes<lanes.kFull>(query, load_lanes<lanes.kFull>(query, n) - middle, n);
      }
    });
  }

  // The tile of the rows from `first` on.
  void take_covariance(int64_t count, int64_t first, double weight, float* tile) {
    const int64_t columns = head_size_ - first;
    const int64_t rows = columns < kMicroRows ? columns : kMicroRows;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t row = 0; row < kMicroRows; ++row) {
        packed_[i * kMicroRows + row] = row < rows ? queries_[i * stride_ + first + row] : 0.0F;
      }
    }
    multiply_wide<kMicroRows, 1, kMicroRows, false>(packed_, queries_ + first, stride_, count,
                                                    (columns + kWidth - 1) / kWidth, products_,
                                                    stride_);
    const auto once = static_cast<float>(weight);
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t row = 0; row < kMicroRows; ++row) {
        const float factor = row == column ? once : 2.0F * once;
        tile[column * kMicroRows + row] =
            row <= column ? factor * products_[row * stride_ + column] : 0.0F;
      }
    }
  }

  const ExpectedAttentionScoreParams& params_;
  int64_t head_size_;
  int64_t stride_;

  float* queries_ = nullptr;   // [queries][stride_] turned, then without their mean
  float* packed_ = nullptr;    // [queries][kMicroRows] of some dimensions
  float* products_ = nullptr;  // [kMicroRows][stride_]
};

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
