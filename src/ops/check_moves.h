// What compact refuses, for whoever hands its moves to a device.
#pragma once

#include <cstdint>

#include "phasekv/ops/compact.h"

namespace phasekv {

// Returns the number of moves of all KV heads. Throws invalid_argument as compact does.
int64_t check_moves(const CompactParams& params);

}  // namespace phasekv
