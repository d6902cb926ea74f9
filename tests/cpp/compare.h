// Comparison of results with the oracle's.
#pragma once

#include <gtest/gtest.h>

#include "oracle/rotation.h"
#include "phasekv/tensor.h"

namespace phasekv {

// Rows of the same numbers: infinities and NaNs in the same places, which is looked at first, and
// the others apart by no more than the rounding of float32 arithmetic on terms of up to `magnitude`
// and one rounding to `dtype`.
testing::AssertionResult is_near(const oracle::Row& actual, const oracle::Row& expected,
                                 double magnitude, DataType dtype);

// The largest magnitude of a row's finite elements.
double largest(const oracle::Row& row);

}  // namespace phasekv
