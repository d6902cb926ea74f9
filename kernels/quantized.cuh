// Quantised rows on a device, for kernels of a number of bits that the compiler knows.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.cuh"
#include "launch.cuh"
#include "phasekv/ops/quantize.h"
#include "platform.cuh"
#include "views.cuh"

namespace phasekv::cuda {

template <int kBits>
inline constexpr unsigned kCodesInWord = 32 / kBits;
template <int kBits>
inline constexpr uint32_t kMostCode = (1U << kBits) - 1U;

// A group's zero point, and what its codes are multiples of: the scale, or infinity where that is 0
// or NaN, so that codes are 0 there.
struct GroupOfCodes {
  float zero_point;
  float divisor;
};

template <int kBits>
__device__ inline uint32_t code_of(float x, const GroupOfCodes& group) {
  const float quotient = fmaxf((x - group.zero_point) / group.divisor, 0.0F);  // 0 for NaN
  return static_cast<uint32_t>(rintf(fminf(quotient, static_cast<float>(kMostCode<kBits>))));
}

// code * scale is exact in float32.
__device__ inline float value_of(uint32_t code, float scale, float zero_point) {
  return fmaf(static_cast<float>(code), scale, zero_point);
}

// kCount adjacent words, aligned to their size or to 16 bytes.
template <int kCount>
__device__ inline void load_words(const uint32_t* from, uint32_t* to) {
  constexpr int kBytes = kCount * 4 < 16 ? kCount * 4 : 16;
  const auto* units = reinterpret_cast<const Word<kBytes>*>(from);
#pragma unroll
  for (int i = 0; i < kCount * 4 / kBytes; ++i) {
    const Word<kBytes> unit = units[i];
    memcpy(to + i * kBytes / 4, &unit, kBytes);
  }
}

template <int kCount>
__device__ inline void store_words(const uint32_t* from, uint32_t* to) {
  constexpr int kBytes = kCount * 4 < 16 ? kCount * 4 : 16;
  auto* units = reinterpret_cast<Word<kBytes>*>(to);
#pragma unroll
  for (int i = 0; i < kCount * 4 / kBytes; ++i) {
    Word<kBytes> unit;
    memcpy(&unit, from + i * kBytes / 4, kBytes);
    units[i] = unit;
  }
}

// Whether `count` channels at a time can be moved: of rows, of words and of float16, each a power
// of two of bytes up to 16.
inline bool moves_together(int64_t count, const RowsView& rows, const QuantizedRows& quantized) {
  const auto fits = [count](int64_t alignment, int64_t size) {
    return alignment >= (count * size < 16 ? count * size : 16);
  };
  const auto alignment = [](const void* data) {
    return common_alignment(reinterpret_cast<uintptr_t>(data));
  };
  return rows.head_size % count == 0 && fits(alignment_of(rows), size_of(rows.dtype)) &&
         fits(alignment(quantized.codes), 4) && fits(alignment(quantized.scales), 2) &&
         fits(alignment(quantized.zero_points), 2);
}

// Whether rows alone allow 16 bytes at a time, where words and groups are taken one by one.
inline bool rows_move_together(const RowsView& rows) {
  return rows.head_size % 8 == 0 && alignment_of(rows) == 16;
}

inline constexpr unsigned kQuantizeThreads = 128;

// A thread for each `count` channels of a head in each of the `groups` of tokens.
template <typename Params>
void launch_token_groups(void (*kernel)(Params, unsigned vectors_per_head), const Params& params,
                         int64_t count, int64_t groups, Stream stream) {
  const int64_t vectors_per_head = params.rows.head_size / count;
  const int64_t blocks_per_group = ceil_div(params.rows.heads * vectors_per_head, kQuantizeThreads);
  launch(kernel, dim3(blocks_for(groups * blocks_per_group, 1)), kQuantizeThreads, 0, stream,
         params, static_cast<unsigned>(vectors_per_head));
}

// A thread for each group of channels, or for each word of them, of each row.
enum class Each { group, word };
template <typename Params>
void launch_channel_groups(void (*kernel)(Params, unsigned groups_per_head,
                                          unsigned words_per_head),
                           const Params& params, const QuantizedRows& quantized, Each each,
                           Stream stream) {
  const int64_t groups = ceil_div(params.rows.head_size, quantized.group_size);
  const int64_t words = ceil_div(params.rows.head_size * quantized.bits, 32);
  const int64_t threads =
      params.rows.tokens * params.rows.heads * (each == Each::group ? groups : words);
  launch(kernel, dim3(blocks_for(threads, kQuantizeThreads)), kQuantizeThreads, 0, stream, params,
         static_cast<unsigned>(groups), static_cast<unsigned>(words));
}

}  // namespace phasekv::cuda
