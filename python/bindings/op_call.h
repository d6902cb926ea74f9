// One call of an op from Python: where its tensors lie, and so who runs it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "phasekv/cuda.h"

namespace phasekv::bindings {

class OpCall {
 public:
  // A cudaStream_t as an integer, as torch.cuda.current_stream().cuda_stream is; None: the default
  // stream. Only a call whose tensors lie on a device may name one.
  explicit OpCall(const pybind11::handle& stream);

  // The tensors of a call lie all on the CPU, or all on one CUDA device; torch's name of it. Throws
  // invalid_argument for any other device, and for another than the tensors before had;
  // missing_capability for a device that kernels cannot run on.
  void place(const std::string& argument, const std::string& device);

  // Of the tensors so far, as torch names it.
  const std::string& device() const { return device_; }
  bool is_on_cuda() const { return device_index_ >= 0; }
  // Of the CUDA device.
  int device_index() const { return device_index_; }

  // Throws unsupported for tensors on a device, with the reason.
  void refuse_cuda(const std::string& reason) const;

  // Scratch memory for a call on a device, from the allocator of `tensor`, which with torch is the
  // current stream's: given back when this object ends, it is used again after the kernels of that
  // stream. `bytes` is a function that says how much; on the CPU it is not called.
  template <typename Bytes>
  cuda::Workspace workspace(const pybind11::handle& tensor, Bytes&& bytes) {
    if (!is_on_cuda()) return {};
    return allocate(tensor, std::forward<Bytes>(bytes)());
  }

  // Runs the one or the other without the GIL.
  template <typename OnCpu, typename OnCuda>
  void run(OnCpu&& on_cpu, OnCuda&& on_cuda) const {
    check_stream();
    const pybind11::gil_scoped_release release;
    if (!is_on_cuda()) {
      std::forward<OnCpu>(on_cpu)();
      return;
    }
    const cuda::DeviceGuard guard(device_index_);
    std::forward<OnCuda>(on_cuda)(stream_);
  }

 private:
  void check_stream() const;
  cuda::Workspace allocate(const pybind11::handle& tensor, int64_t bytes);

  cuda::Stream stream_ = nullptr;
  bool has_stream_ = false;
  std::string first_argument_;
  std::string device_ = "cpu";
  int device_index_ = -1;
  std::vector<pybind11::object> scratch_;
};

}  // namespace phasekv::bindings
