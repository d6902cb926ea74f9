// AgentKVShift's family: probes per chunk, and a weighted mean residual for the other tokens.
#pragma once

#include <memory>
#include <string_view>

#include "phasekv/reuse/method.h"

namespace phasekv::reuse {

struct ShiftRules {
  OffsetFrame frame;
  WeightRule weight;
  ProbeRule probes;
};

// `name` must outlive the method. Rules that `options` sets replace the method's own.
std::unique_ptr<Method> make_shift_method(std::string_view name, ShiftRules rules,
                                          const MethodOptions& options);

}  // namespace phasekv::reuse
