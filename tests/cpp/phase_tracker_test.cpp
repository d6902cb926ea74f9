#include "phasekv/phases/phase_tracker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "phasekv/error.h"

namespace phasekv::phases {
namespace {

using Tokens = std::vector<int32_t>;
using Automaton = std::shared_ptr<const MarkerAutomaton>;

Vocabulary vocabulary_of(const std::vector<std::string>& tokens) {
  Vocabulary vocabulary;
  vocabulary.offsets.push_back(0);
  for (const std::string& token : tokens) {
    vocabulary.bytes += token;
    vocabulary.offsets.push_back(static_cast<int64_t>(vocabulary.bytes.size()));
  }
  return vocabulary;
}

Automaton compile(const MarkerTable& table, const Vocabulary& vocabulary) {
  return std::make_shared<const MarkerAutomaton>(table, vocabulary);
}

MarkerPiece text(std::string bytes) { return {std::move(bytes), kNoToken}; }
MarkerPiece token(int32_t id) { return {"", id}; }

// ---- An oracle: every marker is tried at every symbol of the whole stream.

struct Symbol {
  int32_t value = 0;  // a byte, 256 + token id, or -1
  size_t token = 0;   // index in the stream
};

struct Expected {
  std::vector<Phase> phases;
  std::vector<uint8_t> is_marker;
  int32_t last_state = 0;
};

std::vector<int32_t> flatten(const MarkerSpelling& spelling) {
  std::vector<int32_t> values;
  for (const MarkerPiece& piece : spelling) {
    if (piece.token >= 0) values.push_back(256 + piece.token);
    for (const char byte : piece.text) values.push_back(static_cast<unsigned char>(byte));
  }
  return values;
}

Expected oracle(const MarkerTable& table, const Vocabulary& vocabulary, const Tokens& tokens) {
  const auto is_special = [&](int32_t id) {
    for (const Marker& marker : table.markers) {
      for (const MarkerSpelling& spelling : marker.spellings) {
        for (const MarkerPiece& piece : spelling) {
          if (piece.token == id) return true;
        }
      }
    }
    return false;
  };
  std::vector<Symbol> symbols;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto id = static_cast<size_t>(tokens[i]);
    std::string bytes;
    if (id + 1 < vocabulary.offsets.size()) {
      bytes = vocabulary.bytes.substr(vocabulary.offsets[id],
                                      vocabulary.offsets[id + 1] - vocabulary.offsets[id]);
    }
    if (id + 1 < vocabulary.offsets.size() && is_special(tokens[i])) {
      symbols.push_back({256 + tokens[i], i});
    } else if (bytes.empty()) {
      symbols.push_back({-1, i});
    } else {
      for (const char byte : bytes) symbols.push_back({static_cast<unsigned char>(byte), i});
    }
  }

  Expected expected;
  expected.phases.resize(tokens.size());
  expected.is_marker.resize(tokens.size());
  int32_t state = table.initial_state;
  for (size_t end = 1; end <= symbols.size(); ++end) {
    const size_t current = symbols[end - 1].token;
    if (end == 1 || symbols[end - 2].token != current) {
      expected.phases[current] = table.states[state].phase;
    }
    size_t longest = 0;
    int32_t next_state = -1;
    for (const Marker& marker : table.markers) {
      const auto& in = marker.in_states;
      if (!in.empty() && std::find(in.begin(), in.end(), state) == in.end()) continue;
      for (const MarkerSpelling& spelling : marker.spellings) {
        const std::vector<int32_t> values = flatten(spelling);
        if (values.size() > end || values.size() <= longest) continue;
        const bool matches =
            std::equal(values.begin(), values.end(),
                       symbols.begin() + static_cast<int64_t>(end - values.size()),
                       [](int32_t value, const Symbol& symbol) { return value == symbol.value; });
        if (matches) {
          longest = values.size();
          next_state = marker.next_state;
        }
      }
    }
    if (longest == 0) continue;
    state = next_state;
    for (size_t i = end - longest; i < end; ++i) expected.is_marker[symbols[i].token] = 1;
    // Whatever the rest of the token does is seen at its last marker.
    if (table.completing_token == CompletingToken::entered) {
      expected.phases[current] = table.states[state].phase;
    }
  }
  expected.last_state = state;
  return expected;
}

// ---- Streams that are cut into calls.

class Stream {
 public:
  explicit Stream(Automaton automaton) : tracker(std::move(automaton)) {}

  void advance(const Tokens& tokens) {
    std::vector<TokenLabel> labels(tokens.size());
    tracker.advance(tokens, labels);
    for (const TokenLabel& label : labels) {
      phases.push_back(label.phase);
      is_marker.push_back(0);
      ASSERT_LE(label.marker_tokens, static_cast<int64_t>(is_marker.size()));
      std::fill(is_marker.end() - label.marker_tokens, is_marker.end(), 1);
    }
  }

  PhaseTracker tracker;
  std::vector<Phase> phases;
  std::vector<uint8_t> is_marker;
};

// ---- Qwen3-like markers, one of them a special token and one split.

enum : int32_t { kTurn, kEnd, kUser, kAssistant, kNewline, kWord, kOpen, kMerged, kClose, kPad };

const Vocabulary& chat_vocabulary() {
  static const Vocabulary vocabulary = vocabulary_of(
      {"<turn>", "", "user", "assistant", "\n", "word", "<thi", "nk>\nwell", "</think>", ""});
  return vocabulary;
}

MarkerTable chat_table() {
  MarkerTable table;
  table.states = {{"prompt", Phase::others}, {"assistant", Phase::others}, {"think", Phase::think}};
  table.markers = {
      {{{token(kTurn), text("user\n")}}, {}, 0},
      {{{token(kTurn), text("assistant\n")}}, {}, 1},
      {{{text("<think>")}}, {1}, 2},
      {{{text("</think>")}}, {2}, 1},
      {{{token(kEnd)}}, {}, 0},
  };
  return table;
}

constexpr Phase kThink = Phase::think;
constexpr Phase kOthers = Phase::others;

TEST(PhaseTracker, LabelsATurn) {
  const StreamLabels labels =
      label_stream(compile(chat_table(), chat_vocabulary()),
                   Tokens{kTurn, kAssistant, kNewline, kOpen, kMerged, kWord, kClose, kWord, kEnd});
  EXPECT_EQ(labels.phases, (std::vector<Phase>{kOthers, kOthers, kOthers, kOthers, kOthers, kThink,
                                               kThink, kOthers, kOthers}));
  EXPECT_EQ(labels.is_marker, (std::vector<uint8_t>{1, 1, 1, 1, 1, 0, 1, 0, 1}));
}

TEST(PhaseTracker, TheCompletingCallTellsHowFarAMarkerReachesBack) {
  PhaseTracker tracker(compile(chat_table(), chat_vocabulary()));
  const Tokens stream{kTurn, kAssistant, kNewline, kOpen, kMerged};
  const int32_t expected[] = {0, 0, 3, 0, 2};
  for (size_t i = 0; i < stream.size(); ++i) {
    TokenLabel label;
    tracker.advance({&stream[i], 1}, {&label, 1});
    EXPECT_EQ(label, (TokenLabel{kOthers, expected[i]})) << i;
  }
  EXPECT_EQ(tracker.phase(), kThink);
  EXPECT_EQ(tracker.state(), 2);
  EXPECT_EQ(tracker.num_tokens(), 5);
}

TEST(PhaseTracker, AMarkerCountsOnlyInItsStates) {
  const Automaton automaton = compile(chat_table(), chat_vocabulary());
  const StreamLabels labels =
      label_stream(automaton, Tokens{kTurn, kUser, kNewline, kOpen, kMerged, kWord, kEnd});
  EXPECT_EQ(labels.phases, std::vector<Phase>(7, kOthers));
  EXPECT_EQ(labels.is_marker, (std::vector<uint8_t>{1, 1, 1, 0, 0, 0, 1}));
}

TEST(PhaseTracker, TextThatSpellsASpecialTokenIsText) {
  Vocabulary vocabulary = vocabulary_of({"", "<tu", "rn>", "assistant\n", "<turn>"});
  MarkerTable table = chat_table();
  table.markers = {{{{token(0), text("assistant\n")}}, {}, 2}};
  const Automaton automaton = compile(table, vocabulary);
  EXPECT_EQ(label_stream(automaton, Tokens{1, 2, 3, 3}).phases, std::vector<Phase>(4, kOthers));
  EXPECT_EQ(label_stream(automaton, Tokens{4, 3, 3}).phases, std::vector<Phase>(3, kOthers));
  EXPECT_EQ(label_stream(automaton, Tokens{0, 3, 3}).phases,
            (std::vector<Phase>{kOthers, kOthers, kThink}));
}

TEST(PhaseTracker, ATokenNamedByItsIdIsNeverText) {
  // Token 0 spells the second marker's text.
  MarkerTable table = chat_table();
  table.markers = {{{{token(0)}}, {1}, 0}, {{{text("<t>")}}, {}, 2}};
  const Automaton automaton = compile(table, vocabulary_of({"<t>", "<", "t>"}));
  EXPECT_EQ(label_stream(automaton, Tokens{0}).is_marker, (std::vector<uint8_t>{0}));
  EXPECT_EQ(label_stream(automaton, Tokens{1, 2}).is_marker, (std::vector<uint8_t>{1, 1}));
}

TEST(PhaseTracker, ControlTokensAndIdsBeyondTheVocabularyBreakMarkers) {
  const Automaton automaton = compile(chat_table(), chat_vocabulary());
  for (const int32_t control : {int32_t{kPad}, 10, 1 << 20, INT32_MAX}) {
    const StreamLabels labels = label_stream(
        automaton, Tokens{kTurn, kAssistant, kNewline, kOpen, control, kMerged, kOpen, kMerged});
    EXPECT_EQ(labels.is_marker, (std::vector<uint8_t>{1, 1, 1, 0, 0, 0, 1, 1})) << control;
  }
}

TEST(PhaseTracker, TheCompletingTokenMayEnter) {
  MarkerTable table = chat_table();
  table.completing_token = CompletingToken::entered;
  const StreamLabels labels =
      label_stream(compile(table, chat_vocabulary()),
                   Tokens{kTurn, kAssistant, kNewline, kOpen, kMerged, kWord, kClose, kWord});
  EXPECT_EQ(labels.phases, (std::vector<Phase>{kOthers, kOthers, kOthers, kOthers, kThink, kThink,
                                               kOthers, kOthers}));
}

TEST(PhaseTracker, TheLongestMarkerCountsThenTheFirstListed) {
  MarkerTable table;
  table.states = {{"a", Phase::others}, {"b", Phase::think}, {"c", Phase::act}, {"d", Phase::tool}};
  table.markers = {{{{text("yz")}}, {}, 1}, {{{text("xyz")}}, {0, 1}, 2}, {{{text("xyz")}}, {}, 3}};
  const Automaton automaton = compile(table, vocabulary_of({"xyz", "yz", "w"}));
  const auto state_after = [&](std::initializer_list<int32_t> tokens) {
    PhaseTracker tracker(automaton);
    std::vector<TokenLabel> labels(tokens.size());
    tracker.advance(Tokens(tokens), labels);
    return tracker.state();
  };
  EXPECT_EQ(state_after({1}), 1);
  EXPECT_EQ(state_after({0}), 2);
  EXPECT_EQ(state_after({0, 0}), 3);
}

TEST(PhaseTracker, OneTokenMayHoldSeveralMarkers) {
  MarkerTable table = chat_table();
  table.markers = {{{{text("(")}}, {}, 2}, {{{text(")")}}, {}, 0}};
  const Automaton automaton = compile(table, vocabulary_of({"(a)", "(a)(", "b"}));
  const StreamLabels labels = label_stream(automaton, Tokens{0, 2, 1, 2});
  EXPECT_EQ(labels.phases, (std::vector<Phase>{kOthers, kOthers, kOthers, kThink}));
  EXPECT_EQ(labels.is_marker, (std::vector<uint8_t>{1, 0, 1, 0}));
}

TEST(PhaseTracker, WithoutMarkersThereIsOnePhase) {
  MarkerTable table;
  table.states = {{"everything", Phase::act}};
  const StreamLabels labels = label_stream(compile(table, vocabulary_of({"a"})), Tokens{0, 0, 7});
  EXPECT_EQ(labels.phases, std::vector<Phase>(3, Phase::act));
  EXPECT_EQ(labels.is_marker, std::vector<uint8_t>(3, 0));
  EXPECT_TRUE(label_stream(compile(table, vocabulary_of({})), {}).phases.empty());
}

// ---- Random tables and streams: few different bytes, so that markers overlap all the time.

struct RandomCase {
  MarkerTable table;
  Vocabulary vocabulary;
  Tokens stream;
};

RandomCase random_case(std::mt19937& generator) {
  const auto uniform = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(generator);
  };
  const int letters = uniform(1, 4);
  const auto random_text = [&](int low, int high) {
    std::string bytes(uniform(low, high), 'a');
    // Bytes above 127 too.
    for (char& byte : bytes) byte = static_cast<char>(0xC0 - 1 + uniform(0, letters - 1));
    return bytes;
  };

  RandomCase random;
  const int num_tokens = uniform(1, 10);
  std::vector<std::string> tokens;
  for (int i = 0; i < num_tokens; ++i) tokens.push_back(random_text(i % 3 == 0 ? 0 : 1, 5));
  random.vocabulary = vocabulary_of(tokens);

  MarkerTable& table = random.table;
  const int num_states = uniform(1, 5);
  for (int i = 0; i < num_states; ++i) {
    table.states.push_back({std::to_string(i), static_cast<Phase>(uniform(0, 3))});
  }
  table.initial_state = uniform(0, num_states - 1);
  table.completing_token = static_cast<CompletingToken>(uniform(0, 1));
  for (int i = uniform(0, 6); i > 0; --i) {
    Marker marker;
    for (int s = uniform(1, 2); s > 0; --s) {
      MarkerSpelling spelling;
      for (int piece = uniform(1, 3); piece > 0; --piece) {
        spelling.push_back(uniform(0, 3) == 0 ? token(uniform(0, num_tokens + 1))
                                              : text(random_text(1, 4)));
      }
      marker.spellings.push_back(spelling);
    }
    for (int in = uniform(0, 2); in > 0; --in) {
      marker.in_states.push_back(uniform(0, num_states - 1));
    }
    marker.next_state = uniform(0, num_states - 1);
    table.markers.push_back(marker);
  }
  for (int i = uniform(0, 60); i > 0; --i) random.stream.push_back(uniform(0, num_tokens));
  return random;
}

TEST(PhaseTracker, AgreesWithTheOracleHoweverTheStreamIsCut) {
  std::mt19937 generator(20261129);
  int64_t marker_tokens = 0;
  int64_t reached_back = 0;
  for (int round = 0; round < 4000; ++round) {
    const RandomCase random = random_case(generator);
    const Expected expected = oracle(random.table, random.vocabulary, random.stream);
    const Automaton automaton = compile(random.table, random.vocabulary);

    const StreamLabels whole = label_stream(automaton, random.stream);
    ASSERT_EQ(whole.phases, expected.phases) << "round " << round;
    ASSERT_EQ(whole.is_marker, expected.is_marker) << "round " << round;

    Stream stream(automaton);
    for (size_t begin = 0; begin < random.stream.size();) {
      const size_t count = std::uniform_int_distribution<size_t>(
          0, std::min<size_t>(7, random.stream.size() - begin))(generator);
      const auto first = random.stream.begin() + static_cast<int64_t>(begin);
      // A copy and a saved state go on as the tracker itself would.
      if (generator() % 4 == 0) stream.tracker = PhaseTracker(stream.tracker);
      if (generator() % 4 == 0) {
        stream.tracker = PhaseTracker::restore(automaton, stream.tracker.save());
      }
      const size_t before = stream.is_marker.size();
      const auto known = std::count(stream.is_marker.begin(), stream.is_marker.end(), 1);
      stream.advance(Tokens(first, first + static_cast<int64_t>(count)));
      reached_back += std::count(stream.is_marker.begin(),
                                 stream.is_marker.begin() + static_cast<int64_t>(before), 1) -
                      known;
      begin += count;
    }
    ASSERT_EQ(stream.phases, expected.phases) << "round " << round;
    ASSERT_EQ(stream.is_marker, expected.is_marker) << "round " << round;
    EXPECT_EQ(stream.tracker.state(), expected.last_state);
    EXPECT_EQ(stream.tracker.num_tokens(), static_cast<int64_t>(random.stream.size()));
    for (int32_t phase = 0; phase < kNumPhases; ++phase) {
      EXPECT_EQ(
          stream.tracker.phase_tokens()[phase],
          std::count(expected.phases.begin(), expected.phases.end(), static_cast<Phase>(phase)));
    }
    marker_tokens += std::count(expected.is_marker.begin(), expected.is_marker.end(), 1);
  }
  EXPECT_GT(marker_tokens, 10000);
  EXPECT_GT(reached_back, 500);
}

// ---- Saved states.

std::string argument_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.argument() + " = " + error.value();
  }
  return "nothing thrown";
}

TEST(PhaseTracker, ASavedStateIsOfOneTableAndOneVocabulary) {
  const Automaton automaton = compile(chat_table(), chat_vocabulary());
  const std::string saved = PhaseTracker(automaton).save();
  EXPECT_NO_THROW(PhaseTracker::restore(compile(chat_table(), chat_vocabulary()), saved));

  std::vector<std::pair<MarkerTable, Vocabulary>> others(8, {chat_table(), chat_vocabulary()});
  others[0].first.states[0].name = "another";
  others[1].first.states[0].phase = Phase::tool;
  others[2].first.initial_state = 1;
  others[3].first.completing_token = CompletingToken::entered;
  others[4].first.markers[2].in_states = {0};
  others[5].first.markers[2].next_state = 0;
  others[6].first.markers[2].spellings[0][0].text += ">";
  others[7].second.bytes[0] = '[';
  for (size_t i = 0; i < others.size(); ++i) {
    const Automaton other = compile(others[i].first, others[i].second);
    EXPECT_NE(other->fingerprint(), automaton->fingerprint()) << i;
    EXPECT_EQ(argument_of([&] { PhaseTracker::restore(other, saved); }),
              "saved = a state of another marker table or vocabulary")
        << i;
  }
}

TEST(PhaseTracker, DamagedStatesAreRefusedOrHarmless) {
  const Automaton automaton = compile(chat_table(), chat_vocabulary());
  const Tokens stream{kTurn, kAssistant, kNewline, kOpen};
  PhaseTracker tracker(automaton);
  std::vector<TokenLabel> labels(stream.size());
  tracker.advance(stream, labels);
  const std::string saved = tracker.save();

  for (size_t size = 0; size < saved.size(); ++size) {
    EXPECT_THROW(PhaseTracker::restore(automaton, saved.substr(0, size)), Error) << size;
  }
  EXPECT_THROW(PhaseTracker::restore(automaton, saved + "1234"), Error);
  EXPECT_EQ(argument_of([&] { PhaseTracker::restore(automaton, "PKVphone" + saved.substr(8)); }),
            "saved = other bytes");
  std::string newer = saved;
  newer[8] = 2;
  EXPECT_EQ(argument_of([&] { PhaseTracker::restore(automaton, newer); }), "saved = version 2");
  for (size_t byte = 0; byte < saved.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = saved;
      damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << bit));
      try {
        PhaseTracker restored = PhaseTracker::restore(automaton, damaged);
        restored.advance(stream, labels);
        EXPECT_GE(restored.num_tokens(), 0);
      } catch (const Error& error) {
        EXPECT_EQ(error.argument(), "saved");
      }
    }
  }
}

// ---- Bad arguments.

TEST(PhaseTracker, RefusesBadTokensWithoutEffect) {
  PhaseTracker tracker(compile(chat_table(), chat_vocabulary()));
  std::vector<TokenLabel> labels(2);
  EXPECT_EQ(argument_of([&] { tracker.advance(Tokens{kTurn, -1}, labels); }), "tokens[1] = -1");
  EXPECT_EQ(argument_of([&] { tracker.advance(Tokens{kTurn}, labels); }), "labels = 2 labels");
  EXPECT_EQ(tracker.num_tokens(), 0);
  EXPECT_EQ(argument_of([] { PhaseTracker null(nullptr); }), "automaton = null");
}

TEST(MarkerAutomaton, RefusesBadTablesByField) {
  const auto refused = [](const std::function<void(MarkerTable&)>& change) {
    return argument_of([&] {
      MarkerTable table = chat_table();
      change(table);
      compile(table, chat_vocabulary());
    });
  };
  EXPECT_EQ(refused([](MarkerTable& t) { t.states.clear(); }), "states = none");
  EXPECT_EQ(refused([](MarkerTable& t) { t.initial_state = 3; }), "initial_state = 3");
  EXPECT_EQ(refused([](MarkerTable& t) { t.markers[1].spellings.clear(); }),
            "markers[1].spellings = none");
  EXPECT_EQ(refused([](MarkerTable& t) { t.markers[1].spellings[0].clear(); }),
            "markers[1].spellings[0] = no pieces");
  EXPECT_EQ(refused([](MarkerTable& t) { t.markers[1].spellings[0][1].text.clear(); }),
            "markers[1].spellings[0][1] = empty text");
  EXPECT_EQ(refused([](MarkerTable& t) { t.markers[1].spellings[0][0].text = "x"; }),
            "markers[1].spellings[0][0] = a token and text");
  EXPECT_EQ(refused([](MarkerTable& t) { t.markers[1].spellings[0][0].token = -2; }),
            "markers[1].spellings[0][0].token = -2");
  EXPECT_EQ(refused([](MarkerTable& t) { t.markers[2].in_states = {1, -1}; }),
            "markers[2].in_states[1] = -1");
  EXPECT_EQ(refused([](MarkerTable& t) { t.markers[2].next_state = 3; }),
            "markers[2].next_state = 3");
  EXPECT_EQ(refused([](MarkerTable& t) {
              t.markers[2].spellings[0][0].text = std::string(1 << 20, 'x');
            }),
            "markers = 1048602 bytes and tokens in all");
}

TEST(MarkerAutomaton, RefusesBadVocabulariesByField) {
  const auto refused = [](const std::vector<int64_t>& offsets) {
    return argument_of([&] { compile(chat_table(), {"abcd", offsets}); });
  };
  EXPECT_EQ(refused({}), "vocabulary.offsets = none");
  EXPECT_EQ(refused({1, 4}), "vocabulary.offsets[0] = 1");
  EXPECT_EQ(refused({0, 3, 2, 4}), "vocabulary.offsets[2] = 2");
  EXPECT_EQ(refused({0, 3}), "the last of vocabulary.offsets = 3");
}

TEST(Phase, HasNames) {
  for (int32_t phase = 0; phase < kNumPhases; ++phase) {
    EXPECT_EQ(phase_of_name(name_of(static_cast<Phase>(phase))), static_cast<Phase>(phase));
  }
  EXPECT_EQ(argument_of([] { phase_of_name("thinking"); }), "phase = thinking");
}

}  // namespace
}  // namespace phasekv::phases
