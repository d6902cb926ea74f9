#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/key_redundancy.h"
#include "placed_kv.h"
#include "request_keys.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void compute(const PlacedView& paged, const py::handle& block_table, int64_t first_token,
             int64_t tokens, const py::handle& positions, float threshold,
             const py::handle& redundancy, const py::handle& stream) {
  OpCall call(stream);
  const PagedView& key = paged.in(call, "key");
  const KeyRedundancyParams params = {
      .key = key,
      .block_table = request_blocks(block_table, key, end_of_keys(first_token, tokens), &call),
      .first_token = first_token,
      .tokens = tokens,
      .positions = key_positions(positions, key, tokens, call),
      .threshold = threshold,
      .redundancy = float_tensor("redundancy", redundancy, {key.num_heads, tokens}, &call)};
  const cuda::Workspace workspace =
      call.workspace(redundancy, [&] { return cuda::key_redundancy_workspace_bytes(params); });
  call.run([&] { key_redundancy(params); },
           [&](cuda::Stream on) { cuda::key_redundancy(params, workspace, on); });
}

}  // namespace

void register_key_redundancy(py::module_& module) {
  module.def("key_redundancy", &compute, py::kw_only(), py::arg("key"), py::arg("block_table"),
             py::arg("first_token"), py::arg("tokens"), py::arg("positions") = py::none(),
             py::arg("threshold") = 0.5F, py::arg("redundancy"), py::arg("stream") = py::none(),
             "R-KV's redundancy of the keys [first_token, first_token + tokens) of a request with "
             "the block ids block_table (int32 [M]) and original positions (int32 "
             "[KV heads, tokens]), into redundancy (float32 [KV heads, tokens]).");
}

}  // namespace phasekv::bindings
