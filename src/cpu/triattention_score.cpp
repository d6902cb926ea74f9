// triattention_score: one pass over the keys, whose pairs' norms are taken on the way.
//
// Bound: reading the keys, as long as a KV head has few query heads.
#include "phasekv/ops/triattention_score.h"

#include <omp.h>

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/key_columns.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/scratch.h"
#include "cpu/unpack.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Columns that one thread scores at a time.
constexpr int64_t kPartColumns = 16 * kChunkTokens;

constexpr float kLeastDeviation = 1e-6F;

// NaN if either is.
float larger_of(float a, float b) { return a >= b || a != a ? a : b; }

class Scorer {
 public:
  explicit Scorer(const TriattentionScoreParams& params)
      : params_(params),
        group_(params.query_heads / params.key.num_heads),
        head_size_(params.key.head_size),
        pairs_(params.rotary_dim / 2),
        lead_(KeyColumns::lead_of(params.first_token)),
        row_stride_((lead_ + params.tokens + kWidth - 1) / kWidth * kWidth) {}

  int64_t num_parts() const { return (lead_ + params_.tokens + kPartColumns - 1) / kPartColumns; }
  int64_t row_stride() const { return row_stride_; }

  int64_t floats_per_thread() const {
    return (head_size_ + pairs_) * kChunkTokens + (head_size_ + pairs_) * group_;
  }

  // `rows` has a part for each query head.
  void set_memory(float* memory, const Scratch& rows) {
    keys_ = memory;
    norms_ = keys_ + head_size_ * kChunkTokens;
    query_ = norms_ + pairs_ * kChunkTokens;
    weights_ = query_ + head_size_ * group_;
    rows_ = &rows;
  }

  // The scores of the query heads of a KV head for one part of the columns.
  void score(int64_t head, int64_t part) {
    const KeyColumns keys(params_.key, params_.block_table, head, params_.first_token,
                          params_.tokens);
    take_query(head);
    const int64_t begin = part * kPartColumns;
    const int64_t end = begin + kPartColumns < keys.end() ? begin + kPartColumns : keys.end();
    keys.for_each_chunk(begin, end, keys_, [&](const KeyChunk& chunk, int64_t /*skipped*/) {
      take_norms(chunk);
      for (int64_t first = 0; first < group_; first += kMicroRows) {
        const int64_t rows = group_ - first < kMicroRows ? group_ - first : kMicroRows;
        float* scores = rows_->part(head * group_ + first) + chunk.begin;
        score_rows(rows, first, chunk, scores, rows_->part(1) - rows_->part(0));
      }
    });
  }

  void finish(int64_t head) const {
    float* out = params_.scores + head * params_.tokens;
    const float share = params_.group_mean ? 1.0F / static_cast<float>(group_) : 1.0F;
    for (int64_t i = 0; i < group_; ++i) {
      float* row = rows_->part(head * group_ + i) + lead_;
      if (params_.normalize) normalize(params_.tokens, row);
      for (int64_t j = 0; j < params_.tokens; ++j) {
        if (i == 0) {
          out[j] = share * row[j];
        } else {
          out[j] = params_.group_mean ? out[j] + share * row[j] : larger_of(out[j], row[j]);
        }
      }
    }
  }

 private:
  // Query heads become micro tiles, each [head_size][its heads], and so do the norm weights.
  void take_query(int64_t head) {
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t tile = i / kMicroRows * kMicroRows;
      const int64_t rows = group_ - tile < kMicroRows ? group_ - tile : kMicroRows;
      const float* query = params_.synthetic_query + (head * group_ + i) * head_size_;
      const float* weights = params_.norm_weights + (head * group_ + i) * pairs_;
      float* query_to = query_ + tile * head_size_ + (i - tile);
      float* weights_to = weights_ + tile * pairs_ + (i - tile);
      for (int64_t d = 0; d < head_size_; ++d) query_to[d * rows] = query[d];
      for (int64_t f = 0; f < pairs_; ++f) weights_to[f * rows] = weights[f];
    }
  }

  void take_norms(const KeyChunk& chunk) {
    const bool is_neox = params_.pairing == RopePairing::neox;
    for (int64_t f = 0; f < pairs_; ++f) {
      const float* first = chunk.keys + (is_neox ? f : 2 * f) * chunk.stride;
      const float* second = first + (is_neox ? pairs_ : 1) * chunk.stride;
      for (int64_t i = 0; i < chunk.columns; i += kWidth) {
        const Vec x = load(first + i);
        const Vec y = load(second + i);
        store(norms_ + f * kChunkTokens + i, sqrt(fma(x, x, y * y)));
      }
    }
  }

  // scores[row][column] for `rows` query heads from `first` on.
  template <int kRows = kMicroRows>
  void score_rows(int64_t rows, int64_t first, const KeyChunk& chunk, float* scores,
                  int64_t stride) const {
    if (rows == kRows) {
      const int64_t vectors = (chunk.columns + kWidth - 1) / kWidth;
      multiply_wide<kRows, 1, kRows, false>(query_ + first * head_size_, chunk.keys, chunk.stride,
                                            head_size_, vectors, scores, stride);
      return multiply_wide<kRows, 1, kRows, true>(weights_ + first * pairs_, norms_, kChunkTokens,
                                                  pairs_, vectors, scores, stride);
    }
    if constexpr (kRows > 1) score_rows<kRows - 1>(rows, first, chunk, scores, stride);
  }

  static void normalize(int64_t count, float* row) {
    const float share = 1.0F / static_cast<float>(count);
    float sum = 0.0F;
    for_lanes(0, count, [&](auto lanes, int64_t i, int n) {
      sum += reduce_add(load_lanes<lanes.kFull>(row + i, n));
    });
    const float mean = share * sum;
    float squares = 0.0F;
    for_lanes(0, count, [&](auto lanes, int64_t i, int n) {
      const Vec x = load_lanes<lanes.kFull>(row + i, n) - broadcast(mean);
      store_lanes<lanes.kFull>(row + i, x, n);
      const Vec kept = load_lanes<lanes.kFull>(row + i, n);  // zeros in lanes beyond
      squares += reduce_add(kept * kept);
    });
    const float deviation = first_lane(sqrt(broadcast(share * squares)));
    const float factor = 1.0F / (deviation < kLeastDeviation ? kLeastDeviation : deviation);
    for (int64_t i = 0; i < count; ++i) row[i] *= factor;
  }

  const TriattentionScoreParams& params_;
  int64_t group_;
  int64_t head_size_;
  int64_t pairs_;
  int64_t lead_;
  int64_t row_stride_;

  float* keys_ = nullptr;     // of a chunk that is not read in place
  float* norms_ = nullptr;    // [pairs][kChunkTokens]
  float* query_ = nullptr;    // of one KV head
  float* weights_ = nullptr;  // of one KV head
  const Scratch* rows_ = nullptr;
};

}  // namespace

void triattention_score(const TriattentionScoreParams& params) {
  const int64_t heads = params.key.num_heads;
  const Scorer prototype(params);
  const int64_t parts = prototype.num_parts();
  const int threads = threads_for(heads * params.tokens * params.key.head_size * int64_t{4});
  const Scratch memory(threads, prototype.floats_per_thread());
  const Scratch rows(params.query_heads, prototype.row_stride());
#pragma omp parallel num_threads(threads)
  {
    Scorer worker = prototype;
    worker.set_memory(memory.part(omp_get_thread_num()), rows);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * parts; ++i) worker.score(i / parts, i % parts);
#pragma omp for schedule(dynamic, 1)
    for (int64_t head = 0; head < heads; ++head) worker.finish(head);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
