// What several methods share when they choose tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "phasekv/reuse/method.h"

namespace phasekv::reuse {

// Throws invalid_argument unless the ratio is in [0, 1], segments are consistent and, when
// `needs_divergence`, both divergences cover every token.
void check_input(const SelectionInput& input, bool needs_divergence);

// Throws invalid_argument unless the attention covers every token.
void check_attention(const SelectionInput& input);

// Cached tokens of all segments together.
int64_t total_tokens(std::span<const Segment> segments);

// ceil(ratio * tokens), forgiving the rounding of the product, at most `tokens`.
int64_t ceil_share(double ratio, int64_t tokens);

// The ceil(ratio * tokens) highest scores of each segment, as flags per token.
std::vector<uint8_t> top_per_segment(std::span<const Segment> segments,
                                     std::span<const float> scores, double ratio);

// The floor(ratio * tokens) highest scores over all segments together, as flags per token.
std::vector<uint8_t> top_overall(std::span<const Segment> segments, std::span<const float> scores,
                                 double ratio);

// A selection with one set of probes for keys and values and no shift.
Selection recompute_only(std::vector<uint8_t> probes);

// Throws invalid_argument naming the first option that is set and that `method` does not have.
void refuse_options(std::string_view method, const MethodOptions& options, bool has_shift_options,
                    bool has_boundary_tokens);

}  // namespace phasekv::reuse
