// PhaseShift, our own: AgentKVShift with one probe set, by key divergence plus value divergence,
// each over its mean in the chunk, and the whole mean residual for every other token (w = 1). At
// the same nominal ratio it recomputes fewer rows than two sets do.
#include "reuse/shift.h"

namespace phasekv::reuse {

std::unique_ptr<Method> make_phaseshift(const MethodOptions& options) {
  return make_shift_method("phaseshift", {OffsetFrame::rotated, WeightRule::one, ProbeRule::sum},
                           options);
}

}  // namespace phasekv::reuse
