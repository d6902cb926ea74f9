// SnapKV (arXiv 2404.14469) as kvpress defines it: mean attention of the last 64 queries, causal
// among themselves, averaged over 5 neighbouring tokens; those 64 tokens are always kept. Here it
// also runs again at every event while decoding; a query from before the last event then sees all
// that the event left.
#include <memory>

#include "eviction/buffered_attention.h"
#include "eviction/options.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_snapkv(const PolicyOptions& options) {
  check_options("snapkv", options,
                {.queries = true, .recent = true, .attention = true, .redundancy = true});
  BufferedAttention definition;
  definition.queries = options.queries.value_or(64);
  definition.rules = {.pooling = Pooling::average, .pooling_kernel = 5, .causal = true};
  definition.protected_tokens.recent = definition.queries;
  return make_buffered_attention("snapkv", definition, options);
}

}  // namespace phasekv::eviction
