// Vec of sixteen lanes: AVX-512 F, BW, DQ and VL; with the BF16 extension bfloat16 is rounded by
// the processor (which takes subnormals for zero).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/storage.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

inline constexpr int kWidth = 16;

struct Vec {
  __m512 v;
};

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline float first_lane(Vec a) { return _mm_cvtss_f32(_mm512_castps512_ps128(a.v)); }

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec negated_fma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }

inline float reduce_add(Vec a) {
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline float reduce_max(Vec a) {
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), high);
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

// To the nearest whole number, ties to even.
inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// a * 2^n for whole n in [-127, 129].
inline Vec scale_by_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

inline Vec scale_normal_by_power_of_two(Vec a, Vec n) { return scale_by_power_of_two(a, n); }

inline bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }

inline Vec zero_where_less(Vec a, Vec x, Vec bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), a.v)};
}

inline Vec widen_bfloat16(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}

inline Vec widen_bits16(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_cvtepu16_epi32(halves))};
}

inline __m256i narrow_bits16(Vec a) { return _mm512_cvtepi32_epi16(_mm512_castps_si512(a.v)); }

inline __m256i narrow_bfloat16(Vec a) {
#if PHASEKV_ISA_LEVEL >= PHASEKV_ISA_AVX512_BF16
  const __m256bh halves = _mm512_cvtneps_pbh(a.v);
  __m256i bits;
  __builtin_memcpy(&bits, &halves, sizeof bits);
  return bits;
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_mov_epi32(rounded, is_nan, quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
#endif
}

inline __m256i load_halves(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

inline void store_halves(void* p, __m256i halves) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), halves);
}

inline __m256i narrow_float16(Vec a) {
  return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const BFloat16* p) { return widen_bfloat16(load_halves(p)); }
inline Vec load(const Float16* p) { return {_mm512_cvtph_ps(load_halves(p))}; }
inline Vec load(const Bits16* p) { return widen_bits16(load_halves(p)); }

inline void load_pairs(const BFloat16* p, Vec* first, Vec* second) {
  const __m512i pairs = _mm512_loadu_si512(p);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  *first = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  *second = {_mm512_castsi512_ps(_mm512_and_si512(pairs, high))};
}

inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(BFloat16* p, Vec a) { store_halves(p, narrow_bfloat16(a)); }
inline void store(Float16* p, Vec a) { store_halves(p, narrow_float16(a)); }
inline void store(Bits16* p, Vec a) { store_halves(p, narrow_bits16(a)); }

inline __mmask16 first_lanes_mask(int n) {
  return static_cast<__mmask16>((1U << static_cast<unsigned>(n)) - 1U);
}

inline Vec load_partial(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes_mask(n), p)};
}
inline Vec load_partial(const BFloat16* p, int n) {
  return widen_bfloat16(_mm256_maskz_loadu_epi16(first_lanes_mask(n), p));
}
inline Vec load_partial(const Float16* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes_mask(n), p))};
}
inline Vec load_partial(const Bits16* p, int n) {
  return widen_bits16(_mm256_maskz_loadu_epi16(first_lanes_mask(n), p));
}

inline void store_partial(float* p, Vec a, int n) {
  _mm512_mask_storeu_ps(p, first_lanes_mask(n), a.v);
}
inline void store_partial(BFloat16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes_mask(n), narrow_bfloat16(a));
}
inline void store_partial(Float16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes_mask(n), narrow_float16(a));
}
inline void store_partial(Bits16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes_mask(n), narrow_bits16(a));
}

// One element, without the detour through masked lanes.
inline float load_one(const Float16* p) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(p->bits)));
}

inline Vec swap_pairs(Vec a) { return {_mm512_permute_ps(a.v, 0xB1)}; }

inline void transpose(Vec* rows) {
  __m512 pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  // quads[4 * r + c], 128-bit lane l: column 4 * l + c of rows 4 * r .. 4 * r + 3.
  __m512 quads[16];
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 low01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x44);
    const __m512 low23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xEE);
    const __m512 high23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xEE);
    rows[c].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    rows[4 + c].v = _mm512_shuffle_f32x4(low01, low23, 0xDD);
    rows[8 + c].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    rows[12 + c].v = _mm512_shuffle_f32x4(high01, high23, 0xDD);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
