// Lists on their way to an emulated device and answers on their way back.
#include "round_trips.cuh"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "kernel_calls.h"
#include "phasekv/error.h"
#include "streams.h"

namespace phasekv::cuda {
namespace {

class RoundTrip : public testing::Test {
 protected:
  // A list that comes back as it went.
  struct Echo {
    Echo(RoundTrips* trips, size_t floats, float first) : sent(floats), answer(floats, -1.0F) {
      std::iota(sent.begin(), sent.end(), first);
      std::vector<float> list = sent;
      const auto [room, there] = trips->send(nullptr, 0, std::span<const float>(list));
      trips->bring(there, answer.data(), static_cast<int64_t>(floats), nullptr);
      list.assign(floats, -2.0F);
    }

    std::vector<float> sent;
    std::vector<float> answer;
  };

  std::shared_ptr<void> device_ = device_setups().front()();
  RoundTrips trips_;
};

TEST_F(RoundTrip, AnswersComeWithTheWait) {
  const Echo first(&trips_, 7, 1.0F);
  const Echo second(&trips_, 100, 50.0F);
  EXPECT_EQ(first.answer, std::vector<float>(7, -1.0F));
  const emulation::Costs before = emulation::costs();
  trips_.wait(nullptr);
  EXPECT_EQ(first.answer, first.sent);
  EXPECT_EQ(second.answer, second.sent);
  EXPECT_EQ(emulation::costs().waits, before.waits + 1);
  trips_.wait(nullptr);
  EXPECT_EQ(emulation::costs().waits, before.waits + 1);
}

// 5 MiB, in memory that begins with one and doubles until it is large enough.
TEST_F(RoundTrip, AnswersThatDoNotFitComeEarlier) {
  for (const int64_t most_waits : {20, 20, 1}) {
    const emulation::Costs before = emulation::costs();
    std::vector<std::unique_ptr<Echo>> echoes;
    for (int i = 0; i < 20; ++i) {
      echoes.push_back(std::make_unique<Echo>(&trips_, size_t{1} << 16, static_cast<float>(i)));
    }
    trips_.wait(nullptr);
    for (const auto& echo : echoes) ASSERT_EQ(echo->answer, echo->sent);
    EXPECT_LE(emulation::costs().waits, before.waits + most_waits);
  }
}

TEST_F(RoundTrip, AListMayBeLargerThanTheMemoryEverGrows) {
  const Echo small(&trips_, 3, 1.0F);
  const Echo large(&trips_, (size_t{1} << 24) + 1, 0.0F);
  const Echo next(&trips_, 3, 2.0F);
  trips_.wait(nullptr);
  EXPECT_EQ(small.answer, small.sent);
  EXPECT_EQ(large.answer, large.sent);
  EXPECT_EQ(next.answer, next.sent);
}

TEST_F(RoundTrip, WhatIsForgottenDoesNotCome) {
  const Echo forgotten(&trips_, 7, 1.0F);
  trips_.forget();
  const Echo kept(&trips_, 7, 9.0F);
  trips_.wait(nullptr);
  EXPECT_EQ(forgotten.answer, std::vector<float>(7, -1.0F));
  EXPECT_EQ(kept.answer, kept.sent);
}

// On either side, at first and where the memory must grow.
TEST_F(RoundTrip, WithoutMemoryACallIsRefusedAndTheNextOneWorks) {
  for (const size_t floats : {size_t{7}, size_t{1} << 19}) {
    for (const int64_t others : {0, 1}) {
      RoundTrips trips;
      if (floats > 7) {
        const Echo first(&trips, 7, 1.0F);
        trips.wait(nullptr);
      }
      emulation::fail_allocation_after(others);
      EXPECT_THROW(Echo(&trips, floats, 2.0F), Error);
      const Echo next(&trips, 7, 3.0F);
      trips.wait(nullptr);
      EXPECT_EQ(next.answer, next.sent);
    }
  }
}

TEST_F(RoundTrip, AnEmptyListIsNull) {
  const auto [room, none, one] = trips_.send(nullptr, 2, std::span<const int64_t>(),
                                             std::span<const int32_t>(std::vector<int32_t>{4}));
  EXPECT_NE(room, nullptr);
  EXPECT_EQ(none, nullptr);
  EXPECT_NE(one, nullptr);
}

}  // namespace
}  // namespace phasekv::cuda
