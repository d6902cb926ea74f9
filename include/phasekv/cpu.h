// Which CPU implementation of the ops runs.
#pragma once

#include <string_view>
#include <vector>

namespace phasekv {

enum class CpuIsa { scalar, avx2, avx512, avx512_bf16 };

std::string_view name_of(CpuIsa isa);  // "scalar", "avx2", "avx512", "avx512bf16"

// Those compiled in that this processor can run, slowest first; scalar is always there.
std::vector<CpuIsa> supported_cpu_isas();

// The one in use: the environment variable PHASEKV_CPU_ISA by name, else the last supported.
// Throws missing_capability for a name this processor cannot run, invalid_argument for an unknown
// one.
CpuIsa active_cpu_isa();

// Switches at run time (tests, benchmarks). Not thread-safe against running ops.
void set_active_cpu_isa(CpuIsa isa);

}  // namespace phasekv
