// A test of the tests: kernels with a planted bug are caught by the emulation, in one of the thread
// orders at least, and the same kernels without the bug are not.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch.cuh"
#include "thread_orders.h"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 64;
constexpr unsigned kBlocks = 2;

// What went wrong in each order: an error of the emulation, or wrong numbers; nothing where it
// passed.
using Outcomes = std::vector<std::optional<std::string>>;

constexpr const char* kWrong = "wrong numbers";

Outcomes outcomes_of(void (*kernel)(int*), size_t shared_bytes,
                     const std::function<int(int thread)>& expected, unsigned threads = kThreads) {
  Outcomes outcomes;
  for (const auto& [name, order] : emulation::kThreadOrders) {
    emulation::set_thread_order(order);
    std::vector<int> out(size_t{kBlocks} * threads, -1);
    std::optional<std::string> outcome;
    try {
      launch(kernel, dim3(kBlocks), threads, shared_bytes, nullptr, out.data());
      for (size_t i = 0; i < out.size(); ++i) {
        if (out[i] != expected(static_cast<int>(i % threads))) outcome = kWrong;
      }
    } catch (const emulation::Error& error) {
      outcome = error.what();
    }
    outcomes.push_back(outcome);
  }
  return outcomes;
}

void expect_fine(const Outcomes& outcomes) {
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.value_or("fine"), "fine");
}

// In some order at least.
void expect_caught(const Outcomes& outcomes, const std::string& part) {
  int caught = 0;
  for (const auto& outcome : outcomes) {
    if (outcome.has_value() && outcome->find(part) != std::string::npos) ++caught;
  }
  EXPECT_GT(caught, 0) << "no order showed: " << part;
}

// In each of them.
void expect_always_caught(const Outcomes& outcomes, const std::string& part) {
  for (const auto& outcome : outcomes) {
    EXPECT_NE(outcome.value_or("fine").find(part), std::string::npos) << outcome.value_or("fine");
  }
}

int* shared_ints() { return reinterpret_cast<int*>(dynamic_shared_memory()); }
int& result(int* out) { return out[blockIdx.x * blockDim.x + threadIdx.x]; }
int thread() { return static_cast<int>(threadIdx.x); }

// Thread 0 writes, all read.
template <bool kBarrier>
__global__ void broadcast(int* out) {
  if (threadIdx.x == 0) shared_ints()[0] = 42;
  if (kBarrier) __syncthreads();
  result(out) = shared_ints()[0];
}

TEST(PlantedBugs, MissingBarrier) {
  const auto expected = [](int) { return 42; };
  expect_fine(outcomes_of(broadcast<true>, sizeof(int), expected));
  const Outcomes outcomes = outcomes_of(broadcast<false>, sizeof(int), expected);
  EXPECT_FALSE(outcomes[0].has_value());  // which is why there are other orders
  expect_caught(outcomes, kWrong);
}

// Threads write an array again that others may not have read yet.
template <bool kBarrier>
__global__ void rotate_twice(int* out) {
  int sum = 0;
  for (int round = 0; round < 2; ++round) {
    shared_ints()[threadIdx.x] = thread() + round;
    __syncthreads();
    sum += shared_ints()[(threadIdx.x + 1) % kThreads];
    if (kBarrier) __syncthreads();
  }
  result(out) = sum;
}

TEST(PlantedBugs, WriteAfterRead) {
  const auto expected = [](int i) { return 2 * ((i + 1) % static_cast<int>(kThreads)) + 1; };
  expect_fine(outcomes_of(rotate_twice<true>, kThreads * sizeof(int), expected));
  expect_caught(outcomes_of(rotate_twice<false>, kThreads * sizeof(int), expected), kWrong);
}

// Lanes of a warp exchange through shared memory.
template <bool kSynchronized>
__global__ void swap_in_warp(int* out) {
  shared_ints()[threadIdx.x] = 7 * thread();
  if (kSynchronized) __syncwarp();
  result(out) = shared_ints()[threadIdx.x ^ 1U];
}

TEST(PlantedBugs, MissingSyncwarp) {
  const auto expected = [](int i) { return 7 * (i ^ 1); };
  expect_fine(outcomes_of(swap_in_warp<true>, kThreads * sizeof(int), expected));
  expect_caught(outcomes_of(swap_in_warp<false>, kThreads * sizeof(int), expected), kWrong);
}

template <int kBeyond>
__global__ void write_shared(int* out) {
  shared_ints()[thread() + kBeyond] = 1;
  result(out) = 1;
}

template <int kBeyond>
__global__ void read_written_shared(int* out) {
  shared_ints()[thread()] = 0;
  __syncthreads();
  result(out) = shared_ints()[thread() + kBeyond];
}

TEST(PlantedBugs, OutOfBounds) {
  const auto expected = [](int) { return 1; };
  expect_fine(outcomes_of(write_shared<0>, kThreads * sizeof(int), expected));
  expect_always_caught(outcomes_of(write_shared<1>, kThreads * sizeof(int), expected),
                       "outside the dynamic shared memory");
  expect_always_caught(outcomes_of(write_shared<-1>, kThreads * sizeof(int), expected),
                       "outside the dynamic shared memory");
  const auto zero = [](int) { return 0; };
  expect_fine(outcomes_of(read_written_shared<0>, kThreads * sizeof(int), zero));
  expect_caught(outcomes_of(read_written_shared<1>, kThreads * sizeof(int), zero), kWrong);
}

// What nobody has written is not a number.
__global__ void read_shared(int* out) { result(out) = shared_ints()[threadIdx.x]; }

TEST(PlantedBugs, ReadBeforeWrite) {
  expect_fine(outcomes_of(read_shared, kThreads * sizeof(int), [](int) { return -1; }));
}

template <bool kDivergent>
__global__ void barrier_in_branch(int* out) {
  if (kDivergent && threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  result(out) = 1;
}

template <bool kDivergent>
__global__ void barrier_after_exit(int* out) {
  result(out) = 1;
  if (kDivergent && threadIdx.x == 5) return;
  __syncthreads();
}

TEST(PlantedBugs, DivergentBarrier) {
  const auto expected = [](int) { return 1; };
  expect_fine(outcomes_of(barrier_in_branch<false>, 0, expected));
  expect_always_caught(outcomes_of(barrier_in_branch<true>, 0, expected), "divergent barrier");
  expect_fine(outcomes_of(barrier_after_exit<false>, 0, expected));
  expect_always_caught(outcomes_of(barrier_after_exit<true>, 0, expected), "have exited");
}

// A sum over the first `kLanes` lanes, with a mask.
template <unsigned kMask, int kLanes>
__global__ void sum_of_lanes(int* out) {
  int sum = 0;
  if (threadIdx.x % kWarpSize < kLanes) {
    sum = thread() % kWarpSize;
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kMask, sum, distance);
    }
  }
  result(out) = sum;
}

template <unsigned kMask>
__global__ void read_lane_20(int* out) {
  result(out) = (kMask >> (threadIdx.x % kWarpSize) & 1U) == 0
                    ? 20
                    : __shfl_sync(kMask, thread() % kWarpSize, 20);
}

TEST(PlantedBugs, WrongMask) {
  const auto expected = [](int i) { return i % 32 < 16 ? 120 : 0; };
  expect_fine(outcomes_of(sum_of_lanes<0x0000FFFFU, 16>, 0, expected));
  // Names lanes that do not come, does not name the caller, and names too few.
  expect_always_caught(outcomes_of(sum_of_lanes<0xFFFFFFFFU, 16>, 0, expected), "lane");
  expect_always_caught(outcomes_of(sum_of_lanes<0xFFFF0000U, 16>, 0, expected),
                       "is not in the mask");
  expect_always_caught(outcomes_of(sum_of_lanes<0x00000FFFU, 16>, 0, expected), "mask");
  expect_fine(outcomes_of(read_lane_20<0xFFFFFFFFU>, 0, [](int) { return 20; }));
  expect_always_caught(outcomes_of(read_lane_20<0x000FFFFFU>, 0, [](int) { return 20; }),
                       "not in its mask");
  // The second warp of 40 threads has 8 lanes.
  expect_always_caught(outcomes_of(
                           read_lane_20<0xFFFFFFFFU>, 0, [](int) { return 20; }, 40),
                       "the block does not have");
}

template <bool kSame>
__global__ void two_shuffles(int* out) {
  if (kSame || threadIdx.x % 2 == 0) {
    result(out) = __shfl_sync(kAllLanes, 3, 0);
  } else {
    result(out) = __shfl_sync(kAllLanes, 3, 0);
  }
}

TEST(PlantedBugs, LanesInDifferentCalls) {
  const auto expected = [](int) { return 3; };
  expect_fine(outcomes_of(two_shuffles<true>, 0, expected));
  expect_always_caught(outcomes_of(two_shuffles<false>, 0, expected), "different calls");
}

// Each thread copies 16 bytes of its own in each of two groups, and reads what the first brought.
template <bool kWaits>
__global__ void copy_through_shared(int* out) {
  alignas(16) static const int kSource[4] = {5, 6, 7, 8};
  int* own = shared_ints() + 8 * threadIdx.x;
  copy_async_16(own, kSource, true);
  commit_async_copies();
  copy_async_16(own + 4, kSource, false);
  commit_async_copies();
  if (kWaits) wait_async_copies<1>();
  result(out) = own[2];
  wait_async_copies<0>();
  if (own[6] != 0) result(out) = -2;
}

TEST(PlantedBugs, MissingWaitForACopy) {
  const auto expected = [](int) { return 7; };
  expect_fine(outcomes_of(copy_through_shared<true>, kThreads * 32, expected));
  expect_caught(outcomes_of(copy_through_shared<false>, kThreads * 32, expected), kWrong);
}

// A copy that its own thread has waited for, and others not.
template <bool kBarrier>
__global__ void copy_for_neighbour(int* out) {
  alignas(16) static const int kSource[4] = {5, 6, 7, 8};
  copy_async_16(shared_ints() + 4 * threadIdx.x, kSource, true);
  commit_async_copies();
  wait_async_copies<0>();
  if (kBarrier) __syncthreads();
  result(out) = shared_ints()[4 * ((threadIdx.x + 1) % kThreads) + 1];
}

TEST(PlantedBugs, MissingBarrierAfterACopy) {
  const auto expected = [](int) { return 6; };
  expect_fine(outcomes_of(copy_for_neighbour<true>, kThreads * 16, expected));
  expect_caught(outcomes_of(copy_for_neighbour<false>, kThreads * 16, expected), kWrong);
}

// A copy to where others still read, which is seen if it is made early.
template <bool kBarrier>
__global__ void copy_over_neighbour(int* out) {
  alignas(16) static const int kSource[4] = {5, 6, 7, 8};
  shared_ints()[4 * threadIdx.x] = thread();
  __syncthreads();
  const int read = shared_ints()[4 * ((threadIdx.x + 1) % kThreads)];
  if (kBarrier) __syncthreads();
  copy_async_16(shared_ints() + 4 * threadIdx.x, kSource, true);
  commit_async_copies();
  __syncthreads();
  wait_async_copies<0>();
  result(out) = read;
}

TEST(PlantedBugs, CopyBeforeTheReadersAreDone) {
  const auto expected = [](int i) { return (i + 1) % static_cast<int>(kThreads); };
  expect_fine(outcomes_of(copy_over_neighbour<true>, kThreads * 16, expected));
  const Outcomes outcomes = outcomes_of(copy_over_neighbour<false>, kThreads * 16, expected);
  EXPECT_FALSE(outcomes[0].has_value());  // copies are late there
  expect_caught(outcomes, kWrong);
}

// A copy that nobody waits for, to memory that is used again: it may arrive at any time.
template <bool kWait>
__global__ void copy_over_later_values(int* out) {
  alignas(16) static const int kSource[4] = {5, 6, 7, 8};
  copy_async_16(shared_ints() + 4 * threadIdx.x, kSource, true);
  commit_async_copies();
  if (kWait) wait_async_copies<0>();
  __syncthreads();
  shared_ints()[4 * threadIdx.x] = thread();
  __syncthreads();
  result(out) = shared_ints()[4 * threadIdx.x];
}

TEST(PlantedBugs, CopyThatNobodyWaitsFor) {
  const auto expected = [](int i) { return i; };
  expect_fine(outcomes_of(copy_over_later_values<true>, kThreads * 16, expected));
  const Outcomes outcomes = outcomes_of(copy_over_later_values<false>, kThreads * 16, expected);
  EXPECT_FALSE(outcomes[0].has_value());  // copies are made when somebody waits
  EXPECT_FALSE(outcomes[1].has_value());  // and at once
  expect_caught(outcomes, kWrong);
}

// A device answers with "misaligned address".
template <int kOffset>
__global__ void copy_misaligned(int* out) {
  alignas(16) static const int kSource[8] = {};
  copy_async_16(shared_ints() + 4 * threadIdx.x, kSource + kOffset, true);
  commit_async_copies();
  wait_async_copies<0>();
  result(out) = shared_ints()[4 * threadIdx.x];
}

template <int kOffset>
__global__ void load_misaligned(int* out) {
  uint32_t registers[4];
  shared_ints()[threadIdx.x] = 0;
  __syncthreads();
  load_matrix<false>(registers, shared_ints() + kOffset);
  result(out) = static_cast<int>(registers[0]);
}

TEST(PlantedBugs, MisalignedAddress) {
  const auto expected = [](int) { return 0; };
  expect_fine(outcomes_of(copy_misaligned<0>, kThreads * 16, expected));
  expect_always_caught(outcomes_of(copy_misaligned<2>, kThreads * 16, expected),
                       "a multiple of 16");
  expect_fine(outcomes_of(load_misaligned<4>, kThreads * sizeof(int), expected));
  expect_always_caught(outcomes_of(load_misaligned<1>, kThreads * sizeof(int), expected),
                       "a multiple of 16");
}

// The tensor cores take all lanes of a warp.
template <bool kAll>
__global__ void multiply_with_some_lanes(int* out) {
  float d[4] = {};
  const uint32_t a[4] = {};
  result(out) = 0;
  if (!kAll && threadIdx.x % kWarpSize == 3) return;
  mma_m16n8k16<__half>(d, a, 0, 0);
  result(out) = static_cast<int>(d[0]);
}

TEST(PlantedBugs, TensorCoresWithoutAllLanes) {
  const auto expected = [](int) { return 0; };
  expect_fine(outcomes_of(multiply_with_some_lanes<true>, 0, expected));
  expect_always_caught(outcomes_of(multiply_with_some_lanes<false>, 0, expected), "has exited");
}

// Blocks that hand each other something without an order between them.
template <bool kHandsOver>
__global__ void chain_of_blocks(int* out) {
  if (threadIdx.x > 0) {
    result(out) = 0;
  } else if (kHandsOver && blockIdx.x > 0) {
    result(out) = out[0] == 0 ? 0 : 1;
  } else {
    result(out) = 0;
  }
}

TEST(PlantedBugs, OrderOfBlocks) {
  const auto expected = [](int) { return 0; };
  expect_fine(outcomes_of(chain_of_blocks<false>, 0, expected));
  expect_caught(outcomes_of(chain_of_blocks<true>, 0, expected), kWrong);
}

__global__ void nothing(int*) {}

std::string refusal(dim3 grid, unsigned threads, size_t shared_bytes) {
  int out = 0;
  try {
    launch(nothing, grid, threads, shared_bytes, nullptr, &out);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(PlantedBugs, LimitsOfALaunch) {
  EXPECT_EQ(refusal(dim3(1), 1024, emulation::kMaxSharedBytes), "");
  EXPECT_NE(refusal(dim3(1), 1025, 0), "");
  EXPECT_NE(refusal(dim3(0), 32, 0), "");
  EXPECT_NE(refusal(dim3(1, 65536), 32, 0), "");
  EXPECT_NE(refusal(dim3(1, 1, 65536), 32, 0), "");
  const std::string refused = refusal(dim3(1), 32, emulation::kMaxSharedBytes + 1);
  EXPECT_NE(refused.find("101377 bytes of shared memory"), std::string::npos) << refused;
  EXPECT_NE(refused.find("the device has 101376 for a block"), std::string::npos) << refused;
  // More than 48 KiB must be asked for, which launch() does.
  cudaLaunchConfig_t config;
  config.dynamicSmemBytes = 48 * 1024 + 1;
  int out = 0;
  EXPECT_NE(cudaLaunchKernelEx(&config, read_shared, &out), cudaSuccess);
}

}  // namespace
}  // namespace phasekv::cuda
