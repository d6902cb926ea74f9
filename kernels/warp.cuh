// Reductions over the lanes of a warp. Every lane gets the result, in an order of additions that is
// always the same.
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

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// Over the 4 lanes that share a row of an mma result.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

template <typename T>
__device__ inline T quad_min(T x) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const T other = __shfl_xor_sync(kAllLanes, x, distance);
    x = other < x ? other : x;
  }
  return x;
}

// Over the 8 lanes that share columns of an mma result.
template <typename T>
__device__ inline T column_max(T x) {
#pragma unroll
  for (int distance = 4; distance < kWarpSize; distance *= 2) {
    const T other = __shfl_xor_sync(kAllLanes, x, distance);
    x = other > x ? other : x;
  }
  return x;
}

__device__ inline float column_sum(float x) {
#pragma unroll
  for (int distance = 4; distance < kWarpSize; distance *= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

}  // namespace phasekv::cuda
