// Exact causal attention of scattered query rows over paged keys and values, a key limit per row.
#pragma once

#include "phasekv/tensor.h"

namespace phasekv {

struct AttendRowsParams {
  RowsView query;  // [rows, query heads, head_size]; query heads a multiple of KV heads (GQA)
  PagedView key;
  PagedView value;
  const int32_t* block_table = nullptr;  // [requests, block_table_stride]; entry = block id
  int64_t num_requests = 0;
  int64_t block_table_stride = 0;
  const int32_t* row_requests = nullptr;  // [rows] request of each row, non-decreasing
  const int64_t* row_limits = nullptr;    // [rows] keys [0, limit) of the request are attended;
                                          // ascending within a request is fastest, any order right;
                                          // limit 0 gives an output of zeros
  float scale = 1.0F;                     // multiplies q.k before the softmax
  RowsView out;                           // [rows, query heads, head_size], same dtype as query
};

// Rows of one request that stand near each other share one pass over its keys. The result of a row
// does not depend on which other rows are present beyond float32 rounding, and not at all on block
// ids or thread count.
void attend_rows(const AttendRowsParams& params);

}  // namespace phasekv
