// PyramidKV (arXiv 2406.02069): SnapKV's scores, and budgets that fall linearly from the first
// layer to the last, since attention spreads in early layers and narrows in late ones. Of the
// tokens that are not protected, of which a layer keeps M on average, the last layer keeps M / beta
// (`steepness`, 20 by default), the first what makes the total right, but at most all there are.
//
// Here budgets are whole blocks, and their total is exactly `layers` times the budget: two layers
// equally far from the two ends share two budgets between them.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "eviction/allocation.h"
#include "eviction/options.h"
#include "eviction/ragged_policy.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_snapkv(const PolicyOptions& options);

namespace {

int64_t round_up(int64_t tokens, int64_t block_size) {
  return (tokens + block_size - 1) / block_size * block_size;
}

// Of a layer, whose request has seen `most_tokens` up to the last multiple of the stride.
int64_t budget_of(const LayerScores& layer, double steepness, int64_t protected_tokens,
                  int64_t most_tokens) {
  const int64_t from_end = std::min(layer.layer, layer.layers - 1 - layer.layer);
  if (layer.layers == 2 * from_end + 1) return layer.budget;  // the one in the middle
  const auto mean = static_cast<double>(layer.budget - protected_tokens);
  const double first =
      std::min(2.0 * mean - mean / steepness, static_cast<double>(most_tokens - protected_tokens));
  const double last = 2.0 * mean - first;
  const double share = static_cast<double>(from_end) / static_cast<double>(layer.layers - 1);
  const double tokens = static_cast<double>(protected_tokens) + first - share * (first - last);
  const int64_t blocks = std::llround(tokens / static_cast<double>(layer.block_size));
  const int64_t most = std::min(most_tokens / layer.block_size * layer.block_size,
                                2 * layer.budget - round_up(protected_tokens, layer.block_size));
  const int64_t upper = std::clamp(blocks * layer.block_size, layer.budget, most);
  return layer.layer == from_end ? upper : 2 * layer.budget - upper;
}

class PyramidKv final : public RaggedPolicy {
 public:
  PyramidKv(std::unique_ptr<Policy> scores, double steepness)
      : RaggedPolicy("pyramidkv", std::move(scores)), steepness_(steepness) {}

  std::vector<int64_t> allocate(const LayerScores& layer) const override {
    const ProtectedTokens kept = protected_tokens(layer.budget);
    const int64_t newest = layer.kept - layer.budget;  // since the last multiple of the stride
    const int64_t budget =
        budget_of(layer, steepness_, kept.sinks + kept.recent, layer.seen - newest);
    return alike(layer, budget + newest);
  }

 private:
  double steepness_;
};

}  // namespace

std::unique_ptr<Policy> make_pyramidkv(const PolicyOptions& options) {
  check_options(
      "pyramidkv", options,
      {.queries = true, .recent = true, .attention = true, .redundancy = true, .steepness = true});
  PolicyOptions of_scores = options;
  of_scores.steepness.reset();
  return std::make_unique<PyramidKv>(make_snapkv(of_scores), options.steepness.value_or(20.0));
}

}  // namespace phasekv::eviction
