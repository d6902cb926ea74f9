// Typed access to RowsView, and the choice of a type for a DataType.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/storage.h"
#include "phasekv/tensor.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

template <typename T>
inline T* row_of(const RowsView& rows, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

template <typename T>
struct TypeTag {
  using Type = T;
};

// function(TypeTag<T>{}) with the T that `dtype` is stored as.
template <typename Function>
inline void with_type(DataType dtype, const Function& function) {
  switch (dtype) {
    case DataType::float32:
      return function(TypeTag<float>{});
    case DataType::bfloat16:
      return function(TypeTag<BFloat16>{});
    case DataType::float16:
      return function(TypeTag<Float16>{});
  }
}

// The same for code that only moves elements.
template <typename Function>
inline void with_bits_type(DataType dtype, const Function& function) {
  if (dtype == DataType::float32) return function(TypeTag<float>{});
  return function(TypeTag<Bits16>{});
}

template <typename Function>
inline void with_types(DataType first, DataType second, const Function& function) {
  with_type(first, [&](auto first_tag) {
    with_type(second, [&](auto second_tag) { function(first_tag, second_tag); });
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
