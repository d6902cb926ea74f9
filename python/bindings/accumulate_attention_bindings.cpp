#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/ops/accumulate_attention.h"
#include "placed_kv.h"
#include "request_keys.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

const int32_t* phases_of(const py::handle& object, int64_t queries, OpCall& call) {
  const List<int32_t> phases = int32_list("query_phases", object, &call);
  if (phases.count != queries) {
    throw Error(ErrorCode::invalid_argument, "query_phases",
                "[" + std::to_string(phases.count) + "]", "[" + std::to_string(queries) + "]");
  }
  return phases.data;
}

// float32 [num_phases, kv_heads, tokens or more], maybe of longer rows.
Tensor sums_of(const py::handle& object, const PagedView& key, int64_t tokens, OpCall& call) {
  Tensor sums = tensor_of("sums", object, &call);
  if (sums.dtype != "float32") {
    throw Error(ErrorCode::invalid_argument, "sums.dtype", sums.dtype, "float32");
  }
  if (sums.dims() != 3 || sums.shape[1] != key.num_heads || sums.shape[2] < tokens) {
    throw Error(
        ErrorCode::invalid_argument, "sums", sums.shape_text(),
        "[phases, " + std::to_string(key.num_heads) + ", at least " + std::to_string(tokens) + "]");
  }
  const bool has_rows = (sums.shape[2] <= 1 || sums.strides[2] == 1) &&
                        sums.strides[1] >= sums.shape[2] &&
                        (sums.shape[0] <= 1 || sums.strides[0] == sums.shape[1] * sums.strides[1]);
  if (!has_rows) {
    throw Error(ErrorCode::invalid_argument, "sums", "of other strides",
                "rows of adjacent entries, all equally far apart");
  }
  return sums;
}

void accumulate(const py::handle& query, const py::handle& query_limits,
                const py::handle& query_phases, const PlacedView& paged,
                const py::handle& block_table, int64_t first_token, int64_t tokens, float scale,
                const py::handle& sums, const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("query", query, &call);
  const PagedView& key = paged.in(call, "key");
  const Tensor table = sums_of(sums, key, tokens, call);
  const AccumulateAttentionParams params = {
      .query = view,
      .query_limits = int64_list_of("query_limits", query_limits, view.tokens, &call),
      .query_phases = phases_of(query_phases, view.tokens, call),
      .num_phases = table.shape[0],
      .key = key,
      .block_table = request_blocks(block_table, key, end_of_keys(first_token, tokens), &call),
      .first_token = first_token,
      .tokens = tokens,
      .scale = scale,
      .sums = static_cast<float*>(table.data),
      .sums_stride = table.strides[1]};
  const cuda::Workspace workspace =
      call.workspace(query, [&] { return cuda::accumulate_attention_workspace_bytes(params); });
  call.run([&] { accumulate_attention(params); },
           [&](cuda::Stream on) { cuda::accumulate_attention(params, workspace, on); });
}

}  // namespace

void register_accumulate_attention(py::module_& module) {
  module.def("accumulate_attention", &accumulate, py::kw_only(), py::arg("query"),
             py::arg("query_limits"), py::arg("query_phases"), py::arg("key"),
             py::arg("block_table"), py::arg("first_token"), py::arg("tokens"), py::arg("scale"),
             py::arg("sums"), py::arg("stream") = py::none(),
             "Add the attention of query [Q, H, D], over the first query_limits (int64 [Q]) of the "
             "keys [first_token, first_token + tokens) of a request, to sums (float32 "
             "[phases, KV heads, at least tokens]) of query_phases (int32 [Q]).");
}

}  // namespace phasekv::bindings
