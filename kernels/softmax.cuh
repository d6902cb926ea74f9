// What the kernels that take a softmax share.
#pragma once

#include "platform.cuh"

namespace phasekv::cuda {

// Scores are taken in units of log 2, so that a weight is a power of two.
inline constexpr float kLog2E = 1.4426950408889634F;

// Not a number if either is.
__device__ inline float larger_of(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace phasekv::cuda
