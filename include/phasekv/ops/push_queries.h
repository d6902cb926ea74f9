// Puts queries into a buffer of representative queries, of which the caller decides who replaces
// whom: AgentKV's FIFO of the last queries of each phase (arXiv 2609.14872, Algorithm 2), say.
#pragma once

#include "phasekv/tensor.h"

namespace phasekv {

struct PushQueriesParams {
  RowsView query;                    // [rows, query heads, head_size], input
  const int64_t* rows = nullptr;     // [count] row of `query` of each pushed query
  const int64_t* entries = nullptr;  // [count] entry of `buffer` it goes to; no entry twice
  int64_t count = 0;
  RowsView buffer;  // output, [entries, query heads, head_size]; its dtype may differ from query's
                    // and memory must not be shared with it; other entries stay as they are
};

// buffer[entries[i]] = query[rows[i]], every bit of it where the dtypes agree, else rounded to
// nearest even.
void push_queries(const PushQueriesParams& params);

}  // namespace phasekv
