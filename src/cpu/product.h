// Products of small matrices with the accumulators in registers: what attention spends its time in.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// Queries and vectors of adjacent columns that one product holds in registers: the accumulators,
// a row of the second factor and a broadcast of the first fill 16 registers, or 32 with AVX-512.
inline constexpr int kMicroRows = kWidth == 16 ? 12 : kWidth == 8 ? 6 : 4;
inline constexpr int kMicroVectors = 2;
inline constexpr int kRegisters = kWidth == 16 ? 32 : 16;

// For few rows, more columns: additions that wait for one another need company.
template <int kRows>
constexpr int vectors_for() {
  return kRows * 4 + 5 <= kRegisters ? 4 : kMicroVectors;
}

// c[kRows][kVectors * kWidth] = a b, or += a b. Element (row, i) of a is a[row * kRowStep + i *
// kDepthStep]; b has `depth` rows.
template <int kRows, int kVectors, int kRowStep, int kDepthStep, bool kAdd>
inline void multiply(const float* a, const float* b, int64_t b_stride, int64_t depth, float* c,
                     int64_t c_stride) {
  Vec sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      sums[row][v] = kAdd ? load(c + row * c_stride + v * kWidth) : zero();
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    Vec columns[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) columns[v] = load(b + v * kWidth);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Vec x = broadcast(a[row * kRowStep]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[row][v] = fma(x, columns[v], sums[row][v]);
    }
    a += kDepthStep;
    b += b_stride;
    // With one lane GCC 12 makes vectors of its own here, and reads columns behind the last one.
    if constexpr (kWidth == 1) asm volatile("");
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(c + row * c_stride + v * kWidth, sums[row][v]);
  }
}

// The same for `vectors` vectors of columns.
template <int kRows, int kRowStep, int kDepthStep, bool kAdd>
inline void multiply_wide(const float* a, const float* b, int64_t b_stride, int64_t depth,
                          int64_t vectors, float* c, int64_t c_stride) {
  constexpr int kWide = vectors_for<kRows>();
  int64_t v = 0;
  for (; v + kWide <= vectors; v += kWide) {
    multiply<kRows, kWide, kRowStep, kDepthStep, kAdd>(a, b + v * kWidth, b_stride, depth,
                                                       c + v * kWidth, c_stride);
  }
  for (; v < vectors; ++v) {
    multiply<kRows, 1, kRowStep, kDepthStep, kAdd>(a, b + v * kWidth, b_stride, depth,
                                                   c + v * kWidth, c_stride);
  }
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
