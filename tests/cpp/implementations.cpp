#include "implementations.h"

#include <omp.h>

#include "dispatch.h"

namespace phasekv {

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

std::string test_name(const testing::TestParamInfo<Implementation>& info) {
  const bool is_skipped = info.param.kernels == nullptr;
  return info.param.name + "_" + (is_skipped ? "skipped" : info.param.how);
}

}  // namespace phasekv
