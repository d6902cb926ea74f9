#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Shifts the tokens that one thread was given. Every element is read once and written once: where a
// block is transposed, a tile of shifted rows waits in float32 in the cache for its transposition.
template <typename Cached, typename Stored>
class Shifter {
 public:
  static int64_t floats_needed(const ApplyShiftParams& params) {
    const int64_t tile = kTileTokens<Stored> * params.blocks.num_heads * params.blocks.head_size;
    return 2 * Rotation::floats_needed(params.rope) + params.blocks.head_size + tile;
  }

  Shifter(const ApplyShiftParams& params, float* memory)
      : params_(params),
        heads_(params.blocks.num_heads),
        head_size_(params.blocks.head_size),
        arrangement_(arrangement_of(params.blocks)),
        rotation_(params.rope, memory),
        mean_rotation_(params.rope, memory + Rotation::floats_needed(params.rope)),
        rotated_mean_(memory + 2 * Rotation::floats_needed(params.rope)),
        shifted_(rotated_mean_ + head_size_) {}

  void run(Range tokens) {
    int64_t segment = 0;
    for (int64_t at = tokens.begin; at < tokens.end;) {
      while (params_.segment_starts[segment + 1] <= at) ++segment;
      const int64_t segment_end = params_.segment_starts[segment + 1];
      const int64_t end = segment_end < tokens.end ? segment_end : tokens.end;
      const Tile tile = next_tile<Stored>(params_.slots, at, end, params_.blocks.block_size);
      at += tile.count;
      if (tile.block != kPaddingSlot) shift(tile, segment);
    }
  }

 private:
  void shift(const Tile& tile, int64_t segment) {
    const int64_t delta = params_.deltas != nullptr ? params_.deltas[segment] : 0;
    if (delta == 0 && params_.mean == nullptr) {
      copy(tile);
      return;
    }
    rotation_.set_delta(delta);
    const bool straight = arrangement_ == Arrangement::dim_contiguous;
    for (int64_t i = 0; i < tile.count; ++i) {
      for (int64_t head = 0; head < heads_; ++head) {
        if (straight) {
          const int64_t at = offset_on(params_.blocks.token, tile.offset + i);
          shift_row(tile.begin + i, segment, head, block_head(tile, head) + at);
        } else {
          shift_row(tile.begin + i, segment, head, shifted_row(head, i));
        }
      }
    }
    if (straight) return;
    const float* rows[kTileTokens<Stored>];
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t i = 0; i < tile.count; ++i) rows[i] = shifted_row(head, i);
      store_tile(arrangement_, rows, tile.count, params_.blocks, tile.offset,
                 block_head(tile, head));
    }
  }

  void copy(const Tile& tile) {
    const Cached* rows[kTileTokens<Stored>];
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t i = 0; i < tile.count; ++i) rows[i] = cached_row(tile.begin + i, head);
      store_tile(arrangement_, rows, tile.count, params_.blocks, tile.offset,
                 block_head(tile, head));
    }
  }

  template <typename Out>
  void shift_row(int64_t token, int64_t segment, int64_t head, Out* out) {
    const float* mean = nullptr;
    if (params_.mean != nullptr) mean = params_.mean + (segment * heads_ + head) * head_size_;
    if (params_.mean_deltas != nullptr) {
      mean_rotation_.set_delta(params_.mean_deltas[token]);
      mean_rotation_.apply(mean, head_size_, nullptr, 0.0F, rotated_mean_);
      mean = rotated_mean_;
    }
    const float weight = params_.weights != nullptr ? params_.weights[token] : 1.0F;
    rotation_.apply(cached_row(token, head), head_size_, mean, weight, out);
  }

  const Cached* cached_row(int64_t token, int64_t head) const {
    return row_of<const Cached>(params_.cached, params_.cached_rows[token], head);
  }

  Stored* block_head(const Tile& tile, int64_t head) const {
    return head_of_block<Stored>(params_.blocks, tile.block, head);
  }

  float* shifted_row(int64_t head, int64_t i) const {
    return shifted_ + (head * kTileTokens<Stored> + i) * head_size_;
  }

  const ApplyShiftParams& params_;
  int64_t heads_;
  int64_t head_size_;
  Arrangement arrangement_;
  Rotation rotation_;
  Rotation mean_rotation_;
  float* rotated_mean_;
  float* shifted_;
};

}  // namespace

void apply_shift(const ApplyShiftParams& params) {
  if (params.num_segments == 0) return;
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
