// What a model's chat template tells of the phase: states, and the markers that lead from one to
// another. Plain data; MarkerAutomaton makes it fast.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phasekv/phases/phase.h"

namespace phasekv::phases {

// Bytes that each token stands for: token t has bytes[offsets[t], offsets[t + 1]). A token without
// bytes is a control token (padding, end of text, a special token). So is one beyond the
// vocabulary, as models have whose embedding is padded.
struct Vocabulary {
  std::string bytes;
  std::vector<int64_t> offsets;  // [tokens + 1], starts at 0, non-decreasing, ends at bytes.size()
};

inline constexpr int32_t kNoToken = -1;

// A stretch of a marker: one token, matched by its id, or text, matched byte by byte. Text that
// spells a token out never matches its id. A token that a table names by its id never matches text.
struct MarkerPiece {
  std::string text;          // not empty where `token` is kNoToken, else empty
  int32_t token = kNoToken;  // at least 0, or kNoToken
};

// Pieces that follow each other without anything between them.
using MarkerSpelling = std::vector<MarkerPiece>;

// A marker may mean something only where it is expected: the instructions of a system prompt show
// "<tool_call>" without calling a tool. So a table has states, several of which may have one phase.
struct MarkerState {
  std::string name;
  Phase phase = Phase::others;
};

struct Marker {
  std::vector<MarkerSpelling> spellings;  // at least one
  std::vector<int32_t> in_states;         // where it counts; empty: in every state
  int32_t next_state = 0;                 // holds from the marker's end on
};

// Phase of the token with which a marker is complete.
enum class CompletingToken : uint8_t {
  left = 0,     // the phase before it: a marker's tokens all belong where they arrived
  entered = 1,  // the phase after it, as in AgentKV's published algorithm
};

struct MarkerTable {
  std::vector<MarkerState> states;  // at least one
  int32_t initial_state = 0;
  std::vector<Marker> markers;  // none: one state for ever
  CompletingToken completing_token = CompletingToken::left;
};

}  // namespace phasekv::phases
