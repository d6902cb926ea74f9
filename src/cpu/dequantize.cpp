#include "cpu/codes.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/quantized.h"
#include "cpu/rows.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Token after token, so that rows are written as they lie. code * scale is exact in float32.
template <int kBits, typename T>
void read_token_groups(const DequantizeParams& params, Range tokens) {
  const QuantizedRows& quantized = params.quantized;
  for (int64_t i = tokens.begin; i < tokens.end; ++i) {
    const int64_t token = params.first_token + i;
    const int shift = static_cast<int>(token % kCodesInWord<kBits>) * kBits;
    for (int64_t head = 0; head < quantized.heads; ++head) {
      const QuantizedLine line = line_of_token<kBits>(quantized, token, head);
      T* row = row_of<T>(params.rows, i, head);
      for_lanes(0, quantized.head_size, [&](auto lanes, int64_t d, int n) {
        const Vec codes = load_codes<kBits, lanes.kFull>(line.codes + d, shift, n);
        const Vec scales = load_lanes<lanes.kFull>(line.scales + d, n);
        const Vec zero_points = load_lanes<lanes.kFull>(line.zero_points + d, n);
        store_lanes<lanes.kFull>(row + d, fma(codes, scales, zero_points), n);
      });
    }
  }
}

// The codes [d, d + n) of a row, from bit 0 on; no word is read that has none of them.
template <int kBits>
inline uint64_t codes_from(const uint32_t* words, int64_t d, int n) {
  constexpr int64_t kInWord = kCodesInWord<kBits>;
  uint64_t bits = words[d / kInWord] >> (d % kInWord * kBits);
  if constexpr (kWidth > kInWord) {
    if (n > kInWord) bits |= static_cast<uint64_t>(words[d / kInWord + 1]) << 32;
  }
  return bits;
}

template <int kBits, typename T>
void read_channel_groups(const DequantizeParams& params, Range tokens) {
  const QuantizedRows& quantized = params.quantized;
  for (int64_t i = tokens.begin; i < tokens.end; ++i) {
    for (int64_t head = 0; head < quantized.heads; ++head) {
      const QuantizedLine line = line_of_row<kBits>(quantized, params.first_token + i, head);
      T* row = row_of<T>(params.rows, i, head);
      for (int64_t begin = 0, group = 0; begin < quantized.head_size; ++group) {
        const int64_t left = quantized.head_size - begin;
        const int64_t end = begin + (left < quantized.group_size ? left : quantized.group_size);
        const Vec scale = broadcast(load_one(line.scales + group));
        const Vec zero_point = broadcast(load_one(line.zero_points + group));
        for_lanes(begin, end, [&](auto lanes, int64_t d, int n) {
          const Vec codes = unpack_codes<kBits>(codes_from<kBits>(line.codes, d, n));
          store_lanes<lanes.kFull>(row + d, fma(codes, scale, zero_point), n);
        });
        begin = end;
      }
    }
  }
}

}  // namespace

void dequantize(const DequantizeParams& params) {
  with_type(params.rows.dtype, [&](auto tag) {
    with_bits(params.quantized.bits, [&](auto bits) {
      using T = typename decltype(tag)::Type;
      constexpr int kBits = decltype(bits)::kBits;
      const RowsView& rows = params.rows;
      const int64_t bytes = rows.tokens * rows.heads * rows.head_size * int64_t{sizeof(T)};
#pragma omp parallel num_threads(threads_for(bytes))
      {
        const Range tokens = share_of_thread(rows.tokens);
        if (params.quantized.axis == GroupAxis::tokens) {
          read_token_groups<kBits, T>(params, tokens);
        } else {
          read_channel_groups<kBits, T>(params, tokens);
        }
      }
    });
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
