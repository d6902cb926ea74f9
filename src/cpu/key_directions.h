// Keys as directions: their norms, and the sum of the keys of unit length.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/isa.h"
#include "cpu/key_columns.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

inline constexpr float kNormAddend = 1e-8F;

// Of two rows, [size].
template <typename Left, typename Right>
inline float product(const Left* left, const Right* right, int64_t size) {
  Vec added = zero();
  for_lanes(0, size, [&](auto lanes, int64_t d, int n) {
    added = fma(load_lanes<lanes.kFull>(left + d, n), load_lanes<lanes.kFull>(right + d, n), added);
  });
  return reduce_add(added);
}

// For the columns [skipped, chunk.columns) of a chunk: inverse_norm[column] = 1 / (norm +
// kNormAddend), and sum[d] += the keys times that.
inline void add_directions(const KeyChunk& chunk, int64_t skipped, int64_t head_size,
                           float* inverse_norm, float* sum) {
  const float* keys = chunk.keys + skipped;
  const int64_t count = chunk.columns - skipped;
  inverse_norm += skipped;
  for_lanes(0, count, [&](auto lanes, int64_t i, int n) {
    Vec squares = zero();
    for (int64_t d = 0; d < head_size; ++d) {
      const Vec x = load_lanes<lanes.kFull>(keys + d * chunk.stride + i, n);
      squares = fma(x, x, squares);
    }
    store_lanes<lanes.kFull>(inverse_norm + i, sqrt(squares) + broadcast(kNormAddend), n);
  });
  for (int64_t i = 0; i < count; ++i) inverse_norm[i] = 1.0F / inverse_norm[i];
  for (int64_t d = 0; d < head_size; ++d) {
    Vec added = zero();
    for_lanes(0, count, [&](auto lanes, int64_t i, int n) {
      added = fma(load_lanes<lanes.kFull>(keys + d * chunk.stride + i, n),
                  load_lanes<lanes.kFull>(inverse_norm + i, n), added);
    });
    sum[d] += reduce_add(added);
  }
}

// The same for one key, [head_size] of float, BFloat16 or Float16; returns its inverse norm.
template <typename T>
inline float add_direction(const T* key, int64_t head_size, float* sum) {
  const float inverse_norm = 1.0F / (std::sqrt(product(key, key, head_size)) + kNormAddend);
  const Vec factor = broadcast(inverse_norm);
  for_lanes(0, head_size, [&](auto lanes, int64_t d, int n) {
    const Vec x = load_lanes<lanes.kFull>(key + d, n);
    store_lanes<lanes.kFull>(sum + d, fma(x, factor, load_lanes<lanes.kFull>(sum + d, n)), n);
  });
  return inverse_norm;
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
