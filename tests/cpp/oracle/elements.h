// Elements of each type as numbers, by the definition of the formats.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "phasekv/tensor.h"

namespace phasekv::oracle {

// What each of the 65,536 elements of a 16-bit type stands for.
const double* numbers_of_halves(DataType dtype);

// The number an element's bits stand for, and the bits of the nearest one (ties to even).
inline double decode(uint32_t bits, DataType dtype) {
  return dtype == DataType::float32 ? std::bit_cast<float>(bits) : numbers_of_halves(dtype)[bits];
}
uint32_t encode(double x, DataType dtype);

inline uint32_t load_bits(const void* data, DataType dtype, int64_t index) {
  if (dtype == DataType::float32) {
    uint32_t bits;
    std::memcpy(&bits, static_cast<const char*>(data) + 4 * index, 4);
    return bits;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(data) + 2 * index, 2);
  return bits;
}

inline void store_bits(void* data, DataType dtype, int64_t index, uint32_t bits) {
  if (dtype == DataType::float32) {
    std::memcpy(static_cast<char*>(data) + 4 * index, &bits, 4);
    return;
  }
  const auto half = static_cast<uint16_t>(bits);
  std::memcpy(static_cast<char*>(data) + 2 * index, &half, 2);
}

inline double load(const void* data, DataType dtype, int64_t index) {
  return decode(load_bits(data, dtype, index), dtype);
}

// Half the distance between `x` and the next number of the type.
double half_unit(double x, DataType dtype);

}  // namespace phasekv::oracle
