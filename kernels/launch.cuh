// The one way in which kernels are launched, on a device and in emulation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "phasekv/cuda.h"
#include "phasekv/error.h"
#include "platform.cuh"

namespace phasekv::cuda {

inline void check_launch(cudaError_t error) {
  if (error == cudaSuccess) return;
  static_cast<void>(
      cudaGetLastError());  // what can be recovered from is not left for the next call
  throw Error(ErrorCode::missing_capability, "cuda", cudaGetErrorString(error),
              "kernels were built for compute capability 8.0 and later, and need such a device; "
              "the error may also be that of work which was launched before");
}

// Lets a kernel have more shared memory than every device gives. Throws missing_capability where
// the current device has less.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) return;
  int device = 0;
  int most = 0;
  static_cast<void>(cudaGetDevice(&device));
  static_cast<void>(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (bytes <= static_cast<size_t>(most)) check_launch(error);
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCode::missing_capability, "cuda",
              std::to_string(bytes) + " bytes of shared memory",
              "the device has " + std::to_string(most) + " for a block");
}

// Blocks of `threads` x 1 x 1 in stream order. Throws missing_capability if the device refuses.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
            Stream stream, Arguments&&... arguments) {
  constexpr size_t kSharedBytesWithoutOptIn = 48 * 1024;
  if (shared_bytes > kSharedBytesWithoutOptIn) allow_shared_memory(kernel, shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  check_launch(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

// Enough blocks for every multiprocessor of an A100 or an H100 to hold two.
inline constexpr int64_t kBlocksThatFillADevice = 264;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for `count` things, `per_block` each. Throws invalid_argument for more than a grid holds.
inline unsigned blocks_for(int64_t count, int64_t per_block) {
  const int64_t blocks = ceil_div(count, per_block);
  if (blocks > int64_t{0x7FFFFFFF}) {
    throw Error(ErrorCode::invalid_argument, "tokens", std::to_string(count),
                "at most " + std::to_string(int64_t{0x7FFFFFFF} * per_block));
  }
  return static_cast<unsigned>(blocks);
}

}  // namespace phasekv::cuda
