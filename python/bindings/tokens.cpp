#include "tokens.h"

#include <algorithm>
#include <limits>
#include <string>

#include "phasekv/error.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

[[noreturn]] void refuse_tokens(const py::handle& tokens, const char* reason) {
  constexpr size_t kShown = 80;
  auto value = py::repr(tokens).cast<std::string>();
  if (value.size() > kShown) value = value.substr(0, kShown) + "...";
  throw Error(ErrorCode::invalid_argument, "tokens", value, reason);
}

int32_t int32_token(int64_t token) {
  if (token < std::numeric_limits<int32_t>::min() || token > std::numeric_limits<int32_t>::max()) {
    refuse_tokens(py::int_(token), "integers of 32 bits");
  }
  return static_cast<int32_t>(token);
}

// Lists and tuples of plain ints, as engines keep prompts, faster than NumPy reads them. False if
// there is anything else in them.
bool read_ints(const py::object& tokens, std::vector<int32_t>& out) {
  if (!PyList_Check(tokens.ptr()) && !PyTuple_Check(tokens.ptr())) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(tokens.ptr());
  PyObject** items = PySequence_Fast_ITEMS(tokens.ptr());
  out.resize(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyLong_CheckExact(items[i])) return false;
    int overflow = 0;
    const int64_t token = PyLong_AsLongLongAndOverflow(items[i], &overflow);
    if (overflow != 0) refuse_tokens(items[i], "integers of 32 bits");
    out[static_cast<size_t>(i)] = int32_token(token);
  }
  return true;
}

}  // namespace

Tokens::Tokens(const py::object& tokens) {
  if (read_ints(tokens, copied_)) {
    span_ = copied_;
    return;
  }
  const py::array array = py::array::ensure(tokens);
  if (!array || array.ndim() != 1) refuse_tokens(tokens, "a sequence of ints or a 1-D array");
  if (py::isinstance<py::array_t<int32_t>>(array)) {
    array_ = Int32Array::ensure(array);
    span_ = {array_.data(), static_cast<size_t>(array_.size())};
    return;
  }
  if (array.size() == 0) return;
  if (array.dtype().kind() != 'i' && array.dtype().kind() != 'u') {
    refuse_tokens(tokens, "integers");
  }
  const auto wide = py::array_t < int64_t,
             py::array::c_style | py::array::forcecast > ::ensure(array);
  copied_.resize(static_cast<size_t>(wide.size()));
  std::transform(wide.data(), wide.data() + wide.size(), copied_.begin(), int32_token);
  span_ = copied_;
}

}  // namespace phasekv::bindings
