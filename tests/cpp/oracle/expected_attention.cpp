#include "oracle/expected_attention.h"

#include <cmath>
#include <numeric>

namespace phasekv::oracle {
namespace {

double dot(const Row& a, const Row& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// The mean of a query over the positions to come.
Row expected_query(const ExpectedAttention& head, const Row& query, int64_t position) {
  Row mean(query.size(), 0.0);
  for (int64_t i = 0; i < head.horizon; ++i) {
    const Row ahead =
        rotate(query, head.frequencies, head.pairing, head.next_position + i - position);
    for (size_t d = 0; d < mean.size(); ++d) {
      mean[d] += ahead[d] / static_cast<double>(head.horizon);
    }
  }
  return mean;
}

// Mean of the logits plus half their variance.
double expected_logit(const std::vector<Row>& queries, const Row& key, double scale) {
  if (queries.empty()) return 0.0;
  const auto count = static_cast<double>(queries.size());
  double mean = 0.0;
  for (const Row& query : queries) mean += scale * dot(query, key) / count;
  double variance = 0.0;
  for (const Row& query : queries) {
    variance += std::pow(scale * dot(query, key) - mean, 2) / count;
  }
  return mean + variance / 2.0;
}

}  // namespace

Row expected_attention_score(const ExpectedAttention& head) {
  Row scores(head.keys.size(), 0.0);
  for (const std::vector<Row>& member : head.queries) {
    std::vector<Row> queries;
    for (size_t i = 0; i < member.size(); ++i) {
      if (head.query_positions[i] < head.sinks) continue;
      queries.push_back(expected_query(head, member[i], head.query_positions[i]));
    }
    Row weights;
    double sum = 0.0;
    for (size_t j = 0; j < head.keys.size(); ++j) {
      const bool is_sink = head.positions[j] < head.sinks;
      weights.push_back(is_sink ? 0.0
                                : std::exp(expected_logit(queries, head.keys[j], head.scale)));
      sum += weights.back();
    }
    for (size_t j = 0; j < head.keys.size(); ++j) {
      if (weights[j] == 0.0) continue;
      scores[j] += weights[j] / sum * std::sqrt(dot(head.values[j], head.values[j])) /
                   static_cast<double>(head.queries.size());
    }
  }
  return scores;
}

}  // namespace phasekv::oracle
