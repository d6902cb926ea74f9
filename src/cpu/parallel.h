// How a kernel shares its work between OpenMP's threads.
#pragma once

#include <omp.h>

#include <cstdint>

#include "cpu/isa.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

// As many of the `useful` threads as there are.
inline int threads_of(int64_t useful) {
  const int64_t available = omp_in_parallel() != 0 ? 1 : omp_get_max_threads();
  const int64_t threads = useful < available ? useful : available;
  return threads < 1 ? 1 : static_cast<int>(threads);
}

// Threads worth waking for `bytes` of memory traffic: starting them costs as much as moving some
// 100 KB, so each gets at least that.
inline int threads_for(int64_t bytes) {
  constexpr int64_t kBytesPerThread = 128 * 1024;
  return threads_of(bytes / kBytesPerThread);
}

// The same for dot products of so many elements.
inline int threads_for_products(int64_t products, int64_t elements) {
  constexpr int64_t kMultiplicationsPerThread = int64_t{1} << 18;
  return threads_of(products / (kMultiplicationsPerThread / elements + 1));
}

struct Range {
  int64_t begin;
  int64_t end;
};

// The share of the calling thread of [0, count), in order.
inline Range share_of_thread(int64_t count) {
  const int64_t thread = omp_get_thread_num();
  const int64_t threads = omp_get_num_threads();
  return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
