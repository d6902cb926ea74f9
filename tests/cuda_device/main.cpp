// The tests of the kernels on the first device. Where there is none the program ends with
// kWithoutDevice, which is neither success nor failure.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "memory_of_tests.h"

namespace {

constexpr int kWithoutDevice = 77;

// Threads of the host do not touch a kernel, and what is mapped for a guard page is not pinned.
constexpr const char* kTests =
    "*/device*:-*.ThreadsDoNotMatter/*:*/GuardedMemory.*:*/HugeOffsets.*:*.OffsetsBeyond32Bits/*";

class PinnedMemoryInTests : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& /*test*/) override {
    phasekv::give_pinned_memory(true);
  }
  void OnTestEnd(const testing::TestInfo& /*test*/) override { phasekv::give_pinned_memory(false); }
};

}  // namespace

int main(int argc, char** argv) {
  GTEST_FLAG_SET(filter, kTests);
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  const char* reason = phasekv::reason_without_device();
  if (reason != nullptr && !GTEST_FLAG_GET(list_tests)) {
    std::fprintf(stderr, "skipped: %s\n", reason);
    return kWithoutDevice;
  }
  tests.listeners().Append(new PinnedMemoryInTests);
  const int status = RUN_ALL_TESTS();
  if (status == 0 && tests.successful_test_count() == 0 && !GTEST_FLAG_GET(list_tests)) {
    std::fprintf(stderr, "no test has run\n");
    return 1;
  }
  return status;
}
