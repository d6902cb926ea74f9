// AgentKV's matched ablation: everything as in agentkv, but one buffer of the last 32 queries
// instead of four of 8.
#include <memory>

#include "eviction/buffered_attention.h"
#include "eviction/options.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_agentkv_recency(const PolicyOptions& options) {
  check_options("agentkv_recency", options,
                {.queries = true,
                 .sinks = true,
                 .recent = true,
                 .attention = true,
                 .marker_queries = true,
                 .phase_quota = true,
                 .redundancy = true});
  BufferedAttention definition;
  definition.queries = 32;
  definition.rules = {
      .group = GroupReduction::max_logit, .pooling = Pooling::max, .pooling_kernel = 7};
  definition.protected_tokens.sinks = 32;
  return make_buffered_attention("agentkv_recency", definition, options);
}

}  // namespace phasekv::eviction
