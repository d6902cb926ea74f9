// What the benchmarks of the ops share: times, and what a machine can do at most.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace phasekv::benchmarks {

// Seconds of the calling thread's processor time if there is one thread, else of the clock.
double now();
double seconds_of(const std::function<void()>& work);

// Element floor(share * count) of the sorted values; 0.5 is the median.
double quantile(std::vector<double> values, double share);

// By all threads, each its part.
void parallel_memcpy(char* to, const char* from, int64_t bytes);

// FLOP/s of one thread in float32 dot products whose operands are in the closest cache: what no
// product on this processor can pass by much.
double dot_product_rate();

}  // namespace phasekv::benchmarks
