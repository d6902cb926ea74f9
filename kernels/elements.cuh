// Elements of the three storage types, and vectors of them that move in one instruction.
#pragma once

#include <cstdint>
#include <cstring>

#include "phasekv/tensor.h"
#include "platform.cuh"

namespace phasekv::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// What is moved at once: kBytes is 2, 4, 8 or 16.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <int kBytes>
using Word = typename WordOf<kBytes>::Type;

// kCount adjacent elements, which must be aligned to their size or to 16 bytes.
template <int kCount, typename T>
__device__ inline void load_vector(const T* from, float* to) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr int kWordBytes = kBytes < 16 ? kBytes : 16;
  constexpr int kPerWord = kWordBytes / static_cast<int>(sizeof(T));
  const auto* words = reinterpret_cast<const Word<kWordBytes>*>(from);
#pragma unroll
  for (int i = 0; i < kCount / kPerWord; ++i) {
    const Word<kWordBytes> word = words[i];
    T elements[kPerWord];
    memcpy(elements, &word, kWordBytes);
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) to[i * kPerWord + j] = to_float(elements[j]);
  }
}

template <int kCount, typename T>
__device__ inline void store_vector(const float* from, T* to) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  constexpr int kWordBytes = kBytes < 16 ? kBytes : 16;
  constexpr int kPerWord = kWordBytes / static_cast<int>(sizeof(T));
  auto* words = reinterpret_cast<Word<kWordBytes>*>(to);
#pragma unroll
  for (int i = 0; i < kCount / kPerWord; ++i) {
    T elements[kPerWord];
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) elements[j] = from_float<T>(from[i * kPerWord + j]);
    Word<kWordBytes> word;
    memcpy(&word, elements, kWordBytes);
    words[i] = word;
  }
}

// The same at `data + offset` elements of a dtype that all threads share.
template <int kCount>
__device__ inline void load_vector(const void* data, DataType dtype, int64_t offset, float* to) {
  if (dtype == DataType::float32) {
    load_vector<kCount>(static_cast<const float*>(data) + offset, to);
  } else if (dtype == DataType::bfloat16) {
    load_vector<kCount>(static_cast<const __nv_bfloat16*>(data) + offset, to);
  } else {
    load_vector<kCount>(static_cast<const __half*>(data) + offset, to);
  }
}

__device__ inline float load_element(const void* data, DataType dtype, int64_t offset) {
  float x;
  load_vector<1>(data, dtype, offset, &x);
  return x;
}

template <int kCount>
__device__ inline void store_vector(const float* from, void* data, DataType dtype, int64_t offset) {
  if (dtype == DataType::float32) {
    store_vector<kCount>(from, static_cast<float*>(data) + offset);
  } else if (dtype == DataType::bfloat16) {
    store_vector<kCount>(from, static_cast<__nv_bfloat16*>(data) + offset);
  } else {
    store_vector<kCount>(from, static_cast<__half*>(data) + offset);
  }
}

}  // namespace phasekv::cuda
