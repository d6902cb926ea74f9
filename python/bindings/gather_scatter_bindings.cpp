#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/gather_scatter.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void gather(const PagedView& blocks, const py::handle& slots, const py::handle& out) {
  const RowsView rows = rows_of("out", out);
  const GatherBlocksParams params = {
      .blocks = blocks, .slots = int64_list_of("slots", slots, rows.tokens), .rows = rows};
  const py::gil_scoped_release release;
  gather_blocks(params);
}

void scatter(const py::handle& rows, const py::handle& slots, const PagedView& blocks) {
  const RowsView view = rows_of("rows", rows);
  const ScatterBlocksParams params = {
      .rows = view, .slots = int64_list_of("slots", slots, view.tokens), .blocks = blocks};
  const py::gil_scoped_release release;
  scatter_blocks(params);
}

}  // namespace

void register_gather_scatter(py::module_& module) {
  module.def("gather_blocks", &gather, py::kw_only(), py::arg("blocks"), py::arg("slots"),
             py::arg("out"), "Copy the slots (int64 [T]) of a paged cache to out [T, H, D].");
  module.def("scatter_blocks", &scatter, py::kw_only(), py::arg("rows"), py::arg("slots"),
             py::arg("blocks"),
             "Copy rows [T, H, D] to the slots (int64 [T], -1 is skipped) of a paged cache.");
}

}  // namespace phasekv::bindings
