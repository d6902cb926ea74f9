#include "oracle/attention_mass.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace phasekv::oracle {

namespace {

size_t group_of(const Attention& attention) {
  return attention.queries[0].size() / attention.keys.size();
}

// scale * q.k for the keys [0, limit).
Row logits(const Attention& attention, size_t query, size_t query_head, int64_t limit) {
  const Row& q = attention.queries[query][query_head];
  const std::vector<Row>& keys = attention.keys[query_head / group_of(attention)];
  Row logits;
  for (int64_t j = 0; j < limit; ++j) {
    double dot = 0.0;
    for (size_t d = 0; d < q.size(); ++d) dot += q[d] * keys[static_cast<size_t>(j)][d];
    logits.push_back(attention.scale * dot);
  }
  return logits;
}

Row softmax(Row weights, int64_t tokens) {
  double largest = -std::numeric_limits<double>::infinity();
  for (const double x : weights) largest = std::max(largest, x);
  double sum = 0.0;
  for (double& x : weights) {
    x = std::exp(x - largest);
    sum += x;
  }
  for (double& x : weights) x /= sum;
  weights.resize(static_cast<size_t>(tokens), 0.0);
  return weights;
}

// What the heads of a group make of one query, [tokens].
Row reduced(const Attention& attention, size_t query, size_t kv_head, int64_t limit,
            GroupReduction group) {
  const size_t heads = group_of(attention);
  Row result;
  for (size_t i = 0; i < heads; ++i) {
    const size_t head = kv_head * heads + i;
    const Row row = group == GroupReduction::max_logit
                        ? logits(attention, query, head, limit)
                        : softmax(logits(attention, query, head, limit), attention.tokens());
    if (i == 0) result = Row(row.size(), group == GroupReduction::mean ? 0.0 : -1e300);
    for (size_t j = 0; j < row.size(); ++j) {
      result[j] = group == GroupReduction::mean ? result[j] + row[j] / static_cast<double>(heads)
                                                : std::max(result[j], row[j]);
    }
  }
  return group == GroupReduction::max_logit ? softmax(result, attention.tokens()) : result;
}

Row pooled(const Row& scores, Pooling pooling, int64_t kernel) {
  if (pooling == Pooling::none) return scores;
  const auto count = static_cast<int64_t>(scores.size());
  Row result;
  for (int64_t j = 0; j < count; ++j) {
    double most = -1e300;
    double sum = 0.0;
    for (int64_t i = j - kernel / 2; i <= j + kernel / 2; ++i) {
      if (i < 0 || i >= count) continue;
      most = std::max(most, scores[static_cast<size_t>(i)]);
      sum += scores[static_cast<size_t>(i)];
    }
    result.push_back(pooling == Pooling::max ? most : sum / static_cast<double>(kernel));
  }
  return result;
}

}  // namespace

double Attention::largest_score() const {
  double largest = 0.0;
  for (size_t query = 0; query < queries.size(); ++query) {
    for (size_t head = 0; head < queries[query].size(); ++head) {
      for (const double x : logits(*this, query, head, tokens())) {
        largest = std::max(largest, std::fabs(x));
      }
    }
  }
  return largest;
}

std::vector<Row> score_keys(const Attention& attention, GroupReduction group, Pooling pooling,
                            int64_t pooling_kernel, int64_t excluded_recent) {
  const int64_t tokens = attention.tokens();
  const int64_t candidates = std::max<int64_t>(0, tokens - excluded_recent);
  std::vector<Row> scores;
  for (size_t kv_head = 0; kv_head < attention.keys.size(); ++kv_head) {
    Row mean(static_cast<size_t>(candidates), 0.0);
    int64_t counted = 0;
    for (size_t query = 0; query < attention.queries.size(); ++query) {
      const int64_t limit = std::min(attention.limits[query], candidates);
      if (limit == 0) continue;
      ++counted;
      const Row row = reduced(attention, query, kv_head, limit, group);
      for (size_t j = 0; j < mean.size(); ++j) mean[j] += row[j];
    }
    for (double& x : mean) x /= static_cast<double>(std::max<int64_t>(counted, 1));
    scores.push_back(pooled(mean, pooling, pooling_kernel));
    scores.back().resize(static_cast<size_t>(tokens), 0.0);
  }
  return scores;
}

std::vector<std::vector<Row>> attention_sums(const Attention& attention,
                                             const std::vector<int32_t>& phases,
                                             int64_t num_phases) {
  const Row zeros(static_cast<size_t>(attention.tokens()), 0.0);
  std::vector<std::vector<Row>> sums(static_cast<size_t>(num_phases),
                                     std::vector<Row>(attention.keys.size(), zeros));
  for (size_t query = 0; query < attention.queries.size(); ++query) {
    if (attention.limits[query] == 0) continue;
    for (size_t kv_head = 0; kv_head < attention.keys.size(); ++kv_head) {
      const Row row =
          reduced(attention, query, kv_head, attention.limits[query], GroupReduction::mean);
      Row& sum = sums[static_cast<size_t>(phases[query])][kv_head];
      for (size_t j = 0; j < sum.size(); ++j) sum[j] += row[j];
    }
  }
  return sums;
}

}  // namespace phasekv::oracle
