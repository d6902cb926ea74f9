#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/move_transposed.h"
#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Shifts the tokens that one thread was given. Where the tokens of a dimension are adjacent, the
// shifted rows of a tile, which may span segments, wait in a cache of the core to be transposed.
template <typename Cached, typename Stored>
class Shifter {
 public:
  static int64_t floats_needed(const ApplyShiftParams& params) {
    return params.blocks.head_size + rows_size(params) +
           2 * FactorTable::floats_needed(rope_of(params));
  }

  Shifter(const ApplyShiftParams& params, bool streams, float* memory)
      : params_(params),
        heads_(params.blocks.num_heads),
        head_size_(params.blocks.head_size),
        rope_(rope_of(params)),
        arrangement_(arrangement_of(params.blocks)),
        streams_(streams),
        rows_(reinterpret_cast<Stored*>(memory)),
        rotated_mean_(memory + rows_size(params)),
        factors_(rope_, rotated_mean_ + head_size_),
        mean_factors_(rope_, rotated_mean_ + head_size_ + FactorTable::floats_needed(rope_)) {}

  void run(Range tokens) {
    while (segment_end() <= tokens.begin) ++segment_;
    for (int64_t at = tokens.begin; at < tokens.end;) {
      const Tile tile =
          next_tile(params_.slots, at, tokens.end, params_.blocks.block_size, kTileTokens);
      at += tile.count;
      // Rows follow each other as a rule; where not, the wrong ones are fetched.
      next_row_ = at < tokens.end ? params_.cached_rows[at] : -1;
      if (tile.block != kPaddingSlot) shift(tile);
    }
    if (streams_) end_of_streams();
  }

 private:
  // As many as fill two lines.
  static constexpr int64_t kTileTokens = 2 * kLine<Stored>;

  static RopeView rope_of(const ApplyShiftParams& params) {
    const bool rotates = params.deltas != nullptr || params.mean_deltas != nullptr;
    return rotates ? params.rope : RopeView{};
  }

  // In floats.
  static int64_t rows_size(const ApplyShiftParams& params) {
    const bool keeps_tile = arrangement_of(params.blocks) == Arrangement::token_contiguous;
    const int64_t rows = keeps_tile ? kTileTokens * params.blocks.num_heads : 1;
    return rows * params.blocks.head_size;
  }

  int64_t segment_end() const { return params_.segment_starts[segment_ + 1]; }

  // Token after token, all heads of each, so that rows are read as they lie.
  void shift(const Tile& tile) {
    for (int64_t i = 0; i < tile.count; ++i) {
      prepare(tile.begin + i);
      for (int64_t head = 0; head < heads_; ++head) write(tile, i, head);
    }
    if (arrangement_ != Arrangement::token_contiguous) return;
    for (int64_t head = 0; head < heads_; ++head) {
      write_transposed(tile, head);
    }
  }

  void write(const Tile& tile, int64_t i, int64_t head) {
    if (arrangement_ == Arrangement::token_contiguous) {
      return shift_row(tile.begin + i, head, row(head, i));
    }
    Stored* token = head_of_block<Stored>(params_.blocks, tile.block, head) +
                    offset_on(params_.blocks.token, tile.offset + i);
    if (arrangement_ == Arrangement::dim_contiguous) {
      return shift_row(tile.begin + i, head, token);
    }
    shift_row(tile.begin + i, head, rows_);
    for_each_dim(params_.blocks.dim, head_size_,
                 [&](int64_t d, int64_t offset) { token[offset] = rows_[d]; });
  }

  Stored* row(int64_t head, int64_t i) const {
    return rows_ + (head * kTileTokens + i) * head_size_;
  }

  // What all heads of the token share.
  void prepare(int64_t token) {
    while (segment_end() <= token) ++segment_;
    if (params_.deltas != nullptr) token_factors_ = factors_.of(params_.deltas[segment_]);
    if (params_.mean_deltas != nullptr) {
      token_mean_factors_ = mean_factors_.of(params_.mean_deltas[token]);
    }
  }

  void shift_row(int64_t token, int64_t head, Stored* out) {
    ShiftedRow<Cached> row;
    row.in = row_of<const Cached>(params_.cached, params_.cached_rows[token], head);
    row.factors = token_factors_;
    row.weight = params_.weights != nullptr ? params_.weights[token] : 1.0F;
    row.addend = addend_of(head);
    write_row(row, rope_, head_size_, out);
  }

  const float* addend_of(int64_t head) {
    if (params_.mean == nullptr) return nullptr;
    const float* mean = params_.mean + (segment_ * heads_ + head) * head_size_;
    if (params_.mean_deltas == nullptr) return mean;
    ShiftedRow<float> row;
    row.in = mean;
    row.factors = token_mean_factors_;
    write_row(row, rope_, head_size_, rotated_mean_);
    return rotated_mean_;
  }

  void write_transposed(const Tile& tile, int64_t head) const {
    const Cached* next =
        next_row_ < 0 ? nullptr : row_of<const Cached>(params_.cached, next_row_, head);
    move_transposed(TransposedMove<Stored>{
        .from = row(head, 0),
        .from_stride = head_size_,
        .rows = tile.count,
        .columns = head_size_,
        .to = head_of_block<Stored>(params_.blocks, tile.block, head) + tile.offset,
        .to_stride = params_.blocks.dim.outer_stride,
        .next = next,
        .next_stride = params_.cached.token_stride * int64_t{sizeof(Cached)},
        .streams = streams_});
  }

  const ApplyShiftParams& params_;
  int64_t heads_;
  int64_t head_size_;
  RopeView rope_;
  Arrangement arrangement_;
  bool streams_;
  Stored* rows_;         // [heads][kTileTokens][head_size] of a tile, or one
  float* rotated_mean_;  // of one token and head
  FactorTable factors_;
  FactorTable mean_factors_;
  int64_t segment_ = 0;
  int64_t next_row_ = -1;  // the first of the next tile
  // Of the token.
  Factors token_factors_;
  Factors token_mean_factors_;
};

}  // namespace

void apply_shift(const ApplyShiftParams& params) {
  with_types(params.cached.dtype, params.blocks.dtype, [&](auto cached_tag, auto stored_tag) {
    using Cached = typename decltype(cached_tag)::Type;
    using Stored = typename decltype(stored_tag)::Type;
    const int64_t tokens = params.segment_starts[params.num_segments];
    const int64_t elements = tokens * params.blocks.num_heads * params.blocks.head_size;
    const bool streams = is_worth_streaming(elements * int64_t{sizeof(Stored)});
    const int threads = threads_for(elements * int64_t{sizeof(Cached) + sizeof(Stored)});
    const int64_t floats = Shifter<Cached, Stored>::floats_needed(params);
    const Scratch scratch(threads, floats);
#pragma omp parallel num_threads(threads)
    Shifter<Cached, Stored>(params, streams, scratch.part(omp_get_thread_num()))
        .run(share_of_thread(tokens));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
