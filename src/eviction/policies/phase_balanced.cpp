// Our own: attention accumulated over every query since a key arrived, kept per phase. A key's
// score is the mean over phases of the phase's mean attention, so that a phase with few queries
// (acts) weighs as much as one with many (tool outputs). Half of the budget holds the newest
// tokens. Of a prefill's chunk the last `queries` queries count.
#include <memory>

#include "eviction/accumulated_attention.h"
#include "eviction/options.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_phase_balanced(const PolicyOptions& options) {
  check_options("phase_balanced", options,
                {.queries = true,
                 .sinks = true,
                 .recent = true,
                 .marker_queries = true,
                 .phase_quota = true,
                 .redundancy = true});
  AccumulatedAttention definition;
  definition.sums = kNumPhases;
  definition.sinks = 4;
  return make_accumulated_attention("phase_balanced", definition, options);
}

}  // namespace phasekv::eviction
