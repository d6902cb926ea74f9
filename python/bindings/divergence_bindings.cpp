#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/divergence.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void compute(const py::handle& fresh, const py::handle& cached, const py::handle& out,
             const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("fresh", fresh, &call);
  const DivergenceParams params = {.fresh = view,
                                   .cached = rows_of("cached", cached, &call),
                                   .out = float_tensor("out", out, {view.tokens}, &call)};
  call.run([&] { divergence(params); }, [&](cuda::Stream on) { cuda::divergence(params, on); });
}

}  // namespace

void register_divergence(py::module_& module) {
  module.def("divergence", &compute, py::kw_only(), py::arg("fresh"), py::arg("cached"),
             py::arg("out"), py::arg("stream") = py::none(),
             "Squared distance per token of fresh and cached [T, H, D] into out (float32 [T]).");
}

}  // namespace phasekv::bindings
