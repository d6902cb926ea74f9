// AgentKVShift as published (arXiv 2607.21604, Algorithm 1): ceil(r n) probes per chunk for keys
// and for values separately, mean residual of each set, weights min(d, 1), residuals averaged as
// keys are cached (after RoPE). A token that is a probe for its value only keeps a shifted key.
#include "reuse/shift.h"

namespace phasekv::reuse {

std::unique_ptr<Method> make_agentkvshift(const MethodOptions& options) {
  return make_shift_method(
      "agentkvshift", {OffsetFrame::rotated, WeightRule::clipped, ProbeRule::separate}, options);
}

}  // namespace phasekv::reuse
