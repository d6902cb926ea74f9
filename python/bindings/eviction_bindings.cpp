// Eviction for Python: policies by name or as a function, windows and the evictor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "choices.h"
#include "op_call.h"
#include "phasekv/error.h"
#include "phasekv/eviction/cuda_backend.h"
#include "phasekv/eviction/evictor.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/eviction/ragged_evictor.h"
#include "phasekv/eviction/window.h"
#include "phasekv/phases/marker_automaton.h"
#include "placed_kv.h"
#include "rope_bindings.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

using eviction::Evictor;
using eviction::Policy;
using eviction::PolicyInput;
using eviction::RaggedEvictor;
using eviction::Window;

std::shared_ptr<Policy> make(const std::string& name, std::optional<int64_t> queries,
                             std::optional<int64_t> sinks, std::optional<int64_t> recent,
                             const std::optional<std::string>& group,
                             const std::optional<std::string>& pooling,
                             std::optional<int64_t> pooling_kernel,
                             std::optional<bool> marker_queries, std::optional<double> phase_quota,
                             std::optional<double> redundancy, std::optional<double> safeguard,
                             std::optional<double> steepness,
                             std::shared_ptr<eviction::TriattentionStatistics> statistics) {
  eviction::PolicyOptions options;
  options.queries = queries;
  options.sinks = sinks;
  options.recent = recent;
  options.group = parse_choice<GroupReduction>("group", group,
                                               {{"max_logit", GroupReduction::max_logit},
                                                {"max", GroupReduction::max},
                                                {"mean", GroupReduction::mean}});
  options.pooling = parse_choice<Pooling>(
      "pooling", pooling,
      {{"none", Pooling::none}, {"max", Pooling::max}, {"average", Pooling::average}});
  options.pooling_kernel = pooling_kernel;
  options.marker_queries = marker_queries;
  options.phase_quota = phase_quota;
  options.redundancy = redundancy;
  options.safeguard = safeguard;
  options.steepness = steepness;
  options.statistics = std::move(statistics);
  return eviction::make_policy(name, options);
}

// A policy written in Python: score(keys, values, queries, positions) -> [kv_heads, tokens], on
// torch tensors of the cache's dtype on the CPU, copies of what lies on a device.
class FunctionPolicy final : public Policy {
 public:
  FunctionPolicy(py::function score, int64_t queries, int64_t sinks, int64_t recent)
      : score_(std::move(score)), queries_(queries), kept_{sinks, recent} {}

  std::string_view name() const override { return "function"; }
  eviction::PolicyNeeds needs() const override {
    return {.buffers = queries_ > 0 ? 1 : 0, .capacity = queries_};
  }
  eviction::ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return kept_; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    const py::gil_scoped_acquire acquire;
    const py::module_ torch = py::module_::import("torch");
    const std::vector<int64_t> shape = {input.kv_heads(), input.tokens};
    const py::object positions = torch.attr("empty")(shape, py::arg("dtype") = torch.attr("int32"));
    std::copy(input.positions.begin(), input.positions.end(),
              int32_list("positions", positions.attr("view")(-1)).data);
    py::object queries =
        empty(torch, input.queries.dtype,
              {input.queries.tokens, input.queries.heads, input.queries.head_size});
    input.backend->download(
        input.queries.data, rows_of("queries", queries).data,
        input.queries.tokens * input.queries.token_stride * size_of(input.queries.dtype));
    const py::object result = score_(gathered(torch, input, input.key),
                                     gathered(torch, input, input.value), queries, positions);
    const py::object floats = result.attr("float")().attr("contiguous")();
    const float* values = float_tensor("scores", floats, shape);
    std::copy_n(values, scores.size(), scores.data());
  }

 private:
  static py::object empty(const py::module_& torch, DataType dtype,
                          const std::vector<int64_t>& shape) {
    const char* name = dtype == DataType::float32    ? "float32"
                       : dtype == DataType::bfloat16 ? "bfloat16"
                                                     : "float16";
    return torch.attr("empty")(shape, py::arg("dtype") = torch.attr(name));
  }

  // [kv_heads, tokens, head_size]
  static py::object gathered(const py::module_& torch, const PolicyInput& input,
                             const PagedView& blocks) {
    std::vector<int64_t> slots;
    slots.reserve(static_cast<size_t>(input.tokens));
    for (int64_t i = 0; i < input.tokens; ++i) {
      const int64_t token = input.first_token + i;
      slots.push_back(int64_t{input.block_table[token / blocks.block_size]} * blocks.block_size +
                      token % blocks.block_size);
    }
    const py::object rows =
        empty(torch, blocks.dtype, {input.tokens, blocks.num_heads, blocks.head_size});
    input.backend->gather_blocks(
        {.blocks = blocks, .slots = slots.data(), .rows = rows_of("rows", rows)});
    return rows.attr("transpose")(0, 1);
  }

  py::function score_;
  int64_t queries_;
  eviction::ProtectedTokens kept_;
};

void schedule(Evictor& evictor, int64_t request, int64_t begin, int64_t first_row,
              const py::handle& tokens, const py::handle& block_table,
              const std::optional<py::object>& computed) {
  const List<int32_t> ids = int32_list("tokens", tokens);
  const List<int32_t> blocks = int32_list("block_table", block_table);
  const auto count = static_cast<size_t>(ids.count);
  eviction::ScheduledTokens scheduled;
  scheduled.request = request;
  scheduled.begin = begin;
  scheduled.end = begin + ids.count;
  scheduled.first_row = first_row;
  scheduled.tokens = {ids.data, count};
  scheduled.block_table = {blocks.data, static_cast<size_t>(blocks.count)};
  if (computed) {
    const List<uint8_t> flags = uint8_list("computed", *computed);
    if (flags.count != ids.count) {
      throw Error(ErrorCode::invalid_argument, "computed", "[" + std::to_string(flags.count) + "]",
                  "[" + std::to_string(ids.count) + "]");
    }
    scheduled.computed = {flags.data, count};
  }
  evictor.schedule(scheduled);
}

// EvictorShape of a cache whose blocks look like kv's.
eviction::EvictorShape shape_of(int64_t layers, int64_t query_heads, int64_t kv_heads,
                                const PagedKV& kv, float scale, const Rope* rope) {
  eviction::EvictorShape shape{.layers = layers,
                               .query_heads = query_heads,
                               .kv_heads = kv_heads,
                               .head_size = kv.key.head_size,
                               .block_size = kv.key.block_size,
                               .dtype = kv.key.dtype,
                               .scale = scale};
  if (rope != nullptr) {
    shape.rope_frequencies = rope->frequencies();
    shape.rope_pairing = rope->pairing();
  }
  return shape;
}

// An evictor whose tensors lie where the cache does that it was made for.
class PlacedEvictor {
 public:
  PlacedEvictor(int64_t layers, int64_t query_heads, const PlacedKV& kv, float scale,
                const Rope* rope)
      : device_(kv.device),
        cuda_(cuda_backend_of(kv.device)),
        evictor_(shape_of(layers, query_heads, kv.kv.key.num_heads, kv.kv, scale, rope),
                 cuda_ == nullptr ? eviction::cpu_backend() : cuda_) {}

  Evictor& evictor() { return evictor_; }

  void layer(int64_t layer, const py::handle& query, const PlacedKV& kv,
             const std::optional<py::object>& query_rows, const py::handle& stream) {
    OpCall call(stream);
    call.place("evictor", device_);
    const RowsView rows = rows_of("query", query, &call);
    const PagedKV& paged = kv.in(call, "kv");
    const int64_t* map = query_rows ? int64_list("query_rows", *query_rows).data : nullptr;
    call.run([&] { evictor_.layer(layer, rows, paged, map); },
             [&](cuda::Stream on) {
               cuda_->use_stream(on);
               evictor_.layer(layer, rows, paged, map);
             });
  }

 private:
  // Null for the CPU.
  static std::shared_ptr<eviction::CudaBackend> cuda_backend_of(const std::string& device) {
    OpCall call{py::none()};
    call.place("kv", device);
    return call.is_on_cuda() ? eviction::make_cuda_backend(call.device_index()) : nullptr;
  }

  std::string device_;
  std::shared_ptr<eviction::CudaBackend> cuda_;
  Evictor evictor_;
};

// Of a RaggedEvictor, whose blocks come with `layer`.
void schedule_ragged(RaggedEvictor& evictor, int64_t request, int64_t begin, int64_t first_row,
                     const py::handle& tokens) {
  const List<int32_t> ids = int32_list("tokens", tokens);
  eviction::ScheduledTokens scheduled;
  scheduled.request = request;
  scheduled.begin = begin;
  scheduled.end = begin + ids.count;
  scheduled.first_row = first_row;
  scheduled.tokens = {ids.data, static_cast<size_t>(ids.count)};
  evictor.schedule(scheduled);
}

void run_ragged_layer(RaggedEvictor& evictor, int64_t layer, const py::handle& query,
                      const PlacedKV& kv, const py::handle& block_tables) {
  const RowsView rows = rows_of("query", query);
  const PagedKV& paged = kv.on_cpu("kv");
  const Tensor tables = tensor_of("block_tables", block_tables);
  if (tables.dims() != 2) {
    throw Error(ErrorCode::invalid_argument, "block_tables", tables.shape_text(),
                "[scheduled requests * kv heads, blocks]");
  }
  const List<int32_t> blocks = int32_list("block_tables", block_tables.attr("view")(-1));
  const py::gil_scoped_release release;
  evictor.layer(layer, rows, paged, {blocks.data, static_cast<size_t>(blocks.count)},
                tables.shape[1]);
}

void register_policies(py::module_& module) {
  module.def("policy_names", &eviction::policy_names, "Names of all eviction policies, sorted.");
  py::class_<Policy, std::shared_ptr<Policy>>(
      module, "Policy", "An eviction policy; see include/phasekv/eviction/policy.h.")
      .def(py::init(&make), py::arg("name"), py::kw_only(), py::arg("queries") = py::none(),
           py::arg("sinks") = py::none(), py::arg("recent") = py::none(),
           py::arg("group") = py::none(), py::arg("pooling") = py::none(),
           py::arg("pooling_kernel") = py::none(), py::arg("marker_queries") = py::none(),
           py::arg("phase_quota") = py::none(), py::arg("redundancy") = py::none(),
           py::arg("safeguard") = py::none(), py::arg("steepness") = py::none(),
           py::arg("statistics") = py::none())
      .def_property_readonly("name",
                             [](const Policy& policy) { return std::string(policy.name()); })
      .def_property_readonly("is_ragged", &Policy::is_ragged)
      .def_property_readonly("needs_rope", [](const Policy& policy) { return policy.needs().rope; })
      .def(
          "protected_tokens",
          [](const Policy& policy, int64_t budget) {
            const eviction::ProtectedTokens kept = policy.protected_tokens(budget);
            return py::make_tuple(kept.sinks, kept.recent);
          },
          py::arg("budget"), "(sinks, recent tokens) that are always kept within the budget.");
  py::class_<FunctionPolicy, Policy, std::shared_ptr<FunctionPolicy>>(
      module, "FunctionPolicy",
      "A policy that calls score(keys, values, queries, positions): keys and values [kv_heads, "
      "tokens, head_size], queries [the last `queries`, query_heads, head_size], positions int32 "
      "[kv_heads, tokens]. It returns scores [kv_heads, tokens], the higher the better.")
      .def(py::init<py::function, int64_t, int64_t, int64_t>(), py::arg("score"), py::kw_only(),
           py::arg("queries") = 32, py::arg("sinks") = 4, py::arg("recent") = 0);
  py::class_<eviction::TriattentionStatistics, std::shared_ptr<eviction::TriattentionStatistics>>(
      module, "TriattentionStatistics", "Calibration of one model.")
      .def(py::init([](std::string model, const Rope& rope, double magnitude,
                       const py::handle& mean_query, const py::handle& mean_norm) {
             const Tensor query = tensor_of("mean_query", mean_query);
             if (query.dims() != 4) {
               throw Error(ErrorCode::invalid_argument, "mean_query", query.shape_text(),
                           "[layers, query heads, rotary_dim / 2, 2]");
             }
             const int64_t layers = query.shape[0];
             const int64_t heads = query.shape[1];
             const int64_t pairs = rope.rotary_dim() / 2;
             const float* means = float_tensor("mean_query", mean_query, {layers, heads, pairs, 2});
             const float* norms = float_tensor("mean_norm", mean_norm, {layers, heads, pairs});
             auto statistics = std::make_shared<eviction::TriattentionStatistics>();
             statistics->model = std::move(model);
             statistics->layers = layers;
             statistics->query_heads = heads;
             statistics->rotary_dim = rope.rotary_dim();
             statistics->pairing = rope.pairing();
             statistics->frequencies = rope.frequencies();
             statistics->magnitude = magnitude;
             statistics->mean_query.assign(means, means + layers * heads * pairs * 2);
             statistics->mean_norm.assign(norms, norms + layers * heads * pairs);
             return statistics;
           }),
           py::kw_only(), py::arg("model"), py::arg("rope"), py::arg("magnitude") = 1.0,
           py::arg("mean_query"), py::arg("mean_norm"));
}

// A method of Evictor, or a function of one, as one of PlacedEvictor.
template <typename Result, typename... Arguments>
auto of_placed(Result (Evictor::*method)(Arguments...)) {
  return [method](PlacedEvictor& placed, Arguments... arguments) {
    return (placed.evictor().*method)(std::forward<Arguments>(arguments)...);
  };
}
template <typename Result, typename... Arguments>
auto of_placed(Result (Evictor::*method)(Arguments...) const) {
  return [method](PlacedEvictor& placed, Arguments... arguments) {
    return (placed.evictor().*method)(std::forward<Arguments>(arguments)...);
  };
}
template <typename... Arguments>
auto of_placed(void (*function)(Evictor&, Arguments...)) {
  return [function](PlacedEvictor& placed, Arguments... arguments) {
    function(placed.evictor(), std::forward<Arguments>(arguments)...);
  };
}

void register_evictor(py::module_& module) {
  py::class_<PlacedEvictor>(
      module, "Evictor",
      "Eviction of a worker's requests, on the device that `kv` lies on: so do the queries and the "
      "caches that `layer` is given. All lists (tokens, block_table, computed, query_rows) lie on "
      "the CPU.")
      .def(py::init<int64_t, int64_t, const PlacedKV&, float, const Rope*>(), py::kw_only(),
           py::arg("layers"), py::arg("query_heads"), py::arg("kv"), py::arg("scale"),
           py::arg("rope") = py::none())
      .def(
          "add",
          [](PlacedEvictor& placed, int64_t request, std::shared_ptr<Policy> policy,
             const Window& window, const std::shared_ptr<phases::MarkerAutomaton>& markers) {
            placed.evictor().add(request, std::move(policy), window, markers);
          },
          py::arg("request"), py::kw_only(), py::arg("policy"), py::arg("window"),
          py::arg("markers") = py::none())
      .def("remove", of_placed(&Evictor::remove), py::arg("request"))
      .def("begin_step", of_placed(&Evictor::begin_step))
      .def("schedule", of_placed(&schedule), py::arg("request"), py::kw_only(), py::arg("begin"),
           py::arg("first_row"), py::arg("tokens"), py::arg("block_table"),
           py::arg("computed") = py::none())
      .def("has_events", of_placed(&Evictor::has_events))
      .def("layer", &PlacedEvictor::layer, py::arg("layer"), py::kw_only(), py::arg("query"),
           py::arg("kv"), py::arg("query_rows") = py::none(), py::arg("stream") = py::none(),
           "Take a layer's queries, and let its keys be scored, after the attention of the layer. "
           "On "
           "a device that is launched on `stream`, a cudaStream_t (None: the default stream).")
      .def(
          "finish", of_placed(&Evictor::finish), py::call_guard<py::gil_scoped_release>(),
          "Reports of the requests that had an event. On a device their keys move only now, and it "
          "waits for their scores.")
      .def_property_readonly(
          "block_size", [](PlacedEvictor& placed) { return placed.evictor().shape().block_size; })
      .def_property_readonly("scale",
                             [](PlacedEvictor& placed) { return placed.evictor().shape().scale; })
      .def("computed", of_placed(&Evictor::computed), py::arg("request"))
      .def("held", of_placed(&Evictor::held), py::arg("request"))
      .def("kept_by_phase", of_placed(&Evictor::kept_by_phase), py::arg("request"))
      .def("positions", of_placed(&Evictor::positions), py::arg("request"), py::arg("layer"))
      .def("nbytes", of_placed(&Evictor::nbytes), py::arg("request"))
      .def(
          "save",
          [](PlacedEvictor& placed, int64_t request) {
            const std::vector<uint8_t> state = placed.evictor().save(request);
            return py::bytes(reinterpret_cast<const char*>(state.data()), state.size());
          },
          py::arg("request"))
      .def(
          "restore",
          [](PlacedEvictor& placed, int64_t request, const std::string& state) {
            placed.evictor().restore(
                request, {reinterpret_cast<const uint8_t*>(state.data()), state.size()});
          },
          py::arg("request"), py::arg("state"))
      .def_property_readonly("seconds", [](PlacedEvictor& placed) {
        const eviction::EvictionSeconds& seconds = placed.evictor().seconds();
        return py::make_tuple(seconds.collecting, seconds.scoring, seconds.compacting);
      });
}

}  // namespace

void register_eviction(py::module_& module) {
  register_policies(module);
  py::class_<Window>(module, "Window", "Which tokens are held; include/phasekv/eviction/window.h.")
      .def(py::init([](int64_t budget, int64_t stride, int64_t held_from, int64_t held_until) {
             return Window{budget, stride, held_from, held_until};
           }),
           py::kw_only(), py::arg("budget"), py::arg("stride"), py::arg("held_from") = 0,
           py::arg("held_until") = 0)
      .def("start", &Window::start, py::arg("computed"),
           "First logical position that is held once `computed` tokens were computed.")
      .def("check", &eviction::check_window, py::kw_only(), py::arg("block_size"),
           py::arg("protected_tokens"), "Refuse a window that does not fit blocks or policy.")
      .def_readonly("budget", &Window::budget)
      .def_readonly("stride", &Window::stride)
      .def_readonly("held_from", &Window::held_from)
      .def_readonly("held_until", &Window::held_until);
  using eviction::EvictionReport;
  py::class_<EvictionReport>(module, "EvictionReport", "What an event did to one request.")
      .def_readonly("request", &EvictionReport::request)
      .def_readonly("evicted_tokens", &EvictionReport::evicted_tokens)
      .def_readonly("freed_blocks", &EvictionReport::freed_blocks)
      .def_readonly("scoring_seconds", &EvictionReport::scoring_seconds)
      .def_readonly("compacting_seconds", &EvictionReport::compacting_seconds)
      .def_readonly("failure", &EvictionReport::failure);
  register_evictor(module);
  py::class_<RaggedEvictor>(module, "RaggedEvictor",
                            "Eviction where every layer and KV head has blocks of its own; see "
                            "include/phasekv/eviction/ragged_evictor.h.")
      .def(py::init([](int64_t layers, int64_t query_heads, int64_t kv_heads, const PlacedKV& kv,
                       float scale, const Rope* rope) {
             return std::make_unique<RaggedEvictor>(
                 shape_of(layers, query_heads, kv_heads, kv.on_cpu("kv"), scale, rope));
           }),
           py::kw_only(), py::arg("layers"), py::arg("query_heads"), py::arg("kv_heads"),
           py::arg("kv"), py::arg("scale"), py::arg("rope") = py::none())
      .def(
          "add",
          [](RaggedEvictor& evictor, int64_t request, std::shared_ptr<Policy> policy,
             const Window& window, const std::shared_ptr<phases::MarkerAutomaton>& markers) {
            evictor.add(request, std::move(policy), window, markers);
          },
          py::arg("request"), py::kw_only(), py::arg("policy"), py::arg("window"),
          py::arg("markers") = py::none())
      .def("remove", &RaggedEvictor::remove, py::arg("request"))
      .def("begin_step", &RaggedEvictor::begin_step)
      .def("schedule", &schedule_ragged, py::arg("request"), py::kw_only(), py::arg("begin"),
           py::arg("first_row"), py::arg("tokens"))
      .def("has_events", &RaggedEvictor::has_events)
      .def("layer", &run_ragged_layer, py::arg("layer"), py::kw_only(), py::arg("query"),
           py::arg("kv"), py::arg("block_tables"))
      .def("finish", &RaggedEvictor::finish, "Reports of the requests that had an event.")
      .def("computed", &RaggedEvictor::computed, py::arg("request"))
      .def("held", &RaggedEvictor::held, py::arg("request"), py::arg("layer"))
      .def("positions", &RaggedEvictor::positions, py::arg("request"), py::arg("layer"),
           py::arg("head"))
      .def("kept_by_phase", &RaggedEvictor::kept_by_phase, py::arg("request"))
      .def("nbytes", &RaggedEvictor::nbytes, py::arg("request"))
      .def_property_readonly("seconds", [](const RaggedEvictor& evictor) {
        const eviction::EvictionSeconds& seconds = evictor.seconds();
        return py::make_tuple(seconds.collecting, seconds.scoring, seconds.compacting);
      });
}

}  // namespace phasekv::bindings
