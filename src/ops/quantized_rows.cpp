#include "ops/quantized_rows.h"

#include <string>

#include "validate.h"

namespace phasekv {

namespace {

constexpr int64_t kMaxGroupSize = int64_t{1} << 20;

std::string member(const char* argument, const char* name) {
  return std::string(argument) + "." + name;
}

void check_at_least(const std::string& argument, int64_t value, int64_t least) {
  if (value < least) refuse(argument, value, "at least " + std::to_string(least));
}

void check_heads(const RowsView& rows, const char* other, const QuantizedRows& quantized) {
  check_equal("rows.heads", rows.heads, other, quantized.heads);
  check_equal("rows.head_size", rows.head_size, other, quantized.head_size);
}

}  // namespace

void check_quantized(const char* argument, const QuantizedRows& quantized) {
  check_at_least(member(argument, "tokens"), quantized.tokens, 0);
  check_at_least(member(argument, "heads"), quantized.heads, 1);
  check_at_least(member(argument, "head_size"), quantized.head_size, 1);
  if (quantized.bits != 2 && quantized.bits != 4) {
    refuse(member(argument, "bits"), quantized.bits, "2 or 4");
  }
  const int64_t per_word = 32 / quantized.bits;
  if (quantized.group_size < 1 || quantized.group_size > kMaxGroupSize ||
      quantized.group_size % per_word != 0) {
    refuse(member(argument, "group_size"), quantized.group_size,
           "a multiple of " + std::to_string(per_word) + ", the codes in a word, and at most " +
               std::to_string(kMaxGroupSize));
  }
  check_not_null(member(argument, "codes").c_str(), quantized.codes, quantized.tokens);
  check_not_null(member(argument, "scales").c_str(), quantized.scales, quantized.tokens);
  check_not_null(member(argument, "zero_points").c_str(), quantized.zero_points, quantized.tokens);
}

void check_quantize(const QuantizeParams& params) {
  check_rows("rows", params.rows);
  check_quantized("out", params.out);
  check_equal("rows.tokens", params.rows.tokens, "out", params.out.tokens);
  check_heads(params.rows, "out", params.out);
}

void check_dequantize(const DequantizeParams& params) {
  check_quantized("quantized", params.quantized);
  check_output_rows("rows", params.rows);
  check_heads(params.rows, "quantized", params.quantized);
  const int64_t most = params.quantized.tokens - params.rows.tokens;
  if (most < 0) {
    refuse("rows.tokens", params.rows.tokens,
           "at most quantized.tokens, " + std::to_string(params.quantized.tokens));
  }
  if (params.first_token < 0 || params.first_token > most) {
    refuse("first_token", params.first_token,
           "in [0, " + std::to_string(most) + "], the tokens there are less those wanted");
  }
}

}  // namespace phasekv
