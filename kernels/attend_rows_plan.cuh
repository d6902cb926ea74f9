// How attend_rows is divided among the blocks of a grid, from shapes alone: what the lists hold,
// only the device knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "phasekv/ops/attend_rows.h"
#include "platform.cuh"

namespace phasekv::cuda {

inline constexpr int64_t kLeastKeysPerPart = 256;
inline constexpr int64_t kMostParts = 32;

// A tile is some rows of one request times some query heads of one KV head: its query vectors share
// one pass over the keys. A request with few rows (decode) gives few tiles, so its keys are cut in
// parts as well, which are merged in order afterwards.
struct AttendGrid {
  int group = 1;           // query heads of a KV head
  int heads_per_tile = 1;  // of these
  int head_tiles = 1;      // tiles that the group is cut into
  int rows_per_tile = 1;
  int64_t row_tiles = 0;  // more than there are, if anything: see TileRows
  int parts = 1;          // of the keys
  int64_t keys_per_part = 0;
  float* partial_outputs = nullptr;  // [rows, query heads, parts, kDims]; unused with one part
  float* partial_sums = nullptr;  // [rows, query heads, parts, 2]: maximum of the scores in units
                                  // of log 2, sum of weights
  int64_t* request_starts = nullptr;  // [num_requests + 1] first row of each request
};

// For tiles of `vectors` query vectors that take keys `keys_per_tile` at a time.
inline AttendGrid plan_attend_rows(const AttendRowsParams& params, int vectors, int keys_per_tile) {
  AttendGrid grid;
  grid.group = static_cast<int>(params.query.heads / params.key.num_heads);
  grid.heads_per_tile = std::min(grid.group, vectors);
  grid.head_tiles = static_cast<int>(ceil_div(grid.group, grid.heads_per_tile));
  grid.rows_per_tile = vectors / grid.heads_per_tile;
  grid.row_tiles = params.query.tokens / grid.rows_per_tile + params.num_requests;
  const int64_t most_keys = std::max<int64_t>(1, params.block_table_stride * params.key.block_size);
  const int64_t blocks = grid.row_tiles * grid.head_tiles * params.key.num_heads;
  const int64_t parts = std::clamp<int64_t>(kBlocksThatFillADevice / blocks, 1, kMostParts);
  const int64_t keys = std::max(kLeastKeysPerPart, ceil_div(most_keys, parts));
  grid.keys_per_part = ceil_div(keys, keys_per_tile) * keys_per_tile;
  grid.parts = static_cast<int>(ceil_div(most_keys, grid.keys_per_part));
  return grid;
}

// The rows of a tile. Tile t belongs to the last request r with starts[r] / rows_per_tile + r <= t,
// which gives every request at least the tiles it needs, and some of them nothing.
struct TileRows {
  int64_t request;
  int64_t first;
  int count;  // at most 0: none

  __device__ TileRows(const AttendGrid& grid, int64_t num_requests, int64_t tile) {
    const auto first_tile = [&](int64_t r) {
      return grid.request_starts[r] / grid.rows_per_tile + r;
    };
    int64_t low = 0;
    int64_t high = num_requests;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (first_tile(middle) <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    request = low;
    first = grid.request_starts[low] + (tile - first_tile(low)) * grid.rows_per_tile;
    const int64_t left = grid.request_starts[low + 1] - first;
    count = static_cast<int>(left < grid.rows_per_tile ? left : grid.rows_per_tile);
  }
};

}  // namespace phasekv::cuda
