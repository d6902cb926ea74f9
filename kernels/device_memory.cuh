// Memory that host code of this library owns, on a device or pinned on the host.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "phasekv/error.h"
#include "platform.cuh"

namespace phasekv::cuda {

// Throws missing_capability, saying what the runtime was asked for.
inline void check_runtime(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCode::missing_capability, "cuda", cudaGetErrorString(error), what);
}

inline void check_allocation(cudaError_t error, int64_t bytes, const char* where) {
  check_runtime(error, std::to_string(bytes) + " bytes of " + where);
}

struct OnDevice {
  static void* allocate(int64_t bytes) {
    void* memory = nullptr;
    check_allocation(cudaMalloc(&memory, static_cast<size_t>(bytes)), bytes, "device memory");
    return memory;
  }
  static void release(void* memory) noexcept { static_cast<void>(cudaFree(memory)); }
};

// Copies from and to it need not be waited for.
struct PinnedOnHost {
  static void* allocate(int64_t bytes) {
    void* memory = nullptr;
    check_allocation(cudaMallocHost(&memory, static_cast<size_t>(bytes)), bytes, "pinned memory");
    return memory;
  }
  static void release(void* memory) noexcept { static_cast<void>(cudaFreeHost(memory)); }
};

// Whoever grows or destroys one knows that nothing uses it any more.
template <typename Place>
class Memory {
 public:
  Memory() = default;
  ~Memory() { clear(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }

  // What it held is gone.
  void resize(int64_t bytes) {
    clear();
    data_ = Place::allocate(bytes);
    bytes_ = bytes;
  }

 private:
  void clear() noexcept {
    if (data_ != nullptr) Place::release(std::exchange(data_, nullptr));
    bytes_ = 0;
  }

  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

using DeviceMemory = Memory<OnDevice>;
using PinnedMemory = Memory<PinnedOnHost>;

}  // namespace phasekv::cuda
