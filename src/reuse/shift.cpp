#include "reuse/shift.h"

#include <algorithm>
#include <span>
#include <vector>

#include "reuse/selection.h"

namespace phasekv::reuse {
namespace {

// Each divergence over its mean in the segment, added; an all-zero segment scores zero.
std::vector<float> sum_scores(const SelectionInput& input) {
  std::vector<float> scores(input.key_divergence.size(), 0.0F);
  size_t begin = 0;
  for (const Segment& segment : input.segments) {
    const size_t end = begin + static_cast<size_t>(segment.tokens);
    for (const std::span<const float> divergence : {input.key_divergence, input.value_divergence}) {
      double sum = 0.0;
      for (size_t i = begin; i < end; ++i) sum += divergence[i];
      if (!(sum > 0.0)) continue;
      const auto scale = static_cast<float>(static_cast<double>(segment.tokens) / sum);
      for (size_t i = begin; i < end; ++i) scores[i] += divergence[i] * scale;
    }
    begin = end;
  }
  return scores;
}

// w_j of Algorithm 1, step 3, under each of the rules.
std::vector<float> weights_of(WeightRule rule, std::span<const Segment> segments,
                              std::span<const float> divergence,
                              const std::vector<uint8_t>& probe) {
  std::vector<float> weights(divergence.size(), 1.0F);
  if (rule == WeightRule::one) return weights;
  if (rule == WeightRule::clipped) {
    std::transform(divergence.begin(), divergence.end(), weights.begin(),
                   [](float d) { return std::min(d, 1.0F); });
    return weights;
  }
  size_t begin = 0;
  for (const Segment& segment : segments) {
    const size_t end = begin + static_cast<size_t>(segment.tokens);
    double sum = 0.0;
    int64_t probes = 0;
    for (size_t i = begin; i < end; ++i) {
      if (probe[i] == 0) continue;
      sum += divergence[i];
      ++probes;
    }
    const double mean = probes > 0 ? sum / static_cast<double>(probes) : 0.0;
    for (size_t i = begin; i < end; ++i) {
      weights[i] = mean > 0.0 ? static_cast<float>(divergence[i] / mean) : 0.0F;
    }
    begin = end;
  }
  return weights;
}

class ShiftMethod final : public Method {
 public:
  ShiftMethod(std::string_view name, ShiftRules rules) : name_(name), rules_(rules) {}

  std::string_view name() const override { return name_; }
  int64_t check_layer() const override { return 1; }
  bool shifts() const override { return true; }
  OffsetFrame frame() const override { return rules_.frame; }

  Selection select(const SelectionInput& input) const override {
    check_input(input, /*needs_divergence=*/true);
    Selection selection;
    switch (rules_.probes) {
      case ProbeRule::separate:
        selection.key_probe = top_per_segment(input.segments, input.key_divergence, input.ratio);
        selection.value_probe =
            top_per_segment(input.segments, input.value_divergence, input.ratio);
        break;
      case ProbeRule::sum:
        selection = recompute_only(top_per_segment(input.segments, sum_scores(input), input.ratio));
        break;
      case ProbeRule::key:
        selection =
            recompute_only(top_per_segment(input.segments, input.key_divergence, input.ratio));
        break;
      case ProbeRule::value:
        selection =
            recompute_only(top_per_segment(input.segments, input.value_divergence, input.ratio));
        break;
    }
    selection.key_weight =
        weights_of(rules_.weight, input.segments, input.key_divergence, selection.key_probe);
    selection.value_weight =
        weights_of(rules_.weight, input.segments, input.value_divergence, selection.value_probe);
    return selection;
  }

 private:
  std::string_view name_;
  ShiftRules rules_;
};

}  // namespace

std::unique_ptr<Method> make_shift_method(std::string_view name, ShiftRules rules,
                                          const MethodOptions& options) {
  refuse_options(name, options, /*has_shift_options=*/true, /*has_boundary_tokens=*/false);
  rules.frame = options.frame.value_or(rules.frame);
  rules.weight = options.weight.value_or(rules.weight);
  rules.probes = options.probes.value_or(rules.probes);
  return std::make_unique<ShiftMethod>(name, rules);
}

}  // namespace phasekv::reuse
