// attend_rows: brings a stretch of a request's keys and values into the shape that the products
// want, float32 keys [head_size][tokens] and values [tokens][head_size].
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/rows.h"
#include "cpu/tile.h"
#include "cpu/unpack.h"
#include "cpu/vector.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// Tokens [begin, begin + tokens) of a request.
struct Chunk {
  int64_t begin;
  int tokens;
  const float* keys;  // [head_size], key_stride apart, of adjacent tokens; up to a full vector
                      // beyond `tokens` may be read, and holds anything
  int64_t key_stride;
  const float* values;  // [tokens], value_stride apart, of adjacent elements
  int64_t value_stride;
};

struct ChunkSource {
  const PagedView& key;
  const PagedView& value;
  const int32_t* blocks;  // of the request
  int64_t head;
};

// Whether the products can read the cache where it lies.
inline bool readable_in_place(const PagedView& key, const PagedView& value) {
  constexpr int64_t kLeastTokens = 32;  // shorter chunks would spend their time between products
  return key.dtype == DataType::float32 && key.block_size % kWidth == 0 &&
         key.block_size >= kLeastTokens && key.head_size % kWidth == 0 &&
         arrangement_of(key) == Arrangement::token_contiguous &&
         arrangement_of(value) == Arrangement::dim_contiguous && value.token.tile == 1;
}

// The chunk at `begin`, where it lies: it ends with its block, or before.
inline Chunk chunk_in_place(const ChunkSource& source, int64_t begin) {
  const PagedView& key = source.key;
  const PagedView& value = source.value;
  const int64_t block = source.blocks[begin / key.block_size];
  const int64_t token = begin % key.block_size;
  const int64_t left = key.block_size - token;
  return {begin,
          static_cast<int>(left < kChunkTokens ? left : kChunkTokens),
          head_of_block<const float>(key, block, source.head) + token,
          key.dim.outer_stride,
          head_of_block<const float>(value, block, source.head) + offset_on(value.token, token),
          value.token.outer_stride};
}

// Tokens [token, token + count) of a head of a block as to[0 .. count)[dim], tokens `to_stride`
// apart.
template <typename T>
inline void unpack_values(const PagedView& value, const T* block, int64_t token, int count,
                          float* to, int64_t to_stride) {
  const int head_size = static_cast<int>(value.head_size);
  switch (arrangement_of(value)) {
    case Arrangement::dim_contiguous:
      for (int i = 0; i < count; ++i) {
        copy_row(block + offset_on(value.token, token + i), head_size, to + i * to_stride);
      }
      return;
    case Arrangement::token_contiguous:
      return unpack_transposed(block + token, value.dim.outer_stride, head_size, count, to,
                               to_stride);
    case Arrangement::other:
      return unpack_matrix(block, value.token, token, count, value.dim, 0, head_size, to,
                           to_stride);
  }
}

// The chunk [begin, end), at most kChunkTokens, from however many blocks it lies in. `keys` has
// room for [head_size][kChunkTokens], `values` for [kChunkTokens][value_stride].
inline Chunk unpack_chunk(const ChunkSource& source, int64_t begin, int64_t end, float* keys,
                          float* values, int64_t value_stride) {
  const PagedView& key = source.key;
  const PagedView& value = source.value;
  with_type(key.dtype, [&](auto tag) {  // the values have the same
    using T = typename decltype(tag)::Type;
    for (int64_t at = begin; at < end;) {
      const int64_t block = source.blocks[at / key.block_size];
      const int64_t token = at % key.block_size;
      const int64_t left = key.block_size - token;
      const int count = static_cast<int>(left < end - at ? left : end - at);
      unpack_keys(key, head_of_block<const T>(key, block, source.head), token, count,
                  keys + (at - begin));
      unpack_values(value, head_of_block<const T>(value, block, source.head), token, count,
                    values + (at - begin) * value_stride, value_stride);
      at += count;
    }
  });
  return {begin, static_cast<int>(end - begin), keys, kChunkTokens, values, value_stride};
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
