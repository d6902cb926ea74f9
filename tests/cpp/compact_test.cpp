// plan_compaction and compact: the keys that are kept, in the last slots, bit for bit, by the least
// moves, and nothing else written.
#include "phasekv/ops/compact.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "buffers.h"
#include "cached_request.h"
#include "cases.h"
#include "implementations.h"
#include "phasekv/error.h"

namespace phasekv {
namespace {

using oracle::Half;

class Compact : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(Compact);

// `kept` of the tokens for each head, ascending.
std::vector<int64_t> random_choice(int64_t tokens, int64_t kept, int64_t heads, uint32_t seed) {
  std::vector<int64_t> chosen;
  std::mt19937 generator(seed);
  for (int64_t head = 0; head < heads; ++head) {
    std::vector<int64_t> all(static_cast<size_t>(tokens));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), generator);
    std::sort(all.begin(), all.begin() + kept);
    chosen.insert(chosen.end(), all.begin(), all.begin() + kept);
  }
  return chosen;
}

void run(const CachedRequest& request, const CompactionMoves& moves) {
  compact({.key = request.key(),
           .value = request.value(),
           .block_table = request.block_table(),
           .first_token = request.first_token(),
           .starts = moves.starts.data(),
           .from = moves.from.data(),
           .to = moves.to.data()});
}

// Whether the two caches differ exactly where the moves say.
void expect_moved(const CachedRequest& before, const CachedRequest& after,
                  const CompactionMoves& moves) {
  const PagedView key = before.key();
  // [head][slot]: where the slot's row came from.
  std::vector<std::vector<int64_t>> source(static_cast<size_t>(key.num_heads));
  for (int64_t head = 0; head < key.num_heads; ++head) {
    auto& slots = source[static_cast<size_t>(head)];
    slots.resize(static_cast<size_t>(key.num_blocks * key.block_size));
    std::iota(slots.begin(), slots.end(), 0);
    for (int64_t i = moves.starts[static_cast<size_t>(head)];
         i < moves.starts[static_cast<size_t>(head + 1)]; ++i) {
      const auto move = static_cast<size_t>(i);
      slots[static_cast<size_t>(before.slot(moves.to[move]))] = before.slot(moves.from[move]);
    }
  }
  int64_t different = 0;
  for (const Half half : {Half::key, Half::value}) {
    for (int64_t head = 0; head < key.num_heads; ++head) {
      for (int64_t slot = 0; slot < key.num_blocks * key.block_size; ++slot) {
        const int64_t from = source[static_cast<size_t>(head)][static_cast<size_t>(slot)];
        for (int64_t d = 0; d < key.head_size; ++d) {
          different +=
              after.cache().bits(half, slot, head, d) != before.cache().bits(half, from, head, d);
        }
      }
    }
  }
  EXPECT_EQ(different, 0);
}

TEST_P(Compact, EveryCase) {
  for (const Case& shape : cases_of_any_width()) {
    SCOPED_TRACE(shape);
    const CachedRequest before(shape);
    const int64_t kept = shape.tokens * (1 + shape.seed % 7) / 8;
    const std::vector<int64_t> chosen = random_choice(shape.tokens, kept, shape.heads, shape.seed);
    const CompactionMoves moves = plan_compaction(chosen, shape.heads, shape.tokens);
    const CachedRequest after = before;
    run(after, moves);
    expect_moved(before, after, moves);
    if (HasFailure()) return;
  }
}

TEST_P(Compact, ThreadsDoNotMatter) {
  const CachedRequest before("vec", DataType::float32, 1500, 3, 64, 32, 5, 1);
  const CompactionMoves moves = plan_compaction(random_choice(1500, 700, 3, 1), 3, 1500);
  for (const int threads : {1, 2, 3, 7}) {
    omp_set_num_threads(threads);
    const CachedRequest after = before;
    run(after, moves);
    expect_moved(before, after, moves);
  }
}

TEST_P(Compact, NothingToMove) {
  const CachedRequest before("vec", DataType::float32, 40, 2, 32, 16, 5, 1);
  for (const int64_t kept : {0, 1, 39, 40}) {
    std::vector<int64_t> last;
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t i = 40 - kept; i < 40; ++i) last.push_back(i);
    }
    const CompactionMoves moves = plan_compaction(last, 2, 40);
    EXPECT_EQ(moves.starts, (std::vector<int64_t>{0, 0, 0}));
    const CachedRequest after = before;
    run(after, moves);
    expect_moved(before, after, moves);
  }
}

TEST(PlanCompaction, FillsTheHolesInOrder) {
  const std::vector<int64_t> kept = {0, 2, 5, 7, 1, 2, 3, 4};
  const CompactionMoves moves = plan_compaction(kept, 2, 8);
  EXPECT_EQ(moves.starts, (std::vector<int64_t>{0, 2, 5}));
  EXPECT_EQ(moves.from, (std::vector<int64_t>{0, 2, 1, 2, 3}));
  EXPECT_EQ(moves.to, (std::vector<int64_t>{4, 6, 5, 6, 7}));
  EXPECT_EQ(compaction_sources(moves, 4, 8), (std::vector<int64_t>{0, 5, 2, 7, 4, 1, 2, 3}));
}

// The window holds what was kept, nothing that stays is moved, and both lists ascend.
TEST(PlanCompaction, MovesTheLeast) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const int64_t tokens = 1 + seed % 50;
    const int64_t kept = seed * 7 % (tokens + 1);
    const int64_t window = tokens - kept;
    const std::vector<int64_t> chosen = random_choice(tokens, kept, 3, seed);
    const CompactionMoves moves = plan_compaction(chosen, 3, tokens);
    const std::vector<int64_t> sources = compaction_sources(moves, kept, tokens);
    ASSERT_EQ(moves.to.size(), moves.from.size());
    for (int64_t head = 0; head < 3; ++head) {
      const auto begin = chosen.begin() + head * kept;
      const std::multiset<int64_t> wanted(begin, begin + kept);
      const std::multiset<int64_t> found(sources.begin() + head * kept,
                                         sources.begin() + (head + 1) * kept);
      ASSERT_EQ(found, wanted);
      const auto below = std::count_if(begin, begin + kept, [&](int64_t i) { return i < window; });
      const auto first = moves.starts[static_cast<size_t>(head)];
      const auto last = moves.starts[static_cast<size_t>(head + 1)];
      ASSERT_EQ(last - first, below);
      ASSERT_TRUE(std::is_sorted(moves.from.begin() + first, moves.from.begin() + last));
      ASSERT_TRUE(std::is_sorted(moves.to.begin() + first, moves.to.begin() + last));
    }
  }
}

}  // namespace
}  // namespace phasekv
