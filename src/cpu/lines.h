// Half cache lines: squares of elements transposed in registers, and stores that go past the
// caches.
//
//   kLine<T>         elements in a cache line
//   kHalfLine<T>     in half of one
//   HalfLines<T>     kSquareColumns half lines in registers; half line j holds column j of
//                    kHalfLine<T> rows
//   load_transposed(from, from_stride)
//   store(p), stream(p) of one of them: stream wants p on a half line, and end_of_streams() before
//                    another thread may read it
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/storage.h"

#if PHASEKV_ISA_LEVEL != PHASEKV_ISA_SCALAR
#include <immintrin.h>
#endif

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

template <typename T>
inline constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
template <typename T>
inline constexpr int64_t kHalfLine = kLine<T> / 2;
inline constexpr int64_t kSquareColumns = 8;

// Whether what is written is more than the caches of a core keep.
inline bool is_worth_streaming(int64_t bytes) { return bytes >= int64_t{1} << 20; }

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_for_write(const void* p) { __builtin_prefetch(p, 1); }

#if PHASEKV_ISA_LEVEL == PHASEKV_ISA_SCALAR

template <typename T>
struct HalfLines {
  T elements[kSquareColumns][kHalfLine<T>];

  void store(int64_t column, T* p) const {
    __builtin_memcpy(p, elements[column], sizeof elements[column]);
  }
  void stream(int64_t column, T* p) const { store(column, p); }
};

template <typename T>
inline HalfLines<T> load_transposed(const T* from, int64_t from_stride) {
  HalfLines<T> lines;
  for (int64_t row = 0; row < kHalfLine<T>; ++row) {
    for (int64_t column = 0; column < kSquareColumns; ++column) {
      lines.elements[column][row] = from[row * from_stride + column];
    }
  }
  return lines;
}

inline void end_of_streams() {}

#else

template <typename T>
struct HalfLines {
  __m256i columns[kSquareColumns];

  void store(int64_t column, T* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), columns[column]);
  }
  void stream(int64_t column, T* p) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), columns[column]);
  }
};

inline HalfLines<float> load_transposed(const float* from, int64_t from_stride) {
  __m256i rows[8];
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * from_stride));
  }
  __m256i pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  // quads[4 * r + c], 128-bit lane l: column 4 * l + c of rows 4 * r .. 4 * r + 3.
  __m256i quads[8];
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  HalfLines<float> lines;
  for (int i = 0; i < 4; ++i) {
    lines.columns[i] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x20);
    lines.columns[i + 4] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x31);
  }
  return lines;
}

// Elements of 16 bits: rows 0 to 7 in the low lanes, rows 8 to 15 in the high ones.
template <typename T>
inline HalfLines<T> load_transposed(const T* from, int64_t from_stride) {
  static_assert(sizeof(T) == 2);
  const auto row_at = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
  };
  __m256i rows[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_set_m128i(row_at(i + 8), row_at(i));
  __m256i pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi16(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi16(rows[i], rows[i + 1]);
  }
  // quads[4 * r + c]: columns 2 * c and 2 * c + 1 of rows 4 * r .. 4 * r + 3.
  __m256i quads[8];
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_unpacklo_epi32(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm256_unpackhi_epi32(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm256_unpacklo_epi32(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm256_unpackhi_epi32(pairs[i + 1], pairs[i + 3]);
  }
  HalfLines<T> lines;
  for (int i = 0; i < 4; ++i) {
    lines.columns[2 * i] = _mm256_unpacklo_epi64(quads[i], quads[i + 4]);
    lines.columns[2 * i + 1] = _mm256_unpackhi_epi64(quads[i], quads[i + 4]);
  }
  return lines;
}

inline void end_of_streams() { _mm_sfence(); }

#endif

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
