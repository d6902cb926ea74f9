// Distances and means of fresh - cached, in double precision.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "buffers.h"

namespace phasekv::oracle {

// Over all heads and dimensions of one token.
double squared_distance(const RowsBuffer& fresh, const RowsBuffer& cached, int64_t token);

// Mean over pairs of (row of fresh, row of cached) of one head; zeros for no pairs.
Row mean_residual(const std::vector<std::pair<Row, Row>>& pairs, int64_t head_size);

}  // namespace phasekv::oracle
