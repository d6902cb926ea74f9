// Tensors from Python, by their attributes: data_ptr(), shape, stride(), dtype, device. Torch's
// have them, and the module needs no torch to be built. Every mismatch throws Error with the
// argument's name. The memory stays the tensor's. Where an OpCall is given it is told where the
// tensor lies; without one only tensors on the CPU are taken.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "op_call.h"
#include "phasekv/tensor.h"

namespace phasekv::bindings {

struct Tensor {
  std::string argument;  // the name in error messages
  void* data = nullptr;
  std::string dtype;   // "float32", "int64", ...
  std::string device;  // "cpu", "cuda:0", ...
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // elements

  int64_t dims() const { return static_cast<int64_t>(shape.size()); }
  std::string shape_text() const;
};

// Any tensor.
Tensor tensor_of(const char* argument, const pybind11::handle& object, OpCall* call = nullptr);

// float32, bfloat16 or float16; anything else is refused.
DataType data_type_of(const Tensor& tensor);

// [tokens, heads, head_size] of float32, bfloat16 or float16, the last dimension contiguous.
RowsView rows_of(const char* argument, const pybind11::handle& object, OpCall* call = nullptr);

// A contiguous [count] list of the given element type.
template <typename T>
struct List {
  T* data = nullptr;
  int64_t count = 0;
};

List<int64_t> int64_list(const char* argument, const pybind11::handle& object,
                         OpCall* call = nullptr);
List<int32_t> int32_list(const char* argument, const pybind11::handle& object,
                         OpCall* call = nullptr);
// Or bool.
List<uint8_t> uint8_list(const char* argument, const pybind11::handle& object,
                         OpCall* call = nullptr);
List<float> float_list(const char* argument, const pybind11::handle& object,
                       OpCall* call = nullptr);

// A contiguous tensor of exactly this dtype ("int32", ...) and shape.
Tensor contiguous_tensor(const char* argument, const pybind11::handle& object, const char* dtype,
                         const std::vector<int64_t>& shape, OpCall* call = nullptr);

// The same of float32.
float* float_tensor(const char* argument, const pybind11::handle& object,
                    const std::vector<int64_t>& shape, OpCall* call = nullptr);

// A list that must have `count` entries. None gives null where `optional_list` is called.
const int64_t* int64_list_of(const char* argument, const pybind11::handle& object, int64_t count,
                             OpCall* call = nullptr);
const int64_t* optional_int64_list_of(const char* argument, const pybind11::handle& object,
                                      int64_t count, OpCall* call = nullptr);

// [num_segments + 1]; at least one entry.
struct SegmentStarts {
  const int64_t* starts = nullptr;
  int64_t num_segments = 0;
  int64_t tokens = 0;  // the last entry; `tokens_on_device` where the host cannot read it
};
SegmentStarts segment_starts_of(const pybind11::handle& object, int64_t tokens_on_device = 0,
                                OpCall* call = nullptr);

}  // namespace phasekv::bindings
