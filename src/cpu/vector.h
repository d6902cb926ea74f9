// Vec: as many float32 as one register of the instruction set holds. The one place with intrinsics.
//
//   kWidth                    lanes
//   load, store               from and to float, BFloat16, Float16 (converted, rounded to nearest
//                             even) and Bits16 (moved in the low half of a lane)
//   load_partial(p, n)        lanes [0, n), zero elsewhere; nothing outside [p, p + n) is read
//   store_partial(p, v, n)    lanes [0, n); nothing outside [p, p + n) is written
//   fma(a, b, c)              a * b + c
//   negated_fma(a, b, c)      c - a * b
//   max(a, b), min(a, b)      b where either is NaN
//   reduce_add, reduce_max    over the lanes, always in the same order
//   sqrt                      rounded to nearest
//   exp                       to 2 units in the last place; 0 below -87.33, infinity above 88.72
//   scale_normal_by_power_of_two(a, n)
//                             a * 2^n for whole n where a and a * 2^n are normal or a is NaN
//   any_greater(a, b)         whether a > b in any lane
//   load_pairs(p, &a, &b)     kWidth pairs of BFloat16: the first and the second of each
//   swap_pairs                lanes 2i and 2i + 1 exchanged (not for one lane)
//   transpose(v)              v[0 .. kWidth) as a square matrix
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/storage.h"

#if PHASEKV_ISA_LEVEL == PHASEKV_ISA_SCALAR
#include "cpu/vector_scalar.h"
#elif PHASEKV_ISA_LEVEL == PHASEKV_ISA_AVX2
#include "cpu/vector_avx2.h"
#else
#include "cpu/vector_avx512.h"
#endif

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// One element, by the same conversions as a vector's.
inline float load_one(const float* p) { return *p; }

template <typename T>
inline float load_one(const T* p) {
  return first_lane(load_partial(p, 1));
}

inline void store_one(float* p, float x) { *p = x; }

template <typename T>
inline void store_one(T* p, float x) {
  store_partial(p, broadcast(x), 1);
}

// A vector's lanes, all of them (kFull) or the first n.
template <bool kIsFull>
struct Lanes {
  static constexpr bool kFull = kIsFull;
};

template <bool kFull, typename T>
inline Vec load_lanes(const T* p, int n) {
  if constexpr (kFull) {
    return load(p);
  } else {
    return load_partial(p, n);
  }
}

template <bool kFull, typename T>
inline void store_lanes(T* p, Vec a, int n) {
  if constexpr (kFull) {
    store(p, a);
  } else {
    store_partial(p, a, n);
  }
}

// function(Lanes<true>{}, i, kWidth) for i in [begin, end) by vectors, then for the rest
// function(Lanes<false>{}, i, n).
template <typename Function>
inline void for_lanes(int64_t begin, int64_t end, const Function& function) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) function(Lanes<true>{}, i, kWidth);
  if (i < end) function(Lanes<false>{}, i, static_cast<int>(end - i));
}

inline Vec exp(Vec x) {
  // exp(x) = 2^n exp(r), |r| <= ln(2) / 2; the series to r^7 ends below float32 resolution.
  const Vec bounded = min(broadcast(89.0F), max(broadcast(-88.0F), x));
  const Vec n = round(bounded * broadcast(1.44269504F));
  Vec r = negated_fma(n, broadcast(0.693359375F), bounded);
  r = negated_fma(n, broadcast(-2.12194440e-4F), r);
  Vec p = broadcast(1.0F / 5040.0F);
  p = fma(p, r, broadcast(1.0F / 720.0F));
  p = fma(p, r, broadcast(1.0F / 120.0F));
  p = fma(p, r, broadcast(1.0F / 24.0F));
  p = fma(p, r, broadcast(1.0F / 6.0F));
  p = fma(p, r, broadcast(0.5F));
  p = fma(p, r, broadcast(1.0F));
  p = fma(p, r, broadcast(1.0F));
  return zero_where_less(scale_by_power_of_two(p, n), x, broadcast(-87.33F));
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
