#include <pybind11/pybind11.h>

#include <vector>

#include "bindings.h"
#include "phasekv/ops/apply_shift.h"
#include "placed_kv.h"
#include "rope_bindings.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

const float* optional_floats(const char* argument, const py::handle& object,
                             const std::vector<int64_t>& shape, OpCall& call) {
  return object.is_none() ? nullptr : float_tensor(argument, object, shape, &call);
}

void apply(const py::handle& cached, const py::handle& cached_rows, const py::handle& slots,
           const py::handle& segment_starts, const py::handle& deltas, const Rope* rope,
           const py::handle& mean, const py::handle& weights, const py::handle& mean_deltas,
           const PlacedView& blocks, const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("cached", cached, &call);
  const int64_t given = int64_list("slots", slots, &call).count;
  const SegmentStarts segments = segment_starts_of(segment_starts, given, &call);
  const int64_t tokens = segments.tokens;
  const ApplyShiftParams params = {
      .cached = view,
      .cached_rows = int64_list_of("cached_rows", cached_rows, tokens, &call),
      .slots = int64_list_of("slots", slots, tokens, &call),
      .segment_starts = segments.starts,
      .num_segments = segments.num_segments,
      .deltas = optional_int64_list_of("deltas", deltas, segments.num_segments, &call),
      .rope = view_of(rope, &call),
      .mean =
          optional_floats("mean", mean, {segments.num_segments, view.heads, view.head_size}, call),
      .weights = optional_floats("weights", weights, {tokens}, call),
      .mean_deltas = optional_int64_list_of("mean_deltas", mean_deltas, tokens, &call),
      .blocks = blocks.in(call, "blocks")};
  call.run([&] { apply_shift(params); },
           [&](cuda::Stream on) { cuda::apply_shift(params, tokens, on); });
}

}  // namespace

void register_apply_shift(py::module_& module) {
  module.def("apply_shift", &apply, py::kw_only(), py::arg("cached"), py::arg("cached_rows"),
             py::arg("slots"), py::arg("segment_starts"), py::arg("deltas") = py::none(),
             py::arg("rope") = py::none(), py::arg("mean") = py::none(),
             py::arg("weights") = py::none(), py::arg("mean_deltas") = py::none(),
             py::arg("blocks"), py::arg("stream") = py::none(),
             "Move cached rows by their segment's delta, add weight * mean[segment] and write them "
             "to the slots of a paged cache; see include/phasekv/ops/apply_shift.h.");
}

}  // namespace phasekv::bindings
