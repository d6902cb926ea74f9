#include "phasekv/phases/marker_automaton.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <unordered_map>

#include "phasekv/error.h"

namespace phasekv::phases {
namespace {

// Of all spellings together. The transition table, nodes times symbols, stays below 64 MiB.
constexpr int64_t kMaxMarkerSymbols = 4096;

[[noreturn]] void refuse(const std::string& argument, const std::string& value,
                         const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, argument, value, reason);
}

std::string at(const std::string& list, size_t index) {
  return list + "[" + std::to_string(index) + "]";
}

void check_state(const std::string& argument, int32_t state, size_t num_states) {
  if (state < 0 || static_cast<size_t>(state) >= num_states) {
    refuse(argument, std::to_string(state),
           "the number of a state, below " + std::to_string(num_states));
  }
}

void check_spelling(const std::string& argument, const MarkerSpelling& spelling) {
  if (spelling.empty()) refuse(argument, "no pieces", "at least one");
  for (size_t i = 0; i < spelling.size(); ++i) {
    const MarkerPiece& piece = spelling[i];
    const std::string name = at(argument, i);
    if (piece.token == kNoToken) {
      if (piece.text.empty()) refuse(name, "empty text", "a token or text");
    } else if (piece.token < 0) {
      refuse(name + ".token", std::to_string(piece.token), "a token id of at least 0");
    } else if (!piece.text.empty()) {
      refuse(name, "a token and text", "one of the two");
    }
  }
}

void check_table(const MarkerTable& table) {
  const size_t num_states = table.states.size();
  if (num_states == 0) refuse("states", "none", "at least one");
  check_state("initial_state", table.initial_state, num_states);
  int64_t symbols = 0;
  for (size_t m = 0; m < table.markers.size(); ++m) {
    const Marker& marker = table.markers[m];
    const std::string name = at("markers", m);
    if (marker.spellings.empty()) refuse(name + ".spellings", "none", "at least one");
    for (size_t s = 0; s < marker.spellings.size(); ++s) {
      check_spelling(at(name + ".spellings", s), marker.spellings[s]);
      for (const MarkerPiece& piece : marker.spellings[s]) {
        symbols += std::max<int64_t>(1, static_cast<int64_t>(piece.text.size()));
      }
    }
    for (size_t i = 0; i < marker.in_states.size(); ++i) {
      check_state(at(name + ".in_states", i), marker.in_states[i], num_states);
    }
    check_state(name + ".next_state", marker.next_state, num_states);
  }
  if (symbols >= kMaxMarkerSymbols) {
    refuse("markers", std::to_string(symbols) + " bytes and tokens in all",
           "fewer than " + std::to_string(kMaxMarkerSymbols));
  }
}

void check_vocabulary(const Vocabulary& vocabulary) {
  const std::vector<int64_t>& offsets = vocabulary.offsets;
  if (offsets.empty()) refuse("vocabulary.offsets", "none", "one more than there are tokens");
  if (offsets.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    refuse("vocabulary.offsets", std::to_string(offsets.size()), "ids of 32 bits");
  }
  if (offsets.front() != 0) {
    refuse("vocabulary.offsets[0]", std::to_string(offsets.front()), "0");
  }
  const auto drop = std::is_sorted_until(offsets.begin(), offsets.end());
  if (drop != offsets.end()) {
    refuse(at("vocabulary.offsets", drop - offsets.begin()), std::to_string(*drop),
           "at least the one before it");
  }
  if (offsets.back() != static_cast<int64_t>(vocabulary.bytes.size())) {
    refuse("the last of vocabulary.offsets", std::to_string(offsets.back()),
           "the number of bytes, " + std::to_string(vocabulary.bytes.size()));
  }
}

// FNV-1a over fields, each with its length, so that no two lists of fields give the same bytes.
class Fingerprint {
 public:
  void add(std::string_view bytes) {
    add(static_cast<int64_t>(bytes.size()));
    for (const char byte : bytes) add_byte(static_cast<unsigned char>(byte));
  }

  void add(int64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
      add_byte(static_cast<unsigned char>(static_cast<uint64_t>(number) >> shift));
    }
  }

  uint64_t value() const { return hash_; }

 private:
  void add_byte(unsigned char byte) { hash_ = (hash_ ^ byte) * 0x00000100000001B3; }

  uint64_t hash_ = 0xCBF29CE484222325;
};

uint64_t fingerprint_of(const MarkerTable& table, const Vocabulary& vocabulary) {
  Fingerprint fingerprint;
  fingerprint.add(static_cast<int64_t>(table.states.size()));
  for (const MarkerState& state : table.states) {
    fingerprint.add(state.name);
    fingerprint.add(static_cast<int64_t>(state.phase));
  }
  fingerprint.add(table.initial_state);
  fingerprint.add(static_cast<int64_t>(table.completing_token));
  fingerprint.add(static_cast<int64_t>(table.markers.size()));
  for (const Marker& marker : table.markers) {
    fingerprint.add(static_cast<int64_t>(marker.spellings.size()));
    for (const MarkerSpelling& spelling : marker.spellings) {
      fingerprint.add(static_cast<int64_t>(spelling.size()));
      for (const MarkerPiece& piece : spelling) {
        fingerprint.add(piece.token);
        fingerprint.add(piece.text);
      }
    }
    fingerprint.add(static_cast<int64_t>(marker.in_states.size()));
    for (const int32_t state : marker.in_states) fingerprint.add(state);
    fingerprint.add(marker.next_state);
  }
  fingerprint.add(vocabulary.bytes);
  fingerprint.add(static_cast<int64_t>(vocabulary.offsets.size()));
  for (const int64_t offset : vocabulary.offsets) fingerprint.add(offset);
  return fingerprint.value();
}

}  // namespace

struct MarkerAutomaton::Builder {
  explicit Builder(MarkerAutomaton& built) : automaton(built) {}

  MarkerAutomaton& automaton;
  std::array<Symbol, 256> symbol_of_byte{};  // kForeign where in no marker
  std::unordered_map<int32_t, Symbol> symbol_of_token;

  void number_symbols(const MarkerTable& table) {
    for (const Marker& marker : table.markers) {
      for (const MarkerSpelling& spelling : marker.spellings) {
        for (const MarkerPiece& piece : spelling) {
          if (piece.token != kNoToken) {
            if (symbol_of_token.try_emplace(piece.token, next_symbol()).second) {
              ++automaton.num_symbols_;
            }
          }
          for (const char byte : piece.text) {
            Symbol& symbol = symbol_of_byte[static_cast<unsigned char>(byte)];
            if (symbol == kForeign) {
              symbol = next_symbol();
              ++automaton.num_symbols_;
            }
          }
        }
      }
    }
  }

  Symbol next_symbol() const { return static_cast<Symbol>(automaton.num_symbols_); }

  void encode(const Vocabulary& vocabulary) {
    const auto num_tokens = static_cast<int64_t>(vocabulary.offsets.size()) - 1;
    automaton.symbols_.reserve(vocabulary.bytes.size());
    automaton.starts_.reserve(vocabulary.offsets.size());
    automaton.starts_.push_back(0);
    for (int64_t token = 0; token < num_tokens; ++token) {
      const int64_t begin = vocabulary.offsets[token];
      const int64_t end = vocabulary.offsets[token + 1];
      const auto special = symbol_of_token.find(static_cast<int32_t>(token));
      if (special != symbol_of_token.end()) {
        automaton.symbols_.push_back(special->second);
      } else if (begin == end) {
        automaton.symbols_.push_back(kForeign);
      } else {
        for (int64_t i = begin; i < end; ++i) {
          const auto byte = static_cast<unsigned char>(vocabulary.bytes[i]);
          automaton.symbols_.push_back(symbol_of_byte[byte]);
        }
      }
      automaton.starts_.push_back(static_cast<int64_t>(automaton.symbols_.size()));
    }
  }

  std::vector<Symbol> symbols_of(const MarkerSpelling& spelling) const {
    std::vector<Symbol> symbols;
    for (const MarkerPiece& piece : spelling) {
      if (piece.token != kNoToken) symbols.push_back(symbol_of_token.at(piece.token));
      for (const char byte : piece.text) {
        symbols.push_back(symbol_of_byte[static_cast<unsigned char>(byte)]);
      }
    }
    return symbols;
  }

  uint32_t add_node(uint32_t depth) {
    automaton.transitions_.resize(automaton.transitions_.size() + automaton.num_symbols_, 0);
    automaton.depths_.push_back(depth);
    automaton.rows_of_effects_.push_back(-1);
    return static_cast<uint32_t>(automaton.depths_.size() - 1);
  }

  uint32_t& transition(uint32_t node, uint32_t symbol) {
    return automaton.transitions_[size_t{node} * automaton.num_symbols_ + symbol];
  }

  Effect* effects_of(uint32_t node) {
    const size_t num_states = automaton.states_.size();
    int32_t& row = automaton.rows_of_effects_[node];
    if (row < 0) {
      row = static_cast<int32_t>(automaton.effects_.size() / num_states);
      automaton.effects_.resize(automaton.effects_.size() + num_states);
    }
    return automaton.effects_.data() + static_cast<size_t>(row) * num_states;
  }

  // The trie of all spellings. What is listed first stays.
  void add_marker(const Marker& marker) {
    for (const MarkerSpelling& spelling : marker.spellings) {
      uint32_t node = 0;
      for (const Symbol symbol : symbols_of(spelling)) {
        if (transition(node, symbol) == 0) {
          const uint32_t child = add_node(automaton.depths_[node] + 1);
          transition(node, symbol) = child;
        }
        node = transition(node, symbol);
      }
      Effect* const effects = effects_of(node);
      const auto set = [&](size_t state) {
        if (effects[state].next_state < 0) {
          effects[state] = {marker.next_state, automaton.depths_[node]};
        }
      };
      if (marker.in_states.empty()) {
        for (size_t state = 0; state < automaton.states_.size(); ++state) set(state);
      }
      for (const int32_t state : marker.in_states) set(static_cast<size_t>(state));
    }
  }

  // Breadth first, so that a node's longest proper suffix is complete before the node: missing
  // transitions are the suffix's, and where no marker of the node's own counts, the suffix's may.
  void add_suffixes() {
    std::vector<uint32_t> suffixes(automaton.depths_.size(), 0);
    std::vector<uint32_t> queue{0};
    for (size_t head = 0; head < queue.size(); ++head) {
      const uint32_t node = queue[head];
      const uint32_t suffix = suffixes[node];
      if (node != 0 && automaton.rows_of_effects_[suffix] >= 0) {
        Effect* const effects = effects_of(node);  // may move the suffix's
        const Effect* const shorter = effects_of(suffix);
        for (size_t state = 0; state < automaton.states_.size(); ++state) {
          if (effects[state].next_state < 0) effects[state] = shorter[state];
        }
      }
      for (uint32_t symbol = 0; symbol < automaton.num_symbols_; ++symbol) {
        const uint32_t beyond = node == 0 ? 0 : transition(suffix, symbol);
        uint32_t& child = transition(node, symbol);
        if (child == 0) {
          child = beyond;
        } else {
          suffixes[child] = beyond;
          queue.push_back(child);
        }
      }
    }
  }
};

MarkerAutomaton::MarkerAutomaton(const MarkerTable& table, const Vocabulary& vocabulary) {
  check_table(table);
  check_vocabulary(vocabulary);
  states_ = table.states;
  initial_state_ = table.initial_state;
  completing_token_ = table.completing_token;
  fingerprint_ = fingerprint_of(table, vocabulary);

  Builder builder(*this);
  builder.number_symbols(table);
  builder.encode(vocabulary);
  builder.add_node(0);
  for (const Marker& marker : table.markers) builder.add_marker(marker);
  builder.add_suffixes();
}

}  // namespace phasekv::phases
