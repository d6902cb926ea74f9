#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/ops/triattention_score.h"
#include "placed_kv.h"
#include "request_keys.h"
#include "rope_bindings.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

int64_t rows_of_table(const char* argument, const py::handle& object, OpCall& call) {
  const Tensor table = tensor_of(argument, object, &call);
  if (table.dims() != 2) {
    throw Error(ErrorCode::invalid_argument, argument, table.shape_text(),
                "a tensor of two dimensions");
  }
  return table.shape[0];
}

int64_t columns_of_table(const char* argument, const py::handle& object, OpCall& call) {
  rows_of_table(argument, object, call);
  return tensor_of(argument, object, &call).shape[1];
}

void make_query(const Rope& rope, const py::handle& mean_query, const py::handle& mean_norm,
                double magnitude, int64_t time, const py::handle& synthetic_query,
                const py::handle& norm_weights) {
  OpCall call{py::none()};
  const int64_t query_heads = rows_of_table("synthetic_query", synthetic_query, call);
  const int64_t head_size = columns_of_table("synthetic_query", synthetic_query, call);
  call.refuse_cuda("a query is made on the CPU; copy it to the device of the keys");
  const int64_t pairs = rope.rotary_dim() / 2;
  const TriattentionQueryParams params = {
      .query_heads = query_heads,
      .head_size = head_size,
      .rope = rope.view(),
      .mean_query = float_tensor("mean_query", mean_query, {query_heads, pairs, 2}),
      .mean_norm = float_tensor("mean_norm", mean_norm, {query_heads, pairs}),
      .magnitude = magnitude,
      .time = time,
      .synthetic_query = float_tensor("synthetic_query", synthetic_query, {query_heads, head_size}),
      .norm_weights = float_tensor("norm_weights", norm_weights, {query_heads, pairs})};
  const py::gil_scoped_release release;
  triattention_query(params);
}

void score(const PlacedView& paged, const py::handle& block_table, int64_t first_token,
           int64_t tokens, const py::handle& synthetic_query, const py::handle& norm_weights,
           const std::string& pairing, bool normalize, bool group_mean, const py::handle& scores,
           const py::handle& stream) {
  OpCall call(stream);
  const PagedView& key = paged.in(call, "key");
  const int64_t query_heads = rows_of_table("synthetic_query", synthetic_query, call);
  const int64_t pairs = columns_of_table("norm_weights", norm_weights, call);
  const TriattentionScoreParams params = {
      .key = key,
      .block_table = request_blocks(block_table, key, end_of_keys(first_token, tokens), &call),
      .first_token = first_token,
      .tokens = tokens,
      .synthetic_query =
          float_tensor("synthetic_query", synthetic_query, {query_heads, key.head_size}, &call),
      .norm_weights = float_tensor("norm_weights", norm_weights, {query_heads, pairs}, &call),
      .query_heads = query_heads,
      .rotary_dim = 2 * pairs,
      .pairing = parse_pairing(pairing),
      .normalize = normalize,
      .group_mean = group_mean,
      .scores = float_tensor("scores", scores, {key.num_heads, tokens}, &call)};
  const cuda::Workspace workspace = call.workspace(
      synthetic_query, [&] { return cuda::triattention_score_workspace_bytes(params); });
  call.run([&] { triattention_score(params); },
           [&](cuda::Stream on) { cuda::triattention_score(params, workspace, on); });
}

}  // namespace

void register_triattention_score(py::module_& module) {
  module.def("triattention_query", &make_query, py::kw_only(), py::arg("rope"),
             py::arg("mean_query"), py::arg("mean_norm"), py::arg("magnitude") = 1.0,
             py::arg("time"), py::arg("synthetic_query"), py::arg("norm_weights"),
             "From calibrated mean_query (float32 [H, rotary_dim / 2, 2], pairs before RoPE as "
             "real and imaginary) and mean_norm (float32 [H, rotary_dim / 2]), the "
             "synthetic_query (float32 [H, D]) and norm_weights (float32 [H, rotary_dim / 2]) of "
             "position time.");
  module.def("triattention_score", &score, py::kw_only(), py::arg("key"), py::arg("block_table"),
             py::arg("first_token"), py::arg("tokens"), py::arg("synthetic_query"),
             py::arg("norm_weights"), py::arg("pairing") = "neox", py::arg("normalize") = false,
             py::arg("group_mean") = false, py::arg("scores"), py::arg("stream") = py::none(),
             "TriAttention's score of the keys [first_token, first_token + tokens) of a request "
             "with the block ids block_table (int32 [M]), into scores (float32 "
             "[KV heads, tokens]).");
}

}  // namespace phasekv::bindings
