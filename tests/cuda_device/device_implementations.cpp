// implementations() of the CUDA kernels on the first device.
#include <cuda_runtime_api.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <vector>

#include "implementations.h"
#include "kernel_calls.h"

namespace phasekv {
namespace {

// The host looks at results as soon as an op has returned. Where the op has thrown, as every one
// does after a kernel that has spoilt CUDA for the process, it has said enough.
struct OnDevice {
  OnDevice() = default;
  ~OnDevice() noexcept(false) {
    const cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess || std::uncaught_exceptions() > 0) return;
    throw std::runtime_error(cudaGetErrorString(error));
  }
};

}  // namespace

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> all = {
      {"device", "native", &KernelCalls<OnDevice>::kTable}};
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
