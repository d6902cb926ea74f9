// AdaKV (arXiv 2407.11550): SnapKV's scores, and the KV heads of a layer compete for its budget.
// Each head keeps its protected tokens and its best up to a safeguard, by default 0.2 of what it
// would keep if all kept alike; what is left of the layer's budget goes to the best of all heads'
// other keys.
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "eviction/allocation.h"
#include "eviction/options.h"
#include "eviction/ragged_policy.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_snapkv(const PolicyOptions& options);

namespace {

struct Candidate {
  float score;
  int32_t position;
  size_t head;

  // Ties go to the older key, as everywhere.
  bool is_better(const Candidate& other) const {
    if (score != other.score) return score > other.score;
    return position != other.position ? position < other.position : head < other.head;
  }
};

// Moves the best `count` of the candidates to the front.
void put_best_first(std::vector<Candidate>* candidates, int64_t count) {
  std::nth_element(candidates->begin(), candidates->begin() + count, candidates->end(),
                   [](const Candidate& a, const Candidate& b) { return a.is_better(b); });
}

class AdaKv final : public RaggedPolicy {
 public:
  AdaKv(std::unique_ptr<Policy> scores, double safeguard)
      : RaggedPolicy("adakv", std::move(scores)), safeguard_(safeguard) {}

  std::vector<int64_t> allocate(const LayerScores& layer) const override {
    const ProtectedTokens kept = protected_tokens(layer.budget);
    const auto safe = static_cast<int64_t>(safeguard_ * static_cast<double>(layer.kept));
    std::vector<int64_t> counts;
    std::vector<Candidate> rest;
    for (size_t head = 0; head < layer.heads.size(); ++head) {
      const HeadScores& keys = layer.heads[head];
      std::vector<Candidate> candidates;
      for (size_t i = 0; i < keys.scores.size(); ++i) {
        if (is_protected(keys.positions[i], kept, layer.seen)) continue;
        candidates.push_back({keys.scores[i], keys.positions[i], head});
      }
      const auto unprotected = static_cast<int64_t>(candidates.size());
      const int64_t always = static_cast<int64_t>(keys.scores.size()) - unprotected;
      const int64_t safeguarded = std::clamp<int64_t>(safe - always, 0, unprotected);
      put_best_first(&candidates, safeguarded);
      counts.push_back(always + safeguarded);
      rest.insert(rest.end(), candidates.begin() + safeguarded, candidates.end());
    }
    const int64_t total = layer.kept * static_cast<int64_t>(counts.size());
    const int64_t taken = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const auto left = std::clamp<int64_t>(total - taken, 0, static_cast<int64_t>(rest.size()));
    put_best_first(&rest, left);
    for (int64_t i = 0; i < left; ++i) ++counts[rest[static_cast<size_t>(i)].head];
    return counts;
  }

 private:
  double safeguard_;
};

}  // namespace

std::unique_ptr<Policy> make_adakv(const PolicyOptions& options) {
  check_options(
      "adakv", options,
      {.queries = true, .recent = true, .attention = true, .redundancy = true, .safeguard = true});
  PolicyOptions of_scores = options;
  of_scores.safeguard.reset();
  return std::make_unique<AdaKv>(make_snapkv(of_scores), options.safeguard.value_or(0.2));
}

}  // namespace phasekv::eviction
