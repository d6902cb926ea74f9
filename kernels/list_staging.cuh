// Brings the small lists of ops to the device without a wait: through pinned memory in two halves.
// A copy may read its half long after it was asked for, so a half is written again only once an
// event tells that its copies are done. On the device the same places are ordered by the stream
// alone.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>

#include "device_memory.cuh"
#include "list_writer.cuh"
#include "phasekv/cuda.h"
#include "platform.cuh"

namespace phasekv::cuda {

class ListStaging {
 public:
  ListStaging() {
    for (cudaEvent_t& event : copied_) {
      check_runtime(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    }
  }
  ~ListStaging() {
    for (const cudaEvent_t event : copied_) static_cast<void>(cudaEventDestroy(event));
  }
  ListStaging(const ListStaging&) = delete;
  ListStaging& operator=(const ListStaging&) = delete;

  // Where the lists will lie on the device, for kernels launched on `stream` before the next call;
  // null for an empty list. Always of one stream, until its work is done.
  template <typename... T>
  std::tuple<T*...> send(Stream stream, std::span<const T>... lists) {
    std::tuple<T*...> sent;
    send_written(stream, (int64_t{0} + ... + ListWriter::room_for(lists.size_bytes())),
                 [&](ListWriter& writer) { sent = {writer.write(lists)...}; });
    return sent;
  }

  // The same for lists that `write` hands to a ListWriter, with room for `bytes`.
  template <typename Write>
  void send_written(Stream stream, int64_t bytes, Write write) {
    if (bytes == 0) return;
    const int64_t begin = reserve(bytes, stream);
    ListWriter writer(here_.data() + begin, there_.data() + begin);
    write(writer);
    check_runtime(
        cudaMemcpyAsync(there_.data() + begin, here_.data() + begin, static_cast<size_t>(bytes),
                        cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
        "a copy of lists to the device");
  }

 private:
  static constexpr int64_t kLeastHalf = int64_t{1} << 16;

  int64_t reserve(int64_t bytes, Stream stream) {
    if (bytes > half_) {
      check_runtime(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "its work");
      half_ = used_ = 0;  // as long as there is no memory
      const auto half =
          static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(bytes, kLeastHalf))));
      here_.resize(2 * half);
      there_.resize(2 * half);
      half_ = half;
    } else if (used_ + bytes > half_) {
      check_runtime(cudaEventRecord(copied_[current_], static_cast<cudaStream_t>(stream)),
                    "an event");
      current_ = 1 - current_;
      used_ = 0;
      // An event that was never recorded is over.
      check_runtime(cudaEventSynchronize(copied_[current_]), "its copies");
    }
    const int64_t begin = static_cast<int64_t>(current_) * half_ + used_;
    used_ += bytes;
    return begin;
  }

  PinnedMemory here_;
  DeviceMemory there_;
  std::array<cudaEvent_t, 2> copied_ = {};
  size_t current_ = 0;
  int64_t half_ = 0;  // bytes
  int64_t used_ = 0;  // of the current half
};

}  // namespace phasekv::cuda
