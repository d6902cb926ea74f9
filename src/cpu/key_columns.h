// Keys of one head of a request as the columns of a float32 matrix [head_size][columns], which
// products read chunk by chunk, where possible where they lie.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/lines.h"
#include "cpu/rows.h"
#include "cpu/tile.h"
#include "cpu/unpack.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

struct KeyChunk {
  int64_t begin;      // first column, a multiple of kWidth
  int64_t columns;    // only the last chunk's may be no multiple of kWidth
  const float* keys;  // [head_size], stride apart, of adjacent columns; columns that are no keys,
                      // up to the next multiple of kWidth too, may be read and hold anything
  int64_t stride;
};

// Key i of [first_token, first_token + tokens) is column lead() + i: a vector of columns then never
// reaches over the end of a block whose size is a multiple of kWidth.
class KeyColumns {
 public:
  KeyColumns(const PagedView& key, const int32_t* blocks, int64_t head, int64_t first_token,
             int64_t tokens)
      : key_(key),
        blocks_(blocks),
        head_(head),
        origin_(first_token - lead_of(first_token)),
        begin_(lead_of(first_token)),
        end_(begin_ + tokens),
        arrangement_(arrangement_of(key)),
        in_place_(readable_in_place(key)) {}

  static int64_t lead_of(int64_t first_token) { return first_token % kWidth; }

  // Columns [lead(), end()) are keys.
  int64_t lead() const { return begin_; }
  int64_t end() const { return end_; }

  // At most so many chunks, each where another ended, make up the columns.
  static int64_t most_chunks(const PagedView& key, int64_t first_token, int64_t tokens) {
    const int64_t columns = lead_of(first_token) + tokens;
    if (!readable_in_place(key)) return columns / kChunkTokens + 1;
    const int64_t chunks_of_block = (key.block_size + kChunkTokens - 1) / kChunkTokens;
    return (columns / key.block_size + 2) * chunks_of_block;
  }

  // The chunk that begins at `column`, a multiple of kWidth. `buffer` has room for
  // [head_size][kChunkTokens].
  KeyChunk chunk(int64_t column, float* buffer) const {
    return in_place_ ? chunk_in_place(column) : unpacked_chunk(column, buffer);
  }

  // visit(chunk, columns before the first key) for the chunks of columns [begin, end), of which
  // begin is a multiple of kWidth. `buffer` as above.
  template <typename Visit>
  void for_each_chunk(int64_t begin, int64_t end, float* buffer, const Visit& visit) const {
    for (int64_t column = begin; column < end;) {
      KeyChunk part = chunk(column, buffer);
      if (part.columns > end - column) part.columns = end - column;
      visit(part, column < begin_ ? begin_ - column : 0);
      column += part.columns;
    }
  }

  // How many columns that chunk has.
  int64_t chunk_columns(int64_t column) const {
    const int64_t columns = end_ - column < kChunkTokens ? end_ - column : kChunkTokens;
    if (!in_place_) return columns;
    const int64_t left = key_.block_size - (origin_ + column) % key_.block_size;
    return columns < left ? columns : left;
  }

  // Brings part `part` of `parts` of the chunk that begins at `column` closer, if there is one.
  void fetch(int64_t column, int64_t part, int64_t parts) const {
    if (column >= end_ || arrangement_ == Arrangement::other) return;
    const int64_t at = origin_ + (column < begin_ ? begin_ : column);
    const int64_t token = at % key_.block_size;
    const int64_t left = key_.block_size - token;
    const int64_t tokens = chunk_columns(column) < left ? chunk_columns(column) : left;
    const bool is_by_dim = arrangement_ == Arrangement::token_contiguous;
    const int64_t rows = is_by_dim ? key_.head_size : tokens;
    const int64_t row_bytes = (is_by_dim ? tokens : key_.head_size) * size_of(key_.dtype);
    const int64_t stride =
        (is_by_dim ? key_.dim.outer_stride : key_.token.outer_stride) * size_of(key_.dtype);
    const char* first = static_cast<const char*>(key_.data) +
                        (blocks_[at / key_.block_size] * key_.block_stride +
                         head_ * key_.head_stride + offset_on(key_.token, token)) *
                            size_of(key_.dtype);
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
      for (int64_t i = 0; i < row_bytes; i += kLine<char>) prefetch(first + row * stride + i);
    }
  }

 private:
  static bool readable_in_place(const PagedView& key) {
    constexpr int64_t kLeastTokens = 32;  // shorter chunks would spend their time between products
    return key.dtype == DataType::float32 && key.block_size % kWidth == 0 &&
           key.block_size >= kLeastTokens && arrangement_of(key) == Arrangement::token_contiguous;
  }

  KeyChunk chunk_in_place(int64_t column) const {
    const int64_t at = origin_ + column;
    const float* block = head_of_block<const float>(key_, blocks_[at / key_.block_size], head_);
    return {column, chunk_columns(column), block + at % key_.block_size, key_.dim.outer_stride};
  }

  KeyChunk unpacked_chunk(int64_t column, float* buffer) const {
    const int64_t columns = chunk_columns(column);
    const int64_t first = column < begin_ ? begin_ : column;
    with_type(key_.dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      for (int64_t i = first; i < column + columns;) {
        const int64_t at = origin_ + i;
        const int64_t token = at % key_.block_size;
        const int64_t left = key_.block_size - token;
        const int64_t wanted = column + columns - i;
        const int count = static_cast<int>(left < wanted ? left : wanted);
        unpack_keys(key_, head_of_block<const T>(key_, blocks_[at / key_.block_size], head_), token,
                    count, buffer + (i - column));
        i += count;
      }
    });
    return {column, columns, buffer, kChunkTokens};
  }

  const PagedView& key_;
  const int32_t* blocks_;
  int64_t head_;
  int64_t origin_;  // index of column 0 in the request
  int64_t begin_;
  int64_t end_;
  Arrangement arrangement_;
  bool in_place_;
};

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
