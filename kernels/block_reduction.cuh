// Reductions over the threads of a block. Every thread gets the result, in an order of additions
// that is always the same.
#pragma once

#include "platform.cuh"
#include "warp.cuh"

namespace phasekv::cuda {

// Of what the warps have, in their order. `values` [kThreads / kWarpSize] is shared memory that
// nobody uses; a barrier passes.
template <int kThreads, typename Reduce>
__device__ inline float reduce_warps(float x, float* values, const Reduce& reduce) {
  if (threadIdx.x % kWarpSize == 0) values[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  x = values[0];
  for (int i = 1; i < kThreads / kWarpSize; ++i) x = reduce(x, values[i]);
  return x;
}

template <int kThreads>
__device__ inline float block_sum(float x, float* values) {
  return reduce_warps<kThreads>(warp_sum(x), values, [](float a, float b) { return a + b; });
}

template <int kThreads>
__device__ inline float block_max(float x, float* values) {
  return reduce_warps<kThreads>(warp_max(x), values, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace phasekv::cuda
