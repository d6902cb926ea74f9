#include "comparison.h"

#include <omp.h>

#include "measuring.h"

namespace phasekv::benchmarks {

Result compare(const Op& op, double seconds, Workload& workload) {
  constexpr size_t kLeastTimes = 11;
  constexpr size_t kTimesForDotProducts = 8;  // their rate hardly changes, and takes a while
  std::vector<double> times;
  std::vector<double> bound_rates;
  for (double spent = 0.0; spent < seconds || times.size() < kLeastTimes;) {
    workload.next_layer();
    times.push_back(seconds_of(op.run));
    spent += times.back();
    if (op.bound == Bound::memcpy) {
      workload.next_layer();
      const auto half = static_cast<int64_t>(op.work / 2.0);
      const double time = seconds_of([&] { workload.copy(half); });
      bound_rates.push_back(op.work / time);
      spent += time;
    } else if (times.size() % kTimesForDotProducts == 1) {
      bound_rates.push_back(dot_product_rate() * omp_get_max_threads());
    }
  }
  const double time = quantile(times, 0.5);
  return {.shape = workload.shape(),
          .op = op.name,
          .adjacent = op.adjacent,
          .bound = op.bound,
          .work = op.work,
          .line_bytes = op.line_bytes,
          .milliseconds = 1e3 * time,
          .percentile_10 = 1e3 * quantile(times, 0.1),
          .percentile_90 = 1e3 * quantile(times, 0.9),
          .rate = 1e-9 * op.work / time,
          .bound_rate = 1e-9 * quantile(bound_rates, 0.5)};
}

}  // namespace phasekv::benchmarks
