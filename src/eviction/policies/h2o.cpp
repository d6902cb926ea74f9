// H2O (arXiv 2306.14048): attention accumulated over all queries; half of the budget holds the
// heavy hitters, half the newest tokens. Of a prefill's chunk the last `queries` queries count.
#include <memory>

#include "eviction/accumulated_attention.h"
#include "eviction/options.h"

namespace phasekv::eviction {

std::unique_ptr<Policy> make_h2o(const PolicyOptions& options) {
  check_options("h2o", options,
                {.queries = true, .sinks = true, .recent = true, .redundancy = true});
  return make_accumulated_attention("h2o", {}, options);
}

}  // namespace phasekv::eviction
