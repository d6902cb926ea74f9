#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/ops/score_keys.h"
#include "placed_kv.h"
#include "request_keys.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

GroupReduction group_reduction_of(const std::string& name) {
  if (name == "max_logit") return GroupReduction::max_logit;
  if (name == "max") return GroupReduction::max;
  if (name == "mean") return GroupReduction::mean;
  throw Error(ErrorCode::invalid_argument, "group", name, "max_logit, max or mean");
}

Pooling pooling_of(const std::string& name) {
  if (name == "none") return Pooling::none;
  if (name == "max") return Pooling::max;
  if (name == "average") return Pooling::average;
  throw Error(ErrorCode::invalid_argument, "pooling", name, "none, max or average");
}

void score(const py::handle& query, const PlacedView& paged, const py::handle& block_table,
           int64_t first_token, int64_t tokens, const py::handle& query_limits,
           int64_t excluded_recent, const std::string& group, const std::string& pooling,
           int64_t pooling_kernel, float scale, const py::handle& scores,
           const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("query", query, &call);
  const PagedView& key = paged.in(call, "key");
  const ScoreKeysParams params = {
      .query = view,
      .key = key,
      .block_table = request_blocks(block_table, key, end_of_keys(first_token, tokens), &call),
      .first_token = first_token,
      .tokens = tokens,
      .query_limits = optional_int64_list_of("query_limits", query_limits, view.tokens, &call),
      .excluded_recent = excluded_recent,
      .group = group_reduction_of(group),
      .pooling = pooling_of(pooling),
      .pooling_kernel = pooling_kernel,
      .scale = scale,
      .scores = float_tensor("scores", scores, {key.num_heads, tokens}, &call)};
  const cuda::Workspace workspace =
      call.workspace(query, [&] { return cuda::score_keys_workspace_bytes(params); });
  call.run([&] { score_keys(params); },
           [&](cuda::Stream on) { cuda::score_keys(params, workspace, on); });
}

}  // namespace

void register_score_keys(py::module_& module) {
  module.def("score_keys", &score, py::kw_only(), py::arg("query"), py::arg("key"),
             py::arg("block_table"), py::arg("first_token"), py::arg("tokens"),
             py::arg("query_limits") = py::none(), py::arg("excluded_recent") = 0,
             py::arg("group") = "max_logit", py::arg("pooling") = "none",
             py::arg("pooling_kernel") = 1, py::arg("scale"), py::arg("scores"),
             py::arg("stream") = py::none(),
             "Mean softmax of query [Q, H, D] over the keys [first_token, first_token + tokens) of "
             "a request with the block ids block_table (int32 [M]), into scores (float32 "
             "[KV heads, tokens]); see include/phasekv/ops/score_keys.h.");
}

}  // namespace phasekv::bindings
