// Keys as directions: their norms, and the sum of the keys of unit length.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/key_columns.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

inline constexpr float kNormAddend = 1e-8F;

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

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
