// Token ids from Python: int32 buffers, or any sequence of ints.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <vector>

namespace phasekv::bindings {

// Contiguous int32 tokens, copied only if the caller has them in another form. Throws Error for
// anything that is not a flat sequence of integers of 32 bits: NumPy would wrap large integers and
// cut floats silently.
class Tokens {
 public:
  explicit Tokens(const pybind11::object& tokens);

  std::span<const int32_t> span() const { return span_; }

 private:
  using Int32Array = pybind11::array_t<int32_t, pybind11::array::c_style>;

  Int32Array array_;
  std::vector<int32_t> copied_;
  std::span<const int32_t> span_;
};

}  // namespace phasekv::bindings
