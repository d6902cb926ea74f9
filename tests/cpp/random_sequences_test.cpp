// Long random sequences of ops on one cache, beside a model of it that is a table of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "buffers.h"
#include "compare.h"
#include "implementations.h"
#include "phasekv/ops.h"

namespace phasekv {
namespace {

using oracle::Half;

class RandomSequences : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(RandomSequences);

class Sequence {
 public:
  Sequence(const char* layout, uint32_t seed, bool compacts)
      : generator_(seed),
        compacts_(compacts),
        cache_(layout, DataType::float32, kBlocks, kHeads, kBlockSize, kHeadSize) {
    for (int64_t i = 0; i < kRotaryDim / 2; ++i) {
      frequencies_.push_back(1.0 / static_cast<double>(i + 1));
    }
  }

  void step() {
    if (compacts_ && next(4) == 0) return compact_request();
    const std::vector<int64_t> slots = some_slots();
    const Half half = next(2) == 0 ? Half::key : Half::value;
    switch (next(3)) {
      case 0:
        scatter(half, slots);
        break;
      case 1:
        shift(half, slots);
        break;
      default:
        gather(half, slots);
    }
  }

 private:
  static constexpr int64_t kBlocks = 6;
  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kBlockSize = 16;
  static constexpr int64_t kHeadSize = 24;
  static constexpr int64_t kRotaryDim = 16;

  int64_t next(int64_t limit) { return static_cast<int64_t>(generator_()) % limit; }

  // A few runs, each slot at most once.
  std::vector<int64_t> some_slots() {
    std::vector<bool> is_taken(kBlocks * kBlockSize, false);
    std::vector<int64_t> slots;
    for (int64_t run = next(4); run >= 0; --run) {
      const int64_t start = next(kBlocks * kBlockSize);
      const int64_t end = std::min(start + 1 + next(40), kBlocks * kBlockSize);
      for (int64_t slot = start; slot < end; ++slot) {
        if (is_taken[static_cast<size_t>(slot)]) continue;
        is_taken[static_cast<size_t>(slot)] = true;
        slots.push_back(slot);
      }
    }
    return slots;
  }

  RowsBuffer random_rows(int64_t tokens) {
    RowsBuffer rows(DataType::float32, tokens, kHeads, kHeadSize, RowsOrder::padded);
    rows.fill_random(static_cast<uint32_t>(generator_()));
    return rows;
  }

  oracle::Row& row(Half half, int64_t slot, int64_t head) {
    return model_[{half, slot * kHeads + head}];
  }

  void scatter(Half half, const std::vector<int64_t>& slots) {
    const RowsBuffer rows = random_rows(static_cast<int64_t>(slots.size()));
    scatter_blocks({.rows = rows.view(), .slots = slots.data(), .blocks = cache_.view(half)});
    for (size_t i = 0; i < slots.size(); ++i) {
      for (int64_t head = 0; head < kHeads; ++head) {
        row(half, slots[i], head) = rows.row(static_cast<int64_t>(i), head);
      }
    }
  }

  // Reads what is there and writes it back elsewhere, moved.
  void shift(Half half, const std::vector<int64_t>& slots) {
    const auto tokens = static_cast<int64_t>(slots.size());
    const RowsBuffer rows = random_rows(tokens);
    const int64_t split = next(tokens + 1);
    const std::vector<int64_t> starts = {0, split, tokens};
    const std::vector<int64_t> deltas = {next(2000) - 1000, next(2000) - 1000};
    std::vector<int64_t> order(slots.size());
    for (int64_t i = 0; i < tokens; ++i) order[static_cast<size_t>(i)] = tokens - 1 - i;
    apply_shift({.cached = rows.view(),
                 .cached_rows = order.data(),
                 .slots = slots.data(),
                 .segment_starts = starts.data(),
                 .num_segments = 2,
                 .deltas = deltas.data(),
                 .rope = {.frequencies = frequencies_.data(), .rotary_dim = kRotaryDim},
                 .blocks = cache_.view(half)});
    for (int64_t i = 0; i < tokens; ++i) {
      const auto index = static_cast<size_t>(i);
      for (int64_t head = 0; head < kHeads; ++head) {
        row(half, slots[index], head) =
            oracle::rotate(rows.row(order[index], head), frequencies_, RopePairing::neox,
                           deltas[i < split ? 0 : 1]);
      }
    }
  }

  void gather(Half half, const std::vector<int64_t>& slots) {
    RowsBuffer rows(DataType::float32, static_cast<int64_t>(slots.size()), kHeads, kHeadSize,
                    RowsOrder::head_major);
    gather_blocks({.blocks = cache_.view(half), .slots = slots.data(), .rows = rows.view()});
    for (size_t i = 0; i < slots.size(); ++i) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const oracle::Row& expected = row(half, slots[i], head);
        if (expected.empty()) continue;  // never written
        ASSERT_TRUE(is_near(rows.row(static_cast<int64_t>(i), head), expected,
                            2.0 * largest(expected) + 2.0, DataType::float32));
      }
    }
  }

  // Keeps some keys of a request whose blocks are any, from some token on.
  void compact_request() {
    std::vector<int32_t> block_table(kBlocks);
    std::iota(block_table.begin(), block_table.end(), 0);
    std::shuffle(block_table.begin(), block_table.end(), generator_);
    const int64_t first_token = next(kBlocks * kBlockSize);
    const int64_t tokens = next(kBlocks * kBlockSize - first_token + 1);
    const int64_t kept = next(tokens + 1);
    std::vector<int64_t> chosen;
    for (int64_t head = 0; head < kHeads; ++head) {
      std::vector<int64_t> all(static_cast<size_t>(tokens));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), generator_);
      std::sort(all.begin(), all.begin() + kept);
      chosen.insert(chosen.end(), all.begin(), all.begin() + kept);
    }
    const CompactionMoves moves = plan_compaction(chosen, kHeads, tokens);
    compact({.key = cache_.view(Half::key),
             .value = cache_.view(Half::value),
             .block_table = block_table.data(),
             .first_token = first_token,
             .starts = moves.starts.data(),
             .from = moves.from.data(),
             .to = moves.to.data()});
    const auto slot_of = [&](int64_t index) {
      const int64_t token = first_token + index;
      return block_table[static_cast<size_t>(token / kBlockSize)] * kBlockSize + token % kBlockSize;
    };
    for (int64_t head = 0; head < kHeads; ++head) {
      const auto begin = static_cast<size_t>(moves.starts[static_cast<size_t>(head)]);
      const auto end = static_cast<size_t>(moves.starts[static_cast<size_t>(head + 1)]);
      for (size_t i = begin; i < end; ++i) {
        for (const Half half : {Half::key, Half::value}) {
          row(half, slot_of(moves.to[i]), head) = row(half, slot_of(moves.from[i]), head);
        }
      }
    }
  }

  std::mt19937 generator_;
  bool compacts_;
  CacheBuffer cache_;
  std::vector<double> frequencies_;
  std::map<std::pair<Half, int64_t>, oracle::Row> model_;
};

TEST_P(RandomSequences, TheCacheIsWhatWasWritten) {
  for (const char* layout : {"vec", "rows"}) {
    for (uint32_t seed = 0; seed < 5; ++seed) {
      SCOPED_TRACE(testing::Message() << layout << ", seed " << seed);
      Sequence sequence(layout, seed, GetParam().kernels->compact != nullptr);
      for (int i = 0; i < 60; ++i) {
        sequence.step();
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace phasekv
