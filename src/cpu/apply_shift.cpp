#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/shifted_tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Shifts the tokens that one thread was given. A tile may span segments.
template <typename Cached, typename Stored>
class Shifter {
 public:
  static int64_t floats_needed(const ApplyShiftParams& params) {
    const int64_t tokens = kTileTokens<Stored>;
    const int64_t head_size = params.blocks.head_size;
    const int64_t tables = 2 * FactorTable::floats_needed(rope_of(params), tokens);
    const int64_t rotated_means = params.mean_deltas == nullptr ? 0 : tokens * head_size;
    return head_size + rotated_means + tables;
  }

  Shifter(const ApplyShiftParams& params, float* memory)
      : params_(params),
        heads_(params.blocks.num_heads),
        head_size_(params.blocks.head_size),
        rope_(rope_of(params)),
        writer_(params.blocks, rope_),
        row_(reinterpret_cast<Stored*>(memory)),
        rotated_means_(memory + head_size_),
        factors_(rope_, kTileTokens<Stored>, after_means(params, memory)),
        mean_factors_(
            rope_, kTileTokens<Stored>,
            after_means(params, memory) + FactorTable::floats_needed(rope_, kTileTokens<Stored>)) {}

  void run(Range tokens) {
    while (segment_end() <= tokens.begin) ++segment_;
    for (int64_t at = tokens.begin; at < tokens.end;) {
      const Tile tile = next_tile<Stored>(params_.slots, at, tokens.end, params_.blocks.block_size);
      at += tile.count;
      if (tile.block != kPaddingSlot) shift(tile);
    }
  }

 private:
  static RopeView rope_of(const ApplyShiftParams& params) {
    const bool rotates = params.deltas != nullptr || params.mean_deltas != nullptr;
    return rotates ? params.rope : RopeView{};
  }

  static float* after_means(const ApplyShiftParams& params, float* memory) {
    const int64_t rows = params.mean_deltas == nullptr ? 1 : 1 + kTileTokens<Stored>;
    return memory + rows * params.blocks.head_size;
  }

  int64_t segment_end() const { return params_.segment_starts[segment_ + 1]; }

  void shift(const Tile& tile) {
    tile_.count = tile.count;
    for (int64_t i = 0; i < tile.count; ++i) prepare(tile.begin + i, i);
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t i = 0; i < tile.count; ++i) point_to_head(tile.begin + i, i, head);
      writer_.write(tile_, tile, head, row_);
    }
  }

  // What all heads of the token share.
  void prepare(int64_t token, int64_t i) {
    while (segment_end() <= token) ++segment_;
    segments_[i] = segment_;
    ShiftedRow<Cached>& row = tile_.rows[i];
    if (params_.deltas != nullptr) row.factors = factors_.of(params_.deltas[segment_]);
    row.weight = params_.weights != nullptr ? params_.weights[token] : 1.0F;
    if (params_.mean_deltas != nullptr) {
      token_mean_factors_[i] = mean_factors_.of(params_.mean_deltas[token]);
    }
  }

  void point_to_head(int64_t token, int64_t i, int64_t head) {
    ShiftedRow<Cached>& row = tile_.rows[i];
    row.in = row_of<const Cached>(params_.cached, params_.cached_rows[token], head);
    if (params_.mean == nullptr) return;
    row.addend = params_.mean + (segments_[i] * heads_ + head) * head_size_;
    if (params_.mean_deltas == nullptr) return;
    ShiftedRow<float> mean;
    mean.in = row.addend;
    mean.factors = token_mean_factors_[i];
    float* rotated = rotated_means_ + i * head_size_;
    write_row(mean, rope_, head_size_, rotated);
    row.addend = rotated;
  }

  const ApplyShiftParams& params_;
  int64_t heads_;
  int64_t head_size_;
  RopeView rope_;
  TileWriter<Cached, Stored> writer_;
  Stored* row_;
  float* rotated_means_;
  FactorTable factors_;
  FactorTable mean_factors_;
  ShiftedTile<Cached> tile_;
  int64_t segments_[kTileTokens<Stored>];
  Factors token_mean_factors_[kTileTokens<Stored>];
  int64_t segment_ = 0;
};

}  // namespace

void apply_shift(const ApplyShiftParams& params) {
  with_types(params.cached.dtype, params.blocks.dtype, [&](auto cached_tag, auto stored_tag) {
    using Cached = typename decltype(cached_tag)::Type;
    using Stored = typename decltype(stored_tag)::Type;
    const int64_t tokens = params.segment_starts[params.num_segments];
    const int64_t bytes = tokens * params.blocks.num_heads * params.blocks.head_size *
                          int64_t{sizeof(Cached) + sizeof(Stored)};
    const int threads = threads_for(bytes);
    const int64_t floats = Shifter<Cached, Stored>::floats_needed(params);
    const Scratch scratch(threads, floats);
#pragma omp parallel num_threads(threads)
    Shifter<Cached, Stored>(params, scratch.part(omp_get_thread_num()))
        .run(share_of_thread(tokens));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
