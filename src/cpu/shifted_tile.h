// Writes a tile of shifted rows into a block, in one pass: every element is read once, rotated,
// added to and transposed in registers, and written once.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/rotation.h"
#include "cpu/tile.h"
#include "cpu/vector.h"
#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

template <typename In>
struct ShiftedTile {
  static constexpr int64_t kMostTokens = kTileTokens<uint16_t>;

  ShiftedRow<In> rows[kMostTokens];
  int64_t count = 0;
};

// For blocks whose tokens are adjacent; `out` is dimension 0 of the tile's first token.
template <typename In, typename Out>
class TransposedWriter {
 public:
  TransposedWriter(const ShiftedTile<In>& tile, int64_t dim_stride, Out* out)
      : tile_(tile), dim_stride_(dim_stride), out_(out) {}

  void write(const RopeView& rope, int64_t head_size) const {
    if (rope.pairing == RopePairing::neox) {
      const int64_t pairs = rope.rotary_dim / 2;
      for_lanes(0, pairs, [&](auto lanes, int64_t d, int n) { neox<lanes.kFull>(pairs, d, n); });
    } else if constexpr (kWidth == 1) {
      for (int64_t d = 0; d < rope.rotary_dim; d += 2) one_pair(d);
    } else {
      for_lanes(0, rope.rotary_dim,
                [&](auto lanes, int64_t d, int n) { interleaved<lanes.kFull>(d, n); });
    }
    for_lanes(rope.rotary_dim, head_size,
              [&](auto lanes, int64_t d, int n) { unchanged<lanes.kFull>(d, n); });
  }

 private:
  template <bool kFull>
  void neox(int64_t pairs, int64_t d, int n) const {
    for_columns([&](int64_t token, int columns) {
      Vec first[kWidth];
      Vec second[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        const Pair pair = i < columns ? rotated_neox<kFull>(tile_.rows[token + i], pairs, d, n)
                                      : Pair{zero(), zero()};
        first[i] = pair.first;
        second[i] = pair.second;
      }
      store_square(first, n, columns, dim_stride_, at(d, token));
      store_square(second, n, columns, dim_stride_, at(pairs + d, token));
    });
  }

  template <bool kFull>
  void interleaved(int64_t d, int n) const {
    write_square(d, n,
                 [&](const ShiftedRow<In>& row) { return rotated_interleaved<kFull>(row, d, n); });
  }

  template <bool kFull>
  void unchanged(int64_t d, int n) const {
    write_square(d, n, [&](const ShiftedRow<In>& row) { return unrotated<kFull>(row, d, n); });
  }

  void one_pair(int64_t d) const {
    for (int64_t token = 0; token < tile_.count; ++token) {
      const Pair pair = rotated_one_pair(tile_.rows[token], d);
      store(at(d, token), pair.first);
      store(at(d + 1, token), pair.second);
    }
  }

  // Dimensions [d, d + n) of all tokens, each token's by function(row).
  template <typename Function>
  void write_square(int64_t d, int n, const Function& function) const {
    for_columns([&](int64_t token, int columns) {
      Vec square[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        square[i] = i < columns ? function(tile_.rows[token + i]) : zero();
      }
      store_square(square, n, columns, dim_stride_, at(d, token));
    });
  }

  template <typename Function>
  void for_columns(const Function& function) const {
    for (int64_t token = 0; token < tile_.count; token += kWidth) {
      const int64_t left = tile_.count - token;
      function(token, left < kWidth ? static_cast<int>(left) : kWidth);
    }
  }

  Out* at(int64_t d, int64_t token) const { return out_ + d * dim_stride_ + token; }

  const ShiftedTile<In>& tile_;
  int64_t dim_stride_;
  Out* out_;
};

// Writes tiles into the blocks of one cache, whatever their arrangement.
template <typename In, typename Out>
class TileWriter {
 public:
  TileWriter(const PagedView& blocks, const RopeView& rope)
      : blocks_(blocks), rope_(rope), arrangement_(arrangement_of(blocks)) {}

  // `row` is scratch for one row.
  void write(const ShiftedTile<In>& shifted, const Tile& tile, int64_t head, Out* row) const {
    Out* out = head_of_block<Out>(blocks_, tile.block, head);
    if (arrangement_ == Arrangement::token_contiguous) {
      TransposedWriter<In, Out>(shifted, blocks_.dim.outer_stride, out + tile.offset)
          .write(rope_, blocks_.head_size);
      return;
    }
    for (int64_t i = 0; i < shifted.count; ++i) {
      Out* token = out + offset_on(blocks_.token, tile.offset + i);
      if (arrangement_ == Arrangement::dim_contiguous) {
        write_row(shifted.rows[i], rope_, blocks_.head_size, token);
        continue;
      }
      write_row(shifted.rows[i], rope_, blocks_.head_size, row);
      for_each_dim(blocks_.dim, blocks_.head_size,
                   [&](int64_t d, int64_t offset) { token[offset] = row[d]; });
    }
  }

 private:
  const PagedView& blocks_;
  RopeView rope_;
  Arrangement arrangement_;
};

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
