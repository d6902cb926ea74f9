// A marker table compiled for one vocabulary: an Aho-Corasick automaton over bytes and special
// tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "phasekv/phases/marker_table.h"

namespace phasekv::phases {

// Which markers count
// A token is read as its bytes, or as one symbol if a marker names it by its id, or as a symbol
// that is in no marker if it is a control token. A marker ends with its last symbol, wherever in a
// token that is. Of the markers that end there and count in the current state, the longest counts;
// of equally long ones the one listed first. Its next state holds from the following symbol on.
// Markers may overlap and extend each other: each counts at its own end.
//
// Cost: one table look-up for each byte of a token. Memory: 2 bytes for each byte of the
// vocabulary, 8 bytes for each token, and 4 bytes for each symbol of the markers times the number
// of different symbols in them.
//
// Immutable: any number of trackers and threads share one.
class MarkerAutomaton {
 public:
  // Throws Error (invalid_argument) that names the field of the table or the vocabulary at fault.
  MarkerAutomaton(const MarkerTable& table, const Vocabulary& vocabulary);

  std::span<const MarkerState> states() const noexcept { return states_; }
  int64_t vocabulary_size() const noexcept { return static_cast<int64_t>(starts_.size()) - 1; }

  // Equal for equal tables and vocabularies. It guards saved states against a mix-up, not against
  // somebody who looks for collisions.
  uint64_t fingerprint() const noexcept { return fingerprint_; }

 private:
  friend class PhaseTracker;

  using Symbol = uint16_t;
  static constexpr Symbol kForeign = 0;  // every byte and control token that is in no marker

  // What a node's markers do in one state.
  struct Effect {
    int32_t next_state = -1;  // -1: no marker counts
    uint32_t length = 0;      // symbols of the marker that counts
  };

  struct Builder;

  std::span<const Symbol> symbols_of(int32_t token) const {
    static constexpr Symbol kControl[] = {kForeign};
    if (token >= vocabulary_size()) return kControl;
    return {symbols_.data() + starts_[token], symbols_.data() + starts_[token + 1]};
  }

  std::vector<MarkerState> states_;
  int32_t initial_state_ = 0;
  CompletingToken completing_token_ = CompletingToken::left;

  std::vector<Symbol> symbols_;  // of all tokens
  std::vector<int64_t> starts_;  // [tokens + 1], into symbols_

  uint32_t num_symbols_ = 1;              // different ones, with kForeign
  std::vector<uint32_t> transitions_;     // [nodes, num_symbols_]
  std::vector<uint32_t> depths_;          // [nodes], symbols of the longest marker start matched
  std::vector<int32_t> rows_of_effects_;  // [nodes], -1: no marker ends here
  std::vector<Effect> effects_;           // [rows, states]
  uint64_t fingerprint_ = 0;
};

}  // namespace phasekv::phases
