#include "oracle/attend_rows_oracle.h"

#include <cmath>
#include <limits>

namespace phasekv::oracle {

std::vector<double> attend(const DenseKV& kv, int64_t kv_head, const double* query, double scale,
                           int64_t limit, double* most) {
  *most = 0.0;
  std::vector<double> scores(limit);
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t k = 0; k < limit; ++k) {
    const double* key = kv.keys.data() + (k * kv.num_heads + kv_head) * kv.head_size;
    double dot = 0.0;
    for (int64_t d = 0; d < kv.head_size; ++d) dot += query[d] * key[d];
    scores[k] = scale * dot;
    if (scores[k] > largest) largest = scores[k];
    if (std::fabs(scores[k]) > *most) *most = std::fabs(scores[k]);
  }
  std::vector<double> out(kv.head_size, 0.0);
  double sum = 0.0;
  for (int64_t k = 0; k < limit; ++k) {
    const double* value = kv.values.data() + (k * kv.num_heads + kv_head) * kv.head_size;
    const double weight = std::exp(scores[k] - largest);
    sum += weight;
    for (int64_t d = 0; d < kv.head_size; ++d) out[d] += weight * value[d];
  }
  for (double& x : out) {
    if (sum > 0.0) x /= sum;
  }
  return out;
}

}  // namespace phasekv::oracle
