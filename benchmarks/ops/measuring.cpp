#include "measuring.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <ctime>

namespace phasekv::benchmarks {
namespace {

constexpr int64_t kDepth = 64;
constexpr int64_t kColumns = 64;
constexpr int64_t kRepetitions = 200;

// c[kRows][kColumns] = a b, by accumulators in registers: kRows of two vectors each.
template <typename Vector, int kRows>
[[gnu::always_inline]] inline void multiply(const float* a, const float* b, float* c) {
  constexpr int64_t kWidth = sizeof(Vector) / sizeof(float);
  for (int64_t column = 0; column < kColumns; column += 2 * kWidth) {
    Vector sums[kRows][2] = {};
    for (int64_t i = 0; i < kDepth; ++i) {
      Vector first;
      Vector second;
      std::memcpy(&first, b + i * kColumns + column, sizeof first);
      std::memcpy(&second, b + i * kColumns + column + kWidth, sizeof second);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        sums[row][0] += a[i * kRows + row] * first;
        sums[row][1] += a[i * kRows + row] * second;
      }
    }
    // Unrolled too, or the sums would not be in registers.
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(c + row * kColumns + column, &sums[row][0], sizeof(Vector));
      std::memcpy(c + row * kColumns + column + kWidth, &sums[row][1], sizeof(Vector));
    }
  }
}

template <int kBytes>
struct VectorOf {
  using Type [[gnu::vector_size(kBytes)]] = float;
};

[[gnu::target("avx512f")]] void multiply_avx512(const float* a, const float* b, float* c) {
  for (int64_t i = 0; i < kRepetitions; ++i) multiply<VectorOf<64>::Type, 12>(a, b, c);
}

[[gnu::target("avx2,fma")]] void multiply_avx2(const float* a, const float* b, float* c) {
  for (int64_t i = 0; i < kRepetitions; ++i) multiply<VectorOf<32>::Type, 6>(a, b, c);
}

void multiply_any(const float* a, const float* b, float* c) {
  for (int64_t i = 0; i < kRepetitions; ++i) multiply<VectorOf<16>::Type, 4>(a, b, c);
}

}  // namespace

double now() {
  timespec time{};
  clock_gettime(omp_get_max_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds_of(const std::function<void()>& work) {
  const double begin = now();
  work();
  return now() - begin;
}

double quantile(std::vector<double> values, double share) {
  const auto index = static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size()));
  std::nth_element(values.begin(), values.begin() + index, values.end());
  return values[static_cast<size_t>(index)];
}

void parallel_memcpy(char* to, const char* from, int64_t bytes) {
#pragma omp parallel
  {
    const int64_t thread = omp_get_thread_num();
    const int64_t threads = omp_get_num_threads();
    const int64_t begin = bytes * thread / threads;
    const int64_t end = bytes * (thread + 1) / threads;
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  }
}

double dot_product_rate() {
  alignas(64) static float a[12 * kDepth];
  alignas(64) static float b[kDepth * kColumns];
  alignas(64) static float c[12 * kColumns];
  int64_t rows = 4;
  auto* work = multiply_any;
  if (__builtin_cpu_supports("avx512f")) {
    rows = 12;
    work = multiply_avx512;
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    rows = 6;
    work = multiply_avx2;
  }
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) times.push_back(seconds_of([&] { work(a, b, c); }));
  return static_cast<double>(2 * rows * kDepth * kColumns * kRepetitions) / quantile(times, 0.5);
}

}  // namespace phasekv::benchmarks
