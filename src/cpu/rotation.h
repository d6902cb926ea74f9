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

// For |phase| up to 2^26, to about 2^-32: below the float32 resolution both are rounded to. Without a
// branch, so that loops over it become vector code.
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

// The factors of one delta, in memory of the caller's. Reused while the delta stays the same.
class Rotation {
 public:
  static int64_t floats_needed(const RopeView& rope) { return 2 * rope.rotary_dim; }

  Rotation(const RopeView& rope, float* memory) : rope_(rope), cos_(memory) {
    sin_ = memory + rope.rotary_dim;
  }

  void set_delta(int64_t delta) {
    if (delta == delta_) return;
    delta_ = delta;
    const int64_t pairs = rope_.rotary_dim / 2;
    const double position = static_cast<double>(delta);
    for (int64_t i = 0; i < pairs; ++i) {
      const SinCos factors = sin_cos(position * rope_.frequencies[i]);
      cos_[i] = static_cast<float>(factors.cos);
      sin_[i] = static_cast<float>(factors.sin);
    }
    if (rope_.pairing == RopePairing::interleaved) spread_to_pairs(pairs);
  }

  // out = R(delta) in + weight * addend, over `head_size` dimensions; without an addend (null) just
  // the rotation. A delta of 0 leaves every bit as it is. `out` may be `in`.
  template <typename In, typename Out>
  void apply(const In* in, int64_t head_size, const float* addend, float weight, Out* out) const {
    if (addend == nullptr) {
      apply_all<false>(in, head_size, addend, weight, out);
    } else {
      apply_all<true>(in, head_size, addend, weight, out);
    }
  }

 private:
  // In place, from the last pair down: cos_i, cos_i and -sin_i, sin_i for dimensions 2i, 2i + 1.
  void spread_to_pairs(int64_t pairs) {
    for (int64_t i = pairs - 1; i >= 0; --i) {
      cos_[2 * i] = cos_[2 * i + 1] = cos_[i];
      sin_[2 * i + 1] = sin_[i];
      sin_[2 * i] = -sin_[i];
    }
  }

  template <bool kAdds, typename In, typename Out>
  void apply_all(const In* in, int64_t head_size, const float* addend, float weight,
                 Out* out) const;

  template <bool kAdds, typename In, typename Out>
  void apply_neox(const In* in, const float* addend, float weight, Out* out) const;

  template <bool kAdds, typename In, typename Out>
  void apply_interleaved(const In* in, const float* addend, float weight, Out* out) const;

  RopeView rope_;
  float* cos_;
  float* sin_;
  int64_t delta_ = 0;
};

// out[i] = in[i] + weight * addend[i] for i in [begin, end), or without kAdds out[i] = in[i].
template <bool kAdds, typename In, typename Out>
inline void add_scaled(const In* in, const float* addend, float weight, int64_t begin, int64_t end,
                       Out* out) {
  const Vec factor = broadcast(weight);
  int64_t d = begin;
  for (; d + kWidth <= end; d += kWidth) {
    Vec x = load(in + d);
    if constexpr (kAdds) x = fma(factor, load(addend + d), x);
    store(out + d, x);
  }
  if (d < end) {
    const int rest = static_cast<int>(end - d);
    Vec x = load_partial(in + d, rest);
    if constexpr (kAdds) x = fma(factor, load_partial(addend + d, rest), x);
    store_partial(out + d, x, rest);
  }
}

template <bool kAdds, typename In, typename Out>
inline void Rotation::apply_all(const In* in, int64_t head_size, const float* addend, float weight,
                                Out* out) const {
  int64_t rotated = 0;
  if (delta_ != 0) {
    rotated = rope_.rotary_dim;
    if (rope_.pairing == RopePairing::neox) {
      apply_neox<kAdds>(in, addend, weight, out);
    } else {
      apply_interleaved<kAdds>(in, addend, weight, out);
    }
  }
  add_scaled<kAdds>(in, addend, weight, rotated, head_size, out);
}

template <bool kAdds, typename In, typename Out>
inline void Rotation::apply_neox(const In* in, const float* addend, float weight, Out* out) const {
  const int64_t pairs = rope_.rotary_dim / 2;
  const Vec factor = broadcast(weight);
  int64_t i = 0;
  for (; i + kWidth <= pairs; i += kWidth) {
    const Vec first = load(in + i);
    const Vec second = load(in + pairs + i);
    const Vec cosine = load(cos_ + i);
    const Vec sine = load(sin_ + i);
    Vec new_first = negated_fma(second, sine, first * cosine);
    Vec new_second = fma(first, sine, second * cosine);
    if constexpr (kAdds) {
      new_first = fma(factor, load(addend + i), new_first);
      new_second = fma(factor, load(addend + pairs + i), new_second);
    }
    store(out + i, new_first);
    store(out + pairs + i, new_second);
  }
  if (i < pairs) {
    const int rest = static_cast<int>(pairs - i);
    const Vec first = load_partial(in + i, rest);
    const Vec second = load_partial(in + pairs + i, rest);
    const Vec cosine = load_partial(cos_ + i, rest);
    const Vec sine = load_partial(sin_ + i, rest);
    Vec new_first = negated_fma(second, sine, first * cosine);
    Vec new_second = fma(first, sine, second * cosine);
    if constexpr (kAdds) {
      new_first = fma(factor, load_partial(addend + i, rest), new_first);
      new_second = fma(factor, load_partial(addend + pairs + i, rest), new_second);
    }
    store_partial(out + i, new_first, rest);
    store_partial(out + pairs + i, new_second, rest);
  }
}

template <bool kAdds, typename In, typename Out>
inline void Rotation::apply_interleaved(const In* in, const float* addend, float weight,
                                        Out* out) const {
  const int64_t rotary_dim = rope_.rotary_dim;
  if constexpr (kWidth == 1) {
    for (int64_t d = 0; d < rotary_dim; d += 2) {
      const Vec first = load(in + d);
      const Vec second = load(in + d + 1);
      Vec new_first = fma(second, load(sin_ + d), first * load(cos_ + d));
      Vec new_second = fma(first, load(sin_ + d + 1), second * load(cos_ + d + 1));
      if constexpr (kAdds) {
        new_first = fma(broadcast(weight), load(addend + d), new_first);
        new_second = fma(broadcast(weight), load(addend + d + 1), new_second);
      }
      store(out + d, new_first);
      store(out + d + 1, new_second);
    }
  } else {
    const Vec factor = broadcast(weight);
    int64_t d = 0;
    for (; d + kWidth <= rotary_dim; d += kWidth) {
      const Vec x = load(in + d);
      Vec rotated = fma(swap_pairs(x), load(sin_ + d), x * load(cos_ + d));
      if constexpr (kAdds) rotated = fma(factor, load(addend + d), rotated);
      store(out + d, rotated);
    }
    if (d < rotary_dim) {
      const int rest = static_cast<int>(rotary_dim - d);
      const Vec x = load_partial(in + d, rest);
      Vec rotated = fma(swap_pairs(x), load_partial(sin_ + d, rest), x * load_partial(cos_ + d, rest));
      if constexpr (kAdds) rotated = fma(factor, load_partial(addend + d, rest), rotated);
      store_partial(out + d, rotated, rest);
    }
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
