#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/layout.h"
#include "phasekv/ops/attend_rows.h"
#include "placed_kv.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

Tensor block_table_of(const py::handle& object, OpCall& call) {
  Tensor table = tensor_of("block_table", object, &call);
  if (table.dtype != "int32") {
    throw Error(ErrorCode::invalid_argument, "block_table.dtype", table.dtype, "int32");
  }
  if (table.dims() != 2 || (table.shape[1] > 1 && table.strides[1] != 1)) {
    throw Error(ErrorCode::invalid_argument, "block_table", table.shape_text(),
                "[requests, blocks] with adjacent blocks");
  }
  return table;
}

void attend(const py::handle& query, const PlacedKV& paged, const py::handle& block_table,
            const py::handle& row_requests, const py::handle& row_limits, float scale,
            const py::handle& out, const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("query", query, &call);
  const PagedKV& kv = paged.in(call, "kv");
  const Tensor table = block_table_of(block_table, call);
  const List<int32_t> requests = int32_list("row_requests", row_requests, &call);
  if (requests.count != view.tokens) {
    throw Error(ErrorCode::invalid_argument, "row_requests",
                "[" + std::to_string(requests.count) + "]",
                "[" + std::to_string(view.tokens) + "]");
  }
  // A line may be a part of a longer one; only its own entries may be read.
  const int64_t blocks = table.shape[1];
  if (table.shape[0] > 1 && table.strides[0] < blocks) {
    throw Error(ErrorCode::invalid_argument, "block_table.stride", std::to_string(table.strides[0]),
                "at least " + std::to_string(blocks));
  }
  const AttendRowsParams params = {
      .query = view,
      .key = kv.key,
      .value = kv.value,
      .block_table = static_cast<const int32_t*>(table.data),
      .num_requests = table.shape[0],
      .block_table_stride = table.shape[0] > 1 ? table.strides[0] : blocks,
      .row_requests = requests.data,
      .row_limits = int64_list_of("row_limits", row_limits, view.tokens, &call),
      .scale = scale,
      .out = rows_of("out", out, &call)};
  const int64_t capacity = blocks * kv.key.block_size;
  for (int64_t i = 0; !call.is_on_cuda() && i < view.tokens; ++i) {
    if (params.row_limits[i] > capacity) {
      throw Error(ErrorCode::invalid_argument, "row_limits[" + std::to_string(i) + "]",
                  std::to_string(params.row_limits[i]),
                  "at most " + std::to_string(capacity) + ", the block table's tokens");
    }
  }
  const cuda::Workspace workspace =
      call.workspace(query, [&] { return cuda::attend_rows_workspace_bytes(params); });
  call.run([&] { attend_rows(params); },
           [&](cuda::Stream on) { cuda::attend_rows(params, workspace, on); });
}

}  // namespace

void register_attend_rows(py::module_& module) {
  module.def(
      "attend_rows", &attend, py::kw_only(), py::arg("query"), py::arg("kv"),
      py::arg("block_table"), py::arg("row_requests"), py::arg("row_limits"), py::arg("scale"),
      py::arg("out"), py::arg("stream") = py::none(),
      "Attention of query rows [T, H, D] over the first row_limits (int64 [T]) keys of their "
      "requests row_requests (int32 [T]), whose blocks are block_table (int32 [R, M]).");
}

}  // namespace phasekv::bindings
