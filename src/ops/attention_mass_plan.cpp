#include "ops/attention_mass_plan.h"

#include <algorithm>
#include <tuple>

namespace phasekv {
namespace {

// Query vectors (queries times query heads of a KV head) in a tile: their weights for some thousand
// keys should stay in a cache of their own core until they are added up, and reading a key should
// be amortised.
constexpr int64_t kVectorsPerTile = 48;

// Waking a thread costs about as much as this many multiplications.
constexpr int64_t kMultiplicationsPerThread = int64_t{1} << 18;

}  // namespace

AttentionMassPlan::AttentionMassPlan(int64_t num_queries, const int64_t* limits, int64_t most_limit,
                                     const int32_t* phases, int64_t group, int64_t kv_heads,
                                     int64_t head_size, int threads) {
  const auto phase_of = [&](int64_t row) { return phases == nullptr ? 0 : phases[row]; };
  int64_t multiplications = 0;
  for (int64_t row = 0; row < num_queries; ++row) {
    const int64_t limit = limits == nullptr ? most_limit : std::min(limits[row], most_limit);
    if (limit <= 0) continue;
    queries_.push_back({row, limit});
    multiplications += limit * group * kv_heads * head_size;
  }
  std::sort(queries_.begin(), queries_.end(), [&](const MassQuery& a, const MassQuery& b) {
    return std::tuple(phase_of(a.row), a.limit, a.row) <
           std::tuple(phase_of(b.row), b.limit, b.row);
  });

  const int64_t queries_per_tile = std::max<int64_t>(1, kVectorsPerTile / group);
  const auto count = static_cast<int64_t>(queries_.size());
  for (int64_t first = 0, last = 0; first < count; first = last) {
    const int32_t phase = phase_of(queries_[static_cast<size_t>(first)].row);
    while (last < count && last - first < queries_per_tile &&
           phase_of(queries_[static_cast<size_t>(last)].row) == phase) {
      ++last;
    }
    tiles_.push_back({first, last - first, phase});
    max_queries_per_tile_ = std::max(max_queries_per_tile_, last - first);
  }
  const int64_t useful = multiplications / kMultiplicationsPerThread;
  num_threads_ = static_cast<int>(std::clamp<int64_t>(useful, 1, threads));
}

AttentionMassPlan::~AttentionMassPlan() = default;

const MassQuery* AttentionMassPlan::queries() const { return queries_.data(); }
int64_t AttentionMassPlan::num_queries() const { return static_cast<int64_t>(queries_.size()); }
const MassTile* AttentionMassPlan::tiles() const { return tiles_.data(); }
int64_t AttentionMassPlan::num_tiles() const { return static_cast<int64_t>(tiles_.size()); }
int64_t AttentionMassPlan::max_queries_per_tile() const { return max_queries_per_tile_; }
int AttentionMassPlan::num_threads() const { return num_threads_; }

}  // namespace phasekv
