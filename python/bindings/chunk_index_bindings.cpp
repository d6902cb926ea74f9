// ChunkIndex for Python: tokens in as int32 buffers or any sequence of ints, matches out as tuples.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

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

// `tokens` as contiguous int32, copied only if they are something else. NumPy would wrap large
// integers and cut floats silently, so other dtypes are checked first.
Int32Array int32_tokens(const py::object& tokens) {
  const py::array array = py::array::ensure(tokens);
  if (!array || array.ndim() != 1) {
    PyErr_Clear();
    refuse_tokens(tokens, "a sequence of ints or a 1-D array");
  }
  if (py::isinstance<py::array_t<int32_t>>(array)) return Int32Array::ensure(array);
  if (array.size() == 0) return Int32Array(0);
  if (array.dtype().kind() != 'i' && array.dtype().kind() != 'u') {
    refuse_tokens(tokens, "integers");
  }
  const auto wide = py::array_t < int64_t,
             py::array::c_style | py::array::forcecast > ::ensure(array);
  Int32Array narrow(wide.size());
  int32_t* out = narrow.mutable_data();
  for (py::ssize_t i = 0; i < wide.size(); ++i) {
    const int64_t token = wide.data()[i];
    if (token < std::numeric_limits<int32_t>::min() ||
        token > std::numeric_limits<int32_t>::max()) {
      refuse_tokens(py::int_(token), "integers of 32 bits");
    }
    out[i] = static_cast<int32_t>(token);
  }
  return narrow;
}

std::span<const int32_t> span_of(const Int32Array& tokens) {
  return {tokens.data(), static_cast<size_t>(tokens.size())};
}

bool add(reuse::ChunkIndex& index, const std::string& key, const py::object& tokens) {
  const Int32Array array = int32_tokens(tokens);
  const py::gil_scoped_release release;
  return index.add(key, span_of(array));
}

py::list find(const reuse::ChunkIndex& index, const py::object& tokens) {
  const Int32Array array = int32_tokens(tokens);
  std::vector<reuse::ChunkMatch> matches;
  {
    const py::gil_scoped_release release;
    matches = index.find(span_of(array));
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
