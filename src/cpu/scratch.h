// Working memory of a kernel, float32, on cache lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "cpu/isa.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

class Scratch {
 public:
  // `parts` pieces (one per thread, say) of `floats` each. Not initialised.
  Scratch(int64_t parts, int64_t floats)
      : stride_((floats + kLine - 1) / kLine * kLine),
        data_(static_cast<float*>(
            ::operator new(static_cast<size_t>(parts * stride_) * sizeof(float), kAlignment))) {}
  ~Scratch() { ::operator delete(data_, kAlignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* part(int64_t i) const { return data_ + i * stride_; }

 private:
  static constexpr int64_t kLine = 16;
  static constexpr std::align_val_t kAlignment{64};

  int64_t stride_;
  float* data_;
};

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
