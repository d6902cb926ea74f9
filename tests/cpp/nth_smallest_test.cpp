#include "eviction/nth_smallest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace phasekv::eviction {
namespace {

// What makes counting hard: one value, all in one bin but for a few, all ends of the range.
uint64_t draw(int kind, std::mt19937_64& random) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  switch (kind) {
    case 0:
      return random();
    case 1:
      return 7;
    case 2:
      return random() % 5;
    case 3:
      return random() % 100 == 0 ? random() : kMost / 3 + random() % 1000;
    case 4:
      return uint64_t{1} << random() % 64;
    default:
      return random() % 2 == 0 ? 0 : kMost;
  }
}

TEST(NthSmallest, IsWhereSortingPutsIt) {
  std::mt19937_64 random(3);
  for (const size_t count : {1, 2, 255, 256, 257, 2048, 5000}) {
    for (int kind = 0; kind < 6; ++kind) {
      std::vector<uint64_t> values(count);
      for (uint64_t& value : values) value = draw(kind, random);
      std::vector<uint64_t> sorted = values;
      std::ranges::sort(sorted);
      for (const size_t n : {size_t{0}, count / 4, count / 2, count - 1}) {
        EXPECT_EQ(nth_smallest(values, n), sorted[n]) << "count " << count << ", kind " << kind;
      }
    }
  }
}

}  // namespace
}  // namespace phasekv::eviction
