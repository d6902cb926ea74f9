// Bound by memory: each row that moves is read once and written once. All layers and KV heads go in
// one launch.
#include <algorithm>
#include <cstdint>
#include <string>

#include "elements.cuh"
#include "launch.cuh"
#include "phasekv/cuda.h"
#include "validate.h"
#include "views.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kUnitsPerThread = 4;
constexpr int64_t kMostMovesPerBlock = 64;

// The layers: one that came with the launch, or many on the device.
struct Layers {
  CompactParams one;
  const CompactParams* many = nullptr;
};

struct Shape {
  int element_bytes;
  unsigned elements_per_unit;  // a unit is what a thread moves at once
  unsigned units_per_row;
  unsigned moves_per_block;
};

struct Move {
  int64_t key_from;
  int64_t key_to;
  int64_t value_from;
  int64_t value_to;
};

// Of a token of the request.
__device__ inline int64_t offset_of_token(const PagedView& blocks, const int32_t* block_table,
                                          int64_t token) {
  const int64_t entry = token / blocks.block_size;
  const auto in_block = static_cast<uint32_t>(token - entry * blocks.block_size);
  return block_table[entry] * blocks.block_stride + offset_of(blocks.token, in_block);
}

// Block (some moves, KV head, layer). No move reads what another writes. Shared memory: a Move
// each. kAdjacent: the dimensions of a row lie beside each other; else a unit is one element.
template <int kUnitBytes, bool kAdjacent>
__global__ void __launch_bounds__(kThreads) compact_kernel(Layers layers, Shape shape) {
  using Unit = Word<kUnitBytes>;
  auto* moves = reinterpret_cast<Move*>(dynamic_shared_memory());
  const CompactParams& params = layers.many != nullptr ? layers.many[blockIdx.z] : layers.one;
  const PagedView& key = params.key;
  const PagedView& value = params.value;
  const unsigned head = blockIdx.y;
  const int64_t first =
      params.starts[head] + static_cast<int64_t>(blockIdx.x) * shape.moves_per_block;
  const int64_t left = params.starts[head + 1] - first;
  if (left <= 0) return;  // the whole block
  const unsigned count =
      left < shape.moves_per_block ? static_cast<unsigned>(left) : shape.moves_per_block;
  for (unsigned i = threadIdx.x; i < count; i += kThreads) {
    const int64_t from = params.first_token + params.from[first + i];
    const int64_t to = params.first_token + params.to[first + i];
    const int64_t key_head = head * key.head_stride;
    const int64_t value_head = head * value.head_stride;
    moves[i] = {key_head + offset_of_token(key, params.block_table, from),
                key_head + offset_of_token(key, params.block_table, to),
                value_head + offset_of_token(value, params.block_table, from),
                value_head + offset_of_token(value, params.block_table, to)};
  }
  __syncthreads();
  const unsigned units = 2 * count * shape.units_per_row;
  for (unsigned i = threadIdx.x; i < units; i += kThreads) {
    const unsigned row = i / shape.units_per_row;
    const unsigned dim = (i - row * shape.units_per_row) * shape.elements_per_unit;
    const bool is_key = row % 2 == 0;
    const Move& move = moves[row / 2];
    const PagedView& half = is_key ? key : value;
    const int64_t in_row = kAdjacent ? dim : offset_of(half.dim, dim);
    auto* data = static_cast<char*>(half.data);
    const int64_t from = (is_key ? move.key_from : move.value_from) + in_row;
    const int64_t to = (is_key ? move.key_to : move.value_to) + in_row;
    *reinterpret_cast<Unit*>(data + to * shape.element_bytes) =
        *reinterpret_cast<const Unit*>(data + from * shape.element_bytes);
  }
}

void check(const CompactParams& params) {
  check_device_blocks("key", params.key);
  check_device_blocks("value", params.value);
  check_same_blocks("value", params.value, "key", params.key);
  check_not_null("starts", params.starts, params.key.num_heads + 1);
}

bool has_adjacent_dims(const CompactParams& params) {
  return params.key.dim.is_plain(1) && params.value.dim.is_plain(1);
}

void run(const Layers& layers, std::span<const CompactParams> shapes, int64_t most_moves,
         Stream stream) {
  const CompactParams& first = shapes.front();
  const int64_t size = size_of(first.key.dtype);
  int64_t unit_bytes = common_alignment(first.key.head_size * size);
  bool is_adjacent = true;
  for (const CompactParams& params : shapes) {
    unit_bytes = std::min({unit_bytes, alignment_of(params.key), alignment_of(params.value)});
    is_adjacent = is_adjacent && has_adjacent_dims(params);
  }
  Shape shape{};
  shape.element_bytes = static_cast<int>(size);
  shape.elements_per_unit = static_cast<unsigned>(unit_bytes / size);
  shape.units_per_row = static_cast<unsigned>(first.key.head_size) / shape.elements_per_unit;
  const auto moves_per_block = std::clamp<int64_t>(
      kThreads * kUnitsPerThread / (2 * shape.units_per_row), 1, kMostMovesPerBlock);
  shape.moves_per_block = static_cast<unsigned>(moves_per_block);
  const auto start = [&](auto kernel) {
    launch(kernel,
           dim3(blocks_for(most_moves, moves_per_block), static_cast<unsigned>(first.key.num_heads),
                static_cast<unsigned>(shapes.size())),
           kThreads, shape.moves_per_block * sizeof(Move), stream, layers, shape);
  };
  if (!is_adjacent) {
    return size == 4 ? start(compact_kernel<4, false>) : start(compact_kernel<2, false>);
  }
  switch (unit_bytes) {
    case 16:
      return start(compact_kernel<16, true>);
    case 8:
      return start(compact_kernel<8, true>);
    case 4:
      return start(compact_kernel<4, true>);
    default:
      return start(compact_kernel<2, true>);
  }
}

}  // namespace

void compact(const CompactParams& params, int64_t most_moves, Stream stream) {
  check(params);
  if (most_moves > 0) run({.one = params}, std::span(&params, 1), most_moves, stream);
}

void compact_layers(std::span<const CompactParams> layers, const CompactParams* device_layers,
                    int64_t most_moves, Stream stream) {
  for (const CompactParams& params : layers) {
    check(params);
    check_equal("layers.key.num_heads", params.key.num_heads, "the first layer",
                layers.front().key.num_heads);
    check_equal("layers.key.head_size", params.key.head_size, "the first layer",
                layers.front().key.head_size);
    check_same_dtype("layers.key", params.key.dtype, "the first layer", layers.front().key.dtype);
  }
  check_not_null("device_layers", device_layers, static_cast<int64_t>(layers.size()));
  if (layers.empty() || most_moves <= 0) return;
  run({.one = layers.front(), .many = device_layers}, layers, most_moves, stream);
}

}  // namespace phasekv::cuda
