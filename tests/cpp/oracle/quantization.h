// Asymmetric quantisation in double precision, and the layout of quantised rows as its definition
// says it, element by element.
#pragma once

#include <cstdint>

#include "oracle/rotation.h"
#include "phasekv/ops/quantize.h"

namespace phasekv::oracle {

// The largest code.
int64_t most_code(int bits);

struct GroupRange {
  double scale = 0.0;
  double zero_point = 0.0;
};

// Scale and zero point of a group, not yet rounded to float16.
GroupRange range_of(const Row& group, int bits);

// (x - zero_point) / scale within the codes, not yet rounded; 0 for a scale of 0.
double quotient_of(double x, double scale, double zero_point, int bits);

// What lies where in quantised rows.
int64_t words_in(const QuantizedRows& rows);
int64_t groups_in(const QuantizedRows& rows);
uint32_t code_at(const QuantizedRows& rows, int64_t token, int64_t head, int64_t channel);
int64_t group_index(const QuantizedRows& rows, int64_t token, int64_t head, int64_t channel);

}  // namespace phasekv::oracle
