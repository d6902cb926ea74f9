// Phase tracking for Python: tables in as tuples, labels out as NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/phases/marker_automaton.h"
#include "phasekv/phases/phase_tracker.h"
#include "tokens.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

// A state's name and its phase's; a marker's spellings, the states it counts in, its next state.
using StateTuple = std::pair<std::string, std::string>;
using MarkerTuple = std::tuple<std::vector<std::vector<py::object>>, std::vector<int32_t>, int32_t>;

phases::MarkerPiece piece_of(const py::object& piece) {
  if (PyBytes_Check(piece.ptr())) return {piece.cast<std::string>(), phases::kNoToken};
  if (PyLong_CheckExact(piece.ptr())) {
    const auto token = piece.cast<int32_t>();
    if (token >= 0) return {"", token};
  }
  throw Error(ErrorCode::invalid_argument, "markers", py::repr(piece).cast<std::string>(),
              "pieces that are bytes or token ids of at least 0");
}

phases::CompletingToken completing_token_of(const std::string& name) {
  if (name == "left") return phases::CompletingToken::left;
  if (name == "entered") return phases::CompletingToken::entered;
  throw Error(ErrorCode::invalid_argument, "completing_token", name, "left or entered");
}

std::shared_ptr<const phases::MarkerAutomaton> make_automaton(
    const std::vector<StateTuple>& states, int32_t initial_state,
    const std::vector<MarkerTuple>& markers, const std::string& completing_token,
    const py::bytes& vocabulary_bytes, const std::vector<int64_t>& vocabulary_offsets) {
  phases::MarkerTable table;
  for (const auto& [name, phase] : states) {
    table.states.push_back({name, phases::phase_of_name(phase)});
  }
  table.initial_state = initial_state;
  for (const auto& [spellings, in_states, next_state] : markers) {
    phases::Marker marker{{}, in_states, next_state};
    for (const std::vector<py::object>& pieces : spellings) {
      phases::MarkerSpelling& spelling = marker.spellings.emplace_back();
      std::transform(pieces.begin(), pieces.end(), std::back_inserter(spelling), piece_of);
    }
    table.markers.push_back(std::move(marker));
  }
  table.completing_token = completing_token_of(completing_token);
  const phases::Vocabulary vocabulary{std::string(vocabulary_bytes), vocabulary_offsets};
  const py::gil_scoped_release release;
  return std::make_shared<const phases::MarkerAutomaton>(table, vocabulary);
}

py::tuple advance(phases::PhaseTracker& tracker, const py::object& tokens) {
  const Tokens int32_tokens(tokens);
  const size_t count = int32_tokens.span().size();
  std::vector<phases::TokenLabel> labels(count);
  tracker.advance(int32_tokens.span(), labels);
  py::array_t<uint8_t> phase_numbers(static_cast<py::ssize_t>(count));
  py::array_t<int32_t> marker_tokens(static_cast<py::ssize_t>(count));
  for (size_t i = 0; i < count; ++i) {
    phase_numbers.mutable_data()[i] = static_cast<uint8_t>(labels[i].phase);
    marker_tokens.mutable_data()[i] = labels[i].marker_tokens;
  }
  return py::make_tuple(phase_numbers, marker_tokens);
}

py::tuple label_stream(const std::shared_ptr<const phases::MarkerAutomaton>& automaton,
                       const py::object& tokens) {
  const Tokens int32_tokens(tokens);
  const phases::StreamLabels labels = phases::label_stream(automaton, int32_tokens.span());
  const auto count = static_cast<py::ssize_t>(labels.phases.size());
  py::array_t<uint8_t> phase_numbers(count);
  std::transform(labels.phases.begin(), labels.phases.end(), phase_numbers.mutable_data(),
                 [](phases::Phase phase) { return static_cast<uint8_t>(phase); });
  py::array_t<bool> is_marker(count);
  std::transform(labels.is_marker.begin(), labels.is_marker.end(), is_marker.mutable_data(),
                 [](uint8_t flag) { return flag != 0; });
  return py::make_tuple(phase_numbers, is_marker);
}

}  // namespace

void register_phases(py::module_& module) {
  using phases::MarkerAutomaton;
  using phases::PhaseTracker;
  py::class_<MarkerAutomaton, std::shared_ptr<MarkerAutomaton>>(
      module, "MarkerAutomaton",
      "A marker table compiled for one vocabulary; see "
      "include/phasekv/phases/marker_automaton.h. phasekv.phases makes one from a tokenizer.")
      .def(py::init([](const std::vector<StateTuple>& states, int32_t initial_state,
                       const std::vector<MarkerTuple>& markers, const std::string& completing_token,
                       const py::bytes& vocabulary_bytes,
                       const std::vector<int64_t>& vocabulary_offsets) {
             return std::const_pointer_cast<MarkerAutomaton>(
                 make_automaton(states, initial_state, markers, completing_token, vocabulary_bytes,
                                vocabulary_offsets));
           }),
           py::kw_only(), py::arg("states"), py::arg("initial_state") = 0, py::arg("markers"),
           py::arg("completing_token") = "left", py::arg("vocabulary_bytes"),
           py::arg("vocabulary_offsets"))
      .def_property_readonly("state_names",
                             [](const MarkerAutomaton& automaton) {
                               std::vector<std::string> names;
                               for (const auto& state : automaton.states()) {
                                 names.push_back(state.name);
                               }
                               return names;
                             })
      .def_property_readonly("vocabulary_size", &MarkerAutomaton::vocabulary_size)
      .def_property_readonly("fingerprint", &MarkerAutomaton::fingerprint);

  py::class_<PhaseTracker>(
      module, "PhaseTracker",
      "Labels the tokens of one stream as they arrive; see include/phasekv/phases/phase_tracker.h.")
      .def(py::init([](const std::shared_ptr<MarkerAutomaton>& automaton) {
             return PhaseTracker(automaton);
           }),
           py::arg("automaton"))
      .def("advance", &advance, py::arg("tokens"),
           "Label the next tokens: (phases, marker_tokens), one number each per token. A phase is "
           "its index in phase_names(). marker_tokens is how many tokens, with this one, form the "
           "marker that is complete with it, or 0.")
      .def_property_readonly(
          "phase",
          [](const PhaseTracker& tracker) { return std::string(name_of(tracker.phase())); },
          "Name of the phase in which the next token arrives.")
      .def_property_readonly(
          "state",
          [](const PhaseTracker& tracker) {
            return tracker.automaton()->states()[static_cast<size_t>(tracker.state())].name;
          },
          "Name of the table's state in which the next token arrives.")
      .def_property_readonly("num_tokens", &PhaseTracker::num_tokens, "Tokens seen.")
      .def_property_readonly(
          "phase_tokens",
          [](const PhaseTracker& tracker) {
            py::dict counts;
            for (int32_t phase = 0; phase < phases::kNumPhases; ++phase) {
              counts[py::str(std::string(name_of(static_cast<phases::Phase>(phase))))] =
                  tracker.phase_tokens()[static_cast<size_t>(phase)];
            }
            return counts;
          },
          "Tokens seen, by the phase's name.")
      .def("__copy__", [](const PhaseTracker& tracker) { return PhaseTracker(tracker); })
      .def(
          "save", [](const PhaseTracker& tracker) { return py::bytes(tracker.save()); },
          "The state as bytes.")
      .def_static(
          "restore",
          [](const std::shared_ptr<MarkerAutomaton>& automaton, const py::bytes& saved) {
            return PhaseTracker::restore(automaton, std::string_view(saved));
          },
          py::arg("automaton"), py::arg("saved"),
          "A tracker that goes on where the saved one was. Raises InvalidArgumentError if `saved` "
          "is damaged or of another table or vocabulary.");

  module.def(
      "phase_names",
      [] {
        std::vector<std::string> names;
        names.reserve(phases::kNumPhases);
        for (int32_t phase = 0; phase < phases::kNumPhases; ++phase) {
          names.emplace_back(name_of(static_cast<phases::Phase>(phase)));
        }
        return names;
      },
      "Names of the phases, in the order of their numbers.");
  module.def(
      "label_stream",
      [](const std::shared_ptr<MarkerAutomaton>& automaton, const py::object& tokens) {
        return label_stream(automaton, tokens);
      },
      py::arg("automaton"), py::arg("tokens"),
      "Final labels of a whole stream: (phases, is_marker), one number and one bool per token.");
}

}  // namespace phasekv::bindings
