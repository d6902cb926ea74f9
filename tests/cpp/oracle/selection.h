// Top-k by sorting.
#pragma once

#include <cstdint>
#include <vector>

namespace phasekv::oracle {

// Per segment: all pinned tokens, then the best others until there are count; ascending. `pinned`
// may be empty.
std::vector<int64_t> select_top(const std::vector<float>& scores,
                                const std::vector<int64_t>& segment_starts,
                                const std::vector<int64_t>& counts,
                                const std::vector<uint8_t>& pinned);

}  // namespace phasekv::oracle
