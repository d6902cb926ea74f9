#include "phasekv/ops/push_queries.h"

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

template <typename In, typename Out>
void push(const PushQueriesParams& params, Range pushed) {
  for (int64_t i = pushed.begin; i < pushed.end; ++i) {
    for (int64_t head = 0; head < params.query.heads; ++head) {
      copy_row(row_of<const In>(params.query, params.rows[i], head), params.query.head_size,
               row_of<Out>(params.buffer, params.entries[i], head));
    }
  }
}

template <typename In, typename Out>
void push_in_parallel(const PushQueriesParams& params) {
  const RowsView& query = params.query;
  const int64_t bytes =
      params.count * query.heads * query.head_size * int64_t{sizeof(In) + sizeof(Out)};
#pragma omp parallel num_threads(threads_for(bytes))
  push<In, Out>(params, share_of_thread(params.count));
}

}  // namespace

void push_queries(const PushQueriesParams& params) {
  if (params.query.dtype == params.buffer.dtype) {
    return with_bits_type(params.query.dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      push_in_parallel<T, T>(params);
    });
  }
  with_types(params.query.dtype, params.buffer.dtype, [&](auto query_tag, auto buffer_tag) {
    push_in_parallel<typename decltype(query_tag)::Type, typename decltype(buffer_tag)::Type>(
        params);
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
