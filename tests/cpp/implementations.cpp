#include "implementations.h"

#include <omp.h>

#include <iostream>

#include "dispatch.h"
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

void PrintTo(const Implementation& implementation, std::ostream* stream) {
  *stream << implementation.name << " (" << implementation.how << ")";
}

void ImplementationTest::SetUp() {
  threads_ = omp_get_max_threads();
  if (GetParam().kernels == nullptr) GTEST_SKIP() << GetParam().name << ": " << GetParam().how;
  override_kernels(GetParam().kernels);
}

void ImplementationTest::TearDown() {
  override_kernels(nullptr);
  omp_set_num_threads(threads_);
}

TEST(Implementations, AreTheseHere) {
  for (const Implementation& implementation : implementations()) {
    std::cout << "CPU kernels " << implementation.name << ": " << implementation.how << "\n";
  }
}

std::string test_name(const testing::TestParamInfo<Implementation>& info) {
  const bool is_skipped = info.param.kernels == nullptr;
  return info.param.name + "_" + (is_skipped ? "skipped" : info.param.how);
}

}  // namespace phasekv
