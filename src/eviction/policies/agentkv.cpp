// AgentKV (arXiv 2609.14872): each phase keeps its last 8 queries, and a key's score is the mean
// attention of all of them. 32 sinks are kept within the budget. What the paper leaves open is
// filled in as its R-KV baseline does it: the largest logit of a group, the largest of 7
// neighbours; nothing recent is protected, and markers enter the buffers.
#include <memory>

#include "eviction/buffered_attention.h"
#include "eviction/options.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_agentkv(const PolicyOptions& options) {
  check_options("agentkv", options,
                {.queries = true,
                 .sinks = true,
                 .recent = true,
                 .attention = true,
                 .marker_queries = true,
                 .phase_quota = true,
                 .redundancy = true});
  BufferedAttention definition;
  definition.buffers = kNumPhases;
  definition.queries = 8;
  definition.rules = {
      .group = GroupReduction::max_logit, .pooling = Pooling::max, .pooling_kernel = 7};
  definition.protected_tokens.sinks = 32;
  return make_buffered_attention("agentkv", definition, options);
}

}  // namespace phasekv::eviction
