#include "rope_bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "bindings.h"
#include "phasekv/error.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

RopeConfig make_config(const std::string& type, double theta, int64_t rotary_dim, double factor,
                       double low_freq_factor, double high_freq_factor,
                       int64_t original_max_position, double beta_fast, double beta_slow,
                       bool truncate, const std::string& pairing) {
  return {.type = type,
          .theta = theta,
          .rotary_dim = rotary_dim,
          .factor = factor,
          .low_freq_factor = low_freq_factor,
          .high_freq_factor = high_freq_factor,
          .original_max_position = original_max_position,
          .beta_fast = beta_fast,
          .beta_slow = beta_slow,
          .truncate = truncate,
          .pairing = parse_pairing(pairing)};
}

}  // namespace

Rope::Rope(std::vector<double> frequencies, int64_t rotary_dim, const std::string& pairing)
    : frequencies_(std::move(frequencies)),
      rotary_dim_(rotary_dim),
      pairing_(parse_pairing(pairing)) {
  if (static_cast<int64_t>(frequencies_.size()) * 2 != rotary_dim_) {
    throw Error(ErrorCode::invalid_argument, "rotary_dim", std::to_string(rotary_dim_),
                "twice the " + std::to_string(frequencies_.size()) + " frequencies");
  }
}

Rope Rope::on(const py::object& frequencies) const {
  OpCall call{py::none()};
  const Tensor tensor = tensor_of("frequencies", frequencies, &call);
  const auto count = static_cast<int64_t>(frequencies_.size());
  if (tensor.dtype != "float64" || tensor.dims() != 1 || tensor.shape[0] != count ||
      (count > 1 && tensor.strides[0] != 1)) {
    throw Error(ErrorCode::invalid_argument, "frequencies", tensor.dtype + tensor.shape_text(),
                "adjacent float64[" + std::to_string(count) + "]");
  }
  Rope placed = *this;
  placed.placed_ = frequencies;
  placed.placed_frequencies_ = static_cast<const double*>(tensor.data);
  placed.device_ = tensor.device;
  return placed;
}

RopeView Rope::view(OpCall* call) const {
  if (call != nullptr) call->place("rope", device_);
  const bool is_placed = call != nullptr && placed_frequencies_ != nullptr;
  return {.frequencies = is_placed ? placed_frequencies_ : frequencies_.data(),
          .rotary_dim = rotary_dim_,
          .pairing = pairing_};
}

RopePairing parse_pairing(const std::string& name) {
  if (name == "neox") return RopePairing::neox;
  if (name == "interleaved") return RopePairing::interleaved;
  throw Error(ErrorCode::invalid_argument, "pairing", name, "neox or interleaved");
}

const char* name_of(RopePairing pairing) {
  return pairing == RopePairing::neox ? "neox" : "interleaved";
}

void register_rope(py::module_& module) {
  const RopeConfig defaults;
  py::class_<RopeConfig>(module, "RopeConfig",
                         "What a model's configuration says about its RoPE; see "
                         "include/phasekv/rope.h.")
      .def(py::init(&make_config), py::kw_only(), py::arg("type") = defaults.type,
           py::arg("theta") = defaults.theta, py::arg("rotary_dim"),
           py::arg("factor") = defaults.factor,
           py::arg("low_freq_factor") = defaults.low_freq_factor,
           py::arg("high_freq_factor") = defaults.high_freq_factor,
           py::arg("original_max_position") = defaults.original_max_position,
           py::arg("beta_fast") = defaults.beta_fast, py::arg("beta_slow") = defaults.beta_slow,
           py::arg("truncate") = defaults.truncate, py::arg("pairing") = "neox")
      .def_readonly("type", &RopeConfig::type)
      .def_readonly("theta", &RopeConfig::theta)
      .def_readonly("rotary_dim", &RopeConfig::rotary_dim)
      .def_readonly("factor", &RopeConfig::factor)
      .def_readonly("low_freq_factor", &RopeConfig::low_freq_factor)
      .def_readonly("high_freq_factor", &RopeConfig::high_freq_factor)
      .def_readonly("original_max_position", &RopeConfig::original_max_position)
      .def_readonly("beta_fast", &RopeConfig::beta_fast)
      .def_readonly("beta_slow", &RopeConfig::beta_slow)
      .def_readonly("truncate", &RopeConfig::truncate)
      .def_property_readonly("pairing",
                             [](const RopeConfig& config) { return name_of(config.pairing); });
  module.def("rope_frequencies", &rope_frequencies, py::arg("config"),
             "Angular frequencies [rotary_dim / 2], radians per position.");
  py::class_<Rope>(module, "Rope", "The rotation of a model's keys.")
      .def(py::init<std::vector<double>, int64_t, const std::string&>(), py::arg("frequencies"),
           py::arg("rotary_dim"), py::arg("pairing"))
      .def("on", &Rope::on, py::arg("frequencies"),
           "The same rotation for ops on the device where frequencies (float64 [rotary_dim / 2]) "
           "are.")
      .def_property_readonly("frequencies", &Rope::frequencies)
      .def_property_readonly("rotary_dim", &Rope::rotary_dim)
      .def_property_readonly("pairing", [](const Rope& rope) { return name_of(rope.pairing()); });
}

}  // namespace phasekv::bindings
