#include "ops/attend_rows_plan.h"

#include <algorithm>
#include <numeric>

namespace phasekv {
namespace {

// Query vectors (rows times query heads of a KV head) that share one pass over the keys. More of
// them amortise reading a block better, until queries and outputs crowd it out of the cache.
constexpr int64_t kQueriesPerTask = 96;
constexpr int64_t kLeastQueriesPerTask = 24;
constexpr int64_t kTasksPerThread = 4;

// Waking a thread costs about as much as this many multiplications.
constexpr int64_t kMultiplicationsPerThread = int64_t{1} << 18;

// A request with few rows (decode) gives few tasks, so its keys are cut as well.
constexpr int64_t kFewQueries = 64;
constexpr int64_t kKeysPerPart = 2048;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pairs of a row and a key, about: what the longest-first order sorts by.
int64_t cost_of(const AttendTask& task) { return task.num_rows * (task.key_end - task.key_begin); }

}  // namespace

AttendPlan::AttendPlan(const AttendRowsParams& params, int threads)
    : row_order_(static_cast<size_t>(params.query.tokens)) {
  const int64_t rows = params.query.tokens;
  std::iota(row_order_.begin(), row_order_.end(), 0);

  const int64_t group = params.query.heads / params.key.num_heads;
  int64_t queries_per_task = kQueriesPerTask;
  while (queries_per_task > kLeastQueriesPerTask &&
         ceil_div(rows * group, queries_per_task) * params.key.num_heads <
             kTasksPerThread * threads) {
    queries_per_task /= 2;
  }
  const int64_t rows_per_task = std::max<int64_t>(1, queries_per_task / group);

  for (int64_t first = 0, last = 0; first < rows; first = last) {
    while (last < rows && params.row_requests[last] == params.row_requests[first]) ++last;
    plan_request(params, first, last - first, rows_per_task);
  }
  std::stable_sort(tasks_.begin(), tasks_.end(), [](const AttendTask& a, const AttendTask& b) {
    return cost_of(a) > cost_of(b);
  });

  int64_t cost = 0;
  for (const AttendTask& task : tasks_) cost += cost_of(task);
  const int64_t useful = cost * group * 2 * params.key.head_size / kMultiplicationsPerThread;
  num_threads_ = static_cast<int>(std::clamp<int64_t>(useful, 1, threads));
}

AttendPlan::~AttendPlan() = default;

void AttendPlan::plan_request(const AttendRowsParams& params, int64_t first_row, int64_t num_rows,
                              int64_t rows_per_task) {
  const auto limit_of = [&](int64_t row) { return params.row_limits[row]; };
  const auto begin = row_order_.begin() + first_row;
  const auto by_limit = [&](int64_t a, int64_t b) { return limit_of(a) < limit_of(b); };
  if (!std::is_sorted(begin, begin + num_rows, by_limit)) {
    std::stable_sort(begin, begin + num_rows, by_limit);
  }

  const int64_t group = params.query.heads / params.key.num_heads;
  const int64_t block_size = params.key.block_size;
  const int64_t keys_per_part = ceil_div(kKeysPerPart, block_size) * block_size;
  for (int64_t tile = first_row; tile < first_row + num_rows; tile += rows_per_task) {
    const int64_t tile_rows = std::min(rows_per_task, first_row + num_rows - tile);
    const int64_t limit = limit_of(row_order_[tile + tile_rows - 1]);
    const int64_t parts = num_rows * group <= kFewQueries ? ceil_div(limit, keys_per_part) : 1;
    max_rows_per_task_ = std::max(max_rows_per_task_, tile_rows);
    for (int64_t head = 0; head < params.key.num_heads; ++head) {
      AttendTask task{params.row_requests[first_row], head, tile, tile_rows, 0, limit, -1};
      if (parts <= 1) {
        tasks_.push_back(task);
        continue;
      }
      merges_.push_back({head, tile, tile_rows, num_partials_, parts});
      for (int64_t part = 0; part < parts; ++part) {
        task.key_begin = part * keys_per_part;
        task.key_end = std::min(limit, task.key_begin + keys_per_part);
        task.partial = num_partials_++;
        tasks_.push_back(task);
      }
    }
  }
}

int AttendPlan::num_threads() const { return num_threads_; }
const int64_t* AttendPlan::row_order() const { return row_order_.data(); }
const AttendTask* AttendPlan::tasks() const { return tasks_.data(); }
int64_t AttendPlan::num_tasks() const { return static_cast<int64_t>(tasks_.size()); }
const AttendMerge* AttendPlan::merges() const { return merges_.data(); }
int64_t AttendPlan::num_merges() const { return static_cast<int64_t>(merges_.size()); }
int64_t AttendPlan::num_partials() const { return num_partials_; }
int64_t AttendPlan::max_rows_per_task() const { return max_rows_per_task_; }

}  // namespace phasekv
