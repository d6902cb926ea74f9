// Which devices the kernels can run on.
#include <string>

#include "launch.cuh"
#include "phasekv/cuda.h"
#include "phasekv/error.h"
#include "platform.cuh"

namespace phasekv::cuda {
namespace {

[[noreturn]] void refuse(int index, const std::string& reason) {
  throw Error(ErrorCode::missing_capability, "device", "cuda:" + std::to_string(index), reason);
}

int attribute_of(int index, cudaDeviceAttr attribute) {
  int value = 0;
  check_launch(cudaDeviceGetAttribute(&value, attribute, index));
  return value;
}

}  // namespace

bool is_built() { return true; }

void check_device(int index) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    refuse(index, std::string("the driver has no CUDA device: ") + cudaGetErrorString(error));
  }
  if (index < 0 || index >= devices) {
    refuse(index, "one of the " + std::to_string(devices) + " devices that the driver has");
  }
  const int major = attribute_of(index, cudaDevAttrComputeCapabilityMajor);
  if (major < 8) {
    refuse(index, "kernels need compute capability 8.0 or more, the device has " +
                      std::to_string(major) + "." +
                      std::to_string(attribute_of(index, cudaDevAttrComputeCapabilityMinor)));
  }
}

DeviceGuard::DeviceGuard(int index) {
  check_launch(cudaGetDevice(&previous_));
  check_launch(cudaSetDevice(index));
}

DeviceGuard::~DeviceGuard() { static_cast<void>(cudaSetDevice(previous_)); }

}  // namespace phasekv::cuda
