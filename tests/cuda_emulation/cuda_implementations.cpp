// implementations() of the emulated CUDA kernels: one per order of threads. To the emulation all
// memory is device memory, so the ops of phasekv/ops.h, which check every list, call the kernels
// directly.
#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "implementations.h"
#include "phasekv/cuda.h"
#include "scheduler.h"
#include "thread_orders.h"

namespace phasekv {

namespace {

constexpr cuda::Stream kStream = nullptr;

// A workspace of exactly the size that an op asks for, full of NaN.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(static_cast<size_t>(bytes), 0xFF) {}

  cuda::Workspace workspace() {
    return {.data = memory_.data(), .bytes = static_cast<int64_t>(memory_.size())};
  }

 private:
  std::vector<unsigned char> memory_;
};

template <size_t kOrder>
struct Kernels {
  static void use_order() { emulation::set_thread_order(emulation::kThreadOrders[kOrder].order); }

  static void gather_blocks(const GatherBlocksParams& params) {
    use_order();
    cuda::gather_blocks(params, kStream);
  }
  static void scatter_blocks(const ScatterBlocksParams& params) {
    use_order();
    cuda::scatter_blocks(params, kStream);
  }
  static void rotate_keys(const RotateKeysParams& params) {
    use_order();
    cuda::rotate_keys(params, kStream);
  }
  static void divergence(const DivergenceParams& params) {
    use_order();
    cuda::divergence(params, kStream);
  }
  static void mean_residual(const MeanResidualParams& params) {
    use_order();
    cuda::mean_residual(params, kStream);
  }
  static void apply_shift(const ApplyShiftParams& params) {
    use_order();
    cuda::apply_shift(params, params.segment_starts[params.num_segments], kStream);
  }
  static void attend_rows(const AttendRowsParams& params) {
    use_order();
    Scratch scratch(cuda::attend_rows_workspace_bytes(params));
    cuda::attend_rows(params, scratch.workspace(), kStream);
  }
  static void push_queries(const PushQueriesParams& params) {
    use_order();
    cuda::push_queries(params, kStream);
  }
  static void score_keys(const ScoreKeysParams& params) {
    use_order();
    Scratch scratch(cuda::score_keys_workspace_bytes(params));
    cuda::score_keys(params, scratch.workspace(), kStream);
  }
  static void accumulate_attention(const AccumulateAttentionParams& params) {
    use_order();
    Scratch scratch(cuda::accumulate_attention_workspace_bytes(params));
    cuda::accumulate_attention(params, scratch.workspace(), kStream);
  }
  static void triattention_score(const TriattentionScoreParams& params) {
    use_order();
    Scratch scratch(cuda::triattention_score_workspace_bytes(params));
    cuda::triattention_score(params, scratch.workspace(), kStream);
  }
  static void key_redundancy(const KeyRedundancyParams& params) {
    use_order();
    Scratch scratch(cuda::key_redundancy_workspace_bytes(params));
    cuda::key_redundancy(params, scratch.workspace(), kStream);
  }
  // As a layer alone, and as the second of two of which the first has nothing to move.
  static void compact(const CompactParams& params) {
    use_order();
    int64_t most_moves = 0;
    for (int64_t head = 0; head < params.key.num_heads; ++head) {
      most_moves = std::max(most_moves, params.starts[head + 1] - params.starts[head]);
    }
    if (most_moves % 2 == 0) {
      cuda::compact(params, most_moves, kStream);
      return;
    }
    const std::vector<int64_t> no_moves(static_cast<size_t>(params.key.num_heads) + 1, 0);
    std::vector<CompactParams> layers(2, params);
    layers[0].starts = no_moves.data();
    cuda::compact_layers(layers, layers.data(), most_moves, kStream);
  }

  static constexpr cpu::KernelTable make_table() {
    cpu::KernelTable table{};
    table.gather_blocks = gather_blocks;
    table.scatter_blocks = scatter_blocks;
    table.rotate_keys = rotate_keys;
    table.divergence = divergence;
    table.mean_residual = mean_residual;
    table.apply_shift = apply_shift;
    table.attend_rows = attend_rows;
    table.push_queries = push_queries;
    table.score_keys = score_keys;
    table.accumulate_attention = accumulate_attention;
    table.compact = compact;
    table.triattention_score = triattention_score;
    table.key_redundancy = key_redundancy;
    return table;
  }
  static constexpr cpu::KernelTable kTable = make_table();
};

template <size_t... kOrder>
std::vector<Implementation> all_orders(std::index_sequence<kOrder...>) {
  return {{emulation::kThreadOrders[kOrder].name, "emulated", &Kernels<kOrder>::kTable}...};
}

}  // namespace

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> all =
      all_orders(std::make_index_sequence<emulation::kThreadOrders.size()>());
  return all;
}

}  // namespace phasekv
