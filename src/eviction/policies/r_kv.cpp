// R-KV (arXiv 2505.24133): attention of the last queries over the keys before them, the largest
// logit of a group, the largest of 7 neighbours, mixed with how much a key repeats others:
// 0.07 attention - 0.93 redundancy, as in its code (its paper has 0.1 and 0.9).
#include <memory>

#include "eviction/buffered_attention.h"
#include "eviction/options.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_r_kv(const PolicyOptions& options) {
  check_options(
      "r_kv", options,
      {.queries = true, .sinks = true, .recent = true, .attention = true, .redundancy = true});
  BufferedAttention definition;
  definition.queries = options.queries.value_or(8);
  definition.rules = {.group = GroupReduction::max_logit,
                      .pooling = Pooling::max,
                      .pooling_kernel = 7,
                      .excluded_recent = definition.queries};
  definition.protected_tokens.recent = definition.queries;
  definition.redundancy = 0.93;
  return make_buffered_attention("r_kv", definition, options);
}

}  // namespace phasekv::eviction
