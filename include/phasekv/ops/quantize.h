// KIVI's asymmetric quantisation of keys and values to a few bits (arXiv 2402.02750): the elements
// of a group share a zero point z and a scale s, and are kept as codes of b bits.
//   z = min x,  s = (max x - min x) / (2^b - 1)
//   code = (x - z) / s, rounded to the nearest whole number (ties to even), within [0, 2^b - 1]
//   x is near code * s + z
// z and s are float16, and codes are taken by the rounded ones. Where s is 0 so are the codes. A
// group with a value that is not finite comes back as NaN, one beyond float16 as not finite.
#pragma once

#include <cstdint>

#include "phasekv/tensor.h"

namespace phasekv {

// What the elements of a group have in common.
enum class GroupAxis {
  tokens,    // one channel of a head over consecutive tokens: KIVI's keys
  channels,  // one token's consecutive channels of a head: KIVI's values
};

// Quantised rows [tokens, heads, head_size]. Groups begin at token or channel 0; the last is
// shorter where they do not divide evenly. With n = 32 / bits codes in a word, the first in the
// lowest bits, all contiguous:
//   axis       codes                                       scales and zero_points, as float16 bits
//   tokens     [ceil(tokens / n), heads, head_size]        [ceil(tokens / group_size), heads,
//                                                           head_size]
//   channels   [tokens, heads, ceil(head_size / n)]        [tokens, heads,
//                                                           ceil(head_size / group_size)]
// Bits of a last word that no code has are 0.
struct QuantizedRows {
  uint32_t* codes = nullptr;
  uint16_t* scales = nullptr;
  uint16_t* zero_points = nullptr;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t head_size = 0;
  int bits = 2;             // 2 or 4
  int64_t group_size = 32;  // a multiple of 32 / bits, at most 2^20
  GroupAxis axis = GroupAxis::tokens;
};

struct QuantizeParams {
  RowsView rows;      // input
  QuantizedRows out;  // of the same tokens, heads and head size
};

struct DequantizeParams {
  QuantizedRows quantized;  // input
  int64_t first_token = 0;  // of those that are wanted
  RowsView rows;            // output; first_token + rows.tokens is at most quantized.tokens
};

// Both depend on nothing but the elements: the same bits on every processor, but for NaNs.
void quantize(const QuantizeParams& params);
void dequantize(const DequantizeParams& params);

}  // namespace phasekv
