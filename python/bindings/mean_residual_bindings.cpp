#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/mean_residual.h"
#include "rope_bindings.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void compute(const py::handle& fresh, const py::handle& cached, const py::handle& fresh_rows,
             const py::handle& cached_rows, const py::handle& segment_starts,
             const py::handle& fresh_deltas, const py::handle& cached_deltas, const Rope* rope,
             const py::handle& out, const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("fresh", fresh, &call);
  const int64_t given = int64_list("fresh_rows", fresh_rows, &call).count;
  const SegmentStarts segments = segment_starts_of(segment_starts, given, &call);
  const int64_t probes = segments.tokens;
  const MeanResidualParams params = {
      .fresh = view,
      .cached = rows_of("cached", cached, &call),
      .fresh_rows = int64_list_of("fresh_rows", fresh_rows, probes, &call),
      .cached_rows = int64_list_of("cached_rows", cached_rows, probes, &call),
      .segment_starts = segments.starts,
      .num_segments = segments.num_segments,
      .fresh_deltas = optional_int64_list_of("fresh_deltas", fresh_deltas, probes, &call),
      .cached_deltas = optional_int64_list_of("cached_deltas", cached_deltas, probes, &call),
      .rope = view_of(rope, &call),
      .out = float_tensor("out", out, {segments.num_segments, view.heads, view.head_size}, &call)};
  call.run([&] { mean_residual(params); },
           [&](cuda::Stream on) { cuda::mean_residual(params, on); });
}

}  // namespace

void register_mean_residual(py::module_& module) {
  module.def(
      "mean_residual", &compute, py::kw_only(), py::arg("fresh"), py::arg("cached"),
      py::arg("fresh_rows"), py::arg("cached_rows"), py::arg("segment_starts"),
      py::arg("fresh_deltas") = py::none(), py::arg("cached_deltas") = py::none(),
      py::arg("rope") = py::none(), py::arg("out"), py::arg("stream") = py::none(),
      "Mean over each segment's probes of fresh - cached, after moving either by its deltas, "
      "into out (float32 [S, H, D]).");
}

}  // namespace phasekv::bindings
