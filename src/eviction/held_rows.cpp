#include "eviction/held_rows.h"

#include <numeric>

#include "phasekv/ops/push_queries.h"

namespace phasekv::eviction {
namespace {

RowsView packed_view(void* data, DataType dtype, int64_t tokens, int64_t heads, int64_t head_size) {
  return {.data = data,
          .dtype = dtype,
          .tokens = tokens,
          .heads = heads,
          .head_size = head_size,
          .token_stride = heads * head_size,
          .head_stride = head_size};
}

std::vector<int64_t> slots_of(const PolicyInput& input, int64_t block_size) {
  std::vector<int64_t> slots;
  slots.reserve(static_cast<size_t>(input.tokens));
  for (int64_t i = 0; i < input.tokens; ++i) {
    const int64_t token = input.first_token + i;
    slots.push_back(int64_t{input.block_table[token / block_size]} * block_size +
                    token % block_size);
  }
  return slots;
}

PagedView only_head(PagedView blocks, int64_t head) {
  blocks.data =
      static_cast<uint8_t*>(blocks.data) + head * blocks.head_stride * size_of(blocks.dtype);
  blocks.num_heads = 1;
  return blocks;
}

// Of any type, on the host, [rows.tokens, rows.heads, rows.head_size].
std::vector<float> float_rows(const RowsView& rows) {
  std::vector<float> floats(static_cast<size_t>(rows.tokens * rows.heads * rows.head_size));
  std::vector<int64_t> order(static_cast<size_t>(rows.tokens));
  std::iota(order.begin(), order.end(), 0);
  // It moves queries from one type to another; nothing in it is about queries.
  push_queries({.query = rows,
                .rows = order.data(),
                .entries = order.data(),
                .count = rows.tokens,
                .buffer = packed_view(floats.data(), DataType::float32, rows.tokens, rows.heads,
                                      rows.head_size)});
  return floats;
}

}  // namespace

float product(const float* a, const float* b, int64_t size) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

RowsView view_of(std::vector<float>* rows, int64_t heads, int64_t head_size) {
  return packed_view(rows->data(), DataType::float32,
                     static_cast<int64_t>(rows->size()) / (heads * head_size), heads, head_size);
}

std::vector<float> query_rows(const PolicyInput& input) {
  RowsView rows = input.queries;
  if (rows.tokens == 0) return {};
  const int64_t elements =
      (rows.tokens - 1) * rows.token_stride + (rows.heads - 1) * rows.head_stride + rows.head_size;
  std::vector<uint8_t> here(static_cast<size_t>(elements * size_of(rows.dtype)));
  input.backend->download(rows.data, here.data(), static_cast<int64_t>(here.size()));
  rows.data = here.data();
  return float_rows(rows);
}

std::vector<float> held_rows(const PolicyInput& input, const PagedView& blocks, int64_t head) {
  const std::vector<int64_t> slots = slots_of(input, blocks.block_size);
  const PagedView one = only_head(blocks, head);
  if (blocks.dtype == DataType::float32) {
    std::vector<float> rows(static_cast<size_t>(input.tokens * blocks.head_size));
    input.backend->gather_blocks(
        {.blocks = one, .slots = slots.data(), .rows = view_of(&rows, 1, blocks.head_size)});
    return rows;
  }
  std::vector<uint16_t> halves(static_cast<size_t>(input.tokens * blocks.head_size));
  const RowsView rows = packed_view(halves.data(), blocks.dtype, input.tokens, 1, blocks.head_size);
  input.backend->gather_blocks({.blocks = one, .slots = slots.data(), .rows = rows});
  return float_rows(rows);
}

}  // namespace phasekv::eviction
