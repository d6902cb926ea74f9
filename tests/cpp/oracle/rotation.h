// RoPE in double precision.
#pragma once

#include <cstdint>
#include <vector>

#include "phasekv/rope.h"

namespace phasekv::oracle {

using Row = std::vector<double>;  // [head_size]

// The row moved by `delta` positions. A delta of 0 moves nothing, not even an infinity.
Row rotate(const Row& row, const std::vector<double>& frequencies, RopePairing pairing,
           int64_t delta);

}  // namespace phasekv::oracle
