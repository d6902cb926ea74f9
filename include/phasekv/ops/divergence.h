// Per-token squared distance ||fresh - cached||^2 over all heads and dimensions. Squared, so that
// tensor-parallel ranks, which hold different heads, can add theirs before the square root.
#pragma once

#include "phasekv/tensor.h"

namespace phasekv {

struct DivergenceParams {
  RowsView fresh;        // [tokens, heads, head_size]
  RowsView cached;       // same shape, dtype may differ
  float* out = nullptr;  // [tokens]
};

void divergence(const DivergenceParams& params);

}  // namespace phasekv
