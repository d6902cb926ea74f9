#include "phasekv/eviction/backend.h"

#include <cstring>
#include <new>
#include <utility>

namespace phasekv::eviction {
namespace {

constexpr std::align_val_t kAlignment{64};

class CpuBackend final : public Backend {
 public:
  void* allocate(int64_t bytes) override {
    return ::operator new(static_cast<size_t>(bytes), kAlignment);
  }
  void release(void* memory) noexcept override { ::operator delete(memory, kAlignment); }
  void copy(const void* from, void* to, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void upload(const void* from, void* to, int64_t bytes) override { copy(from, to, bytes); }
  void download(const void* from, void* to, int64_t bytes) override { copy(from, to, bytes); }

  void push_queries(const PushQueriesParams& params) override { phasekv::push_queries(params); }
  void compact(std::span<const CompactParams> layers) override {
    for (const CompactParams& params : layers) phasekv::compact(params);
  }
  void gather_blocks(const GatherBlocksParams& params) override { phasekv::gather_blocks(params); }
  void score_keys(const ScoreKeysParams& params) override { phasekv::score_keys(params); }
  void accumulate_attention(const AccumulateAttentionParams& params) override {
    phasekv::accumulate_attention(params);
  }
  void key_redundancy(const KeyRedundancyParams& params) override {
    phasekv::key_redundancy(params);
  }
  void keydiff_score(const KeydiffScoreParams& params) override { phasekv::keydiff_score(params); }
  void expected_attention_score(const ExpectedAttentionScoreParams& params) override {
    phasekv::expected_attention_score(params);
  }
  void triattention_score(const TriattentionScoreParams& params) override {
    phasekv::triattention_score(params);
  }

  bool computes_later() const override { return false; }
  void wait() override {}
  void forget() noexcept override {}
};

}  // namespace

const std::shared_ptr<Backend>& cpu_backend() {
  static const std::shared_ptr<Backend> backend = std::make_shared<CpuBackend>();
  return backend;
}

TensorMemory::TensorMemory(std::shared_ptr<Backend> backend, int64_t bytes)
    : backend_(std::move(backend)),
      data_(bytes > 0 ? backend_->allocate(bytes) : nullptr),
      bytes_(bytes) {}

TensorMemory::~TensorMemory() {
  if (data_ != nullptr) backend_->release(data_);
}

TensorMemory::TensorMemory(TensorMemory&& other) noexcept
    : backend_(std::move(other.backend_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

TensorMemory& TensorMemory::operator=(TensorMemory&& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace phasekv::eviction
