#include "oracle/quantization.h"

#include <algorithm>

namespace phasekv::oracle {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

// Row-major index of `at` of the axis that is shared out among `units`, in units of `size`.
int64_t index_of(const QuantizedRows& rows, int64_t size, int64_t token, int64_t head,
                 int64_t channel) {
  if (rows.axis == GroupAxis::tokens) {
    return (token / size * rows.heads + head) * rows.head_size + channel;
  }
  return (token * rows.heads + head) * ceil_div(rows.head_size, size) + channel / size;
}

int64_t count_of(const QuantizedRows& rows, int64_t size) {
  if (rows.axis == GroupAxis::tokens) {
    return ceil_div(rows.tokens, size) * rows.heads * rows.head_size;
  }
  return rows.tokens * rows.heads * ceil_div(rows.head_size, size);
}

}  // namespace

int64_t most_code(int bits) { return (int64_t{1} << bits) - 1; }

GroupRange range_of(const Row& group, int bits) {
  const auto [least, largest] = std::minmax_element(group.begin(), group.end());
  return {.scale = (*largest - *least) / static_cast<double>(most_code(bits)),
          .zero_point = *least};
}

double quotient_of(double x, double scale, double zero_point, int bits) {
  if (scale == 0.0) return 0.0;
  return std::clamp((x - zero_point) / scale, 0.0, static_cast<double>(most_code(bits)));
}

int64_t words_in(const QuantizedRows& rows) { return count_of(rows, 32 / rows.bits); }

int64_t groups_in(const QuantizedRows& rows) { return count_of(rows, rows.group_size); }

uint32_t code_at(const QuantizedRows& rows, int64_t token, int64_t head, int64_t channel) {
  const int64_t in_word = 32 / rows.bits;
  const int64_t along = rows.axis == GroupAxis::tokens ? token : channel;
  const uint32_t word = rows.codes[index_of(rows, in_word, token, head, channel)];
  const auto place = static_cast<uint32_t>(along % in_word * rows.bits);
  return (word >> place) & static_cast<uint32_t>(most_code(rows.bits));
}

int64_t group_index(const QuantizedRows& rows, int64_t token, int64_t head, int64_t channel) {
  return index_of(rows, rows.group_size, token, head, channel);
}

}  // namespace phasekv::oracle
