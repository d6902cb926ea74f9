// Writes tiles of shifted rows into blocks, in one pass: every element is read once, rotated, added to
// and transposed in registers, and written once. While a tile is written the memory of the next one is
// fetched, which the processor does not do by itself: it sees no pattern in rows and blocks.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/rotation.h"
#include "cpu/tile.h"
#include "cpu/vector.h"
#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// One head of a tile: what to write and where. In all rows the same members of Shift are set.
template <typename In, typename Out>
struct ShiftedTile {
  ShiftedRow<In> rows[kTileTokens<Out>];
  Tile tile;
  int64_t head = 0;
  Out* out = nullptr;  // the first element of the block's head
  bool rotates = false;
  bool adds = false;
};

inline void fetch_to_read(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void fetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

// For blocks whose tokens are adjacent.
template <bool kRotates, bool kAdds, typename In, typename Out>
class TransposedWriter {
 public:
  using Tiles = ShiftedTile<In, Out>;

  TransposedWriter(const Tiles& shifted, const Tiles& next, int64_t dim_stride)
      : rows_(shifted.rows),
        count_(shifted.tile.count),
        out_(shifted.out + shifted.tile.offset),
        next_rows_(next.rows),
        next_count_(next.tile.count),
        next_out_(next.out + next.tile.offset),
        dim_stride_(dim_stride) {}

  void write(const RopeView& rope, int64_t head_size) const {
    int64_t rotated = 0;
    if constexpr (kRotates) {
      rotated = rope.rotary_dim;
      if (rope.pairing == RopePairing::neox) {
        const int64_t pairs = rotated / 2;
        for_lanes(0, pairs, [&](auto lanes, int64_t d, int n) {
          fetch_next(d, n);
          fetch_next(pairs + d, n);
          neox<lanes.kFull>(pairs, d, n);
        });
      } else if constexpr (kWidth == 1) {
        for (int64_t d = 0; d < rotated; d += 2) one_pair(d);
      } else {
        for_lanes(0, rotated, [&](auto lanes, int64_t d, int n) {
          fetch_next(d, n);
          write_square(d, n, [&](const ShiftedRow<In>& row) {
            return rotated_interleaved<lanes.kFull, kAdds>(row, d, n);
          });
        });
      }
    }
    for_lanes(rotated, head_size, [&](auto lanes, int64_t d, int n) {
      fetch_next(d, n);
      write_square(d, n, [&](const ShiftedRow<In>& row) {
        return unrotated<lanes.kFull, kAdds>(row, d, n);
      });
    });
  }

 private:
  // Dimensions [d, d + n) of the next tile.
  void fetch_next(int64_t d, int n) const {
    constexpr int64_t kLineElements = 64 / sizeof(In);
    if (kWidth >= kLineElements || d % kLineElements < kWidth) {
      for (int64_t i = 0; i < next_count_; ++i) fetch_to_read(next_rows_[i].in + d);
    }
    for (int i = 0; i < n; ++i) fetch_to_write(next_out_ + (d + i) * dim_stride_);
  }

  template <bool kFull>
  void neox(int64_t pairs, int64_t d, int n) const {
    for_columns([&](auto columns_tag, int64_t token, int columns) {
      Vec first[kWidth];
      Vec second[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        if (columns_tag.kFull || i < columns) {
          const Pair pair = rotated_neox<kFull, kAdds>(rows_[token + i], pairs, d, n);
          first[i] = pair.first;
          second[i] = pair.second;
        } else {
          first[i] = zero();
          second[i] = zero();
        }
      }
      store_square<columns_tag.kFull>(first, n, columns, dim_stride_, at(d, token));
      store_square<columns_tag.kFull>(second, n, columns, dim_stride_, at(pairs + d, token));
    });
  }

  void one_pair(int64_t d) const {
    for (int64_t token = 0; token < count_; ++token) {
      const Pair pair = rotated_one_pair<kAdds>(rows_[token], d);
      store(at(d, token), pair.first);
      store(at(d + 1, token), pair.second);
    }
  }

  // Dimensions [d, d + n) of all tokens, each token's by function(row).
  template <typename Function>
  void write_square(int64_t d, int n, const Function& function) const {
    for_columns([&](auto columns_tag, int64_t token, int columns) {
      Vec square[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        square[i] = columns_tag.kFull || i < columns ? function(rows_[token + i]) : zero();
      }
      store_square<columns_tag.kFull>(square, n, columns, dim_stride_, at(d, token));
    });
  }

  template <typename Function>
  void for_columns(const Function& function) const {
    for_lanes(0, count_, function);
  }

  Out* at(int64_t d, int64_t token) const { return out_ + d * dim_stride_ + token; }

  const ShiftedRow<In>* rows_;
  int64_t count_;
  Out* out_;
  const ShiftedRow<In>* next_rows_;
  int64_t next_count_;
  Out* next_out_;
  int64_t dim_stride_;
};

// Writes tiles into the blocks of one cache, whatever their arrangement.
template <typename In, typename Out>
class TileWriter {
 public:
  using Tiles = ShiftedTile<In, Out>;

  // `row` is scratch for head_size elements.
  TileWriter(const PagedView& blocks, const RopeView& rope, Out* row)
      : blocks_(blocks), rope_(rope), arrangement_(arrangement_of(blocks)), row_(row) {}

  void write(const Tiles& shifted, const Tiles& next) const {
    if (shifted.rotates) {
      shifted.adds ? write_all<true, true>(shifted, next) : write_all<true, false>(shifted, next);
    } else {
      shifted.adds ? write_all<false, true>(shifted, next) : write_all<false, false>(shifted, next);
    }
  }

 private:
  template <bool kRotates, bool kAdds>
  void write_all(const Tiles& shifted, const Tiles& next) const {
    if (arrangement_ == Arrangement::token_contiguous) {
      TransposedWriter<kRotates, kAdds, In, Out>(shifted, next, blocks_.dim.outer_stride)
          .write(rope_, blocks_.head_size);
      return;
    }
    for (int64_t i = 0; i < shifted.tile.count; ++i) {
      if (i < next.tile.count) fetch_row(next, i);
      Out* token = token_of(shifted, i);
      const bool is_straight = arrangement_ == Arrangement::dim_contiguous;
      write_row<kRotates, kAdds>(shifted.rows[i], rope_, blocks_.head_size,
                                 is_straight ? token : row_);
      if (is_straight) continue;
      for_each_dim(blocks_.dim, blocks_.head_size,
                   [&](int64_t d, int64_t offset) { token[offset] = row_[d]; });
    }
  }

  Out* token_of(const Tiles& shifted, int64_t i) const {
    return shifted.out + offset_on(blocks_.token, shifted.tile.offset + i);
  }

  void fetch_row(const Tiles& next, int64_t i) const {
    const In* in = next.rows[i].in;
    Out* out = token_of(next, i);
    for (int64_t d = 0; d < blocks_.head_size; d += 64 / int64_t{sizeof(In)}) fetch_to_read(in + d);
    for (int64_t d = 0; d < blocks_.head_size; d += 64 / int64_t{sizeof(Out)}) {
      fetch_to_write(out + d);
    }
  }

  const PagedView& blocks_;
  RopeView rope_;
  Arrangement arrangement_;
  Out* row_;
};

// Goes through the tokens of a slot list by tiles and their heads, one tile ahead of the writer.
// fill(shifted) sets the rows, and what is done with them, of shifted.head of shifted.tile; it is
// called head by head, tile by tile.
template <typename In, typename Out, typename Fill>
inline void write_tiles(const int64_t* slots, int64_t begin, int64_t end, const PagedView& blocks,
                        const TileWriter<In, Out>& writer, const Fill& fill) {
  ShiftedTile<In, Out> two[2];
  ShiftedTile<In, Out>* ready = nullptr;
  ShiftedTile<In, Out>* spare = &two[0];
  for (int64_t at = begin; at < end;) {
    const Tile tile = next_tile<Out>(slots, at, end, blocks.block_size);
    at += tile.count;
    if (tile.block == kPaddingSlot) continue;
    for (int64_t head = 0; head < blocks.num_heads; ++head) {
      spare->tile = tile;
      spare->head = head;
      spare->out = head_of_block<Out>(blocks, tile.block, head);
      fill(*spare);
      if (ready != nullptr) writer.write(*ready, *spare);
      ready = spare;
      spare = spare == &two[0] ? &two[1] : &two[0];
    }
  }
  if (ready != nullptr) writer.write(*ready, *ready);
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
