#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/divergence.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void compute(const py::handle& fresh, const py::handle& cached, const py::handle& out) {
  const RowsView view = rows_of("fresh", fresh);
  const DivergenceParams params = {.fresh = view,
                                   .cached = rows_of("cached", cached),
                                   .out = float_tensor("out", out, {view.tokens})};
  const py::gil_scoped_release release;
  divergence(params);
}

}  // namespace

void register_divergence(py::module_& module) {
  module.def("divergence", &compute, py::kw_only(), py::arg("fresh"), py::arg("cached"),
             py::arg("out"),
             "Squared distance per token of fresh and cached [T, H, D] into out (float32 [T]).");
}

}  // namespace phasekv::bindings
