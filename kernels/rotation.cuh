// Rotation of rows by position deltas, and how the elements of a row are dealt to threads.
#pragma once

#include <cstdint>

#include "elements.cuh"
#include "phasekv/rope.h"
#include "platform.cuh"

namespace phasekv::cuda {

struct SinCos {
  float sin;
  float cos;
};

// For |phase| up to 2^26: the phase is reduced and both are computed in float64, to about 2^-32,
// and rounded once.
__device__ inline SinCos sin_cos(double phase) {
  constexpr double kTwoOverPi = 0.6366197723675814;
  constexpr double kHigh = 1.5707963267948966;    // pi / 2 as a double,
  constexpr double kLow = 6.123233995736766e-17;  // and what it lacks
  const double turns = rint(phase * kTwoOverPi);  // quarters
  const double r = fma(-turns, kLow, fma(-turns, kHigh, phase));
  const double square = r * r;
  double sine = -1.0 / 39916800.0;
  sine = fma(sine, square, 1.0 / 362880.0);
  sine = fma(sine, square, -1.0 / 5040.0);
  sine = fma(sine, square, 1.0 / 120.0);
  sine = fma(sine, square, -1.0 / 6.0);
  sine = fma(sine * square, r, r);
  double cosine = -1.0 / 3628800.0;
  cosine = fma(cosine, square, 1.0 / 40320.0);
  cosine = fma(cosine, square, -1.0 / 720.0);
  cosine = fma(cosine, square, 1.0 / 24.0);
  cosine = fma(cosine, square, -0.5);
  cosine = fma(cosine, square, 1.0);
  const int64_t quadrant = static_cast<int64_t>(turns) & 3;
  const double first = (quadrant & 1) != 0 ? cosine : sine;
  const double second = (quadrant & 1) != 0 ? sine : cosine;
  return {static_cast<float>(quadrant >= 2 ? -first : first),
          static_cast<float>(quadrant == 1 || quadrant == 2 ? -second : second)};
}

// One head of one token.
struct HeadShape {
  unsigned head_size = 0;
  unsigned rotary_dim = 0;  // 0: nothing is rotated
  bool is_interleaved = false;
};

inline HeadShape head_shape_of(int64_t head_size, const RopeView& rope, bool rotates) {
  return {static_cast<unsigned>(head_size), rotates ? static_cast<unsigned>(rope.rotary_dim) : 0U,
          rope.pairing == RopePairing::interleaved};
}

// A thread takes a unit of a head: kPairs pairs that are rotated, or 2 kPairs dimensions that are
// not. With kPairs = 8 a unit is two vectors of 8 elements, for which the sizes must be multiples
// of 16 (fits_wide_units); with kPairs = 1 any sizes go, and the last dimension may be alone.
inline constexpr int kWidePairs = 8;

template <int kPairs>
struct Unit {
  unsigned first;   // dimensions [first, first + kPairs)
  unsigned second;  // and [second, second + kPairs)
  int pair;         // the first of the pairs; -1: not rotated
  bool has_second;
};

inline bool fits_wide_units(const HeadShape& shape) {
  constexpr unsigned kWidth = 2 * kWidePairs;
  return shape.head_size % kWidth == 0 && shape.rotary_dim % kWidth == 0;
}

template <int kPairs>
inline unsigned units_of(const HeadShape& shape) {
  constexpr unsigned kWidth = 2 * kPairs;
  return shape.rotary_dim / kWidth + (shape.head_size - shape.rotary_dim + kWidth - 1) / kWidth;
}

template <int kPairs>
__device__ inline Unit<kPairs> unit_of(const HeadShape& shape, unsigned index) {
  constexpr unsigned kWidth = 2 * kPairs;
  const unsigned rotated = shape.rotary_dim / kWidth;
  Unit<kPairs> unit;
  if (index < rotated) {
    unit.pair = static_cast<int>(index * kPairs);
    unit.first = shape.is_interleaved ? index * kWidth : index * kPairs;
    unit.second = shape.is_interleaved ? unit.first + kPairs : shape.rotary_dim / 2 + unit.first;
    unit.has_second = true;
  } else {
    unit.pair = -1;
    unit.first = shape.rotary_dim + (index - rotated) * kWidth;
    unit.second = unit.first + kPairs;
    unit.has_second = unit.second < shape.head_size;
  }
  return unit;
}

// values[0, kPairs) and values[kPairs, 2 kPairs) are the two parts of a unit.
template <int kPairs>
__device__ inline void load_unit(const Unit<kPairs>& unit, const void* data, DataType dtype,
                                 int64_t offset, float (&values)[2 * kPairs]) {
  load_vector<kPairs>(data, dtype, offset + unit.first, values);
  if (unit.has_second) {
    load_vector<kPairs>(data, dtype, offset + unit.second, values + kPairs);
  } else {
    values[kPairs] = 0.0F;
  }
}

// Of the unit's own pairs.
template <int kPairs>
__device__ inline void rotate_unit(bool is_interleaved, const float (&cosines)[kPairs],
                                   const float (&sines)[kPairs], float (&values)[2 * kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    float& first = values[is_interleaved ? 2 * i : i];
    float& second = values[is_interleaved ? 2 * i + 1 : kPairs + i];
    const float x = first;
    const float y = second;
    first = fmaf(-y, sines[i], x * cosines[i]);
    second = fmaf(x, sines[i], y * cosines[i]);
  }
}

// The factors of a block's tokens, in shared memory. Tokens beside each other with the same delta
// share a table, which is computed once; a delta of 0 has none, and leaves every bit of a row as it
// is.
struct FactorTables {
  int* table_of;  // [tokens], -1: not rotated
  float* tables;  // [tokens][rotary_dim]: cosines, then sines, of each pair

  // `deltas` [tokens] is in shared memory. All threads of the block call this, between barriers.
  __device__ void fill(const RopeView& rope, const int64_t* deltas, unsigned tokens) const {
    const auto pairs = static_cast<unsigned>(rope.rotary_dim / 2);
    for (unsigned item = threadIdx.x; item < tokens * pairs; item += blockDim.x) {
      const unsigned token = item / pairs;
      const unsigned pair = item - token * pairs;
      const int64_t delta = deltas[token];
      if (pair == 0) {
        unsigned first = token;
        while (first > 0 && deltas[first - 1] == delta) --first;
        table_of[token] = delta == 0 ? -1 : static_cast<int>(first);
      }
      if (delta == 0 || (token > 0 && deltas[token - 1] == delta)) continue;
      const SinCos factors = sin_cos(static_cast<double>(delta) * rope.frequencies[pair]);
      float* table = tables + token * rope.rotary_dim;
      table[pair] = factors.cos;
      table[pairs + pair] = factors.sin;
    }
  }

  // Rotates a unit of a token's row.
  template <int kPairs>
  __device__ void rotate(const HeadShape& shape, unsigned token, const Unit<kPairs>& unit,
                         float (&values)[2 * kPairs]) const {
    if (unit.pair < 0 || table_of[token] < 0) return;
    const float* table = tables + static_cast<unsigned>(table_of[token]) * shape.rotary_dim;
    float cosines[kPairs];
    float sines[kPairs];
    load_vector<kPairs>(table + unit.pair, cosines);
    load_vector<kPairs>(table + shape.rotary_dim / 2 + unit.pair, sines);
    if (shape.is_interleaved) {
      rotate_unit<kPairs>(true, cosines, sines, values);
    } else {
      rotate_unit<kPairs>(false, cosines, sines, values);
    }
  }
};

}  // namespace phasekv::cuda
