#include "eviction/nth_smallest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

namespace phasekv::eviction {
namespace {

constexpr int kBinBits = 10;
// Counting costs a pass over the bins, too; and values that crowd into few bins are not counted for
// ever.
constexpr size_t kLeastCounted = 256;
constexpr int kMostRounds = 3;

}  // namespace

// Comparing random values mispredicts every other branch; counting them by their leading bits
// leaves a few to compare.
uint64_t nth_smallest(std::span<const uint64_t> values, size_t n) {
  std::vector<uint64_t> left(values.begin(), values.end());
  for (int round = 0; round < kMostRounds && left.size() >= kLeastCounted; ++round) {
    const auto [least, most] = std::minmax_element(left.begin(), left.end());
    const uint64_t base = *least;
    const int shift = std::max(0, static_cast<int>(std::bit_width(*most - base)) - kBinBits);
    std::array<uint32_t, size_t{1} << kBinBits> counts{};
    for (const uint64_t value : left) ++counts[(value - base) >> shift];
    size_t bin = 0;
    for (; n >= counts[bin]; ++bin) n -= counts[bin];
    size_t end = 0;
    for (const uint64_t value : left) {
      left[end] = value;
      end += (value - base) >> shift == bin ? 1 : 0;
    }
    left.resize(end);
  }
  const auto nth = left.begin() + static_cast<std::ptrdiff_t>(n);
  std::nth_element(left.begin(), nth, left.end());
  return *nth;
}

}  // namespace phasekv::eviction
