// Memory that begins on a cache line, as an engine's does.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace phasekv::benchmarks {

template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};

  LineAllocator() = default;
  template <typename Other>
  explicit LineAllocator(const LineAllocator<Other>& /*other*/) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
  }
  void deallocate(T* p, size_t /*count*/) { ::operator delete(p, kAlignment); }
  bool operator==(const LineAllocator& /*other*/) const { return true; }
};

using Bytes = std::vector<char, LineAllocator<char>>;

}  // namespace phasekv::benchmarks
