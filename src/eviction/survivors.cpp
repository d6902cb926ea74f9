#include "eviction/survivors.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "eviction/nth_smallest.h"

namespace phasekv::eviction {
namespace {

// Ascending from the best key on: by score, and where scores are equal the older key first, since
// ties must not depend on where a key happens to lie. One number is quicker compared than two.
uint64_t rank_of(float score, int32_t position) {
  const auto bits = std::bit_cast<uint32_t>(score + 0.0F);  // both zeros are +0
  // The bits of negative numbers ascend with their magnitude, those of the others descend below.
  constexpr uint32_t kSign = 0x80000000U;
  const uint32_t descending = (bits & kSign) != 0 ? bits : ~bits & ~kSign;
  return uint64_t{descending} << 32 | static_cast<uint32_t>(position);
}

// Keys of one head.
class Head {
 public:
  Head(const PolicyInput& input, std::span<const float> scores, int64_t head)
      : input_(input),
        positions_(input.positions.subspan(static_cast<size_t>(head * input.tokens),
                                           static_cast<size_t>(input.tokens))),
        ranks_(static_cast<size_t>(input.tokens)),
        chosen_(static_cast<size_t>(input.tokens), 0) {
    const float* own = scores.data() + head * input.tokens;
    for (size_t i = 0; i < ranks_.size(); ++i) ranks_[i] = rank_of(own[i], positions_[i]);
  }

  void protect(ProtectedTokens tokens) {
    for (size_t i = 0; i < chosen_.size(); ++i) {
      const int64_t position = positions_[i];
      if (position < tokens.sinks || position >= input_.seen - tokens.recent) take(i);
    }
  }

  // Takes the best `count` of those not taken for which `eligible` holds.
  template <typename Eligible>
  void take_best(int64_t count, Eligible eligible) {
    std::vector<uint64_t> candidates;
    candidates.reserve(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (chosen_[i] == 0 && eligible(i)) candidates.push_back(ranks_[i]);
    }
    const int64_t wanted = std::min(count, static_cast<int64_t>(candidates.size()));
    if (wanted <= 0) return;
    const uint64_t last = nth_smallest(candidates, static_cast<size_t>(wanted - 1));
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (chosen_[i] == 0 && ranks_[i] <= last && eligible(i)) take(i);
    }
  }

  int64_t taken() const { return taken_; }
  Phase phase_of(size_t i) const { return input_.phases[static_cast<size_t>(positions_[i])]; }

  void append_chosen(std::vector<int64_t>* survivors) const {
    size_t end = survivors->size();
    survivors->resize(end + static_cast<size_t>(taken_) + 1);  // the last is written, not kept
    for (size_t i = 0; i < chosen_.size(); ++i) {
      (*survivors)[end] = static_cast<int64_t>(i);
      end += chosen_[i];
    }
    survivors->resize(end);
  }

 private:
  void take(size_t i) {
    chosen_[i] = 1;
    ++taken_;
  }

  const PolicyInput& input_;
  std::span<const int32_t> positions_;
  std::vector<uint64_t> ranks_;
  std::vector<uint8_t> chosen_;
  int64_t taken_ = 0;
};

}  // namespace

std::vector<int64_t> choose_survivors(const PolicyInput& input, std::span<const float> scores,
                                      ProtectedTokens protected_tokens, double phase_quota,
                                      int64_t kept) {
  std::vector<int64_t> survivors;
  survivors.reserve(static_cast<size_t>(input.kv_heads() * kept) + 1);
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
