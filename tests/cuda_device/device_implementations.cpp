// implementations() of the CUDA kernels on the first device.
#include <cuda_runtime_api.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "implementations.h"
#include "kernel_calls.h"
#include "managed_memory.h"

namespace phasekv {
namespace {

// The host looks at results as soon as an op has returned.
struct OnDevice {
  OnDevice() = default;
  ~OnDevice() noexcept(false) {
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  }
};

}  // namespace

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> all = [] {
    const char* reason = reason_without_device();
    return std::vector<Implementation>{
        {"device", reason == nullptr ? "native" : reason,
         reason == nullptr ? &KernelCalls<OnDevice>::kTable : nullptr}};
  }();
  return all;
}

const std::vector<SelectTopCall>& select_top_calls() {
  static const std::vector<SelectTopCall> all = {&KernelCalls<OnDevice>::select_top};
  return all;
}

const std::vector<DeviceSetup>& device_setups() {
  static const std::vector<DeviceSetup> all = {[] { return std::shared_ptr<void>(); }};
  return all;
}

}  // namespace phasekv
