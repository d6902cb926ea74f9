#include "managed_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>

namespace phasekv {
namespace {

const char* find_reason() {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  if (devices == 0) return "no CUDA device";
  int major = 0;
  int managed = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&managed, cudaDevAttrConcurrentManagedAccess, 0);
  if (major < 8) return "the CUDA device has a compute capability below 8.0";
  if (managed == 0) return "host and CUDA device cannot use managed memory at the same time";
  return nullptr;
}

// Powers of two, cut from large pieces and kept in lists when given back: the driver takes longer
// for an allocation than for a kernel.
class ManagedHeap {
 public:
  void* allocate(size_t bytes) {
    const size_t size = std::bit_ceil(bytes + kHeader);
    const auto level = static_cast<size_t>(std::countr_zero(size));
    // What the CUDA runtime itself asks for, while it is asked for memory.
    thread_local bool is_inside = false;
    if (is_inside) return after_header(std::aligned_alloc(kHeader, size), kUnmanaged);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Node* node = free_[level]; node != nullptr) {
      free_[level] = node->next;
      return after_header(node, level);
    }
    is_inside = true;
    void* begin = cut(size);
    is_inside = false;
    return after_header(begin, level);
  }

  void release(void* memory) {
    void* begin = static_cast<std::byte*>(memory) - kHeader;
    const size_t level = *static_cast<size_t*>(begin);
    if (level == kUnmanaged) {
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
  static constexpr size_t kPiece = size_t{64} << 20;
  static constexpr size_t kUnmanaged = 64;

  static void* after_header(void* begin, size_t level) {
    if (begin == nullptr) throw std::bad_alloc();
    *static_cast<size_t*>(begin) = level;
    return static_cast<std::byte*>(begin) + kHeader;
  }

  void* cut(size_t size) {
    if (size > left_) {
      left_ = std::max(size, kPiece);
      void* piece = nullptr;
      if (reason_without_device() != nullptr) {
        piece = std::aligned_alloc(kHeader, left_);
      } else if (cudaMallocManaged(&piece, left_) != cudaSuccess) {
        piece = nullptr;
      }
      piece_ = static_cast<std::byte*>(piece);
      if (piece == nullptr) left_ = 0;
    }
    if (piece_ == nullptr) return nullptr;
    void* begin = piece_;
    piece_ += size;
    left_ -= size;
    return begin;
  }

  std::mutex mutex_;
  std::array<Node*, 64> free_ = {};
  std::byte* piece_ = nullptr;
  size_t left_ = 0;
};

// Used before anything is constructed and after everything is destroyed.
constinit ManagedHeap heap;

}  // namespace

const char* reason_without_device() {
  static const char* const reason = find_reason();
  return reason;
}

}  // namespace phasekv

void* operator new(size_t bytes) { return phasekv::heap.allocate(bytes); }
void operator delete(void* memory) noexcept {
  if (memory != nullptr) phasekv::heap.release(memory);
}
void operator delete(void* memory, size_t /*bytes*/) noexcept { operator delete(memory); }
