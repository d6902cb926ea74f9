// How a call divides the workspace that it was given, and how much it needs: the same code tells
// both.
#pragma once

#include <cstdint>
#include <string>

#include "phasekv/cuda.h"
#include "validate.h"

namespace phasekv::cuda {

class Allotment {
 public:
  // Without memory, to count the bytes.
  Allotment() = default;
  explicit Allotment(const Workspace& workspace) : workspace_(workspace) {}

  // `count` elements, aligned to 256 bytes; null where nothing was given, or no element is wanted.
  template <typename T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 256;
    const int64_t begin = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    bytes_ = begin + count * static_cast<int64_t>(sizeof(T));
    if (workspace_.data == nullptr || count == 0) return nullptr;
    return reinterpret_cast<T*>(static_cast<char*>(workspace_.data) + begin);
  }

  int64_t bytes() const { return bytes_; }

  // Throws invalid_argument unless all that was taken is there. `needed_by` tells how much to give.
  void check(const std::string& needed_by) const {
    const int64_t given = workspace_.data == nullptr ? 0 : workspace_.bytes;
    if (given >= bytes_) return;
    refuse("workspace.bytes", given, "at least " + needed_by + ", " + std::to_string(bytes_));
  }

 private:
  Workspace workspace_;
  int64_t bytes_ = 0;
};

}  // namespace phasekv::cuda
