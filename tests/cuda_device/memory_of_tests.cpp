#include "memory_of_tests.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>

namespace phasekv {
namespace {

// Powers of two, cut from large pieces and kept in lists when given back: the driver takes longer
// for an allocation than for a kernel.
class Heap {
 public:
  void give_pinned(bool is_pinned) { is_pinned_ = is_pinned; }

  void* allocate(size_t bytes) {
    const size_t size = std::bit_ceil(bytes + kHeader);
    const auto level = static_cast<size_t>(std::countr_zero(size));
    // What CUDA itself asks for, while it is asked for memory, is plain.
    thread_local bool is_inside = false;
    if (is_inside || !is_pinned_) {
      return after_header(std::aligned_alloc(kHeader, size), kPlain);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (Node* node = free_[level]; node != nullptr) {
      free_[level] = node->next;
      return after_header(node, level);
    }
    if (size > left_) {
      // Threads of CUDA's own may need memory meanwhile.
      lock.unlock();
      const size_t piece_size = std::max(size, kPiece);
      void* piece = nullptr;
      is_inside = true;
      const cudaError_t error = cudaMallocHost(&piece, piece_size);
      is_inside = false;
      if (error != cudaSuccess) throw std::bad_alloc();
      lock.lock();
      piece_ = static_cast<std::byte*>(piece);
      left_ = piece_size;
    }
    void* begin = piece_;
    piece_ += size;
    left_ -= size;
    return after_header(begin, level);
  }

  void release(void* memory) {
    void* begin = static_cast<std::byte*>(memory) - kHeader;
    const size_t level = *static_cast<size_t*>(begin);
    if (level == kPlain) {
      std::free(begin);
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[level] = new (begin) Node{free_[level]};
  }

 private:
  struct Node {
    Node* next;
  };
  static constexpr size_t kHeader = 256;  // what a workspace is aligned to
  static constexpr size_t kPiece = size_t{256} << 20;
  static constexpr size_t kPlain = 64;

  static void* after_header(void* begin, size_t level) {
    if (begin == nullptr) throw std::bad_alloc();
    *static_cast<size_t*>(begin) = level;
    return static_cast<std::byte*>(begin) + kHeader;
  }

  std::atomic<bool> is_pinned_ = false;
  std::mutex mutex_;
  std::array<Node*, 64> free_ = {};
  std::byte* piece_ = nullptr;
  size_t left_ = 0;
};

// Used before anything is constructed and after everything is destroyed.
constinit Heap heap;

}  // namespace

const char* reason_without_device() {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  if (devices == 0) return "no CUDA device";
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  return major < 8 ? "the CUDA device has a compute capability below 8.0" : nullptr;
}

void give_pinned_memory(bool is_pinned) { heap.give_pinned(is_pinned); }

}  // namespace phasekv

void* operator new(size_t bytes) { return phasekv::heap.allocate(bytes); }
void operator delete(void* memory) noexcept {
  if (memory != nullptr) phasekv::heap.release(memory);
}
void operator delete(void* memory, size_t /*bytes*/) noexcept { operator delete(memory); }
