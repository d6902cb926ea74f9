// Divides attend_rows among threads. Compiled once, for all instruction sets.
#pragma once

#include <cstdint>
#include <vector>

#include "phasekv/ops/attend_rows.h"

namespace phasekv {

// A tile of rows of one request, all query heads of one KV head, and a part of the request's keys.
struct AttendTask {
  int64_t request;
  int64_t kv_head;
  int64_t first_row;  // index into AttendPlan::row_order
  int64_t num_rows;
  int64_t key_begin;
  int64_t key_end;  // no row of the tile attends keys beyond
  int64_t partial;  // which partial result it leaves for a merge; -1: it writes the rows' outputs
};

// The tasks [first_partial, first_partial + num_partials) hold one tile's partial results.
struct AttendMerge {
  int64_t kv_head;
  int64_t first_row;
  int64_t num_rows;
  int64_t first_partial;
  int64_t num_partials;
};

// How the work is cut does not change a result, except for the cut of the keys, which depends on
// the shapes alone: so the thread count does not change a result either.
class AttendPlan {
 public:
  AttendPlan(const AttendRowsParams& params, int threads);
  ~AttendPlan();
  AttendPlan(const AttendPlan&) = delete;
  AttendPlan& operator=(const AttendPlan&) = delete;

  // Everything below is out of line: the kernels must not instantiate a standard template.
  int num_threads() const;
  const int64_t* row_order() const;  // rows, by request and there by limit
  const AttendTask* tasks() const;   // largest first
  int64_t num_tasks() const;
  const AttendMerge* merges() const;
  int64_t num_merges() const;
  int64_t num_partials() const;
  int64_t max_rows_per_task() const;

 private:
  void plan_request(const AttendRowsParams& params, int64_t first_row, int64_t num_rows,
                    int64_t rows_per_task);

  std::vector<int64_t> row_order_;
  std::vector<AttendTask> tasks_;
  std::vector<AttendMerge> merges_;
  int num_threads_ = 1;
  int64_t num_partials_ = 0;
  int64_t max_rows_per_task_ = 0;
};

}  // namespace phasekv
