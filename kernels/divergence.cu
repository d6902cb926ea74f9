// Bound by memory: both rows are read once.
#include <algorithm>
#include <cstdint>

#include "elements.cuh"
#include "launch.cuh"
#include "phasekv/cuda.h"
#include "validate.h"
#include "views.cuh"
#include "warp.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kTokensPerBlock = kThreads / kWarpSize;

// A warp takes a token: its lanes' sums are added in an order that depends on the shape alone.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    divergence_kernel(DivergenceParams params, unsigned vectors_per_head) {
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kTokensPerBlock + threadIdx.x / kWarpSize;
  if (token >= params.fresh.tokens) return;  // the whole warp
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned vectors = vectors_per_head * static_cast<unsigned>(params.fresh.heads);
  float sum = 0.0F;
  for (unsigned i = lane; i < vectors; i += kWarpSize) {
    const unsigned head = i / vectors_per_head;
    const unsigned dim = (i - head * vectors_per_head) * kCount;
    float fresh[kCount];
    float cached[kCount];
    load_vector<kCount>(params.fresh.data, params.fresh.dtype,
                        offset_of_row(params.fresh, token, head) + dim, fresh);
    load_vector<kCount>(params.cached.data, params.cached.dtype,
                        offset_of_row(params.cached, token, head) + dim, cached);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float residual = fresh[j] - cached[j];
      sum = fmaf(residual, residual, sum);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) params.out[token] = sum;
}

template <int kCount>
void run(const DivergenceParams& params, Stream stream) {
  launch(divergence_kernel<kCount>, dim3(blocks_for(params.fresh.tokens, kTokensPerBlock)),
         kThreads, 0, stream, params, static_cast<unsigned>(params.fresh.head_size / kCount));
}

}  // namespace

void divergence(const DivergenceParams& params, Stream stream) {
  check_rows("fresh", params.fresh);
  check_rows("cached", params.cached);
  check_equal("cached.tokens", params.cached.tokens, "fresh", params.fresh.tokens);
  check_same_heads("cached", params.cached, "fresh", params.fresh);
  check_not_null("out", params.out, params.fresh.tokens);
  if (params.fresh.tokens == 0) return;
  const bool is_aligned = std::min(alignment_of(params.fresh), alignment_of(params.cached)) == 16;
  if (is_aligned && params.fresh.head_size % 8 == 0) {
    run<8>(params, stream);
  } else {
    run<1>(params, stream);
  }
}

}  // namespace phasekv::cuda
