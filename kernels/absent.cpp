// The CUDA ops of a build without CUDA: each says what is missing.
#include <string>

#include "phasekv/cuda.h"
#include "phasekv/error.h"
#include "phasekv/eviction/cuda_backend.h"

namespace phasekv::cuda {
namespace {

[[noreturn]] void refuse(const std::string& device) {
  throw Error(
      ErrorCode::missing_capability, "device", device,
      "this build of PhaseKV has no CUDA kernels: build it with PHASEKV_CUDA=ON, which needs "
      "a CUDA toolkit");
}

}  // namespace

bool is_built() { return false; }

void check_device(int index) { refuse("cuda:" + std::to_string(index)); }

DeviceGuard::DeviceGuard(int index) { check_device(index); }
DeviceGuard::~DeviceGuard() = default;

void gather_blocks(const GatherBlocksParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void scatter_blocks(const ScatterBlocksParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void rotate_keys(const RotateKeysParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void divergence(const DivergenceParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void mean_residual(const MeanResidualParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void apply_shift(const ApplyShiftParams& /*params*/, int64_t /*tokens*/, Stream /*stream*/) {
  refuse("cuda");
}
void attend_rows(const AttendRowsParams& /*params*/, const Workspace& /*workspace*/,
                 Stream /*stream*/) {
  refuse("cuda");
}
int64_t attend_rows_workspace_bytes(const AttendRowsParams& /*params*/) { refuse("cuda"); }
void push_queries(const PushQueriesParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void quantize(const QuantizeParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void dequantize(const DequantizeParams& /*params*/, Stream /*stream*/) { refuse("cuda"); }
void compact(const CompactParams& /*params*/, int64_t /*most_moves*/, Stream /*stream*/) {
  refuse("cuda");
}
void compact_layers(std::span<const CompactParams> /*layers*/,
                    const CompactParams* /*device_layers*/, int64_t /*most_moves*/,
                    Stream /*stream*/) {
  refuse("cuda");
}
void score_keys(const ScoreKeysParams& /*params*/, const Workspace& /*workspace*/,
                Stream /*stream*/) {
  refuse("cuda");
}
int64_t score_keys_workspace_bytes(const ScoreKeysParams& /*params*/) { refuse("cuda"); }
void accumulate_attention(const AccumulateAttentionParams& /*params*/,
                          const Workspace& /*workspace*/, Stream /*stream*/) {
  refuse("cuda");
}
int64_t accumulate_attention_workspace_bytes(const AccumulateAttentionParams& /*params*/) {
  refuse("cuda");
}
void triattention_score(const TriattentionScoreParams& /*params*/, const Workspace& /*workspace*/,
                        Stream /*stream*/) {
  refuse("cuda");
}
int64_t triattention_score_workspace_bytes(const TriattentionScoreParams& /*params*/) {
  refuse("cuda");
}
void key_redundancy(const KeyRedundancyParams& /*params*/, const Workspace& /*workspace*/,
                    Stream /*stream*/) {
  refuse("cuda");
}
int64_t key_redundancy_workspace_bytes(const KeyRedundancyParams& /*params*/) { refuse("cuda"); }
void keydiff_score(const KeydiffScoreParams& /*params*/, const Workspace& /*workspace*/,
                   Stream /*stream*/) {
  refuse("cuda");
}
int64_t keydiff_score_workspace_bytes(const KeydiffScoreParams& /*params*/) { refuse("cuda"); }
void expected_attention_score(const ExpectedAttentionScoreParams& /*params*/,
                              const Workspace& /*workspace*/, Stream /*stream*/) {
  refuse("cuda");
}
int64_t expected_attention_score_workspace_bytes(const ExpectedAttentionScoreParams& /*params*/) {
  refuse("cuda");
}
void select_top(const SelectTopParams& /*params*/, const SelectTopOutput& /*output*/,
                const Workspace& /*workspace*/, Stream /*stream*/) {
  refuse("cuda");
}
int64_t select_top_workspace_bytes(const SelectTopParams& /*params*/) { refuse("cuda"); }

}  // namespace phasekv::cuda

namespace phasekv::eviction {

std::shared_ptr<CudaBackend> make_cuda_backend(int device) {
  cuda::check_device(device);
  return nullptr;
}

}  // namespace phasekv::eviction
