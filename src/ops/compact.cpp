#include "phasekv/ops/compact.h"

#include <limits>
#include <string>

#include "dispatch.h"
#include "ops/check_moves.h"
#include "validate.h"

namespace phasekv {
namespace {

std::string element(const char* list, int64_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

void check_kept_indices(std::span<const int64_t> kept_indices, int64_t kept, int64_t tokens) {
  for (int64_t i = 0; i < static_cast<int64_t>(kept_indices.size()); ++i) {
    const int64_t index = kept_indices[static_cast<size_t>(i)];
    const int64_t least = i % kept == 0 ? 0 : kept_indices[static_cast<size_t>(i - 1)] + 1;
    if (index >= least && index < tokens) continue;
    refuse(element("kept_indices", i), index,
           "ascending within a head and in [0, tokens = " + std::to_string(tokens) + ")");
  }
}

// The index of a move: ascending within its head, and in a block that exists.
void check_index(const char* list, const int64_t* indices, int64_t i, int64_t head_start,
                 const CompactParams& params) {
  const int64_t most = std::numeric_limits<int64_t>::max() - params.first_token;
  if (indices[i] < 0 || indices[i] > most || (i > head_start && indices[i] <= indices[i - 1])) {
    refuse(element(list, i), indices[i], "at least 0 and ascending within a head");
  }
  const int64_t entry = (params.first_token + indices[i]) / params.key.block_size;
  const int32_t block = params.block_table[entry];
  if (block >= 0 && block < params.key.num_blocks) return;
  refuse(element("block_table", entry), block,
         "in [0, num_blocks = " + std::to_string(params.key.num_blocks) + ")");
}

// No index of a head is in both of its ascending lists.
void check_disjoint(const CompactParams& params, int64_t begin, int64_t end) {
  for (int64_t i = begin, j = begin; i < end && j < end;) {
    if (params.from[i] == params.to[j]) {
      refuse(element("to", j), params.to[j], "no index that another move reads");
    }
    (params.from[i] < params.to[j] ? i : j) += 1;
  }
}

}  // namespace

CompactionMoves plan_compaction(std::span<const int64_t> kept_indices, int64_t kv_heads,
                                int64_t tokens) {
  if (kv_heads < 1) refuse("kv_heads", kv_heads, "at least 1");
  const auto count = static_cast<int64_t>(kept_indices.size());
  if (count % kv_heads != 0) {
    refuse("kept_indices", "[" + std::to_string(count) + "]",
           "as many for each of the " + std::to_string(kv_heads) + " KV heads");
  }
  const int64_t kept = count / kv_heads;
  if (tokens < kept) refuse("tokens", tokens, "at least the " + std::to_string(kept) + " kept");
  check_kept_indices(kept_indices, kept, tokens);

  CompactionMoves moves;
  moves.starts.push_back(0);
  const int64_t window = tokens - kept;
  for (int64_t head = 0; head < kv_heads; ++head) {
    const std::span<const int64_t> indices =
        kept_indices.subspan(static_cast<size_t>(head * kept), static_cast<size_t>(kept));
    int64_t hole = window;  // the first slot of the window that is not known to be taken
    for (const int64_t index : indices) {
      if (index < window) {
        moves.from.push_back(index);
        continue;
      }
      for (; hole < index; ++hole) moves.to.push_back(hole);
      hole = index + 1;
    }
    for (; hole < tokens; ++hole) moves.to.push_back(hole);
    moves.starts.push_back(static_cast<int64_t>(moves.from.size()));
  }
  return moves;
}

std::vector<int64_t> compaction_sources(const CompactionMoves& moves, int64_t kept,
                                        int64_t tokens) {
  const auto kv_heads = static_cast<int64_t>(moves.starts.size()) - 1;
  const int64_t window = tokens - kept;
  if (kept < 0 || window < 0) {
    refuse("kept", kept, "in [0, tokens = " + std::to_string(tokens) + "]");
  }
  std::vector<int64_t> sources;
  sources.reserve(static_cast<size_t>(kv_heads * kept));
  for (int64_t head = 0; head < kv_heads; ++head) {
    const auto start = static_cast<int64_t>(sources.size());
    for (int64_t index = window; index < tokens; ++index) sources.push_back(index);
    for (auto i = static_cast<size_t>(moves.starts[static_cast<size_t>(head)]);
         i < static_cast<size_t>(moves.starts[static_cast<size_t>(head + 1)]); ++i) {
      const int64_t slot = moves.to[i] - window;
      if (slot < 0 || slot >= kept) {
        refuse(element("moves.to", static_cast<int64_t>(i)), moves.to[i],
               "in the target window [" + std::to_string(window) + ", " + std::to_string(tokens) +
                   ")");
      }
      sources[static_cast<size_t>(start + slot)] = moves.from[i];
    }
  }
  return sources;
}

int64_t check_moves(const CompactParams& params) {
  check_blocks("key", params.key);
  check_blocks("value", params.value);
  check_equal("value.num_blocks", params.value.num_blocks, "key", params.key.num_blocks);
  check_same_blocks("value", params.value, "key", params.key);
  if (params.first_token < 0) refuse("first_token", params.first_token, "at least 0");
  check_not_null("starts", params.starts, params.key.num_heads + 1);
  int64_t moves = 0;
  for (int64_t head = 0; head <= params.key.num_heads; ++head) {
    const int64_t start = params.starts[head];
    if (start < moves || (head == 0 && start != 0)) {
      refuse(element("starts", head), start,
             head == 0 ? "0" : "at least the start before it, " + std::to_string(moves));
    }
    moves = start;
  }
  check_not_null("from", params.from, moves);
  check_not_null("to", params.to, moves);
  check_not_null("block_table", params.block_table, moves);
  for (int64_t head = 0; head < params.key.num_heads; ++head) {
    const int64_t begin = params.starts[head];
    const int64_t end = params.starts[head + 1];
    for (int64_t i = begin; i < end; ++i) {
      check_index("from", params.from, i, begin, params);
      check_index("to", params.to, i, begin, params);
    }
    check_disjoint(params, begin, end);
  }
  return moves;
}

void compact(const CompactParams& params) {
  if (check_moves(params) > 0) active_kernels().compact(params);
}

}  // namespace phasekv
