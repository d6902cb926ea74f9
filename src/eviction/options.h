// How policies read their options: each says which it has, and what they are by default.
#pragma once

#include <cstdint>
#include <string_view>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

// The options that policies share in part; a policy names those it has.
struct OptionSet {
  bool queries = false;
  bool sinks = false;
  bool recent = false;
  bool attention = false;  // group, pooling, pooling_kernel
  bool marker_queries = false;
  bool phase_quota = false;
  bool redundancy = false;
  bool safeguard = false;
  bool steepness = false;
  bool statistics = false;
};

// Throws invalid_argument for an option that is set but not in `known`, or out of range.
void check_options(std::string_view policy, const PolicyOptions& options, const OptionSet& known);

}  // namespace phasekv::eviction
