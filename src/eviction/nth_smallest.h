// Selection without sorting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace phasekv::eviction {

// The value that would stand at index `n` if `values` were sorted; n in [0, values.size()).
uint64_t nth_smallest(std::span<const uint64_t> values, size_t n);

}  // namespace phasekv::eviction
