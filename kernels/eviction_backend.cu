// The evictor's side of the ops: lists go to the device, scores come back once somebody waits.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "device_memory.cuh"
#include "list_staging.cuh"
#include "ops/check_expected_attention.h"
#include "ops/check_moves.h"
#include "ops/key_range.h"
#include "phasekv/cuda.h"
#include "phasekv/error.h"
#include "phasekv/eviction/cuda_backend.h"
#include "platform.cuh"
#include "round_trips.cuh"
#include "validate.h"

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

// The lists of a layer's moves.
struct MoveLists {
  std::span<const int32_t> blocks;
  std::span<const int64_t> starts;
  std::span<const int64_t> from;
  std::span<const int64_t> to;

  int64_t bytes() const {
    const auto room_for = cuda::ListWriter::room_for;
    return room_for(blocks.size_bytes()) + room_for(starts.size_bytes()) +
           room_for(from.size_bytes()) + room_for(to.size_bytes());
  }
};

// A list among an op's arguments: a member of its Params, or a function that finds it there.
template <typename Find>
struct List {
  Find find;
  int64_t count;
};
template <typename Find>
List(Find, int64_t) -> List<Find>;

// What an op computes: it overwrites what was there, or adds to it.
enum class Before { overwritten, added_to };
template <typename Params>
struct Answer {
  float* Params::* result;
  int64_t count;
  Before before = Before::overwritten;
};
template <typename Params>
Answer(float* Params::*, int64_t, Before) -> Answer<Params>;

// One number for each key and KV head.
template <typename Params>
Answer<Params> scores_of(const Params& params, float* Params::* result) {
  return {result, params.key.num_heads * params.tokens};
}

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
    synchronize();
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
    synchronize();
  }

  void download(const void* from, void* to, int64_t bytes) override {
    const cuda::DeviceGuard guard(device_);
    start_copy(from, to, bytes, cudaMemcpyDeviceToHost);
    synchronize();
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

  void compact(std::span<const CompactParams> layers) override {
    std::vector<CompactParams> there;
    std::vector<MoveLists> lists;
    int64_t most_moves = 0;
    int64_t bytes = 0;
    for (const CompactParams& params : layers) {
      const int64_t moves = check_moves(params);
      int64_t tokens = 0;  // as far as the moves go
      for (int64_t i = 0; i < moves; ++i) {
        tokens = std::max({tokens, params.from[i] + 1, params.to[i] + 1});
      }
      for (int64_t head = 0; head < params.key.num_heads; ++head) {
        most_moves = std::max(most_moves, params.starts[head + 1] - params.starts[head]);
      }
      there.push_back(from_first_block(params));
      lists.push_back({blocks_of(there.back(), tokens),
                       list_of(params.starts, params.key.num_heads + 1),
                       list_of(params.from, moves), list_of(params.to, moves)});
      bytes += lists.back().bytes();
    }
    if (most_moves == 0) return;
    bytes += cuda::ListWriter::room_for(there.size() * sizeof(CompactParams));
    const cuda::DeviceGuard guard(device_);
    const CompactParams* device_layers = nullptr;
    staging_->send_written(stream_, bytes, [&](cuda::ListWriter& writer) {
      for (size_t i = 0; i < there.size(); ++i) {
        there[i].block_table = writer.write(lists[i].blocks);
        there[i].starts = writer.write(lists[i].starts);
        there[i].from = writer.write(lists[i].from);
        there[i].to = writer.write(lists[i].to);
      }
      device_layers = writer.write(std::span<const CompactParams>(there));
    });
    cuda::compact_layers(there, device_layers, most_moves, stream_);
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
    synchronize();
  }

  void score_keys(const ScoreKeysParams& params) override {
    if (params.query_limits != nullptr) {
      check_query_limits(params.query_limits, params.query, params.tokens);
    }
    compute(params, scores_of(params, &ScoreKeysParams::scores), cuda::score_keys,
            cuda::score_keys_workspace_bytes,
            List{&ScoreKeysParams::query_limits, params.query.tokens});
  }

  void accumulate_attention(const AccumulateAttentionParams& params) override {
    check_query_limits(params.query_limits, params.query, params.tokens);
    const int64_t sums = params.num_phases * params.key.num_heads * params.sums_stride;
    if (sums == 0) return;
    compute(params, Answer{&AccumulateAttentionParams::sums, sums, Before::added_to},
            cuda::accumulate_attention, cuda::accumulate_attention_workspace_bytes,
            List{&AccumulateAttentionParams::query_limits, params.query.tokens},
            List{&AccumulateAttentionParams::query_phases, params.query.tokens});
  }

  void key_redundancy(const KeyRedundancyParams& params) override {
    compute(params, scores_of(params, &KeyRedundancyParams::redundancy), cuda::key_redundancy,
            cuda::key_redundancy_workspace_bytes,
            List{&KeyRedundancyParams::positions, params.key.num_heads * params.tokens});
  }

  void keydiff_score(const KeydiffScoreParams& params) override {
    compute(params, scores_of(params, &KeydiffScoreParams::scores), cuda::keydiff_score,
            cuda::keydiff_score_workspace_bytes);
  }

  void expected_attention_score(const ExpectedAttentionScoreParams& params) override {
    check_query_positions(params.query_positions, params.query.tokens);
    compute(
        params, scores_of(params, &ExpectedAttentionScoreParams::scores),
        cuda::expected_attention_score, cuda::expected_attention_score_workspace_bytes,
        List{&ExpectedAttentionScoreParams::positions, params.key.num_heads * params.tokens},
        List{&ExpectedAttentionScoreParams::query_positions, params.query.tokens},
        List{[](auto& of) -> auto& { return of.rope.frequencies; }, params.rope.rotary_dim / 2});
  }

  void triattention_score(const TriattentionScoreParams& params) override {
    compute(
        params, scores_of(params, &TriattentionScoreParams::scores), cuda::triattention_score,
        cuda::triattention_score_workspace_bytes,
        List{&TriattentionScoreParams::synthetic_query, params.query_heads * params.key.head_size},
        List{&TriattentionScoreParams::norm_weights, params.query_heads * (params.rotary_dim / 2)});
  }

  bool computes_later() const override { return true; }

  void wait() override {
    const cuda::DeviceGuard guard(device_);
    round_trips_.wait(stream_);
  }

  void forget() noexcept override { round_trips_.forget(); }

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
  void synchronize() const {
    check_runtime(cudaStreamSynchronize(stream()), "what was launched before");
  }

  void start_copy(const void* from, void* to, int64_t bytes, cudaMemcpyKind kind) const {
    if (bytes == 0) return;
    check_runtime(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream()), "a copy");
  }

  // Where a destructor cannot throw: a driver that no longer answers has taken its memory along.
  template <typename Function>
  void after_all_work(Function function) const noexcept {
    try {
      const cuda::DeviceGuard guard(device_);
      synchronize();
      function();
    } catch (const Error&) {
      return;
    }
  }

  // Device memory until the next call, whose kernels come later on the stream.
  char* scratch(int64_t bytes) {
    if (bytes > scratch_.bytes()) {
      synchronize();
      scratch_.resize(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))));
    }
    return scratch_.data();
  }

  // Runs an op over a request's held keys, with these of its lists, and asks for its answer.
  template <typename Params, typename... Find>
  void compute(const Params& params, const Answer<Params>& answer,
               void (*op)(const Params&, const cuda::Workspace&, cuda::Stream),
               int64_t (*workspace_bytes)(const Params&), const List<Find>&... lists) {
    check_key_range(params.key, params.block_table, params.first_token, params.tokens);
    if (params.tokens == 0) return;
    const cuda::DeviceGuard guard(device_);
    Params there = from_first_block(params);
    const bool is_sent = answer.before == Before::added_to;
    const auto to = [&](float* room, int32_t* blocks, float* before, auto*... sent) {
      there.*answer.result = is_sent ? before : room;
      there.block_table = blocks;
      ((std::invoke(lists.find, there) = sent), ...);
    };
    std::apply(
        to, round_trips_.send(stream_, is_sent ? 0 : answer.count, blocks_of(there, params.tokens),
                              list_of<float>(params.*answer.result, is_sent ? answer.count : 0),
                              list_of(std::invoke(lists.find, params), lists.count)...));
    const int64_t bytes = workspace_bytes(there);
    op(there, {.data = scratch(bytes), .bytes = bytes}, stream_);
    round_trips_.bring(there.*answer.result, params.*answer.result, answer.count, stream_);
  }

  int device_;
  cuda::Stream stream_ = nullptr;
  std::unique_ptr<cuda::ListStaging> staging_;
  cuda::RoundTrips round_trips_;
  cuda::DeviceMemory scratch_;
};

}  // namespace

std::shared_ptr<CudaBackend> make_cuda_backend(int device) {
  cuda::check_device(device);
  return std::make_shared<DeviceBackend>(device);
}

}  // namespace phasekv::eviction
