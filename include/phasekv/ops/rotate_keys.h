// Moves keys to another position: multiplies each RoPE pair by the rotation of a position delta.
#pragma once

#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv {

struct RotateKeysParams {
  RowsView keys;
  const int64_t* deltas = nullptr;  // [keys.tokens], of either sign, |delta| <= 131071 is tested
  RopeView rope;
  RowsView out;  // same shape and dtype; may be the same memory as keys
};

void rotate_keys(const RotateKeysParams& params);

}  // namespace phasekv
