// key_redundancy. The mean cosine of a key with all keys needs no matrix of cosines: it is the
// product with the sum of the normalized keys. What remains is the search for the last similar key
// of each, which goes backwards through the keys and ends where none can come after the one found.
//
// Bound: 2 * head_size FLOPs for each pair of keys if no two are similar, a small part of that when
// similar keys are common.
#include "phasekv/ops/key_redundancy.h"

#include <omp.h>

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/key_columns.h"
#include "cpu/key_directions.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/scratch.h"
#include "cpu/unpack.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

constexpr int64_t kNoPosition = INT64_MIN;

// Floats in whole cache lines.
int64_t lines(int64_t floats) { return (floats + 15) / 16 * 16; }

template <typename T>
T* take(float*& memory, int64_t count) {
  T* const taken = reinterpret_cast<T*>(memory);
  memory += lines(count * int64_t{sizeof(T)} / int64_t{sizeof(float)});
  return taken;
}

// What the steps leave for one another about one KV head. A column is a key, see KeyColumns.
struct HeadState {
  float* inverse_norm;      // [columns]
  float* bound;             // [columns] threshold * norm; infinite for columns that are no keys
  float* sum;               // [head_size] of the normalized keys
  float* first_key;         // [head_size] the normalized key of the smallest position
  int64_t* first_token;     // [1] its index
  int64_t* chunk_begins;    // [chunks] first columns
  int64_t* largest_before;  // [chunks] the largest position in the chunks before
  int64_t* num_chunks;      // [1]
  int64_t* last_similar;    // [tokens] index of the key whose cosine with this one is left out
  float* last_cosine;       // [tokens]
};

class Redundancy {
 public:
  explicit Redundancy(const KeyRedundancyParams& params)
      : params_(params),
        head_size_(params.key.head_size),
        lead_(KeyColumns::lead_of(params.first_token)),
        columns_((lead_ + params.tokens + kWidth - 1) / kWidth * kWidth),
        most_chunks_(KeyColumns::most_chunks(params.key, params.first_token, params.tokens)) {}

  int64_t floats_per_head() const {
    return 2 * lines(columns_) + 2 * lines(head_size_) + 2 * lines(2) +
           2 * lines(2 * most_chunks_) + lines(2 * params_.tokens) + lines(params_.tokens);
  }
  int64_t floats_per_thread() const {
    return 2 * lines(head_size_ * kChunkTokens) + lines(kMicroRows * kChunkTokens);
  }

  void set_memory(float* memory, const Scratch& heads) {
    keys_ = take<float>(memory, head_size_ * kChunkTokens);
    rows_ = take<float>(memory, head_size_ * kChunkTokens);  // read beyond its end, into scores_
    scores_ = take<float>(memory, kMicroRows * kChunkTokens);
    heads_ = &heads;
  }

  int64_t most_chunks() const { return most_chunks_; }

  // Step 1: norms, the sum of the normalized keys, and where positions are small and large.
  void measure(int64_t head) {
    const HeadState state = state_of(head);
    const KeyColumns keys = columns_of(head);
    for (int64_t i = 0; i < columns_; ++i) {
      state.inverse_norm[i] = 0.0F;
      state.bound[i] = __builtin_inff();
    }
    for (int64_t d = 0; d < head_size_; ++d) state.sum[d] = 0.0F;
    int64_t largest = kNoPosition;
    int64_t smallest = INT64_MAX;
    int64_t chunks = 0;
    keys.for_each_chunk(0, keys.end(), keys_, [&](const KeyChunk& chunk, int64_t skipped) {
      add_chunk(chunk, skipped, state);
      state.chunk_begins[chunks] = chunk.begin;
      state.largest_before[chunks] = largest;
      ++chunks;
      for (int64_t i = skipped; i < chunk.columns; ++i) {
        const int64_t column = chunk.begin + i;
        const int64_t position = position_of(head, column - lead_);
        if (position > largest) largest = position;
        if (position >= smallest) continue;
        smallest = position;
        *state.first_token = column - lead_;
        for (int64_t d = 0; d < head_size_; ++d) {
          state.first_key[d] = chunk.keys[d * chunk.stride + i] * state.inverse_norm[column];
        }
      }
    });
    *state.num_chunks = chunks;
  }

  // Step 2: the similar key of the largest position, for each key of a chunk.
  void search(int64_t head, int64_t chunk) {
    const HeadState state = state_of(head);
    if (chunk >= *state.num_chunks) return;
    const KeyColumns keys = columns_of(head);
    take_rows(keys.chunk(state.chunk_begins[chunk], keys_), state);
    for (int64_t other = *state.num_chunks - 1; other >= 0 && num_open_ > 0; --other) {
      const KeyChunk columns = keys.chunk(state.chunk_begins[other], keys_);
      for (int64_t tile = 0; tile < num_rows_; tile += kMicroRows) {
        const int64_t end = tile + kMicroRows < num_rows_ ? tile + kMicroRows : num_rows_;
        if (!any_open(tile, end)) continue;
        // The last tile's further rows are whatever lies behind, and their products unused.
        multiply_wide<kMicroRows, 1, kChunkTokens, false>(
            rows_ + tile, columns.keys, columns.stride, head_size_,
            (columns.columns + kWidth - 1) / kWidth, scores_, kChunkTokens);
        for (int64_t row = tile; row < end; ++row) {
          if (!is_open_[row]) continue;
          compare(head, row, scores_ + (row - tile) * kChunkTokens, columns, state);
          if (best_[row] < state.largest_before[other]) continue;
          is_open_[row] = false;
          --num_open_;
        }
      }
    }
    write_found(state);
  }

  // Step 3: the mean cosines and their softmax.
  void finish(int64_t head) {
    const HeadState state = state_of(head);
    const KeyColumns keys = columns_of(head);
    const int64_t tokens = params_.tokens;
    float* out = params_.redundancy + head * tokens;
    keys.for_each_chunk(0, keys.end(), keys_, [&](const KeyChunk& chunk, int64_t skipped) {
      multiply_wide<1, 1, 1, false>(state.sum, chunk.keys, chunk.stride, head_size_,
                                    (chunk.columns + kWidth - 1) / kWidth, scores_, kChunkTokens);
      for (int64_t i = skipped; i < chunk.columns; ++i) {
        const float inverse = state.inverse_norm[chunk.begin + i];
        const float norm = 1.0F - kNormAddend * inverse;  // of the normalized key
        out[chunk.begin + i - lead_] = scores_[i] * inverse - norm * norm;
      }
    });
    for (int64_t i = 0; i < tokens; ++i) out[state.last_similar[i]] -= state.last_cosine[i];
    softmax(1.0F / static_cast<float>(tokens), tokens, out);
  }

 private:
  HeadState state_of(int64_t head) const {
    float* memory = heads_->part(head);
    HeadState state{};
    state.inverse_norm = take<float>(memory, columns_);
    state.bound = take<float>(memory, columns_);
    state.sum = take<float>(memory, head_size_);
    state.first_key = take<float>(memory, head_size_);
    state.first_token = take<int64_t>(memory, 1);
    state.chunk_begins = take<int64_t>(memory, most_chunks_);
    state.largest_before = take<int64_t>(memory, most_chunks_);
    state.num_chunks = take<int64_t>(memory, 1);
    state.last_similar = take<int64_t>(memory, params_.tokens);
    state.last_cosine = take<float>(memory, params_.tokens);
    return state;
  }

  KeyColumns columns_of(int64_t head) const {
    return {params_.key, params_.block_table, head, params_.first_token, params_.tokens};
  }

  int64_t position_of(int64_t head, int64_t token) const {
    return params_.positions == nullptr ? token : params_.positions[head * params_.tokens + token];
  }

  void add_chunk(const KeyChunk& chunk, int64_t skipped, const HeadState& state) const {
    float* inverse_norm = state.inverse_norm + chunk.begin;
    float* bound = state.bound + chunk.begin;
    add_directions(chunk, skipped, head_size_, inverse_norm, state.sum);
    for (int64_t i = skipped; i < chunk.columns; ++i) {
      bound[i] = params_.threshold / inverse_norm[i];
    }
  }

  // Normalizes the keys of a chunk and begins their search.
  void take_rows(const KeyChunk& chunk, const HeadState& state) {
    row_begin_ = chunk.begin;
    num_rows_ = chunk.columns;
    num_open_ = 0;
    const float* inverse_norm = state.inverse_norm + chunk.begin;
    for (int64_t d = 0; d < head_size_; ++d) {
      const float* from = chunk.keys + d * chunk.stride;
      float* to = rows_ + d * kChunkTokens;
      for (int64_t i = 0; i < num_rows_; ++i) to[i] = from[i] * inverse_norm[i];
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      best_[row] = kNoPosition;
      is_open_[row] = row_begin_ + row >= lead_;
      num_open_ += is_open_[row] ? 1 : 0;
    }
  }

  bool any_open(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      if (is_open_[row]) return true;
    }
    return false;
  }

  // Looks among the products of one row with a chunk for a similar key of a larger position.
  void compare(int64_t head, int64_t row, const float* products, const KeyChunk& chunk,
               const HeadState& state) {
    const float* bound = state.bound + chunk.begin;
    const float* inverse_norm = state.inverse_norm + chunk.begin;
    for (int64_t first = 0; first < chunk.columns; first += kWidth) {
      if (!any_greater(load(products + first), load(bound + first))) continue;
      for (int64_t i = first; i < first + kWidth; ++i) {
        if (!(products[i] > bound[i]) || chunk.begin + i == row_begin_ + row) continue;
        const int64_t token = chunk.begin + i - lead_;
        const int64_t position = position_of(head, token);
        if (position <= best_[row]) continue;
        best_[row] = position;
        found_[row] = token;
        cosine_[row] = products[i] * inverse_norm[i];
      }
    }
  }

  void write_found(const HeadState& state) const {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t token = row_begin_ + row - lead_;
      if (token < 0) continue;
      if (best_[row] != kNoPosition) {
        state.last_similar[token] = found_[row];
        state.last_cosine[token] = cosine_[row];
        continue;
      }
      const bool is_first = token == *state.first_token;
      state.last_similar[token] = *state.first_token;
      state.last_cosine[token] = is_first ? 0.0F : cosine_with_first(row, state);
    }
  }

  float cosine_with_first(int64_t row, const HeadState& state) const {
    float sum = 0.0F;
    for (int64_t d = 0; d < head_size_; ++d) {
      sum += rows_[d * kChunkTokens + row] * state.first_key[d];
    }
    return sum;
  }

  // Of scale * values.
  static void softmax(float scale, int64_t count, float* values) {
    Vec most = broadcast(values[0]);
    for_lanes(0, count, [&](auto lanes, int64_t i, int n) {
      if constexpr (lanes.kFull) {
        most = max(most, load(values + i));
      } else {
        for (int k = 0; k < n; ++k) most = max(most, broadcast(values[i + k]));
      }
    });
    const float largest = scale * reduce_max(most);
    float total = 0.0F;
    for_lanes(0, count, [&](auto lanes, int64_t i, int n) {
      const Vec x = broadcast(scale) * load_lanes<lanes.kFull>(values + i, n);
      store_lanes<lanes.kFull>(values + i, exp(x - broadcast(largest)), n);
      total += reduce_add(load_lanes<lanes.kFull>(values + i, n));
    });
    const float share = 1.0F / total;
    for (int64_t i = 0; i < count; ++i) values[i] *= share;
  }

  const KeyRedundancyParams& params_;
  int64_t head_size_;
  int64_t lead_;
  int64_t columns_;
  int64_t most_chunks_;

  float* keys_ = nullptr;    // of a chunk that is not read in place
  float* rows_ = nullptr;    // [head_size][kChunkTokens] normalized keys that search
  float* scores_ = nullptr;  // [kMicroRows][kChunkTokens]
  const Scratch* heads_ = nullptr;

  // Of the chunk whose keys search.
  int64_t row_begin_ = 0;
  int64_t num_rows_ = 0;
  int64_t num_open_ = 0;
  bool is_open_[kChunkTokens] = {};
  int64_t best_[kChunkTokens] = {};   // the largest position found
  int64_t found_[kChunkTokens] = {};  // its token
  float cosine_[kChunkTokens] = {};   // and its cosine
};

}  // namespace

void key_redundancy(const KeyRedundancyParams& params) {
  const int64_t heads = params.key.num_heads;
  const Redundancy prototype(params);
  const int64_t chunks = prototype.most_chunks();
  const int threads =
      threads_for_products(params.tokens * params.tokens * heads, params.key.head_size);
  const Scratch memory(threads, prototype.floats_per_thread());
  const Scratch head_memory(heads, prototype.floats_per_head());
#pragma omp parallel num_threads(threads)
  {
    Redundancy worker = prototype;
    worker.set_memory(memory.part(omp_get_thread_num()), head_memory);
#pragma omp for schedule(dynamic, 1)
    for (int64_t head = 0; head < heads; ++head) worker.measure(head);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * chunks; ++i) worker.search(i / chunks, i % chunks);
#pragma omp for schedule(dynamic, 1)
    for (int64_t head = 0; head < heads; ++head) worker.finish(head);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
