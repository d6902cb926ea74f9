// ChunkIndex for Python: tokens in as int32 buffers or any sequence of ints, matches out as tuples.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/reuse/chunk_index.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;

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

// Contiguous int32 tokens, copied only if the caller has them in another form. NumPy would wrap
// large integers and cut floats silently, so other dtypes are checked first.
class Tokens {
 public:
  explicit Tokens(const py::object& tokens) {
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

  std::span<const int32_t> span() const { return span_; }

 private:
  Int32Array array_;
  std::vector<int32_t> copied_;
  std::span<const int32_t> span_;
};

bool add(reuse::ChunkIndex& index, const std::string& key, const py::object& tokens) {
  const Tokens int32_tokens(tokens);
  const py::gil_scoped_release release;
  return index.add(key, int32_tokens.span());
}

py::list find(const reuse::ChunkIndex& index, const py::object& tokens) {
  const Tokens int32_tokens(tokens);
  std::vector<reuse::ChunkMatch> matches;
  {
    const py::gil_scoped_release release;
    matches = index.find(int32_tokens.span());
  }
  py::list result;
  for (const reuse::ChunkMatch& match : matches) {
    result.append(
        py::make_tuple(match.key, match.prompt_begin, match.prompt_end, match.chunk_begin));
  }
  return result;
}

}  // namespace

void register_chunk_index(py::module_& module) {
  py::class_<reuse::ChunkIndex>(
      module, "ChunkIndex",
      "Finds stored chunks by content anywhere in a prompt; see "
      "include/phasekv/reuse/chunk_index.h for what matches. Safe to use from several threads.")
      .def(py::init<int64_t, uint64_t>(), py::arg("min_match") = 16, py::kw_only(),
           py::arg("hash_base") = 0)
      .def_property_readonly("min_match", &reuse::ChunkIndex::min_match)
      .def_property_readonly("nbytes", &reuse::ChunkIndex::nbytes,
                             "Memory held, in bytes, estimated from capacities.")
      .def("__len__", &reuse::ChunkIndex::size)
      .def("__contains__", &reuse::ChunkIndex::contains, py::arg("key"))
      .def("add", &add, py::arg("key"), py::arg("tokens"),
           "Remember a chunk. False, without effect, if the key is known or there are fewer than "
           "min_match tokens.")
      .def("remove", &reuse::ChunkIndex::remove, py::arg("key"),
           py::call_guard<py::gil_scoped_release>(),
           "Forget a chunk. False if the key is not known.")
      .def("find", &find, py::arg("tokens"),
           "Matches (key, prompt_begin, prompt_end, chunk_begin) in prompt order, without overlap; "
           "ends are exclusive.");
}

}  // namespace phasekv::bindings
