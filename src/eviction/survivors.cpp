#include "eviction/survivors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace phasekv::eviction {
namespace {

// Keys of one head. Ties must not depend on where a key happens to lie, so they go by position.
class Head {
 public:
  Head(const PolicyInput& input, std::span<const float> scores, int64_t head)
      : input_(input),
        positions_(input.positions.subspan(static_cast<size_t>(head * input.tokens),
                                           static_cast<size_t>(input.tokens))),
        scores_(scores.subspan(static_cast<size_t>(head * input.tokens),
                               static_cast<size_t>(input.tokens))),
        chosen_(static_cast<size_t>(input.tokens), 0) {}

  void protect(ProtectedTokens tokens) {
    for (size_t i = 0; i < chosen_.size(); ++i) {
      const int64_t position = positions_[i];
      if (position < tokens.sinks || position >= input_.seen - tokens.recent) take(i);
    }
  }

  // Takes the best `count` of those not taken for which `eligible` holds.
  template <typename Eligible>
  void take_best(int64_t count, Eligible eligible) {
    std::vector<size_t> candidates;
    for (size_t i = 0; i < chosen_.size(); ++i) {
      if (chosen_[i] == 0 && eligible(i)) candidates.push_back(i);
    }
    const auto wanted =
        std::min(static_cast<size_t>(std::max<int64_t>(count, 0)), candidates.size());
    std::nth_element(candidates.begin(), candidates.begin() + static_cast<int64_t>(wanted),
                     candidates.end(), [this](size_t a, size_t b) { return is_better(a, b); });
    for (size_t i = 0; i < wanted; ++i) take(candidates[i]);
  }

  int64_t taken() const { return taken_; }
  Phase phase_of(size_t i) const { return input_.phases[static_cast<size_t>(positions_[i])]; }

  void append_chosen(std::vector<int64_t>* survivors) const {
    for (size_t i = 0; i < chosen_.size(); ++i) {
      if (chosen_[i] != 0) survivors->push_back(static_cast<int64_t>(i));
    }
  }

 private:
  bool is_better(size_t a, size_t b) const {
    return scores_[a] != scores_[b] ? scores_[a] > scores_[b] : positions_[a] < positions_[b];
  }

  void take(size_t i) {
    chosen_[i] = 1;
    ++taken_;
  }

  const PolicyInput& input_;
  std::span<const int32_t> positions_;
  std::span<const float> scores_;
  std::vector<uint8_t> chosen_;
  int64_t taken_ = 0;
};

}  // namespace

std::vector<int64_t> choose_survivors(const PolicyInput& input, std::span<const float> scores,
                                      ProtectedTokens protected_tokens, double phase_quota,
                                      int64_t kept) {
  std::vector<int64_t> survivors;
  survivors.reserve(static_cast<size_t>(input.kv_heads() * kept));
  const auto per_phase = static_cast<int64_t>(phase_quota * static_cast<double>(input.budget) /
                                              static_cast<double>(kNumPhases));
  for (int64_t index = 0; index < input.kv_heads(); ++index) {
    Head head(input, scores, index);
    head.protect(protected_tokens);
    for (int32_t phase = 0; per_phase > 0 && phase < kNumPhases; ++phase) {
      head.take_best(std::min(per_phase, kept - head.taken()),
                     [&](size_t i) { return head.phase_of(i) == static_cast<Phase>(phase); });
    }
    head.take_best(kept - head.taken(), [](size_t) { return true; });
    head.append_chosen(&survivors);
  }
  return survivors;
}

}  // namespace phasekv::eviction
