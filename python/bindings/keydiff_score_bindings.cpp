#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/keydiff_score.h"
#include "placed_kv.h"
#include "request_keys.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void compute(const PlacedView& paged, const py::handle& block_table, int64_t first_token,
             int64_t tokens, const py::handle& scores, const py::handle& stream) {
  OpCall call(stream);
  const PagedView& key = paged.in(call, "key");
  const KeydiffScoreParams params = {
      .key = key,
      .block_table = request_blocks(block_table, key, end_of_keys(first_token, tokens), &call),
      .first_token = first_token,
      .tokens = tokens,
      .scores = float_tensor("scores", scores, {key.num_heads, tokens}, &call)};
  const cuda::Workspace workspace =
      call.workspace(scores, [&] { return cuda::keydiff_score_workspace_bytes(params); });
  call.run([&] { keydiff_score(params); },
           [&](cuda::Stream on) { cuda::keydiff_score(params, workspace, on); });
}

}  // namespace

void register_keydiff_score(py::module_& module) {
  module.def("keydiff_score", &compute, py::kw_only(), py::arg("key"), py::arg("block_table"),
             py::arg("first_token"), py::arg("tokens"), py::arg("scores"),
             py::arg("stream") = py::none(),
             "KeyDiff's score of the keys [first_token, first_token + tokens) of a request with "
             "the block ids block_table (int32 [M]), into scores (float32 [KV heads, tokens]).");
}

}  // namespace phasekv::bindings
