#include "phasekv/phases/phase.h"

#include <array>
#include <string>

#include "phasekv/error.h"

namespace phasekv::phases {
namespace {

constexpr std::array<std::string_view, kNumPhases> kNames{"think", "act", "tool", "others"};

}  // namespace

std::string_view name_of(Phase phase) { return kNames[static_cast<size_t>(phase)]; }

Phase phase_of_name(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<Phase>(i);
  }
  throw Error(ErrorCode::invalid_argument, "phase", std::string(name),
              "one of think, act, tool, others");
}

}  // namespace phasekv::phases
