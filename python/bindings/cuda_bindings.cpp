#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/cuda.h"

namespace py = pybind11;

namespace phasekv::bindings {

void register_cuda(py::module_& module) {
  module.def("cuda_is_built", &cuda::is_built, "Whether this module has the CUDA kernels.");
  module.def("check_cuda_device", &cuda::check_device, py::arg("index"),
             "Raise MissingCapabilityError, saying what is missing, unless kernels can run on the "
             "device.");
}

}  // namespace phasekv::bindings
