// keydiff_score: two passes over the keys, some hundred at a time, since a score needs the mean.
//
// Bound: reading the keys twice.
#include "phasekv/ops/keydiff_score.h"

#include <omp.h>

#include <cmath>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/key_columns.h"
#include "cpu/key_directions.h"
#include "cpu/key_rows.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/scratch.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Columns that one thread works on at a time; sums are added up in their order.
constexpr int64_t kPartColumns = 8 * kChunkTokens;

class Directions {
 public:
  explicit Directions(const KeydiffScoreParams& params)
      : params_(params),
        head_size_(params.key.head_size),
        by_rows_(has_rows(params.key)),
        lead_(KeyColumns::lead_of(params.first_token)),
        columns_((lead_ + params.tokens + kWidth - 1) / kWidth * kWidth) {}

  int64_t num_parts() const { return (lead_ + params_.tokens + kPartColumns - 1) / kPartColumns; }
  int64_t columns() const { return columns_; }
  int64_t floats_per_thread() const { return (head_size_ + 1) * kChunkTokens; }

  // `inverse_norms` has a part for each KV head, `sums` one for each part of each.
  void set_memory(float* memory, const Scratch& inverse_norms, const Scratch& sums) {
    keys_ = memory;
    products_ = keys_ + head_size_ * kChunkTokens;
    inverse_norms_ = &inverse_norms;
    sums_ = &sums;
  }

  // Step 1: norms, and the sum of the keys of unit length of a part.
  void measure(int64_t head, int64_t part) {
    float* sum = sums_->part(head * num_parts() + part);
    for (int64_t d = 0; d < head_size_; ++d) sum[d] = 0.0F;
    if (by_rows_) {
      for_each_row_of(head, part, [&](int64_t i, const auto* row) {
        inverse_norms_->part(head)[lead_ + i] = add_direction(row, head_size_, sum);
      });
      return;
    }
    for_each_chunk(head, part, [&](const KeyChunk& chunk, int64_t skipped) {
      add_directions(chunk, skipped, head_size_, inverse_norms_->part(head) + chunk.begin, sum);
    });
  }

  // Step 2: what every key is multiplied with, in the place of the first part's sum.
  void turn_mean(int64_t head) {
    float* sum = sums_->part(head * num_parts());
    for (int64_t part = 1; part < num_parts(); ++part) {
      const float* other = sums_->part(head * num_parts() + part);
      for (int64_t d = 0; d < head_size_; ++d) sum[d] += other[d];
    }
    float squares = 0.0F;
    for (int64_t d = 0; d < head_size_; ++d) squares += sum[d] * sum[d];
    const float factor = -1.0F / (std::sqrt(squares) + kNormAddend);
    for (int64_t d = 0; d < head_size_; ++d) sum[d] *= factor;
  }

  // Step 3: the scores of a part.
  void score(int64_t head, int64_t part) {
    const float* direction = sums_->part(head * num_parts());
    if (by_rows_) {
      const float* inverse_norm = inverse_norms_->part(head) + lead_;
      float* scores = params_.scores + head * params_.tokens;
      for_each_row_of(head, part, [&](int64_t i, const auto* row) {
        scores[i] = product(row, direction, head_size_) * inverse_norm[i];
      });
      return;
    }
    for_each_chunk(head, part, [&](const KeyChunk& chunk, int64_t skipped) {
      multiply_wide<1, 1, 1, false>(direction, chunk.keys, chunk.stride, head_size_,
                                    (chunk.columns + kWidth - 1) / kWidth, products_, kChunkTokens);
      const float* inverse_norm = inverse_norms_->part(head) + chunk.begin;
      float* scores = params_.scores + head * params_.tokens + chunk.begin - lead_;
      for (int64_t i = skipped; i < chunk.columns; ++i) scores[i] = products_[i] * inverse_norm[i];
    });
  }

 private:
  // visit(chunk, columns before the first key) for the chunks of a part.
  template <typename Visit>
  void for_each_chunk(int64_t head, int64_t part, const Visit& visit) {
    const KeyColumns keys(params_.key, params_.block_table, head, params_.first_token,
                          params_.tokens);
    const int64_t begin = part * kPartColumns;
    const int64_t end = begin + kPartColumns < keys.end() ? begin + kPartColumns : keys.end();
    keys.for_each_chunk(begin, end, keys_, visit);
  }

  // visit(key, row) for the keys of a part.
  template <typename Visit>
  void for_each_row_of(int64_t head, int64_t part, const Visit& visit) {
    const int64_t begin = part * kPartColumns - lead_;
    const int64_t end = begin + kPartColumns;
    for_each_row(params_.key, params_.block_table, head, params_.first_token, begin > 0 ? begin : 0,
                 end < params_.tokens ? end : params_.tokens, visit);
  }

  const KeydiffScoreParams& params_;
  int64_t head_size_;
  bool by_rows_;  // else by columns: transposed keys, or such that must be unpacked
  int64_t lead_;
  int64_t columns_;

  float* keys_ = nullptr;      // of a chunk that is not read in place
  float* products_ = nullptr;  // [kChunkTokens]
  const Scratch* inverse_norms_ = nullptr;
  const Scratch* sums_ = nullptr;
};

}  // namespace

void keydiff_score(const KeydiffScoreParams& params) {
  const int64_t heads = params.key.num_heads;
  const Directions prototype(params);
  const int64_t parts = prototype.num_parts();
  const int threads = threads_for(heads * params.tokens * params.key.head_size * int64_t{4});
  const Scratch memory(threads, prototype.floats_per_thread());
  const Scratch inverse_norms(heads, prototype.columns());
  const Scratch sums(heads * parts, params.key.head_size);
#pragma omp parallel num_threads(threads)
  {
    Directions worker = prototype;
    worker.set_memory(memory.part(omp_get_thread_num()), inverse_norms, sums);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * parts; ++i) worker.measure(i / parts, i % parts);
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; ++head) worker.turn_mean(head);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * parts; ++i) worker.score(i / parts, i % parts);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
