#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rotation.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

template <typename T>
void rotate(const RotateKeysParams& params, Range tokens, float* memory) {
  FactorTable factors(params.rope, memory);
  const RowsView& keys = params.keys;
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    ShiftedRow<T> row;
    row.factors = factors.of(params.deltas[token]);
    for (int64_t head = 0; head < keys.heads; ++head) {
      row.in = row_of<const T>(keys, token, head);
      write_row(row, params.rope, keys.head_size, row_of<T>(params.out, token, head));
    }
  }
}

}  // namespace

void rotate_keys(const RotateKeysParams& params) {
  with_type(params.keys.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const RowsView& keys = params.keys;
    const int64_t bytes = 2 * keys.tokens * keys.heads * keys.head_size * int64_t{sizeof(T)};
    const int threads = threads_for(bytes);
    const Scratch scratch(threads, FactorTable::floats_needed(params.rope));
#pragma omp parallel num_threads(threads)
    rotate<T>(params, share_of_thread(keys.tokens), scratch.part(omp_get_thread_num()));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
