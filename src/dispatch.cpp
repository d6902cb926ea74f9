#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "phasekv/cpu.h"
#include "phasekv/error.h"

namespace phasekv {

namespace cpu {
namespace scalar {
const KernelTable& kernel_table();
}
#if defined(PHASEKV_HAVE_AVX2)
namespace avx2 {
const KernelTable& kernel_table();
}
#endif
#if defined(PHASEKV_HAVE_AVX512)
namespace avx512 {
const KernelTable& kernel_table();
}
#endif
#if defined(PHASEKV_HAVE_AVX512_BF16)
namespace avx512_bf16 {
const KernelTable& kernel_table();
}
#endif
}  // namespace cpu

namespace {

const cpu::KernelTable* scalar_kernels() { return &cpu::scalar::kernel_table(); }

const cpu::KernelTable* avx2_kernels() {
#if defined(PHASEKV_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return &cpu::avx2::kernel_table();
  }
#endif
  return nullptr;
}

const cpu::KernelTable* avx512_kernels() {
#if defined(PHASEKV_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &cpu::avx512::kernel_table();
  }
#endif
  return nullptr;
}

const cpu::KernelTable* avx512_bf16_kernels() {
#if defined(PHASEKV_HAVE_AVX512_BF16)
  if (avx512_kernels() != nullptr && __builtin_cpu_supports("avx512bf16")) {
    return &cpu::avx512_bf16::kernel_table();
  }
#endif
  return nullptr;
}

}  // namespace

const cpu::KernelTable* kernels_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::scalar:
      return scalar_kernels();
    case CpuIsa::avx2:
      return avx2_kernels();
    case CpuIsa::avx512:
      return avx512_kernels();
    case CpuIsa::avx512_bf16:
      return avx512_bf16_kernels();
  }
  return nullptr;
}

namespace {

constexpr CpuIsa kSlowestFirst[] = {CpuIsa::scalar, CpuIsa::avx2, CpuIsa::avx512,
                                    CpuIsa::avx512_bf16};
constexpr const char* kVariable = "PHASEKV_CPU_ISA";

void check_runnable(CpuIsa isa, const char* argument) {
  if (kernels_of(isa) != nullptr) return;
  std::string names;
  for (const CpuIsa other : supported_cpu_isas()) {
    names += (names.empty() ? "" : ", ") + std::string(name_of(other));
  }
  throw Error(ErrorCode::missing_capability, argument, std::string(name_of(isa)),
              "this processor or build cannot run it; it can run " + names);
}

CpuIsa initial_isa() {
  const char* wanted = std::getenv(kVariable);
  if (wanted == nullptr || *wanted == '\0') return supported_cpu_isas().back();
  for (const CpuIsa isa : kSlowestFirst) {
    if (name_of(isa) != wanted) continue;
    check_runnable(isa, kVariable);
    return isa;
  }
  throw Error(ErrorCode::invalid_argument, kVariable, wanted,
              "one of scalar, avx2, avx512, avx512bf16");
}

// Chosen at the first use, so that a bad environment variable is an error of that call.
std::atomic<CpuIsa>& chosen_isa() {
  static std::atomic<CpuIsa> chosen{initial_isa()};
  return chosen;
}

std::atomic<const cpu::KernelTable*>& overriding_kernels() {
  static std::atomic<const cpu::KernelTable*> kernels{nullptr};
  return kernels;
}

}  // namespace

std::string_view name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::scalar:
      return "scalar";
    case CpuIsa::avx2:
      return "avx2";
    case CpuIsa::avx512:
      return "avx512";
    case CpuIsa::avx512_bf16:
      return "avx512bf16";
  }
  return "unknown";
}

std::vector<CpuIsa> supported_cpu_isas() {
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa : kSlowestFirst) {
    if (kernels_of(isa) != nullptr) isas.push_back(isa);
  }
  return isas;
}

CpuIsa active_cpu_isa() { return chosen_isa().load(); }

void set_active_cpu_isa(CpuIsa isa) {
  check_runnable(isa, "isa");
  chosen_isa().store(isa);
}

const cpu::KernelTable& active_kernels() {
  const cpu::KernelTable* kernels = overriding_kernels().load();
  return kernels != nullptr ? *kernels : *kernels_of(active_cpu_isa());
}

void override_kernels(const cpu::KernelTable* table) { overriding_kernels().store(table); }

}  // namespace phasekv
