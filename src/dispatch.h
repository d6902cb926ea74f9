// Which kernels the ops call.
#pragma once

#include "cpu/kernel_table.h"
#include "phasekv/cpu.h"

namespace phasekv {

// Null: not compiled in, or this processor cannot run it.
const cpu::KernelTable* kernels_of(CpuIsa isa);

// Those of active_cpu_isa().
const cpu::KernelTable& active_kernels();

// Overrides the choice until called with null; for kernels that are not in the library (the tests
// run AVX-512 ones under emulation). `table` must outlive that.
void override_kernels(const cpu::KernelTable* table);

}  // namespace phasekv
