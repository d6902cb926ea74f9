// implementations() of the CPU: one per instruction set.
#include <iostream>

#include "dispatch.h"
#include "implementations.h"
#include "phasekv/cpu.h"

namespace phasekv {

#if defined(PHASEKV_EMULATION)
namespace cpu {
namespace avx512_emulated {
const KernelTable& kernel_table();
}
namespace avx512_bf16_emulated {
const KernelTable& kernel_table();
}
}  // namespace cpu
#endif

namespace {

const cpu::KernelTable* emulated_kernels(CpuIsa isa) {
#if defined(PHASEKV_EMULATION)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return nullptr;
  if (isa == CpuIsa::avx512) return &cpu::avx512_emulated::kernel_table();
  if (isa == CpuIsa::avx512_bf16) return &cpu::avx512_bf16_emulated::kernel_table();
#else
  static_cast<void>(isa);
#endif
  return nullptr;
}

Implementation implementation_of(CpuIsa isa) {
  const std::string name(name_of(isa));
  if (const cpu::KernelTable* kernels = kernels_of(isa)) return {name, "native", kernels};
  if (const cpu::KernelTable* kernels = emulated_kernels(isa)) return {name, "emulated", kernels};
  return {name, "this processor cannot run it, and there is no emulation of it here", nullptr};
}

std::vector<Implementation> find_implementations() {
  std::vector<Implementation> all;
  for (const CpuIsa isa : {CpuIsa::scalar, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16}) {
    all.push_back(implementation_of(isa));
  }
  return all;
}

}  // namespace

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> all = find_implementations();
  return all;
}

TEST(Implementations, AreTheseHere) {
  for (const Implementation& implementation : implementations()) {
    std::cout << "CPU kernels " << implementation.name << ": " << implementation.how << "\n";
  }
}

}  // namespace phasekv
