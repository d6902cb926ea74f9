// The attention that a tile of queries pays to the keys of one KV head, summed over the queries:
// the common part of score_keys and accumulate_attention.
//
// The weights of a tile are kept, relative to the maximum of the time they were computed at, until
// the sums of their rows are known. So a key is multiplied with a query once, and one exponential
// is taken of a score.
//
// Bound: 2 * head_size FLOPs for each (query head, attended key), at the processor's float32 FMA
// rate. At head size 64 the exponentials cost about a quarter of that again.
#pragma once

#include <omp.h>

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/key_columns.h"
#include "cpu/product.h"
#include "cpu/rows.h"
#include "cpu/running_softmax.h"
#include "cpu/scratch.h"
#include "cpu/unpack.h"
#include "cpu/vector.h"
#include "ops/attention_mass_plan.h"
#include "phasekv/ops/score_keys.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

struct MassProblem {
  const RowsView& query;
  const PagedView& key;
  const int32_t* block_table;
  int64_t first_token;
  int64_t tokens;  // that may be attended
  GroupReduction reduction;
  float scale;

  int64_t group() const { return query.heads / key.num_heads; }
  int64_t lead() const { return KeyColumns::lead_of(first_token); }
  // Columns of the keys in whole vectors.
  int64_t columns() const { return (lead() + tokens + kWidth - 1) / kWidth * kWidth; }
};

// Works on one tile after another, in the memory of one thread. A "vector" below is a query head of
// a query; a "row" is what a softmax is taken of: a vector, or all vectors of a query where they
// are reduced before.
class AttentionMass {
 public:
  AttentionMass(const MassProblem& problem, const AttentionMassPlan& plan)
      : problem_(problem),
        plan_(plan),
        group_(problem.group()),
        rows_per_query_(problem.reduction == GroupReduction::max_logit ? 1 : group_),
        head_size_(problem.key.head_size),
        most_vectors_(plan.max_queries_per_tile() * group_),
        most_rows_(plan.max_queries_per_tile() * rows_per_query_),
        most_chunks_(KeyColumns::most_chunks(problem.key, problem.first_token, problem.tokens)),
        weights_stride_(stride_for(problem.columns())) {}

  // For set_memory.
  int64_t floats_needed() const {
    return lines(most_vectors_ * head_size_) + lines(head_size_ * kChunkTokens) +
           lines(most_vectors_ * kChunkTokens) + lines(most_rows_ * weights_stride_) +
           lines(most_rows_ * kWidth) + lines(most_rows_) * (most_chunks_ + 3) +
           lines(2 * (most_chunks_ + 1));
  }

  void set_memory(float* memory) {
    query_ = take(memory, most_vectors_ * head_size_);
    keys_ = take(memory, head_size_ * kChunkTokens);
    scores_ = take(memory, most_vectors_ * kChunkTokens);
    weights_ = take(memory, most_rows_ * weights_stride_);
    sums_ = take(memory, most_rows_ * kWidth);
    maximum_ = take(memory, most_rows_);
    share_ = take(memory, most_rows_);
    factors_ = take(memory, most_rows_);
    chunk_maxima_ = take(memory, lines(most_rows_) * most_chunks_);
    chunk_begins_ = reinterpret_cast<int64_t*>(take(memory, 2 * (most_chunks_ + 1)));
  }

  // mass[column] = the sum over the tile's queries of what the heads of the group make of it;
  // [problem.columns()].
  void run(const MassTile& tile, int64_t head, float* mass) {
    queries_ = plan_.queries() + tile.first_query;
    num_queries_ = tile.num_queries;
    num_rows_ = num_queries_ * rows_per_query_;
    take_queries(head);
    for (int64_t i = 0; i < num_rows_ * kWidth; ++i) sums_[i] = 0.0F;
    for (int64_t i = 0; i < num_rows_; ++i) maximum_[i] = kNoMaximum;
    for (int64_t i = 0; i < problem_.columns(); ++i) mass[i] = 0.0F;

    const KeyColumns keys(problem_.key, problem_.block_table, head, problem_.first_token,
                          queries_[num_queries_ - 1].limit);
    lead_ = keys.lead();
    int64_t chunks = 0;
    int64_t first_query = 0;  // those before it have attended all their keys
    for (int64_t column = 0; column < keys.end(); ++chunks) {
      const KeyChunk chunk = keys.chunk(column, keys_);
      while (end_of(first_query) <= column) ++first_query;
      weigh(chunk, first_query, keys);
      float* maxima = chunk_maxima_ + chunks * lines(most_rows_);
      for (int64_t i = 0; i < num_rows_; ++i) maxima[i] = maximum_[i];
      chunk_begins_[chunks] = column;
      column += chunk.columns;
    }
    chunk_begins_[chunks] = keys.end();
    sum_up(chunks, mass);
  }

 private:
  // Floats in whole cache lines.
  static int64_t lines(int64_t floats) { return (floats + 15) / 16 * 16; }

  // No multiple of 1 KiB, so that the rows of a micro tile do not compete for the same lines of a
  // cache.
  static int64_t stride_for(int64_t columns) {
    const int64_t stride = lines(columns);
    return stride % 256 == 0 ? stride + 16 : stride;
  }

  static float* take(float*& memory, int64_t floats) {
    float* const taken = memory;
    memory += lines(floats);
    return taken;
  }

  // The column after the last that a query attends.
  int64_t end_of(int64_t query) const { return lead_ + queries_[query].limit; }

  static int64_t vectors_in(int64_t columns) { return (columns + kWidth - 1) / kWidth; }

  // Scales the queries so that a score is a power of two, and packs them into micro tiles, each
  // [head_size][its vectors].
  void take_queries(int64_t head) {
    with_type(problem_.query.dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      for (int64_t query = 0; query < num_queries_; ++query) {
        bool is_finite = true;
        for (int64_t i = 0; i < group_; ++i) {
          const T* from = row_of<const T>(problem_.query, queries_[query].row, head * group_ + i);
          is_finite &= take_vector(from, query * group_ + i);
        }
        if (!is_finite) spoil(query);
      }
    });
  }

  // Says whether the vector is finite.
  template <typename T>
  bool take_vector(const T* from, int64_t vector) {
    constexpr float kLog2E = 1.44269504F;
    const Vec scale = broadcast(problem_.scale * kLog2E);
    float* to = packed(vector);
    const int64_t step = micro_tile_end(vector) - vector / kMicroRows * kMicroRows;
    Vec zero_if_finite = zero();
    for_lanes(0, head_size_, [&](auto lanes, int64_t d, int n) {
      const Vec x = load_lanes<lanes.kFull>(from + d, n) * scale;
      zero_if_finite = fma(zero(), x, zero_if_finite);
      float elements[kWidth];
      store(elements, x);
      for (int i = 0; i < n; ++i) to[(d + i) * step] = elements[i];
    });
    return reduce_add(zero_if_finite) == 0.0F;
  }

  // A maximum over the heads of a query could lose that one of them is not finite.
  void spoil(int64_t query) {
    for (int64_t i = 0; i < group_; ++i) *packed(query * group_ + i) = __builtin_nanf("");
  }

  float* packed(int64_t vector) const {
    const int64_t tile = vector / kMicroRows * kMicroRows;
    return query_ + tile * head_size_ + (vector - tile);
  }

  int64_t micro_tile_end(int64_t vector) const {
    const int64_t end = (vector / kMicroRows + 1) * kMicroRows;
    const int64_t vectors = num_queries_ * group_;
    return end < vectors ? end : vectors;
  }

  // Leaves in weights_ what the exponentials of a chunk's scores are, for the queries from
  // first_query on. Meanwhile the next chunk is fetched.
  void weigh(const KeyChunk& chunk, int64_t first_query, const KeyColumns& keys) {
    const bool reduces = rows_per_query_ < group_;
    float* products = reduces ? scores_ : weights_ + chunk.begin;
    const int64_t stride = reduces ? kChunkTokens : weights_stride_;
    const int64_t vectors = num_queries_ * group_;
    const int64_t first_tile = first_query * group_ / kMicroRows;
    const int64_t tiles = (vectors + kMicroRows - 1) / kMicroRows;
    for (int64_t i = first_tile; i < tiles; ++i) {
      keys.fetch(chunk.begin + chunk.columns, i - first_tile, tiles - first_tile);
      const int64_t tile = i * kMicroRows;
      const int64_t tile_end = micro_tile_end(tile);
      const int64_t columns = columns_of((tile_end - 1) / group_, chunk);
      multiply_queries(tile_end - tile, packed(tile), chunk, vectors_in(columns),
                       products + tile * stride, stride);
    }
    for (int64_t query = first_query; query < num_queries_; ++query) {
      for (int64_t i = 0; i < rows_per_query_; ++i) {
        const int64_t row = query * rows_per_query_ + i;
        float* weights = weights_ + row * weights_stride_ + chunk.begin;
        if (reduces) reduce(query, vectors_in(columns_of(query, chunk)), weights);
        soften_row(row, columns_of(query, chunk), chunk, weights);
      }
    }
  }

  // How many columns of a chunk a query attends.
  int64_t columns_of(int64_t query, const KeyChunk& chunk) const {
    const int64_t left = end_of(query) - chunk.begin;
    return left < chunk.columns ? left : chunk.columns;
  }

  // The scores of `rows` vectors, packed at `query`, in `vectors` vectors of a chunk's columns.
  template <int kRows = kMicroRows>
  void multiply_queries(int64_t rows, const float* query, const KeyChunk& chunk, int64_t vectors,
                        float* scores, int64_t stride) const {
    if (rows == kRows) {
      return multiply_wide<kRows, 1, kRows, false>(query, chunk.keys, chunk.stride, head_size_,
                                                   vectors, scores, stride);
    }
    if constexpr (kRows > 1) {
      multiply_queries<kRows - 1>(rows, query, chunk, vectors, scores, stride);
    }
  }

  // The largest score of a query's heads.
  void reduce(int64_t query, int64_t vectors, float* to) const {
    const float* from = scores_ + query * group_ * kChunkTokens;
    for (int64_t v = 0; v < vectors * kWidth; v += kWidth) {
      Vec most = load(from + v);
      for (int64_t i = 1; i < group_; ++i) most = max(most, load(from + i * kChunkTokens + v));
      store(to + v, most);
    }
  }

  // Turns a row of a chunk's scores, of which `columns` are attended, into weights.
  void soften_row(int64_t row, int64_t columns, const KeyChunk& chunk, float* scores) {
    const int64_t vectors = vectors_in(columns);
    const int64_t lead = chunk.begin == 0 ? lead_ : 0;
    const RunningRow state{nullptr, sums_ + row * kWidth, maximum_ + row};
    if (lead == 0 && columns == vectors * kWidth) {
      soften<false>(scores, vectors, state, 0);
    } else {
      for (int64_t i = 0; i < lead; ++i) scores[i] = -__builtin_inff();
      for (int64_t i = columns; i < vectors * kWidth; ++i) scores[i] = -__builtin_inff();
      soften<true>(scores, vectors, state, 0);
    }
    const int64_t all_vectors = vectors_in(chunk.columns);
    for (int64_t v = vectors; v < all_vectors; ++v) store(scores + v * kWidth, zero());
  }

  // The second pass: weights become probabilities, and the rows one.
  void sum_up(int64_t chunks, float* mass) {
    const bool averages = problem_.reduction == GroupReduction::mean;
    const float share = averages ? 1.0F / static_cast<float>(group_) : 1.0F;
    for (int64_t i = 0; i < num_rows_; ++i) {
      share_[i] = share / reduce_add(load(sums_ + i * kWidth));
    }
    int64_t first_query = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t begin = chunk_begins_[chunk];
      while (end_of(first_query) <= begin) ++first_query;
      const float* maxima = chunk_maxima_ + chunk * lines(most_rows_);
      for_lanes(0, num_rows_, [&](auto lanes, int64_t i, int n) {
        const Vec passed =
            load_lanes<lanes.kFull>(maxima + i, n) - load_lanes<lanes.kFull>(maximum_ + i, n);
        const Vec factor = exp2<true>(passed) * load_lanes<lanes.kFull>(share_ + i, n);
        store_lanes<lanes.kFull>(factors_ + i, factor, n);
      });
      const int64_t vectors = vectors_in(chunk_begins_[chunk + 1] - begin);
      const int64_t row = first_query * rows_per_query_;
      const float* weights = weights_ + row * weights_stride_ + begin;
      if (problem_.reduction == GroupReduction::max && group_ > 1) {
        add_largest(row, weights, vectors, mass + begin);
      } else {
        multiply_wide<1, 1, 1, true>(factors_ + row, weights, weights_stride_, num_rows_ - row,
                                     vectors, mass + begin, 0);
      }
    }
  }

  // Adds the largest probability of each query's heads, for the rows from `row` on.
  void add_largest(int64_t row, const float* weights, int64_t vectors, float* mass) {
    for (; row < num_rows_; row += group_, weights += group_ * weights_stride_) {
      const float* factors = factors_ + row;
      float zero_if_finite = 0.0F;
      for (int64_t i = 0; i < group_; ++i) zero_if_finite += 0.0F * factors[i];
      for (int64_t v = 0; v < vectors * kWidth; v += kWidth) {
        Vec most = broadcast(zero_if_finite);
        for (int64_t i = 0; i < group_; ++i) {
          most = max(broadcast(factors[i]) * load(weights + i * weights_stride_ + v), most);
        }
        store(mass + v, load(mass + v) + most);
      }
    }
  }

  const MassProblem& problem_;
  const AttentionMassPlan& plan_;
  int64_t group_;  // query heads of a KV head
  int64_t rows_per_query_;
  int64_t head_size_;
  int64_t most_vectors_;
  int64_t most_rows_;
  int64_t most_chunks_;
  int64_t weights_stride_;

  float* query_ = nullptr;
  float* keys_ = nullptr;          // of a chunk that is not read in place
  float* scores_ = nullptr;        // [vectors][kChunkTokens], where heads are reduced before
  float* weights_ = nullptr;       // [rows][weights_stride_]
  float* sums_ = nullptr;          // [rows][kWidth]
  float* maximum_ = nullptr;       // [rows]
  float* share_ = nullptr;         // [rows] 1 / sum, and the share of a head in a mean
  float* factors_ = nullptr;       // [rows]
  float* chunk_maxima_ = nullptr;  // [chunks][rows] the maximum that a chunk's weights refer to
  int64_t* chunk_begins_ = nullptr;

  // Of the tile.
  const MassQuery* queries_ = nullptr;
  int64_t num_queries_ = 0;
  int64_t num_rows_ = 0;
  int64_t lead_ = 0;
};

// For every tile of the plan, in their order, and every KV head: add(tile, head, mass), with
// mass[i] for key i. Different heads may be added at the same time.
template <typename Add>
inline void for_each_mass(const MassProblem& problem, const AttentionMassPlan& plan,
                          const Add& add) {
  constexpr int64_t kMassesAtATime = 64;  // enough to share out, little enough to keep
  const int64_t heads = problem.key.num_heads;
  const int64_t most_tiles = heads < kMassesAtATime ? kMassesAtATime / heads : 1;
  const int64_t tiles_at_a_time = plan.num_tiles() < most_tiles ? plan.num_tiles() : most_tiles;
  const AttentionMass prototype(problem, plan);
  const Scratch memory(plan.num_threads(), prototype.floats_needed());
  const Scratch masses(tiles_at_a_time * heads, problem.columns());
#pragma omp parallel num_threads(plan.num_threads())
  {
    AttentionMass worker = prototype;
    worker.set_memory(memory.part(omp_get_thread_num()));
    for (int64_t first = 0; first < plan.num_tiles(); first += tiles_at_a_time) {
      const int64_t left = plan.num_tiles() - first;
      const int64_t tiles = left < tiles_at_a_time ? left : tiles_at_a_time;
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < tiles * heads; ++i) {
        worker.run(plan.tiles()[first + i / heads], i % heads, masses.part(i));
      }
#pragma omp for schedule(static)
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t i = 0; i < tiles; ++i) {
          add(plan.tiles()[first + i], head, masses.part(i * heads + head) + problem.lead());
        }
      }
    }
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
