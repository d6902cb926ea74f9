// Deterministic top-k per segment: higher score first, ties to the lower index.
#pragma once

#include <cstdint>
#include <vector>

namespace phasekv {

struct SelectTopParams {
  const float* scores = nullptr;            // [segment_starts[num_segments]]; NaN is refused
  const int64_t* segment_starts = nullptr;  // [num_segments + 1], non-decreasing, starts at 0
  int64_t num_segments = 0;
  const int64_t* counts = nullptr;  // [num_segments], how many to take; clamped to the segment
  const uint8_t* pinned = nullptr;  // [tokens] or null; non-zero ones are taken before any other
                                    // and count towards the segment's number, but are never
                                    // dropped for it
};

// Chosen indices, ascending; per segment max(count, pinned in it) clamped to its length.
std::vector<int64_t> select_top(const SelectTopParams& params);

}  // namespace phasekv
