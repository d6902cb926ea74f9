#include "eviction/allocation.h"

#include <algorithm>
#include <string>

#include "phasekv/error.h"

namespace phasekv::eviction {

std::vector<int64_t> Policy::allocate(const LayerScores& layer) const {
  return alike(layer, layer.kept);
}

std::vector<int64_t> alike(const LayerScores& layer, int64_t count) {
  std::vector<int64_t> counts;
  counts.reserve(layer.heads.size());
  for (const HeadScores& head : layer.heads) {
    counts.push_back(std::min(count, static_cast<int64_t>(head.positions.size())));
  }
  return counts;
}

int64_t count_protected(const HeadScores& head, ProtectedTokens tokens, int64_t seen) {
  return std::count_if(head.positions.begin(), head.positions.end(),
                       [&](int32_t position) { return is_protected(position, tokens, seen); });
}

std::vector<int64_t> checked_allocation(const Policy& policy, const LayerScores& layer) {
  std::vector<int64_t> counts = policy.allocate(layer);
  const ProtectedTokens kept = policy.protected_tokens(layer.budget);
  bool fits = counts.size() == layer.heads.size();
  for (size_t head = 0; fits && head < counts.size(); ++head) {
    const auto held = static_cast<int64_t>(layer.heads[head].positions.size());
    const int64_t least = count_protected(layer.heads[head], kept, layer.seen);
    fits = least <= counts[head] && counts[head] <= held;
  }
  if (!fits) {
    throw Error(ErrorCode::invalid_argument, "allocation", std::string(policy.name()),
                "for every KV head at least its protected keys, at most those it holds");
  }
  return counts;
}

}  // namespace phasekv::eviction
