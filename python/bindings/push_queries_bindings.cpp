#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/ops/push_queries.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void push(const py::handle& query, const py::handle& rows, const py::handle& entries,
          const py::handle& buffer) {
  const List<int64_t> row_list = int64_list("rows", rows);
  const PushQueriesParams params = {.query = rows_of("query", query),
                                    .rows = row_list.data,
                                    .entries = int64_list_of("entries", entries, row_list.count),
                                    .count = row_list.count,
                                    .buffer = rows_of("buffer", buffer)};
  const py::gil_scoped_release release;
  push_queries(params);
}

}  // namespace

void register_push_queries(py::module_& module) {
  module.def("push_queries", &push, py::kw_only(), py::arg("query"), py::arg("rows"),
             py::arg("entries"), py::arg("buffer"),
             "Copy rows (int64 [N]) of query [T, H, D] to the entries (int64 [N], none twice) of "
             "buffer [E, H, D], converting between their dtypes.");
}

}  // namespace phasekv::bindings
