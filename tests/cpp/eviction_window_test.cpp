#include <gtest/gtest.h>

#include "phasekv/error.h"
#include "phasekv/eviction/window.h"

namespace phasekv::eviction {
namespace {

// The rule as the algorithm says it: walk token by token, and at every multiple of the stride cut
// what is held down to the budget.
int64_t start_by_walking(int64_t computed, int64_t budget, int64_t stride) {
  int64_t start = 0;
  for (int64_t n = 1; n <= computed; ++n) {
    if (n % stride == 0 && n - start > budget) start = n - budget;
  }
  return start;
}

TEST(Window, CutsToTheBudgetAtEveryMultipleOfTheStride) {
  for (const int64_t budget : {16, 32, 96}) {
    for (const int64_t stride : {16, 48}) {
      const Window window{.budget = budget, .stride = stride};
      for (int64_t n = 0; n < 400; ++n) {
        EXPECT_EQ(window.start(n), start_by_walking(n, budget, stride)) << n;
        EXPECT_LE(n - window.start(n), budget + stride - 1);
      }
    }
  }
}

TEST(Window, HoldsAPromptUntilItsEnd) {
  const Window plain{.budget = 32, .stride = 16};
  const Window held{.budget = 32, .stride = 16, .held_from = 70, .held_until = 150};
  for (int64_t n = 0; n < 300; ++n) {
    const bool is_prompt = 70 <= n && n < 150;
    EXPECT_EQ(held.start(n), plain.start(is_prompt ? 70 : n)) << n;
  }
}

TEST(Window, RefusesWhatDoesNotFit) {
  const auto refused = [](Window window, int64_t protected_tokens) {
    try {
      check_window(window, 16, protected_tokens);
    } catch (const Error& error) {
      return error.argument() + "=" + error.value();
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refused({.budget = 64, .stride = 16}, 64), "accepted");
  EXPECT_EQ(refused({.budget = 64, .stride = 16}, 65), "budget=64");
  EXPECT_EQ(refused({.budget = 65, .stride = 16}, 0), "budget=65");
  EXPECT_EQ(refused({.budget = 0, .stride = 16}, 0), "budget=0");
  EXPECT_EQ(refused({.budget = 64, .stride = 8}, 0), "stride=8");
}

}  // namespace
}  // namespace phasekv::eviction
