// Adds the time of a scope to a total.
#pragma once

#include <chrono>

namespace phasekv::eviction {

class Stopwatch {
 public:
  explicit Stopwatch(double* total) : total_(total), begin_(Clock::now()) {}
  ~Stopwatch() { *total_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double* total_;
  Clock::time_point begin_;
};

}  // namespace phasekv::eviction
