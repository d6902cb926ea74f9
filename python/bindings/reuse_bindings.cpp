// Reuse methods for Python: choose by name, select by divergence.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "choices.h"
#include "phasekv/error.h"
#include "phasekv/reuse/method.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

std::unique_ptr<reuse::Method> make(const std::string& name,
                                    const std::optional<std::string>& frame,
                                    const std::optional<std::string>& weight,
                                    const std::optional<std::string>& probes,
                                    std::optional<int64_t> boundary_tokens) {
  using reuse::OffsetFrame;
  using reuse::ProbeRule;
  using reuse::WeightRule;
  reuse::MethodOptions options;
  options.frame = parse_choice<OffsetFrame>(
      "frame", frame, {{"rotated", OffsetFrame::rotated}, {"unrotated", OffsetFrame::unrotated}});
  options.weight = parse_choice<WeightRule>("weight", weight,
                                            {{"clipped", WeightRule::clipped},
                                             {"one", WeightRule::one},
                                             {"relative", WeightRule::relative}});
  options.probes = parse_choice<ProbeRule>("probes", probes,
                                           {{"separate", ProbeRule::separate},
                                            {"sum", ProbeRule::sum},
                                            {"key", ProbeRule::key},
                                            {"value", ProbeRule::value}});
  options.boundary_tokens = boundary_tokens;
  return reuse::make_method(name, options);
}

// segments: (tokens, chunk_offset, chunk_tokens) each. Returns four lists of one number per token.
py::tuple select(const reuse::Method& method,
                 const std::vector<std::tuple<int64_t, int64_t, int64_t>>& segments,
                 const std::vector<float>& key_divergence,
                 const std::vector<float>& value_divergence, double ratio,
                 const std::vector<float>& attention) {
  std::vector<reuse::Segment> runs;
  runs.reserve(segments.size());
  for (const auto& [tokens, chunk_offset, chunk_tokens] : segments) {
    runs.push_back({tokens, chunk_offset, chunk_tokens});
  }
  const reuse::Selection selection =
      method.select({runs, key_divergence, value_divergence, attention, ratio});
  return py::make_tuple(py::cast(selection.key_probe), py::cast(selection.value_probe),
                        py::cast(selection.key_weight), py::cast(selection.value_weight));
}

}  // namespace

void register_reuse(py::module_& module) {
  module.def("method_names", &reuse::method_names, "Names of all reuse methods, sorted.");
  py::class_<reuse::Method>(module, "Method", "A reuse method; see include/phasekv/reuse/method.h.")
      .def(py::init(&make), py::arg("name"), py::kw_only(), py::arg("frame") = py::none(),
           py::arg("weight") = py::none(), py::arg("probes") = py::none(),
           py::arg("boundary_tokens") = py::none())
      .def_property_readonly("name", [](const reuse::Method& m) { return std::string(m.name()); })
      .def_property_readonly("check_layer", &reuse::Method::check_layer)
      .def_property_readonly("keeps_fresh_at_check_layer",
                             &reuse::Method::keeps_fresh_at_check_layer)
      .def_property_readonly("needs_attention", &reuse::Method::needs_attention)
      .def_property_readonly("shifts", &reuse::Method::shifts)
      .def_property_readonly("frame",
                             [](const reuse::Method& m) {
                               return m.frame() == reuse::OffsetFrame::rotated ? "rotated"
                                                                               : "unrotated";
                             })
      .def("select", &select, py::kw_only(), py::arg("segments"), py::arg("key_divergence"),
           py::arg("value_divergence"), py::arg("ratio"),
           py::arg("attention") = std::vector<float>(),
           "Flags and weights per cached token: (key_probe, value_probe, key_weight, "
           "value_weight).");
}

}  // namespace phasekv::bindings
