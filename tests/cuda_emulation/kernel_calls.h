// The CUDA ops behind the table of the CPU's, so that the tests of the ops run them. All memory of
// these tests is device memory: to the emulation any is, to a device what is managed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernel_table.h"
#include "phasekv/cuda.h"

namespace phasekv {

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

// `Run` is what is done around each call: an object that is made before it and destroyed after it.
template <typename Run>
struct KernelCalls {
  static void gather_blocks(const GatherBlocksParams& params) {
    const Run run;
    cuda::gather_blocks(params, nullptr);
  }
  static void scatter_blocks(const ScatterBlocksParams& params) {
    const Run run;
    cuda::scatter_blocks(params, nullptr);
  }
  static void rotate_keys(const RotateKeysParams& params) {
    const Run run;
    cuda::rotate_keys(params, nullptr);
  }
  static void divergence(const DivergenceParams& params) {
    const Run run;
    cuda::divergence(params, nullptr);
  }
  static void mean_residual(const MeanResidualParams& params) {
    const Run run;
    cuda::mean_residual(params, nullptr);
  }
  static void apply_shift(const ApplyShiftParams& params) {
    const Run run;
    cuda::apply_shift(params, params.segment_starts[params.num_segments], nullptr);
  }
  static void attend_rows(const AttendRowsParams& params) {
    Scratch scratch(cuda::attend_rows_workspace_bytes(params));
    const Run run;
    cuda::attend_rows(params, scratch.workspace(), nullptr);
  }
  static void push_queries(const PushQueriesParams& params) {
    const Run run;
    cuda::push_queries(params, nullptr);
  }
  static void score_keys(const ScoreKeysParams& params) {
    Scratch scratch(cuda::score_keys_workspace_bytes(params));
    const Run run;
    cuda::score_keys(params, scratch.workspace(), nullptr);
  }
  static void accumulate_attention(const AccumulateAttentionParams& params) {
    Scratch scratch(cuda::accumulate_attention_workspace_bytes(params));
    const Run run;
    cuda::accumulate_attention(params, scratch.workspace(), nullptr);
  }
  static void triattention_score(const TriattentionScoreParams& params) {
    Scratch scratch(cuda::triattention_score_workspace_bytes(params));
    const Run run;
    cuda::triattention_score(params, scratch.workspace(), nullptr);
  }
  static void key_redundancy(const KeyRedundancyParams& params) {
    Scratch scratch(cuda::key_redundancy_workspace_bytes(params));
    const Run run;
    cuda::key_redundancy(params, scratch.workspace(), nullptr);
  }
  static void keydiff_score(const KeydiffScoreParams& params) {
    Scratch scratch(cuda::keydiff_score_workspace_bytes(params));
    const Run run;
    cuda::keydiff_score(params, scratch.workspace(), nullptr);
  }
  static void expected_attention_score(const ExpectedAttentionScoreParams& params) {
    Scratch scratch(cuda::expected_attention_score_workspace_bytes(params));
    const Run run;
    cuda::expected_attention_score(params, scratch.workspace(), nullptr);
  }
  static void quantize(const QuantizeParams& params) {
    const Run run;
    cuda::quantize(params, nullptr);
  }
  static void dequantize(const DequantizeParams& params) {
    const Run run;
    cuda::dequantize(params, nullptr);
  }
  // As a layer alone, and as the second of two of which the first has nothing to move.
  static void compact(const CompactParams& params) {
    int64_t most_moves = 0;
    for (int64_t head = 0; head < params.key.num_heads; ++head) {
      most_moves = std::max(most_moves, params.starts[head + 1] - params.starts[head]);
    }
    if (most_moves % 2 == 0) {
      const Run run;
      cuda::compact(params, most_moves, nullptr);
      return;
    }
    const std::vector<int64_t> no_moves(static_cast<size_t>(params.key.num_heads) + 1, 0);
    std::vector<CompactParams> layers(2, params);
    layers[0].starts = no_moves.data();
    const Run run;
    cuda::compact_layers(layers, layers.data(), most_moves, nullptr);
  }
  static void select_top(const SelectTopParams& params, const cuda::SelectTopOutput& output) {
    Scratch scratch(cuda::select_top_workspace_bytes(params));
    const Run run;
    cuda::select_top(params, output, scratch.workspace(), nullptr);
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
    table.keydiff_score = keydiff_score;
    table.expected_attention_score = expected_attention_score;
    table.quantize = quantize;
    table.dequantize = dequantize;
    return table;
  }
  static constexpr cpu::KernelTable kTable = make_table();
};

// The table has no select_top that writes its choice to lists on the device. Here it is for each of
// implementations().
using SelectTopCall = void (*)(const SelectTopParams& params, const cuda::SelectTopOutput& output);
const std::vector<SelectTopCall>& select_top_calls();

// For whoever runs more than one op, as an evictor does: makes the device run as each of
// implementations() says, as long as what is returned lives.
using DeviceSetup = std::shared_ptr<void> (*)();
const std::vector<DeviceSetup>& device_setups();

}  // namespace phasekv
