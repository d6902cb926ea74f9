// CUDA's language and the intrinsics that the kernels use, as C++ for a CPU. Included by
// kernels/platform.cuh in place of the toolkit's headers; never installed.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "scheduler.h"
#include "streams.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

// ---- Coordinates.

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;

  constexpr dim3(unsigned x_extent = 1, unsigned y_extent = 1, unsigned z_extent = 1)
      : x(x_extent), y(y_extent), z(z_extent) {}
};

inline const phasekv::emulation::Extent& threadIdx = phasekv::emulation::running.thread;
inline const phasekv::emulation::Extent& blockIdx = phasekv::emulation::running.block;
inline const phasekv::emulation::Extent& blockDim = phasekv::emulation::running.block_extent;
inline const phasekv::emulation::Extent& gridDim = phasekv::emulation::running.grid_extent;

// ---- Types.

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16)};
}
inline float __half2float(__half x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
inline __half __float2half_rn(float x) {
  if (std::isnan(x)) return {0x7FFF};
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}

// ---- Synchronisation and shuffles.

using phasekv::emulation::Where;

namespace phasekv::cuda {

// The thread's own code copies, so that sanitizers see who does it.
inline void make_copy(const emulation::Copy& copy) {
  for (int i = 0; i < copy.bytes; ++i) {
    copy.to[i] = i < copy.valid_bytes ? copy.from[i] : static_cast<unsigned char>(0);
  }
}

// A copy that was not waited for may be made whenever others run.
inline void make_copies_by_chance() {
  emulation::Copy copy;
  while (emulation::next_copy_by_chance(&copy)) make_copy(copy);
}

}  // namespace phasekv::cuda

inline void __syncthreads(const Where& where = Where::current()) {
  phasekv::emulation::synchronize_block(where);
  phasekv::cuda::make_copies_by_chance();
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFU, const Where& where = Where::current()) {
  phasekv::emulation::meet(phasekv::emulation::WarpOperation::synchronize, mask, nullptr, where);
  phasekv::cuda::make_copies_by_chance();
}

namespace phasekv::emulation {

template <typename T>
T exchange(unsigned mask, T value, int source, const Where& where) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  ExchangeOperand operand{0, 0, source};
  std::memcpy(&operand.value, &value, sizeof(T));
  meet(WarpOperation::exchange, mask, &operand, where);
  T result;
  std::memcpy(&result, &operand.result, sizeof(T));
  return result;
}

inline int lane() { return static_cast<int>(running.lane); }

}  // namespace phasekv::emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              const Where& where = Where::current()) {
  const int lane = phasekv::emulation::lane();
  return phasekv::emulation::exchange(mask, value, lane / width * width + source % width, where);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  const Where& where = Where::current()) {
  const int lane = phasekv::emulation::lane();
  const int source = lane ^ lane_mask;
  return phasekv::emulation::exchange(mask, value, source / width > lane / width ? lane : source,
                                      where);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const Where& where = Where::current()) {
  const int lane = phasekv::emulation::lane();
  const int distance = static_cast<int>(delta);
  const int source = lane % width < distance ? lane : lane - distance;
  return phasekv::emulation::exchange(mask, value, source, where);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const Where& where = Where::current()) {
  const int lane = phasekv::emulation::lane();
  const int distance = static_cast<int>(delta);
  const int source = lane % width + distance >= width ? lane : lane + distance;
  return phasekv::emulation::exchange(mask, value, source, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, const Where& where = Where::current()) {
  phasekv::emulation::BallotOperand operand{predicate != 0, 0};
  phasekv::emulation::meet(phasekv::emulation::WarpOperation::ballot, mask, &operand, where);
  return operand.votes;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

// ---- Atomics. Threads change places only where they wait, so these are plain; ThreadSanitizer
// must know them as atomic.

template <typename T>
T atomicAdd(T* address, T value) {
  static_assert(std::is_integral_v<T>, "the order of other additions would change the sum");
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

template <typename T>
T atomicMin(T* address, T value) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  if (value < old) __atomic_store_n(address, value, __ATOMIC_RELAXED);
  return old;
}

// ---- Launches.

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoDevice = 100
};
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace phasekv::emulation {

// Shared memory beyond 48 KiB that each kernel may have.
inline std::map<const void*, int>& opted_in_shared_bytes() {
  static std::map<const void*, int> bytes;
  return bytes;
}

// Compute capability, major and minor, of each device there is.
inline std::vector<std::pair<int, int>> devices = {{8, 0}, {9, 0}};
inline int current_device = 0;

// For addresses of the host's memory. Padding may hold anything and must go first, which a compiler
// that cannot do it leaves to those that can.
template <typename Value>
void check_argument(Value value) {
#if defined(__has_builtin) && __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(&value);
  check_argument_bytes(&value, sizeof(value));
#else
  static_cast<void>(value);
#endif
}

inline Extent extent_of(const dim3& extent) { return {extent.x, extent.y, extent.z}; }

}  // namespace phasekv::emulation

inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorNoDevice) return "no CUDA-capable device is detected";
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return error == cudaSuccess ? "no error" : "invalid argument";
}

// ---- Devices.

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(phasekv::emulation::devices.size());
  return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const auto& [major, minor] = phasekv::emulation::devices.at(static_cast<size_t>(device));
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = phasekv::emulation::kMaxSharedBytes;
      break;
  }
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = phasekv::emulation::current_device;
  return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
  phasekv::emulation::current_device = device;
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  static_cast<void>(attribute);
  if (value < 0 || static_cast<size_t>(value) > phasekv::emulation::kMaxSharedBytes) {
    return cudaErrorInvalidValue;
  }
  phasekv::emulation::opted_in_shared_bytes()[reinterpret_cast<const void*>(kernel)] = value;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using Values = std::tuple<std::decay_t<Parameters>...>;
  static_assert(sizeof(Values) <= phasekv::emulation::kMaxParameterBytes);
  static_assert((std::is_trivially_copyable_v<std::decay_t<Parameters>> && ...),
                "arguments of a kernel are copied byte by byte");
  const auto& opted_in = phasekv::emulation::opted_in_shared_bytes();
  const auto found = opted_in.find(reinterpret_cast<const void*>(kernel));
  const size_t allowed = found == opted_in.end() ? phasekv::emulation::kSharedBytesWithoutOptIn
                                                 : static_cast<size_t>(found->second);
  if (config->dynamicSmemBytes > allowed) return cudaErrorInvalidValue;
  struct Call {
    void (*kernel)(Parameters...);
    Values values;
  };
  Call call{kernel, Values(std::forward<Arguments>(arguments)...)};
  std::apply([](const auto&... values) { (phasekv::emulation::check_argument(values), ...); },
             call.values);
  const auto run = [call, config = *config]() mutable {
    phasekv::emulation::launch_grid(
        phasekv::emulation::extent_of(config.gridDim),
        phasekv::emulation::extent_of(config.blockDim), config.dynamicSmemBytes,
        [](void* argument) {
          auto* self = static_cast<Call*>(argument);
          std::apply(self->kernel, self->values);
        },
        &call);
  };
  phasekv::emulation::enqueue(config->stream, run);
  return cudaSuccess;
}

// ---- Memory, copies and waiting.

using cudaEvent_t = phasekv::emulation::StreamEvent*;
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3
};
inline constexpr unsigned cudaEventDisableTiming = 2;

inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (!phasekv::emulation::count_allocation()) return cudaErrorMemoryAllocation;
  *memory = phasekv::emulation::allocate_on_device(bytes);
  return cudaSuccess;
}

// Waits for the device, as CUDA's does.
inline cudaError_t cudaFree(void* memory) {
  phasekv::emulation::count_wait();
  phasekv::emulation::finish_all_streams();
  phasekv::emulation::free_on_device(memory);
  return cudaSuccess;
}

inline cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  if (!phasekv::emulation::count_allocation()) return cudaErrorMemoryAllocation;
  *memory = ::operator new(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaFreeHost(void* memory) {
  phasekv::emulation::finish_all_streams();
  ::operator delete(memory);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  if (kind != cudaMemcpyHostToDevice) {
    phasekv::emulation::check_on_device(from, bytes, "a copy reads");
  }
  if (kind != cudaMemcpyDeviceToHost) {
    phasekv::emulation::check_on_device(to, bytes, "a copy writes");
  } else {
    phasekv::emulation::count_bytes_to_host(bytes);
  }
  phasekv::emulation::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  phasekv::emulation::count_wait();
  phasekv::emulation::finish_stream(stream);
  return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() {
  phasekv::emulation::count_wait();
  phasekv::emulation::finish_all_streams();
  return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  static_cast<void>(flags);
  *event = new phasekv::emulation::StreamEvent;
  return cudaSuccess;
}

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event = phasekv::emulation::record(stream);
  return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  phasekv::emulation::count_wait();
  phasekv::emulation::finish_until(*event);
  return cudaSuccess;
}

// ---- What platform.cuh writes in PTX.

namespace phasekv::cuda {

inline unsigned char* dynamic_shared_memory() { return emulation::dynamic_shared_memory(); }

inline void copy_async_16(void* shared, const void* global, bool valid) {
  emulation::check_alignment(shared, 16, "an asynchronous copy to");
  emulation::check_alignment(global, 16, "an asynchronous copy from");
  const emulation::Copy copy = {static_cast<unsigned char*>(shared),
                                static_cast<const unsigned char*>(global), 16, valid ? 16 : 0};
  if (emulation::copies_at_once()) {
    make_copy(copy);
  } else {
    emulation::copy_later(copy);
  }
}

inline void commit_async_copies() { emulation::commit_copies(); }

template <int kPending>
void wait_async_copies() {
  emulation::Copy copy;
  while (emulation::next_due_copy(kPending, &copy)) make_copy(copy);
}

template <bool kTransposed>
void load_matrix(uint32_t (&registers)[4], const void* row, const Where& where = Where::current()) {
  emulation::check_alignment(row, 16, "a row of a matrix at");
  emulation::MatrixRowOperand operand;
  const auto* elements = static_cast<const uint16_t*>(row);
  for (int i = 0; i < 8; ++i) operand.row[i] = elements[i];
  emulation::meet(kTransposed ? emulation::WarpOperation::load_matrix_transposed
                              : emulation::WarpOperation::load_matrix,
                  0xFFFFFFFFU, &operand, where);
  for (int i = 0; i < 4; ++i) registers[i] = operand.result[i];
}

inline float float_of(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float float_of(__half x) { return __half2float(x); }

template <typename T, size_t kRegisters>
void halves_of(const uint32_t (&registers)[kRegisters], float (&halves)[kRegisters][2]) {
  for (size_t i = 0; i < kRegisters; ++i) {
    halves[i][0] = float_of(T{static_cast<uint16_t>(registers[i])});
    halves[i][1] = float_of(T{static_cast<uint16_t>(registers[i] >> 16)});
  }
}

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  const Where& where = Where::current()) {
  emulation::MmaOperand operand;
  halves_of<T>(a, operand.a);
  halves_of<T>({b0, b1}, operand.b);
  operand.d = d;
  emulation::meet(emulation::WarpOperation::mma, 0xFFFFFFFFU, &operand, where);
}

}  // namespace phasekv::cuda
