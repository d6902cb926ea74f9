// expected_attention_score: one pass over the keys, some hundred at a time, for each of which the
// quadratic forms of all query heads of its KV head are taken; one over the values for their norms.
//
// Bound: head_size^2 FLOPs for each (query head, key), half of those of the whole matrix.
#include "phasekv/ops/expected_attention_score.h"

#include <omp.h>

#include <cmath>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/key_columns.h"
#include "cpu/key_directions.h"
#include "cpu/key_rows.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/query_expectation.h"
#include "cpu/scratch.h"
#include "cpu/unpack.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Columns that one thread works on at a time.
constexpr int64_t kPartColumns = 8 * kChunkTokens;

// What all threads see.
struct Shared {
  const Scratch& rotations;     // a part for each query
  const Scratch& expectations;  // one for each query head, as the rest
  const Scratch& rows;          // of a column each: logarithms, then weights
};

class Scorer {
 public:
  explicit Scorer(const ExpectedAttentionScoreParams& params)
      : params_(params),
        statistics_(params),
        group_(params.query.heads / params.key.num_heads),
        head_size_(params.key.head_size),
        lead_(KeyColumns::lead_of(params.first_token)) {}

  int64_t num_parts() const { return (lead_ + params_.tokens + kPartColumns - 1) / kPartColumns; }
  // In whole vectors.
  int64_t columns() const { return (lead_ + params_.tokens + kWidth - 1) / kWidth * kWidth; }

  int64_t floats_per_thread() const {
    return statistics_.floats_needed() + (head_size_ + kMicroRows) * kChunkTokens;
  }

  void set_memory(float* memory, const Shared& shared) {
    statistics_.set_memory(memory);
    keys_ = memory + statistics_.floats_needed();
    products_ = keys_ + head_size_ * kChunkTokens;
    shared_ = &shared;
  }

  // Step 1, of a query.
  void turn(int64_t query) const { find_rotation(params_, query, shared_->rotations.part(query)); }

  // Step 2, of a query head.
  void expect(int64_t query_head) {
    const auto rotation_of = [&](int64_t query) {
      return rotation_in(shared_->rotations.part(query), params_.rope);
    };
    statistics_.expect(query_head, rotation_of, expectation_of(query_head));
  }

  // Step 3, of the query heads of a KV head and a part of its columns.
  void evaluate(int64_t head, int64_t part) {
    for_each_chunk(params_.key, head, part, [&](const KeyChunk& chunk, int64_t /*skipped*/) {
      for (int64_t member = head * group_; member < (head + 1) * group_; ++member) {
        evaluate_chunk(expectation_of(member), chunk, shared_->rows.part(member) + chunk.begin);
      }
    });
  }

  // Step 4, of a query head: its part in the mean of the group's softmax.
  void soften(int64_t query_head) const {
    float* row = shared_->rows.part(query_head) + lead_;
    const int64_t head = query_head / group_;
    float largest = -INFINITY;
    for (int64_t i = 0; i < params_.tokens; ++i) {
      if (is_sink(head, i)) {
        row[i] = -INFINITY;
      } else if (row[i] > largest) {
        largest = row[i];
      }
    }
    // Where only sinks are, anything finite: no difference of infinities.
    const Vec base = broadcast(largest == -INFINITY ? 0.0F : largest);
    double sum = 0.0;
    for_lanes(0, params_.tokens, [&](auto lanes, int64_t i, int n) {
      store_lanes<lanes.kFull>(row + i, exp(load_lanes<lanes.kFull>(row + i, n) - base), n);
      sum += reduce_add(load_lanes<lanes.kFull>(row + i, n));  // zeros in lanes beyond
    });
    const double share = sum == 0.0 ? 0.0 : 1.0 / (static_cast<double>(group_) * sum);
    const Vec factor = broadcast(static_cast<float>(share));
    for_lanes(0, params_.tokens, [&](auto lanes, int64_t i, int n) {
      store_lanes<lanes.kFull>(row + i, factor * load_lanes<lanes.kFull>(row + i, n), n);
    });
  }

  // Step 5: the scores of a part.
  void finish(int64_t head, int64_t part) {
    float* scores = params_.scores + head * params_.tokens;
    const auto score = [&](int64_t i, float norm) {
      float weight = 0.0F;
      for (int64_t member = head * group_; member < (head + 1) * group_; ++member) {
        weight += shared_->rows.part(member)[lead_ + i];
      }
      scores[i] = weight * norm;
    };
    if (has_rows(params_.value)) {
      const int64_t begin = part * kPartColumns - lead_;
      const int64_t end = begin + kPartColumns;
      for_each_row(params_.value, params_.block_table, head, params_.first_token,
                   begin > 0 ? begin : 0, end < params_.tokens ? end : params_.tokens,
                   [&](int64_t i, const auto* value) {
                     score(i, std::sqrt(product(value, value, head_size_)));
                   });
      return;
    }
    for_each_chunk(params_.value, head, part, [&](const KeyChunk& chunk, int64_t skipped) {
      for (int64_t v = 0; v < chunk.columns; v += kWidth) {
        Vec squares = zero();
        for (int64_t d = 0; d < head_size_; ++d) {
          const Vec x = load(chunk.keys + d * chunk.stride + v);
          squares = fma(x, x, squares);
        }
        store(products_ + v, sqrt(squares));
      }
      for (int64_t i = skipped; i < chunk.columns; ++i) {
        score(chunk.begin - lead_ + i, products_[i]);
      }
    });
  }

 private:
  Expectation expectation_of(int64_t query_head) const {
    return Expectation::in(shared_->expectations.part(query_head), head_size_);
  }

  bool is_sink(int64_t head, int64_t key) const {
    const int64_t position =
        params_.positions == nullptr ? key : params_.positions[head * params_.tokens + key];
    return position < params_.sinks;
  }

  // visit(chunk, columns before the first key) for the chunks of a part, of keys or of values.
  template <typename Visit>
  void for_each_chunk(const PagedView& blocks, int64_t head, int64_t part, const Visit& visit) {
    const KeyColumns columns(blocks, params_.block_table, head, params_.first_token,
                             params_.tokens);
    const int64_t begin = part * kPartColumns;
    const int64_t end = begin + kPartColumns < columns.end() ? begin + kPartColumns : columns.end();
    columns.for_each_chunk(begin, end, keys_, visit);
  }

  void evaluate_chunk(const Expectation& expectation, const KeyChunk& chunk, float* z) {
    const int64_t vectors = (chunk.columns + kWidth - 1) / kWidth;
    for (int64_t v = 0; v < vectors; ++v) store(z + v * kWidth, zero());
    for (int64_t first = 0; first < head_size_; first += kMicroRows) {
      const float* keys = chunk.keys + first * chunk.stride;
      const int64_t depth = head_size_ - first;
      multiply_wide<kMicroRows, 1, kMicroRows, false>(expectation.tile(head_size_, first), keys,
                                                      chunk.stride, depth, vectors, products_,
                                                      kChunkTokens);
      const int64_t rows = depth < kMicroRows ? depth : kMicroRows;
      for (int64_t v = 0; v < vectors * kWidth; v += kWidth) {
        Vec sum = load(z + v);
        for (int64_t row = 0; row < rows; ++row) {
          const Vec factor =
              load(products_ + row * kChunkTokens + v) + broadcast(expectation.linear[first + row]);
          sum = fma(load(keys + row * chunk.stride + v), factor, sum);
        }
        store(z + v, sum);
      }
    }
  }

  const ExpectedAttentionScoreParams& params_;
  QueryStatistics statistics_;
  int64_t group_;
  int64_t head_size_;
  int64_t lead_;

  float* keys_ = nullptr;      // of a chunk that is not read in place
  float* products_ = nullptr;  // [kMicroRows][kChunkTokens]
  const Shared* shared_ = nullptr;
};

}  // namespace

void expected_attention_score(const ExpectedAttentionScoreParams& params) {
  const int64_t heads = params.key.num_heads;
  const int64_t query_heads = params.query.heads;
  const int64_t head_size = params.key.head_size;
  const Scorer prototype(params);
  const int64_t parts = prototype.num_parts();
  const int threads = threads_for_products(query_heads * params.tokens, head_size * head_size / 2);
  const Scratch memory(threads, prototype.floats_per_thread());
  const Scratch rotations(params.query.tokens, floats_of_rotation(params.rope));
  const Scratch expectations(query_heads, Expectation::floats(head_size));
  const Scratch rows(query_heads, prototype.columns());
  const Shared shared = {rotations, expectations, rows};
#pragma omp parallel num_threads(threads)
  {
    Scorer worker = prototype;
    worker.set_memory(memory.part(omp_get_thread_num()), shared);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < params.query.tokens; ++i) worker.turn(i);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < query_heads; ++i) worker.expect(i);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * parts; ++i) worker.evaluate(i / parts, i % parts);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < query_heads; ++i) worker.soften(i);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * parts; ++i) worker.finish(i / parts, i % parts);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
