// Nothing outside the arguments is touched: rows and caches end right before, or begin right after,
// a page that cannot be accessed, so that one element too far ends the test.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "implementations.h"
#include "phasekv/layout.h"
#include "phasekv/ops.h"

namespace phasekv {
namespace {

class GuardedMemory : public ImplementationTest {};

PHASEKV_FOR_EACH_IMPLEMENTATION(GuardedMemory);

enum class Guard { before, after };

class Guarded {
 public:
  Guarded(int64_t bytes, Guard guard) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto used = static_cast<size_t>(bytes);
    const size_t inner = (used + page - 1) / page * page;
    size_ = inner + 2 * page;
    map_ = static_cast<char*>(mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(map_ + page, inner, PROT_READ | PROT_WRITE);
    data_ = guard == Guard::before ? map_ + page : map_ + page + inner - used;
    std::memset(data_, 0, used);
  }
  ~Guarded() { munmap(map_, size_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  char* data() const { return data_; }

 private:
  size_t size_;
  char* map_;
  char* data_;
};

RowsView rows_in(const Guarded& memory, DataType dtype, int64_t tokens, int64_t head_size) {
  return {.data = memory.data(),
          .dtype = dtype,
          .tokens = tokens,
          .heads = 1,
          .head_size = head_size,
          .token_stride = head_size,
          .head_stride = head_size};
}

void use_quantization(const RowsView& from, const RowsView& to, GroupAxis axis, int bits,
                      Guard guard) {
  constexpr int64_t kGroupSize = 16;
  const bool along_tokens = axis == GroupAxis::tokens;
  const auto [length, width] = along_tokens ? std::pair(from.tokens, from.head_size)
                                            : std::pair(from.head_size, from.tokens);
  const int64_t in_word = 32 / bits;
  const int64_t group_bytes = (length + kGroupSize - 1) / kGroupSize * width * 2;
  const Guarded codes((length + in_word - 1) / in_word * width * 4, guard);
  const Guarded scales(group_bytes, guard);
  const Guarded zero_points(group_bytes, guard);
  const QuantizedRows quantized = {.codes = reinterpret_cast<uint32_t*>(codes.data()),
                                   .scales = reinterpret_cast<uint16_t*>(scales.data()),
                                   .zero_points = reinterpret_cast<uint16_t*>(zero_points.data()),
                                   .tokens = from.tokens,
                                   .heads = 1,
                                   .head_size = from.head_size,
                                   .bits = bits,
                                   .group_size = kGroupSize,
                                   .axis = axis};
  quantize({.rows = from, .out = quantized});
  dequantize({.quantized = quantized, .rows = to});
}

void use_all_ops(DataType dtype, int64_t tokens, int64_t head_size, Guard guard) {
  const int64_t bytes = size_of(dtype);
  // One block that exactly holds the tokens, so that its end is the cache's.
  const Guarded cache(2 * tokens * head_size * bytes, guard);
  const Guarded first_memory(tokens * head_size * bytes, guard);
  const Guarded second_memory(tokens * head_size * bytes, guard);
  const Guarded mean_memory(head_size * 4, guard);
  const Guarded out_memory(tokens * 4, guard);
  const RowsView first = rows_in(first_memory, dtype, tokens, head_size);
  const RowsView second = rows_in(second_memory, dtype, tokens, head_size);
  const PagedKV kv = cpu_paged_kv("vec", cache.data(), dtype, 1, 1, tokens, head_size,
                                  2 * tokens * head_size, 2 * tokens * head_size);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < tokens; ++i) indices.push_back(i);
  const std::vector<int64_t> starts = {0, tokens};
  const std::vector<int64_t> deltas(static_cast<size_t>(tokens), 11);
  const std::vector<double> frequencies(static_cast<size_t>(head_size / 2), 0.25);
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    const RopeView rope = {
        .frequencies = frequencies.data(), .rotary_dim = head_size / 2 * 2, .pairing = pairing};
    rotate_keys({.keys = first, .deltas = deltas.data(), .rope = rope, .out = second});
    auto* mean = reinterpret_cast<float*>(mean_memory.data());
    mean_residual({.fresh = first,
                   .cached = second,
                   .fresh_rows = indices.data(),
                   .cached_rows = indices.data(),
                   .segment_starts = starts.data(),
                   .num_segments = 1,
                   .fresh_deltas = deltas.data(),
                   .rope = rope,
                   .out = mean});
    for (const PagedView& blocks : {kv.key, kv.value}) {
      scatter_blocks({.rows = first, .slots = indices.data(), .blocks = blocks});
      gather_blocks({.blocks = blocks, .slots = indices.data(), .rows = second});
      apply_shift({.cached = first,
                   .cached_rows = indices.data(),
                   .slots = indices.data(),
                   .segment_starts = starts.data(),
                   .num_segments = 1,
                   .deltas = deltas.data(),
                   .rope = rope,
                   .mean = mean,
                   .mean_deltas = deltas.data(),
                   .blocks = blocks});
    }
  }
  divergence(
      {.fresh = first, .cached = second, .out = reinterpret_cast<float*>(out_memory.data())});
  for (const GroupAxis axis : {GroupAxis::tokens, GroupAxis::channels}) {
    for (const int bits : {2, 4}) use_quantization(first, second, axis, bits, guard);
  }
}

TEST_P(GuardedMemory, EveryOpStaysInside) {
  for (const Guard guard : {Guard::before, Guard::after}) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      for (const int64_t tokens : {1, 3, 16, 37}) {
        for (const int64_t head_size : {2, 6, 16, 30, 40, 80}) {
          use_all_ops(dtype, tokens, head_size, guard);
        }
      }
    }
  }
}

// The ops over the keys [first_token, block_size) of a request that has one block. Its keys and its
// values, each in memory of their own, fill theirs.
void use_all_request_ops(DataType dtype, int64_t block_size, int64_t first_token, int64_t head_size,
                         Guard guard) {
  constexpr int64_t kQueries = 3;
  const int64_t tokens = block_size - first_token;
  const Guarded key_memory(block_size * head_size * size_of(dtype), guard);
  const Guarded value_memory(block_size * head_size * size_of(dtype), guard);
  const Guarded query_memory(kQueries * head_size * size_of(dtype), guard);
  const Guarded buffer_memory(kQueries * head_size * 2, guard);
  const Guarded table_memory(4, guard);
  const Guarded scores_memory(tokens * 4, guard);
  const Guarded sums_memory(2 * tokens * 4, guard);
  const Guarded weights_memory(head_size * 4, guard);
  const Guarded norm_weights_memory(head_size / 2 * 4, guard);
  PagedKV kv = cpu_paged_kv("vec", key_memory.data(), dtype, 1, 1, block_size, head_size,
                            2 * block_size * head_size, 2 * block_size * head_size);
  kv.value.data = value_memory.data();
  const auto* block_table = reinterpret_cast<const int32_t*>(table_memory.data());
  auto* scores = reinterpret_cast<float*>(scores_memory.data());
  const RowsView query = rows_in(query_memory, dtype, kQueries, head_size);
  const std::vector<int64_t> rows = {2, 0, 1};
  push_queries({.query = query,
                .rows = rows.data(),
                .entries = rows.data(),
                .count = kQueries,
                .buffer = rows_in(buffer_memory, DataType::bfloat16, kQueries, head_size)});
  const std::vector<int64_t> limits = {1, tokens, (tokens + 1) / 2};
  const std::vector<int32_t> phases = {1, 0, 1};
  for (const GroupReduction group :
       {GroupReduction::max_logit, GroupReduction::max, GroupReduction::mean}) {
    for (const Pooling pooling : {Pooling::none, Pooling::max, Pooling::average}) {
      score_keys({.query = query,
                  .key = kv.key,
                  .block_table = block_table,
                  .first_token = first_token,
                  .tokens = tokens,
                  .query_limits = limits.data(),
                  .excluded_recent = 1,
                  .group = group,
                  .pooling = pooling,
                  .pooling_kernel = 5,
                  .scores = scores});
    }
  }
  accumulate_attention({.query = query,
                        .query_limits = limits.data(),
                        .query_phases = phases.data(),
                        .num_phases = 2,
                        .key = kv.key,
                        .block_table = block_table,
                        .first_token = first_token,
                        .tokens = tokens,
                        .sums = reinterpret_cast<float*>(sums_memory.data()),
                        .sums_stride = tokens});
  key_redundancy({.key = kv.key,
                  .block_table = block_table,
                  .first_token = first_token,
                  .tokens = tokens,
                  .redundancy = scores});
  keydiff_score({.key = kv.key,
                 .block_table = block_table,
                 .first_token = first_token,
                 .tokens = tokens,
                 .scores = scores});
  const std::vector<double> frequencies(static_cast<size_t>(head_size / 2), 0.3);
  expected_attention_score(
      {.key = kv.key,
       .value = kv.value,
       .block_table = block_table,
       .first_token = first_token,
       .tokens = tokens,
       .query = query,
       .query_positions = rows.data(),
       .rope = {.frequencies = frequencies.data(), .rotary_dim = head_size / 2 * 2},
       .next_position = 40,
       .scores = scores});
  triattention_score({.key = kv.key,
                      .block_table = block_table,
                      .first_token = first_token,
                      .tokens = tokens,
                      .synthetic_query = reinterpret_cast<const float*>(weights_memory.data()),
                      .norm_weights = reinterpret_cast<const float*>(norm_weights_memory.data()),
                      .query_heads = 1,
                      .rotary_dim = head_size / 2 * 2,
                      .scores = scores});
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < tokens; i += 2) kept.push_back(i);
  const CompactionMoves moves = plan_compaction(kept, 1, tokens);
  compact({.key = kv.key,
           .value = kv.value,
           .block_table = block_table,
           .first_token = first_token,
           .starts = moves.starts.data(),
           .from = moves.from.data(),
           .to = moves.to.data()});
}

TEST_P(GuardedMemory, EveryRequestOpStaysInside) {
  if (GetParam().kernels->score_keys == nullptr) GTEST_SKIP() << "no kernels of these ops";
  for (const Guard guard : {Guard::before, Guard::after}) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      for (const int64_t block_size : {1, 3, 16, 37, 64, 96}) {
        for (const int64_t first_token : {0, 5, 33}) {
          if (first_token >= block_size) continue;
          for (const int64_t head_size : {2, 6, 16, 30, 80}) {
            use_all_request_ops(dtype, block_size, first_token, head_size, guard);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace phasekv
