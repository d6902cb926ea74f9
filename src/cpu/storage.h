// How the elements of a tensor are stored, as types that overloads can tell apart.
#pragma once

#include <cstdint>

namespace phasekv::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Sixteen bits that are moved and never interpreted (a copy keeps a NaN's payload).
struct Bits16 {
  uint16_t bits;
};

}  // namespace phasekv::cpu
