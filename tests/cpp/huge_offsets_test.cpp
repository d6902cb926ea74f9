// Caches and rows that are larger than 32 bits can count, as virtual memory of which little is
// touched.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <iterator>
#include <vector>

#include "buffers.h"
#include "compare.h"
#include "implementations.h"
#include "oracle/elements.h"
#include "phasekv/ops.h"

namespace phasekv {
namespace {

class HugeOffsets : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(HugeOffsets);

class VirtualMemory {
 public:
  explicit VirtualMemory(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~VirtualMemory() {
    if (exists()) munmap(data_, bytes_);
  }
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;

  bool exists() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

constexpr int64_t kHeads = 8;
constexpr int64_t kBlockSize = 64;
constexpr int64_t kHeadSize = 128;
constexpr int64_t kPerHead = 2 * kBlockSize * kHeadSize;
constexpr int64_t kPerBlock = kHeads * kPerHead;
constexpr int64_t kBlocks = 40000;  // 5.2e9 elements
// The first block, the ones around 2^31 and 2^32 elements, and the last.
constexpr int64_t kUsedBlocks[] = {0, 16383, 16384, 32767, 32768, kBlocks - 1};

TEST_P(HugeOffsets, Blocks) {
  static_assert(kPerBlock * 16384 == int64_t{1} << 31);
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    const VirtualMemory memory(kBlocks * kPerBlock * size_of(dtype));
    if (!memory.exists()) GTEST_SKIP() << "no address space for " << kBlocks << " blocks";
    const PagedKV kv = cpu_paged_kv("vec", memory.data(), dtype, kBlocks, kHeads, kBlockSize,
                                    kHeadSize, kPerBlock, kPerHead);
    std::vector<int64_t> slots;
    std::vector<int64_t> all_rows;
    for (const int64_t block : kUsedBlocks) {
      for (const int64_t offset : {3, 4, 5, 63}) {
        all_rows.push_back(static_cast<int64_t>(slots.size()));
        slots.push_back(block * kBlockSize + offset);
      }
    }
    const auto tokens = static_cast<int64_t>(slots.size());
    RowsBuffer rows(dtype, tokens, kHeads, kHeadSize, RowsOrder::packed);
    rows.fill_random(1);
    scatter_blocks({.rows = rows.view(), .slots = slots.data(), .blocks = kv.key});
    const std::vector<int64_t> starts = {0, tokens};
    ApplyShiftParams shift;
    shift.cached = rows.view();
    shift.cached_rows = all_rows.data();
    shift.slots = slots.data();
    shift.segment_starts = starts.data();
    shift.num_segments = 1;
    shift.blocks = kv.value;
    apply_shift(shift);

    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t slot = slots[static_cast<size_t>(token)];
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t start = slot / kBlockSize * kPerBlock + head * kPerHead;
        for (int64_t d = 0; d < kHeadSize; ++d) {
          const uint32_t expected = rows.bits(token, head, d);
          const int64_t key = start + d * kBlockSize + slot % kBlockSize;
          const int64_t value = start + kPerHead / 2 + slot % kBlockSize * kHeadSize + d;
          ASSERT_EQ(oracle::load_bits(memory.data(), dtype, key), expected);
          ASSERT_EQ(oracle::load_bits(memory.data(), dtype, value), expected);
        }
      }
    }
    const RowsBuffer back(dtype, tokens, kHeads, kHeadSize, RowsOrder::packed);
    gather_blocks({.blocks = kv.value, .slots = slots.data(), .rows = back.view()});
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t d = 0; d < kHeadSize; ++d) {
        ASSERT_EQ(back.bits(token, kHeads - 1, d), rows.bits(token, kHeads - 1, d));
      }
    }
  }
}

// A request whose blocks lie around 2^31 and 2^32 elements, against the same one in a small cache.
TEST_P(HugeOffsets, RequestOps) {
  if (GetParam().kernels->score_keys == nullptr) GTEST_SKIP() << "no kernels of these ops";
  constexpr int64_t kTokens = std::size(kUsedBlocks) * kBlockSize - 9;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    const VirtualMemory memory(kBlocks * kPerBlock * size_of(dtype));
    if (!memory.exists()) GTEST_SKIP() << "no address space for " << kBlocks << " blocks";
    const PagedKV far = cpu_paged_kv("vec", memory.data(), dtype, kBlocks, kHeads, kBlockSize,
                                     kHeadSize, kPerBlock, kPerHead);
    const CacheBuffer small("vec", dtype, std::size(kUsedBlocks), kHeads, kBlockSize, kHeadSize);
    const PagedKV near = {small.view(oracle::Half::key), small.view(oracle::Half::value)};
    RowsBuffer rows(dtype, std::size(kUsedBlocks) * kBlockSize, kHeads, kHeadSize,
                    RowsOrder::packed);
    rows.fill_random(1);
    std::vector<int32_t> far_table;
    std::vector<int32_t> near_table;
    std::vector<int64_t> far_slots;
    std::vector<int64_t> near_slots;
    for (const int64_t block : kUsedBlocks) {
      far_table.push_back(static_cast<int32_t>(block));
      near_table.push_back(static_cast<int32_t>(near_table.size()));
      for (int64_t i = 0; i < kBlockSize; ++i) {
        far_slots.push_back(block * kBlockSize + i);
        near_slots.push_back(static_cast<int64_t>(near_slots.size()));
      }
    }
    std::vector<float> scores[2];
    std::vector<float> sums[2];
    RowsBuffer query(DataType::float32, 5, kHeads, kHeadSize, RowsOrder::packed);
    query.fill_random(2);
    const std::vector<int64_t> limits = {1, 100, 200, 300, kTokens};
    const std::vector<int32_t> phases(5, 0);
    std::vector<int64_t> kept;
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t i = head % 2; i < kTokens - 1; i += 2) kept.push_back(i);
    }
    const CompactionMoves moves = plan_compaction(kept, kHeads, kTokens);
    RowsBuffer after[2] = {rows, rows};
    for (const bool is_far : {false, true}) {
      const PagedKV& kv = is_far ? far : near;
      const std::vector<int64_t>& slots = is_far ? far_slots : near_slots;
      const int32_t* block_table = is_far ? far_table.data() : near_table.data();
      scatter_blocks({.rows = rows.view(), .slots = slots.data(), .blocks = kv.key});
      scatter_blocks({.rows = rows.view(), .slots = slots.data(), .blocks = kv.value});
      std::vector<float>& score = scores[is_far ? 1 : 0];
      std::vector<float>& sum = sums[is_far ? 1 : 0];
      score.resize(static_cast<size_t>(kHeads * kTokens));
      sum.resize(score.size());
      score_keys({.query = query.view(),
                  .key = kv.key,
                  .block_table = block_table,
                  .first_token = 7,
                  .tokens = kTokens,
                  .scale = 0.1F,
                  .scores = score.data()});
      accumulate_attention({.query = query.view(),
                            .query_limits = limits.data(),
                            .query_phases = phases.data(),
                            .num_phases = 1,
                            .key = kv.key,
                            .block_table = block_table,
                            .first_token = 7,
                            .tokens = kTokens,
                            .scale = 0.1F,
                            .sums = sum.data(),
                            .sums_stride = kTokens});
      compact({.key = kv.key,
               .value = kv.value,
               .block_table = block_table,
               .first_token = 7,
               .starts = moves.starts.data(),
               .from = moves.from.data(),
               .to = moves.to.data()});
      gather_blocks(
          {.blocks = kv.key, .slots = slots.data(), .rows = after[is_far ? 1 : 0].view()});
    }
    EXPECT_EQ(scores[0], scores[1]);
    EXPECT_EQ(sums[0], sums[1]);
    for (int64_t token = 0; token < rows.view().tokens; ++token) {
      for (int64_t head = 0; head < kHeads; ++head) {
        for (int64_t d = 0; d < kHeadSize; ++d) {
          ASSERT_EQ(after[1].bits(token, head, d), after[0].bits(token, head, d));
        }
      }
    }
  }
}

TEST_P(HugeOffsets, Rows) {
  constexpr int64_t kTokens = 3;
  constexpr int64_t kStride = (int64_t{1} << 31) + 1024;  // the third row lies beyond 2^32
  const VirtualMemory memory(kTokens * kStride * 2);
  if (!memory.exists()) GTEST_SKIP() << "no address space for three rows";
  const RowsView far = {.data = memory.data(),
                        .dtype = DataType::float16,
                        .tokens = kTokens,
                        .heads = 2,
                        .head_size = 40,
                        .token_stride = kStride,
                        .head_stride = 48};
  RowsBuffer near(DataType::float16, kTokens, 2, 40, RowsOrder::packed);
  near.fill_random(2);
  const std::vector<int64_t> deltas = {5, -7, 900};
  const std::vector<double> frequencies(20, 0.3);
  const RopeView rope = {.frequencies = frequencies.data(), .rotary_dim = 40};
  rotate_keys({.keys = near.view(), .deltas = deltas.data(), .rope = rope, .out = far});
  const RowsBuffer expected(DataType::float16, kTokens, 2, 40, RowsOrder::packed);
  rotate_keys({.keys = near.view(), .deltas = deltas.data(), .rope = rope, .out = expected.view()});
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t d = 0; d < 40; ++d) {
      ASSERT_EQ(oracle::load_bits(memory.data(), DataType::float16, token * kStride + 48 + d),
                expected.bits(token, 1, d));
    }
  }
  std::vector<float> out(kTokens, -1.0F);
  divergence({.fresh = far, .cached = expected.view(), .out = out.data()});
  EXPECT_EQ(out, std::vector<float>(kTokens, 0.0F));
}

}  // namespace
}  // namespace phasekv
