#include "ops/key_range.h"

#include <cmath>
#include <limits>
#include <string>

#include "validate.h"

namespace phasekv {

void check_key_range(const PagedView& key, const int32_t* block_table, int64_t first_token,
                     int64_t tokens) {
  check_blocks("key", key);
  if (first_token < 0) refuse("first_token", first_token, "at least 0");
  const int64_t most_tokens = std::numeric_limits<int64_t>::max() - first_token;
  if (tokens < 0 || tokens > most_tokens) {
    refuse("tokens", tokens, "in [0, " + std::to_string(most_tokens) + "]");
  }
  if (tokens == 0) return;
  check_not_null("block_table", block_table, tokens);
  const int64_t last = (first_token + tokens - 1) / key.block_size;
  for (int64_t i = first_token / key.block_size; i <= last; ++i) {
    if (block_table[i] >= 0 && block_table[i] < key.num_blocks) continue;
    refuse("block_table[" + std::to_string(i) + "]", block_table[i],
           "in [0, num_blocks = " + std::to_string(key.num_blocks) + ")");
  }
}

void check_whole_groups(const char* argument, int64_t query_heads, const PagedView& key) {
  if (query_heads >= 1 && query_heads % key.num_heads == 0) return;
  refuse(argument, query_heads, "a multiple of the KV heads, " + std::to_string(key.num_heads));
}

void check_query(const RowsView& query, const PagedView& key) {
  check_rows("query", query);
  check_equal("query.head_size", query.head_size, "key", key.head_size);
  check_whole_groups("query.heads", query.heads, key);
}

void check_query_limits(const int64_t* query_limits, const RowsView& query, int64_t tokens) {
  check_not_null("query_limits", query_limits, query.tokens);
  for (int64_t i = 0; i < query.tokens; ++i) {
    if (query_limits[i] >= 0 && query_limits[i] <= tokens) continue;
    refuse("query_limits[" + std::to_string(i) + "]", query_limits[i],
           "in [0, tokens = " + std::to_string(tokens) + "]");
  }
}

void check_scale(float scale) {
  if (!std::isfinite(scale)) refuse("scale", std::to_string(scale), "finite");
}

}  // namespace phasekv
