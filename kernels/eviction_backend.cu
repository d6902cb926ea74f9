// The evictor's side of the ops: lists go to the device, scores come back.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <utility>

#include "device_memory.cuh"
#include "list_staging.cuh"
#include "ops/check_moves.h"
#include "ops/key_range.h"
#include "phasekv/cuda.h"
#include "phasekv/error.h"
#include "phasekv/eviction/cuda_backend.h"
#include "platform.cuh"
#include "validate.h"
#include "workspace.cuh"

namespace phasekv::eviction {
namespace {

using cuda::check_runtime;

template <typename T>
std::span<const T> list_of(const T* list, int64_t count) {
  return {list, list == nullptr ? 0 : static_cast<size_t>(count)};
}

// Params whose request begins in the first block of its table, which so is as short as can be.
template <typename Params>
Params from_first_block(Params params) {
  const int64_t first = params.first_token / params.key.block_size;
  params.block_table += first;
  params.first_token -= first * params.key.block_size;
  return params;
}

// Bytes of a list of floats that an op writes.
int64_t bytes_of_floats(int64_t count) { return count * static_cast<int64_t>(sizeof(float)); }

class DeviceBackend final : public CudaBackend {
 public:
  explicit DeviceBackend(int device) : device_(device) {
    const cuda::DeviceGuard guard(device_);
    staging_ = std::make_unique<cuda::ListStaging>();
  }

  ~DeviceBackend() override {
    after_all_work([] {});
  }

  void use_stream(cuda::Stream stream) override {
    if (stream == stream_) return;
    const cuda::DeviceGuard guard(device_);
    wait();
    stream_ = stream;
  }

  void* allocate(int64_t bytes) override {
    const cuda::DeviceGuard guard(device_);
    return cuda::OnDevice::allocate(bytes);
  }

  void release(void* memory) noexcept override {
    after_all_work([memory] { cuda::OnDevice::release(memory); });
  }

  void copy(const void* from, void* to, int64_t bytes) override {
    const cuda::DeviceGuard guard(device_);
    start_copy(from, to, bytes, cudaMemcpyDeviceToDevice);
  }

  void upload(const void* from, void* to, int64_t bytes) override {
    const cuda::DeviceGuard guard(device_);
    start_copy(from, to, bytes, cudaMemcpyHostToDevice);
    wait();
  }

  void download(const void* from, void* to, int64_t bytes) override {
    const cuda::DeviceGuard guard(device_);
    start_copy(from, to, bytes, cudaMemcpyDeviceToHost);
    wait();
  }

  void push_queries(const PushQueriesParams& params) override {
    check_indices("rows", params.rows, params.count, params.query.tokens);
    check_indices("entries", params.entries, params.count, params.buffer.tokens);
    const cuda::DeviceGuard guard(device_);
    PushQueriesParams there = params;
    std::tie(there.rows, there.entries) =
        send(list_of(params.rows, params.count), list_of(params.entries, params.count));
    cuda::push_queries(there, stream_);
  }

  void compact(const CompactParams& params) override {
    const int64_t moves = check_moves(params);
    if (moves == 0) return;
    int64_t tokens = 0;  // as far as the moves go
    int64_t most_moves = 0;
    for (int64_t head = 0; head < params.key.num_heads; ++head) {
      most_moves = std::max(most_moves, params.starts[head + 1] - params.starts[head]);
    }
    for (int64_t i = 0; i < moves; ++i) {
      tokens = std::max({tokens, params.from[i] + 1, params.to[i] + 1});
    }
    const cuda::DeviceGuard guard(device_);
    CompactParams there = from_first_block(params);
    std::tie(there.block_table, there.starts, there.from, there.to) =
        send(blocks_of(there, tokens), list_of(params.starts, params.key.num_heads + 1),
             list_of(params.from, moves), list_of(params.to, moves));
    cuda::compact(there, most_moves, stream_);
  }

  void gather_blocks(const GatherBlocksParams& params) override {
    const RowsView& rows = params.rows;
    check_slots(params.slots, rows.tokens, params.blocks, Padding::refused);
    check_equal("rows.head_stride", rows.head_stride, "packed rows", rows.head_size);
    check_equal("rows.token_stride", rows.token_stride, "packed rows", rows.heads * rows.head_size);
    if (rows.tokens == 0) return;
    const cuda::DeviceGuard guard(device_);
    const int64_t bytes = rows.tokens * rows.token_stride * size_of(rows.dtype);
    GatherBlocksParams there = params;
    std::tie(there.slots) = send(list_of(params.slots, rows.tokens));
    there.rows.data = scratch(bytes);
    cuda::gather_blocks(there, stream_);
    start_copy(there.rows.data, rows.data, bytes, cudaMemcpyDeviceToHost);
    wait();
  }

  void score_keys(const ScoreKeysParams& params) override {
    check_key_range(params.key, params.block_table, params.first_token, params.tokens);
    if (params.query_limits != nullptr) {
      check_query_limits(params.query_limits, params.query, params.tokens);
    }
    if (params.tokens == 0) return;
    const cuda::DeviceGuard guard(device_);
    ScoreKeysParams there = from_first_block(params);
    std::tie(there.block_table, there.query_limits) =
        send(blocks_of(there, params.tokens), list_of(params.query_limits, params.query.tokens));
    compute(params.key.num_heads * params.tokens, params.scores, &there.scores,
            cuda::score_keys_workspace_bytes(there),
            [&](const cuda::Workspace& workspace) { cuda::score_keys(there, workspace, stream_); });
  }

  void accumulate_attention(const AccumulateAttentionParams& params) override {
    check_key_range(params.key, params.block_table, params.first_token, params.tokens);
    check_query_limits(params.query_limits, params.query, params.tokens);
    const int64_t sums = params.num_phases * params.key.num_heads * params.sums_stride;
    if (sums == 0 || params.tokens == 0) return;
    const cuda::DeviceGuard guard(device_);
    AccumulateAttentionParams there = from_first_block(params);
    std::tie(there.block_table, there.query_limits, there.query_phases, there.sums) =
        send(blocks_of(there, params.tokens), list_of(params.query_limits, params.query.tokens),
             list_of(params.query_phases, params.query.tokens), list_of(params.sums, sums));
    const int64_t bytes = cuda::accumulate_attention_workspace_bytes(there);
    cuda::accumulate_attention(there, {.data = scratch(bytes), .bytes = bytes}, stream_);
    start_copy(there.sums, params.sums, bytes_of_floats(sums), cudaMemcpyDeviceToHost);
    wait();
  }

  void key_redundancy(const KeyRedundancyParams& params) override {
    check_key_range(params.key, params.block_table, params.first_token, params.tokens);
    if (params.tokens == 0) return;
    const cuda::DeviceGuard guard(device_);
    const int64_t keys = params.key.num_heads * params.tokens;
    KeyRedundancyParams there = from_first_block(params);
    std::tie(there.block_table, there.positions) =
        send(blocks_of(there, params.tokens), list_of(params.positions, keys));
    compute(
        keys, params.redundancy, &there.redundancy, cuda::key_redundancy_workspace_bytes(there),
        [&](const cuda::Workspace& workspace) { cuda::key_redundancy(there, workspace, stream_); });
  }

  void keydiff_score(const KeydiffScoreParams& params) override {
    check_key_range(params.key, params.block_table, params.first_token, params.tokens);
    if (params.tokens == 0) return;
    const cuda::DeviceGuard guard(device_);
    KeydiffScoreParams there = from_first_block(params);
    std::tie(there.block_table) = send(blocks_of(there, params.tokens));
    compute(params.key.num_heads * params.tokens, params.scores, &there.scores,
            cuda::keydiff_score_workspace_bytes(there), [&](const cuda::Workspace& workspace) {
              cuda::keydiff_score(there, workspace, stream_);
            });
  }

  void triattention_score(const TriattentionScoreParams& params) override {
    check_key_range(params.key, params.block_table, params.first_token, params.tokens);
    if (params.tokens == 0) return;
    const cuda::DeviceGuard guard(device_);
    TriattentionScoreParams there = from_first_block(params);
    std::tie(there.block_table, there.synthetic_query, there.norm_weights) =
        send(blocks_of(there, params.tokens),
             list_of(params.synthetic_query, params.query_heads * params.key.head_size),
             list_of(params.norm_weights, params.query_heads * (params.rotary_dim / 2)));
    compute(params.key.num_heads * params.tokens, params.scores, &there.scores,
            cuda::triattention_score_workspace_bytes(there), [&](const cuda::Workspace& workspace) {
              cuda::triattention_score(there, workspace, stream_);
            });
  }

 private:
  // Of a request that begins in the first block.
  template <typename Params>
  static std::span<const int32_t> blocks_of(const Params& params, int64_t tokens) {
    const int64_t size = params.key.block_size;
    return list_of(params.block_table, (params.first_token + tokens + size - 1) / size);
  }

  template <typename... T>
  std::tuple<T*...> send(std::span<const T>... lists) {
    return staging_->send(stream_, lists...);
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }
  void wait() const { check_runtime(cudaStreamSynchronize(stream()), "what was launched before"); }

  void start_copy(const void* from, void* to, int64_t bytes, cudaMemcpyKind kind) const {
    if (bytes == 0) return;
    check_runtime(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream()), "a copy");
  }

  // Where a destructor cannot throw: a driver that no longer answers has taken its memory along.
  template <typename Function>
  void after_all_work(Function function) const noexcept {
    try {
      const cuda::DeviceGuard guard(device_);
      wait();
      function();
    } catch (const Error&) {
      return;
    }
  }

  // Device memory until the next call, whose kernels come later on the stream.
  char* scratch(int64_t bytes) {
    if (bytes > scratch_.bytes()) {
      wait();
      scratch_.resize(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))));
    }
    return scratch_.data();
  }

  // Runs an op that writes `count` floats to *there, and brings them here.
  template <typename Launch>
  void compute(int64_t count, float* here, float** there, int64_t workspace_bytes, Launch launch) {
    const auto divide = [&](cuda::Allotment memory) {
      *there = memory.take<float>(count);
      char* workspace = memory.take<char>(workspace_bytes);
      return std::pair(workspace, memory.bytes());
    };
    const int64_t bytes = divide(cuda::Allotment()).second;
    char* memory = scratch(bytes);
    char* workspace = divide(cuda::Allotment({.data = memory, .bytes = bytes})).first;
    launch(cuda::Workspace{.data = workspace, .bytes = workspace_bytes});
    start_copy(*there, here, bytes_of_floats(count), cudaMemcpyDeviceToHost);
    wait();
  }

  int device_;
  cuda::Stream stream_ = nullptr;
  std::unique_ptr<cuda::ListStaging> staging_;
  cuda::DeviceMemory scratch_;
};

}  // namespace

std::shared_ptr<CudaBackend> make_cuda_backend(int device) {
  return std::make_shared<DeviceBackend>(device);
}

}  // namespace phasekv::eviction
