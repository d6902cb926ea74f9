#include "phasekv/ops/select_top.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "validate.h"

namespace phasekv {

namespace {

void check(const SelectTopParams& params) {
  const int64_t tokens = check_segment_starts(params.segment_starts, params.num_segments);
  check_not_null("scores", params.scores, tokens);
  check_not_null("counts", params.counts, params.num_segments);
  for (int64_t i = 0; i < tokens; ++i) {
    if (std::isnan(params.scores[i])) {
      refuse("scores[" + std::to_string(i) + "]", "nan", "a number, which can be ranked");
    }
  }
  for (int64_t i = 0; i < params.num_segments; ++i) {
    if (params.counts[i] < 0) {
      refuse("counts[" + std::to_string(i) + "]", params.counts[i], "at least 0");
    }
  }
}

}  // namespace

std::vector<int64_t> select_top(const SelectTopParams& params) {
  check(params);
  std::vector<int64_t> chosen;
  std::vector<int64_t> candidates;
  // A total order, so the same tokens are chosen whatever the sorting algorithm.
  const auto comes_first = [&params](int64_t a, int64_t b) {
    if (params.scores[a] != params.scores[b]) return params.scores[a] > params.scores[b];
    return a < b;
  };
  for (int64_t segment = 0; segment < params.num_segments; ++segment) {
    const auto first = static_cast<std::ptrdiff_t>(chosen.size());
    candidates.clear();
    for (int64_t i = params.segment_starts[segment]; i < params.segment_starts[segment + 1]; ++i) {
      const bool is_pinned = params.pinned != nullptr && params.pinned[i] != 0;
      (is_pinned ? chosen : candidates).push_back(i);
    }
    const auto pinned = static_cast<int64_t>(chosen.size()) - first;
    const int64_t wanted = std::clamp<int64_t>(params.counts[segment] - pinned, 0,
                                               static_cast<int64_t>(candidates.size()));
    std::nth_element(candidates.begin(), candidates.begin() + wanted, candidates.end(),
                     comes_first);
    chosen.insert(chosen.end(), candidates.begin(), candidates.begin() + wanted);
    std::sort(chosen.begin() + first, chosen.end());
  }
  return chosen;
}

}  // namespace phasekv
