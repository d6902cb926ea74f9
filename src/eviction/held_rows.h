// Held keys and values, and queries, as plain float32 rows on the host, whatever their layout and
// type and wherever they lie, for policies whose score is no op of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "phasekv/eviction/policy.h"
#include "phasekv/tensor.h"

namespace phasekv::eviction {

// Of one KV head of input.key or input.value, [input.tokens, head_size].
std::vector<float> held_rows(const PolicyInput& input, const PagedView& blocks, int64_t head);

// input.queries, [queries, query heads, head_size].
std::vector<float> query_rows(const PolicyInput& input);

// Inner product of two rows.
float product(const float* a, const float* b, int64_t size);

// A packed view of such rows.
RowsView view_of(std::vector<float>* rows, int64_t heads, int64_t head_size);

}  // namespace phasekv::eviction
