// Bound by memory: each key is read once and written once.
#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "phasekv/cuda.h"
#include "rotation.cuh"
#include "validate.h"
#include "views.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kUnitsPerThread = 2;
constexpr int64_t kMaxTokensPerBlock = 16;

// Shared memory of a block, for `tokens` tokens.
struct Memory {
  int64_t* deltas;
  FactorTables factors;

  static size_t bytes(int64_t tokens, int64_t rotary_dim) {
    return static_cast<size_t>(tokens) *
           (sizeof(int64_t) + static_cast<size_t>(rotary_dim) * sizeof(float) + sizeof(int));
  }
  // The tables come first, where vectors are aligned.
  __device__ Memory(unsigned tokens, unsigned rotary_dim) {
    factors.tables = reinterpret_cast<float*>(dynamic_shared_memory());
    deltas = reinterpret_cast<int64_t*>(factors.tables + tokens * rotary_dim);
    factors.table_of = reinterpret_cast<int*>(deltas + tokens);
  }
};

// Block b: tokens [b * tokens_per_block, ...), all heads. In place too: a unit is read before it is
// written, by one thread.
template <int kPairs>
__global__ void __launch_bounds__(kThreads)
    rotate_keys_kernel(RotateKeysParams params, HeadShape shape, unsigned units_per_head,
                       unsigned tokens_per_block) {
  const Memory memory(tokens_per_block, shape.rotary_dim);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int64_t left = params.keys.tokens - first;
  const unsigned tokens = left < tokens_per_block ? static_cast<unsigned>(left) : tokens_per_block;
  for (unsigned i = threadIdx.x; i < tokens; i += kThreads) {
    memory.deltas[i] = params.deltas[first + i];
  }
  __syncthreads();
  memory.factors.fill(params.rope, memory.deltas, tokens);
  __syncthreads();

  const unsigned units_per_token = units_per_head * static_cast<unsigned>(params.keys.heads);
  for (unsigned i = threadIdx.x; i < tokens * units_per_token; i += kThreads) {
    const unsigned token = i / units_per_token;
    const unsigned in_token = i - token * units_per_token;
    const unsigned head = in_token / units_per_head;
    const Unit<kPairs> unit = unit_of<kPairs>(shape, in_token - head * units_per_head);
    float values[2 * kPairs];
    load_unit(unit, params.keys.data, params.keys.dtype,
              offset_of_row(params.keys, first + token, head), values);
    memory.factors.rotate(shape, token, unit, values);
    const int64_t out = offset_of_row(params.out, first + token, head);
    store_vector<kPairs>(values, params.out.data, params.out.dtype, out + unit.first);
    if (unit.has_second) {
      store_vector<kPairs>(values + kPairs, params.out.data, params.out.dtype, out + unit.second);
    }
  }
}

template <int kPairs>
void run(const RotateKeysParams& params, const HeadShape& shape, Stream stream) {
  const unsigned units_per_head = units_of<kPairs>(shape);
  const auto tokens_per_block = std::clamp<int64_t>(
      kThreads * kUnitsPerThread / (params.keys.heads * units_per_head), 1, kMaxTokensPerBlock);
  launch(rotate_keys_kernel<kPairs>, dim3(blocks_for(params.keys.tokens, tokens_per_block)),
         kThreads, Memory::bytes(tokens_per_block, shape.rotary_dim), stream, params, shape,
         units_per_head, static_cast<unsigned>(tokens_per_block));
}

}  // namespace

void rotate_keys(const RotateKeysParams& params, Stream stream) {
  check_rows("keys", params.keys);
  check_output_rows("out", params.out);
  check_equal("out.tokens", params.out.tokens, "keys", params.keys.tokens);
  check_same_heads("out", params.out, "keys", params.keys);
  check_same_dtype("out", params.out.dtype, "keys", params.keys.dtype);
  check_device_rope(params.rope, params.keys.head_size);
  check_not_null("deltas", params.deltas, params.keys.tokens);
  if (params.keys.tokens == 0) return;
  const HeadShape shape = head_shape_of(params.keys.head_size, params.rope, /*rotates=*/true);
  const bool is_aligned = std::min(alignment_of(params.keys), alignment_of(params.out)) == 16;
  if (is_aligned && fits_wide_units(shape)) {
    run<kWidePairs>(params, shape, stream);
  } else {
    run<1>(params, shape, stream);
  }
}

}  // namespace phasekv::cuda
