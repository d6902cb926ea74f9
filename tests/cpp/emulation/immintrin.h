// AVX-512 for processors that have only AVX2: found instead of the compiler's <immintrin.h> when
// the AVX-512 kernels of src/cpu are compiled, unchanged, for the tests. Each 512-bit intrinsic
// that src/cpu/vector_avx512.h uses is replaced by a plain loop over its lanes, written from
// Intel's description of it; the 256-bit ones are the processor's own.
#pragma once
#pragma GCC system_header
#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace phasekv_emulation {

// A register as an array of its lanes.
template <typename Lane, typename Register>
struct Lanes {
  static constexpr int kCount = sizeof(Register) / sizeof(Lane);

  Lane lane[kCount];

  Lanes() : lane{} {}
  explicit Lanes(const Register& from) { std::memcpy(lane, &from, sizeof from); }
  operator Register() const {
    Register to;
    std::memcpy(&to, lane, sizeof to);
    return to;
  }
};

using Floats = Lanes<float, __m512>;
using FloatBits = Lanes<uint32_t, __m512>;
using Ints = Lanes<int32_t, __m512i>;
using Halves = Lanes<uint16_t, __m256i>;

static inline bool has(uint32_t mask, int lane) { return ((mask >> lane) & 1U) != 0; }

template <typename Function>
static inline Floats each(Function function) {
  Floats to;
  for (int i = 0; i < 16; ++i) to.lane[i] = function(i);
  return to;
}

template <typename Function>
static inline Ints each_int(Function function) {
  Ints to;
  for (int i = 0; i < 16; ++i) to.lane[i] = static_cast<int32_t>(function(i));
  return to;
}

// ---- float32 arithmetic

static inline __m512 setzero_ps() { return Floats(); }
static inline __m512 set1_ps(float x) {
  return each([&](int) { return x; });
}
static inline __m512 sqrt_ps(__m512 a) {
  const Floats x(a);
  return each([&](int i) { return std::sqrt(x.lane[i]); });
}
static inline __m512 add_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return x.lane[i] + y.lane[i]; });
}
static inline __m512 sub_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return x.lane[i] - y.lane[i]; });
}
static inline __m512 mul_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return x.lane[i] * y.lane[i]; });
}
static inline __m512 div_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return x.lane[i] / y.lane[i]; });
}
// With -mfma these are the processor's own, rounded once.
static inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const Floats x(a), y(b), z(c);
  return each([&](int i) { return __builtin_fmaf(x.lane[i], y.lane[i], z.lane[i]); });
}
static inline __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  const Floats x(a), y(b), z(c);
  return each([&](int i) { return __builtin_fmaf(-x.lane[i], y.lane[i], z.lane[i]); });
}
// The second operand where either is NaN.
static inline __m512 max_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]; });
}
static inline __m512 min_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return x.lane[i] < y.lane[i] ? x.lane[i] : y.lane[i]; });
}
// src/cpu only rounds to nearest even.
static inline __m512 roundscale_ps(__m512 a, int /*control*/) {
  const Floats x(a);
  return each([&](int i) { return std::nearbyint(x.lane[i]); });
}
// a * 2^floor(b)
static inline __m512 scalef_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) {
    if (!std::isfinite(y.lane[i])) return x.lane[i] + y.lane[i];
    return std::ldexp(x.lane[i], static_cast<int>(std::floor(y.lane[i])));
  });
}

// ---- comparison and masks

// The predicates that src/cpu uses.
static inline __mmask16 cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  const Floats x(a), y(b);
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) {
    bool is_true = !(x.lane[i] < y.lane[i]);  // _CMP_NLT_UQ
    if (predicate == _CMP_UNORD_Q) is_true = std::isnan(x.lane[i]) || std::isnan(y.lane[i]);
    if (predicate == _CMP_GT_OQ) is_true = x.lane[i] > y.lane[i];
    mask |= static_cast<uint32_t>(is_true) << i;
  }
  return static_cast<__mmask16>(mask);
}
static inline __m512 maskz_mov_ps(__mmask16 mask, __m512 a) {
  const Floats x(a);
  return each([&](int i) { return has(mask, i) ? x.lane[i] : 0.0F; });
}
static inline __m512i mask_mov_epi32(__m512i a, __mmask16 mask, __m512i b) {
  const Ints x(a), y(b);
  return each_int([&](int i) { return has(mask, i) ? y.lane[i] : x.lane[i]; });
}

// ---- integers

static inline __m512i set1_epi32(int32_t x) {
  return each_int([&](int) { return x; });
}
static inline __m512i add_epi32(__m512i a, __m512i b) {
  const Ints x(a), y(b);
  return each_int(
      [&](int i) { return static_cast<uint32_t>(x.lane[i]) + static_cast<uint32_t>(y.lane[i]); });
}
static inline __m512i and_si512(__m512i a, __m512i b) {
  const Ints x(a), y(b);
  return each_int([&](int i) { return x.lane[i] & y.lane[i]; });
}
static inline __m512i or_si512(__m512i a, __m512i b) {
  const Ints x(a), y(b);
  return each_int([&](int i) { return x.lane[i] | y.lane[i]; });
}
static inline __m512i srli_epi32(__m512i a, unsigned count) {
  const Ints x(a);
  return each_int([&](int i) { return static_cast<uint32_t>(x.lane[i]) >> count; });
}
static inline __m512i slli_epi32(__m512i a, unsigned count) {
  const Ints x(a);
  return each_int([&](int i) { return static_cast<uint32_t>(x.lane[i]) << count; });
}
// Counts of 32 and more shift everything out.
static inline __m512i srlv_epi32(__m512i a, __m512i counts) {
  const Ints x(a), n(counts);
  return each_int([&](int i) {
    const auto count = static_cast<uint32_t>(n.lane[i]);
    return count > 31 ? 0U : static_cast<uint32_t>(x.lane[i]) >> count;
  });
}

// ---- conversions

static inline __m512 cvtepi32_ps(__m512i a) {
  const Ints x(a);
  return each([&](int i) { return static_cast<float>(x.lane[i]); });
}
// src/cpu only converts whole numbers.
static inline __m512i cvtps_epi32(__m512 a) {
  const Floats x(a);
  return each_int([&](int i) { return static_cast<int32_t>(x.lane[i]); });
}

static inline __m512i cvtepu16_epi32(__m256i a) {
  const Halves x(a);
  return each_int([&](int i) { return x.lane[i]; });
}
static inline __m256i cvtepi32_epi16(__m512i a) {
  const Ints x(a);
  Halves to;
  for (int i = 0; i < 16; ++i) to.lane[i] = static_cast<uint16_t>(x.lane[i]);
  return to;
}
static inline __m512 cvtph_ps(__m256i a) {
  Floats to;
  _mm256_storeu_ps(to.lane, _mm256_cvtph_ps(_mm256_castsi256_si128(a)));
  _mm256_storeu_ps(to.lane + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
  return to;
}
static inline __m256i cvtps_ph(__m512 a, int /*to nearest even*/) {
  const Floats x(a);
  const __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps(x.lane), _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(_mm256_loadu_ps(x.lane + 8), _MM_FROUND_TO_NEAREST_INT);
  return _mm256_set_m128i(high, low);
}

struct BFloat16s {
  uint16_t lane[16];
};

// Rounds to nearest even, takes subnormals for zero, makes NaN quiet.
static inline BFloat16s cvtneps_pbh(__m512 a) {
  const FloatBits x(a);
  BFloat16s to{};
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = x.lane[i];
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) {
      to.lane[i] = static_cast<uint16_t>((bits >> 16) | 0x40U);
    } else if (magnitude < 0x00800000U) {
      to.lane[i] = static_cast<uint16_t>((bits >> 16) & 0x8000U);
    } else {
      to.lane[i] = static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
    }
  }
  return to;
}

// ---- memory

static inline __m512 loadu_ps(const void* p) {
  Floats to;
  std::memcpy(to.lane, p, sizeof to.lane);
  return to;
}
static inline __m512i loadu_si512(const void* p) {
  Ints to;
  std::memcpy(to.lane, p, sizeof to.lane);
  return to;
}
static inline __m512i maskz_loadu_epi32(__mmask16 mask, const void* p) {
  return each_int([&](int i) { return has(mask, i) ? static_cast<const uint32_t*>(p)[i] : 0U; });
}
static inline void mask_storeu_epi32(void* p, __mmask16 mask, __m512i a) {
  const Ints x(a);
  for (int i = 0; i < 16; ++i) {
    if (has(mask, i)) static_cast<uint32_t*>(p)[i] = static_cast<uint32_t>(x.lane[i]);
  }
}
static inline void storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, sizeof a); }
static inline void storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, sizeof a); }
static inline __m512 maskz_loadu_ps(__mmask16 mask, const void* p) {
  return each([&](int i) { return has(mask, i) ? static_cast<const float*>(p)[i] : 0.0F; });
}
static inline void mask_storeu_ps(void* p, __mmask16 mask, __m512 a) {
  const Floats x(a);
  for (int i = 0; i < 16; ++i) {
    if (has(mask, i)) static_cast<float*>(p)[i] = x.lane[i];
  }
}
static inline __m256i maskz_loadu_epi16(__mmask16 mask, const void* p) {
  Halves to;
  for (int i = 0; i < 16; ++i) {
    if (has(mask, i)) to.lane[i] = static_cast<const uint16_t*>(p)[i];
  }
  return to;
}
static inline void mask_storeu_epi16(void* p, __mmask16 mask, __m256i a) {
  const Halves x(a);
  for (int i = 0; i < 16; ++i) {
    if (has(mask, i)) static_cast<uint16_t*>(p)[i] = x.lane[i];
  }
}

// ---- lanes moved about; all but the last within each 128 bits

static inline __m512 permute_ps(__m512 a, int control) {
  const Floats x(a);
  return each([&](int i) { return x.lane[i / 4 * 4 + ((control >> (i % 4 * 2)) & 3)]; });
}
static inline __m512 unpacklo_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return (i % 2 == 0 ? x : y).lane[i / 4 * 4 + i % 4 / 2]; });
}
static inline __m512 unpackhi_ps(__m512 a, __m512 b) {
  const Floats x(a), y(b);
  return each([&](int i) { return (i % 2 == 0 ? x : y).lane[i / 4 * 4 + 2 + i % 4 / 2]; });
}
static inline __m512 shuffle_ps(__m512 a, __m512 b, int control) {
  const Floats x(a), y(b);
  return each(
      [&](int i) { return (i % 4 < 2 ? x : y).lane[i / 4 * 4 + ((control >> (i % 4 * 2)) & 3)]; });
}
// 128-bit parts: the low two chosen from a, the high two from b.
static inline __m512 shuffle_f32x4(__m512 a, __m512 b, int control) {
  const Floats x(a), y(b);
  return each(
      [&](int i) { return (i < 8 ? x : y).lane[((control >> (i / 4 * 2)) & 3) * 4 + i % 4]; });
}
static inline __m256d extractf64x4_pd(__m512d a, int half) {
  __m256d to;
  std::memcpy(&to, reinterpret_cast<const char*>(&a) + 32 * half, sizeof to);
  return to;
}
static inline __m256 castps512_ps256(__m512 a) {
  __m256 to;
  std::memcpy(&to, &a, sizeof to);
  return to;
}
static inline __m128 castps512_ps128(__m512 a) {
  __m128 to;
  std::memcpy(&to, &a, sizeof to);
  return to;
}
template <typename To, typename From>
static inline To cast(From a) {
  To to;
  std::memcpy(&to, &a, sizeof to);
  return to;
}

}  // namespace phasekv_emulation

#undef __m256bh
#undef _mm256_mask_storeu_epi16
#undef _mm256_maskz_loadu_epi16
#undef _mm512_add_epi32
#undef _mm512_add_ps
#undef _mm512_and_si512
#undef _mm512_castps512_ps128
#undef _mm512_castps512_ps256
#undef _mm512_castps_pd
#undef _mm512_castps_si512
#undef _mm512_castsi512_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtps_ph
#undef _mm512_div_ps
#undef _mm512_extractf64x4_pd
#undef _mm512_fmadd_ps
#undef _mm512_fnmadd_ps
#undef _mm512_loadu_ps
#undef _mm512_loadu_si512
#undef _mm512_mask_mov_epi32
#undef _mm512_mask_storeu_epi32
#undef _mm512_mask_storeu_ps
#undef _mm512_maskz_loadu_epi32
#undef _mm512_maskz_loadu_ps
#undef _mm512_maskz_mov_ps
#undef _mm512_max_ps
#undef _mm512_min_ps
#undef _mm512_mul_ps
#undef _mm512_or_si512
#undef _mm512_permute_ps
#undef _mm512_roundscale_ps
#undef _mm512_scalef_ps
#undef _mm512_set1_epi32
#undef _mm512_set1_ps
#undef _mm512_setzero_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps
#undef _mm512_slli_epi32
#undef _mm512_sqrt_ps
#undef _mm512_srli_epi32
#undef _mm512_srlv_epi32
#undef _mm512_storeu_ps
#undef _mm512_storeu_si512
#undef _mm512_sub_ps
#undef _mm512_unpackhi_ps
#undef _mm512_unpacklo_ps
#define __m256bh phasekv_emulation::BFloat16s
#define _mm256_mask_storeu_epi16 phasekv_emulation::mask_storeu_epi16
#define _mm256_maskz_loadu_epi16 phasekv_emulation::maskz_loadu_epi16
#define _mm512_add_epi32 phasekv_emulation::add_epi32
#define _mm512_add_ps phasekv_emulation::add_ps
#define _mm512_and_si512 phasekv_emulation::and_si512
#define _mm512_castps512_ps128 phasekv_emulation::castps512_ps128
#define _mm512_castps512_ps256 phasekv_emulation::castps512_ps256
#define _mm512_castps_pd phasekv_emulation::cast<__m512d, __m512>
#define _mm512_castps_si512 phasekv_emulation::cast<__m512i, __m512>
#define _mm512_castsi512_ps phasekv_emulation::cast<__m512, __m512i>
#define _mm512_cmp_ps_mask phasekv_emulation::cmp_ps_mask
#define _mm512_cvtepi32_epi16 phasekv_emulation::cvtepi32_epi16
#define _mm512_cvtepi32_ps phasekv_emulation::cvtepi32_ps
#define _mm512_cvtepu16_epi32 phasekv_emulation::cvtepu16_epi32
#define _mm512_cvtneps_pbh phasekv_emulation::cvtneps_pbh
#define _mm512_cvtph_ps phasekv_emulation::cvtph_ps
#define _mm512_cvtps_epi32 phasekv_emulation::cvtps_epi32
#define _mm512_cvtps_ph phasekv_emulation::cvtps_ph
#define _mm512_div_ps phasekv_emulation::div_ps
#define _mm512_extractf64x4_pd phasekv_emulation::extractf64x4_pd
#define _mm512_fmadd_ps phasekv_emulation::fmadd_ps
#define _mm512_fnmadd_ps phasekv_emulation::fnmadd_ps
#define _mm512_loadu_ps phasekv_emulation::loadu_ps
#define _mm512_loadu_si512 phasekv_emulation::loadu_si512
#define _mm512_mask_mov_epi32 phasekv_emulation::mask_mov_epi32
#define _mm512_mask_storeu_epi32 phasekv_emulation::mask_storeu_epi32
#define _mm512_mask_storeu_ps phasekv_emulation::mask_storeu_ps
#define _mm512_maskz_loadu_epi32 phasekv_emulation::maskz_loadu_epi32
#define _mm512_maskz_loadu_ps phasekv_emulation::maskz_loadu_ps
#define _mm512_maskz_mov_ps phasekv_emulation::maskz_mov_ps
#define _mm512_max_ps phasekv_emulation::max_ps
#define _mm512_min_ps phasekv_emulation::min_ps
#define _mm512_mul_ps phasekv_emulation::mul_ps
#define _mm512_or_si512 phasekv_emulation::or_si512
#define _mm512_permute_ps phasekv_emulation::permute_ps
#define _mm512_roundscale_ps phasekv_emulation::roundscale_ps
#define _mm512_scalef_ps phasekv_emulation::scalef_ps
#define _mm512_set1_epi32 phasekv_emulation::set1_epi32
#define _mm512_set1_ps phasekv_emulation::set1_ps
#define _mm512_setzero_ps phasekv_emulation::setzero_ps
#define _mm512_shuffle_f32x4 phasekv_emulation::shuffle_f32x4
#define _mm512_shuffle_ps phasekv_emulation::shuffle_ps
#define _mm512_slli_epi32 phasekv_emulation::slli_epi32
#define _mm512_sqrt_ps phasekv_emulation::sqrt_ps
#define _mm512_srli_epi32 phasekv_emulation::srli_epi32
#define _mm512_srlv_epi32 phasekv_emulation::srlv_epi32
#define _mm512_storeu_ps phasekv_emulation::storeu_ps
#define _mm512_storeu_si512 phasekv_emulation::storeu_si512
#define _mm512_sub_ps phasekv_emulation::sub_ps
#define _mm512_unpackhi_ps phasekv_emulation::unpackhi_ps
#define _mm512_unpacklo_ps phasekv_emulation::unpacklo_ps
