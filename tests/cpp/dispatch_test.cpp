// The choice of the instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "phasekv/cpu.h"
#include "phasekv/error.h"

namespace phasekv {
namespace {

TEST(Dispatch, ScalarIsAlwaysThereAndTheLastIsTheDefault) {
  const std::vector<CpuIsa> supported = supported_cpu_isas();
  ASSERT_FALSE(supported.empty());
  EXPECT_EQ(supported.front(), CpuIsa::scalar);
  EXPECT_TRUE(std::is_sorted(supported.begin(), supported.end()));
  if (std::getenv("PHASEKV_CPU_ISA") == nullptr) {
    EXPECT_EQ(active_cpu_isa(), supported.back());
  }
}

TEST(Dispatch, SwitchesToWhatTheProcessorCanRunAndRefusesTheRest) {
  const CpuIsa before = active_cpu_isa();
  const std::vector<CpuIsa> supported = supported_cpu_isas();
  for (const CpuIsa isa : {CpuIsa::scalar, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16}) {
    const bool can_run = std::find(supported.begin(), supported.end(), isa) != supported.end();
    if (can_run) {
      set_active_cpu_isa(isa);
      EXPECT_EQ(active_cpu_isa(), isa);
      continue;
    }
    try {
      set_active_cpu_isa(isa);
      ADD_FAILURE() << name_of(isa) << " was not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::missing_capability);
      EXPECT_EQ(error.value(), name_of(isa));
    }
  }
  set_active_cpu_isa(before);
}

// Run in a process of its own, where nothing has chosen yet.
void report_choice_for(const char* wanted) {
  setenv("PHASEKV_CPU_ISA", wanted, 1);
  try {
    std::cerr << "chosen: " << name_of(active_cpu_isa()) << "\n";
  } catch (const Error& error) {
    std::cerr << "refused: " << error.what() << "\n";
  }
  std::exit(0);
}

TEST(DispatchDeathTest, TheEnvironmentChooses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const testing::ExitedWithCode succeeded(0);
  EXPECT_EXIT(report_choice_for("scalar"), succeeded, "chosen: scalar");
  EXPECT_EXIT(report_choice_for(""), succeeded, "chosen: ");
  EXPECT_EXIT(report_choice_for("mmx"), succeeded, "refused: PHASEKV_CPU_ISA = mmx");
  const std::vector<CpuIsa> supported = supported_cpu_isas();
  if (supported.back() != CpuIsa::avx512_bf16) {
    EXPECT_EXIT(report_choice_for("avx512bf16"), succeeded,
                "refused: PHASEKV_CPU_ISA = avx512bf16 is not available");
  }
}

}  // namespace
}  // namespace phasekv
