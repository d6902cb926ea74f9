#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "op_call.h"
#include "phasekv/cuda.h"
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

// Moves that were planned on the CPU, and where an op finds them.
class PlacedMoves {
 public:
  explicit PlacedMoves(CompactionMoves moves) : moves_(std::move(moves)) {}

  const CompactionMoves& moves() const { return moves_; }

  // The same moves for a cache on a device, whose lists are copies there. Their memory is kept.
  PlacedMoves on(const py::object& starts, const py::object& from, const py::object& to) const {
    OpCall call{py::none()};
    const auto moves = static_cast<int64_t>(moves_.from.size());
    PlacedMoves placed = *this;
    placed.starts_ =
        int64_list_of("starts", starts, static_cast<int64_t>(moves_.starts.size()), &call);
    placed.from_ = int64_list_of("from_indices", from, moves, &call);
    placed.to_ = int64_list_of("to_indices", to, moves, &call);
    placed.device_ = py::str(starts.attr("device")).cast<std::string>();
    placed.lists_ = {starts, from, to};
    return placed;
  }

  // `params` with these moves, for the device of the call's tensors.
  CompactParams in(OpCall& call, CompactParams params) const {
    call.place("moves", device_);
    const bool is_placed = !lists_.empty();
    params.starts = is_placed ? starts_ : moves_.starts.data();
    params.from = is_placed ? from_ : moves_.from.data();
    params.to = is_placed ? to_ : moves_.to.data();
    return params;
  }

  // Indices as far as the moves go, and the moves of the head that has the most.
  int64_t tokens() const {
    int64_t tokens = 0;
    for (const std::vector<int64_t>* indices : {&moves_.from, &moves_.to}) {
      for (const int64_t index : *indices) tokens = std::max(tokens, index + 1);
    }
    return tokens;
  }
  int64_t most_moves() const {
    int64_t most = 0;
    for (size_t head = 0; head + 1 < moves_.starts.size(); ++head) {
      most = std::max(most, moves_.starts[head + 1] - moves_.starts[head]);
    }
    return most;
  }

 private:
  CompactionMoves moves_;
  std::vector<py::object> lists_;  // empty: on the CPU, those of moves_
  const int64_t* starts_ = nullptr;
  const int64_t* from_ = nullptr;
  const int64_t* to_ = nullptr;
  std::string device_ = "cpu";
};

PlacedMoves plan(const py::handle& kept_indices, int64_t tokens, const py::handle& sources) {
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
  return PlacedMoves(std::move(moves));
}

void compact_request(const PlacedKV& paged, const py::handle& block_table, int64_t first_token,
                     const PlacedMoves& moves, const py::handle& stream) {
  OpCall call(stream);
  const PagedKV& kv = paged.in(call, "kv");
  const auto heads = static_cast<int64_t>(moves.moves().starts.size()) - 1;
  if (heads != kv.key.num_heads) {
    throw Error(ErrorCode::invalid_argument, "moves", "of " + std::to_string(heads) + " KV heads",
                "those of " + std::to_string(kv.key.num_heads));
  }
  const CompactParams params =
      moves.in(call, {.key = kv.key,
                      .value = kv.value,
                      .block_table = request_blocks(
                          block_table, kv.key, end_of_keys(first_token, moves.tokens()), &call),
                      .first_token = first_token});
  call.run([&] { compact(params); },
           [&](cuda::Stream on) { cuda::compact(params, moves.most_moves(), on); });
}

}  // namespace

void register_compact(py::module_& module) {
  py::class_<PlacedMoves>(module, "CompactionMoves",
                          "Moves from_indices[i] -> to_indices[i] of KV head h for "
                          "starts[h] <= i < starts[h + 1].")
      .def("__len__", [](const PlacedMoves& placed) { return placed.moves().from.size(); })
      .def("on", &PlacedMoves::on, py::kw_only(), py::arg("starts"), py::arg("from_indices"),
           py::arg("to_indices"),
           "The same moves for a cache on the device where copies of the three lists (int64) are.")
      .def_property_readonly("starts",
                             [](const PlacedMoves& placed) { return placed.moves().starts; })
      .def_property_readonly("from_indices",
                             [](const PlacedMoves& placed) { return placed.moves().from; })
      .def_property_readonly("to_indices",
                             [](const PlacedMoves& placed) { return placed.moves().to; });
  module.def("plan_compaction", &plan, py::kw_only(), py::arg("kept_indices"), py::arg("tokens"),
             py::arg("sources") = py::none(),
             "The least moves that bring kept_indices (int64 [KV heads, kept], ascending, of "
             "tokens) into the last slots. sources (int64, the same shape), if given, receives the "
             "index each slot of the window then has its key from.");
  module.def("compact", &compact_request, py::kw_only(), py::arg("kv"), py::arg("block_table"),
             py::arg("first_token"), py::arg("moves"), py::arg("stream") = py::none(),
             "Make the moves, whose index 0 is token first_token, in the keys and values of a "
             "request with the block ids block_table (int32 [M]). On a device, with moves.on().");
}

}  // namespace phasekv::bindings
