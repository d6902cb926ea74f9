#include "cpu/kernels.h"
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
  int64_t d = 0;
  for (; d + kWidth <= head_size; d += kWidth) {
    store(sum + d, load(sum + d) + (load(fresh + d) - load(cached + d)));
  }
  if (d < head_size) {
    const int rest = static_cast<int>(head_size - d);
    const Vec residual = load_partial(fresh + d, rest) - load_partial(cached + d, rest);
    store_partial(sum + d, load_partial(sum + d, rest) + residual, rest);
  }
}

void scale(float factor, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

// The mean over one segment's probes. `memory` holds two rotations and two rows.
template <typename Fresh, typename Cached>
void mean_of_segment(const MeanResidualParams& params, int64_t segment, float* memory) {
  const int64_t heads = params.fresh.heads;
  const int64_t head_size = params.fresh.head_size;
  const int64_t begin = params.segment_starts[segment];
  const int64_t end = params.segment_starts[segment + 1];
  float* out = params.out + segment * heads * head_size;
  for (int64_t i = 0; i < heads * head_size; ++i) out[i] = 0.0F;

  const int64_t rotation_floats = Rotation::floats_needed(params.rope);
  Rotation fresh_rotation(params.rope, memory);
  Rotation cached_rotation(params.rope, memory + rotation_floats);
  float* fresh_row = memory + 2 * rotation_floats;
  float* cached_row = fresh_row + head_size;
  for (int64_t probe = begin; probe < end; ++probe) {
    if (params.fresh_deltas != nullptr) fresh_rotation.set_delta(params.fresh_deltas[probe]);
    if (params.cached_deltas != nullptr) cached_rotation.set_delta(params.cached_deltas[probe]);
    for (int64_t head = 0; head < heads; ++head) {
      const Fresh* fresh = row_of<const Fresh>(params.fresh, params.fresh_rows[probe], head);
      const Cached* cached = row_of<const Cached>(params.cached, params.cached_rows[probe], head);
      float* sum = out + head * head_size;
      if (params.fresh_deltas == nullptr && params.cached_deltas == nullptr) {
        accumulate(fresh, cached, head_size, sum);
        continue;
      }
      fresh_rotation.apply(fresh, head_size, nullptr, 0.0F, fresh_row);
      cached_rotation.apply(cached, head_size, nullptr, 0.0F, cached_row);
      accumulate(fresh_row, cached_row, head_size, sum);
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
    const int64_t probes = segments == 0 ? 0 : params.segment_starts[segments];
    const int threads =
        threads_for(row * (probes * int64_t{sizeof(Fresh) + sizeof(Cached)} + segments * 4));
    const Scratch scratch(
        threads, 2 * Rotation::floats_needed(params.rope) + 2 * params.fresh.head_size);
    // A segment is summed by one thread, in order: the result does not depend on their number.
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t segment = 0; segment < segments; ++segment) {
      mean_of_segment<Fresh, Cached>(params, segment, scratch.part(omp_get_thread_num()));
    }
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
