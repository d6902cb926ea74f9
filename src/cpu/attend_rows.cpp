// attend_rows, the way of FlashAttention: a task keeps some queries, walks over the keys in chunks
// that stay in the cache, and rescales its running outputs when a larger score turns up.
//
// Bound: 4 * head_size FLOPs for each (query head, attended key), at the processor's float32 FMA
// rate. The exponentials cost about a tenth of that at head size 64.
#include <omp.h>

#include <cstdint>

#include "cpu/attend_rows_layout.h"
#include "cpu/kernels.h"
#include "cpu/product.h"
#include "cpu/rows.h"
#include "cpu/running_softmax.h"
#include "cpu/scratch.h"
#include "cpu/tile.h"
#include "cpu/vector.h"
#include "ops/attend_rows_plan.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// to = to_factor * to + factor * from.
void add_scaled(const float* from, float factor, float* to, float to_factor, int64_t vectors) {
  for (int64_t v = 0; v < vectors; ++v) {
    const Vec scaled = broadcast(to_factor) * load(to + v * kWidth);
    store(to + v * kWidth, fma(broadcast(factor), load(from + v * kWidth), scaled));
  }
}

// The queries of a task, the query heads of a KV head for each of its rows, and what the chunks
// have made of them so far. In memory they lie in micro tiles of kMicroRows.
struct TaskState {
  int64_t num_queries;
  int64_t head_size;
  int64_t out_stride;     // head_size in whole vectors
  const float* query;     // micro tile after micro tile, each [head_size][its queries]
  const int64_t* limits;  // [num_queries], ascending
  float* out;             // [num_queries][out_stride]
  float* sum;             // [num_queries][kWidth]
  float* maximum;         // [num_queries]

  RunningRow row(int64_t i) const { return {out + i * out_stride, sum + i * kWidth, maximum + i}; }
};

// The queries [first, first + kRows) over one chunk.
template <int kRows>
void attend_chunk(const TaskState& task, int64_t first, const Chunk& chunk, float* scores) {
  const int64_t* limits = task.limits + first;
  const int64_t longest = limits[kRows - 1] - chunk.begin;
  const int64_t tokens = longest < chunk.tokens ? longest : chunk.tokens;
  const int64_t vectors = (tokens + kWidth - 1) / kWidth;
  const int64_t out_vectors = task.out_stride / kWidth;

  multiply_wide<kRows, 1, kRows, false>(task.query + first * task.head_size, chunk.keys,
                                        chunk.key_stride, task.head_size, vectors, scores,
                                        kChunkTokens);
  for (int i = 0; i < kRows; ++i) {
    float* row_scores = scores + i * kChunkTokens;
    const int64_t limit = limits[i] - chunk.begin;
    const int64_t unmasked = limit < 0 ? 0 : limit < tokens ? limit : tokens;
    if (unmasked == vectors * kWidth) {
      soften<false>(row_scores, vectors, task.row(first + i), out_vectors);
      continue;
    }
    for (int64_t t = unmasked; t < vectors * kWidth; ++t) row_scores[t] = -__builtin_inff();
    soften<true>(row_scores, vectors, task.row(first + i), out_vectors);
  }
  multiply_wide<kRows, kChunkTokens, 1, true>(scores, chunk.values, chunk.value_stride, tokens,
                                              out_vectors, task.out + first * task.out_stride,
                                              task.out_stride);
}

// attend_chunk for a number of queries known at run time.
template <int kRows = kMicroRows>
void attend_chunk_rows(int64_t rows, const TaskState& task, int64_t first, const Chunk& chunk,
                       float* scores) {
  if (rows == kRows) return attend_chunk<kRows>(task, first, chunk, scores);
  if constexpr (kRows > 1) attend_chunk_rows<kRows - 1>(rows, task, first, chunk, scores);
}

// Works on one task after another, in the memory of one thread.
class Attender {
 public:
  Attender(const AttendRowsParams& params, const AttendPlan& plan)
      : params_(params),
        plan_(plan),
        group_(params.query.heads / params.key.num_heads),
        most_queries_(plan.max_rows_per_task() * group_),
        head_size_(params.key.head_size),
        out_stride_((head_size_ + kWidth - 1) / kWidth * kWidth),
        in_place_(readable_in_place(params.key, params.value)) {}

  // For set_memory.
  int64_t floats_needed() const {
    return lines(most_queries_ * head_size_) + lines(2 * most_queries_) + floats_per_partial() +
           lines(kMicroRows * kChunkTokens) + lines(head_size_ * kChunkTokens) +
           lines(kChunkTokens * out_stride_);
  }
  int64_t floats_per_partial() const {
    return lines(most_queries_ * out_stride_) + lines(most_queries_ * kWidth) +
           lines(most_queries_);
  }

  // `partials` is shared by the threads.
  void set_memory(float* memory, const Scratch& partials) {
    query_ = memory;
    limits_ = reinterpret_cast<int64_t*>(query_ + lines(most_queries_ * head_size_));
    state_ = query_ + lines(most_queries_ * head_size_) + lines(2 * most_queries_);
    scores_ = state_ + floats_per_partial();
    keys_ = scores_ + lines(kMicroRows * kChunkTokens);
    values_ = keys_ + lines(head_size_ * kChunkTokens);
    partials_ = &partials;
  }

  void run(const AttendTask& task) {
    const bool is_partial = task.partial >= 0;
    const TaskState state =
        state_at(is_partial ? partials_->part(task.partial) : state_, task.num_rows);
    take_queries(task);
    for (int64_t i = 0; i < state.num_queries * out_stride_; ++i) state.out[i] = 0.0F;
    for (int64_t i = 0; i < state.num_queries * kWidth; ++i) state.sum[i] = 0.0F;
    for (int64_t i = 0; i < state.num_queries; ++i) state.maximum[i] = kNoMaximum;

    const ChunkSource source{params_.key, params_.value,
                             params_.block_table + task.request * params_.block_table_stride,
                             task.kv_head};
    int64_t first = 0;  // micro tiles before it have attended all their keys
    for (int64_t begin = task.key_begin; begin < task.key_end;) {
      const int64_t end = task.key_end - begin < kChunkTokens ? task.key_end : begin + kChunkTokens;
      const Chunk chunk = in_place_ ? chunk_in_place(source, begin)
                                    : unpack_chunk(source, begin, end, keys_, values_, out_stride_);
      while (limits_[micro_tile_end(first, state) - 1] <= begin) first += kMicroRows;
      for (int64_t tile = first; tile < state.num_queries; tile += kMicroRows) {
        attend_chunk_rows(micro_tile_end(tile, state) - tile, state, tile, chunk, scores_);
      }
      begin += chunk.tokens;
    }
    if (!is_partial) write_rows(state, task.first_row, task.kv_head);
  }

  // Adds up the partial results of a tile, in their order, in the memory of the first.
  void merge(const AttendMerge& merge) const {
    const TaskState total = state_at(partials_->part(merge.first_partial), merge.num_rows);
    for (int64_t i = 0; i < total.num_queries; ++i) {
      const RunningRow to = total.row(i);
      for (int64_t p = 1; p < merge.num_partials; ++p) {
        const TaskState part = state_at(partials_->part(merge.first_partial + p), merge.num_rows);
        add_row(part.row(i), to, out_stride_ / kWidth);
      }
    }
    write_rows(total, merge.first_row, merge.kv_head);
  }

 private:
  // Floats in whole cache lines.
  static int64_t lines(int64_t floats) { return (floats + 15) / 16 * 16; }

  static int64_t micro_tile_end(int64_t begin, const TaskState& state) {
    return begin + kMicroRows < state.num_queries ? begin + kMicroRows : state.num_queries;
  }

  static void add_row(const RunningRow& from, const RunningRow& to, int64_t out_vectors) {
    const float maximum = *from.maximum > *to.maximum ? *from.maximum : *to.maximum;
    const float factor = exp2_of(*from.maximum - maximum);
    const float to_factor = exp2_of(*to.maximum - maximum);
    *to.maximum = maximum;
    add_scaled(from.out, factor, to.out, to_factor, out_vectors);
    add_scaled(from.sum, factor, to.sum, to_factor, 1);
  }

  TaskState state_at(float* memory, int64_t num_rows) const {
    float* sum = memory + lines(most_queries_ * out_stride_);
    return {num_rows * group_, head_size_, out_stride_, query_,
            limits_,           memory,     sum,         sum + lines(most_queries_ * kWidth)};
  }

  // The caller's row behind query i of a tile.
  int64_t row_of_query(int64_t first_row, int64_t i) const {
    return plan_.row_order()[first_row + i / group_];
  }

  // Scales the queries so that a score is a power of two, and packs them into micro tiles.
  void take_queries(const AttendTask& task) {
    constexpr float kLog2E = 1.44269504F;
    const float scale = params_.scale * kLog2E;
    const int64_t count = task.num_rows * group_;
    with_type(params_.query.dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = row_of_query(task.first_row, i);
        limits_[i] = params_.row_limits[row];

        const int64_t tile = i / kMicroRows * kMicroRows;
        const int64_t tile_rows = count - tile < kMicroRows ? count - tile : kMicroRows;
        const T* from = row_of<const T>(params_.query, row, task.kv_head * group_ + i % group_);
        float* to = query_ + tile * head_size_ + (i - tile);
        for (int64_t d = 0; d < head_size_; ++d) to[d * tile_rows] = load_one(from + d) * scale;
      }
    });
  }

  void write_rows(const TaskState& state, int64_t first_row, int64_t kv_head) const {
    with_type(params_.out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      for (int64_t i = 0; i < state.num_queries; ++i) {
        const RunningRow row = state.row(i);
        const float sum = reduce_add(load(row.sum));
        scale_row(row.out, out_stride_ / kWidth, sum == 0.0F ? 0.0F : 1.0F / sum);
        copy_row(row.out, head_size_,
                 row_of<T>(params_.out, row_of_query(first_row, i), kv_head * group_ + i % group_));
      }
    });
  }

  const AttendRowsParams& params_;
  const AttendPlan& plan_;
  int64_t group_;  // query heads of a KV head
  int64_t most_queries_;
  int64_t head_size_;
  int64_t out_stride_;
  bool in_place_;

  float* query_ = nullptr;
  int64_t* limits_ = nullptr;
  float* state_ = nullptr;
  float* scores_ = nullptr;  // [kMicroRows][kChunkTokens]
  float* keys_ = nullptr;    // of a chunk that is not read in place
  float* values_ = nullptr;
  const Scratch* partials_ = nullptr;
};

}  // namespace

void attend_rows(const AttendRowsParams& params) {
  const AttendPlan plan(params, omp_in_parallel() != 0 ? 1 : omp_get_max_threads());
  const Attender prototype(params, plan);
  const Scratch memory(plan.num_threads(), prototype.floats_needed());
  const Scratch partials(plan.num_partials(), prototype.floats_per_partial());
#pragma omp parallel num_threads(plan.num_threads())
  {
    Attender attender = prototype;
    attender.set_memory(memory.part(omp_get_thread_num()), partials);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.num_tasks(); ++i) attender.run(plan.tasks()[i]);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < plan.num_merges(); ++i) attender.merge(plan.merges()[i]);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
