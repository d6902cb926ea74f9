// The emulated device against the definition of what it emulates.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "elements.cuh"
#include "launch.cuh"
#include "oracle/elements.h"
#include "streams.h"
#include "thread_orders.h"
#include "warp.cuh"

namespace phasekv::cuda {
namespace {

template <typename T>
constexpr DataType kDataTypeOf = std::is_same_v<T, __half> ? DataType::float16 : DataType::bfloat16;

template <typename T>
T element_of(double x) {
  return T{static_cast<uint16_t>(oracle::encode(x, kDataTypeOf<T>))};
}

template <typename T>
class Half : public testing::Test {};
using Halves = testing::Types<__nv_bfloat16, __half>;
TYPED_TEST_SUITE(Half, Halves);

TYPED_TEST(Half, ConversionsRoundToTheNearest) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double exact = oracle::decode(bits, kDataTypeOf<TypeParam>);
    const float converted = to_float(TypeParam{static_cast<uint16_t>(bits)});
    ASSERT_TRUE(converted == exact || (std::isnan(converted) && std::isnan(exact))) << bits;
  }
  std::mt19937 generator(1);
  for (int i = 0; i < 100000; ++i) {
    const auto bits = static_cast<uint32_t>(generator());
    const float x = std::bit_cast<float>(bits);
    const uint32_t expected = oracle::encode(x, kDataTypeOf<TypeParam>);
    const uint16_t actual = from_float<TypeParam>(x).bits;
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(to_float(TypeParam{actual})));
    } else {
      ASSERT_EQ(actual, expected) << x;
    }
  }
}

// d [16][8] = c + a [16][16] b [16][8], through ldmatrix and mma as the kernels use them.
template <typename T>
__global__ void multiply(const T* a, const T* b, const float* c, float* d) {
  const int lane = static_cast<int>(threadIdx.x);
  T* shared = reinterpret_cast<T*>(dynamic_shared_memory());
  for (int i = lane; i < 256; i += kWarpSize) shared[i] = a[i];
  for (int i = lane; i < 128; i += kWarpSize) shared[256 + i] = b[i];
  __syncwarp();
  // Of a, four matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
  uint32_t left[4];
  load_matrix<false>(left, shared + lane % 16 * 16 + lane / 16 * 8);
  // Of b, two: rows 0-7 and 8-15, transposed; the other two are the same again.
  uint32_t right[4];
  load_matrix<true>(right, shared + 256 + lane % 16 * 8);
  float sums[4];
  const int row = lane / 4;
  const int column = 2 * (lane % 4);
  for (int i = 0; i < 4; ++i) sums[i] = c[(row + i / 2 * 8) * 8 + column + i % 2];
  mma_m16n8k16<T>(sums, left, right[0], right[1]);
  for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + column + i % 2] = sums[i];
}

TYPED_TEST(Half, TensorCoresMultiplyMatrices) {
  std::mt19937 generator(3);
  std::normal_distribution<double> normal;
  std::vector<TypeParam> a(256);
  std::vector<TypeParam> b(128);
  std::vector<float> c(128);
  for (TypeParam& x : a) x = element_of<TypeParam>(normal(generator));
  for (TypeParam& x : b) x = element_of<TypeParam>(normal(generator));
  for (float& x : c) x = static_cast<float>(normal(generator));
  for (const auto& [name, order] : emulation::kThreadOrders) {
    emulation::set_thread_order(order);
    std::vector<float> d(128);
    const int64_t before = emulation::mma_count();
    launch(multiply<TypeParam>, dim3(1), 32, 384 * 2, nullptr, a.data(), b.data(), c.data(),
           d.data());
    EXPECT_EQ(emulation::mma_count(), before + 1);
    for (size_t row = 0; row < 16; ++row) {
      for (size_t column = 0; column < 8; ++column) {
        double expected = c[row * 8 + column];
        for (size_t k = 0; k < 16; ++k) {
          expected += double{to_float(a[row * 16 + k])} * double{to_float(b[k * 8 + column])};
        }
        ASSERT_NEAR(d[row * 8 + column], expected, 3e-6) << name;
      }
    }
  }
}

// Rows of shared memory, plain and transposed.
__global__ void load_matrices(uint32_t* plain, uint32_t* transposed) {
  const unsigned lane = threadIdx.x;
  auto* shared = reinterpret_cast<uint16_t*>(dynamic_shared_memory());
  for (unsigned i = 0; i < 8; ++i) shared[lane * 8 + i] = static_cast<uint16_t>(lane * 8 + i);
  __syncwarp();
  uint32_t registers[4];
  load_matrix<false>(registers, shared + lane * 8);
  for (unsigned i = 0; i < 4; ++i) plain[lane * 4 + i] = registers[i];
  load_matrix<true>(registers, shared + lane * 8);
  for (unsigned i = 0; i < 4; ++i) transposed[lane * 4 + i] = registers[i];
}

TEST(EmulatedDevice, LoadsMatrices) {
  std::vector<uint32_t> plain(128);
  std::vector<uint32_t> transposed(128);
  emulation::set_thread_order({});
  launch(load_matrices, dim3(1), 32, 512, nullptr, plain.data(), transposed.data());
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
      const uint32_t major = lane / 4;
      const uint32_t minor = 2 * (lane % 4);
      const auto at = [matrix](uint32_t row, uint32_t column) {
        return 64 * matrix + 8 * row + column;
      };
      EXPECT_EQ(plain[lane * 4 + matrix], at(major, minor) | at(major, minor + 1) << 16);
      EXPECT_EQ(transposed[lane * 4 + matrix], at(minor, major) | at(minor + 1, major) << 16);
    }
  }
}

// Each warp's lanes exchange in every way there is.
__global__ void shuffle_all_ways(int* out) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  int* own = out + threadIdx.x * 7;
  own[0] = __shfl_sync(kAllLanes, lane, 5);
  own[1] = __shfl_xor_sync(kAllLanes, lane, 6);
  own[2] = __shfl_up_sync(kAllLanes, lane, 3);
  own[3] = __shfl_down_sync(kAllLanes, lane, 3);
  own[4] = __shfl_sync(kAllLanes, lane, 2, 8);
  own[5] = static_cast<int>(__ballot_sync(kAllLanes, lane % 3 == 0 ? 1 : 0));
  own[6] = static_cast<int>(warp_sum(static_cast<float>(lane)));
}

TEST(EmulatedDevice, Shuffles) {
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; lane += 3) ballot |= 1U << lane;
  for (const auto& [name, order] : emulation::kThreadOrders) {
    emulation::set_thread_order(order);
    std::vector<int> out(64 * 7);
    launch(shuffle_all_ways, dim3(1), 64, 0, nullptr, out.data());
    for (int thread = 0; thread < 64; ++thread) {
      const int lane = thread % 32;
      const std::vector<int> expected = {5,
                                         lane ^ 6,
                                         lane < 3 ? lane : lane - 3,
                                         lane + 3 > 31 ? lane : lane + 3,
                                         lane / 8 * 8 + 2,
                                         static_cast<int>(ballot),
                                         496};
      const auto begin = out.begin() + thread * 7;
      EXPECT_EQ(std::vector<int>(begin, begin + 7), expected) << name << " thread " << thread;
    }
  }
}

__global__ void write_coordinates(unsigned* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  out[block * blockDim.x + threadIdx.x] = 1 + block * blockDim.x + threadIdx.x;
}

struct Destination {
  int64_t before;
  unsigned* out;
};
__global__ void write_one(Destination destination) { *destination.out = 1; }

TEST(EmulatedDevice, OnlyTheHeapMayBeADevicesMemoryToo) {
  static unsigned in_program = 0;
  // Sanitizers may have variables elsewhere.
  auto* on_stack = static_cast<unsigned*>(__builtin_frame_address(0));
  std::vector<unsigned> on_heap = {0};
  const auto write = [](unsigned* out) {
    launch(write_one, dim3(1), 1, 0, nullptr, Destination{.before = 7, .out = out});
  };
  emulation::allow_host_memory(emulation::HostMemory::heap);
  EXPECT_THROW(write(&in_program), emulation::Error);
  EXPECT_THROW(write(on_stack), emulation::Error);
  write(on_heap.data());
  EXPECT_EQ(in_program, 0U);
  EXPECT_EQ(on_heap[0], 1U);
  emulation::allow_host_memory(emulation::HostMemory::none);
  EXPECT_THROW(write(on_heap.data()), emulation::Error);
  emulation::allow_host_memory(emulation::HostMemory::any);
  write(&in_program);
  EXPECT_EQ(in_program, 1U);
}

TEST(EmulatedDevice, EveryThreadRunsOnce) {
  for (const auto& [name, order] : emulation::kThreadOrders) {
    emulation::set_thread_order(order);
    std::vector<unsigned> out(3 * 4 * 5 * 70);
    launch(write_coordinates, dim3(3, 4, 5), 70, 0, nullptr, out.data());
    for (unsigned i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i + 1) << name;
  }
}

}  // namespace
}  // namespace phasekv::cuda
