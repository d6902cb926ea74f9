// The checks that the ops over a stretch of a request's keys share. All of them throw Error with
// the argument's name and value.
#pragma once

#include <cstdint>

#include "phasekv/tensor.h"

namespace phasekv {

// Keys [first_token, first_token + tokens) of a request, whose blocks exist.
void check_key_range(const PagedView& key, const int32_t* block_table, int64_t first_token,
                     int64_t tokens);

// A whole number of query heads for each KV head, at least one.
void check_whole_groups(const char* argument, int64_t query_heads, const PagedView& key);

// Queries of the key's head size, with a whole number of query heads for each KV head.
void check_query(const RowsView& query, const PagedView& key);

// [query.tokens] limits in [0, tokens].
void check_query_limits(const int64_t* query_limits, const RowsView& query, int64_t tokens);

void check_scale(float scale);

}  // namespace phasekv
