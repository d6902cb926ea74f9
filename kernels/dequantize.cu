// Bound by memory: codes are read once, rows are written once; a group's scale and zero point are
// read once for each of its words, from the caches but for the first.
#include <cstdint>

#include "launch.cuh"
#include "ops/quantized_rows.h"
#include "phasekv/cuda.h"
#include "quantized.cuh"

namespace phasekv::cuda {
namespace {

// A thread takes the tokens of one word, in kCount channels of a head.
template <int kBits, int kCount>
__global__ void __launch_bounds__(kQuantizeThreads)
    dequantize_token_groups_kernel(DequantizeParams params, unsigned vectors_per_head) {
  constexpr unsigned kInWord = kCodesInWord<kBits>;
  const RowsView& rows = params.rows;
  const QuantizedRows& from = params.quantized;
  const unsigned vectors = vectors_per_head * static_cast<unsigned>(rows.heads);
  const unsigned blocks_per_word = (vectors + kQuantizeThreads - 1) / kQuantizeThreads;
  const int64_t word = params.first_token / kInWord + blockIdx.x / blocks_per_word;
  const unsigned vector = blockIdx.x % blocks_per_word * kQuantizeThreads + threadIdx.x;
  if (vector >= vectors) return;
  const unsigned head = vector / vectors_per_head;
  const unsigned dim = (vector - head * vectors_per_head) * kCount;

  uint32_t words[kCount];
  load_words<kCount>(from.codes + (word * rows.heads + head) * rows.head_size + dim, words);
  const int64_t group = word * kInWord / from.group_size;
  const int64_t in_groups = (group * rows.heads + head) * rows.head_size + dim;
  float scales[kCount];
  float zero_points[kCount];
  load_vector<kCount>(from.scales, DataType::float16, in_groups, scales);
  load_vector<kCount>(from.zero_points, DataType::float16, in_groups, zero_points);
  const int64_t first = word * kInWord - params.first_token;
#pragma unroll 4
  for (unsigned i = 0; i < kInWord; ++i) {
    const int64_t token = first + i;
    if (token < 0 || token >= rows.tokens) continue;
    float values[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      values[j] = value_of((words[j] >> (i * kBits)) & kMostCode<kBits>, scales[j], zero_points[j]);
    }
    store_vector<kCount>(values, rows.data, rows.dtype, offset_of_row(rows, token, head) + dim);
  }
}

// A thread takes the channels of one word of a token, kCount at a time.
template <int kBits, int kCount>
__global__ void __launch_bounds__(kQuantizeThreads)
    dequantize_channel_groups_kernel(DequantizeParams params, unsigned groups_per_head,
                                     unsigned words_per_head) {
  constexpr unsigned kInWord = kCodesInWord<kBits>;
  const RowsView& rows = params.rows;
  const QuantizedRows& from = params.quantized;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  const int64_t row = index / words_per_head;
  const int64_t token = row / rows.heads;
  if (token >= rows.tokens) return;
  const int64_t stored_row = row + params.first_token * rows.heads;
  const auto word = static_cast<unsigned>(index - row * words_per_head);
  const unsigned begin = word * kInWord;
  const auto head_size = static_cast<unsigned>(rows.head_size);
  const unsigned end = head_size - begin < kInWord ? head_size : begin + kInWord;

  const int64_t group =
      stored_row * groups_per_head + begin / static_cast<unsigned>(from.group_size);
  const uint32_t codes = from.codes[stored_row * words_per_head + word];
  const float scale = load_element(from.scales, DataType::float16, group);
  const float zero_point = load_element(from.zero_points, DataType::float16, group);
  const int64_t to = offset_of_row(rows, token, row - token * rows.heads);
#pragma unroll
  for (unsigned i = 0; i < kInWord; i += kCount) {
    if (begin + i >= end) break;
    float values[kCount];
#pragma unroll
    for (unsigned j = 0; j < kCount; ++j) {
      values[j] = value_of((codes >> ((i + j) * kBits)) & kMostCode<kBits>, scale, zero_point);
    }
    store_vector<kCount>(values, rows.data, rows.dtype, to + begin + i);
  }
}

template <int kBits>
void run(const DequantizeParams& params, Stream stream) {
  if (params.quantized.axis == GroupAxis::channels) {
    return launch_channel_groups(rows_move_together(params.rows)
                                     ? dequantize_channel_groups_kernel<kBits, 8>
                                     : dequantize_channel_groups_kernel<kBits, 1>,
                                 params, params.quantized, Each::word, stream);
  }
  // Of the tokens of a word.
  constexpr int64_t kInWord = kCodesInWord<kBits>;
  const int64_t groups = ceil_div(params.first_token % kInWord + params.rows.tokens, kInWord);
  if (moves_together(8, params.rows, params.quantized)) {
    return launch_token_groups(dequantize_token_groups_kernel<kBits, 8>, params, 8, groups, stream);
  }
  launch_token_groups(dequantize_token_groups_kernel<kBits, 1>, params, 1, groups, stream);
}

}  // namespace

void dequantize(const DequantizeParams& params, Stream stream) {
  check_dequantize(params);
  if (params.rows.tokens == 0) return;
  if (params.quantized.bits == 2) return run<2>(params, stream);
  run<4>(params, stream);
}

}  // namespace phasekv::cuda
