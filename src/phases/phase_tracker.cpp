#include "phasekv/phases/phase_tracker.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "phasekv/error.h"

namespace phasekv::phases {
namespace {

// Saved states: a name, a version, and little-endian numbers.
constexpr std::string_view kMagic = "PKVphase";
constexpr uint32_t kVersion = 1;

// More tokens than any stream has; sums of counts cannot overflow.
constexpr int64_t kMaxTokens = int64_t{1} << 60;

template <class Integer>
void append(std::string& out, Integer value) {
  for (size_t i = 0; i < sizeof(Integer); ++i) {
    out.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  }
}

[[noreturn]] void refuse_saved(const std::string& value, const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, "saved", value, reason);
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view read(size_t size) {
    if (bytes_.size() < size) refuse_saved("a state that is cut off", "a whole one");
    const std::string_view read = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return read;
  }

  template <class Integer>
  Integer read_integer() {
    uint64_t value = 0;
    const std::string_view bytes = read(sizeof(Integer));
    for (size_t i = 0; i < sizeof(Integer); ++i) {
      value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    }
    return static_cast<Integer>(value);
  }

  size_t remaining() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
};

std::shared_ptr<const MarkerAutomaton> checked(std::shared_ptr<const MarkerAutomaton> automaton) {
  if (!automaton) throw Error(ErrorCode::invalid_argument, "automaton", "null", "an automaton");
  return automaton;
}

}  // namespace

PhaseTracker::PhaseTracker(std::shared_ptr<const MarkerAutomaton> automaton)
    : automaton_(checked(std::move(automaton))), state_(automaton_->initial_state_) {}

int64_t PhaseTracker::num_tokens() const {
  return std::accumulate(phase_tokens_.begin(), phase_tokens_.end(), int64_t{0});
}

// Tokens that hold the last `symbols`, of which the current token has given `symbols_of_current` so
// far.
int32_t PhaseTracker::tokens_in_last(uint32_t symbols, uint32_t symbols_of_current) const {
  int32_t tokens = 1;
  uint32_t held = symbols_of_current;
  for (auto before = recent_symbols_.rbegin(); held < symbols; ++before) {
    held += *before;
    ++tokens;
  }
  return tokens;
}

void PhaseTracker::remember(uint32_t symbols_of_current) {
  const uint32_t depth = automaton_->depths_[node_];
  if (depth == 0) {
    recent_symbols_.clear();
    return;
  }
  recent_symbols_.push_back(symbols_of_current);
  uint32_t held = 0;
  auto first = recent_symbols_.end();
  while (held < depth) held += *--first;
  recent_symbols_.erase(recent_symbols_.begin(), first);
}

void PhaseTracker::advance(std::span<const int32_t> tokens, std::span<TokenLabel> labels) {
  if (labels.size() != tokens.size()) {
    throw Error(ErrorCode::invalid_argument, "labels", std::to_string(labels.size()) + " labels",
                "one for each of " + std::to_string(tokens.size()) + " tokens");
  }
  const auto negative = std::find_if(tokens.begin(), tokens.end(), [](int32_t t) { return t < 0; });
  if (negative != tokens.end()) {
    throw Error(ErrorCode::invalid_argument,
                "tokens[" + std::to_string(negative - tokens.begin()) + "]",
                std::to_string(*negative), "a token id of at least 0");
  }

  const MarkerAutomaton& automaton = *automaton_;
  const size_t num_states = automaton.states_.size();
  for (size_t i = 0; i < tokens.size(); ++i) {
    TokenLabel label{phase(), 0};
    uint32_t symbols = 0;
    for (const MarkerAutomaton::Symbol symbol : automaton.symbols_of(tokens[i])) {
      ++symbols;
      node_ = automaton.transitions_[size_t{node_} * automaton.num_symbols_ + symbol];
      const int32_t row = automaton.rows_of_effects_[node_];
      if (row < 0) continue;
      const auto& effect = automaton.effects_[static_cast<size_t>(row) * num_states + state_];
      if (effect.next_state < 0) continue;
      state_ = effect.next_state;
      label.marker_tokens = std::max(label.marker_tokens, tokens_in_last(effect.length, symbols));
    }
    remember(symbols);
    if (label.marker_tokens > 0 && automaton.completing_token_ == CompletingToken::entered) {
      label.phase = phase();
    }
    ++phase_tokens_[static_cast<size_t>(label.phase)];
    labels[i] = label;
  }
}

std::string PhaseTracker::save() const {
  std::string saved(kMagic);
  append(saved, kVersion);
  append(saved, automaton_->fingerprint_);
  append(saved, node_);
  append(saved, state_);
  for (const int64_t count : phase_tokens_) append(saved, count);
  for (const uint32_t symbols : recent_symbols_) append(saved, symbols);
  return saved;
}

PhaseTracker PhaseTracker::restore(std::shared_ptr<const MarkerAutomaton> automaton,
                                   std::string_view saved) {
  PhaseTracker tracker(std::move(automaton));
  Reader reader(saved);
  if (reader.read(kMagic.size()) != kMagic) {
    refuse_saved("other bytes", "the saved state of a phase tracker");
  }
  const auto version = reader.read_integer<uint32_t>();
  if (version != kVersion) {
    refuse_saved("version " + std::to_string(version), "version " + std::to_string(kVersion));
  }
  if (reader.read_integer<uint64_t>() != tracker.automaton_->fingerprint_) {
    refuse_saved("a state of another marker table or vocabulary", "one of the table in use");
  }
  tracker.node_ = reader.read_integer<uint32_t>();
  tracker.state_ = reader.read_integer<int32_t>();
  for (int64_t& count : tracker.phase_tokens_) count = reader.read_integer<int64_t>();

  const char* const damaged = "a damaged state";
  const char* const whole = "one as save() wrote it";
  if (tracker.node_ >= tracker.automaton_->depths_.size() || tracker.state_ < 0 ||
      static_cast<size_t>(tracker.state_) >= tracker.automaton_->states_.size() ||
      reader.remaining() % sizeof(uint32_t) != 0) {
    refuse_saved(damaged, whole);
  }
  // What remember() keeps true; advance() relies on it.
  const uint64_t depth = tracker.automaton_->depths_[tracker.node_];
  uint64_t held = 0;
  while (reader.remaining() > 0) {
    tracker.recent_symbols_.push_back(reader.read_integer<uint32_t>());
    if (tracker.recent_symbols_.back() == 0) refuse_saved(damaged, whole);
    held += tracker.recent_symbols_.back();
  }
  const uint64_t first = tracker.recent_symbols_.empty() ? 0 : tracker.recent_symbols_.front();
  const bool tight = depth == 0 ? held == 0 : held >= depth && held - first < depth;
  const bool counted = std::all_of(tracker.phase_tokens_.begin(), tracker.phase_tokens_.end(),
                                   [](int64_t count) { return count >= 0 && count < kMaxTokens; });
  if (!tight || !counted) refuse_saved(damaged, whole);
  return tracker;
}

StreamLabels label_stream(const std::shared_ptr<const MarkerAutomaton>& automaton,
                          std::span<const int32_t> tokens) {
  PhaseTracker tracker(automaton);
  std::vector<TokenLabel> labels(tokens.size());
  tracker.advance(tokens, labels);
  StreamLabels stream;
  stream.phases.reserve(tokens.size());
  stream.is_marker.resize(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    stream.phases.push_back(labels[i].phase);
    const auto end = stream.is_marker.begin() + static_cast<int64_t>(i) + 1;
    std::fill(end - labels[i].marker_tokens, end, uint8_t{1});
  }
  return stream;
}

}  // namespace phasekv::phases
