#include "eviction/query_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>

namespace phasekv::eviction {
namespace {

// Positions in each buffer, as lists that are written anew each time.
class Model {
 public:
  Model(int64_t buffers, int64_t capacity) : buffers_(buffers), capacity_(capacity) {}

  void push(int64_t position, Phase phase) {
    std::vector<int64_t>& list = lists_[buffers_ == 1 ? 0 : static_cast<int>(phase)];
    list.push_back(position);
    if (static_cast<int64_t>(list.size()) > capacity_) list.erase(list.begin());
  }
  void withdraw(int64_t begin, int64_t end) {
    for (auto& [buffer, list] : lists_) {
      std::erase_if(list, [&](int64_t p) { return begin <= p && p < end; });
    }
  }
  void clear() { lists_.clear(); }
  std::vector<int64_t> positions() const {
    std::vector<int64_t> all;
    for (const auto& [buffer, list] : lists_) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

 private:
  int64_t buffers_;
  int64_t capacity_;
  std::map<int, std::vector<int64_t>> lists_;
};

std::vector<int64_t> positions_of(const std::vector<BufferedQuery>& queries) {
  std::vector<int64_t> positions;
  for (const BufferedQuery& query : queries) positions.push_back(query.position);
  return positions;
}

class QueryBuffersTest : public testing::TestWithParam<std::array<int64_t, 2>> {};

INSTANTIATE_TEST_SUITE_P(Shapes, QueryBuffersTest,
                         testing::Values(std::array<int64_t, 2>{1, 1}, std::array<int64_t, 2>{1, 7},
                                         std::array<int64_t, 2>{4, 1},
                                         std::array<int64_t, 2>{4, 8}));

// What is written where, step by step, must be what the buffers say lies there.
TEST_P(QueryBuffersTest, AgreeWithListsInAnySequence) {
  const auto [num_buffers, capacity] = GetParam();
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 generator(seed);
    QueryBuffers buffers({.buffers = num_buffers, .capacity = capacity});
    Model model(num_buffers, capacity);
    std::map<int64_t, int64_t> memory;  // entry -> position written there
    int64_t position = 0;
    for (int step = 0; step < 60; ++step) {
      const auto count = static_cast<int64_t>(generator() % 12);
      for (int64_t i = 0; i < count; ++i, ++position) {
        const auto phase = static_cast<Phase>(generator() % 4);
        if (generator() % 5 == 0) continue;  // a token without a query
        buffers.push(position, phase);
        model.push(position, phase);
      }
      if (generator() % 3 == 0) {
        const int64_t begin = position - static_cast<int64_t>(generator() % 9);
        buffers.withdraw(begin, position);
        model.withdraw(begin, position);
      }
      for (const BufferedQuery& query : buffers.take_pushed()) memory[query.entry] = query.position;
      if (generator() % 11 == 0) {
        buffers.clear();
        model.clear();
      }
      const std::vector<BufferedQuery> contents = buffers.contents();
      EXPECT_EQ(positions_of(contents), model.positions());
      std::set<int64_t> entries;
      for (const BufferedQuery& query : contents) {
        EXPECT_TRUE(entries.insert(query.entry).second) << "two queries in one entry";
        EXPECT_LT(query.entry, buffers.num_entries());
        EXPECT_EQ(memory[query.entry], query.position);
      }
      QueryBuffers restored({.buffers = num_buffers, .capacity = capacity});
      restored.restore(contents);
      EXPECT_EQ(positions_of(restored.contents()), model.positions());
      EXPECT_TRUE(restored.take_pushed().empty());
      if (generator() % 4 == 0) buffers = restored;
    }
  }
}

TEST(QueryBuffers, WithoutBuffersNothingIsKept) {
  QueryBuffers buffers({});
  buffers.push(0, Phase::act);
  EXPECT_EQ(buffers.num_entries(), 0);
  EXPECT_TRUE(buffers.take_pushed().empty());
  EXPECT_TRUE(buffers.contents().empty());
}

}  // namespace
}  // namespace phasekv::eviction
