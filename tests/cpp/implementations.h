// The implementations that every op is tested in, which depend on the program that the tests are
// linked into: one per instruction set, run by this processor or emulated, or skipped for a reason
// that the test output tells; or one per thread order of the emulated CUDA kernels.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "cpu/kernel_table.h"

namespace phasekv {

struct Implementation {
  std::string name;
  std::string how;                            // "native", "emulated", or why it is skipped
  const cpu::KernelTable* kernels = nullptr;  // null: skipped
};

// All of them, whether they can be tested here or not.
const std::vector<Implementation>& implementations();

void PrintTo(const Implementation& implementation, std::ostream* stream);

// A test of an op in each implementation: TEST_P(Fixture, Name) with a Fixture derived from this
// and PHASEKV_FOR_EACH_IMPLEMENTATION(Fixture).
class ImplementationTest : public testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override;
  void TearDown() override;

 private:
  int threads_ = 1;
};

std::string test_name(const testing::TestParamInfo<Implementation>& info);

#define PHASEKV_FOR_EACH_IMPLEMENTATION(Fixture)                                           \
  INSTANTIATE_TEST_SUITE_P(Each, Fixture, testing::ValuesIn(::phasekv::implementations()), \
                           ::phasekv::test_name)

}  // namespace phasekv
