// Occupancy of a kernel without a GPU, by the calculator that comes with the toolkit. Reads lines
// of "architecture registers threads static_bytes dynamic_bytes" and writes blocks per
// multiprocessor.
#include <cuda_occupancy.h>

#include <cstddef>
#include <iostream>
#include <string>

namespace {

// A100 is sm_80; H100 and H200 are sm_90.
cudaOccDeviceProp device_of(const std::string& architecture) {
  const bool is_hopper = architecture == "sm_90";
  cudaOccDeviceProp device;
  device.computeMajor = is_hopper ? 9 : 8;
  device.computeMinor = 0;
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = 2048;
  device.regsPerBlock = 65536;
  device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = size_t{48} << 10;
  device.sharedMemPerMultiprocessor = size_t{is_hopper ? 228U : 164U} << 10;
  device.sharedMemPerBlockOptin = size_t{is_hopper ? 227U : 163U} << 10;
  device.reservedSharedMemPerBlock = 1024;
  device.numSms = is_hopper ? 132 : 108;
  return device;
}

}  // namespace

int main() {
  std::string architecture;
  int registers = 0;
  int threads = 0;
  size_t static_bytes = 0;
  size_t dynamic_bytes = 0;
  while (std::cin >> architecture >> registers >> threads >> static_bytes >> dynamic_bytes) {
    const cudaOccDeviceProp device = device_of(architecture);
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = static_bytes;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin - static_bytes;
    kernel.numBlockBarriers = 1;
    const cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                dynamic_bytes) != CUDA_OCC_SUCCESS) {
      return 1;
    }
    std::cout << result.activeBlocksPerMultiprocessor << "\n";
  }
  return 0;
}
