#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/gather_scatter.h"
#include "placed_kv.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void gather(const PlacedView& blocks, const py::handle& slots, const py::handle& out,
            const py::handle& stream) {
  OpCall call(stream);
  const RowsView rows = rows_of("out", out, &call);
  const GatherBlocksParams params = {.blocks = blocks.in(call, "blocks"),
                                     .slots = int64_list_of("slots", slots, rows.tokens, &call),
                                     .rows = rows};
  call.run([&] { gather_blocks(params); },
           [&](cuda::Stream on) { cuda::gather_blocks(params, on); });
}

void scatter(const py::handle& rows, const py::handle& slots, const PlacedView& blocks,
             const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("rows", rows, &call);
  const ScatterBlocksParams params = {.rows = view,
                                      .slots = int64_list_of("slots", slots, view.tokens, &call),
                                      .blocks = blocks.in(call, "blocks")};
  call.run([&] { scatter_blocks(params); },
           [&](cuda::Stream on) { cuda::scatter_blocks(params, on); });
}

}  // namespace

void register_gather_scatter(py::module_& module) {
  module.def("gather_blocks", &gather, py::kw_only(), py::arg("blocks"), py::arg("slots"),
             py::arg("out"), py::arg("stream") = py::none(),
             "Copy the slots (int64 [T]) of a paged cache to out [T, H, D].");
  module.def("scatter_blocks", &scatter, py::kw_only(), py::arg("rows"), py::arg("slots"),
             py::arg("blocks"), py::arg("stream") = py::none(),
             "Copy rows [T, H, D] to the slots (int64 [T], -1 is skipped) of a paged cache.");
}

}  // namespace phasekv::bindings
