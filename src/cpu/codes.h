// Codes of a few bits, packed in words of 32, as whole numbers in the lanes of a Vec and back.
//
//   load_codes<kBits, kFull>(words, shift, n)
//                            lane i: bits [shift, shift + kBits) of words[i]
//   store_words<kFull>(words, low, high, n)
//                            words[i] = low + 2^16 * high of lane i; whole numbers below 2^16
//   unpack_codes<kBits>(bits)
//                            lane i: bits [kBits * i, kBits * (i + 1))
//
// kFull, n: all lanes or the first n, as in vector.h.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/vector.h"

#if PHASEKV_ISA_LEVEL != PHASEKV_ISA_SCALAR
#include <immintrin.h>
#endif

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

template <int kBits>
inline constexpr int64_t kCodesInWord = 32 / kBits;
template <int kBits>
inline constexpr uint32_t kCodeMask = (1U << kBits) - 1U;

#if PHASEKV_ISA_LEVEL == PHASEKV_ISA_SCALAR

template <int kBits, bool kFull>
inline Vec load_codes(const uint32_t* words, int shift, int /*n*/) {
  return {static_cast<float>((*words >> shift) & kCodeMask<kBits>)};
}

template <bool kFull>
inline void store_words(uint32_t* words, Vec low, Vec high, int /*n*/) {
  *words = static_cast<uint32_t>(low.x) | static_cast<uint32_t>(high.x) << 16;
}

template <int kBits>
inline Vec unpack_codes(uint64_t bits) {
  return {static_cast<float>(bits & kCodeMask<kBits>)};
}

#elif PHASEKV_ISA_LEVEL == PHASEKV_ISA_AVX2

template <int kBits>
inline __m256i shifts_of_codes() {
  return _mm256_setr_epi32(0, kBits, 2 * kBits, 3 * kBits, 4 * kBits, 5 * kBits, 6 * kBits,
                           7 * kBits);
}

template <int kBits, bool kFull>
inline Vec load_codes(const uint32_t* words, int shift, int n) {
  __m256i lanes;
  if constexpr (kFull) {
    lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  } else {
    lanes = _mm256_maskload_epi32(reinterpret_cast<const int*>(words), first_lanes_mask(n));
  }
  lanes = _mm256_srl_epi32(lanes, _mm_cvtsi32_si128(shift));
  lanes = _mm256_and_si256(lanes, _mm256_set1_epi32(static_cast<int>(kCodeMask<kBits>)));
  return {_mm256_cvtepi32_ps(lanes)};
}

template <bool kFull>
inline void store_words(uint32_t* words, Vec low, Vec high, int n) {
  const __m256i upper = _mm256_slli_epi32(_mm256_cvtps_epi32(high.v), 16);
  const __m256i lanes = _mm256_or_si256(_mm256_cvtps_epi32(low.v), upper);
  if constexpr (kFull) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), lanes);
  } else {
    _mm256_maskstore_epi32(reinterpret_cast<int*>(words), first_lanes_mask(n), lanes);
  }
}

template <int kBits>
inline Vec unpack_codes(uint64_t bits) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(static_cast<uint32_t>(bits)));
  const __m256i lanes = _mm256_srlv_epi32(all, shifts_of_codes<kBits>());
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(kCodeMask<kBits>));
  return {_mm256_cvtepi32_ps(_mm256_and_si256(lanes, mask))};
}

#else

// Where the code of each lane begins in its word; 16 codes of four bits take two.
template <int kBits>
inline __m512i shifts_of_codes() {
  alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                     8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i lanes = _mm512_and_si512(
      _mm512_loadu_si512(kLanes), _mm512_set1_epi32(static_cast<int>(kCodesInWord<kBits> - 1)));
  return _mm512_slli_epi32(lanes, kBits / 2);  // times kBits, which is 2 or 4
}

template <int kBits, bool kFull>
inline Vec load_codes(const uint32_t* words, int shift, int n) {
  __m512i lanes;
  if constexpr (kFull) {
    lanes = _mm512_loadu_si512(words);
  } else {
    lanes = _mm512_maskz_loadu_epi32(first_lanes_mask(n), words);
  }
  lanes = _mm512_srlv_epi32(lanes, _mm512_set1_epi32(shift));
  lanes = _mm512_and_si512(lanes, _mm512_set1_epi32(static_cast<int>(kCodeMask<kBits>)));
  return {_mm512_cvtepi32_ps(lanes)};
}

template <bool kFull>
inline void store_words(uint32_t* words, Vec low, Vec high, int n) {
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtps_epi32(high.v), 16);
  const __m512i lanes = _mm512_or_si512(_mm512_cvtps_epi32(low.v), upper);
  if constexpr (kFull) {
    _mm512_storeu_si512(words, lanes);
  } else {
    _mm512_mask_storeu_epi32(words, first_lanes_mask(n), lanes);
  }
}

template <int kBits>
inline Vec unpack_codes(uint64_t bits) {
  const __m512i low = _mm512_set1_epi32(static_cast<int>(static_cast<uint32_t>(bits)));
  const __m512i high = _mm512_set1_epi32(static_cast<int>(static_cast<uint32_t>(bits >> 32)));
  const __m512i all = kBits == 2 ? low : _mm512_mask_mov_epi32(low, 0xFF00, high);
  const __m512i lanes = _mm512_srlv_epi32(all, shifts_of_codes<kBits>());
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(kCodeMask<kBits>));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(lanes, mask))};
}

#endif

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
