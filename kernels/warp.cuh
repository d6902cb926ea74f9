// Reductions over the lanes of a whole warp. Every lane gets the result, in an order of additions
// that is always the same.
#pragma once

#include "platform.cuh"

namespace phasekv::cuda {

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

}  // namespace phasekv::cuda
