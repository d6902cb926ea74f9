// Where an evictor's tensors lie, in CPU memory or on a CUDA device, and the ops that run there.
// What is decided is decided on the host; only what is heavy stays with the tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "phasekv/ops.h"

namespace phasekv::eviction {

class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // Memory for tensors, aligned to 64 bytes at least; what it holds is not defined.
  virtual void* allocate(int64_t bytes) = 0;
  // Once all that was asked for before is done.
  virtual void release(void* memory) noexcept = 0;
  // `from` and `to` are such memory, or the caller's tensors, and do not overlap.
  virtual void copy(const void* from, void* to, int64_t bytes) = 0;
  // Between the host's memory and the tensors'. The host may use its part again at once.
  virtual void upload(const void* from, void* to, int64_t bytes) = 0;
  virtual void download(const void* from, void* to, int64_t bytes) = 0;

  // The ops of phasekv/ops.h, each after those before it. Of their arguments query, buffer, key,
  // value and blocks lie with the tensors; all lists, and what is computed (scores, redundancy,
  // sums, gathered rows), are the host's memory. Arguments are refused as there.
  //
  // These may still be running when they return:
  virtual void push_queries(const PushQueriesParams& params) = 0;
  // In many layers, of the same heads, head size and dtype.
  virtual void compact(std::span<const CompactParams> layers) = 0;
  // This one waits for what it computes:
  virtual void gather_blocks(const GatherBlocksParams& params) = 0;
  // What these compute is there after `wait`, and until then its memory has to stay; where the
  // backend does not compute later, it is there at once:
  virtual void score_keys(const ScoreKeysParams& params) = 0;
  virtual void accumulate_attention(const AccumulateAttentionParams& params) = 0;
  virtual void key_redundancy(const KeyRedundancyParams& params) = 0;
  virtual void keydiff_score(const KeydiffScoreParams& params) = 0;
  virtual void expected_attention_score(const ExpectedAttentionScoreParams& params) = 0;
  virtual void triattention_score(const TriattentionScoreParams& params) = 0;

  virtual bool computes_later() const = 0;
  virtual void wait() = 0;
  // What was not waited for will not come: its memory can go.
  virtual void forget() noexcept = 0;
};

// Tensors in CPU memory: the ops of phasekv/ops.h themselves. One for all evictors.
const std::shared_ptr<Backend>& cpu_backend();

// Memory of a backend, as long as this lives.
class TensorMemory {
 public:
  TensorMemory() = default;
  TensorMemory(std::shared_ptr<Backend> backend, int64_t bytes);
  ~TensorMemory();
  TensorMemory(TensorMemory&& other) noexcept;
  TensorMemory& operator=(TensorMemory&& other) noexcept;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Backend> backend_;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace phasekv::eviction
