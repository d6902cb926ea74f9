#include "compare.h"

#include <algorithm>
#include <cmath>

#include "oracle/elements.h"

namespace phasekv {

namespace {

bool same_kind(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return true;
}

}  // namespace

testing::AssertionResult is_near(const oracle::Row& actual, const oracle::Row& expected,
                                 double magnitude, DataType dtype) {
  constexpr double kFloat32Error = 4e-7;  // a few roundings, and those of the sine and the cosine
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure() << actual.size() << " elements, not " << expected.size();
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!same_kind(actual[i], expected[i])) {
      return testing::AssertionFailure()
             << "element " << i << " is " << actual[i] << ", not " << expected[i];
    }
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::fabs(actual[i] - expected[i]);
    if (!std::isfinite(expected[i]) || difference <= kFloat32Error * magnitude) continue;
    const double tolerance =
        kFloat32Error * magnitude + 1.01 * oracle::half_unit(expected[i], dtype);
    if (difference > tolerance) {
      return testing::AssertionFailure() << "element " << i << " is " << actual[i] << ", not "
                                         << expected[i] << " within " << tolerance;
    }
  }
  return testing::AssertionSuccess();
}

double largest(const oracle::Row& row) {
  double most = 0.0;
  for (const double x : row) {
    if (std::isfinite(x)) most = std::max(most, std::fabs(x));
  }
  return most;
}

}  // namespace phasekv
