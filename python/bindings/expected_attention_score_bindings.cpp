#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/expected_attention_score.h"
#include "placed_kv.h"
#include "request_keys.h"
#include "rope_bindings.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void score(const py::handle& query, const py::handle& query_positions, const PlacedKV& paged,
           const py::handle& block_table, int64_t first_token, int64_t tokens,
           const py::handle& positions, int64_t sinks, const Rope& rope, int64_t next_position,
           int64_t horizon, float scale, const py::handle& scores, const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("query", query, &call);
  const PagedKV& kv = paged.in(call, "kv");
  const ExpectedAttentionScoreParams params = {
      .key = kv.key,
      .value = kv.value,
      .block_table = request_blocks(block_table, kv.key, end_of_keys(first_token, tokens), &call),
      .first_token = first_token,
      .tokens = tokens,
      .positions = key_positions(positions, kv.key, tokens, call),
      .query = view,
      .query_positions = int64_list_of("query_positions", query_positions, view.tokens, &call),
      .sinks = sinks,
      .rope = rope.view(&call),
      .next_position = next_position,
      .horizon = horizon,
      .scale = scale,
      .scores = float_tensor("scores", scores, {kv.key.num_heads, tokens}, &call)};
  const cuda::Workspace workspace =
      call.workspace(query, [&] { return cuda::expected_attention_score_workspace_bytes(params); });
  call.run([&] { expected_attention_score(params); },
           [&](cuda::Stream on) { cuda::expected_attention_score(params, workspace, on); });
}

}  // namespace

void register_expected_attention_score(py::module_& module) {
  const ExpectedAttentionScoreParams defaults;
  module.def("expected_attention_score", &score, py::kw_only(), py::arg("query"),
             py::arg("query_positions"), py::arg("kv"), py::arg("block_table"),
             py::arg("first_token"), py::arg("tokens"), py::arg("positions") = py::none(),
             py::arg("sinks") = defaults.sinks, py::arg("rope"), py::arg("next_position"),
             py::arg("horizon") = defaults.horizon, py::arg("scale"), py::arg("scores"),
             py::arg("stream") = py::none(),
             "ExpectedAttention's score, by query [Q, H, D] at query_positions (int64 [Q]), of the "
             "keys and values [first_token, first_token + tokens) of a request with the block ids "
             "block_table (int32 [M]) and original positions (int32 [KV heads, tokens]), into "
             "scores (float32 [KV heads, tokens]); see "
             "include/phasekv/ops/expected_attention_score.h.");
}

}  // namespace phasekv::bindings
