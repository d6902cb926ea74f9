// Small lists that go to the device together: written one after another where one copy finds them.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

namespace phasekv::cuda {

class ListWriter {
 public:
  // Writes to `here`, which is copied to `there` later.
  ListWriter(char* here, char* there) : here_(here), there_(there) {}

  // Bytes that a list of so many takes.
  static int64_t room_for(size_t bytes) {
    constexpr int64_t kAlignment = 64;
    return (static_cast<int64_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Where the list will lie on the device; null for an empty one.
  template <typename T>
  T* write(std::span<const T> list) {
    if (list.empty()) return nullptr;
    std::memcpy(here_ + used_, list.data(), list.size_bytes());
    char* there = there_ + used_;
    used_ += room_for(list.size_bytes());
    return reinterpret_cast<T*>(there);
  }

 private:
  char* here_;
  char* there_;
  int64_t used_ = 0;  // bytes
};

}  // namespace phasekv::cuda
