// Bound by memory: rows are read from it once, and once more from the L1 cache.
#include <cmath>
#include <cstdint>

#include "launch.cuh"
#include "ops/quantized_rows.h"
#include "phasekv/cuda.h"
#include "quantized.cuh"

namespace phasekv::cuda {
namespace {

// The least and the largest of some elements. `poison` is 0, or NaN after one that is not finite,
// which a minimum alone would hide.
struct Extremes {
  float least = INFINITY;
  float largest = -INFINITY;
  float poison = 0.0F;

  __device__ void add(float x) {
    least = fminf(least, x);
    largest = fmaxf(largest, x);
    poison = fmaf(x, 0.0F, poison);
  }
};

// Rounds a group's scale and zero point to float16; codes are taken by the rounded ones.
template <int kBits>
__device__ inline GroupOfCodes close_group(const Extremes& extremes, float* scale,
                                           float* zero_point) {
  *zero_point = extremes.least + extremes.poison;
  *scale = (extremes.largest - *zero_point) / static_cast<float>(kMostCode<kBits>);
  const float divisor = to_float(from_float<__half>(*scale));
  return {.zero_point = to_float(from_float<__half>(*zero_point)),
          .divisor = divisor > 0.0F ? divisor : INFINITY};
}

// A thread takes kCount channels of a head in one group of tokens.
template <int kBits, int kCount>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_token_groups_kernel(QuantizeParams params, unsigned vectors_per_head) {
  constexpr unsigned kInWord = kCodesInWord<kBits>;
  const RowsView& rows = params.rows;
  const QuantizedRows& out = params.out;
  const unsigned vectors = vectors_per_head * static_cast<unsigned>(rows.heads);
  const unsigned blocks_per_group = (vectors + kQuantizeThreads - 1) / kQuantizeThreads;
  const int64_t group = blockIdx.x / blocks_per_group;
  const unsigned vector = blockIdx.x % blocks_per_group * kQuantizeThreads + threadIdx.x;
  if (vector >= vectors) return;
  const unsigned head = vector / vectors_per_head;
  const unsigned dim = (vector - head * vectors_per_head) * kCount;
  const int64_t begin = group * out.group_size;
  const int64_t end = begin + out.group_size < rows.tokens ? begin + out.group_size : rows.tokens;

  Extremes extremes[kCount];
#pragma unroll 4
  for (int64_t token = begin; token < end; ++token) {
    float x[kCount];
    load_vector<kCount>(rows.data, rows.dtype, offset_of_row(rows, token, head) + dim, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) extremes[j].add(x[j]);
  }
  GroupOfCodes groups[kCount];
  float scales[kCount];
  float zero_points[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    groups[j] = close_group<kBits>(extremes[j], &scales[j], &zero_points[j]);
  }
  const int64_t in_groups = (group * rows.heads + head) * rows.head_size + dim;
  store_vector<kCount>(scales, out.scales, DataType::float16, in_groups);
  store_vector<kCount>(zero_points, out.zero_points, DataType::float16, in_groups);

  for (int64_t first = begin; first < end; first += kInWord) {
    uint32_t words[kCount] = {};
#pragma unroll 4
    for (unsigned i = 0; i < kInWord; ++i) {
      if (first + i >= end) break;
      float x[kCount];
      load_vector<kCount>(rows.data, rows.dtype, offset_of_row(rows, first + i, head) + dim, x);
#pragma unroll
      for (int j = 0; j < kCount; ++j) words[j] |= code_of<kBits>(x[j], groups[j]) << (i * kBits);
    }
    const int64_t word = first / kInWord;
    store_words<kCount>(words, out.codes + (word * rows.heads + head) * rows.head_size + dim);
  }
}

// A thread takes a group of channels of one token, kCount at a time.
template <int kBits, int kCount>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_channel_groups_kernel(QuantizeParams params, unsigned groups_per_head,
                                   unsigned words_per_head) {
  constexpr unsigned kInWord = kCodesInWord<kBits>;
  const RowsView& rows = params.rows;
  const QuantizedRows& out = params.out;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  const int64_t row = index / groups_per_head;
  const int64_t token = row / rows.heads;
  if (token >= rows.tokens) return;
  const int64_t from = offset_of_row(rows, token, row - token * rows.heads);
  const auto group_size = static_cast<unsigned>(out.group_size);
  const auto head_size = static_cast<unsigned>(rows.head_size);
  const unsigned begin = static_cast<unsigned>(index - row * groups_per_head) * group_size;
  const unsigned end = head_size - begin < group_size ? head_size : begin + group_size;

  Extremes extremes;
  for (unsigned dim = begin; dim < end; dim += kCount) {
    float x[kCount];
    load_vector<kCount>(rows.data, rows.dtype, from + dim, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) extremes.add(x[j]);
  }
  float scale;
  float zero_point;
  const GroupOfCodes group = close_group<kBits>(extremes, &scale, &zero_point);
  store_vector<1>(&scale, out.scales, DataType::float16, index);
  store_vector<1>(&zero_point, out.zero_points, DataType::float16, index);

  uint32_t* words = out.codes + row * words_per_head;
  uint32_t word = 0;
  for (unsigned dim = begin; dim < end; dim += kCount) {
    float x[kCount];
    load_vector<kCount>(rows.data, rows.dtype, from + dim, x);
#pragma unroll
    for (unsigned j = 0; j < kCount; ++j) {
      word |= code_of<kBits>(x[j], group) << ((dim + j) % kInWord * kBits);
    }
    const unsigned next = dim + kCount;
    if (next % kInWord != 0 && next != end) continue;
    words[dim / kInWord] = word;
    word = 0;
  }
}

template <int kBits>
void run(const QuantizeParams& params, Stream stream) {
  if (params.out.axis == GroupAxis::channels) {
    return launch_channel_groups(rows_move_together(params.rows)
                                     ? quantize_channel_groups_kernel<kBits, 8>
                                     : quantize_channel_groups_kernel<kBits, 1>,
                                 params, params.out, Each::group, stream);
  }
  const int64_t groups = ceil_div(params.rows.tokens, params.out.group_size);
  if (moves_together(2, params.rows, params.out)) {
    return launch_token_groups(quantize_token_groups_kernel<kBits, 2>, params, 2, groups, stream);
  }
  launch_token_groups(quantize_token_groups_kernel<kBits, 1>, params, 1, groups, stream);
}

}  // namespace

void quantize(const QuantizeParams& params, Stream stream) {
  check_quantize(params);
  if (params.rows.tokens == 0) return;
  if (params.out.bits == 2) return run<2>(params, stream);
  run<4>(params, stream);
}

}  // namespace phasekv::cuda
