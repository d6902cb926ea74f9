#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/ops/select_top.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void check_count(const char* argument, int64_t count, int64_t expected) {
  if (count != expected) {
    throw Error(ErrorCode::invalid_argument, argument, "[" + std::to_string(count) + "]",
                "[" + std::to_string(expected) + "]");
  }
}

std::vector<int64_t> select(const py::handle& scores, const py::handle& segment_starts,
                            const py::handle& counts, const py::handle& pinned) {
  const SegmentStarts segments = segment_starts_of(segment_starts);
  const List<float> score_list = float_list("scores", scores);
  check_count("scores", score_list.count, segments.tokens);
  SelectTopParams params = {.scores = score_list.data,
                            .segment_starts = segments.starts,
                            .num_segments = segments.num_segments,
                            .counts = int64_list_of("counts", counts, segments.num_segments),
                            .pinned = nullptr};
  if (!pinned.is_none()) {
    const List<uint8_t> pinned_list = uint8_list("pinned", pinned);
    check_count("pinned", pinned_list.count, segments.tokens);
    params.pinned = pinned_list.data;
  }
  const py::gil_scoped_release release;
  return select_top(params);
}

}  // namespace

void register_select_top(py::module_& module) {
  module.def(
      "select_top", &select, py::kw_only(), py::arg("scores"), py::arg("segment_starts"),
      py::arg("counts"), py::arg("pinned") = py::none(),
      "Indices of the highest scores (float32 [T]) per segment, ascending: counts (int64 [S]) "
      "each, pinned ones (uint8 or bool [T]) first.");
}

}  // namespace phasekv::bindings
