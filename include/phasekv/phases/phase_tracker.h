// Labels the tokens of one stream with their phase, as they arrive.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "phasekv/phases/marker_automaton.h"
#include "phasekv/phases/phase.h"

namespace phasekv::phases {

struct TokenLabel {
  Phase phase = Phase::others;
  // Tokens of the marker that is complete with this one, including it; 0 if there is none. The
  // marker_tokens - 1 tokens before it were labelled as they arrived, perhaps in an earlier call:
  // only now it is known that they belong to a marker. A token belongs to a marker if at least one
  // of its bytes does. Of several markers in one token the count that reaches back farthest.
  int32_t marker_tokens = 0;

  bool operator==(const TokenLabel&) const = default;
};

// The labels of a stream do not depend on how it is cut into calls, and a phase is final when it is
// given: a token has the phase of the state in which it arrives. With CompletingToken::entered, the
// token that completes a marker has the phase of the state it leads to.
//
// A copy goes on by itself. One tracker is not for several threads at once.
class PhaseTracker {
 public:
  // In the table's initial state. `automaton` must not be null.
  explicit PhaseTracker(std::shared_ptr<const MarkerAutomaton> automaton);

  // Labels the stream's next tokens, labels[i] for tokens[i]. Throws Error, without effect, if the
  // two differ in size or a token is negative.
  void advance(std::span<const int32_t> tokens, std::span<TokenLabel> labels);

  // Phase and state in which the next token arrives.
  Phase phase() const { return automaton_->states_[state_].phase; }
  int32_t state() const noexcept { return state_; }

  // Tokens seen, in all and by phase.
  int64_t num_tokens() const;
  const std::array<int64_t, kNumPhases>& phase_tokens() const noexcept { return phase_tokens_; }

  const std::shared_ptr<const MarkerAutomaton>& automaton() const noexcept { return automaton_; }

  // The state as bytes, the same on every machine; 56 and 4 for each token of a marker that may
  // have begun.
  std::string save() const;

  // A tracker that goes on where the saved one was. Throws Error if `saved` is damaged, of another
  // version, or of another table or vocabulary.
  static PhaseTracker restore(std::shared_ptr<const MarkerAutomaton> automaton,
                              std::string_view saved);

 private:
  int32_t tokens_in_last(uint32_t symbols, uint32_t symbols_of_current) const;
  void remember(uint32_t symbols_of_current);

  std::shared_ptr<const MarkerAutomaton> automaton_;
  uint32_t node_ = 0;
  int32_t state_ = 0;
  std::array<int64_t, kNumPhases> phase_tokens_{};
  // Symbols of each of the last tokens, as many as hold the marker start that node_ stands for.
  std::vector<uint32_t> recent_symbols_;
};

// The final labels of a whole stream.
struct StreamLabels {
  std::vector<Phase> phases;       // [tokens]
  std::vector<uint8_t> is_marker;  // [tokens], 1 for tokens of complete markers
};

StreamLabels label_stream(const std::shared_ptr<const MarkerAutomaton>& automaton,
                          std::span<const int32_t> tokens);

}  // namespace phasekv::phases
