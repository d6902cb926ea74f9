// What ops are sent and what they answer, until somebody waits for all answers at once. Lists and
// answers lie in pinned memory, and in as much of the device's, where each has a place of its own.
// Only where that memory is too small the host waits earlier; it grows up to a limit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <tuple>
#include <vector>

#include "device_memory.cuh"
#include "list_writer.cuh"
#include "phasekv/cuda.h"
#include "platform.cuh"

namespace phasekv::cuda {

// Always of one stream, until its work is done.
class RoundTrips {
 public:
  // Where an op finds its lists on the device, null for an empty one, and has room for an answer of
  // so many floats.
  template <typename... T>
  std::tuple<float*, T*...> send(Stream stream, int64_t floats, std::span<const T>... lists) {
    const int64_t list_bytes = (int64_t{0} + ... + ListWriter::room_for(lists.size_bytes()));
    const int64_t begin = reserve(list_bytes + ListWriter::room_for(bytes_of(floats)), stream);
    char* there = there_.data() + begin;
    ListWriter writer(here_.data() + begin, there);
    std::tuple<float*, T*...> sent{reinterpret_cast<float*>(there + list_bytes),
                                   writer.write(lists)...};
    copy(here_.data() + begin, there, list_bytes, cudaMemcpyHostToDevice, stream);
    return sent;
  }

  // Asks for an answer, or for a list that an op has changed: what now lies `there` on the device.
  void bring(const float* there, float* to, int64_t floats, Stream stream) {
    char* here = here_.data() + (reinterpret_cast<const char*>(there) - there_.data());
    copy(there, here, static_cast<int64_t>(bytes_of(floats)), cudaMemcpyDeviceToHost, stream);
    answers_.push_back({here, to, bytes_of(floats)});
  }

  // Until all that was asked for is where it belongs.
  void wait(Stream stream) {
    if (used_ == 0) return;
    check_runtime(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "answers of kernels");
    for (const Answer& answer : answers_) std::memcpy(answer.to, answer.here, answer.bytes);
    answers_.clear();
    used_ = 0;
  }

  void forget() noexcept { answers_.clear(); }

 private:
  static constexpr int64_t kLeastBytes = int64_t{1} << 20;
  static constexpr int64_t kMostBytes = int64_t{1} << 26;

  struct Answer {
    const char* here;
    float* to;
    size_t bytes;
  };

  static size_t bytes_of(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

  static void copy(const void* from, void* to, int64_t bytes, cudaMemcpyKind kind, Stream stream) {
    if (bytes == 0) return;
    check_runtime(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind,
                                  static_cast<cudaStream_t>(stream)),
                  "a copy for kernels");
  }

  int64_t reserve(int64_t bytes, Stream stream) {
    if (used_ + bytes > room()) {
      wait(stream);
      const int64_t grown = std::clamp(2 * room(), kLeastBytes, kMostBytes);
      const int64_t needed =
          std::max(grown, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))));
      if (needed > room()) {
        here_.resize(needed);
        there_.resize(needed);
      }
    }
    const int64_t begin = used_;
    used_ += bytes;
    return begin;
  }

  // Bytes on both sides, of which one may be missing after an allocation that failed.
  int64_t room() const { return std::min(here_.bytes(), there_.bytes()); }

  PinnedMemory here_;
  DeviceMemory there_;
  int64_t used_ = 0;  // bytes
  std::vector<Answer> answers_;
};

}  // namespace phasekv::cuda
