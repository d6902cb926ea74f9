// Moves the keys and values that an eviction keeps into the last slots of a request, per KV head
// and in place, so that the blocks before them can be freed. Keys keep the rotation of their own
// position, so their order does not matter, and only those outside the target window move.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phasekv/tensor.h"

namespace phasekv {

// Move i of KV head h, for starts[h] <= i < starts[h + 1], brings index from[i] to index to[i].
struct CompactionMoves {
  std::vector<int64_t> starts;  // [kv_heads + 1]
  std::vector<int64_t> from;    // [starts[kv_heads]], ascending within a head
  std::vector<int64_t> to;      // the same
};

// The target window is the last `kept` of `tokens` indices. Kept indices in it stay; those below it
// fill its holes, which is the least number of moves. `kept_indices` is [kv_heads, kept], strictly
// ascending within a head.
CompactionMoves plan_compaction(std::span<const int64_t> kept_indices, int64_t kv_heads,
                                int64_t tokens);

// Where each slot of the target window has its key from, [kv_heads, kept]: to take a table of one
// entry per key and KV head (original positions, attention sums) through the same moves.
std::vector<int64_t> compaction_sources(const CompactionMoves& moves, int64_t kept, int64_t tokens);

struct CompactParams {
  PagedView key;    // in and out
  PagedView value;  // in and out; same blocks, heads, block size, head size and dtype as key
  const int32_t* block_table = nullptr;  // [blocks of the request] block ids; only those of the
                                         // moves are looked at
  int64_t first_token = 0;          // index in the request's block table of index 0 of the moves
  const int64_t* starts = nullptr;  // [key.num_heads + 1], as in CompactionMoves
  const int64_t* from = nullptr;    // [starts[num_heads]], at least 0, strictly ascending in a head
  const int64_t* to = nullptr;      // the same, and no index is also in `from` of the head
};

// Every bit is kept. No token that a move writes is read by another, so nothing depends on the
// order of the moves. Throws invalid_argument for moves of another kind; nothing is then written.
void compact(const CompactParams& params);

}  // namespace phasekv
