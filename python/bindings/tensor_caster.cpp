#include "tensor_caster.h"

#include <utility>

#include "phasekv/error.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

[[noreturn]] void refuse(const std::string& argument, const std::string& value,
                         const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, argument, value, reason);
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

// What a tensor is asked for, made once: a step of a model asks some hundred of them.
struct TensorNames {
  PyObject* device = PyUnicode_InternFromString("device");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
};

// What Python gave; an attribute that there is not means that the object is no tensor.
py::object checked(const char* argument, const py::handle& object, PyObject* given) {
  if (given != nullptr) return py::reinterpret_steal<py::object>(given);
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
  PyErr_Clear();
  refuse(argument, py::str(py::type::handle_of(object).attr("__name__")), "a tensor");
}

py::object attribute_of(const char* argument, const py::handle& object, PyObject* name) {
  return checked(argument, object, PyObject_GetAttr(object.ptr(), name));
}

py::object call_of(const char* argument, const py::handle& object, PyObject* name) {
  return checked(argument, object, PyObject_CallMethodNoArgs(object.ptr(), name));
}

std::vector<int64_t> integers_of(const py::handle& sequence) {
  std::vector<int64_t> integers;
  for (const py::handle item : sequence) integers.push_back(item.cast<int64_t>());
  return integers;
}

// "float32" of torch.float32.
std::string dtype_name(const py::handle& dtype) {
  auto name = py::str(dtype).cast<std::string>();
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? name : name.substr(dot + 1);
}

bool is_contiguous(const Tensor& tensor) {
  int64_t expected = 1;
  for (size_t i = tensor.shape.size(); i-- > 0;) {
    if (tensor.shape[i] == 0) return true;
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

void check_contiguous(const Tensor& tensor) {
  if (!is_contiguous(tensor)) {
    refuse(tensor.argument + ".stride", text_of(tensor.strides), "a contiguous tensor");
  }
}

void check_dtype(const Tensor& tensor, const char* dtype) {
  if (tensor.dtype != dtype) refuse(tensor.argument + ".dtype", tensor.dtype, dtype);
}

Tensor list_of(const char* argument, const py::handle& object, OpCall* call) {
  Tensor tensor = tensor_of(argument, object, call);
  if (tensor.dims() != 1) refuse(argument, tensor.shape_text(), "a tensor of one dimension");
  check_contiguous(tensor);
  return tensor;
}

template <typename T>
List<T> typed_list_of(const char* argument, const py::handle& object, const char* dtype,
                      OpCall* call) {
  const Tensor tensor = list_of(argument, object, call);
  check_dtype(tensor, dtype);
  return {static_cast<T*>(tensor.data), tensor.shape[0]};
}

}  // namespace

std::string Tensor::shape_text() const { return text_of(shape); }

Tensor tensor_of(const char* argument, const py::handle& object, OpCall* call) {
  static const TensorNames names;
  const auto device = py::str(attribute_of(argument, object, names.device)).cast<std::string>();
  if (call != nullptr) {
    call->place(argument, device);
  } else if (device != "cpu") {
    refuse(std::string(argument) + ".device", device, "cpu");
  }
  Tensor tensor;
  tensor.argument = argument;
  tensor.device = device;
  tensor.dtype = dtype_name(attribute_of(argument, object, names.dtype));
  const auto address = call_of(argument, object, names.data_ptr).cast<uintptr_t>();
  // NOLINTNEXTLINE(performance-no-int-to-ptr): Python hands addresses over as integers.
  tensor.data = reinterpret_cast<void*>(address);
  tensor.shape = integers_of(attribute_of(argument, object, names.shape));
  tensor.strides = integers_of(call_of(argument, object, names.stride));
  return tensor;
}

DataType data_type_of(const Tensor& tensor) {
  if (tensor.dtype == "float32") return DataType::float32;
  if (tensor.dtype == "bfloat16") return DataType::bfloat16;
  if (tensor.dtype == "float16") return DataType::float16;
  refuse(tensor.argument + ".dtype", tensor.dtype, "float32, bfloat16 or float16");
}

RowsView rows_of(const char* argument, const py::handle& object, OpCall* call) {
  const Tensor tensor = tensor_of(argument, object, call);
  if (tensor.dims() != 3) refuse(argument, tensor.shape_text(), "[tokens, heads, head_size]");
  if (tensor.shape[2] > 1 && tensor.strides[2] != 1) {
    refuse(tensor.argument + ".stride", text_of(tensor.strides),
           "1 for the last dimension, whose elements are adjacent");
  }
  return {.data = tensor.data,
          .dtype = data_type_of(tensor),
          .tokens = tensor.shape[0],
          .heads = tensor.shape[1],
          .head_size = tensor.shape[2],
          .token_stride = tensor.strides[0],
          .head_stride = tensor.strides[1]};
}

List<int64_t> int64_list(const char* argument, const py::handle& object, OpCall* call) {
  return typed_list_of<int64_t>(argument, object, "int64", call);
}

List<int32_t> int32_list(const char* argument, const py::handle& object, OpCall* call) {
  return typed_list_of<int32_t>(argument, object, "int32", call);
}

List<float> float_list(const char* argument, const py::handle& object, OpCall* call) {
  return typed_list_of<float>(argument, object, "float32", call);
}

List<uint8_t> uint8_list(const char* argument, const py::handle& object, OpCall* call) {
  const Tensor tensor = list_of(argument, object, call);
  if (tensor.dtype != "uint8" && tensor.dtype != "bool") {
    refuse(tensor.argument + ".dtype", tensor.dtype, "uint8 or bool");
  }
  return {static_cast<uint8_t*>(tensor.data), tensor.shape[0]};
}

Tensor contiguous_tensor(const char* argument, const py::handle& object, const char* dtype,
                         const std::vector<int64_t>& shape, OpCall* call) {
  Tensor tensor = tensor_of(argument, object, call);
  check_dtype(tensor, dtype);
  if (tensor.shape != shape) refuse(argument, tensor.shape_text(), text_of(shape));
  check_contiguous(tensor);
  return tensor;
}

float* float_tensor(const char* argument, const py::handle& object,
                    const std::vector<int64_t>& shape, OpCall* call) {
  return static_cast<float*>(contiguous_tensor(argument, object, "float32", shape, call).data);
}

const int64_t* int64_list_of(const char* argument, const py::handle& object, int64_t count,
                             OpCall* call) {
  const List<int64_t> list = int64_list(argument, object, call);
  if (list.count != count) refuse(argument, text_of({list.count}), text_of({count}));
  return list.data;
}

const int64_t* optional_int64_list_of(const char* argument, const py::handle& object, int64_t count,
                                      OpCall* call) {
  return object.is_none() ? nullptr : int64_list_of(argument, object, count, call);
}

SegmentStarts segment_starts_of(const py::handle& object, int64_t tokens_on_device, OpCall* call) {
  const List<int64_t> list = int64_list("segment_starts", object, call);
  if (list.count < 1) refuse("segment_starts", "[0]", "[num_segments + 1]");
  const bool is_readable = call == nullptr || !call->is_on_cuda();
  return {list.data, list.count - 1, is_readable ? list.data[list.count - 1] : tokens_on_device};
}

}  // namespace phasekv::bindings
