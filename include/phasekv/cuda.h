// The ops on a CUDA device. The names and Params are those of phasekv/ops.h; what differs:
//
//   * Every pointer in Params, and in the views that it holds, is a device pointer: also the small
//     lists (slots, segment_starts, deltas, frequencies, ...). Strides, counts and dtypes are read
//     by the host.
//   * A call launches kernels on `stream` and returns. It allocates nothing, copies nothing to or
//     from the host and waits for nothing, so it can be recorded in a CUDA graph. Scratch memory is
//     an argument where an op needs some.
//   * The host cannot see what the lists hold. Shapes are checked as on the CPU; an index out of
//     range in a list is the caller's mistake, as in any kernel.
//   * Results are the same, bit for bit, whenever the arguments are, whatever the block ids.
//
// Rows and blocks of which every row begins at a multiple of 16 bytes are moved 16 bytes at a time;
// others are as right, and slower.
//
// All throw Error: invalid_argument for shapes that disagree, unsupported for a shape that has no
// kernel, missing_capability where the device or the driver refuses, and where this build has no
// kernels (is_built).
#pragma once

#include <cstdint>
#include <span>

#include "phasekv/ops.h"

namespace phasekv::cuda {

// A cudaStream_t; null is the default stream.
using Stream = void*;

// Whether this library was built with kernels.
bool is_built();

// Throws missing_capability, saying what is missing, unless kernels can run on the device `index`:
// they were built, the driver has such a device, and it has compute capability 8.0 or more.
void check_device(int index);

// Makes a device that check_device has taken the calling thread's, as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// Device memory that an op may write to as it likes, aligned to 256 bytes. Two calls that may run
// at the same time need one each.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

void gather_blocks(const GatherBlocksParams& params, Stream stream);
void scatter_blocks(const ScatterBlocksParams& params, Stream stream);
void rotate_keys(const RotateKeysParams& params, Stream stream);
void divergence(const DivergenceParams& params, Stream stream);
// Sums are taken in an order that depends on the number of probes alone, another than the CPU's.
void mean_residual(const MeanResidualParams& params, Stream stream);
// `tokens` is segment_starts[num_segments], which the host does not read.
void apply_shift(const ApplyShiftParams& params, int64_t tokens, Stream stream);

// Head sizes up to 256. A query of the keys' dtype, bfloat16 or float16, goes to the tensor cores,
// where a value that is not finite spoils also rows of its request that do not attend it.
void attend_rows(const AttendRowsParams& params, const Workspace& workspace, Stream stream);
int64_t attend_rows_workspace_bytes(const AttendRowsParams& params);

void push_queries(const PushQueriesParams& params, Stream stream);

// The bits that the CPU's ops give, but for NaNs.
void quantize(const QuantizeParams& params, Stream stream);
void dequantize(const DequantizeParams& params, Stream stream);

// `most_moves` is at least the number of moves of any KV head: the number of tokens kept, say.
void compact(const CompactParams& params, int64_t most_moves, Stream stream);
// Many layers of the same heads, head size and dtype in one launch. `device_layers` is a copy of
// `layers` on the device.
void compact_layers(std::span<const CompactParams> layers, const CompactParams* device_layers,
                    int64_t most_moves, Stream stream);

// Head sizes up to 256, and fewer than 2^31 tokens in a request. Queries of the keys' dtype,
// bfloat16 or float16, go to the tensor cores. The order of additions depends on shapes and limits
// alone.
void score_keys(const ScoreKeysParams& params, const Workspace& workspace, Stream stream);
int64_t score_keys_workspace_bytes(const ScoreKeysParams& params);
void accumulate_attention(const AccumulateAttentionParams& params, const Workspace& workspace,
                          Stream stream);
int64_t accumulate_attention_workspace_bytes(const AccumulateAttentionParams& params);

// Head sizes up to 256, and fewer than 2^31 tokens in a request, for all four. Of
// expected_attention_score, queries of the keys' dtype, bfloat16 or float16, go to the tensor
// cores.
void triattention_score(const TriattentionScoreParams& params, const Workspace& workspace,
                        Stream stream);
int64_t triattention_score_workspace_bytes(const TriattentionScoreParams& params);
void key_redundancy(const KeyRedundancyParams& params, const Workspace& workspace, Stream stream);
int64_t key_redundancy_workspace_bytes(const KeyRedundancyParams& params);
void keydiff_score(const KeydiffScoreParams& params, const Workspace& workspace, Stream stream);
int64_t keydiff_score_workspace_bytes(const KeydiffScoreParams& params);
void expected_attention_score(const ExpectedAttentionScoreParams& params,
                              const Workspace& workspace, Stream stream);
int64_t expected_attention_score_workspace_bytes(const ExpectedAttentionScoreParams& params);

// What select_top chooses, on the device. The host cannot refuse a score that is not a number
// before it is ranked: it is named instead, and what was chosen then means nothing.
struct SelectTopOutput {
  int64_t* chosen = nullptr;         // room for segment_starts[num_segments]; per segment ascending
  int64_t* chosen_starts = nullptr;  // [num_segments + 1] into chosen
  int64_t* first_nan = nullptr;      // [1] index of the first such score; -1: there is none
};
void select_top(const SelectTopParams& params, const SelectTopOutput& output,
                const Workspace& workspace, Stream stream);
int64_t select_top_workspace_bytes(const SelectTopParams& params);

}  // namespace phasekv::cuda
