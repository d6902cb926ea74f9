#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/rotate_keys.h"
#include "rope_bindings.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void rotate(const py::handle& keys, const py::handle& deltas, const Rope& rope,
            const py::handle& out, const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("keys", keys, &call);
  const RotateKeysParams params = {.keys = view,
                                   .deltas = int64_list_of("deltas", deltas, view.tokens, &call),
                                   .rope = rope.view(&call),
                                   .out = rows_of("out", out, &call)};
  call.run([&] { rotate_keys(params); }, [&](cuda::Stream on) { cuda::rotate_keys(params, on); });
}

}  // namespace

void register_rotate_keys(py::module_& module) {
  module.def("rotate_keys", &rotate, py::kw_only(), py::arg("keys"), py::arg("deltas"),
             py::arg("rope"), py::arg("out"), py::arg("stream") = py::none(),
             "Move keys [T, H, D] by deltas (int64 [T], positions) into out, which may be keys.");
}

}  // namespace phasekv::bindings
