// A paged cache from Python, with the device that it lies on.
#pragma once

#include <string>

#include "op_call.h"
#include "phasekv/layout.h"
#include "phasekv/tensor.h"

namespace phasekv::bindings {

struct PlacedView {
  PagedView view;
  std::string device = "cpu";

  const PagedView& in(OpCall& call, const char* argument) const {
    call.place(argument, device);
    return view;
  }
};

struct PlacedKV {
  PagedKV kv;
  std::string device = "cpu";

  const PagedKV& in(OpCall& call, const char* argument) const {
    call.place(argument, device);
    return kv;
  }
  // For what runs on the CPU only. Throws invalid_argument for a cache on a device.
  const PagedKV& on_cpu(const char* argument) const;
};

}  // namespace phasekv::bindings
