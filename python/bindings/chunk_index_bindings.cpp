// ChunkIndex for Python: tokens in, matches out as tuples.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "phasekv/reuse/chunk_index.h"
#include "tokens.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

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
