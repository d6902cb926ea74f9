// Vec of one lane, in plain C++: for any processor, and the reference for the others.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/storage.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

inline constexpr int kWidth = 1;

struct Vec {
  float x;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline Vec zero() { return {0.0F}; }
inline Vec broadcast(float x) { return {x}; }
inline float first_lane(Vec a) { return a.x; }

inline Vec operator+(Vec a, Vec b) { return {a.x + b.x}; }
inline Vec operator-(Vec a, Vec b) { return {a.x - b.x}; }
inline Vec operator*(Vec a, Vec b) { return {a.x * b.x}; }
inline Vec operator/(Vec a, Vec b) { return {a.x / b.x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.x * b.x + c.x}; }
inline Vec negated_fma(Vec a, Vec b, Vec c) { return {c.x - a.x * b.x}; }
inline Vec max(Vec a, Vec b) { return {a.x > b.x ? a.x : b.x}; }
inline Vec min(Vec a, Vec b) { return {a.x < b.x ? a.x : b.x}; }
inline Vec sqrt(Vec a) { return {__builtin_sqrtf(a.x)}; }
inline float reduce_add(Vec a) { return a.x; }
inline float reduce_max(Vec a) { return a.x; }

// To the nearest whole number, ties to even; |a| < 2^22.
inline Vec round(Vec a) {
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: adding it drops the fraction
  const float shifted = a.x + kShift;
  return {shifted - kShift};
}

// a * 2^n for whole n in [-127, 129]; in two steps, since 2^n itself may not be a float32.
inline Vec scale_by_power_of_two(Vec a, Vec n) {
  if (!(n.x >= -127.0F && n.x <= 129.0F)) return {a.x + n.x};  // NaN
  const int exponent = static_cast<int>(n.x);
  const int half = exponent / 2;
  const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float second = float_of(static_cast<uint32_t>(exponent - half + 127) << 23);
  return {a.x * first * second};
}

inline Vec scale_normal_by_power_of_two(Vec a, Vec n) { return scale_by_power_of_two(a, n); }
inline bool any_greater(Vec a, Vec b) { return a.x > b.x; }

inline Vec zero_where_less(Vec a, Vec x, Vec bound) { return x.x < bound.x ? zero() : a; }

inline Vec load(const float* p) { return {*p}; }
inline Vec load(const BFloat16* p) { return {float_of(static_cast<uint32_t>(p->bits) << 16)}; }
inline Vec load(const Bits16* p) { return {float_of(p->bits)}; }

inline void load_pairs(const BFloat16* p, Vec* first, Vec* second) {
  *first = load(p);
  *second = load(p + 1);
}

inline Vec load(const Float16* p) {
  const uint32_t sign = static_cast<uint32_t>(p->bits & 0x8000U) << 16;
  const uint32_t exponent = (p->bits >> 10) & 0x1FU;
  const uint32_t mantissa = p->bits & 0x3FFU;
  if (exponent == 0x1FU) {  // infinity or NaN; a NaN comes out quiet, as from the hardware
    const uint32_t quiet = mantissa != 0 ? 0x00400000U : 0U;
    return {float_of(sign | 0x7F800000U | quiet | (mantissa << 13))};
  }
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8F;
    return {float_of(sign | bits_of(magnitude))};
  }
  return {float_of(sign | ((exponent + 112U) << 23) | (mantissa << 13))};
}

inline void store(float* p, Vec a) { *p = a.x; }
inline void store(Bits16* p, Vec a) { p->bits = static_cast<uint16_t>(bits_of(a.x)); }

inline void store(BFloat16* p, Vec a) {
  const uint32_t bits = bits_of(a.x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    p->bits = static_cast<uint16_t>((bits >> 16) | 0x40U);
    return;
  }
  p->bits = static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

inline void store(Float16* p, Vec a) {
  const uint32_t bits = bits_of(a.x);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  uint32_t half;
  if (magnitude > 0x7F800000U) {  // NaN
    half = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {  // rounds to 65520 or more: infinity
    half = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // normal: drop 13 mantissa bits, ties to even
    half = (magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  } else {  // subnormal: adding 0.5 aligns the mantissa at 2^-24 and rounds
    const float shifted = float_of(magnitude) + 0.5F;
    half = bits_of(shifted) - 0x3F000000U;
  }
  p->bits = static_cast<uint16_t>(sign | half);
}

template <typename T>
inline Vec load_partial(const T* p, int n) {
  return n > 0 ? load(p) : zero();
}

template <typename T>
inline void store_partial(T* p, Vec a, int n) {
  if (n > 0) store(p, a);
}

inline Vec swap_pairs(Vec a) { return a; }  // there is no pair; callers do not come here

inline void transpose(Vec* /*rows*/) {}  // one by one

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
