#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/shifted_tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

RopeView rope_of(const ApplyShiftParams& params) {
  const bool rotates = params.deltas != nullptr || params.mean_deltas != nullptr;
  return rotates ? params.rope : RopeView{};
}

// Shifts the tokens that one thread was given.
template <typename Cached, typename Stored>
class Shifter {
 public:
  static int64_t floats_needed(const ApplyShiftParams& params) {
    const int64_t head_size = params.blocks.head_size;
    return head_size + kTwoTiles * head_size +
           2 * FactorTable::floats_needed(rope_of(params), kTwoTiles);
  }

  Shifter(const ApplyShiftParams& params, float* memory)
      : params_(params),
        heads_(params.blocks.num_heads),
        head_size_(params.blocks.head_size),
        rope_(rope_of(params)),
        row_(reinterpret_cast<Stored*>(memory)),
        rotated_means_(memory + head_size_),
        factors_(rope_, kTwoTiles, rotated_means_ + kTwoTiles * head_size_),
        mean_factors_(rope_, kTwoTiles,
                      rotated_means_ + kTwoTiles * head_size_ +
                          FactorTable::floats_needed(rope_, kTwoTiles)) {}

  void run(Range tokens) {
    const TileWriter<Cached, Stored> writer(params_.blocks, rope_, row_);
    for (int64_t begin = tokens.begin; begin < tokens.end;) {
      while (segment_end() <= begin) ++segment_;
      rotates_ = delta_of(segment_) != 0;
      const int64_t end = end_of_group(tokens.end);
      write_tiles(params_.slots, begin, end, params_.blocks, writer,
                  [&](ShiftedTile<Cached, Stored>& shifted) { fill(shifted); });
      begin = end;
    }
  }

 private:
  // One that is written and one that is prepared.
  static constexpr int64_t kTwoTiles = 2 * kTileTokens<Stored>;

  int64_t segment_end() const { return params_.segment_starts[segment_ + 1]; }
  int64_t delta_of(int64_t segment) const {
    return params_.deltas != nullptr ? params_.deltas[segment] : 0;
  }

  // Tiles may span segments that are all rotated or all not.
  int64_t end_of_group(int64_t tokens_end) const {
    int64_t segment = segment_;
    while (segment < params_.num_segments && params_.segment_starts[segment] < tokens_end &&
           (delta_of(segment) != 0) == rotates_) {
      ++segment;
    }
    const int64_t end = params_.segment_starts[segment];
    return end < tokens_end ? end : tokens_end;
  }

  void fill(ShiftedTile<Cached, Stored>& shifted) {
    const Tile& tile = shifted.tile;
    if (shifted.head == 0) {
      for (int64_t i = 0; i < tile.count; ++i) prepare(tile.begin + i, i);
    }
    shifted.rotates = rotates_;
    shifted.adds = params_.mean != nullptr;
    for (int64_t i = 0; i < tile.count; ++i) {
      ShiftedRow<Cached>& row = shifted.rows[i];
      row.in = row_of<const Cached>(params_.cached, params_.cached_rows[tile.begin + i],
                                    shifted.head);
      row.factors = tokens_[i].factors;
      if (shifted.adds) {
        row.addend = mean_for(tokens_[i], shifted.head);
        row.weight = params_.weights != nullptr ? params_.weights[tile.begin + i] : 1.0F;
      }
    }
  }

  // What the heads of a token have in common.
  struct Token {
    int64_t segment;
    Factors factors;
    Factors mean_factors;
  };

  void prepare(int64_t token, int64_t i) {
    while (segment_end() <= token) ++segment_;
    tokens_[i].segment = segment_;
    tokens_[i].factors = factors_.of(delta_of(segment_));
    if (params_.mean_deltas != nullptr) {
      tokens_[i].mean_factors = mean_factors_.of(params_.mean_deltas[token]);
    }
  }

  const float* mean_for(const Token& common, int64_t head) {
    const float* mean = params_.mean + (common.segment * heads_ + head) * head_size_;
    if (params_.mean_deltas == nullptr) return mean;
    ShiftedRow<float> row;
    row.in = mean;
    row.factors = common.mean_factors;
    // Tokens of two tiles in a row, of which the first may not have been written yet.
    float* rotated = rotated_means_ + next_mean_ * head_size_;
    next_mean_ = next_mean_ + 1 == kTwoTiles ? 0 : next_mean_ + 1;
    write_moved_row(row, rope_, head_size_, rotated);
    return rotated;
  }

  const ApplyShiftParams& params_;
  int64_t heads_;
  int64_t head_size_;
  RopeView rope_;
  Stored* row_;
  float* rotated_means_;
  int64_t next_mean_ = 0;
  FactorTable factors_;
  FactorTable mean_factors_;
  Token tokens_[kTileTokens<Stored>];
  int64_t segment_ = 0;
  bool rotates_ = false;
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
    const Scratch scratch(threads, Shifter<Cached, Stored>::floats_needed(params));
#pragma omp parallel num_threads(threads)
    Shifter<Cached, Stored>(params, scratch.part(omp_get_thread_num()))
        .run(share_of_thread(tokens));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
