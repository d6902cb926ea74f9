// Bound by memory: each pushed query is read once and written once.
#include <algorithm>
#include <cstdint>

#include "elements.cuh"
#include "launch.cuh"
#include "phasekv/cuda.h"
#include "validate.h"
#include "views.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 256;

template <typename Element, int kCount>
__device__ inline void copy_bits(const void* from, int64_t from_offset, void* to,
                                 int64_t to_offset) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(Element));
  using Unit = Word<(kBytes < 16 ? kBytes : 16)>;
  const auto* source =
      reinterpret_cast<const Unit*>(static_cast<const Element*>(from) + from_offset);
  auto* target = reinterpret_cast<Unit*>(static_cast<Element*>(to) + to_offset);
#pragma unroll
  for (int i = 0; i < kBytes / static_cast<int>(sizeof(Unit)); ++i) target[i] = source[i];
}

// A thread takes kCount dimensions of one head of one query.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    push_queries_kernel(PushQueriesParams params, unsigned vectors_per_head) {
  const auto heads = static_cast<unsigned>(params.query.heads);
  const unsigned vectors = vectors_per_head * heads;
  const unsigned blocks_per_query = (vectors + kThreads - 1) / kThreads;
  const int64_t i = blockIdx.x / blocks_per_query;
  const unsigned vector = blockIdx.x % blocks_per_query * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  const unsigned head = vector / vectors_per_head;
  const unsigned dim = (vector - head * vectors_per_head) * kCount;
  const int64_t from = offset_of_row(params.query, params.rows[i], head) + dim;
  const int64_t to = offset_of_row(params.buffer, params.entries[i], head) + dim;
  if (params.query.dtype != params.buffer.dtype) {
    float values[kCount];
    load_vector<kCount>(params.query.data, params.query.dtype, from, values);
    store_vector<kCount>(values, params.buffer.data, params.buffer.dtype, to);
  } else if (params.query.dtype == DataType::float32) {
    copy_bits<uint32_t, kCount>(params.query.data, from, params.buffer.data, to);
  } else {
    copy_bits<uint16_t, kCount>(params.query.data, from, params.buffer.data, to);
  }
}

template <int kCount>
void run(const PushQueriesParams& params, Stream stream) {
  const auto vectors_per_head = static_cast<unsigned>(params.query.head_size / kCount);
  const int64_t blocks_per_query =
      (params.query.heads * vectors_per_head + kThreads - 1) / kThreads;
  launch(push_queries_kernel<kCount>, dim3(blocks_for(params.count * blocks_per_query, 1)),
         kThreads, 0, stream, params, vectors_per_head);
}

}  // namespace

void push_queries(const PushQueriesParams& params, Stream stream) {
  check_rows("query", params.query);
  check_output_rows("buffer", params.buffer);
  check_same_heads("buffer", params.buffer, "query", params.query);
  check_not_null("rows", params.rows, params.count);
  check_not_null("entries", params.entries, params.count);
  if (params.count <= 0) return;
  const bool is_aligned = std::min(alignment_of(params.query), alignment_of(params.buffer)) == 16;
  if (is_aligned && params.query.head_size % 8 == 0) {
    run<8>(params, stream);
  } else {
    run<1>(params, stream);
  }
}

}  // namespace phasekv::cuda
