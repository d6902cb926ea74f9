#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "phasekv/cpu.h"
#include "phasekv/error.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

std::vector<std::string> supported() {
  std::vector<std::string> names;
  for (const CpuIsa isa : supported_cpu_isas()) names.emplace_back(name_of(isa));
  return names;
}

std::string active() { return std::string(name_of(active_cpu_isa())); }

void set_active(const std::string& name) {
  for (const CpuIsa isa : {CpuIsa::scalar, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16}) {
    if (name_of(isa) == name) {
      set_active_cpu_isa(isa);
      return;
    }
  }
  throw Error(ErrorCode::invalid_argument, "name", name, "one of scalar, avx2, avx512, avx512bf16");
}

}  // namespace

void register_cpu(py::module_& module) {
  module.def("supported_cpu_isas", &supported,
             "Instruction sets that this processor can run, slowest first.");
  module.def("active_cpu_isa", &active, "The instruction set whose kernels run.");
  module.def("set_active_cpu_isa", &set_active, py::arg("name"),
             "Switch to another supported instruction set, while no op runs.");
}

}  // namespace phasekv::bindings
