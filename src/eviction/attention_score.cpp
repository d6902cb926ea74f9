#include "eviction/attention_score.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

namespace phasekv::eviction {

AttentionRules with_options(AttentionRules rules, const PolicyOptions& options) {
  rules.group = options.group.value_or(rules.group);
  rules.pooling = options.pooling.value_or(rules.pooling);
  rules.pooling_kernel = options.pooling_kernel.value_or(rules.pooling_kernel);
  return rules;
}

namespace {

// Pools the scores of one head over tokens that were neighbours in the text: after an event they
// may lie anywhere.
void pool_by_position(std::span<const int32_t> positions, const AttentionRules& rules,
                      std::span<float> scores) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return positions[a] < positions[b]; });
  std::vector<float> ordered(scores.size());
  for (size_t i = 0; i < order.size(); ++i) ordered[i] = scores[order[i]];
  const auto reach = static_cast<size_t>(rules.pooling_kernel / 2);
  for (size_t i = 0; i < order.size(); ++i) {
    const auto begin = ordered.begin() + static_cast<int64_t>(i - std::min(i, reach));
    const auto end = ordered.begin() + static_cast<int64_t>(std::min(i + reach + 1, order.size()));
    scores[order[i]] = rules.pooling == Pooling::max ? *std::max_element(begin, end)
                                                     : std::accumulate(begin, end, 0.0F) /
                                                           static_cast<float>(rules.pooling_kernel);
  }
}

}  // namespace

void score_attention(const PolicyInput& input, const AttentionRules& rules,
                     std::span<float> scores) {
  ScoreKeysParams params;
  params.query = input.queries;
  params.key = input.key;
  params.block_table = input.block_table;
  params.first_token = input.first_token;
  params.tokens = input.tokens;
  params.query_limits = rules.causal ? input.query_limits.data() : nullptr;
  params.excluded_recent = std::min(rules.excluded_recent, input.tokens);
  params.group = rules.group;
  params.scale = input.scale;
  params.scores = scores.data();
  input.backend->score_keys(params);
  if (rules.pooling == Pooling::none) return;
  const auto tokens = static_cast<size_t>(input.tokens);
  const auto candidates = static_cast<size_t>(input.tokens - params.excluded_recent);
  input.when_computed([&input, &rules, scores, tokens, candidates] {
    for (size_t head = 0; head < static_cast<size_t>(input.kv_heads()); ++head) {
      pool_by_position(input.positions.subspan(head * tokens, candidates), rules,
                       scores.subspan(head * tokens, candidates));
    }
  });
}

void subtract_redundancy(const PolicyInput& input, double share, std::span<float> scores) {
  if (share == 0.0) return;
  constexpr float kSimilar = 0.5F;  // cosine above which two keys say the same
  const auto redundancy = std::make_shared<std::vector<float>>(scores.size());
  KeyRedundancyParams params;
  params.key = input.key;
  params.block_table = input.block_table;
  params.first_token = input.first_token;
  params.tokens = input.tokens;
  params.positions = input.positions.data();
  params.threshold = kSimilar;
  params.redundancy = redundancy->data();
  input.backend->key_redundancy(params);
  const auto weight = static_cast<float>(share);
  input.when_computed([scores, weight, redundancy] {
    for (size_t i = 0; i < scores.size(); ++i) {
      scores[i] = (1.0F - weight) * scores[i] - weight * (*redundancy)[i];
    }
  });
}

}  // namespace phasekv::eviction
