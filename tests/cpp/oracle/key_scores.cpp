#include "oracle/key_scores.h"

#include <algorithm>
#include <cmath>

namespace phasekv::oracle {

namespace {

double norm_of(const Row& row) {
  double squares = 0.0;
  for (const double x : row) squares += x * x;
  return std::sqrt(squares);
}

// [tokens][tokens], zero on the diagonal.
std::vector<Row> cosines_of(const std::vector<Row>& keys) {
  std::vector<Row> unit = keys;
  for (Row& key : unit) {
    const double norm = norm_of(key);
    for (double& x : key) x /= norm + 1e-8;
  }
  std::vector<Row> cosines(keys.size(), Row(keys.size(), 0.0));
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      double dot = 0.0;
      for (size_t d = 0; d < unit[i].size(); ++d) dot += unit[i][d] * unit[j][d];
      cosines[i][j] = cosines[j][i] = dot;
    }
  }
  return cosines;
}

}  // namespace

Row keydiff_score(const std::vector<Row>& keys) {
  if (keys.empty()) return {};
  Row mean(keys[0].size(), 0.0);
  for (const Row& key : keys) {
    const double norm = norm_of(key);
    if (norm == 0.0) continue;
    for (size_t d = 0; d < key.size(); ++d) mean[d] += key[d] / norm;
  }
  Row scores;
  for (const Row& key : keys) {
    double dot = 0.0;
    for (size_t d = 0; d < key.size(); ++d) dot += key[d] * mean[d];
    const double norms = norm_of(key) * norm_of(mean);
    scores.push_back(norms == 0.0 ? 0.0 : -dot / norms);
  }
  return scores;
}

Row key_redundancy(const std::vector<Row>& keys, const std::vector<int64_t>& positions,
                   double threshold) {
  std::vector<Row> cosines = cosines_of(keys);
  const size_t tokens = keys.size();
  for (Row& row : cosines) {
    size_t left_out = tokens;
    size_t first = 0;
    for (size_t j = 0; j < tokens; ++j) {
      if (positions[j] < positions[first]) first = j;
      if (row[j] <= threshold) continue;
      if (left_out == tokens || positions[j] > positions[left_out]) left_out = j;
    }
    row[left_out == tokens ? first : left_out] = 0.0;
  }
  Row result(tokens, 0.0);
  double sum = 0.0;
  for (size_t j = 0; j < tokens; ++j) {
    double mean = 0.0;
    for (size_t i = 0; i < tokens; ++i) mean += cosines[i][j] / static_cast<double>(tokens);
    result[j] = std::exp(mean);
    sum += result[j];
  }
  for (double& x : result) x /= sum;
  return result;
}

double threshold_between_cosines(const std::vector<std::vector<Row>>& heads, double wanted) {
  constexpr double kMargin = 2e-6;
  Row all;
  for (const std::vector<Row>& keys : heads) {
    const std::vector<Row> cosines = cosines_of(keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      all.insert(all.end(), cosines[i].begin(),
                 cosines[i].begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  std::sort(all.begin(), all.end());
  double threshold = wanted;
  for (const double cosine : all) {
    if (std::fabs(cosine - threshold) < kMargin) threshold = cosine + kMargin;
  }
  return threshold;
}

double triattention_score(const HeadStatistics& head, const Row& key,
                          const std::vector<double>& frequencies, RopePairing pairing,
                          double magnitude, int64_t position, int64_t time) {
  const size_t pairs = frequencies.size();
  double score = 0.0;
  for (size_t f = 0; f < pairs; ++f) {
    const double real = key[pairing == RopePairing::neox ? f : 2 * f];
    const double imaginary = key[pairing == RopePairing::neox ? f + pairs : 2 * f + 1];
    const double key_norm = std::hypot(real, imaginary);
    const double query_norm = std::hypot(head.real[f], head.imaginary[f]);
    // The angle of the mean query less that of the key.
    const double angle = std::atan2(head.imaginary[f], head.real[f]) - std::atan2(imaginary, real);
    double mean_cosine = 0.0;
    for (int64_t offset = 1; offset <= 65536; offset *= 2) {
      const auto distance = static_cast<double>(time - position + offset);
      mean_cosine += std::cos(frequencies[f] * distance + angle) / 17.0;
    }
    score +=
        magnitude * magnitude * key_norm * (query_norm * mean_cosine + head.norm[f] - query_norm);
  }
  return score;
}

}  // namespace phasekv::oracle
