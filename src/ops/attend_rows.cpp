#include "phasekv/ops/attend_rows.h"

#include <string>

#include "dispatch.h"
#include "ops/key_range.h"
#include "validate.h"

namespace phasekv {

namespace {

void check_row_requests(const AttendRowsParams& params) {
  const int64_t rows = params.query.tokens;
  check_not_null("row_requests", params.row_requests, rows);
  int32_t last = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t request = params.row_requests[i];
    if (request < last || request >= params.num_requests) {
      refuse(
          "row_requests[" + std::to_string(i) + "]", request,
          "non-decreasing and in [0, num_requests = " + std::to_string(params.num_requests) + ")");
    }
    last = request;
  }
}

// Each row's limit fits in its request's line of the block table, and the blocks it reaches exist.
void check_row_limits(const AttendRowsParams& params) {
  const int64_t rows = params.query.tokens;
  const int64_t block_size = params.key.block_size;
  const int64_t capacity = params.block_table_stride * block_size;
  check_not_null("row_limits", params.row_limits, rows);
  int64_t checked_blocks = 0;  // of the request of the row before
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t limit = params.row_limits[i];
    if (limit < 0 || limit > capacity) {
      refuse("row_limits[" + std::to_string(i) + "]", limit,
             "in [0, " + std::to_string(capacity) + "], the block table's tokens");
    }
    if (i > 0 && params.row_requests[i] != params.row_requests[i - 1]) checked_blocks = 0;
    const int64_t blocks = (limit + block_size - 1) / block_size;
    const int32_t* line = params.block_table + params.row_requests[i] * params.block_table_stride;
    for (; checked_blocks < blocks; ++checked_blocks) {
      const int32_t block = line[checked_blocks];
      if (block >= 0 && block < params.key.num_blocks) continue;
      refuse("block_table[" + std::to_string(params.row_requests[i]) + "][" +
                 std::to_string(checked_blocks) + "]",
             block, "in [0, num_blocks = " + std::to_string(params.key.num_blocks) + ")");
    }
  }
}

}  // namespace

void attend_rows(const AttendRowsParams& params) {
  check_blocks("key", params.key);
  check_query(params.query, params.key);
  check_output_rows("out", params.out);
  check_blocks("value", params.value);
  check_equal("out.tokens", params.out.tokens, "query", params.query.tokens);
  check_same_heads("out", params.out, "query", params.query);
  check_same_dtype("out", params.out.dtype, "query", params.query.dtype);
  check_equal("value.num_blocks", params.value.num_blocks, "key", params.key.num_blocks);
  check_same_blocks("value", params.value, "key", params.key);
  check_scale(params.scale);
  if (params.num_requests < 0) refuse("num_requests", params.num_requests, "at least 0");
  if (params.block_table_stride < 0) {
    refuse("block_table_stride", params.block_table_stride, "at least 0");
  }
  check_not_null("block_table", params.block_table,
                 params.num_requests * params.block_table_stride);
  check_row_requests(params);
  check_row_limits(params);
  if (params.query.tokens > 0) active_kernels().attend_rows(params);
}

}  // namespace phasekv
