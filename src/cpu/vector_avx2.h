// Vec of eight lanes: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/storage.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

inline constexpr int kWidth = 8;

struct Vec {
  __m256 v;
};

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline float first_lane(Vec a) { return _mm256_cvtss_f32(a.v); }

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec negated_fma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }

inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }

inline float reduce_add(Vec a) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline float reduce_max(Vec a) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

// To the nearest whole number, ties to even.
inline Vec round(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// a * 2^n for whole n in [-127, 129]; in two steps, since 2^n itself may not be a float32.
inline Vec scale_by_power_of_two(Vec a, Vec n) {
  const __m256i exponent = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23);
  return {
      _mm256_mul_ps(_mm256_mul_ps(a.v, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))};
}

inline Vec scale_normal_by_power_of_two(Vec a, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), exponent))};
}

inline bool any_greater(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)) != 0;
}

inline Vec zero_where_less(Vec a, Vec x, Vec bound) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, bound.v, _CMP_LT_OQ), a.v)};
}

inline Vec widen_bfloat16(__m128i halves) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}

inline Vec widen_bits16(__m128i halves) {
  return {_mm256_castsi256_ps(_mm256_cvtepu16_epi32(halves))};
}

// The low halves of the eight lanes, which must be all that is set in them.
inline __m128i narrow_bits16(__m256i lanes) {
  return _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
}

inline __m128i narrow_bfloat16(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256 is_nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  const __m256i chosen = _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan));
  return narrow_bits16(_mm256_srli_epi32(chosen, 16));
}

inline __m128i load_halves(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

inline void store_halves(void* p, __m128i halves) {
  _mm_storeu_si128(static_cast<__m128i*>(p), halves);
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const BFloat16* p) { return widen_bfloat16(load_halves(p)); }
inline Vec load(const Float16* p) { return {_mm256_cvtph_ps(load_halves(p))}; }
inline Vec load(const Bits16* p) { return widen_bits16(load_halves(p)); }

inline void load_pairs(const BFloat16* p, Vec* first, Vec* second) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000U));
  *first = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
  *second = {_mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
}

inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(BFloat16* p, Vec a) { store_halves(p, narrow_bfloat16(a)); }
inline void store(Float16* p, Vec a) {
  store_halves(p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(Bits16* p, Vec a) { store_halves(p, narrow_bits16(_mm256_castps_si256(a.v))); }

inline __m256i first_lanes_mask(int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
}

inline Vec load_partial(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes_mask(n))};
}

inline void store_partial(float* p, Vec a, int n) {
  _mm256_maskstore_ps(p, first_lanes_mask(n), a.v);
}

// AVX2 has no masked access to 16-bit elements.
template <typename T>
inline Vec load_partial(const T* p, int n) {
  T lanes[kWidth] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

template <typename T>
inline void store_partial(T* p, Vec a, int n) {
  T lanes[kWidth];
  store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// One element, without the detour through masked lanes.
inline float load_one(const Float16* p) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(p->bits)));
}

inline Vec swap_pairs(Vec a) { return {_mm256_permute_ps(a.v, 0xB1)}; }

inline void transpose(Vec* rows) {
  __m256 pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  __m256 quads[8];
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i].v = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    rows[i + 4].v = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
