#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/layout.h"
#include "phasekv/ops/compact.h"
#include "placed_kv.h"
#include "request_keys.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

// int64 [kv_heads, kept], contiguous.
Tensor index_table(const char* argument, const py::handle& object) {
  Tensor table = tensor_of(argument, object);
  if (table.dtype != "int64") {
    throw Error(ErrorCode::invalid_argument, std::string(argument) + ".dtype", table.dtype,
                "int64");
  }
  const bool is_contiguous = table.dims() == 2 && (table.shape[1] <= 1 || table.strides[1] == 1) &&
                             (table.shape[0] <= 1 || table.strides[0] == table.shape[1]);
  if (!is_contiguous) {
    throw Error(ErrorCode::invalid_argument, argument, table.shape_text(),
                "[kv_heads, kept] and contiguous");
  }
  return table;
}

CompactionMoves plan(const py::handle& kept_indices, int64_t tokens, const py::handle& sources) {
  const Tensor table = index_table("kept_indices", kept_indices);
  const int64_t kv_heads = table.shape[0];
  const int64_t kept = table.shape[1];
  const std::span<const int64_t> indices(static_cast<const int64_t*>(table.data),
                                         static_cast<size_t>(kv_heads * kept));
  int64_t* source_data = nullptr;
  if (!sources.is_none()) {
    const Tensor out = index_table("sources", sources);
    if (out.shape != table.shape) {
      throw Error(ErrorCode::invalid_argument, "sources", out.shape_text(), table.shape_text());
    }
    source_data = static_cast<int64_t*>(out.data);
  }
  const py::gil_scoped_release release;
  CompactionMoves moves = plan_compaction(indices, kv_heads, tokens);
  if (source_data != nullptr) {
    const std::vector<int64_t> list = compaction_sources(moves, kept, tokens);
    std::copy(list.begin(), list.end(), source_data);
  }
  return moves;
}

void compact_request(const PlacedKV& paged, const py::handle& block_table, int64_t first_token,
                     const CompactionMoves& moves) {
  const PagedKV& kv = paged.on_cpu("kv");
  if (static_cast<int64_t>(moves.starts.size()) != kv.key.num_heads + 1) {
    throw Error(ErrorCode::invalid_argument, "moves",
                "of " + std::to_string(moves.starts.size() - 1) + " KV heads",
                "those of " + std::to_string(kv.key.num_heads));
  }
  int64_t tokens = 0;
  for (const std::vector<int64_t>* indices : {&moves.from, &moves.to}) {
    for (const int64_t index : *indices) tokens = std::max(tokens, index + 1);
  }
  const CompactParams params = {
      .key = kv.key,
      .value = kv.value,
      .block_table = request_blocks(block_table, kv.key, end_of_keys(first_token, tokens)),
      .first_token = first_token,
      .starts = moves.starts.data(),
      .from = moves.from.data(),
      .to = moves.to.data()};
  const py::gil_scoped_release release;
  compact(params);
}

}  // namespace

void register_compact(py::module_& module) {
  py::class_<CompactionMoves>(module, "CompactionMoves",
                              "Moves from_indices[i] -> to_indices[i] of KV head h for "
                              "starts[h] <= i < starts[h + 1].")
      .def("__len__", [](const CompactionMoves& moves) { return moves.from.size(); })
      .def_readonly("starts", &CompactionMoves::starts)
      .def_readonly("from_indices", &CompactionMoves::from)
      .def_readonly("to_indices", &CompactionMoves::to);
  module.def("plan_compaction", &plan, py::kw_only(), py::arg("kept_indices"), py::arg("tokens"),
             py::arg("sources") = py::none(),
             "The least moves that bring kept_indices (int64 [KV heads, kept], ascending, of "
             "tokens) into the last slots. sources (int64, the same shape), if given, receives the "
             "index each slot of the window then has its key from.");
  module.def("compact", &compact_request, py::kw_only(), py::arg("kv"), py::arg("block_table"),
             py::arg("first_token"), py::arg("moves"),
             "Make the moves, whose index 0 is token first_token, in the keys and values of a "
             "request with the block ids block_table (int32 [M]).");
}

}  // namespace phasekv::bindings
