#include "reuse/selection.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "phasekv/error.h"
#include "phasekv/ops/select_top.h"

namespace phasekv::reuse {
namespace {

int64_t floor_share(double ratio, int64_t tokens) {
  const double share = ratio * static_cast<double>(tokens);
  return std::min(tokens, static_cast<int64_t>(std::floor(share + 1e-9 * std::max(1.0, share))));
}

std::vector<uint8_t> flags_of(const std::vector<int64_t>& chosen, int64_t tokens) {
  std::vector<uint8_t> flags(static_cast<size_t>(tokens), 0);
  for (const int64_t index : chosen) flags[static_cast<size_t>(index)] = 1;
  return flags;
}

void check_covers(const char* argument, std::span<const float> values, int64_t tokens) {
  if (static_cast<int64_t>(values.size()) != tokens) {
    throw Error(ErrorCode::invalid_argument, argument, std::to_string(values.size()),
                "one value for each of the " + std::to_string(tokens) + " cached tokens");
  }
}

}  // namespace

// ratio * tokens in double can land a hair above a whole number (0.1 * 30 = 3.0000000000000004);
// such a hair must not buy another probe.
int64_t ceil_share(double ratio, int64_t tokens) {
  const double share = ratio * static_cast<double>(tokens);
  return std::min(tokens, static_cast<int64_t>(std::ceil(share - 1e-9 * std::max(1.0, share))));
}

int64_t total_tokens(std::span<const Segment> segments) {
  int64_t total = 0;
  for (const Segment& segment : segments) total += segment.tokens;
  return total;
}

void check_input(const SelectionInput& input, bool needs_divergence) {
  if (!(input.ratio >= 0.0 && input.ratio <= 1.0)) {
    throw Error(ErrorCode::invalid_argument, "ratio", std::to_string(input.ratio),
                "a recompute ratio in [0, 1]");
  }
  for (const Segment& segment : input.segments) {
    if (segment.tokens < 0 || segment.chunk_offset < 0 ||
        segment.chunk_offset + segment.tokens > segment.chunk_tokens) {
      throw Error(ErrorCode::invalid_argument, "segments", std::to_string(segment.tokens),
                  "a run of tokens inside its chunk of " + std::to_string(segment.chunk_tokens));
    }
  }
  if (needs_divergence) {
    const int64_t tokens = total_tokens(input.segments);
    check_covers("key_divergence", input.key_divergence, tokens);
    check_covers("value_divergence", input.value_divergence, tokens);
  }
}

void check_attention(const SelectionInput& input) {
  check_covers("attention", input.attention, total_tokens(input.segments));
}

std::vector<uint8_t> top_per_segment(std::span<const Segment> segments,
                                     std::span<const float> scores, double ratio) {
  std::vector<int64_t> starts{0};
  std::vector<int64_t> counts;
  for (const Segment& segment : segments) {
    starts.push_back(starts.back() + segment.tokens);
    counts.push_back(ceil_share(ratio, segment.tokens));
  }
  SelectTopParams params;
  params.scores = scores.data();
  params.segment_starts = starts.data();
  params.num_segments = static_cast<int64_t>(counts.size());
  params.counts = counts.data();
  return flags_of(select_top(params), starts.back());
}

std::vector<uint8_t> top_overall(std::span<const Segment> segments, std::span<const float> scores,
                                 double ratio) {
  const int64_t tokens = total_tokens(segments);
  const int64_t starts[2] = {0, tokens};
  const int64_t count = floor_share(ratio, tokens);
  SelectTopParams params;
  params.scores = scores.data();
  params.segment_starts = starts;
  params.num_segments = 1;
  params.counts = &count;
  return flags_of(select_top(params), tokens);
}

Selection recompute_only(std::vector<uint8_t> probes) {
  Selection selection;
  selection.value_probe = probes;
  selection.key_probe = std::move(probes);
  return selection;
}

void refuse_options(std::string_view method, const MethodOptions& options, bool has_shift_options,
                    bool has_boundary_tokens) {
  const auto refuse = [&](const char* option) {
    throw Error(ErrorCode::invalid_argument, option, std::string(method),
                "an option that this method has");
  };
  if (!has_shift_options && options.frame) refuse("frame");
  if (!has_shift_options && options.weight) refuse("weight");
  if (!has_shift_options && options.probes) refuse("probes");
  if (!has_boundary_tokens && options.boundary_tokens) refuse("boundary_tokens");
}

}  // namespace phasekv::reuse
