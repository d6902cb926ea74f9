// Rope: frequencies and pairing, as the ops take them from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "op_call.h"
#include "phasekv/rope.h"

namespace phasekv::bindings {

class Rope {
 public:
  Rope(std::vector<double> frequencies, int64_t rotary_dim, const std::string& pairing);

  // The same rotation for tensors on a device: `frequencies` is float64 [rotary_dim / 2] there. Its
  // memory is kept.
  Rope on(const pybind11::object& frequencies) const;

  // Valid as long as this object. With a call, for the device of its tensors.
  RopeView view(OpCall* call = nullptr) const;
  const std::vector<double>& frequencies() const { return frequencies_; }
  int64_t rotary_dim() const { return rotary_dim_; }
  RopePairing pairing() const { return pairing_; }

 private:
  std::vector<double> frequencies_;
  int64_t rotary_dim_;
  RopePairing pairing_;
  pybind11::object placed_;
  const double* placed_frequencies_ = nullptr;  // of placed_
  std::string device_ = "cpu";
};

RopePairing parse_pairing(const std::string& name);
const char* name_of(RopePairing pairing);

// None gives a view of nothing, for ops that were asked for no rotation.
inline RopeView view_of(const Rope* rope, OpCall* call) {
  return rope == nullptr ? RopeView{} : rope->view(call);
}

}  // namespace phasekv::bindings
