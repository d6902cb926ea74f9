// Rope: frequencies and pairing, as the ops take them from Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phasekv/rope.h"

namespace phasekv::bindings {

class Rope {
 public:
  Rope(std::vector<double> frequencies, int64_t rotary_dim, const std::string& pairing);

  // Valid as long as this object.
  RopeView view() const {
    return {.frequencies = frequencies_.data(), .rotary_dim = rotary_dim_, .pairing = pairing_};
  }
  const std::vector<double>& frequencies() const { return frequencies_; }
  int64_t rotary_dim() const { return rotary_dim_; }
  RopePairing pairing() const { return pairing_; }

 private:
  std::vector<double> frequencies_;
  int64_t rotary_dim_;
  RopePairing pairing_;
};

RopePairing parse_pairing(const std::string& name);
const char* name_of(RopePairing pairing);

// None gives a view of nothing, for ops that were asked for no rotation.
inline RopeView view_of(const Rope* rope) { return rope == nullptr ? RopeView{} : rope->view(); }

}  // namespace phasekv::bindings
