#include "op_call.h"

#include <charconv>
#include <string_view>

#include "phasekv/error.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

// 1 of "cuda:1"; "cuda" alone is the first; -1 for the CPU.
int index_of(const std::string& argument, const std::string& device) {
  if (device == "cpu") return -1;
  if (device == "cuda") return 0;
  constexpr std::string_view kPrefix = "cuda:";
  int index = -1;
  if (device.rfind(kPrefix, 0) == 0) {
    const char* begin = device.data() + kPrefix.size();
    const char* end = device.data() + device.size();
    const auto [stopped, error] = std::from_chars(begin, end, index);
    if (error != std::errc() || stopped != end) index = -1;
  }
  if (index < 0) {
    throw Error(ErrorCode::invalid_argument, argument + ".device", device, "cpu or a CUDA device");
  }
  return index;
}

}  // namespace

OpCall::OpCall(const py::handle& stream) {
  if (stream.is_none()) return;
  has_stream_ = true;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): Python hands addresses over as integers.
  stream_ = reinterpret_cast<cuda::Stream>(stream.cast<uintptr_t>());
}

void OpCall::place(const std::string& argument, const std::string& device) {
  const int index = index_of(argument, device);
  if (first_argument_.empty()) {
    if (index >= 0) cuda::check_device(index);
    first_argument_ = argument;
    device_ = device;
    device_index_ = index;
  } else if (index != device_index_) {
    throw Error(ErrorCode::invalid_argument, argument + ".device", device,
                device_ + ", where " + first_argument_ + " is");
  }
}

void OpCall::refuse_cuda(const std::string& reason) const {
  if (!is_on_cuda()) return;
  throw Error(ErrorCode::unsupported, first_argument_ + ".device", device_, reason);
}

cuda::Workspace OpCall::allocate(const py::handle& tensor, int64_t bytes) {
  if (bytes == 0) return {};
  const auto element = tensor.attr("element_size")().cast<int64_t>();
  const int64_t elements = (bytes + kWorkspaceAlignment) / element + 1;
  const py::object memory = tensor.attr("new_empty")(elements);
  const auto address = memory.attr("data_ptr")().cast<uintptr_t>();
  scratch_.push_back(memory);
  const uintptr_t aligned =
      (address + kWorkspaceAlignment - 1) & ~uintptr_t{kWorkspaceAlignment - 1};
  // NOLINTNEXTLINE(performance-no-int-to-ptr): Python hands addresses over as integers.
  return {.data = reinterpret_cast<void*>(aligned), .bytes = bytes};
}

void OpCall::check_stream() const {
  if (is_on_cuda() || !has_stream_) return;
  throw Error(ErrorCode::invalid_argument, "stream", "given",
              "None for tensors on the CPU, where " + first_argument_ + " is");
}

}  // namespace phasekv::bindings
