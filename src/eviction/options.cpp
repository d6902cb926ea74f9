#include "eviction/options.h"

#include <cmath>
#include <string>

#include "phasekv/error.h"

namespace phasekv::eviction {
namespace {

void refuse_unless(bool known, std::string_view policy, const char* option, bool is_set) {
  if (known || !is_set) return;
  throw Error(ErrorCode::invalid_argument, option, "set",
              "left away: the policy " + std::string(policy) + " has no such option");
}

void check_least(const char* option, const std::optional<int64_t>& value, int64_t least) {
  if (value && *value < least) {
    throw Error(ErrorCode::invalid_argument, option, std::to_string(*value),
                "at least " + std::to_string(least));
  }
}

void check_share(const char* option, const std::optional<double>& value) {
  // Negated so that NaN is refused too.
  if (value && !(*value >= 0.0 && *value <= 1.0)) {
    throw Error(ErrorCode::invalid_argument, option, std::to_string(*value), "in [0, 1]");
  }
}

}  // namespace

void check_options(std::string_view policy, const PolicyOptions& options, const OptionSet& known) {
  refuse_unless(known.queries, policy, "queries", options.queries.has_value());
  refuse_unless(known.sinks, policy, "sinks", options.sinks.has_value());
  refuse_unless(known.recent, policy, "recent", options.recent.has_value());
  refuse_unless(known.attention, policy, "group", options.group.has_value());
  refuse_unless(known.attention, policy, "pooling", options.pooling.has_value());
  refuse_unless(known.attention, policy, "pooling_kernel", options.pooling_kernel.has_value());
  refuse_unless(known.marker_queries, policy, "marker_queries", options.marker_queries.has_value());
  refuse_unless(known.phase_quota, policy, "phase_quota", options.phase_quota.has_value());
  refuse_unless(known.redundancy, policy, "redundancy", options.redundancy.has_value());
  refuse_unless(known.safeguard, policy, "safeguard", options.safeguard.has_value());
  refuse_unless(known.steepness, policy, "steepness", options.steepness.has_value());
  refuse_unless(known.statistics, policy, "statistics", options.statistics != nullptr);
  check_least("queries", options.queries, 1);
  check_least("sinks", options.sinks, 0);
  check_least("recent", options.recent, 0);
  check_least("pooling_kernel", options.pooling_kernel, 1);
  if (options.pooling_kernel && *options.pooling_kernel % 2 == 0) {
    throw Error(ErrorCode::invalid_argument, "pooling_kernel",
                std::to_string(*options.pooling_kernel), "odd");
  }
  check_share("phase_quota", options.phase_quota);
  check_share("redundancy", options.redundancy);
  check_share("safeguard", options.safeguard);
  if (options.steepness && !(*options.steepness >= 1.0 && std::isfinite(*options.steepness))) {
    throw Error(ErrorCode::invalid_argument, "steepness", std::to_string(*options.steepness),
                "a number of at least 1");
  }
}

}  // namespace phasekv::eviction
