#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// sum += fresh - cached
template <typename Fresh, typename Cached>
void accumulate(const Fresh* fresh, const Cached* cached, int64_t head_size, float* sum) {
  for_lanes(0, head_size, [&](auto lanes, int64_t d, int n) {
    const Vec residual =
        load_lanes<lanes.kFull>(fresh + d, n) - load_lanes<lanes.kFull>(cached + d, n);
    store_lanes<lanes.kFull>(sum + d, load_lanes<lanes.kFull>(sum + d, n) + residual, n);
  });
}

// Probes lie far apart.
template <typename T>
void fetch(const RowsView& rows, int64_t token, int64_t head) {
  const T* row = row_of<const T>(rows, token, head);
  for (int64_t d = 0; d < rows.head_size; d += kLine<T>) prefetch(row + d);
}

void scale(float factor, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

bool rotates(const MeanResidualParams& params) {
  return params.fresh_deltas != nullptr || params.cached_deltas != nullptr;
}

RopeView rope_of(const MeanResidualParams& params) {
  return rotates(params) ? params.rope : RopeView{};
}

int64_t floats_needed(const MeanResidualParams& params) {
  return 2 * FactorTable::floats_needed(rope_of(params)) + 2 * params.fresh.head_size;
}

// The mean over one segment's probes.
template <typename Fresh, typename Cached>
void mean_of_segment(const MeanResidualParams& params, int64_t segment, float* memory) {
  const int64_t heads = params.fresh.heads;
  const int64_t head_size = params.fresh.head_size;
  const int64_t begin = params.segment_starts[segment];
  const int64_t end = params.segment_starts[segment + 1];
  float* out = params.out + segment * heads * head_size;
  for (int64_t i = 0; i < heads * head_size; ++i) out[i] = 0.0F;

  float* fresh_moved = memory;
  float* cached_moved = fresh_moved + head_size;
  float* tables = cached_moved + head_size;
  const RopeView rope = rope_of(params);
  FactorTable fresh_factors(rope, tables);
  FactorTable cached_factors(rope, tables + FactorTable::floats_needed(rope));
  for (int64_t probe = begin; probe < end; ++probe) {
    ShiftedRow<Fresh> fresh;
    ShiftedRow<Cached> cached;
    if (params.fresh_deltas != nullptr) {
      fresh.factors = fresh_factors.of(params.fresh_deltas[probe]);
    }
    if (params.cached_deltas != nullptr) {
      cached.factors = cached_factors.of(params.cached_deltas[probe]);
    }
    for (int64_t head = 0; head < heads; ++head) {
      if (probe + 1 < end) {
        fetch<Fresh>(params.fresh, params.fresh_rows[probe + 1], head);
        fetch<Cached>(params.cached, params.cached_rows[probe + 1], head);
      }
      fresh.in = row_of<const Fresh>(params.fresh, params.fresh_rows[probe], head);
      cached.in = row_of<const Cached>(params.cached, params.cached_rows[probe], head);
      float* sum = out + head * head_size;
      if (!rotates(params)) {
        accumulate(fresh.in, cached.in, head_size, sum);
        continue;
      }
      write_row(fresh, rope, head_size, fresh_moved);
      write_row(cached, rope, head_size, cached_moved);
      accumulate(fresh_moved, cached_moved, head_size, sum);
    }
  }
  if (end > begin) scale(1.0F / static_cast<float>(end - begin), heads * head_size, out);
}

}  // namespace

void mean_residual(const MeanResidualParams& params) {
  with_types(params.fresh.dtype, params.cached.dtype, [&](auto fresh_tag, auto cached_tag) {
    using Fresh = typename decltype(fresh_tag)::Type;
    using Cached = typename decltype(cached_tag)::Type;
    const int64_t segments = params.num_segments;
    const int64_t row = params.fresh.heads * params.fresh.head_size;
    const int64_t probes = params.segment_starts[segments];
    const int threads =
        threads_for(row * (probes * int64_t{sizeof(Fresh) + sizeof(Cached)} + segments * 4));
    const Scratch scratch(threads, floats_needed(params));
    // A segment is summed by one thread, in order: the result does not depend on their number.
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t segment = 0; segment < segments; ++segment) {
      mean_of_segment<Fresh, Cached>(params, segment, scratch.part(omp_get_thread_num()));
    }
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
