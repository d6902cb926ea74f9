#include "phasekv/ops/push_queries.h"

#include "dispatch.h"
#include "validate.h"

namespace phasekv {

void push_queries(const PushQueriesParams& params) {
  check_rows("query", params.query);
  check_output_rows("buffer", params.buffer);
  check_same_heads("buffer", params.buffer, "query", params.query);
  if (params.count < 0) refuse("count", params.count, "at least 0");
  check_indices("rows", params.rows, params.count, params.query.tokens);
  check_indices("entries", params.entries, params.count, params.buffer.tokens);
  if (params.count > 0) active_kernels().push_queries(params);
}

}  // namespace phasekv
