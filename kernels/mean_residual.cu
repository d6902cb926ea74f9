// Bound by memory where nothing is rotated: each probe's rows are read once. With a rotation every
// head of a probe computes its factors anew, which is more float64 arithmetic than the bytes are
// worth, on the few rows that are probes.
#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "phasekv/cuda.h"
#include "rotation.cuh"
#include "validate.h"
#include "views.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 128;

template <int kPairs>
__device__ inline void load_rotated(const RowsView& rows, int64_t row, unsigned head,
                                    const int64_t* deltas, int64_t probe, const RopeView& rope,
                                    const HeadShape& shape, const Unit<kPairs>& unit,
                                    float (&values)[2 * kPairs]) {
  load_unit(unit, rows.data, rows.dtype, offset_of_row(rows, row, head), values);
  if (deltas == nullptr || unit.pair < 0) return;
  const int64_t delta = deltas[probe];
  if (delta == 0) return;
  float cosines[kPairs];
  float sines[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const SinCos factors = sin_cos(static_cast<double>(delta) * rope.frequencies[unit.pair + i]);
    cosines[i] = factors.cos;
    sines[i] = factors.sin;
  }
  if (shape.is_interleaved) {
    rotate_unit<kPairs>(true, cosines, sines, values);
  } else {
    rotate_unit<kPairs>(false, cosines, sines, values);
  }
}

// Block (segment, head). Thread (lane, column): the probes lane, lane + lanes, ... of a unit; then
// the lanes are added, in order. So the sum depends on the segment alone. Shared memory: lanes *
// columns * 2 kPairs floats.
template <int kPairs>
__global__ void __launch_bounds__(kThreads)
    mean_residual_kernel(MeanResidualParams params, HeadShape shape, unsigned units_per_head,
                         unsigned columns) {
  constexpr unsigned kWidth = 2 * kPairs;
  auto* partial = reinterpret_cast<float*>(dynamic_shared_memory());
  const int64_t segment = blockIdx.x;
  const unsigned head = blockIdx.y;
  const unsigned lanes = kThreads / columns;
  const unsigned lane = threadIdx.x / columns;
  const unsigned column = threadIdx.x - lane * columns;
  const int64_t begin = params.segment_starts[segment];
  const int64_t end = params.segment_starts[segment + 1];
  const float share = end > begin ? 1.0F / static_cast<float>(end - begin) : 0.0F;
  float* out = params.out + (segment * params.fresh.heads + head) * shape.head_size;

  for (unsigned base = 0; base < units_per_head; base += columns) {
    const unsigned index = base + column;
    if (lane < lanes && index < units_per_head) {
      const Unit<kPairs> unit = unit_of<kPairs>(shape, index);
      float sum[kWidth] = {};
      for (int64_t probe = begin + lane; probe < end; probe += lanes) {
        float fresh[kWidth];
        float cached[kWidth];
        load_rotated(params.fresh, params.fresh_rows[probe], head, params.fresh_deltas, probe,
                     params.rope, shape, unit, fresh);
        load_rotated(params.cached, params.cached_rows[probe], head, params.cached_deltas, probe,
                     params.rope, shape, unit, cached);
#pragma unroll
        for (unsigned i = 0; i < kWidth; ++i) sum[i] += fresh[i] - cached[i];
      }
      float* to = partial + (lane * columns + column) * kWidth;
#pragma unroll
      for (unsigned i = 0; i < kWidth; ++i) to[i] = sum[i];
    }
    __syncthreads();
    for (unsigned item = threadIdx.x; item < columns * kWidth; item += kThreads) {
      const unsigned from = base + item / kWidth;
      if (from >= units_per_head) break;
      float sum = 0.0F;
      for (unsigned i = 0; i < lanes; ++i) sum += partial[i * columns * kWidth + item];
      const Unit<kPairs> unit = unit_of<kPairs>(shape, from);
      const unsigned i = item % kWidth;
      if (i < kPairs) {
        out[unit.first + i] = sum * share;
      } else if (unit.has_second) {
        out[unit.second + i - kPairs] = sum * share;
      }
    }
    __syncthreads();  // the sums are read before the next are written
  }
}

template <int kPairs>
void run(const MeanResidualParams& params, const HeadShape& shape, Stream stream) {
  const unsigned units_per_head = units_of<kPairs>(shape);
  const unsigned columns = std::min(units_per_head, kThreads);
  const unsigned lanes = kThreads / columns;
  launch(mean_residual_kernel<kPairs>,
         dim3(blocks_for(params.num_segments, 1), static_cast<unsigned>(params.fresh.heads)),
         kThreads, size_t{lanes} * columns * 2 * kPairs * sizeof(float), stream, params, shape,
         units_per_head, columns);
}

}  // namespace

void mean_residual(const MeanResidualParams& params, Stream stream) {
  check_rows("fresh", params.fresh);
  check_rows("cached", params.cached);
  check_same_heads("cached", params.cached, "fresh", params.fresh);
  check_not_null("segment_starts", params.segment_starts, params.num_segments);
  check_not_null("out", params.out, params.num_segments);
  const bool rotates = params.fresh_deltas != nullptr || params.cached_deltas != nullptr;
  if (rotates) check_device_rope(params.rope, params.fresh.head_size);
  if (params.num_segments <= 0) return;
  const HeadShape shape = head_shape_of(params.fresh.head_size, params.rope, rotates);
  const bool is_aligned = std::min(alignment_of(params.fresh), alignment_of(params.cached)) == 16;
  if (is_aligned && fits_wide_units(shape)) {
    run<kWidePairs>(params, shape, stream);
  } else {
    run<1>(params, shape, stream);
  }
}

}  // namespace phasekv::cuda
