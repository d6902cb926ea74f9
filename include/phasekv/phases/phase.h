// The phases of an agent's trajectory.
#pragma once

#include <cstdint>
#include <string_view>

namespace phasekv::phases {

// AgentKV's four (arXiv 2609.14872): reasoning; the model's tool calls; what the tools answered;
// and everything else, such as the system prompt, the tool descriptions, the user and plain
// answers. The numbers are part of saved states.
enum class Phase : uint8_t { think = 0, act = 1, tool = 2, others = 3 };

inline constexpr int32_t kNumPhases = 4;

std::string_view name_of(Phase phase);

// The phase of this name. Throws Error where there is none.
Phase phase_of_name(std::string_view name);

}  // namespace phasekv::phases
