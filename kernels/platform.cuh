// The machine that a kernel runs on: a GPU, or the emulation of one in tests/cuda_emulation. The
// only file that knows which. Everything else in kernels/ is compiled unchanged for both.
#pragma once

#include <cstdint>

#if defined(PHASEKV_CUDA_EMULATION)

#include "emulated_device.h"

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace phasekv::cuda {

// The block's dynamic shared memory. Whoever launches says how much there is.
__device__ inline unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(128) unsigned char phasekv_dynamic_shared[];
  return phasekv_dynamic_shared;
}

// 16 bytes from global to shared memory, or 16 zeros without a look at `global`. They are there
// once the thread has waited for the group that they were committed to.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Everything copied since the last call becomes a group.
__device__ inline void commit_async_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all of this thread's groups but the last kPending. Other threads see the copies after a
// barrier.
template <int kPending>
__device__ inline void wait_async_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ldmatrix.x4: four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 m + r names row r
// of matrix m, 16 bytes aligned to 16. Register m then holds elements (lane / 4, 2 (lane % 4)) and
// (lane / 4, 2 (lane % 4) + 1) of matrix m, or of its transpose.
template <bool kTransposed>
__device__ inline void load_matrix(uint32_t (&registers)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
  }
}

// d [16 x 8] += a [16 x 16] b [16 x 8] on the tensor cores: 16-bit products, float32 sums. With
// g = lane / 4 and t = lane % 4 a lane holds
//   a       rows g and g + 8 of columns 2t, 2t + 1 (registers 0, 1) and 2t + 8, 2t + 9 (2, 3)
//   b0, b1  column g of rows 2t, 2t + 1 and of rows 2t + 8, 2t + 9
//   d       columns 2t, 2t + 1 of rows g (0, 1) and g + 8 (2, 3)
template <typename T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);

template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace phasekv::cuda

#endif

namespace phasekv::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

}  // namespace phasekv::cuda
