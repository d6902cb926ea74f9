#include "oracle/residuals.h"

namespace phasekv::oracle {

double squared_distance(const RowsBuffer& fresh, const RowsBuffer& cached, int64_t token) {
  double sum = 0.0;
  for (int64_t head = 0; head < fresh.view().heads; ++head) {
    const Row a = fresh.row(token, head);
    const Row b = cached.row(token, head);
    for (size_t d = 0; d < a.size(); ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
  }
  return sum;
}

Row mean_residual(const std::vector<std::pair<Row, Row>>& pairs, int64_t head_size) {
  Row mean(static_cast<size_t>(head_size), 0.0);
  for (const auto& [fresh, cached] : pairs) {
    for (size_t d = 0; d < mean.size(); ++d) mean[d] += fresh[d] - cached[d];
  }
  for (double& x : mean) x /= pairs.empty() ? 1.0 : static_cast<double>(pairs.size());
  return mean;
}

}  // namespace phasekv::oracle
