// Rotation of one row (one head of one token) by a position delta.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/vector.h"
#include "phasekv/rope.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

struct SinCos {
  double sin;
  double cos;
};

// For |phase| up to 2^26, to about 2^-32: below the float32 resolution both are rounded to. Without
// a branch, so that loops over it become vector code.
inline SinCos sin_cos(double phase) {
  // phase = n * pi/2 + r, |r| <= pi/4. kHigh has 27 bits, so n * kHigh is exact.
  constexpr double kHigh = 0x1.921fb54p+0;
  constexpr double kLow = 0x1.10b4611a62633p-30;  // pi/2 - kHigh
  constexpr double kTwoOverPi = 0.6366197723675814;
  constexpr double kShift = 0x1.8p+52;  // adding it drops the fraction
  const double n = (phase * kTwoOverPi + kShift) - kShift;
  const double r = (phase - n * kHigh) - n * kLow;
  const double square = r * r;
  double sine = -1.0 / 39916800.0;
  sine = sine * square + 1.0 / 362880.0;
  sine = sine * square - 1.0 / 5040.0;
  sine = sine * square + 1.0 / 120.0;
  sine = sine * square - 1.0 / 6.0;
  sine = sine * square * r + r;
  double cosine = -1.0 / 3628800.0;
  cosine = cosine * square + 1.0 / 40320.0;
  cosine = cosine * square - 1.0 / 720.0;
  cosine = cosine * square + 1.0 / 24.0;
  cosine = cosine * square - 0.5;
  cosine = cosine * square + 1.0;
  // n modulo 4 as -2, -1, 0, 1 or 2, all in floating point.
  const double quadrant = n - 4.0 * ((n * 0.25 + kShift) - kShift);
  const bool odd = quadrant == 1.0 || quadrant == -1.0;
  const double first = odd ? cosine : sine;
  const double second = odd ? sine : cosine;
  const bool half_turn = quadrant == 2.0 || quadrant == -2.0;
  return {half_turn || quadrant == -1.0 ? -first : first,
          half_turn || quadrant == 1.0 ? -second : second};
}

// The factors of one delta. Null for a delta of 0, which leaves every bit of a row as it is.
//   neox         cosine[i], sine[i] of pair i
//   interleaved  by dimension: cosine[2i] = cosine[2i + 1], and -sine, sine
struct Factors {
  const float* cosine = nullptr;
  const float* sine = nullptr;
};

// From those of every pair, in place: cosine and sine [rotary_dim], of which the first halves are
// there.
inline void lay_out_factors(const RopeView& rope, float* cosine, float* sine) {
  if (rope.pairing == RopePairing::neox) return;
  for (int64_t i = rope.rotary_dim / 2 - 1; i >= 0; --i) {  // from the last pair down
    cosine[2 * i] = cosine[2 * i + 1] = cosine[i];
    sine[2 * i + 1] = sine[i];
    sine[2 * i] = -sine[i];
  }
}

// Computes factors, and keeps them for as long as the delta stays the same.
class FactorTable {
 public:
  static int64_t floats_needed(const RopeView& rope) { return 2 * rope.rotary_dim; }

  FactorTable(const RopeView& rope, float* memory)
      : rope_(rope), cosine_(memory), sine_(memory + rope.rotary_dim) {}

  // Valid until another delta is asked for.
  Factors of(int64_t delta) {
    if (delta == 0) return {};
    if (delta != last_delta_) {
      last_delta_ = delta;
      fill(static_cast<double>(delta));
    }
    return {cosine_, sine_};
  }

 private:
  void fill(double delta) {
    const int64_t pairs = rope_.rotary_dim / 2;
    const double* frequencies = rope_.frequencies;
    for (int64_t i = 0; i < pairs; ++i) {
      const SinCos factors = sin_cos(delta * frequencies[i]);
      cosine_[i] = static_cast<float>(factors.cos);
      sine_[i] = static_cast<float>(factors.sin);
    }
    lay_out_factors(rope_, cosine_, sine_);
  }

  RopeView rope_;
  float* cosine_;
  float* sine_;
  int64_t last_delta_ = 0;
};

// A row and what becomes of it: R in + weight * addend. Without an addend (null) just the rotation.
template <typename In>
struct ShiftedRow {
  const In* in = nullptr;
  Factors factors;
  const float* addend = nullptr;
  float weight = 0.0F;
};

// Some lanes of two vectors of a row.
struct Pair {
  Vec first;
  Vec second;
};

template <bool kFull, typename In>
inline Vec add_addend(const ShiftedRow<In>& row, int64_t d, int n, Vec x) {
  if (row.addend == nullptr) return x;
  return fma(broadcast(row.weight), load_lanes<kFull>(row.addend + d, n), x);
}

// Dimensions [d, d + n) that are not rotated.
template <bool kFull, typename In>
inline Vec unrotated(const ShiftedRow<In>& row, int64_t d, int n) {
  return add_addend<kFull>(row, d, n, load_lanes<kFull>(row.in + d, n));
}

// neox: dimensions [d, d + n) and [pairs + d, pairs + d + n), n <= pairs - d.
template <bool kFull, typename In>
inline Pair rotated_neox(const ShiftedRow<In>& row, int64_t pairs, int64_t d, int n) {
  const Vec first = load_lanes<kFull>(row.in + d, n);
  const Vec second = load_lanes<kFull>(row.in + pairs + d, n);
  Pair pair = {first, second};
  if (row.factors.cosine != nullptr) {
    const Vec cosine = load_lanes<kFull>(row.factors.cosine + d, n);
    const Vec sine = load_lanes<kFull>(row.factors.sine + d, n);
    pair.first = negated_fma(second, sine, first * cosine);
    pair.second = fma(first, sine, second * cosine);
  }
  pair.first = add_addend<kFull>(row, d, n, pair.first);
  pair.second = add_addend<kFull>(row, pairs + d, n, pair.second);
  return pair;
}

// interleaved: dimensions [d, d + n), both even. Not for one lane, which holds no pair.
template <bool kFull, typename In>
inline Vec rotated_interleaved(const ShiftedRow<In>& row, int64_t d, int n) {
  Vec x = load_lanes<kFull>(row.in + d, n);
  if (row.factors.cosine != nullptr) {
    const Vec cosine = load_lanes<kFull>(row.factors.cosine + d, n);
    const Vec sine = load_lanes<kFull>(row.factors.sine + d, n);
    x = fma(swap_pairs(x), sine, x * cosine);
  }
  return add_addend<kFull>(row, d, n, x);
}

// The same for one lane: dimensions d and d + 1.
template <typename In>
inline Pair rotated_one_pair(const ShiftedRow<In>& row, int64_t d) {
  const Vec first = load_lanes<true>(row.in + d, 1);
  const Vec second = load_lanes<true>(row.in + d + 1, 1);
  Pair pair = {first, second};
  if (row.factors.cosine != nullptr) {
    const Vec cosine = load(row.factors.cosine + d);
    const Vec sine = load(row.factors.sine + d + 1);
    pair.first = negated_fma(second, sine, first * cosine);
    pair.second = fma(first, sine, second * cosine);
  }
  pair.first = add_addend<true>(row, d, 1, pair.first);
  pair.second = add_addend<true>(row, d + 1, 1, pair.second);
  return pair;
}

// Writes a shifted row of head_size elements. `out` may be the row's own memory.
template <typename In, typename Out>
inline void write_row(const ShiftedRow<In>& row, const RopeView& rope, int64_t head_size,
                      Out* out) {
  const int64_t rotary_dim = row.factors.cosine == nullptr ? 0 : rope.rotary_dim;
  if (rope.pairing == RopePairing::neox) {
    const int64_t pairs = rotary_dim / 2;
    for_lanes(0, pairs, [&](auto lanes, int64_t d, int n) {
      const Pair pair = rotated_neox<lanes.kFull>(row, pairs, d, n);
      store_lanes<lanes.kFull>(out + d, pair.first, n);
      store_lanes<lanes.kFull>(out + pairs + d, pair.second, n);
    });
  } else if constexpr (kWidth == 1) {
    for (int64_t d = 0; d < rotary_dim; d += 2) {
      const Pair pair = rotated_one_pair(row, d);
      store(out + d, pair.first);
      store(out + d + 1, pair.second);
    }
  } else {
    for_lanes(0, rotary_dim, [&](auto lanes, int64_t d, int n) {
      store_lanes<lanes.kFull>(out + d, rotated_interleaved<lanes.kFull>(row, d, n), n);
    });
  }
  for_lanes(rotary_dim, head_size, [&](auto lanes, int64_t d, int n) {
    store_lanes<lanes.kFull>(out + d, unrotated<lanes.kFull>(row, d, n), n);
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
