#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/ops/push_queries.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void push(const py::handle& query, const py::handle& rows, const py::handle& entries,
          const py::handle& buffer, const py::handle& stream) {
  OpCall call(stream);
  const List<int64_t> row_list = int64_list("rows", rows, &call);
  const PushQueriesParams params = {
      .query = rows_of("query", query, &call),
      .rows = row_list.data,
      .entries = int64_list_of("entries", entries, row_list.count, &call),
      .count = row_list.count,
      .buffer = rows_of("buffer", buffer, &call)};
  call.run([&] { push_queries(params); }, [&](cuda::Stream on) { cuda::push_queries(params, on); });
}

}  // namespace

void register_push_queries(py::module_& module) {
  module.def("push_queries", &push, py::kw_only(), py::arg("query"), py::arg("rows"),
             py::arg("entries"), py::arg("buffer"), py::arg("stream") = py::none(),
             "Copy rows (int64 [N]) of query [T, H, D] to the entries (int64 [N], none twice) of "
             "buffer [E, H, D], converting between their dtypes.");
}

}  // namespace phasekv::bindings
