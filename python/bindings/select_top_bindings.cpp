#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "op_call.h"
#include "phasekv/cuda.h"
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

struct Scores {
  SelectTopParams params;
  int64_t count = 0;
};

Scores scores_of(const py::handle& scores, const py::handle& segment_starts,
                 const py::handle& counts, const py::handle& pinned, OpCall* call) {
  const List<float> score_list = float_list("scores", scores, call);
  const SegmentStarts segments = segment_starts_of(segment_starts, score_list.count, call);
  check_count("scores", score_list.count, segments.tokens);
  SelectTopParams params = {.scores = score_list.data,
                            .segment_starts = segments.starts,
                            .num_segments = segments.num_segments,
                            .counts = int64_list_of("counts", counts, segments.num_segments, call),
                            .pinned = nullptr};
  if (!pinned.is_none()) {
    const List<uint8_t> pinned_list = uint8_list("pinned", pinned, call);
    check_count("pinned", pinned_list.count, segments.tokens);
    params.pinned = pinned_list.data;
  }
  return {params, score_list.count};
}

std::vector<int64_t> select(const py::handle& scores, const py::handle& segment_starts,
                            const py::handle& counts, const py::handle& pinned) {
  const SelectTopParams params = scores_of(scores, segment_starts, counts, pinned, nullptr).params;
  const py::gil_scoped_release release;
  return select_top(params);
}

// What the CUDA op writes, on the CPU.
void write_chosen(const SelectTopParams& params, const cuda::SelectTopOutput& output) {
  const std::vector<int64_t> chosen = select_top(params);
  std::copy(chosen.begin(), chosen.end(), output.chosen);
  for (int64_t segment = 0; segment <= params.num_segments; ++segment) {
    const auto end = std::lower_bound(chosen.begin(), chosen.end(), params.segment_starts[segment]);
    output.chosen_starts[segment] = end - chosen.begin();
  }
  *output.first_nan = -1;
}

int64_t* int64_output(const char* argument, const py::handle& object, int64_t count, OpCall* call) {
  const List<int64_t> list = int64_list(argument, object, call);
  check_count(argument, list.count, count);
  return list.data;
}

void select_into(const py::handle& scores, const py::handle& segment_starts,
                 const py::handle& counts, const py::handle& pinned, const py::handle& chosen,
                 const py::handle& chosen_starts, const py::handle& first_nan,
                 const py::handle& stream) {
  OpCall call(stream);
  const auto [params, count] = scores_of(scores, segment_starts, counts, pinned, &call);
  const cuda::SelectTopOutput output = {
      .chosen = int64_output("chosen", chosen, count, &call),
      .chosen_starts = int64_output("chosen_starts", chosen_starts, params.num_segments + 1, &call),
      .first_nan = int64_output("first_nan", first_nan, 1, &call)};
  const cuda::Workspace workspace = call.workspace(
      scores, [&, &params = params] { return cuda::select_top_workspace_bytes(params); });
  call.run(
      [&, &params = params] { write_chosen(params, output); },
      [&, &params = params](cuda::Stream on) { cuda::select_top(params, output, workspace, on); });
}

}  // namespace

void register_select_top(py::module_& module) {
  module.def(
      "select_top", &select, py::kw_only(), py::arg("scores"), py::arg("segment_starts"),
      py::arg("counts"), py::arg("pinned") = py::none(),
      "Indices of the highest scores (float32 [T]) per segment, ascending: counts (int64 [S]) "
      "each, pinned ones (uint8 or bool [T]) first.");
  module.def(
      "select_top", &select_into, py::kw_only(), py::arg("scores"), py::arg("segment_starts"),
      py::arg("counts"), py::arg("pinned") = py::none(), py::arg("chosen"),
      py::arg("chosen_starts"), py::arg("first_nan"), py::arg("stream") = py::none(),
      "The same into chosen (int64 [T], of which chosen_starts[S] are written), where the tensors "
      "lie: chosen_starts (int64 [S + 1]) says where each segment's begin. first_nan (int64 [1]) "
      "is "
      "-1; on a device, which refuses no score that is not a number, the first one's index, and "
      "what was chosen means nothing.");
}

}  // namespace phasekv::bindings
