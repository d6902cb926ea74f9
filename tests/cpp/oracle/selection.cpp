#include "oracle/selection.h"

#include <algorithm>
#include <tuple>

namespace phasekv::oracle {

std::vector<int64_t> select_top(const std::vector<float>& scores,
                                const std::vector<int64_t>& segment_starts,
                                const std::vector<int64_t>& counts,
                                const std::vector<uint8_t>& pinned) {
  std::vector<int64_t> chosen;
  for (size_t s = 0; s < counts.size(); ++s) {
    // Sorted by (not pinned, -score, index), the chosen ones come first.
    std::vector<std::tuple<bool, float, int64_t>> ranked;
    int64_t wanted = counts[s];
    int64_t pinned_here = 0;
    for (int64_t i = segment_starts[s]; i < segment_starts[s + 1]; ++i) {
      const bool is_pinned = !pinned.empty() && pinned[static_cast<size_t>(i)] != 0;
      pinned_here += is_pinned ? 1 : 0;
      ranked.emplace_back(!is_pinned, -scores[static_cast<size_t>(i)], i);
    }
    std::sort(ranked.begin(), ranked.end());
    wanted = std::min(std::max(wanted, pinned_here), static_cast<int64_t>(ranked.size()));
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < wanted; ++i) {
      indices.push_back(std::get<2>(ranked[static_cast<size_t>(i)]));
    }
    std::sort(indices.begin(), indices.end());
    chosen.insert(chosen.end(), indices.begin(), indices.end());
  }
  return chosen;
}

}  // namespace phasekv::oracle
