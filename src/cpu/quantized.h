// Where the parts of quantised rows lie, for kernels of a number of bits that the compiler knows.
#pragma once

#include <cstdint>

#include "cpu/codes.h"
#include "cpu/isa.h"
#include "cpu/storage.h"
#include "phasekv/ops/quantize.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

template <int kBitsInCode>
struct CodeBits {
  static constexpr int kBits = kBitsInCode;
};

// function(CodeBits<b>{}) with the b that the codes have.
template <typename Function>
inline void with_bits(int bits, const Function& function) {
  if (bits == 2) return function(CodeBits<2>{});
  return function(CodeBits<4>{});
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The parts that belong to one row of all heads, or to one head of one token: a line of them.
struct QuantizedLine {
  uint32_t* codes;
  Float16* scales;
  Float16* zero_points;
};

inline QuantizedLine line_at(const QuantizedRows& quantized, int64_t codes, int64_t groups) {
  return {.codes = quantized.codes + codes,
          .scales = reinterpret_cast<Float16*>(quantized.scales) + groups,
          .zero_points = reinterpret_cast<Float16*>(quantized.zero_points) + groups};
}

// Groups along tokens: the words, and the groups, that token `token` of head `head` is in.
template <int kBits>
inline QuantizedLine line_of_token(const QuantizedRows& quantized, int64_t token, int64_t head) {
  const int64_t word = token / kCodesInWord<kBits>;
  const int64_t group = token / quantized.group_size;
  return line_at(quantized, (word * quantized.heads + head) * quantized.head_size,
                 (group * quantized.heads + head) * quantized.head_size);
}

// Groups along channels: the words, and the groups, of a head of a token.
template <int kBits>
inline QuantizedLine line_of_row(const QuantizedRows& quantized, int64_t token, int64_t head) {
  const int64_t words = ceil_div(quantized.head_size, kCodesInWord<kBits>);
  const int64_t groups = ceil_div(quantized.head_size, quantized.group_size);
  const int64_t row = token * quantized.heads + head;
  return line_at(quantized, row * words, row * groups);
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
