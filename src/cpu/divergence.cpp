#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

template <typename Fresh, typename Cached>
void squared_distances(const DivergenceParams& params, Range tokens) {
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    Vec sum = zero();
    for (int64_t head = 0; head < params.fresh.heads; ++head) {
      const Fresh* fresh = row_of<const Fresh>(params.fresh, token, head);
      const Cached* cached = row_of<const Cached>(params.cached, token, head);
      for_lanes(0, params.fresh.head_size, [&](auto lanes, int64_t d, int n) {
        const Vec residual =
            load_lanes<lanes.kFull>(fresh + d, n) - load_lanes<lanes.kFull>(cached + d, n);
        sum = fma(residual, residual, sum);
      });
    }
    params.out[token] = reduce_add(sum);
  }
}

}  // namespace

void divergence(const DivergenceParams& params) {
  with_types(params.fresh.dtype, params.cached.dtype, [&](auto fresh_tag, auto cached_tag) {
    using Fresh = typename decltype(fresh_tag)::Type;
    using Cached = typename decltype(cached_tag)::Type;
    const RowsView& fresh = params.fresh;
    const int64_t bytes =
        fresh.tokens * fresh.heads * fresh.head_size * int64_t{sizeof(Fresh) + sizeof(Cached)};
#pragma omp parallel num_threads(threads_for(bytes))
    squared_distances<Fresh, Cached>(params, share_of_thread(fresh.tokens));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
