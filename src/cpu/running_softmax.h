// The softmax of a row that becomes known piece by piece: weights relative to a running maximum.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

inline constexpr float kNoMaximum = -3.0e38F;  // finite, so that -infinity minus it is not NaN
inline constexpr float kHeadroom = 8.0F;       // see soften

// 2^x to float32 rounding for x in [-126, 127]; below, 0 if kZeroBelow, else about 2^-126.
template <bool kZeroBelow>
inline Vec exp2(Vec x) {
  const Vec least = broadcast(-126.0F);
  const Vec bounded = max(least, x);  // in this order NaN stays NaN
  const Vec n = round(bounded);
  const Vec r = bounded - n;
  // Minimax on [-1/2, 1/2] with p(0) = 1, relative error 1e-8 before rounding.
  Vec p = broadcast(1.53457947e-4F);
  p = fma(p, r, broadcast(1.33999311e-3F));
  p = fma(p, r, broadcast(9.61848902e-3F));
  p = fma(p, r, broadcast(5.55032878e-2F));
  p = fma(p, r, broadcast(2.40226469e-1F));
  p = fma(p, r, broadcast(6.93147206e-1F));
  p = fma(p, r, broadcast(1.0F));
  p = scale_normal_by_power_of_two(p, n);
  return kZeroBelow ? zero_where_less(p, x, least) : p;
}

inline float exp2_of(float x) { return first_lane(exp2<true>(broadcast(x))); }

// The running state of one query: its output is `out` / sum of the lanes of `sum`, both in units
// of 2^maximum.
struct RunningRow {
  float* out;
  float* sum;
  float* maximum;
};

inline void scale_row(float* row, int64_t vectors, float factor) {
  const Vec scale = broadcast(factor);
  for (int64_t v = 0; v < vectors; ++v) store(row + v * kWidth, scale * load(row + v * kWidth));
}

// Turns a row of scores (in powers of two) into weights relative to 2^maximum. The maximum follows
// the scores only when they pass it by kHeadroom: weights up to 2^kHeadroom are as precise as those
// up to 1, and few rescalings remain.
template <bool kMasked>
inline void soften(float* scores, int64_t vectors, const RunningRow& row, int64_t out_vectors) {
  Vec most = load(scores);
  for (int64_t v = 1; v < vectors; ++v) most = max(most, load(scores + v * kWidth));
  if (any_greater(most, broadcast(*row.maximum + kHeadroom))) {
    const float maximum = reduce_max(most);
    const float factor = exp2_of(*row.maximum - maximum);
    *row.maximum = maximum;
    scale_row(row.out, out_vectors, factor);
    scale_row(row.sum, 1, factor);
  }
  const Vec maximum = broadcast(*row.maximum);
  Vec sum = load(row.sum);
  Vec other_sum = zero();
  int64_t v = 0;
  for (; v + 2 <= vectors; v += 2) {
    const Vec first = exp2<kMasked>(load(scores + v * kWidth) - maximum);
    const Vec second = exp2<kMasked>(load(scores + (v + 1) * kWidth) - maximum);
    store(scores + v * kWidth, first);
    store(scores + (v + 1) * kWidth, second);
    sum = sum + first;
    other_sum = other_sum + second;
  }
  if (v < vectors) {
    const Vec last = exp2<kMasked>(load(scores + v * kWidth) - maximum);
    store(scores + v * kWidth, last);
    sum = sum + last;
  }
  store(row.sum, sum + other_sum);
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
